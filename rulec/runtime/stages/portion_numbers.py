"""The numbers of a portion of tensors: columns of the scalar table, shape facts, hyper-parameters and scalar buffers.

Here they lie in main memory; `rulec.runtime.stages.device_arguments` is for a device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rulec.backend.protocol import Rows
from rulec.language.expr.node import Node
from rulec.runtime.buckets.launch import Launch, Portion


class PortionNumbers:
    """The numbers of one portion: columns of `rows` for kernels, and numbers for the values between kernels.

    A number is of a tensor, of its group, or of the model.
    """

    def __init__(self, launch: Launch, portion: Portion) -> None:
        self.launch, self.portion = launch, portion
        self.program, self.layout = launch.version.program, launch.version.layout
        self.library, self.groups = portion.bucket.library, portion.groups
        self.rows = self._rows()

    def __len__(self) -> int:
        return len(self.portion)

    def _rows(self) -> Rows:
        """The rows of these tensors, one for each where late columns may differ between tensors."""
        rows, plan = self.launch.rows, self.launch.version.plan
        if not self.program.late:
            return rows
        one = len(rows.table) == 1 and plan.late_alike
        table = np.zeros((1 if one else len(self.portion), len(self.program.columns)))
        table[:, : rows.table.shape[1]] = rows.table if one else rows.table[rows.index[self.portion.at]]
        return Rows(table, rows.index if one else self.portion.index)

    def column(self, index: int) -> Any:
        """A column of the scalar table: a number for each tensor, or one where they share a row."""
        table = self.rows.table
        if len(table) == 1:
            return table[0, index]
        return self.library.take(table[:, index], self.rows.index[self.portion.at])

    def fact(self, name: str) -> Any:
        """A shape fact, for each tensor."""
        return self.portion.fact(name)

    def known(self, value: Node, numbers: Any, i: int) -> Any:
        """The number of tensor i, which the host knows."""
        return self.library.at(numbers, i)

    def fill(self, index: int, numbers: Any) -> None:
        """Writes a late column into the table."""
        table = self.rows.table
        table[:, index] = np.ravel(numbers)[0] if len(table) == 1 else numbers

    def facts(self, i: int) -> Mapping[str, float]:
        """The shape facts of a tensor."""
        return self.portion.bucket.facts[self.portion.positions[i]]

    def hyper(self, i: int) -> Mapping[str, float]:
        """The hyper-parameters of a tensor."""
        group = self.groups[i]
        return {name: values[group] for name, values in self.launch.common.hyper.named.items()}

    def tensor_number(self, i: int) -> int:
        """The number that makes a tensor's random numbers different from other tensors'."""
        return self.portion.tensors[i].number

    def numbers(self, buffer: str) -> Any:
        """The value of a scalar buffer, for each tensor."""
        bucket, common = self.portion.bucket, self.launch.common
        if buffer in self.launch.inputs:
            return np.float64(self.launch.inputs[buffer])
        if buffer in bucket.scalar_states:
            return bucket.scalar_states[buffer].numbers[self.portion.at].astype(np.float64)
        shared = self.library.numbers(common.shared.values[buffer])
        return shared[self.groups] if "k" in self.program.buffer(buffer).axes.letters else shared[0]
