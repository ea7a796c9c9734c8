"""Two processes with steps on the host during the backward pass: each offloads the shards that it has."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import rulec
import rulec.torch
from rulec.runtime.buckets.launch import Launch
from rulec.torch import EagerUpdate
from rulec.torch.eager import on_host
from rulec.torch.tensors.dtensor import local_tensor
from tests.torch.eager.processes import check_in_processes
from tests.torch.eager.test_distributed import batch, net
from tests.torch.offload.conftest import beside

CLIPPED = rulec.load("clip_by_global_norm") >> rulec.load("adamw")


def wrapped(kind: str) -> nn.Module:
    model = net()
    if kind == "fsdp":
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        return fully_shard(model)
    return DistributedDataParallel(model)


def work(kind: str, name: str, in_a_thread: bool, rank: int) -> None:
    """Takes the same steps with and without the host, and compares the bits."""
    if in_a_thread:
        on_host.worker_for = beside  # type: ignore[assignment]
    rule = CLIPPED if name == "clipped" else rulec.load(name)
    ours, theirs = wrapped(kind), wrapped(kind)
    one: Any = EagerUpdate(ours, rule, contributions=1, offload="step", offload_buffer=128)
    other: Any = rulec.torch.optimizer(rule)(theirs.parameters())
    kernel, begun = Launch.kernel, list[str]()

    def counted(launch: Launch, *arguments: Any) -> Any:
        begun.extend(tensor.name for tensor in launch.part.tensors)
        return kernel(launch, *arguments)

    for step in range(3):
        begun = []
        with mock.patch.object(Launch, "kernel", counted), one.backward():
            ours(batch(rank, step)).square().mean().backward()
        if rule is CLIPPED:
            assert len(begun) == (6 if step else 0), begun
        one.step()
        other.zero_grad()
        theirs(batch(rank, step)).square().mean().backward()
        other.step()
    early = {"adamw": 6, "lamb": 6 if kind == "ddp" else 0, "clipped": 0}[name]
    assert (one.report().fired, one.report().deferred) == (early, 6 - early)
    assert one.report().bytes_freed == sum(local_tensor(p).nbytes for p in ours.parameters())
    for mine, plain in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(local_tensor(mine), local_tensor(plain))


@pytest.mark.parametrize("in_a_thread", [False, True])
@pytest.mark.parametrize("name", ["adamw", "lamb", "clipped"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_processes_have_the_bits_of_steps_without_the_host(kind: str, name: str, in_a_thread: bool) -> None:
    check_in_processes(partial(work, kind, name, in_a_thread))
