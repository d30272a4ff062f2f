"""Written English to the words that a reader says: numbers, times, prices, abbreviations."""

from __future__ import annotations

import re

_ABBREVIATIONS = {
    "Mr.": "Mister", "Mrs.": "Missus", "Ms.": "Miz", "Dr.": "Doctor", "Prof.": "Professor",
    "St.": "Street", "Ave.": "Avenue", "Rd.": "Road", "vs.": "versus", "etc.": "et cetera",
    "approx.": "approximately", "dept.": "department", "Jr.": "Junior", "Sr.": "Senior",
    "e.g.": "for example", "i.e.": "that is", "No.": "number", "Capt.": "Captain",
    "Gen.": "General", "Lt.": "Lieutenant", "Sgt.": "Sergeant",
    "lbs.": "pounds", "oz.": "ounces", "ft.": "feet", "in.": "inches", "mi.": "miles",
}  # fmt: skip
_UNITS = {
    "kg": "kilograms", "km": "kilometers", "cm": "centimeters", "mm": "millimeters",
    "mph": "miles per hour", "lb": "pounds", "ml": "milliliters", "GB": "gigabytes",
    "MB": "megabytes", "GHz": "gigahertz", "kHz": "kilohertz",
}  # fmt: skip
_SIGNS = {"&": " and ", "+": " plus ", "=": " equals ", "@": " at ", "°": " degrees"}
_CURRENCIES = {"$": ("dollar", "cent"), "£": ("pound", "penny"), "€": ("euro", "cent")}
_ABBREVIATION = re.compile(
    r"(?<![\w.])(" + "|".join(re.escape(key) for key in sorted(_ABBREVIATIONS, key=len)[::-1]) + ")"
)
_DAY_AFTER_MONTH = re.compile(
    r"\b(January|February|March|April|May|June|July|August|September|October|November|December)"
    r" (\d{1,2})\b(?!:)"
)
_YEAR_PLACES = re.compile(r"\b(in|since|of|until|from|by|, ) ?(1[1-9]\d\d|20\d\d)\b(?![%:.]\d)")


def spoken(text: str) -> str:
    """The words of a written sentence; punctuation stays where a pause belongs."""
    if not any(character.isdigit() or character in "&+=@°." for character in text):
        return text
    text = re.sub(r"(?<=\d),(?=\d{3}\b)", "", text)
    text = _ABBREVIATION.sub(_abbreviation, text)
    text = re.sub(r"(?i)(?<=\d)\s?([ap])\.m\.$", lambda m: f" {m[1].upper()}M.", text)
    text = re.sub(r"(?i)(?<=\d)\s?([ap])(?:\.m\.|m\b)", lambda m: f" {m[1].upper()}M", text)
    text = re.sub(r"([$£€])(\d+)(?:\.(\d\d))?( (?:million|billion|thousand))?", _price, text)
    text = re.sub(r"\b(\d{1,2}):(\d\d)\b", _time, text)
    text = re.sub(r"(\d)\s?%", r"\1 percent", text)
    text = re.sub(r"(\d)\s?(" + "|".join(_UNITS) + r")\b", lambda m: f"{m[1]} {_UNITS[m[2]]}", text)
    text = re.sub(r"\b(\d+)(st|nd|rd|th)\b", lambda m: words(int(m[1]), "ordinal"), text)
    text = _DAY_AFTER_MONTH.sub(lambda m: f"{m[1]} {words(int(m[2]), 'ordinal')}", text)
    text = _YEAR_PLACES.sub(lambda m: f"{m[1]} {words(int(m[2]), 'year')}", text)
    for sign, word in _SIGNS.items():
        text = text.replace(sign, word)
    text = re.sub(r"\b(\d+)\.(\d+)\b", _decimal, text)
    text = re.sub(r"(?<=\d)\s?[-–]\s?(?=\d)", " to ", text)
    text = re.sub(r"\d+", lambda m: _whole(m[0]), text)
    return re.sub(r"\s+", " ", text).strip()


def words(number: int, to: str = "cardinal") -> str:
    """An integer in words: cardinal, ordinal or year."""
    from num2words import num2words

    said = str(num2words(number, to=to)).replace(",", "").replace("-", " ")
    return said.replace(" and ", " ")


def _abbreviation(match: re.Match[str]) -> str:
    word = _ABBREVIATIONS[match[1]]
    at_end = not match.string[match.end() :].strip()
    return word + "." if at_end else word


def _price(match: re.Match[str]) -> str:
    major, minor = _CURRENCIES[match[1]]
    amount, size = int(match[2]), match[4]
    if size:
        return f"{words(amount)}{size} {major}s"
    said = f"{words(amount)} {major}{'' if amount == 1 else 's'}"
    if match[3] and int(match[3]):
        cents = int(match[3])
        small = minor if cents == 1 else ("pence" if minor == "penny" else minor + "s")
        said = f"{said} and {words(cents)} {small}"
    return said


def _time(match: re.Match[str]) -> str:
    hours, minutes = int(match[1]), int(match[2])
    if minutes == 0:
        return f"{words(hours)} o'clock"
    return f"{words(hours)} {'oh ' if minutes < 10 else ''}{words(minutes)}"


def _decimal(match: re.Match[str]) -> str:
    digits = " ".join(words(int(digit)) for digit in match[2])
    return f"{words(int(match[1]))} point {digits}"


def _whole(digits: str) -> str:
    if len(digits) > 6 or (digits[0] == "0" and len(digits) > 1):
        return " ".join(words(int(digit)) for digit in digits)
    return words(int(digits))
