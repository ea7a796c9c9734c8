"""Running the parts of a measurement within its time: a part that fails, hangs or dies costs itself alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from benchmarks.gpu.part import Finding, Findings, Part, Section

#: Seconds that a process may take to start, beyond the time of its part.
START = 60.0


@dataclass(frozen=True)
class Started:
    """A process has begun its part: imports and the preparation of the device are done."""


@dataclass(frozen=True)
class Ended:
    """A process is done with its part; `fault` is a sentence where it failed.

    If not `usable`, the process takes no more parts.
    """

    fault: str | None = None
    usable: bool = True


Message: TypeAlias = Started | Ended | Finding


class Crew(Protocol):
    """Processes that work on parts, by number from 0 to `size` - 1; an ended one is started again when needed."""

    size: int

    def give(self, worker: int, part: Part) -> None:
        """Has a worker begin a part."""
        ...

    def wait(self, seconds: float) -> Iterable[tuple[int, Message]]:
        """The messages of workers, as soon as there is one; none after `seconds`."""
        ...

    def end(self, worker: int) -> None:
        """Ends a worker in the middle of its part."""
        ...


@dataclass
class _Job:
    """A part under way. `until` is the time at which it is ended: by its own limit or by its section's."""

    part: Part
    until: float


class Run:
    """Runs sections, all of them within `seconds` from now.

    `changed` is called whenever a part is over, `keep` after each finding; `clock` tells the time in seconds.
    """

    def __init__(
        self, crew: Crew, seconds: float, clock: Callable[[], float], changed: Callable[[], object],
        keep: Callable[[], object] = lambda: None,
    ) -> None:  # fmt: skip
        self._crew, self._clock, self._changed, self._keep = crew, clock, changed, keep
        self._deadline = clock() + seconds
        self._findings, self._begun = Findings(), 0

    def section(self, section: Section, findings: Findings) -> int:
        """Runs a section, and adds to its findings; failed parts, and parts without time, are noted.

        Returns the number of parts that were begun.
        """
        self._findings, self._begun = findings, 0
        deadline = min(self._deadline, self._clock() + section.seconds)
        free = list(range(self._crew.size if section.together else 1))
        waiting, jobs = deque(section.parts), dict[int, _Job]()
        while waiting or jobs:
            while waiting and free:
                part = waiting.popleft()
                if self._fits(part, deadline):
                    worker = free.pop(0)
                    jobs[worker] = self._begin(worker, part, deadline)
            if jobs:
                free += self._listen(jobs, deadline)
        return self._begun

    def _fits(self, part: Part, deadline: float) -> bool:
        left = deadline - self._clock()
        if left >= part.least:
            return True
        self._over(f"{part.name}: not run: {max(left, 0):.0f} s were left of its time, and it may take {part.least:g}")
        return False

    def _begin(self, worker: int, part: Part, deadline: float) -> _Job:
        self._crew.give(worker, part)
        self._begun += 1
        return _Job(part, min(deadline, self._clock() + START + part.seconds))

    def _listen(self, jobs: dict[int, _Job], deadline: float) -> list[int]:
        """The workers that are free again, after the next messages or the end of the first overdue part."""
        soonest = min(job.until for job in jobs.values())
        freed = []
        for worker, message in self._crew.wait(max(0.0, soonest - self._clock())):
            job = jobs.get(worker)
            if job is None:  # of an idle process: it is gone, and begun again when it is needed
                continue
            if isinstance(message, Started):
                job.until = min(deadline, self._clock() + job.part.seconds)
            elif isinstance(message, Ended):
                self._over(f"{job.part.name}: failed: {message.fault}" if message.fault else None)
                freed.append(worker)
                del jobs[worker]
            else:
                self._findings.add(message)
                self._keep()
        return freed + self._overdue(jobs)

    def _overdue(self, jobs: dict[int, _Job]) -> list[int]:
        """Ends the workers whose time is over."""
        late = [worker for worker, job in jobs.items() if self._clock() >= job.until]
        for worker in late:
            part = jobs.pop(worker).part
            self._crew.end(worker)
            self._over(f"{part.name}: failed: it was not done when its time was over, and was ended")
        return late

    def _over(self, note: str | None) -> None:
        if note is not None:
            self._findings.say(note)
        self._changed()
