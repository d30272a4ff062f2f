"""What may be asked of a speech: one list for every way to ask."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from speaking import quick_warble

from warble_mlx import Warble
from warble_mlx.engine import Sampling
from warble_mlx.errors import BudgetError, VoiceWarning, WarbleError
from warble_mlx.options import Options, longest_of, pause_of, retry_of, sampling_of, seed_of

CLIPS = Path(__file__).parent / "cases" / "ref"
SAID = "The old lighthouse keeper counted every passing ship before the fog."


@pytest.fixture(scope="module")
def warble() -> Warble:
    return quick_warble()[0]


@pytest.mark.parametrize("way", ["say", "stream", "plan"])
def test_a_misspelt_option_is_refused_by_name(warble: Warble, way: str) -> None:
    with pytest.raises(TypeError, match=r"'speed'; there are: voice, ref_audio"):
        getattr(warble, way)("Hello.", speed=2)


def test_every_way_to_ask_takes_every_option(warble: Warble) -> None:
    options: Options = {
        "voice": 1, "ref_audio": None, "ref_text": None, "seed": 5, "temperature": 0.5,
        "top_p": 0.8, "top_k": 7, "greedy": False, "max_seconds": 9, "retry": 1,
        "normalise": False, "pause_s": 0.5,
    }  # fmt: skip
    assert set(options) == set(Options.__annotations__)
    plan = warble.plan("Hello.", **options)
    assert plan.sampling == Sampling(0.5, 0.8, 7)
    assert (plan.seed, plan.retry, plan.pause_s) == (5, 1, 0.5)
    assert warble.say("Hello.", **options).seed == 5
    with warble.stream("Hello.", **options) as stream:
        assert sum(len(chunk.samples) for chunk in stream) == stream.speech.streamed


def test_left_out_options_are_the_models_own() -> None:
    default = Sampling(0.4, 0.3, 2)
    assert sampling_of({}, default) == default
    assert sampling_of({"top_p": None}, default) == default
    # 0 is a wish like any other.
    assert sampling_of({"temperature": 0, "top_p": 0, "top_k": 0}, default) == Sampling(0, 0, 0)
    assert sampling_of({"greedy": True}, default) == replace(default, temperature=0.0)
    assert (longest_of({}, 20.0), retry_of({}), pause_of({})) == (None, 0, 0.25)
    assert seed_of({"seed": 0}) == 0
    assert seed_of({}) != seed_of({})


@pytest.mark.parametrize(
    "options",
    [
        {"seed": -1}, {"seed": 2**32}, {"temperature": -0.1}, {"temperature": float("nan")},
        {"top_p": 1.1}, {"top_k": -1}, {"top_k": 2**31}, {"retry": -1}, {"retry": 4},
        {"pause_s": -1}, {"pause_s": float("inf")}, {"pause_s": 61}, {"max_seconds": 0},
        {"max_seconds": float("nan")},
    ],
)  # fmt: skip
def test_values_out_of_range_are_refused(warble: Warble, options: Options) -> None:
    kind = BudgetError if "max_seconds" in options else WarbleError
    with pytest.raises(kind, match=f"^{next(iter(options))} must"):
        warble.plan("Hello.", **options)


def test_the_language_of_a_registered_voice_counts(warble: Warble) -> None:
    """It decides which abbreviations end no sentence, and which letters are foreign."""
    # The clip's content does not matter here: only what was said about it.
    english = warble.register(CLIPS / "ref.flac", SAID, language="en")
    sentence = "Wir gehen {}gern in den Garten bzw. in das Haus. "
    texts = [sentence.format("heute " * n) * 6 for n in range(5)]
    german = replace(english, language="de")

    def ends(voice: object) -> set[str]:
        plans = [warble.plan(text, voice=voice) for text in texts]  # type: ignore[typeddict-item]
        return {part.text.split()[-1] for plan in plans for part in plan.spoken}

    assert ends(german) == {"Haus."}
    assert "bzw." in ends(english)
    assert warble.plan("今日は良い天気です。", voice=german).warnings
    assert not warble.plan("今日は良い天気です。", voice=replace(english, language="ja")).warnings


def test_doubts_about_a_clip_name_the_line_that_gave_it(warble: Warble) -> None:
    for way in (warble.say, warble.stream, warble.plan):
        with pytest.warns(VoiceWarning) as caught:
            way("Hello.", ref_audio=CLIPS / "ref_clipped.wav", ref_text="word " * 12, greedy=True)
        assert {warning.filename for warning in caught} == {__file__}


def test_limits_of_the_options_cost_no_import_of_mlx() -> None:
    """The command line needs them for its help."""
    code = "import sys, warble_mlx.options; sys.exit('mlx' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
