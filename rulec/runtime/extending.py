"""Tensors that join a bucket. All their states are allocated before the bucket changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rulec.compiler.scalars import evaluate_once
from rulec.runtime.bucket import Bucket, Tensor
from rulec.runtime.common import Common
from rulec.runtime.counts import Counts, DeviceCounts
from rulec.runtime.state import state_specs


@dataclass(frozen=True)
class Extension:
    """Tensors that will join a bucket, with the hyper-parameters and the shape facts of each."""

    common: Common
    bucket: Bucket
    tensors: Sequence[Tensor]
    hyper: Sequence[dict[str, float]]
    facts: Sequence[dict[str, float]]

    def states(self) -> list[dict[str, Any]]:
        """The initialised array states of each tensor, by name."""
        specs = state_specs(self.bucket.program, self.bucket.layout)
        each = zip(self.tensors, self.hyper, self.facts, strict=True)
        shapes = [[s.shape(t.view, h, f) for s in specs] for t, h, f in each]
        params = [t.array for t in self.tensors]
        return self.common.arrays.allocate(params, specs, shapes, self.hyper, self.facts)

    def join(self, states: list[dict[str, Any]]) -> None:
        """Adds the tensors with these states to the bucket. Nothing in it can fail."""
        bucket, tensors = self.bucket, self.tensors
        self._join_numbers()
        for position, tensor in enumerate(tensors, len(bucket.tensors)):
            tensor.bucket, tensor.position = bucket, position
        bucket.tensors += tensors
        bucket.params += [t.array for t in tensors]
        bucket.states += states
        bucket.facts += self.facts
        bucket.groups = np.array([t.group for t in bucket.tensors], np.int64)
        before = self.common.host.numbers(bucket.counts.numbers)
        counts = np.concatenate([before, np.zeros(len(tensors))]).astype(np.int64)
        if bucket.resident:
            bucket.counts = DeviceCounts(self.common.arrays.vector(counts, bucket.device), bucket.library)
            self.common.shared.count_by(bucket.library)
        else:
            bucket.counts = Counts(self.common.arrays.vector(counts))
        bucket.rebind()

    def _join_numbers(self) -> None:
        """The first values of scalar states of tensors, groups and the model."""
        bucket = self.bucket
        for buffer in bucket.program.states:
            letters = buffer.axes.letters
            if buffer.init is None or {"b", "i", "j"} & set(letters):
                continue
            each = zip(self.hyper, self.facts, strict=True)
            initial = np.array([float(evaluate_once(buffer.init, h, f, {})) for h, f in each])
            there = bucket.knows_only_there(buffer.name)
            if "n" in letters:
                old = self._numbers_of(buffer.name)
                device = bucket.device if there else None
                bucket.scalar_states[buffer.name] = self.common.arrays.vector(np.concatenate([old, initial]), device)
                continue
            of_group = "k" in letters
            places = [t.group if of_group else 0 for t in self.tensors]
            library = bucket.library if there else self.common.host
            self.common.shared.start(buffer.name, of_group, places, initial, library)

    def _numbers_of(self, state: str) -> Any:
        """A scalar state of the tensors already in the bucket, in float64."""
        have = self.bucket.scalar_states.get(state)
        return np.zeros(0) if have is None else self.common.host.numbers(have.numbers)
