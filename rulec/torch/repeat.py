"""Steps that repeat the last one: nothing changed but gradients, and the next row of the scalar table is known.

After a kernel of many bytes little else is in the processor's caches. What Python does around a step then costs twenty
times as much as when it is warm; so a repeated step runs as little of Python as can be. One call checks all that must
be checked, as in `survey`: the groups' dicts, their lists, parameters, gradients, step counts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch

from rulec.backend.protocol import Standing
from rulec.errors import PartialUpdate
from rulec.kernel.bucket.address import array_address
from rulec.runtime.counts import Counts
from rulec.runtime.debug import LEVEL
from rulec.runtime.launch import Launch
from rulec.runtime.rows import Numbers, ScalarRows
from rulec.torch.plans import StepPlan
from rulec.torch.residence import Residence
from rulec.torch.store import Store
from rulec.torch.survey import ANSWER, REPEAT, Contents, Survey, job_of

#: Classes of values that stay what they are as long as they are the same object.
_STEADY = frozenset({float, int, bool, str, type(None)})


class Repeat:
    """The steps after a step of these launches, as many as there are `rows` of the scalar table for each launch."""

    def __init__(
        self, survey: Survey, groups: list[dict[str, Any]], store: Store, launches: Sequence[Launch],
        rows: Sequence[Numbers], residence: Residence,
    ) -> None:  # fmt: skip
        self._survey, self._groups, self._store, self._kept = survey, groups, store, (launches, rows)
        self._may_be_captured = "cuda" in residence.types
        #: The number of further steps.
        self.left = min(map(len, rows))
        #: What each bucket's call is run by.
        self.calls = [
            launch.version.call.standing(launch.rows, ahead)  # type: ignore[union-attr]
            for launch, ahead in zip(launches, rows, strict=True)
        ]
        self._runs = [call.run for call in self.calls]
        #: Whether an interrupt left a step of which nobody can say how far it went.
        self.unfinished = False
        counts = np.array([_counts(*of) for of in zip(launches, rows, self.calls, strict=True)], np.int64)
        self._job = job_of(survey, REPEAT, Contents([groups, *survey.lists], groups), counts)

    def done(self, groups: Any, state: Any) -> bool:
        """Takes the step. False, and nothing written, where it is not as the last one."""
        store = self._store
        if not self.left or groups is not self._groups or state is not store or store.edits.changed:
            return False
        if self._may_be_captured and torch.cuda.is_current_stream_capturing():  # a plain step refuses that in words
            return False
        done = 0
        try:
            if not self._job.done():
                return False
            self.left -= 1
            for run in self._runs:
                run()
                done += 1
            self._job.words[ANSWER] = 0  # written out: a step counts its calls
        except Exception as error:
            self._put_back(done, error)
            raise
        except BaseException:
            self._finish()
            raise
        finally:
            self._survey.release()
        return True

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
        launches, _ = self._kept
        for launch in launches[done:]:
            launch.part.bucket.counts.advance(None, -1)
        if done:
            names = [tensor.name for launch in launches[:done] for tensor in launch.part.tensors]
            some = ", ".join(names[:5])
            raise PartialUpdate(
                f"a step failed after {len(names)} tensors were updated ({some}...): {error}"
            ) from error


def repeat_of(
    plan: StepPlan, survey: Survey, groups: Any, keywords: Sequence[str], store: Store, launches: Sequence[Launch],
    residence: Residence,
) -> Repeat | None:  # fmt: skip
    """The repeat of a step with these launches; None where a step may do more than launch kernels."""
    if LEVEL or type(groups) is not list or not launches or not all(map(_is_plain, launches)):
        return None
    values = chain.from_iterable([group[keyword] for keyword in keywords] for group in groups)
    rows = [_rows_ahead(launch) for launch in launches]
    if not all(map(len, rows)) or not _is_steady(values) or not {dict}.issuperset(map(type, groups)):
        return None
    repeat = Repeat(survey, groups, store, launches, rows, residence)
    call_of = {id(launch.part.bucket): call for launch, call in zip(launches, repeat.calls, strict=True)}
    places: dict[int, int] = {}
    for share in plan.shares:
        tensors = [share.engine.tensors[i] for i in share.ids]
        there = range(len(tensors)) if share.places is None else share.places
        calls = [call_of[id(t.bucket)] for t in tensors]
        at = [call.gradients + call.stride * t.position for call, t in zip(calls, tensors, strict=True)]
        places |= zip(there, at, strict=True)
    survey.point([places[i] for i in range(len(plan.written))], launches)
    return repeat


def _is_steady(values: Iterable[Any]) -> bool:
    return all(type(v) in _STEADY or (type(v) is tuple and _is_steady(v)) for v in values)


def _is_plain(launch: Launch) -> bool:
    """Whether a launch is one call of a kernel over a whole bucket, with rows of its own groups' numbers alone."""
    bucket, version = launch.part.bucket, launch.version
    counts, shared = bucket.counts, launch.common.shared
    return (
        hasattr(version.call, "standing") and not version.plan.staged and not version.waits and not version.turns
        and version.program is bucket.program and launch.part.positions is None and not launch.inputs
        and not launch.scalar_states and not shared.values and not launch.skipped
        and type(counts) is Counts and counts.numbers.dtype == np.float32 and counts.numbers.flags.c_contiguous
    )  # fmt: skip


def _rows_ahead(launch: Launch) -> Numbers:
    """The rows of the scalar table for the steps after a launch."""
    rows, count = launch.version.rows, launch.part.bucket.counts.common(None)  # type: ignore[union-attr]
    assert isinstance(rows, ScalarRows)
    ahead = rows.ahead((count or 0) + 1, launch.common.hyper.named)
    # A repeat goes on from the rows of the launch, one after the other.
    follows = len(ahead) and array_address(ahead) == array_address(launch.rows.table) + ahead.strides[0]
    return ahead if count is not None and follows else ahead[:0]


def _counts(launch: Launch, rows: Numbers, call: Standing) -> tuple[int, ...]:
    """The row of a bucket in the job, as `COUNTS` has it."""
    numbers, stride = launch.part.bucket.counts.numbers, rows.strides[0]
    t = int(np.float64(numbers[0]).view(np.int64))
    return array_address(numbers), len(numbers), t, call.table, stride, call.next
