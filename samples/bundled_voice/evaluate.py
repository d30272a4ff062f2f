"""The figures of a bundled voice: is it understood, is it itself, does its pitch move, does it end.

    pip install ".[dev,convert]" && pip install -r tests/ear/requirements.txt
    pip install --no-deps resemblyzer==0.1.4 && pip install librosa webrtcvad-wheels
    python -m samples.bundled_voice.evaluate
    python -m samples.bundled_voice.evaluate ./bundle --sentences 20 --json figures.json
    python -m samples.bundled_voice.evaluate ./bundle-4bit --beside ./bundle
    python -m samples.bundled_voice.evaluate --source WORK/source --clips CLIPS

Prints one line per voice: word error rate by Whisper tiny.en (tests/ear), utterances that ended
by themselves, length against a line through the voice's lengths, speaker similarity within the
voice and to the nearest other, spread of the pitch within an utterance in semitones. With
--source, what the recipe's stage `source` has spoken, it adds how the voices' source says the
same sentences: words wrong, and the length of ours against its; and the correlation of the pitch
before and after the codec. With --clips, a folder of NAME.wav and NAME.txt, the similarity of
cloned speech to its clip and to the other clips, and of the nearest of the bundle's own voices to
the clip. With --beside it tells one thing alone, and without the recogniser: the similarity of
each voice to itself in another build.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import soundfile
import soxr
from tqdm import tqdm

from warble_mlx import Warble, WarbleError, load

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "tests"), str(ROOT / "samples")]

from ear.recogniser import Recogniser, why_missing  # noqa: E402
from ear.scoring import WordErrors, interval, rate, word_errors  # noqa: E402
from hearing import Row, Samples, Utterance, read, speak  # noqa: E402
from measure_wer import chosen, ratios, spread  # noqa: E402

RATE = 16_000
SOURCE_RATE = 24_000  # of Kokoro
SHORT = ["Yes.", "No.", "Good morning.", "Thank you.", "Stop!", "Turn left.", "Battery low.",
         "What happened?", "Very good.", "Not yet."]  # fmt: skip
WRITTEN = ["It is 7:45.", "The price is $12.50.", "Dr. Smith is here.", "That was in 1987.",
           "I paid $3.", "She scored 42 points.", "40% of it is gone.", "Meet me at 9 PM.",
           "It weighs 2.5 kg.", "Chapter 12."]  # fmt: skip


class Speakers:
    """Similarity of voices by Resemblyzer's encoder; `None` results where it is not installed."""

    def __init__(self) -> None:
        self.encoder: Any = None
        if importlib.util.find_spec("resemblyzer"):
            from resemblyzer import VoiceEncoder

            self.encoder = VoiceEncoder("cpu", verbose=False)

    def of(self, samples: Samples, rate_hz: int) -> npt.NDArray[np.float32] | None:
        """Unit vector of one clip; None if it is too short to tell."""
        if self.encoder is None or len(samples) < 1.2 * rate_hz:
            return None
        low = soxr.resample(samples, rate_hz, RATE).astype(np.float32)
        vector: npt.NDArray[np.float32] = self.encoder.embed_utterance(low)
        return vector


def pitch(samples: Samples, rate_hz: int) -> npt.NDArray[np.float64]:
    """Hertz every 10 ms by autocorrelation, 0 where unvoiced: [frames]."""
    low = soxr.resample(samples, rate_hz, RATE).astype(np.float64)
    window, hop = 640, 160
    if len(low) < 2 * window:
        return np.zeros(0)
    frames = np.lib.stride_tricks.sliding_window_view(low, window)[::hop]
    frames = frames - frames.mean(1, keepdims=True)
    spectrum = np.fft.rfft(frames * np.hanning(window), 2 * window)
    power = np.fft.irfft(np.abs(spectrum) ** 2)[:, :window]
    shape = np.fft.irfft(np.abs(np.fft.rfft(np.hanning(window), 2 * window)) ** 2)[:window]
    normal = power / (power[:, :1] + 1e-9) / (shape / shape[0] + 1e-3)
    first, last = RATE // 500, RATE // 60
    best = normal[:, first:last].argmax(1) + first
    strength = normal[np.arange(len(best)), best]
    loud = np.sqrt((frames**2).mean(1)) > 0.01
    hertz: npt.NDArray[np.float64] = np.where((strength > 0.55) & loud, RATE / best, 0.0)
    return hertz


