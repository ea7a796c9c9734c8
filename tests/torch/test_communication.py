"""The record of a step's messages is what torch's collectives were given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from rulec.errors import RulecError
from rulec.torch.distributed.traffic import Communication
from tests.calls import profiled
from tests.torch.eager.processes import check_in_processes
from tests.torch.test_meshes import Twins, check_refused, kind_of

ROOT = Path(__file__).resolve().parents[2]

#: Our calls for a DTensor beyond those for a tensor, in a step.
CALLS_OF_TENSOR = 16


@contextmanager
def sent() -> Iterator[Counter[str]]:
    """The bytes in each kind of collective, and in exchanges those to other processes."""
    counts: Counter[str] = Counter()
    real = {name: getattr(dist, name) for name in ("all_reduce", "all_to_all_single", "all_gather")}

    def reduced(tensor: torch.Tensor, *words: Any, **keywords: Any) -> Any:
        counts["reduced"] += tensor.nbytes
        counts["reductions"] += 1
        return real["all_reduce"](tensor, *words, **keywords)

    def exchanged(result: Any, message: Any, received: Any, shares: Any, group: Any, async_op: bool) -> Any:
        counts["exchanged"] += (sum(shares) - shares[dist.get_rank(group)]) * message.itemsize
        counts["exchanges"] += 1
        return real["all_to_all_single"](result, message, received, shares, group=group, async_op=async_op)

    def gathered(parts: Any, tensor: torch.Tensor, *words: Any, **keywords: Any) -> Any:
        counts["reduced"] += tensor.nbytes
        counts["reductions"] += 1
        return real["all_gather"](parts, tensor, *words, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", reduced)
        patch.setattr(dist, "all_to_all_single", exchanged)
        patch.setattr(dist, "all_gather", gathered)
        yield counts


def everywhere(value: Any) -> list[Any]:
    """A value of each process."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def of_steps(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    for name, rounds in (("lamb", 1), ("clip >> lamb", 2), ("adafactor", 3), ("muon", 2), ("normuon", 6)):
        for placed in (Shard(0), Shard(1)):
            twins = Twins(name, mesh, [placed])
            with check_refused(RulecError, "take a step before"):
                twins.optimizer.communication()
            for seed in (1, 2):
                with sent() as counts:
                    twins.step(seed)
                record = twins.optimizer.communication()
                check_true(record, counts)
            assert [r.processes for r in record.reductions] == ["dp (2)"]
            assert record.reductions[0].rounds <= rounds
            assert record.reductions[0].numbers == record.reductions[0].bytes / 8
            if name in ("muon", "normuon"):
                of_matrices(rank, twins, record)
            else:
                assert not record.exchanges


def check_true(record: Communication, counts: Counter[str]) -> None:
    """What is recorded was sent, here and in the other processes."""
    assert sum(r.bytes for r in record.reductions) == counts["reduced"]
    assert sum(e.here for e in record.exchanges) == counts["exchanged"]
    if not any("," in e.dtype for e in record.exchanges):  # else one message for each dtype
        assert sum(2 * e.buckets for e in record.exchanges) == counts["exchanges"]
    for e in record.exchanges:
        assert [*e.sent] == everywhere(counts["exchanged"])
        assert e.least <= sum(e.sent)


def of_matrices(rank: int, twins: Twins, record: Communication) -> None:
    (e,) = record.exchanges
    parts = [everywhere(twins.parts[n].to_local().numel()) for n in twins.names]  # type: ignore[attr-defined]
    assert e.rank == rank
    assert e.dtype == "bfloat16"
    assert e.least == 2 * 2 * sum(sum(each) - max(each) for each in parts)
    assert sum(e.matrices) == len(twins.names)
    assert sum(e.work) == pytest.approx(1.0)
    assert max(e.work) < 0.8
    text = str(twins.optimizer.communication())
    assert f"{max(e.sent):,}" in text
    assert f"process {rank}  " in text


