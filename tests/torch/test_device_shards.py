"""Shards on a device, as it were: vectors in flat arrays and matrices in stacks, completed by other processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import rulec.torch
from rulec.backend import registry
from tests.runtime.counted import counted
from tests.runtime.elsewhere import Elsewhere
from tests.torch.eager.processes import check_in_processes
from tests.torch.test_meshes import Twins

#: Operations that a step has as often for many matrices of a shape as for few.
COUNTED = ("bmm", "linalg_qr", "_linalg_eigh", "segment_reduce", "mul", "addcmul", "sqrt")


def of_whole_tensors(rank: int, names: Sequence[str]) -> None:
    """Steps of shards, with numbers on the host and on the device, are those of whole tensors."""
    plain, mesh = registry.get, init_device_mesh("cpu", (2,))
    with mock.patch.object(registry, "get", lambda name: Elsewhere() if name == "elsewhere" else plain(name)):
        for name in names:
            for place in (Shard(0), Shard(1)):
                for capturable in (False, True):
                    twins = Twins(name, mesh, [place], backend="elsewhere", capturable=capturable)
                    for seed in (1, 2, 3):
                        twins.step(seed)
                    twins.check()


@pytest.mark.slow
@pytest.mark.parametrize(
    "names", [("adafactor", "soap", "came", "adamp", "sm3"), ("adam_mini", "normuon", "apollo", "galore", "kl_soap")]
)
def test_shards_on_a_device_step_as_whole_tensors(names: Sequence[str]) -> None:
    check_in_processes(partial(of_whole_tensors, names=names))


def calls(name: str, count: int) -> Counter[str]:
    """The operations of a step of so many matrices, cut in rows over the processes."""
    mesh = init_device_mesh("cpu", (2,))
    params = [nn.Parameter(distribute_tensor(torch.randn(8, 6), mesh, [Shard(0)])) for _ in range(count)]
    optimizer = rulec.torch.optimizer(name)(params, backend="elsewhere")
    for _ in range(3):
        for p in params:
            p.grad = distribute_tensor(torch.randn(8, 6), mesh, [Shard(0)])
        with counted() as names:
            optimizer.step()
    return Counter(x.split(".")[1] for x in names if x.split(".")[1] in COUNTED)


def together(rank: int) -> None:
    """A step of many matrices has as many operations as one of few."""
    plain = registry.get
    with mock.patch.object(registry, "get", lambda name: Elsewhere() if name == "elsewhere" else plain(name)):
        for name in ("adafactor", "soap"):
            few, many = calls(name, 8), calls(name, 24)
            assert few == many, (name, few, many)
            assert few["bmm"] or name == "adafactor"


def test_owners_compute_the_matrices_of_a_shape_together() -> None:
    check_in_processes(together)