def correlation(ours: npt.NDArray[np.float64], theirs: npt.NDArray[np.float64]) -> float | None:
    """Of the log pitch where both are voiced, octave errors left out."""
    count = min(len(ours), len(theirs))
    ours, theirs = ours[:count], theirs[:count]
    both = (ours > 0) & (theirs > 0)
    both &= np.abs(np.log2(np.where(both, ours, 1) / np.where(both, theirs, 1))) < 0.8
    if both.sum() < 20:
        return None
    return float(np.corrcoef(np.log(ours[both]), np.log(theirs[both]))[0, 1])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", help="bundle folder (default: bundled)")
    parser.add_argument("--sentences", default="all", metavar="N|all", help="as in measure_wer.py")
    parser.add_argument("--voices", help="names, comma between (default: all, and none named)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--source", type=Path, help="folder of the recipe's stage `source`")
    parser.add_argument("--clips", type=Path, help="folder of NAME.wav and NAME.txt")
    parser.add_argument("--beside", metavar="BUNDLE", help="another build of the same voices")
    parser.add_argument("--json", type=Path, metavar="OUT")
    options = parser.parse_args()
    speakers = Speakers()
    missing = why_missing()
    if options.beside:
        missing = None if speakers.encoder else "--beside needs Resemblyzer, see above"
    if missing:
        parser.error(missing)
    try:
        warble = load(options.model)
        other = load(options.beside) if options.beside else None
    except WarbleError as error:
        parser.error(str(error))
    voices: list[str | None] = [None, *(voice.name for voice in warble.voices)]
    if options.voices:
        voices = list(options.voices.split(","))
    sentences = chosen(options.sentences)
    document: dict[str, Any] = {}
    if other:
        both = [vectors(w, voices, sentences, options.seed, speakers) for w in (warble, other)]
        document["beside"] = beside(*both)
    else:
        rows = spoken_rows(warble, voices, sentences, options.seed, speakers)
        document = {"voices": table(rows), "utterances": [plain(row) for row in rows]}
    if options.source:
        if not other:
            document["source"] = against_source(warble, rows, options.source)
        document["pitch_after_codec"] = codec_pitch(warble, options.source)
        print(f"pitch after the codec, correlation: {document['pitch_after_codec']:.2f}")
    if options.clips:
        document["cloning"] = cloning(warble, options.clips, speakers, options.seed)
    if options.json:
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


def spoken_rows(
    warble: Warble,
    voices: list[str | None],
    sentences: list[str],
    seed: int,
    speakers: Speakers,
) -> list[Row]:
    """Every sentence in every voice; None: the default voice without naming it."""
    recogniser = Recogniser()
    groups = {"held out": sentences, "short": SHORT, "written": WRITTEN}
    kinds = {text: kind for kind, texts in groups.items() for text in texts}
    utterances = [Utterance(voice, seed, text) for voice in voices for text in kinds]
    found: dict[Utterance, Row] = {}
    for said in tqdm(speak(warble, utterances), total=len(utterances), unit=" utterances"):
        hertz = pitch(said.samples, said.rate_hz)
        hertz = hertz[hertz > 0]
        found[said.utterance] = {
            **read(said, recogniser),
            "voice": said.utterance.voice or "default",
            "kind": kinds[said.utterance.text],
            "stopped": said.finish_reason == "stop",
            "semitones": float(12 * np.log2(hertz).std()) if len(hertz) > 20 else None,
            "hertz": float(np.median(hertz)) if len(hertz) > 20 else None,
            "vector": speakers.of(said.samples, said.rate_hz),
        }
    return [found[utterance] for utterance in utterances]


def vectors(
    warble: Warble,
    voices: list[str | None],
    sentences: list[str],
    seed: int,
    speakers: Speakers,
) -> list[Row]:
    """Who says every sentence in every named voice, to the encoder's ear."""
    utterances = [Utterance(voice, seed, text) for voice in voices if voice for text in sentences]
    return [
        {
            "voice": said.utterance.voice,
            "text": said.utterance.text,
            "vector": speakers.of(said.samples, said.rate_hz),
        }
        for said in tqdm(speak(warble, utterances), total=len(utterances), unit=" utterances")
    ]