def of_nothing(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for name, placed in (("adamw", Shard(0)), ("muon", Replicate())):
        twins = Twins(name, mesh, [placed])
        with sent() as counts:
            twins.step(1)
        assert counts == {"reductions": 1, "reduced": 5 * 8}  # before the first step, what must be alike
        for seed in (2, 3):
            for optimizer in (twins.alone, twins.optimizer):
                optimizer.param_groups[0]["lr"] = 0.01 * seed
            with sent() as counts:
                twins.step(seed)
            assert not counts
        twins.check()
        assert twins.optimizer.communication() == Communication()
        assert str(twins.optimizer.communication()) == "a step sends nothing"


def of_groups(rank: int) -> None:
    """Messages of `reduce_over`, and those to two groups of a mesh."""
    param = nn.Parameter(torch.ones(3))
    optimizer = kind_of("clip >> lamb")([param], lr=0.1, max_norm=1.0, reduce_over=dist.group.WORLD)
    param.grad = torch.ones(3)
    with sent() as counts:
        optimizer.step()
    (record,) = optimizer.communication().reductions
    assert (record.processes, record.rounds) == ("reduce_over (2)", counts["reductions"])
    assert record.bytes == counts["reduced"]


def of_one_matrix(rank: int) -> None:
    """An owner of nothing; and DTensors that took the place of the optimizer's parameters."""
    mesh = init_device_mesh("cpu", (2,))
    for name in ("lamb", "muon"):
        whole, part = nn.Parameter(torch.eye(4, 3)), nn.Parameter(distribute_tensor(torch.eye(4, 3), mesh, [Shard(0)]))
        alone, optimizer = kind_of(name)([whole], lr=0.1), kind_of(name)([nn.Parameter(torch.eye(4, 3))], lr=0.1)
        optimizer.param_groups[0]["params"] = [part]
        whole.grad = torch.arange(12.0).reshape(4, 3)
        part.grad = distribute_tensor(whole.grad, mesh, [Shard(0)])
        with sent() as counts:
            optimizer.step()
        alone.step()
        torch.testing.assert_close(part.full_tensor(), whole.detach())  # type: ignore[attr-defined]
        check_true(optimizer.communication(), counts)
    assert optimizer.communication().exchanges[0].matrices == (1, 0)


def all_of_two(rank: int) -> None:
    of_steps(rank)
    of_nothing(rank)
    of_groups(rank)
    of_one_matrix(rank)


def test_a_record_has_what_was_sent() -> None:
    check_in_processes(all_of_two)


def calls_of(step: Callable[[], object]) -> int:
    """The number of calls of our Python functions in it."""
    calls, ours = [0], (str(ROOT / "rulec"), str(ROOT / "backends"))

    def count(frame: Any, event: str, argument: Any) -> None:
        calls[0] += event == "call" and frame.f_code.co_filename.startswith(ours)

    profiled(step, count)
    return calls[0]


def stepped(name: str, mesh: Any) -> tuple[list[torch.Tensor], int]:
    """Parameters after three steps, of DTensors where there is a mesh, and the calls in the last; nothing is sent."""
    draw = torch.Generator().manual_seed(0)
    place = (lambda x: x) if mesh is None else (lambda x: distribute_tensor(x, mesh, [Shard(0)]))
    params = [nn.Parameter(place(torch.randn(shape, generator=draw))) for shape in ((6, 4), (3, 8))]
    optimizer = kind_of(name)(params, lr=0.1)
    with sent() as counts:
        for _ in range(3):
            for param in params:
                param.grad = place(torch.randn(param.shape, generator=draw))
            calls = calls_of(optimizer.step)
    assert not counts
    assert optimizer.communication() == Communication()
    return [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in params], calls


@pytest.mark.parametrize("name", ["adamw", "clip >> lamb", "muon"])
def test_a_single_process_has_the_bits_and_calls_of_one_without_processes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With torch.distributed and without it; and over a mesh of one process, but for looking at DTensors."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    alone, calls = stepped(name, None)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        among, calls_among = stepped(name, None)
        placed, calls_placed = stepped(name, init_device_mesh("cpu", (1,)))
    finally:
        dist.destroy_process_group()
    assert calls_among == calls
    assert calls_placed - calls <= CALLS_OF_TENSOR * len(alone)
    assert all(map(torch.equal, alone, among))
    assert all(map(torch.equal, alone, placed))
