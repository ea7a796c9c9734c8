"""The number of arrivals of each parameter's gradient in a backward pass: the last one completes the gradient.

Within one backward pass of torch's a parameter's contributions are summed before they arrive. They arrive several times
where there are several passes: segments, and activations that are recomputed by the reentrant checkpoint. That cannot
be known ahead, so one step is watched, and its updates are deferred.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class Arrivals:
    """The largest number of arrivals of each parameter so far, by place; at first the `assumed` one.

    Steps in which fewer arrive are deferred for the parameters concerned; the number is not lowered, since the next
    step may have more again. Parameters that are `late`, being read again after their last arrival, always wait.
    """

    def __init__(self, assumed: int | None = None) -> None:
        self._assumed = assumed or 0
        self._seen: dict[int, int] = {}
        self.late: set[int] = set()
        #: Whether every read of parameters is looked at in the next pass.
        self.watches = True

    def expected(self, place: int) -> int:
        """How many arrivals there will be; 0 where that is not known, or the update must wait."""
        return 0 if place in self.late else self._seen.get(place, self._assumed)

    def learn(self, counts: Mapping[int, int], late: Iterable[int]) -> None:
        """Takes over what a pass has shown."""
        self.watches = not counts.keys() <= self._seen.keys()
        for place, count in counts.items():
            self._seen[place] = max(count, self._seen.get(place, 0))
        self.late.update(late)

    def forget(self) -> None:
        """Watches the next step anew, whatever was assumed."""
        self._assumed = 0
        self._seen.clear()
        self.late.clear()
        self.watches = True
