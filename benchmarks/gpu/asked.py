"""What a run of `rulec bench gpu` is asked for: parts, a first look or block sizes, and until when."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.gpu.names import check_parts
from rulec.errors import RulecError
from rulec.language.source import did_you_mean

#: Seconds in which all is over, of a run and of a first look.
BUDGET, FIRST_BUDGET = 500.0, 280.0

#: Of these, the seconds in which processes end.
ENDING = 10.0

#: First look -> a line about it.
FIRST: Mapping[str, str] = {
    "correctness": "tests and rules by their risk: products of Muon, steps, codes, rules of every kind, operations",
    "speed": "the figures that matter most, of several parts",
}


@dataclass(frozen=True)
class Asked:
    """Parts by name, a `first` look, or with `tune` block sizes; all parts where none of these is given.

    All is over `seconds` after `begin`, on the clock of `time.monotonic`.
    """

    parts: Sequence[str] = ()
    first: str = ""
    tune: bool = False
    seconds: float | None = None
    begin: float = field(default_factory=lambda: time.monotonic())

    @property
    def budget(self) -> float:
        """The seconds in which all is over."""
        return self.seconds or (FIRST_BUDGET if self.first else BUDGET)

    def left(self) -> float:
        """The seconds that are left for parts."""
        return self.budget - ENDING - (time.monotonic() - self.begin)

    @property
    def result(self) -> str:
        """The name of the result, and of its file in a folder."""
        return "gpu_blocks" if self.tune else "gpu_first" if self.first else "gpu"

    def check(self, rules: Sequence[str] = ()) -> None:
        """RulecError for an unknown part or first look, and for two of these at once."""
        check_parts(self.parts)
        if self.tune and self.parts:
            raise RulecError("--tune measures block sizes, which are no part: leave out --tune or --part")
        if self.first and self.first not in FIRST:
            raise RulecError(
                f"there is no first look {self.first!r}{did_you_mean(self.first, FIRST)}: there are {', '.join(FIRST)}"
            )
        if self.first and (self.tune or self.parts or rules):
            raise RulecError("--first has rules and parts of its own: leave out --part, --rule and --tune")
