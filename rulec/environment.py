"""Environment variables with numbers, such as RULEC_DEBUG.

RULEC_DEBUG: 1 prints the backend and bucket of each call, 2 also time and bandwidth, 3 each pass of the compiler, 4 the
source of each kernel.
"""

from __future__ import annotations

import os

from rulec.errors import RulecError


def whole_number(variable: str, meaning: str, most: int) -> int:
    """The number in a variable, from 0 to `most`; 0 where it is not set or empty.

    RulecError, with the number's `meaning` in words, for any other text.
    """
    text = os.environ.get(variable, "").strip()
    number = int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else -1
    if text and not 0 <= number <= most:
        raise RulecError(f"{variable} is {text!r:.40}: set it to {meaning}, or unset it")
    return number if text else 0


def debug_level() -> int:
    """The level in RULEC_DEBUG; 0 is quiet.

    1 prints the backend and bucket of each call, 2 also time and bandwidth, 3 each pass of the compiler, and 4 the
    source of each kernel.
    """
    return whole_number("RULEC_DEBUG", "a number from 0 to 4", 4)


#: The level asked for; 0 is quiet.
LEVEL = debug_level()
