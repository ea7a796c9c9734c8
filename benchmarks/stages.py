"""A rule's whole step on one array, and the limit for its stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import rulec
from benchmarks.kernels import Pool, limit_kernel
from rulec.array import Optimizer
from rulec.backend.protocol import Rows
from rulec.compiler.ir import Program, Result
from rulec.compiler.layout import ITEM_SIZE, Layout, is_shaped, kernel_buffers, layout_for, scheduled, traffic
from rulec.compiler.view import MatrixView, view_of
from rulec.language.rule import Rule

Shape = tuple[int, int]


@dataclass(frozen=True)
class Staged:
    """A step, engine and all, and its limit: kernels that move the bytes of its stages and compute nothing.

    Both run over the same parameter and states; the limit does not change them.
    """

    program: Program
    layout: Layout
    step: Callable[[], object]
    limit: Callable[[], object]

    @property
    def bytes_per_element(self) -> int:
        """The bytes that all stages together read and write for an element."""
        return round(sum(traffic(self.program, self.layout)))


def staged(rule: Rule, shape: Shape, pool: Pool) -> Staged:
    """The step of a rule, with its default hyper-parameters, on a float32 matrix of the pool's memory."""
    param, grad = (pool.array(name, "float32", positive=False).reshape(shape) for name in ("p", "g"))
    optimizer = Optimizer(rule, [param])
    optimizer.step([grad])  # allocates the states
    program, layout, view = scheduled_for(rule, shape)
    limit = bound_limit(program, layout, [view], [param], [grad], [optimizer.state(optimizer.names[0])])
    return Staged(program, layout, lambda: optimizer.step([grad]), limit)


def scheduled_for(rule: Rule, shape: Sequence[int]) -> tuple[Program, Layout, MatrixView]:
    """The engine's program for a float32 tensor of this shape, its layout, and its view of the tensor."""
    view = view_of(rule, shape)
    program = rulec.compile(rule, {**view.facts, "machine_eps": 2.0**-23})
    layout = layout_for(program, "float32", transposed=view.transposed and is_shaped(program))
    return *scheduled(program, layout), view


def bound_limit(
    program: Program, layout: Layout, views: Sequence[MatrixView], params: Sequence[Any], grads: Sequence[Any],
    states: Sequence[Mapping[str, Any]],
) -> Callable[[], object]:  # fmt: skip
    """A function for one run of the limit of every stage, over these tensors and scratch of its own."""
    names = [b.name for b in kernel_buffers(program) if b.role == "state"]
    call = limit_kernel(program, layout).bind(params, [{name: each[name] for name in names} for each in states], views)
    rows = Rows(np.zeros((1, len(program.columns))), np.zeros(len(params), np.int64))
    arrays = [_scratch(program, layout, view) for view in views]
    scratch = {name: [each[name] for each in arrays] for name in arrays[0]}
    stages = range(len(program.stages))

    def run() -> None:
        for stage in stages:
            call(stage, grads, rows, scratch)

    return run


def _scratch(program: Program, layout: Layout, view: MatrixView) -> dict[str, Any]:
    """The arrays of kernels beside parameters, gradients and states: scratch and vectors, by name."""
    numel = view.batch * view.rows * view.cols
    buffers = [b.name for b in kernel_buffers(program) if b.role == "scratch"]
    arrays = {name: np.ones(ITEM_SIZE[layout.dtype(name)] * numel, np.uint8) for name in buffers}
    item = ITEM_SIZE[layout.compute]
    return arrays | {v.name: np.ones(item * _count(v, view), np.uint8) for v in program.vectors}


def _count(vector: Result, view: MatrixView) -> int:
    extents = {"b": view.batch, "i": view.rows, "j": view.cols}
    return int(np.prod([extents[letter] for letter in vector.axes.letters if letter in extents]))
