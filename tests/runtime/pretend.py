"""Steps on two devices that there are not: torch follows shapes and devices, and refuses to mix these or to read there.

Run as a program, for it gives torch a kind of device that it keeps: `python -m tests.runtime.pretend RULE...` prints a
line for each rule, which ends with what went wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

import rulec
from rulec import Rule
from rulec.runtime.arrays import Vector
from rulec.runtime.buckets.scalar_table_device import Scaling
from rulec.runtime.engine import Engine, default_hyper, run
from rulec.torch.tensors.tensors import TorchArrays
from tests.runtime.nowhere import Nowhere

DEVICES = ("pretend:0", "pretend:1")


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
    engine = Engine(rule, PretendArrays(), Nowhere(), resident=resident)  # type: ignore[arg-type]
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
        engine.end()


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
