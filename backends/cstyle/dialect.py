"""What differs between the languages that C-style source is printed in: C99, and CUDA C."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Dialect:
    """A language of the C family.

    `backend` is who prints, for errors. `function` stands before every function whose calls are to disappear; `words`
    are spellings of its own for some of `words.WORDS`, by their names. No value of a rule is called as one of
    `reserved`. `memory` stands before the type of what lies in arrays; `simd` are lines before a loop whose passes may
    run side by side. Source in it may use int64_t, uint32_t, uint16_t, bool, INFINITY, NAN, and the functions of C99's
    math.h that `words.LIBRARY` names.
    """

    backend: str
    function: str = "RULEC_FUNCTION"
    words: Mapping[str, str] = field(default_factory=dict)
    reserved: frozenset[str] = frozenset()
    memory: str = ""
    simd: tuple[str, ...] = ()
