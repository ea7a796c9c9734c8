"""One bucket's share of a step, checked and ready to be written."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rulec.backend.protocol import Rows
from rulec.compiler.ir import Program
from rulec.errors import BackendUnsupported
from rulec.language.expr.node import Op
from rulec.runtime.buckets.bucket import Version
from rulec.runtime.buckets.context import Common
from rulec.runtime.buckets.launch import Part
from rulec.runtime.buckets.scalar_table import Numbers


@dataclass(slots=True)
class Launch:
    """One bucket's share of a step: nothing of it has been written yet.

    `scalar_states` are new values of states that follow from hyper-parameters and `t`, for each fired tensor. `inputs`
    has, by name, a number or one array for each fired tensor. During the run, `wrote` is True once something may be
    written, and `skipped` gets the names of skipped tensors.
    """

    common: Common
    part: Part
    version: Version
    grads: Sequence[Any]
    rows: Rows
    scalar_states: Mapping[str, Numbers]
    inputs: Mapping[str, Any]
    wrote: bool = False
    skipped: list[str] = field(default_factory=list)

    def stop_turning(self) -> None:
        """Takes the version that copies the entries of histories, now and from now on."""
        if self.version.turns:
            self.part.bucket.stop_turning()
            self.version = self.part.bucket.version()

    @property
    def name(self) -> str:
        """The rule's name."""
        return self.version.program.name

    def kernel(
        self, stage: int, rows: Rows, fired: Sequence[int] | None, grads: Sequence[Any], scratch: Any
    ) -> Mapping[str, Any]:
        """Runs a stage over the tensors at the positions `fired`, None for all. Its reductions, by name."""
        bucket, call = self.part.bucket, self.version.call
        assert call is not None
        written = call(stage, grads, rows, scratch, tensors=fired)
        if written.params[0] is not bucket.params[0]:
            raise BackendUnsupported(bucket.backend.name, "an update in place of arrays of this kind", self.name)
        return written.reduced

    def count_levels(self) -> None:
        """Counts the step for groups and the model where this version of the program leaves their states alone.

        Another arm of a branch writes them; `t` of a group or the model counts steps, whatever arm they take.
        """
        bucket, fired = self.part.bucket, self.part.fired
        left = _left_alone(bucket.program, self.version.program)
        if left and len(self.skipped) < len(self.grads):
            self.common.shared.count(left, bucket.groups[slice(None) if fired is None else fired])

    def keep_number(self, state: str, fired: Any, values: Any, stays: Any = None) -> None:
        """Keeps the new values of a scalar state, one for each tensor at the positions `fired`.

        A tensor's is written at once, a group's and the model's at the end of the step. `stays`, on a device, is true
        for tensors that keep the old value; on the host, `fired` leaves them out.
        """
        bucket = self.part.bucket
        there = bucket.knows_only_there(state)
        if state not in bucket.scalar_states:
            library = bucket.library if there else self.common.host
            self.common.shared.keep(state, bucket.groups[fired], values, library, stays)
            return
        numbers = bucket.scalar_states[state].numbers
        if not there:
            numbers[fired] = values
            return
        if stays is not None:
            old = numbers if isinstance(fired, slice) else bucket.library.take(numbers, fired)
            values = bucket.library.arithmetic[Op.WHERE](stays, old, values)
        bucket.library.put(numbers, fired, values)


@functools.cache
def _left_alone(whole: Program, version: Program) -> tuple[str, ...]:
    """The states of groups and the model that a program writes, and its version for some arms of branches does not."""
    written = {store.buffer for store in (*version.scalars.stores, *version.finish)}
    stores = (*whole.scalars.stores, *whole.finish)
    shared = [s.buffer for s in stores if whole.buffer(s.buffer).axes.letters in ("", "k")]
    return tuple(state for state in dict.fromkeys(shared) if state not in written)
