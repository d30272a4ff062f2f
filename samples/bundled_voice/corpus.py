"""The text that is read aloud: one line per sentence, with its phonemes.

    python -m samples.bundled_voice.corpus --sources ROOT --out corpus.tsv.xz

ROOT is a folder into which these Debian packages were unpacked (`dpkg -x`): wordnet-base,
dict-devil, wamerican, bible-kjv and bible-kjv-text. No sentence of the held-out list gets in.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import lzma
import random
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from samples.bundled_voice.phonemes import phonemised
from samples.bundled_voice.sentences import Grammar, capitalised
from samples.bundled_voice.spoken import spoken

HELD_OUT = Path(__file__).resolve().parents[2] / "tests" / "ear" / "heldout.txt"
LONGEST_TEXT = 170  # characters; longer text is split by the runtime
LONGEST_LINE = 240  # phonemes
_ALLOWED = re.compile(r"^[A-Za-z0-9 ,.'?!;:$£€%&-]+$")
_MIX = {
    "examples": 30,
    "glosses": 14,
    "bible": 5,
    "devil": 2,
    "everyday": 23,
    "numbers": 13,
    "short": 13,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    sources = parser.add_mutually_exclusive_group(required=True)
    sources.add_argument("--sources", type=Path)
    sources.add_argument("--texts", type=Path, help="a file whose lines are the sentences instead")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sentences", type=int, default=90_000)
    parser.add_argument("--seed", type=int, default=20261130)
    options = parser.parse_args()
    if options.texts:
        texts = options.texts.read_text(encoding="utf-8").splitlines()
    else:
        texts = chosen(options.sources, options.sentences, random.Random(options.seed))
    write(options.out, with_phonemes(texts))


def write(path: Path, lines: list[tuple[str, str]]) -> None:
    """Text, tab, phonemes; xz-compressed."""
    with lzma.open(path, "wt", encoding="utf-8", preset=9) as file:
        file.writelines(f"{text}\t{line}\n" for text, line in lines)


def read(path: Path) -> list[tuple[str, str]]:
    """(text, phonemes) of every line that `write` wrote."""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        pairs = (line.rstrip("\n").split("\t") for line in file)
        return [(text, phonemes) for text, phonemes in pairs]


def with_phonemes(texts: list[str]) -> list[tuple[str, str]]:
    """Sentences with their phonemes, without those that are too long for one line."""
    lines = phonemised([spoken(text) for text in texts])
    return [
        (text, line)
        for text, line in zip(texts, lines, strict=True)
        if 2 <= len(line) <= LONGEST_LINE
    ]


def chosen(sources: Path, count: int, rng: random.Random) -> list[str]:
    """Sentences by the shares of _MIX in random order, none of them held out, none twice."""
    pools = {
        "examples": list(wordnet(sources, "examples")),
        "glosses": list(wordnet(sources, "glosses")),
        "bible": list(bible(sources)),
        "devil": list(devil(sources)),
    }
    for pool in pools.values():
        rng.shuffle(pool)
    grammar = Grammar(rng, single_words(sources))
    endless: dict[str, Iterator[str]] = {
        name: itertools.chain(pool) for name, pool in pools.items()
    }
    made = {"everyday": grammar.everyday, "numbers": grammar.with_numbers, "short": grammar.short}
    seen = {key(line) for line in HELD_OUT.read_text(encoding="utf-8").splitlines()}
    kinds = [kind for kind, share in _MIX.items() for _ in range(share)]
    texts: list[str] = []
    while len(texts) < count:
        kind = rng.choice(kinds)
        text = made[kind]() if kind in made else next(endless[kind], None) or grammar.everyday()
        text = text.replace("m..", "m.")  # "at 5 p.m." ends the sentence too
        if kind in pools and rng.random() < 0.85:
            text = capitalised(text)
        if text[-1] not in ".?!" and rng.random() < 0.95:
            text += "."
        own = key(text)
        # Short texts and numbers may come back; each is said by other voices then.
        if own and own not in seen and len(text) <= LONGEST_TEXT:
            if len(own) > 24:
                seen.add(own)
            texts.append(text)
    return texts


def key(text: str) -> str:
    """What two sentences share if they say the same."""
    return " ".join(re.sub(r"[^a-z0-9' ]", " ", text.lower()).split())


def cleaned(text: str) -> str:
    text = text.replace("`", "'").replace('"', "").replace("--", ", ")
    text = re.sub(r"[()]", ", ", text)
    text = re.sub(r"\s*,\s*([,;.])", r"\1", text)
    return re.sub(r"\s+([,.;:?!])", r"\1", re.sub(r"\s+", " ", text)).strip(" ,;:-")


def usable(text: str, fewest: int, most: int) -> bool:
    return bool(_ALLOWED.match(text)) and fewest <= len(text.split()) <= most


def wordnet(sources: Path, what: str) -> Iterator[str]:
    """The example sentences or the glosses of WordNet, each once."""
    seen: set[str] = set()
    for part in ("noun", "verb", "adj", "adv"):
        path = sources / "usr/share/wordnet" / f"data.{part}"
        for line in path.read_text(encoding="latin-1").splitlines():
            if line.startswith("  ") or "|" not in line:
                continue
            gloss = line.split("|", 1)[1]
            if what == "examples":
                found = re.findall(r'"([^"]+)"', gloss)
            else:
                found = re.sub(r'"[^"]*"|\([^)]*\)', "", gloss).split(";")
            for text in map(cleaned, found):
                if text not in seen and usable(text, 3, 22):
                    seen.add(text)
                    yield text


def bible(sources: Path) -> Iterator[str]:
    """Clauses of the King James Version, as its Debian program prints it."""
    printed = subprocess.run(
        [sources.resolve() / "usr/bin/bible", "-f", "gen1:1-rev22:21"],
        capture_output=True,
        text=True,
        encoding="latin-1",
        cwd=sources / "usr/lib",
        check=True,
    ).stdout
    for line in printed.splitlines():
        verse = re.sub(r"^\S*\d+:\d+\s+", "", line.strip())
        for clause in re.split(r"(?<=[:;.?!])\s+", cleaned(re.sub(r"[\[\]{}<>]", "", verse))):
            text = clause.strip(" :;")
            if usable(text, 3, 20):
                yield text


def devil(sources: Path) -> Iterator[str]:
    """Sentences of The Devil's Dictionary."""
    raw = gzip.decompress((sources / "usr/share/dictd/devil.dict.dz").read_bytes())
    for paragraph in re.split(r"\n\s*\n", raw.decode("latin-1")):
        if paragraph.startswith("    "):
            continue
        body = re.sub(r"^[A-Z][A-Z -]+,\s+[a-z.\s]+\.\s+", "", " ".join(paragraph.split()))
        for text in map(cleaned, re.split(r"(?<=[.?!])\s+", body)):
            if usable(text, 3, 25) and not re.search(r"[A-Z]{3}", text):
                yield text


def single_words(sources: Path) -> list[str]:
    """Words that may stand alone: those of the word list that WordNet explains too."""
    known = {
        line.split()[4].lower()
        for part in ("noun", "verb", "adj", "adv")
        for line in (sources / "usr/share/wordnet" / f"data.{part}")
        .read_text(encoding="latin-1")
        .splitlines()
        if not line.startswith("  ")
    }
    words = (sources / "usr/share/dict/american-english").read_text(encoding="utf-8").split()
    return [word for word in words if re.fullmatch(r"[a-z]{2,13}", word) and word in known]


if __name__ == "__main__":
    main()
