"""The arguments of kernels on a device, where the scalar table lies on the device too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from rulec.backend.protocol import Rows
from rulec.compiler.scalars import evaluate_once
from rulec.language.expr.node import Node, Op
from rulec.runtime.buckets.launch import Launch, Portion
from rulec.runtime.buckets.scalar_table_device import known_number
from rulec.runtime.stages.kernel_arguments import KernelArguments


class DeviceArguments(KernelArguments):
    """The arguments of kernels on a device, where the rows of the table are too: their columns, and numbers of them."""

    def __init__(self, launch: Launch, portion: Portion) -> None:
        self._host: Rows | None = None
        super().__init__(launch, portion)
        self._columns = self.library.columns(self.rows.table)
        self._alike = self._columns_alike()

    @cached_property
    def _first_row(self) -> Sequence[Any]:
        return self.library.first_row(self.rows.table)

    def _columns_alike(self) -> np.ndarray[Any, Any]:
        """Whether each column is known to have one number for all tensors."""
        table, known, plan = self.rows.table, self._host, self.launch.version.plan
        alike = np.zeros(table.shape[1], np.bool_)
        if known is not None:
            rows = known.table[known.index[self.portion.at]]
            alike = (rows == rows[:1]).all(axis=0)
            alike[len(self.program.scalars.columns) :] = False
        elif (self.groups == self.groups[0]).all():
            alike[plan.columns_of_groups] = True
        if len(table) == 1:
            alike[:] = True
        return alike

    def _rows(self) -> Rows:
        rows, library, portion = self.launch.rows, self.portion.bucket.library, self.portion
        if not portion.bucket.resident:
            self._host = super()._rows()
            return replace(self._host, table=library.numbers(self._host.table))
        if portion.whole:
            return rows
        skip_mask = None if rows.stays is None else library.take(rows.stays, portion.at)
        return replace(rows, table=library.take(rows.table, portion.at), index=portion.index, stays=skip_mask)

    def column(self, index: int) -> Any:
        """A column of the table, for each tensor or one for all."""
        if self._alike[index]:
            return self._first_row[index]
        columns = self._columns
        places = self.rows.index[self.portion.at]
        if len(places) == len(self.rows.table) and (places == np.arange(len(places))).all():
            return columns[index]
        return self.library.take(columns[index], places)

    def fill(self, index: int, numbers: Any) -> None:
        """Writes a late column into the table."""
        count = len(self.rows.table)
        first = count == 1 and len(numbers.shape) > 0
        self.library.write(self._columns[index], self.library.spread(numbers[0] if first else numbers, (count,)))

    def known(self, value: Node, numbers: Any, i: int) -> Any:
        """The number of tensor i: a Python number where the host knows it."""
        known = len(self.program.scalars.columns)
        if self._host is not None and value.op is Op.SCALAR and int(value.arg) < known:  # type: ignore[call-overload]
            place = int(self._host.index[self.portion.positions[i]])
            return float(self._host.table[place, int(value.arg)])  # type: ignore[call-overload]
        hyper = self.hyper(i)
        expression = known_number(value, self.program, hyper, self.launch.common.hyper.live)
        if expression is None:
            return self.library.at(numbers, i)
        return float(evaluate_once(expression, hyper, {}, {}))

    def numbers(self, buffer: str) -> Any:
        """The value of a scalar buffer, for each tensor."""
        bucket, library = self.portion.bucket, self.library
        if buffer in self.launch.inputs:
            number = self.launch.inputs[buffer]
            if isinstance(number, float):
                return library.constant(number)
            return library.cast(library.numbers(number), "float64")
        if buffer in bucket.scalar_states:
            numbers = bucket.scalar_states[buffer].numbers
            if not bucket.is_on_device_only(buffer):
                return library.numbers(numbers[self.portion.at].astype(np.float64))
            return numbers if self.portion.whole else library.take(numbers, self.portion.at)
        shared = library.numbers(self.launch.common.shared.values[buffer])
        return library.take(shared, self.groups) if "k" in self.program.buffer(buffer).axes.letters else shared[0]
