"""Steps that repeat the last one: nothing changed but gradients, and perhaps numbers of the groups.

After a kernel of many bytes little else is in the processor's caches. What Python does around a step then costs twenty
times as much as when it is warm; so a repeated step runs as little of Python as can be. One call checks all that must
be checked, as in `survey`: the groups' dicts, their lists, parameters, gradients, step counts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from rulec.backend.capabilities import replay_of
from rulec.backend.protocol import ReplayableCall
from rulec.environment import LEVEL
from rulec.errors import PartialUpdate
from rulec.kernel.multi_tensor.address import array_address
from rulec.runtime.buckets.launch import Launch
from rulec.runtime.buckets.scalar_table import Numbers, ScalarRows
from rulec.torch.fastpath.survey import ANSWER, REPEAT, Contents, Survey, job_of
from rulec.torch.fastpath.survey_source import COUNTS
from rulec.torch.groups.capture import CaptureMode
from rulec.torch.groups.engine import GroupNumbers
from rulec.torch.states.store import Store
from rulec.torch.step.plan import StepPlan

#: The place of a bucket's step count in its row of `COUNTS`.
_T = COUNTS.index("t")


class _Tables:
    """The scalar table of each bucket in the last step taken; `counts` are the live step counts of the buckets."""

    def __init__(self, counts: Numbers, last: Sequence[Numbers]) -> None:
        self._counts, self._first = counts, counts.copy()
        self._last, self._rows = [*last], [*last]

    def take(self, rows: Sequence[Numbers]) -> None:
        """Goes on with these rows, for each bucket one table for each of the next steps."""
        self._last = [self.last(bucket) for bucket in range(len(rows))]
        self._first, self._rows = self._counts.copy(), [*rows]

    def last(self, bucket: int) -> Numbers:
        """The table of a bucket in the last step taken."""
        taken = int(self._counts[bucket] - self._first[bucket])
        return self._rows[bucket][taken - 1] if taken else self._last[bucket]


class Repeat:
    """The steps after a step of these launches, with new gradients and new numbers of the groups."""

    def __init__(
        self, survey: Survey, groups: list[dict[str, Any]], numbers: GroupNumbers, store: Store,
        launches: Sequence[Launch], capture_mode: CaptureMode,
    ) -> None:  # fmt: skip
        self._survey, self._groups, self._numbers, self._store = survey, groups, numbers, store
        self._launches = launches
        self._may_be_captured = "cuda" in capture_mode.types
        #: The number of further steps whose rows of the scalar table are known.
        self.left = 0
        self._rows: list[Numbers] = []
        #: The replayable call of each bucket.
        self.calls = [_replayable(launch) for launch in launches]
        self._runs = [call.run for call in self.calls]
        #: Whether an interrupt left a step of which nobody can say how far it went.
        self.unfinished = False
        counts = np.array([_counts(*of) for of in zip(launches, self.calls, strict=True)], np.int64)
        self._counts = counts[:, _T].view(np.float64)
        self._tables = _Tables(self._counts, [launch.rows.table for launch in launches])
        for bucket, launch in enumerate(launches):
            table = partial(self._tables.last, bucket)
            launch.statistics[:] = [replace(known, table=table) for known in launch.statistics]
        self._contents = Contents([groups, *survey.lists], groups)
        self._job = job_of(survey, REPEAT, self._contents, counts)

    def done(self, groups: Any, state: Any) -> bool:
        """Takes the step. False, and nothing written, where more than gradients and numbers is not as before.

        HyperError, and nothing written, where a new number is out of its range.
        """
        store = self._store
        if groups is not self._groups or state is not store or store.edits.changed:
            return False
        if self._may_be_captured and torch.cuda.is_current_stream_capturing():  # a plain step refuses that in words
            return False
        done = 0
        try:
            if not self.left:
                self._take_numbers()
                if not self.left:
                    self._take_rows()
            if not self._job.done() and not (self._take_numbers() and self._job.done()):
                return False
            self.left -= 1
            for run in self._runs:
                run()
                done += 1
            self._job.words[ANSWER] = 0  # written out: a step counts its calls
        except Exception as error:
            if self._job.answered:
                self._put_back(done, error)
            raise
        except BaseException:
            self._finish()
            raise
        finally:
            self._survey.release()
        return True

    def _take_numbers(self) -> bool:
        """Takes over new numbers of the groups, and rows for them; False where there are none, or more is new."""
        version = self._numbers.version
        taken = self._numbers.take() and self._contents.take_dicts()
        if self._numbers.version != version:
            self._take_rows()
        return taken

    def _take_rows(self) -> None:
        """Has the calls go on with the rows of the next steps."""
        self.left = 0
        self._rows = [_rows_ahead(*each) for each in zip(self._launches, self._counts.tolist(), strict=True)]
        self._tables.take(self._rows)
        for call, rows in zip(self.calls, self._rows, strict=True):
            call.renew(rows)
        self.left = min(map(len, self._rows))

    def _finish(self) -> None:
        """Ends the step that an interrupt came into, if it had begun and calls say whether they ran."""
        self.left = 0
        if not self._job.answered:
            return
        if not all(call.is_exact for call in self.calls):
            self.unfinished = True
            return
        for call in self.calls:
            if not ctypes.c_int64.from_address(call.next).value:
                call.run()
        self._job.forget()

    def _put_back(self, done: int, error: Exception) -> None:
        """Counts the step back for buckets without an update; PartialUpdate where `done` buckets have theirs."""
        self._job.forget()
        launches = self._launches
        for launch in launches[done:]:
            launch.part.bucket.counts.advance(None, -1)
        if done:
            names = [tensor.name for launch in launches[:done] for tensor in launch.part.tensors]
            some = ", ".join(names[:5])
            raise PartialUpdate(
                f"a step failed after {len(names)} tensors were updated ({some}...): {error}"
            ) from error


def repeat_of(
    plan: StepPlan, survey: Survey, groups: Any, numbers: GroupNumbers, store: Store, launches: Sequence[Launch],
    capture_mode: CaptureMode,
) -> Repeat | None:  # fmt: skip
    """The repeat of a step with these launches; None where a step may do more than launch kernels."""
    if LEVEL or type(groups) is not list or not launches or not all(map(_is_plain, launches)):
        return None
    if not {dict}.issuperset(map(type, groups)) or not numbers.are_steady():
        return None
    repeat = Repeat(survey, groups, numbers, store, launches, capture_mode)
    buckets = [launch.part.bucket.origin or launch.part.bucket for launch in launches]
    call_of = {id(bucket): call for bucket, call in zip(buckets, repeat.calls, strict=True)}
    places: dict[int, int] = {}
    for share in plan.shares:
        tensors = [share.engine.tensors[i] for i in share.ids]
        there = range(len(tensors)) if share.places is None else share.places
        calls = [call_of[id(t.bucket)] for t in tensors]
        at = [call.gradients + call.stride * t.position for call, t in zip(calls, tensors, strict=True)]
        places |= zip(there, at, strict=True)
    survey.point([places[i] for i in range(len(plan.written))], launches)
    return repeat


def _is_plain(launch: Launch) -> bool:
    """Whether a launch is one call of a kernel over a whole bucket, with one row of each group for all its tensors."""
    bucket, version, rows = launch.part.bucket, launch.version, launch.version.rows
    counts, shared = bucket.counts, launch.common.shared
    return (
        not version.plan.staged and not version.waits and not version.turns
        and isinstance(rows, ScalarRows) and launch.rows.index is rows.index
        and bucket.versions.get(()) is version and launch.part.positions is None and not launch.inputs
        and not launch.scalar_states and not shared.values and not launch.skipped
        and counts.library is None and counts.numbers.dtype == np.float32 and counts.numbers.flags.c_contiguous
        and version.call is not None and replay_of(version.call) is not None
    )  # fmt: skip


def _replayable(launch: Launch) -> ReplayableCall:
    """The call of a plain launch that may be run again and again."""
    replay = None if launch.version.call is None else replay_of(launch.version.call)
    assert replay is not None
    return replay(launch.rows)


def _rows_ahead(launch: Launch, count: float) -> Numbers:
    """The rows of the scalar table for the steps after this count of a launch's tensors."""
    rows, t, hyper = launch.version.rows, int(count) + 1, launch.common.hyper.named
    assert isinstance(rows, ScalarRows)
    rows.shared(t, hyper)
    return rows.ahead(t, hyper)


def _counts(launch: Launch, call: ReplayableCall) -> tuple[int, ...]:
    """The row of a bucket in the job, as `COUNTS` has it."""
    numbers = launch.part.bucket.counts.numbers
    t = int(np.float64(numbers[0]).view(np.int64))
    return array_address(numbers), len(numbers), t, call.table, launch.rows.table.nbytes, call.next
