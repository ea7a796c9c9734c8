"""The names in a rule: the reserved ones, the limits of the others, and the messages for names outside them."""

from __future__ import annotations

import keyword
import math
import re
import unicodedata

from rulec.language.expr.node import FACTS

#: Longest name, in characters, and longest one with the prefixes of rules within rules.
MAX_NAME, MAX_PREFIXED = 100, 600

#: Numbers that have a name.
CONSTANTS = {"inf": math.inf, "pi": math.pi}

#: Names that every step may read, besides hyper-parameters, states, inputs and its own locals.
BASE_NAMES = ("g", "grad", "p", "t", *FACTS)

#: Names with a meaning of their own, and why they cannot be assigned or declared. A function's name may be taken:
#: functions are called and values are not (Adafactor has a hyper-parameter `clip`).
RESERVED: dict[str, str] = {
    "g": "the gradient",
    "grad": "the raw gradient",
    "t": "the step count",
    **dict.fromkeys(FACTS, "a shape fact"),
    "tensor": "the number of a tensor in its group",
    "tensors": "the count of tensors in a group",
    "depth": "the number of a tensor's layer",
    "depths": "the count of layers",
    **dict.fromkeys(CONSTANTS, "a constant"),
}

#: Names that a step assigns and that nothing may be declared as.
RESULTS: dict[str, str] = {"p": "the parameter", "direction": "what the step ends in"}

#: Names that no state may have: checkpoints keep something else beside the states under them.
BESIDE_STATES: dict[str, str] = {"step": "the count of updates that is saved beside the states"}

#: How the characters of printed mathematics are typed.
_TYPED = {
    "×": "*", "·": "*", "⋅": "*", "∗": "*", "÷": "/", "−": "-", "–": "-", "²": "**2", "³": "**3", "√": "sqrt",
    "≤": "<=", "≥": ">=", "≠": "!=", "∞": "inf", "⊙": "*",
}  # fmt: skip

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")
_ACCENTS = {"\u0302": "_hat", "\u0303": "_tilde", "\u0304": "_bar"}


def is_rule_text(text: str) -> bool:
    """Whether a text in the place of a rule's name is a rule file itself."""
    return "\n" in text.strip() and re.search(r"^\s*(name|step|chain|plus)\s*:", text, re.MULTILINE) is not None


def short(text: str, most: int = 40) -> str:
    """`text` in quotes for a message, cut to `most` characters."""
    return repr(text if len(text) <= most else text[: most - 3] + "...")


def character_problem(character: str) -> str:
    """Why expressions cannot contain this character, as a sentence; empty where they can."""
    if character in _TYPED:
        return f"the character {character!r} is not part of the rule language: write {_TYPED[character]}"
    known = character.isalnum() or character in "_ \n+-*/%@<>=!().,[]:#\"'"
    return "" if known else f"the character {character!r} is not part of the rule language"


def name_problem(identifier: str) -> str:
    """Why `identifier` cannot be the name of anything in a rule, as a sentence; empty where it can."""
    for character in set(identifier) & _TYPED.keys():
        return character_problem(character)
    longest = max(map(len, identifier.split(".")))
    if longest > MAX_NAME or len(identifier) > MAX_PREFIXED:
        most = MAX_NAME if longest > MAX_NAME else MAX_PREFIXED
        return f"the name {short(identifier)} has {len(identifier)} characters: use at most {most}"
    if _NAME.fullmatch(identifier):
        words = [part for part in identifier.split(".") if keyword.iskeyword(part)]
        return f"{words[0]!r} is a word of Python: choose another name, such as {words[0] + '_'!r}" if words else ""
    spelt = ascii_spelling(identifier)
    hint = f", as in {spelt!r}" if spelt else ""
    return f"{short(identifier)} is no name: use letters from a to z, digits and _{hint}"


def ascii_spelling(identifier: str) -> str:
    """The name spelt out in ASCII, `beta1` for `β1`; empty where the spelling is not a name."""
    parts = []
    for letter in unicodedata.normalize("NFKD", identifier):
        words = unicodedata.name(letter, "").split()
        if letter.isascii():
            parts.append(letter if letter.isalnum() else "_")
        elif letter in _ACCENTS:
            parts.append(_ACCENTS[letter])
        elif words[1:3] == ["SMALL", "LETTER"] or words[1:3] == ["CAPITAL", "LETTER"]:
            parts.append(words[-1].lower() if words[1] == "SMALL" else words[-1].capitalize())
    spelt = "".join(parts).strip("_")
    return spelt if _NAME.fullmatch(spelt) and not keyword.iskeyword(spelt) else ""


def declared_problem(identifier: str) -> str:
    """Why nothing may be declared under this name, as a sentence: it is not a name, or has a meaning already.

    Empty where it may be declared.
    """
    meaning = RESERVED.get(identifier) or RESULTS.get(identifier)
    if meaning:
        return f"{identifier!r} is {meaning}: choose another name"
    problem = name_problem(identifier)
    if not problem and identifier.startswith("_"):  # a named tuple has no such field
        return f"{short(identifier)} begins with an underscore: choose a name that begins with a letter"
    return problem
