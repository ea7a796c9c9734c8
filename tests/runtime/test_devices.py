"""One engine's tensors on several devices: what they share goes to each of them, and nothing else does."""

from __future__ import annotations

import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.utils.backend_registration
from torch import Tensor

import rulec
from rulec import Rule
from rulec.backend import registry
from rulec.runtime.engine import Engine, default_hyper
from rulec.torch.tensors.library import DeviceLibrary, HostLibrary
from rulec.torch.tensors.tensors import TorchArrays
from tests.runtime.elsewhere import Elsewhere
from tests.runtime.nowhere import copies

#: Scratch, reductions over rows, tensors, groups and the model, what these remember, and products of matrices.
RULES = [
    "adamw", "cautious_adamw", "clip_by_global_norm >> adam", "prodigy", "dadapt_adam", "lamb", "adafactor", "nadam",
    "muon", "shampoo", "skip_not_finite >> adam", "dog",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch cannot pretend to have devices",
)
def test_what_each_of_two_devices_is_given_is_there_and_nothing_is_waited_for() -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.runtime.pretend", *RULES]
    root = Path(__file__).parents[2]
    lines = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root).stdout.splitlines()
    assert len(lines) == 3 * len(RULES)
    assert [line for line in lines if not line.endswith(": fine")] == []


class Mixed(TorchArrays):
    """Some tensors as if they were on a device."""

    def __init__(self, there: list[Tensor]) -> None:
        self.there = there

    def device(self, array: Tensor) -> str:
        return "there" if any(array is x for x in self.there) else "cpu"

    def backend(self, device: str) -> str:
        return "elsewhere" if device == "there" else "cpu"

    def library(self, device: str, on_device: bool) -> HostLibrary | DeviceLibrary:
        return super().library("cpu", on_device)

    def vector(self, values: np.ndarray[Any, Any], device: str | None = None) -> Any:
        return super().vector(values, device and "cpu")


MIXED = ["adamw", "cautious_adamw", "clip_by_global_norm >> adam", "prodigy", "dadapt_adam", "lamb", "nadam", "dog"]


def trained(rule: Rule, there: list[int], resident: bool) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)

    def some(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    params = [some(shape) for shape in ((6, 5), (5,), (6, 5), (4, 3))]
    engine = Engine(rule, Mixed([params[i] for i in there]), resident=resident)
    ids = tuple(engine.add(p, i % 2, f"tensor {i}") for i, p in enumerate(params))
    table = engine.hyper_table([default_hyper(engine.rule, {}, "float64")] * 2)
    for _ in range(3):
        engine.step(ids, [some(tuple(p.shape)) for p in params], table)
    return params


@pytest.mark.filterwarnings("error")  # NumPy warns of some of torch's arrays, and cannot read those of a real device
@pytest.mark.parametrize(
    ("name", "there", "resident"),
    [
        (name, [[0, 1], [2, 3], [1, 3]][(i + resident) % 3], resident)
        for i, name in enumerate(MIXED)
        for resident in (False, True)
    ],
)
def test_tensors_on_the_host_and_on_a_device_step_as_tensors_on_the_host_do(
    name: str, there: list[int], resident: bool
) -> None:
    rule, plain = rulec.load(name), registry.get
    with mock.patch.object(registry, "get", lambda name: Elsewhere() if name == "elsewhere" else plain(name)):
        found = trained(rule, there, resident)
    for p, q in zip(found, trained(rule, [], False), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)


def test_one_number_of_numpy_is_one_number_on_a_device() -> None:
    assert DeviceLibrary("cpu").numbers(np.float64(3.0)).shape == ()


def test_places_are_copied_to_a_device_once_however_many_there_are() -> None:
    library = DeviceLibrary("meta")
    numbers = torch.zeros(1000, device="meta")
    with copies() as copied:
        for _ in range(2):
            for place in range(1000):
                library.take(numbers, np.array([place]))
    assert len(copied) == 1000


def test_what_a_graph_reads_is_kept_where_tensors_join_and_it_is_replaced() -> None:
    params = [torch.zeros(3, dtype=torch.float64) for _ in range(2)]
    engine = Engine(rulec.load("nadam"), TorchArrays(), Elsewhere(), resident=True)  # type: ignore[arg-type]
    ids = tuple(engine.add(p, 0, f"tensor {i}") for i, p in enumerate(params))
    table = engine.hyper_table([default_hyper(engine.rule, {}, "float64")])
    with mock.patch.object(DeviceLibrary, "hold", DeviceLibrary.keep):
        engine.step(ids[:1], params[:1], table)
        bucket = engine.tensors[0].bucket
        assert bucket is not None
        read = [weakref.ref(bucket.counts.numbers), *(weakref.ref(v.numbers) for v in bucket.scalar_states.values())]
        engine.step(ids, params, table)
    assert len(read) == 2
    assert read[0]() is not bucket.counts.numbers
    assert all(kept() is not None for kept in read)


OF_GROUPS = rulec.parse('name: G\nstep: |\n  direction = g/sqrt(sum(g**2, per="group") + 1e-8)\n')


def test_what_groups_have_in_common_is_worked_out_once_for_each_group() -> None:
    generator = torch.Generator().manual_seed(0)
    params = [torch.zeros(3, dtype=torch.float64) for _ in range(30)]
    grads = [torch.randn(3, dtype=torch.float64, generator=generator) for _ in params]
    engine = Engine(OF_GROUPS, TorchArrays(), Elsewhere(), resident=True)  # type: ignore[arg-type]
    ids = tuple(engine.add(p, i % 4, f"tensor {i}") for i, p in enumerate(params))
    counts = []
    together = DeviceLibrary.together

    def counted(library: DeviceLibrary, numbers: Any) -> Tensor:
        counts.append(len(numbers))
        return together(library, numbers)

    with mock.patch.object(DeviceLibrary, "together", counted):
        engine.step(ids, grads, engine.hyper_table([default_hyper(engine.rule, {"lr": 1.0}, "float64")] * 4))
    assert max(counts) == 4
    for group in range(4):
        size = torch.cat(grads[group::4]).norm()
        for p, g in zip(params[group::4], grads[group::4], strict=True):
            torch.testing.assert_close(p, -g / size, rtol=1e-6, atol=0)