def sourced(folder: Path) -> Iterator[tuple[int, str, Samples]]:
    """Number of the voice, text, samples float32 [n] at SOURCE_RATE: what `source` has spoken."""
    texts = json.loads((folder / "lines.json").read_text())
    for meta in sorted(folder.glob("*[0-9].meta.npy")):
        sound = np.load(meta.with_name(meta.name.replace(".meta.", ".pcm.")))
        begin = 0
        for line, speaker, length in np.load(meta).tolist():
            yield speaker, texts[line], sound[begin : begin + length].astype(np.float32) / 32768
            begin += length


def against_source(warble: Warble, rows: list[Row], folder: Path) -> list[Row]:
    """Print what the source of the voices gets wrong of the same held-out sentences, and how long
    ours take against its."""
    ours = {(row["voice"], row["text"]): row for row in rows if row["kind"] == "held out"}
    names = {voice.id: voice.name for voice in warble.voices}
    recogniser = Recogniser()
    errors: dict[str, list[WordErrors]] = {}
    lengths: dict[str, list[float]] = {}
    for number, text, samples in sourced(folder):
        row = ours.get((names.get(number), text))
        if row is None:
            continue
        heard = recogniser.read(samples, SOURCE_RATE)
        errors.setdefault(row["voice"], []).append(word_errors(text, heard))
        seconds = len(samples) / SOURCE_RATE
        lengths.setdefault(row["voice"], []).append(row["seconds"] / seconds)
    print("| voice | source, WER | length to the source's, median | 5 % … 95 % |")
    print("|" + " --- |" * 4)
    found = []
    for name, own in lengths.items():
        line = {"voice": name, "wer": rate(errors[name]), "length": float(np.median(own))}
        found.append({**line, "lengths": own})
        print(f"| {name} | {line['wer']:.1%} | {line['length']:.2f} | {spread(own)} |")
    return found


def plain(row: Row) -> Row:
    return {name: value for name, value in row.items() if name != "vector"}


def errors_of(rows: list[Row]) -> list[WordErrors]:
    return [WordErrors(row["errors"], row["words"]) for row in rows]


def table(rows: list[Row]) -> list[Row]:
    """Print a Markdown table; returns its numbers."""
    names = list(dict.fromkeys(row["voice"] for row in rows))
    within, across = similarities(rows, names)
    print(
        "| voice | WER held out | 95 % | short | written | ended | length, 5 % … 95 % |"
        " pitch Hz | semitones | same voice | nearest other |"
    )
    print("|" + " --- |" * 11)
    found = []
    for name in names:
        own = [row for row in rows if row["voice"] == name]
        kinds = {
            kind: [r for r in own if r["kind"] == kind] for kind in ("held out", "short", "written")
        }
        low, high = interval(errors_of(kinds["held out"]))
        rates = {kind: rate(errors_of(part)) for kind, part in kinds.items()}
        semitones = [row["semitones"] for row in own if row["semitones"] is not None]
        hertz = [row["hertz"] for row in own if row["hertz"] is not None]
        line = {
            "voice": name, **rates, "ended": sum(row["stopped"] for row in own), "of": len(own),
            "hertz": float(np.median(hertz)) if hertz else 0.0,
            "semitones": float(np.median(semitones)) if semitones else 0.0,
            "within": within.get(name), "across": across.get(name),
        }  # fmt: skip
        found.append(line)
        print(
            f"| {name} | {rates['held out']:.1%} | {low:.1%} … {high:.1%} | {rates['short']:.1%} |"
            f" {rates['written']:.1%} | {line['ended']} of {line['of']} |"
            f" {spread(ratios(kinds['held out']))} | {line['hertz']:.0f} |"
            f" {line['semitones']:.1f} | {shown(line['within'])} | {shown(line['across'])} |"
        )
    return found


def shown(value: float | None, places: int = 2) -> str:
    return "-" if value is None else f"{value:.{places}f}"


def similarities(rows: list[Row], names: list[str]) -> tuple[dict[str, float], dict[str, float]]:
    """Mean similarity within each voice, and to the nearest other voice."""
    vectors = {
        name: np.array(
            [r["vector"] for r in rows if r["voice"] == name and r["vector"] is not None]
        )
        for name in names
        if name != "default"
    }
    vectors = {name: own for name, own in vectors.items() if len(own) > 1}
    within, across = {}, {}
    for name, own in vectors.items():
        inner = own @ own.T
        within[name] = float((inner.sum() - np.trace(inner)) / (len(own) * (len(own) - 1)))
        others = [float((own @ other.T).mean()) for key, other in vectors.items() if key != name]
        if others:
            across[name] = max(others)
    return within, across


