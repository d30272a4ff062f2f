"""Long text to parts: nothing lost, nothing cut where it must not be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from warble_mlx.errors import TextError
from warble_mlx.splitting import joined, sentences, split, weight
from warble_mlx.text import speakable

TEXTS = Path(__file__).parent / "cases" / "texts"
CASES = {
    case["id"]: case
    for case in map(json.loads, (TEXTS / "texts.jsonl").read_text("utf-8").splitlines())
}
COUNTED = [name for name, case in CASES.items() if "sentences" in case["expect"]]


def texts(text: str, limit: int = 170) -> list[str]:
    return [part.text for part in split(text, limit)]


@pytest.mark.parametrize("name", COUNTED)
def test_sentences_of_the_cases(name: str) -> None:
    case = CASES[name]
    found = sentences(case["text"])
    assert len(found) == case["expect"]["sentences"]
    assert " ".join(found) == case["text"]


@pytest.mark.parametrize("name", sorted(CASES))
def test_every_case_is_kept_whole_or_refused(name: str) -> None:
    text, expect = CASES[name]["text"], CASES[name]["expect"]
    if expect["outcome"] in ("reject", "reject_or_warn"):
        with pytest.raises(TextError):
            split(text, 170)
    elif "ssml" not in name:
        assert joined(split(text, 170)) == speakable(text)


def test_packing_fills_parts_with_whole_sentences() -> None:
    text = "One is here. Two is here. Three is here. Four is here."
    assert texts(text) == [text]
    assert texts(text, 30) == ["One is here. Two is here.", "Three is here. Four is here."]
    assert texts(text, 16) == text.replace(". ", ".|").split("|")


def test_a_decimal_an_abbreviation_or_an_address_is_never_cut() -> None:
    text = "Dr. Ames paid 8,848.86 for example.org/a.txt, e.g. on the U.S. list at 9:30 a.m. today"
    words = set(text.split())
    for limit in range(20, 90):
        for piece in texts(text, limit):
            assert set(piece.split()) <= words


def test_a_long_sentence_is_cut_at_commas_first() -> None:
    text = "The keeper carried a lamp to the gate, he counted every stone; then he walked home"
    assert texts(text, 60) == [
        "The keeper carried a lamp to the gate,",
        "he counted every stone; then he walked home",
    ]
    assert [part.joint for part in split(text, 60)] == ["start", "phrase"]


def test_a_long_phrase_is_cut_at_the_spaces_in_about_equal_pieces() -> None:
    assert texts("alpha bravo charlie delta echo foxtrot", 30) == [
        "alpha bravo charlie",
        "delta echo foxtrot",
    ]


def test_only_a_word_above_the_limit_is_cut_inside() -> None:
    parts = split("a " + "x" * 25 + " b", 10)
    assert [part.text for part in parts] == ["a", "x" * 10, "x" * 10, "xxxxx b"]
    assert [part.joint for part in parts] == ["start", "phrase", "word", "word"]
    assert joined(parts) == "a " + "x" * 25 + " b"


def test_a_mark_stays_with_its_letter() -> None:
    letter = "e\u0301"
    assert all(not piece.startswith("\u0301") for piece in texts(letter * 20, 9))


def test_cjk_sentences_need_no_space_and_weigh_more() -> None:
    assert weight("第一行") == 9
    parts = split("第一行很長。第二行也長？第三行！", 20)
    assert [part.text for part in parts] == ["第一行很長。", "第二行也長？", "第三行！"]
    assert [part.glue for part in parts] == ["", "", ""]
    assert texts("春眠不覺曉，處處聞啼鳥，夜來風雨聲", 30) == [
        "春眠不覺曉，", "處處聞啼鳥，", "夜來風雨聲",
    ]  # fmt: skip


def test_blank_lines_are_paragraphs_and_single_ones_are_not() -> None:
    parts = split("One line\nof text.\r\n \t\r\nTwo.\fThree.", 170)
    assert [part.text for part in parts] == ["One line of text.", "Two.", "Three."]
    assert [part.joint for part in parts] == ["start", "paragraph", "paragraph"]
    assert [part.pause(0.25) for part in parts] == [0, 0.5, 0.5]


def test_a_row_of_asterisks_is_a_pause() -> None:
    parts = split("One.\n\n* * *\n\nTwo.", 170)
    assert [part.spoken for part in parts] == [True, False, True]
    assert joined(parts) == "One. * * * Two."


def test_marks_alone_stay_with_the_sentence_beside_them() -> None:
    assert texts("Well. ... !? Yes.") == ["Well. ... !? Yes."]


@pytest.mark.parametrize(
    ("tag", "seconds"),
    [
        ('<break time="800ms"/>', 0.8), ("<break time='1.5s' />", 1.5), ('<BREAK TIME=".5s">', 0.5),
        ('<break time="1s"></break>', 1.0), ('<break time="0s"/>', 0.0),
        ('<break time="1s"/>\n\n<break time="250ms"/>', 1.25),
    ],
)  # fmt: skip
def test_a_break_is_a_pause_of_its_own_length(tag: str, seconds: float) -> None:
    parts = split(f"Ready. {tag} Go.", 170)
    assert [part.text for part in parts] == ["Ready.", "Go."]
    assert parts[1].pause(0.25) == parts[1].pause(99) == seconds
    assert joined(parts) == "Ready. Go."


def test_breaks_before_and_behind_the_text() -> None:
    parts = split('<speak><break time="1s"/>Go.<break time="2s"/></speak>', 170)
    assert [(part.text, part.pause(0), part.spoken) for part in parts] == [
        ("Go.", 1.0, True),
        ("", 2.0, False),
    ]


def test_the_speak_wrapper_goes_and_its_entities_are_read() -> None:
    assert texts('<speak version="1.1">Salt &amp; ice &lt; 0 °C.</speak>') == ["Salt & ice < 0 °C."]
    assert texts("Salt &amp; ice.") == ["Salt &amp; ice."]
    assert texts("<speak>a &lt;|voice|&gt; b</speak>") == ["a b"]


@pytest.mark.parametrize(
    "tag",
    ['<prosody rate="slow">', "</prosody>", "<emphasis>", "<p>", "<amazon:effect name='x'>",
     "<say-as interpret-as='date'>", "<mark name='a'/>"],
)  # fmt: skip
def test_other_tags_are_refused_by_name(tag: str) -> None:
    with pytest.raises(TextError, match=r"ssml-unsupported") as error:
        split(f"Slow {tag} words", 170)
    assert tag in str(error.value)


@pytest.mark.parametrize(
    "tag", ["<break>", "<break/>", '<break time="soon"/>', '<break time="-1s"/>',
            '<break strength="weak"/>', '<break time="61s"/>'],
)  # fmt: skip
def test_a_break_without_a_usable_length_is_refused(tag: str) -> None:
    with pytest.raises(TextError, match="pause"):
        split(f"Ready. {tag} Go.", 170)


@pytest.mark.parametrize(
    "text", ["If a < b and b > c then stop.", "a<b and b>c", "x <y> z", "if s<p and p>q", "a <- b"]
)
def test_comparisons_are_text(text: str) -> None:
    assert texts(text) == [text]


@pytest.mark.parametrize("text", ["", " \n\n ", "...!?", "<speak></speak>", '<break time="1s"/>'])
def test_nothing_to_say(text: str) -> None:
    with pytest.raises(TextError, match="nothing to say"):
        split(text, 170)


@pytest.mark.parametrize("text", [None, 3, b"Hi"])
def test_no_text(text: object) -> None:
    with pytest.raises(TextError, match="must be a string"):
        split(text, 170)


def test_the_text_of_seventy_five_sentences() -> None:
    text = (TEXTS / "long_75_markers.txt").read_text("utf-8")
    assert joined(split(text, 170)) == speakable(text)
    assert sum(len(sentences(part)) for part in texts(text)) == 75
    windows = (TEXTS / "long_bom_crlf.txt").read_bytes().decode("utf-8")
    assert joined(split(windows, 170)) == speakable(windows)
    assert sum(len(sentences(part)) for part in texts(windows)) == 10


@pytest.mark.parametrize("run", ["word ", " ", "x", "字", "\n \n", "<p", "a, "])
def test_a_long_run_of_anything_is_split_at_once(run: str) -> None:
    """A quadratic step would take minutes."""
    text = "One. " + run * (100_000 // len(run)) + " Two."
    parts = split(text, 170)
    assert joined(parts) == speakable(text)
    assert max(weight(part.text) for part in parts) <= 170


def test_a_book_is_split_at_once() -> None:
    book = "The keeper carried a lamp, and it was 3.14 m long. " * 2000
    parts = split(book, 170)
    assert joined(parts) == speakable(book)
    assert max(weight(part.text) for part in parts) <= 170
    assert {part.text.count("long.") for part in parts[:-1]} == {3}
    assert all(part.text.endswith(" long.") for part in parts)


WORDS = st.sampled_from(
    ["Dr.", "a.m.", "3.14", "8,848.86", "Yes!", "no,", "第一行。", "はい", "、", "한국어", "…", "?",
     "x" * 40, "e\u0301", "\u200b", "<", ">", "»", "\"", "the", "The", "U.S.", "\n", "\n\n",
     "\r\n", "\u2029", "\ufeff"]
)  # fmt: skip
ARBITRARY = st.one_of(
    st.text(max_size=200),
    st.lists(WORDS, max_size=60).map(" ".join),
    st.lists(WORDS, max_size=60).map("".join),
)


@given(ARBITRARY, st.integers(3, 60))
@settings(max_examples=500, deadline=None, derandomize=True, database=None)
def test_nothing_is_lost_in_any_text(text: str, limit: int) -> None:
    text = text.replace("|", "")
    try:
        cleaned = speakable(text)
    except TextError:
        with pytest.raises(TextError):
            split(text, limit)
        return
    try:
        parts = split(text, limit)
    except TextError:
        assume(False)  # an SSML tag by chance
    assert joined(parts) == cleaned
    assert all(0 < weight(part.text) <= limit for part in parts)
    assert all(part.glue in ("", " ") and part.text == part.text.strip() for part in parts)
    assert all(part.text == speakable(part.text) for part in parts if part.spoken)
    at = 0
    for part in parts:
        at += len(part.glue)
        if part.joint == "word":
            word = cleaned[:at].rpartition(" ")[2] + cleaned[at:].partition(" ")[0]
            assert weight(word) > limit
        at += len(part.text)
