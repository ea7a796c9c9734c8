"""The differences between languages of the C family: C99, CUDA C, OpenCL C."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Dialect:
    """A language of the C family.

    `backend` is the backend's name, for errors. `function` stands before every function that the compiler should
    inline. `words` has the dialect's spellings of some of `words.WORDS`, by name. No value of a rule gets a name in
    `reserved`. `memory` stands before the type of array elements. `simd` are lines before a loop with independent
    passes; `table` stands before a table of constants. Source may use int64_t, uint32_t, uint16_t, bool, INFINITY,
    NAN, and from C99's math.h `words.LIBRARY`.
    """

    backend: str
    function: str = "RULEC_FUNCTION"
    words: Mapping[str, str] = field(default_factory=dict)
    reserved: frozenset[str] = frozenset()
    memory: str = ""
    simd: tuple[str, ...] = ()
    table: str = "static const"
