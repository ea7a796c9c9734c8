"""The sources of a launch's values, and the values computed so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import numpy as np

from rulec.arrays import random
from rulec.arrays.library import Library
from rulec.compiler.ir import Axes
from rulec.compiler.scalars import evaluate_once
from rulec.language.node import Node, is_boolean
from rulec.runtime.drawing import Drawing
from rulec.runtime.joins import Processes
from rulec.runtime.plan import Plan
from rulec.runtime.tiled import Tiled

Array = np.ndarray[Any, Any]


class Surroundings(Protocol):
    """The sources of a launch's values, for each fired tensor by its place among them.

    `column` gives a column of the scalar table. `known` gives a Python number where the host knows it, else the result
    of `Library.at`. `room` gives the bytes allowed on the way. `fill_noise` is the backend's, or None.
    """

    @property
    def groups(self) -> Array: ...
    @property
    def compute(self) -> str: ...
    @property
    def seed(self) -> int: ...
    @property
    def owner(self) -> Processes: ...
    @property
    def library(self) -> Library: ...
    @property
    def fill_noise(self) -> Any: ...

    def __len__(self) -> int: ...
    def column(self, index: int) -> Any: ...
    def numbers(self, buffer: str) -> Any: ...
    def matrices(self, buffer: str, i: int) -> Array: ...
    def room(self, i: int) -> int: ...
    def facts(self, i: int) -> Mapping[str, float]: ...
    def hyper(self, i: int) -> Mapping[str, float]: ...
    def tensor_number(self, i: int) -> int: ...
    def known(self, value: Node, numbers: Any, i: int) -> Any: ...


class InTiles(Surroundings, Protocol):
    """Surroundings with matrices and states for reading and writing tile by tile.

    `writes` is called before a state is written. `extents` are the numbers of a tensor's matrices, rows and columns.
    """

    def tiled(self, buffer: str, i: int) -> Tiled: ...
    def writes(self) -> None: ...
    def extents(self, i: int) -> tuple[int, int, int]: ...


@dataclass
class LaunchValues:
    """The values of one launch so far."""

    plan: Plan
    around: Surroundings
    values: dict[Node, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.library = self.around.library

    @property
    def count(self) -> int:
        """The number of fired tensors."""
        return len(self.around)

    def axes(self, value: Node) -> Axes:
        """The axes of a value: tensors, matrices, rows, columns."""
        return self.plan.axes[value]

    def is_number(self, value: Node) -> bool:
        """Whether a value is a number of each tensor, of each group or of the model."""
        return set(self.axes(value).letters) <= {"k", "n"}

    def rounded(self, value: Node, result: Any) -> Array:
        """A result in its dtype: the compute dtype for a matrix, float64 for a vector."""
        return cast(Array, self.library.cast(result, self.around.compute) if self.is_rounded(value) else result)

    def is_rounded(self, value: Node) -> bool:
        """Whether a result is in the compute dtype."""
        return {"i", "j"} <= set(self.axes(value).letters) and not is_boolean(value)

    def random(self, value: Node, i: int, rows: slice | None = None) -> Any:
        """Random numbers of tensor i: a matrix, or some rows of it."""
        draw, *sizes = cast(tuple[Any, ...], value.arg)
        facts, hyper = self.around.facts(i), self.around.hyper(i)
        height, width = (int(evaluate_once(x, hyper, facts, {})) for x in sizes)
        step = self.around.known(value.args[0], self.values[value.args[0]], i)
        step = random.draw_number(step) if isinstance(step, int | float) else step
        position = {
            "seed": self.around.seed, "tensor": self.around.tensor_number(i), "draw": int(draw), "step": step
        }  # fmt: skip
        first, last, _ = (rows or slice(None)).indices(height)
        count = (last - first) * width
        around = self.around
        drawing = Drawing(self.library, value.op, position, around.compute, around.room(i), around.fill_noise)
        return drawing.numbers(first * width, count).reshape(1, last - first, width)