def beside(rows: list[Row], others: list[Row]) -> list[Row]:
    """Mean similarity of each voice to itself and to the nearest other voice in another bundle,
    and within each bundle; of different sentences always."""

    def alike(ours: list[Row], theirs: list[Row]) -> float | None:
        values = [
            float(a["vector"] @ b["vector"])
            for a in ours
            for b in theirs
            if a["text"] != b["text"] and a["vector"] is not None and b["vector"] is not None
        ]
        return float(np.mean(values)) if values else None

    names = list(dict.fromkeys(row["voice"] for row in rows))
    ours, theirs = (
        {n: [r for r in part if r["voice"] == n] for n in names} for part in (rows, others)
    )
    print("| voice | within this | within the other | to itself there | nearest other there |")
    print("|" + " --- |" * 5)
    found = []
    for name in names:
        strangers = [alike(ours[name], theirs[key]) for key in names if key != name]
        line = {
            "voice": name,
            "within": alike(ours[name], ours[name]),
            "within_other": alike(theirs[name], theirs[name]),
            "to_itself": alike(ours[name], theirs[name]),
            "to_nearest": max((s for s in strangers if s is not None), default=None),
        }
        found.append(line)
        print(f"| {' | '.join([name, *(shown(v, 3) for v in list(line.values())[1:])])} |")
    return found


def through_codec(warble: Warble, samples: Samples) -> Samples:
    """44.1 kHz samples [n] to codes and back, with the bundle's own codec."""
    import mlx.core as mx

    from warble_mlx.codec import CodecEncoder
    from warble_mlx.weights import ENCODER_FILE, load_strictly

    encoder = CodecEncoder(warble.config)
    load_strictly(encoder, warble.folder / ENCODER_FILE, mx.float32, {})
    codes, _ = encoder.encode(mx.array(samples)[None], warble._decoder.quantizer)
    return np.array(warble._decoder.decode(codes)).reshape(-1)[: len(samples)]


def codec_pitch(warble: Warble, folder: Path, count: int = 40) -> float:
    """Median correlation of pitch before and after the codec over sentences of the source."""
    found: list[float] = []
    long = [samples for _, _, samples in sourced(folder) if len(samples) > 1.5 * SOURCE_RATE]
    for samples in long[:: -(-len(long) // count)]:
        piece = soxr.resample(samples, SOURCE_RATE, warble.sample_rate).astype(np.float32)
        own = correlation(
            pitch(through_codec(warble, piece), warble.sample_rate),
            pitch(piece, warble.sample_rate),
        )
        if own is not None:
            found.append(own)
    return float(np.median(found)) if found else float("nan")


def cloning(warble: Warble, folder: Path, speakers: Speakers, seed: int) -> list[Row]:
    """Clone every clip, say another sentence: similarity to the clip, and to the other clips, and
    of the nearest of the bundle's own voices to the clip."""
    clips: dict[str, tuple[Path, str, Any]] = {}
    for path in sorted(folder.glob("*.wav")):
        sound, rate_hz = soundfile.read(path, dtype="float32")
        text = path.with_suffix(".txt").read_text(encoding="utf-8").strip()
        clips[path.stem] = path, text, speakers.of(sound, rate_hz)
    found = []
    text = "The farmer carried two baskets of fresh eggs to market, and a cold wind blew."
    own_voices = [
        speakers.of(speech.samples, speech.sample_rate)
        for speech in (warble.say(text, voice=voice.name, seed=seed) for voice in warble.voices)
    ]
    print("| clip | to the clip | to other clips | nearest own voice |\n" + "| --- " * 4 + "|")
    for name, (path, heard, vector) in clips.items():
        speech = warble.say(text, ref_audio=path, ref_text=heard, seed=seed)
        made = speakers.of(speech.samples, speech.sample_rate)
        others = [v for key, (_, _, v) in clips.items() if key != name and v is not None]
        own = float(made @ vector) if made is not None and vector is not None else None
        rest = float(np.mean([made @ v for v in others])) if made is not None and others else None
        near = [float(v @ vector) for v in own_voices if v is not None and vector is not None]
        nearest = max(near, default=None)
        found.append({"clip": name, "own": own, "others": rest, "nearest_own_voice": nearest})
        print(f"| {name} | {shown(own)} | {shown(rest)} | {shown(nearest)} |")
    return found


if __name__ == "__main__":
    sys.exit(main())
