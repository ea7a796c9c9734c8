"""Steps on two devices that there are not: torch follows shapes and devices, and refuses to mix these or to read there.

Run as a program, for it gives torch a kind of device that it keeps: `python -m tests.runtime.pretend RULE...` prints a
line for each rule, which ends with what went wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

import rulec
from rulec import Rule
from rulec.backend.layout import Layout
from rulec.backend.protocol import Rows, Written
from rulec.compiler.ir import Program, Result
from rulec.runtime.arrays import Vector
from rulec.runtime.device import Scaling
from rulec.runtime.engine import Engine, default_hyper, run
from rulec.torch.tensors import TorchArrays

DEVICES = ("pretend:0", "pretend:1")


class Pretend:
    """A backend whose kernels look at where what they are given is, and write nothing."""

    name = "pretend"
    on_device = True

    def unavailable_reason(self) -> None:
        return None

    def emit(self, program: Program, layout: Layout) -> str:
        return ""

    def build(self, program: Program, layout: Layout, source: str) -> PretendKernel:
        return PretendKernel(program)


class PretendKernel:
    def __init__(self, program: Program) -> None:
        self.program = program

    def bind(self, params: Sequence[Tensor], states: Sequence[dict[str, Tensor]], views: Any = ()) -> PretendCall:
        return PretendCall(self.program, params, states, views)


class PretendCall:
    def __init__(self, program: Program, params: Any, states: Any, views: Any) -> None:
        self.program, self.params, self.states, self.views = program, params, states, views

    def __call__(
        self, stage: int, moving: Sequence[Tensor], rows: Rows, scratch: Mapping[str, Sequence[Tensor]] | None = None,
        *, tensors: Sequence[int] | None = None, stream: Any = None,
    ) -> Written:  # fmt: skip
        here = self.params[0].device
        given = [*moving, *(x for arrays in (scratch or {}).values() for x in arrays)]
        given += [x for x in (rows.table, rows.stays, rows.scale) if isinstance(x, Tensor)]
        assert {x.device for x in given} == {here}, (
            f"{here} was given what is on { ({x.device for x in given} - {here}) }"
        )
        assert rows.scale is None or rows.scale.dtype is torch.float32
        fired = [*(range(len(self.params)) if tensors is None else tensors)]
        reduces = self.program.stages[stage].reduces
        return Written(self.params, self.states, {r.name: self._reduced(r, fired) for r in reduces})

    def _reduced(self, result: Result, fired: Sequence[int]) -> Any:
        here = self.params[0].device
        if set(result.axes.letters) <= {"k", "n"}:
            return torch.empty(len(fired), dtype=torch.float64, device=here)
        views = [self.views[i] for i in fired]
        rows = "i" in result.axes.letters
        shapes = [(v.batch, v.rows, 1) if rows else (v.batch, 1, v.cols) for v in views]
        return [torch.empty(shape, dtype=torch.float64, device=here) for shape in shapes]


class PretendArrays(TorchArrays):
    """Numbers here are NumPy's alone: torch follows its own as if they were on a device."""

    def vector(self, values: np.ndarray[Any, Any], device: str | None = None) -> Vector:
        if device is None:
            return Vector(np.array(values, np.float64), [None] * len(values))
        return super().vector(values, device)


@contextmanager
def pretended() -> Iterator[None]:
    """Tensors without memory on two devices."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    def pinned(tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype)

    with FakeTensorMode(allow_non_fake_inputs=True), mock.patch.object(Tensor, "pin_memory", pinned):
        yield


def there(dtype: torch.dtype, device: str) -> Tensor:
    return torch.empty((), dtype=dtype, device=device)


def steps(rule: Rule, resident: bool, scaled: bool) -> None:
    """Three steps of tensors of two groups, each on both devices; the second of all but the first."""
    shapes = [(6, 5), (6, 5), (5,), (4, 5)]
    params = [torch.empty(shape, device=DEVICES[i % 2]) for i, shape in enumerate(shapes)]
    engine = Engine(rule, PretendArrays(), Pretend(), resident=resident)  # type: ignore[arg-type]
    ids = [engine.add(p, i // 2, f"tensor {i}") for i, p in enumerate(params)]
    table = engine.hyper_table([default_hyper(engine.rule, {}, "float32")] * 2)
    if resident:
        engine.live = {("lr", 0): there(torch.float64, DEVICES[1])}
    for fired in (ids, ids[1:], ids):
        grads = [torch.empty_like(params[i]) for i in fired]
        number = there(torch.float32, DEVICES[1])
        inputs = {name: number if kind == "scalar" else grads for name, kind in engine.rule.inputs.items()}
        scaling = Scaling(number, there(torch.float32, DEVICES[0])) if scaled else None
        engine.begin()
        run(engine.ready(tuple(fired), grads, table, inputs, scaling))
        engine.finish()


def main(names: Sequence[str]) -> None:
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend("pretend")
    for name in names:
        for resident, scaled in ((False, False), (True, False), (True, True)):
            try:
                with pretended():
                    steps(rulec.load(name), resident, scaled)
                print(f"{name} {resident} {scaled}: fine")
            except Exception as error:  # noqa: BLE001 - whatever goes wrong is printed
                print(f"{name} {resident} {scaled}: {type(error).__name__} {error}".replace("\n", " "))


if __name__ == "__main__":
    main(sys.argv[1:])
