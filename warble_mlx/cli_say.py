"""`warble say`: where the text comes from, and where the speech goes."""

from __future__ import annotations

import json
import math
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from warble_mlx.cli_base import (
    TRUNCATED_STATUS,
    Number,
    Seconds,
    debug_option,
    dequantize_option,
    emit,
    is_terminal,
    json_option,
    mistaken_command,
    model_option,
    offline_option,
    option,
    say_so,
)
from warble_mlx.cli_sampling import normalise_option, retry_option, sampling_options
from warble_mlx.errors import TextError, VoiceWarning
from warble_mlx.options import MAX_SEED

if TYPE_CHECKING:
    from warble_mlx.registered import RegisteredVoice
    from warble_mlx.speech import Speech, Warble

FULL_MODEL = "scrappylabsai/warble"
DEFAULT_FILE = "warble.wav"
# Byte order marks; that of UTF-32 begins with that of UTF-16.
_OTHER_MARKS = (
    (b"\xff\xfe\0\0", "UTF-32"),
    (b"\0\0\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
)
LONG_TEXT = 1000  # characters, about a minute; beyond it a file is written as it goes


def _refuse(reason: str) -> Callable[[click.Context, click.Parameter, Any], None]:
    def callback(ctx: click.Context, param: click.Parameter, value: Any) -> None:
        if value and not ctx.resilient_parsing:
            raise click.BadParameter(reason, ctx, param)

    return callback


# Flags of the macOS command `say` that people have in their fingers. Better refused than ignored.
_REFUSED = {
    (
        "-r",
        "--rate",
        "--speed",
    ): "the model has no speed control; change the speed of the finished file,"
    " for example with: ffmpeg -i speech.wav -filter:a atempo=1.2 faster.wav",
    ("-a", "--audio-device"): "speech is played on the system's default output; choose that in the"
    " system's settings",
    (
        "-n",
        "--network-send",
    ): "speech cannot be sent to another machine; pipe it: warble say -o - …",
}


def _refused_options(function: Callable[..., None]) -> Callable[..., None]:
    for names, reason in _REFUSED.items():
        function = click.option(*names, hidden=True, expose_value=False, callback=_refuse(reason))(
            function
        )
    return function


@click.command()
@click.argument("text", nargs=-1)
@option("-f", "--file", metavar="FILE", help="Read the text from FILE (UTF-8), or - for stdin.")
@option(
    "-o",
    "--output",
    metavar="FILE",
    help="Write wav, flac, mp3 or ogg, by FILE's suffix; - writes wav to stdout. Default: play, "
    f"or without a loudspeaker write {DEFAULT_FILE}.",
)
@model_option
@option(
    "-v",
    "--voice",
    metavar="VOICE",
    help="Name or number of a voice, or a voice file (*.safetensors); ? lists them.",
)
@option("--ref-audio", metavar="FILE", help="Speak like this clip of 3 to 15 s.")
@option("--ref-text", metavar="TEXT", help="What is said in the clip, word for word.")
@option(
    "--clip-seconds",
    type=Seconds(),
    metavar="A:B",
    help="Use only this part of the clip; --ref-text is then what is said in it.",
)
@option(
    "--seed",
    metavar="N",
    type=Number(0, MAX_SEED, kind=int),
    help="Same seed, same speech. Default: random, and reported.",
)
@sampling_options
@option(
    "--max-seconds", metavar="X", type=Number(0, above=True), help="Longest speech to generate."
)
@retry_option
@normalise_option
@option(
    "--pause",
    metavar="X",
    type=Number(0, 60),
    help="Seconds between sentences of a long text where it is split; twice that at blank lines.",
)
@option(
    "--stream",
    is_flag=True,
    help="Write while speaking: -o - starts at once, and a FILE grows as FILE.part until it is"
    " complete. What is played always starts at once.",
)
@option(
    "--raw",
    is_flag=True,
    help="Stream 16-bit little-endian mono PCM (44,100 Hz) to stdout, without a header.",
)
@option("--resume", is_flag=True, help="Go on with a long text whose writing to -o was stopped.")
@option("--allow-truncated", is_flag=True, help="Keep speech that --max-seconds has cut.")
@dequantize_option
@json_option
@offline_option
@debug_option
@_refused_options
@click.pass_context
def say(
    ctx: click.Context,
    text: tuple[str, ...],
    file: str | None,
    output: str | None,
    model: str | None,
    voice: str | None,
    ref_audio: str | None,
    ref_text: str | None,
    clip_seconds: tuple[float, float] | None,
    seed: int | None,
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    greedy: bool,
    max_seconds: float | None,
    retry: int,
    normalise: bool,
    pause: float | None,
    stream: bool,
    raw: bool,
    resume: bool,
    allow_truncated: bool,
    dequantize: bool,
    as_json: bool,
    offline: bool,
) -> None:
    """Speak TEXT: words, or nothing when text is piped in; - speaks it while it arrives.

    Speech goes to the loudspeaker or to a file, one line of figures to stderr.

    \b
      warble say "Hello there." -o hello.wav
      echo "Hello there." | warble say --stream -o - | aplay
      warble say -m scrappylabsai/warble -v silas "Hello there."
    """
    if ctx.meta.get("warble.implicit"):
        _check_command(ctx, text)
    if voice == "?":
        from warble_mlx.cli_voice import list_voices

        list_voices(model, offline=offline, as_json=as_json)
        return
    if raw:
        given = ctx.get_parameter_source("output") is ParameterSource.COMMANDLINE
        if given and output != "-":
            raise click.UsageError("--raw writes to stdout: leave -o out, or give -o -", ctx)
        output, stream = "-", True
    if resume and output in (None, "-"):
        raise click.UsageError("--resume needs the -o FILE of the run that was stopped", ctx)
    if as_json and output == "-":
        raise click.UsageError("--json and -o - both want stdout: give -o a file", ctx)
    if (ref_audio is None) != (ref_text is None):
        missing = "audio" if ref_audio is None else "text"
        raise click.UsageError(
            "--ref-audio and --ref-text go together: the clip, and what is said in it"
            f" (reference-{missing}-required)",
            ctx,
        )
    if clip_seconds is not None and ref_audio is None:
        raise click.UsageError("--clip-seconds needs --ref-audio and --ref-text", ctx)
    if ref_audio is not None and voice is not None:
        if ctx.get_parameter_source("voice") is ParameterSource.COMMANDLINE:
            raise click.UsageError("give either --voice or --ref-audio, not both", ctx)
        voice = None  # only a default from the environment
    wanted, output = output, choose_output(ctx, output)
    is_live = output is None or (output == "-" and stream)
    arrives = text == ("-",) and is_live
    words = "" if arrives else read_text(ctx, text, file)
    is_file = voice is not None and voice.endswith(".safetensors")
    chosen: str | Path | RegisteredVoice | None = Path(voice) if voice and is_file else voice
    if ref_audio is not None and ref_text is not None:
        from warble_mlx.clips import prepare_clip

        for doubt in prepare_clip(ref_audio, ref_text, clip_seconds)[2].warnings:
            say_so(f"warning: {doubt}")
        warnings.simplefilter("ignore", VoiceWarning)  # they have just been told

    import warble_mlx

    warble = warble_mlx.load(model, offline=offline, dequantize=dequantize)
    if ref_audio is not None and ref_text is not None and clip_seconds is not None:
        chosen = warble.register(ref_audio, ref_text, clip_seconds=clip_seconds)
        ref_audio = ref_text = None
    options: dict[str, Any] = {
        "voice": chosen,
        "ref_audio": ref_audio,
        "ref_text": ref_text,
        "seed": seed,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "greedy": greedy or temperature == 0,
        "max_seconds": max_seconds,
        "retry": retry,
        "normalise": normalise,
    }
    if pause is not None:
        options["pause_s"] = pause
    if arrives:
        from warble_mlx.cli_lines import speak_arriving, summary

        speeches, status = speak_arriving(warble, output, raw, **options)
        for speech in speeches if as_json else ():
            emit(facts(warble, speech, None))
        click.echo(f"{summary(speeches)} -> {place_of(output)}", err=True)
        ctx.exit(0 if allow_truncated and status == TRUNCATED_STATUS else status)
    if output is None or is_live:
        from warble_mlx.cli_live import speak_live

        speech = speak_live(warble, words, output, raw, **options)
        kept = allow_truncated or speech.finish_reason == "stop"
    elif resume or is_narration(words, output, stream):
        from warble_mlx.narration import narrate_text

        speech, kept = narrate_text(
            warble,
            words,
            Path(output),
            resume=resume,
            keep_cut=allow_truncated,
            bar=sys.stderr if is_terminal(sys.stderr) else None,
            tell=say_so,
            **options,
        )
    else:
        speech = warble.say(words, **options)
        kept = allow_truncated or speech.finish_reason == "stop"
        if kept:
            deliver(speech, output)
    for doubt in speech.warnings:
        say_so(f"warning: {doubt}")
    report(warble, speech, place_of(output) if kept or is_live else None)
    if kept and wanted is None and output is not None:
        from warble_mlx.player import why_mute

        say_so(f"{output} was written and nothing played: {why_mute()}")
    if as_json:
        emit(facts(warble, speech, output if kept else None))
    if not kept:
        outcome = "" if is_live else f", so {output} was not written"
        say_so(
            f"the speech was cut after {speech.seconds:.2f} s, before its end"
            f"{outcome}: allow more with --max-seconds, or"
            f" {'accept' if is_live else 'keep'} it with --allow-truncated"
        )
        ctx.exit(TRUNCATED_STATUS)


def _check_command(ctx: click.Context, text: tuple[str, ...]) -> None:
    """Stop if the text of a line without a command looks like a command instead."""
    group = ctx.find_root().command
    assert isinstance(group, click.Group)
    meant = mistaken_command(text, list(group.commands))
    if meant is None:
        return
    spoken = " ".join(text)
    if meant == text[0]:
        raise click.UsageError(
            f"a command comes first: warble {meant} … To speak it: warble say {spoken}", ctx
        )
    raise click.UsageError(f"did you mean: warble {meant}? To speak it: warble say {spoken}", ctx)


def read_text(ctx: click.Context, text: tuple[str, ...], file: str | None) -> str:
    """The text to speak, from the arguments, a file or stdin; never blank."""
    if text and file is not None:
        if ctx.get_parameter_source("file") is ParameterSource.COMMANDLINE:
            raise click.UsageError("give either TEXT or --file, not both", ctx)
        file = None
    if text and text != ("-",):
        words = " ".join(text)
        try:
            words.encode()
        except UnicodeEncodeError as error:
            raise TextError("the text on the command line is not UTF-8") from error
    elif file not in (None, "-"):
        path = Path(str(file))
        try:
            words = decode(path.read_bytes(), str(path))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise TextError(f"the text {str(path)[:100]} cannot be read: {reason}") from error
    elif not text and file is None and is_terminal(sys.stdin):
        raise click.UsageError('no text: warble say "Hello there.", or --file, or a pipe', ctx)
    else:
        words = decode(sys.stdin.buffer.read(), "the text on stdin")
    if not words.strip():
        raise TextError("there is nothing to say: the text is empty")
    return words


def decode(raw: bytes, where: str) -> str:
    """UTF-8 text, with or without a byte order mark; TextError for anything else."""
    for mark, name in _OTHER_MARKS:
        if raw.startswith(mark):
            raise TextError(
                f"{where} is {name}, not UTF-8: convert it with iconv -f {name} -t UTF-8"
            )
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TextError(
            f"{where} is not UTF-8 (byte {error.start} is 0x{raw[error.start]:02x}): convert it,"
            " for example with iconv -f ISO-8859-1 -t UTF-8"
        ) from error


def choose_output(ctx: click.Context, output: str | None) -> str | None:
    """Where the speech goes: a file's path, "-" for stdout, or None for the loudspeaker.

    Whatever can be wrong with it is found now, not after the speech has been generated.
    """
    if output == "-":
        if is_terminal(sys.stdout):
            raise click.UsageError("-o - writes binary data: redirect stdout, or name a file", ctx)
        return output
    if output is None:
        from warble_mlx.player import can_play

        if can_play():
            return None
        output = DEFAULT_FILE
    from warble_mlx.audio import check_target

    check_target(Path(output))
    return output


def is_narration(words: str, output: str, stream: bool) -> bool:
    """Whether the file is written as it goes: because of its length, or as it was asked for."""
    if output == "-" or (len(words) <= LONG_TEXT and not stream):
        return False
    target = Path(output)
    is_file = target.is_file() or not target.exists()
    if stream and not is_file:
        raise click.UsageError(f"--stream writes to a file or to -o -, and {output} is neither")
    return is_file


def deliver(speech: Speech, output: str) -> None:
    """Write the speech to a file or to stdout."""
    if output == "-":
        from warble_mlx.audio import encode

        emit(encode(speech.samples, speech.sample_rate, "wav"))
    else:
        speech.save(output)


def figures(speech: Speech) -> str:
    """Length, time taken, real-time factor, time to the first audio, end, seed: on one line."""
    t = speech.timings
    again = ""
    if speech.retries:
        told = f"attempt {speech.retries + 1}"
        if len(speech.pieces) > 1:  # the sum over all pieces says nothing about one
            told = f"{speech.retries} {'retry' if speech.retries == 1 else 'retries'}"
        again = f", {told}"
    heard = math.isfinite(t.first_audio_s)
    first = f", first audio {t.first_audio_s * 1000:.0f} ms" if heard else ""
    return (
        f"{speech.seconds:.2f} s of speech in {t.total_s:.2f} s (RTF {speech.rtf:.2f}){first},"
        f" {speech.finish_reason}, seed {speech.seed}{again}"
    )


def place_of(output: str | None) -> str:
    """The output in words: a file, stdout or the loudspeaker."""
    return {None: "loudspeaker", "-": "stdout"}.get(output) or str(output)


def report(warble: Warble, speech: Speech, place: str | None) -> None:
    """The line of figures on stderr, and how to get more than a small voice."""
    click.echo(figures(speech) + (f" -> {place}" if place else ""), err=True)
    if warble.is_bundled:
        click.echo(
            f"{warble.name} spoke, a small synthetic voice; the full model:"
            f' warble say -m {FULL_MODEL} "…"',
            err=True,
        )


def facts(warble: Warble, speech: Speech, output: str | None) -> str:
    """One JSON object, on one line, of what is known about the speech."""
    known = {
        "text": speech.text,
        "voice": speech.voice,
        "model": speech.model,
        "bundled": warble.is_bundled,
        "seconds": speech.seconds,
        "sample_rate": speech.sample_rate,
        "frames": int(speech.codes.shape[-1]),
        "finish_reason": speech.finish_reason,
        "seed": speech.seed,
        "retries": speech.retries,
        "warnings": list(speech.warnings),
        "pieces": [asdict(piece) for piece in speech.pieces],
        "rtf": _finite(speech.rtf),
        "timings": {name: _finite(value) for name, value in asdict(speech.timings).items()},
        "output": output,
    }
    return json.dumps(known, ensure_ascii=False, allow_nan=False) + "\n"


def _finite(value: float) -> float | None:
    """JSON has no NaN and no infinity: they are null."""
    return value if math.isfinite(value) else None
