"""Sentences made from word lists: everyday speech, short utterances, numbers and dates."""

from __future__ import annotations

import random
import re
from pathlib import Path

LISTS = Path(__file__).with_name("word_lists.txt")


def word_lists() -> dict[str, list[str]]:
    """The sections of word_lists.txt; entries are separated by ` | `."""
    lists: dict[str, list[str]] = {}
    for section in re.split(r"^\[", LISTS.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        name, _, body = section.partition("]\n")
        lists[name] = [entry.strip() for entry in " ".join(body.split()).split("|")]
    return lists


def capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]


class Grammar:
    """A seeded source of sentences. `words` are extra single words to be said on their own."""

    def __init__(self, rng: random.Random, words: list[str]) -> None:
        self.rng = rng
        self.lists = word_lists()
        self.words = words

    def pick(self, name: str) -> str:
        return self.rng.choice(self.lists[name])

    def one_of(self, *choices: str) -> str:
        return self.rng.choice(choices)

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    # ---- everyday speech

    def thing(self) -> str:
        kind = self.rng.random()
        noun = self.pick("nouns")
        if kind > 0.85:
            noun = f"{self.pick('adjectives')}, {self.pick('adjectives')} {noun}"
        elif kind > 0.35:
            noun = f"{self.pick('adjectives')} {noun}"
        before = self.one_of(
            "the", "the", "the", "a", "my", "your", "his", "her", "our", "their", "this",
            "that", "some", "every", "another",
        )  # fmt: skip
        return article(noun) if before == "a" else f"{before} {noun}"

    def subject(self) -> tuple[str, bool]:
        """A subject and whether its verb takes an s."""
        kind = self.rng.random()
        if kind < 0.35:
            return self.one_of("I", "you", "we", "they"), False
        if kind < 0.55:
            return self.one_of("he", "she", "it"), True
        return (self.pick("first_names") if kind < 0.8 else self.thing()), True

    def clause(self) -> str:
        who, third = self.subject()
        kind = self.rng.random()
        verb = self.pick("verbs")
        if kind < 0.25:
            text = f"{who} {self.pick('past_verbs')} {self.thing()}"
        elif kind < 0.4:
            text = f"{who} {with_s(verb) if third else verb} {self.thing()}"
        elif kind < 0.5:
            text = f"{who} will {verb} {self.thing()}"
        elif kind < 0.6:
            be = "is" if third else "am" if who == "I" else "are"
            text = f"{who} {be} {self.pick('doing')} {self.pick('adverbs')}"
        elif kind < 0.7:
            text = f"{self.thing()} is {self.pick('places')} {self.thing()}"
        elif kind < 0.8:
            helper = self.one_of(
                "can", "could", "should", "must", "might", "would", "cannot", "did not",
                "does not" if third else "do not",
            )  # fmt: skip
            text = f"{who} {helper} {self.pick('acts')} {self.pick('adverbs')}"
        elif kind < 0.9:
            be = self.one_of("was", "looks", "seems", "feels", "is", "is not", "was very", "is too")
            text = f"{self.thing()} {be} {self.pick('adjectives')}"
        else:
            be = self.one_of("is", "was", "will be", "might be")
            noun = article(f"{self.pick('adjectives')} {self.pick('nouns')}")
            text = f"there {be} {noun} {self.pick('places')} {self.thing()}"
        if self.chance(0.25):
            text += f" {self.pick('places')} {self.thing()}"
        if self.chance(0.15):
            text += " " + self.one_of(
                "today", "tomorrow", "yesterday", "tonight", "this morning", "last night",
                "next week", f"on {self.pick('days')}", f"in {self.pick('months')}", "every day",
                "right now", "after lunch", "before dinner", "all day long",
            )  # fmt: skip
        return text

    def question(self) -> str:
        verb = self.pick("verbs")
        who = self.one_of("I", "you", "we", "they")
        return (
            self.one_of(
                f"{self.one_of('Do', 'Did', 'Can', 'Could', 'Will')} {who} {verb} {self.thing()}",
                f"{self.one_of('Where', 'Why', 'When')} {self.one_of('did', 'can', 'should')} {who}"
                f" {verb} {self.thing()}",
                f"What is {self.thing()}",
                f"Who {self.pick('past_verbs')} {self.thing()}",
                f"Is {self.thing()} {self.pick('adjectives')}",
                f"Have you seen {self.thing()}",
                f"Where is {self.thing()}",
                f"What {self.one_of('time', 'day', 'color')} {self.one_of('is it', 'did you see')}",
                f"How {self.one_of('many', 'much', 'old', 'far', 'long', 'big')} is {self.thing()}",
                f"Are you {self.pick('doing')} {self.pick('adverbs')}",
                f"Why is {self.thing()} so {self.pick('adjectives')}",
            )
            + "?"
        )

    def everyday(self) -> str:
        kind = self.rng.random()
        if kind < 0.4:
            return capitalised(self.clause()) + "."
        if kind < 0.55:
            link = self.one_of(
                ", and ", ", but ", ", so ", " because ", " when ", " while ", " if ", " until ",
                ", although ",
            )  # fmt: skip
            return capitalised(self.clause()) + link + self.clause() + "."
        if kind < 0.72:
            return self.question()
        if kind < 0.88:
            where = f" {self.pick('places')} {self.thing()}" if self.chance(0.4) else ""
            name = f", {self.pick('first_names')}" if self.chance(0.1) else ""
            return f"{self.pick('requests')} {self.pick('verbs')} {self.thing()}{where}{name}."
        if kind < 0.94:
            opening = self.one_of(
                "Oh no", "Well", "Yes", "No", "Sure", "Okay", "Hello", "Hey", "Thanks", "Sorry",
                "Wow", "Look", "Listen", "Actually", "However", "Of course", "By the way",
                "For example", "In fact", "First of all",
            )  # fmt: skip
            return f"{opening}, {self.clause()}{self.one_of('.', '.', '!')}"
        opening = self.one_of(
            "Good morning", "Good evening", "Hello", "Hi", "Thank you", "Goodbye",
            "See you tomorrow", "Welcome back", "Nice to meet you", "Happy birthday",
        )  # fmt: skip
        return f"{opening}, {self.pick('first_names')}{self.one_of('.', '!')}"

    # ---- short utterances

    def short(self) -> str:
        kind = self.rng.random()
        if kind < 0.25:
            return self.pick("phrases").replace("NAME", self.pick("first_names"))
        if kind < 0.45:
            return capitalised(self.rng.choice(self.words)) + self.one_of(".", ".", ".", "?", "!")
        if kind < 0.55:
            return capitalised(f"{self.rng.choice(self.words)} {self.rng.choice(self.words)}.")
        if kind < 0.63:
            mark = self.one_of(".", "?", "!")
            return capitalised(f"{self.pick('adjectives')} {self.pick('nouns')}{mark}")
        if kind < 0.7:
            return capitalised(self.thing()) + "."
        if kind < 0.77:
            return f"{self.pick('first_names')} {self.pick('last_names')}{self.one_of('.', '?')}"
        if kind < 0.84:
            return capitalised(f"{self.pick('verbs')} the {self.pick('nouns')}.")
        if kind < 0.9:
            return capitalised(f"{self.pick('acts')} {self.pick('adverbs')}{self.one_of('.', '!')}")
        if kind < 0.96:
            count = self.rng.randint(2, 4)
            return capitalised(", ".join(self.rng.choice(self.words) for _ in range(count))) + "."
        kind_of = self.one_of("cities", "days", "months")
        return self.pick(kind_of) + self.one_of(".", "!", "?")

    # ---- numbers

    def number(self) -> str:
        return str(
            self.rng.choice(
                [
                    self.rng.randint(0, 10),
                    self.rng.randint(0, 99),
                    self.rng.randint(1, 60),
                    self.rng.randint(10, 999),
                    self.rng.randint(100, 9999),
                ]
            )
        )

    def clock(self) -> str:
        minutes = self.rng.choice([0, 15, 30, 45, *range(60)])
        return f"{self.rng.randint(1, 12)}:{minutes:02d}"

    def with_numbers(self) -> str:
        pick, one_of, rng = self.pick, self.one_of, self.rng
        number, clock = self.number(), self.clock()
        day = rng.randint(1, 31)
        cents = one_of("", "", ".50", ".99", ".25", f".{rng.randint(1, 99):02d}")
        title = one_of("Mr.", "Mrs.", "Dr.", "Ms.", "Prof.", "Miss", "Capt.")
        return one_of(
            f"It is {clock} {one_of('AM', 'PM', 'in the morning', 'p.m.', 'a.m.', 'now')}.",
            f"The {one_of('meeting', 'train', 'bus', 'flight', 'class', 'show', 'party')}"
            f" {one_of('starts', 'leaves', 'arrives', 'ends')} at {clock}.",
            f"{one_of('Set an alarm for', 'Set the timer for', 'Move the meeting to')}"
            f" {rng.randint(1, 12)} {one_of('AM', 'PM')}.",
            f"{pick('months')} {day}, {rng.randint(1700, 2040)}.",
            f"{one_of('She was born', 'He died', 'The war ended', 'It was built', 'They met')}"
            f" in {rng.randint(1500, 2030)}.",
            f"{one_of('My appointment', 'The deadline', 'His birthday', 'The wedding')} is on"
            f" {pick('days')}, {pick('months')} {day}.",
            f"{one_of('It costs', 'The price is', 'You owe me', 'I paid', 'She earned')}"
            f" {one_of('$', '$', '$', '£', '€')}{number}{cents}.",
            f"{one_of('There are', 'I have', 'We need', 'She bought', 'They sold')}"
            f" {number} {pick('units')}.",
            f"{rng.randint(1, 100)}% of {one_of('the people', 'the water', 'our customers')}"
            f" {one_of('agree', 'was lost', 'came back')}.",
            f"{one_of('Chapter', 'Page', 'Room', 'Number', 'Step', 'Gate', 'Platform', 'Flight')}"
            f" {number}.",
            f"The {pick('ordinals')} {pick('nouns')} is {pick('adjectives')}.",
            f"The {rng.randint(1, 31)}{one_of('th')} {pick('nouns')} is {pick('adjectives')}."
            if day > 20
            else f"{pick('first_names')} came {one_of('1st', '2nd', '3rd', '4th', '10th')}.",
            f"{rng.randint(0, 99)} {one_of('plus', 'minus', 'times')} {rng.randint(0, 99)} is"
            f" {number}.",
            f"{number}.",
            ", ".join(str(rng.randint(0, 9)) for _ in range(rng.randint(3, 7))) + ".",
            f"The temperature {one_of('is', 'will be', 'was')} {rng.randint(0, 110)} degrees"
            f" {one_of('today', 'tomorrow', 'outside', 'in ' + pick('cities'))}.",
            f"{one_of('Turn on', 'Turn off', 'Switch on', 'Check', 'Turn down')} the"
            f" {pick('devices')}{one_of('', ' at ' + clock, ' please', ' now')}.",
            f"{title} {pick('last_names')} {one_of('lives', 'works', 'was born')} in"
            f" {pick('cities')}.",
            f"{one_of('Drive', 'Walk', 'Continue')} for {number} {one_of('miles', 'feet', 'km')},"
            f" then turn {one_of('left', 'right')}.",
            f"{pick('first_names')} is {rng.randint(2, 99)} years old.",
            f"It weighs {rng.randint(1, 99)}.{rng.randint(1, 9)}"
            f" {one_of('kg', 'pounds', 'kilograms')}.",
            f"The distance from {pick('cities')} to {pick('cities')} is {number} miles.",
            f"{pick('first_names')} {pick('last_names')} {one_of('called', 'arrived', 'left')} at"
            f" {clock}.",
            f"I live at {rng.randint(1, 999)} {pick('last_names')} {one_of('St.', 'Ave.', 'Rd.')}",
        )


def article(noun: str) -> str:
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def with_s(verb: str) -> str:
    if verb.endswith(("s", "sh", "ch", "x", "o")):
        return verb + "es"
    if verb.endswith("y") and verb[-2] not in "aeiou":
        return verb[:-1] + "ies"
    return verb + "s"
