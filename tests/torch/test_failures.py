"""A process that fails in work that others wait for: all raise the same error, nothing is written, and steps go on."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import rulec
from rulec.errors import PartialUpdate, RulecError
from rulec.runtime.buckets.launch import Launch
from rulec.runtime.distributed import all_to_all
from rulec.runtime.stages.owner_values import OwnerEvaluator
from rulec.torch.distributed.mesh import MeshGroup
from rulec.torch.tensors.newton_schulz import TorchQuintic
from tests.torch import test_meshes
from tests.torch.eager.processes import check_in_processes
from tests.torch.test_communication import everywhere
from tests.torch.test_exchange import LARGE, PLAIN, bits, buckets_of, check_near, check_replicas, free_bytes, shapes_of
from tests.torch.test_meshes import Twins

#: Where a process can fail on the way of a matrix: before it is sent, at its owner, and on its way back.
ON_THE_WAY = (
    (all_to_all, "_elements"),
    (all_to_all._Bucket, "_put_together"),
    (OwnerEvaluator, "_worked"),
    (all_to_all._Bucket, "_cut"),
    (all_to_all._Bucket, "_put_back"),
)

#: Matrices exchanged once, and all else by a rule that reduces: in one step.
MIXED = PLAIN % ("float32", "direct") + "applies_to: ndim == 2\notherwise: lamb\n"


@contextmanager
def fault(owner: Any, name: str, at: int = 1) -> Iterator[None]:
    """A function that fails at one of its calls."""
    real, calls = getattr(owner, name), [0]

    def failing(*words: Any, **keywords: Any) -> Any:
        calls[0] += 1
        if calls[0] == at:
            raise MemoryError("no room")
        return real(*words, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, failing)
        yield
    assert calls[0] >= at


def failed(twins: Twins, seed: int, here: Any, kind: type[BaseException] = RulecError) -> BaseException:
    """The error of a step with a fault in some processes; all bits are as before, and the step is then taken."""
    before = bits(twins)
    twins.give(seed)
    with here or nullcontext(), pytest.raises(kind) as caught:
        twins.optimizer.step()
    assert all(map(torch.equal, before, bits(twins)))
    twins.step(seed)
    return caught.value


def check_told(error: BaseException, process: int, rank: int, words: str = "") -> None:
    """All processes say the same of the one that failed, which has its own error as the cause."""
    (text,) = {*everywhere(str(error))}
    begin = f"process {process} failed in work that all processes wait for, so none goes on with this step: "
    assert text.startswith(begin)
    assert text.endswith(f"{words}MemoryError: no room; once the cause is gone, take the step again")
    assert isinstance(error.__cause__, MemoryError) == (rank == process)


def of_owners(rank: int, mesh: Any) -> None:
    twins = Twins("muon", mesh, [Shard(0)])
    for seed, point in enumerate(ON_THE_WAY, 1):  # in the first step, and in others
        with buckets_of(1):
            error = failed(twins, seed, fault(*point) if rank == 1 else None)
        check_told(error, 1, rank)
        assert any(f"step: {name}: " in str(error) for name in twins.names) == (point[1] == "_worked")
    error = failed(twins, 9, fault(*ON_THE_WAY[2 if rank else 3]))  # what comes first may be the cause of all else
    assert str(error).startswith("process 1 failed")
    twins.check()
    for name, at in (("soap", 1), ("soap", 2), ("galore", 1)):
        twins = Twins(name, mesh, [Shard(0)], **test_meshes.SETTINGS.get(name, {}))
        check_told(failed(twins, 1, fault(OwnerEvaluator, "_worked", at) if rank == 0 else None), 0, rank)
        twins.check()


def of_teams(rank: int, mesh: Any, points: Any, process: int) -> None:
    """An owner that fails among several owners of a matrix goes on to send to the others."""
    with shapes_of(LARGE), free_bytes():
        twins = Twins("muon", mesh, [Shard(0)])
        for seed, point in enumerate(points, 1):
            error = failed(twins, seed, fault(TorchQuintic, *point) if rank == process else None)
            check_told(error, process, rank, "wide: ")
        assert twins.optimizer.communication().exchanges[0].shared == 1
        check_near(twins, 2**-8)


def of_launches(rank: int, mesh: Any) -> None:
    """No launch has written when another fails; a kernel that fails before the first exchange refuses the step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(test_meshes.COMPOSED, "mixed", partial(rulec.parse, MIXED))
        twins = Twins("mixed", mesh, [Shard(0)])
    for seed in (1, 2):
        check_told(failed(twins, seed, fault(OwnerEvaluator, "_worked") if rank else None), 1, rank)
    twins.check()
    twins = Twins("muon", mesh, [Shard(0)])
    for seed in (1, 2):
        error = failed(twins, seed, fault(Launch, "kernel") if rank else None, MemoryError if rank else RulecError)
        assert ("no room" if rank else "another process takes no step") in str(error)
    twins.check()


@contextmanager
def fault_between(at: int) -> Iterator[list[int]]:
    """The kernel of a middle stage fails at one of its calls; the number of these calls."""
    real, calls = Launch.kernel, [0]

    def failing(launch: Launch, stage: int, *words: Any) -> Any:
        calls[0] += 0 < stage < len(launch.version.program.stages) - 1
        if calls[0] == at:
            raise MemoryError("no room")
        return real(launch, stage, *words)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Launch, "kernel", failing)
        yield calls
    assert calls[0] >= at


def of_rounds(rank: int, mesh: Any, name: str, placed: Any, bad: int) -> None:
    """A kernel that fails between two rounds: in the first step, and in one whose messages are known."""
    count = len(placed) * test_meshes.MESSAGES.get(name, 9) + 1
    twins = Twins(name, mesh, placed)
    for seed in (1, 2):
        check_told(failed(twins, seed, fault_between(1) if rank == bad else None), bad, rank)
        twins.give(seed)
        twins.alone.step()
        with test_meshes.counted() as sent, fault_between(-1) as calls:
            twins.optimizer.step()
        assert len(sent) <= count, (name, placed, sent)
        error = failed(twins, seed, fault_between(calls[0]) if rank == bad else None)
        check_told(error, bad, rank)
        assert any(f"step: {name}" in str(error) for name in twins.names)
    twins.check()


@contextmanager
def fault_in_values() -> Iterator[None]:
    """The first values after an exchange, and before all write, fail."""
    work, all_to_all = OwnerEvaluator.work_out, MeshGroup.exchange
    begun: list[MeshGroup] = []

    def failing(between: OwnerEvaluator, gap: Any) -> Any:
        if begun and gap is not between.plan.gaps[-1]:
            raise MemoryError("no room")
        return work(between, gap)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OwnerEvaluator, "work_out", failing)
        patch.setattr(
            MeshGroup,
            "exchange",
            lambda rank_group, *words: (begun.append(rank_group), all_to_all(rank_group, *words))[1],
        )
        yield


def of_values(rank: int, mesh: Any, name: str) -> None:
    """A value between two exchanges fails, in the first step and in a later one."""
    twins = Twins(name, mesh, [Shard(0)])
    for seed in (1, 2):
        check_told(failed(twins, seed, fault_in_values() if rank == 0 else None), 0, rank)
    twins.check()


def left_behind(rank: int, mesh: Any) -> None:
    """A process that fails where all write is behind: no process takes a step before all load a checkpoint."""
    twins = Twins("lamb", mesh, [Shard(0)])
    twins.step(1)
    saved = copy.deepcopy(twins.optimizer.state_dict())
    params = [(p, p.detach().clone()) for p in twins.parts.values()]
    twins.give(2)
    with (
        fault_at_the_end() if rank else nullcontext(),
        pytest.raises(PartialUpdate, match="no room") if rank else nullcontext(),
    ):
        twins.optimizer.step()
    before = bits(twins)
    for _ in range(2):
        words = "failed after all had agreed on a step.*no room.*load a checkpoint" if rank else "takes no step"
        with pytest.raises(RulecError, match=words):
            twins.optimizer.step()
    assert all(map(torch.equal, before, bits(twins)))
    twins.optimizer.load_state_dict(saved)
    with torch.no_grad():
        for param, value in params:
            param.copy_(value)
    twins.step(2)
    twins.check()


@contextmanager
def fault_at_the_end() -> Iterator[None]:
    """The kernel of the last stage fails."""
    real = Launch.kernel

    def failing(launch: Launch, stage: int, *words: Any) -> Any:
        if stage == len(launch.version.program.stages) - 1:
            raise MemoryError("no room")
        return real(launch, stage, *words)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Launch, "kernel", failing)
        yield


def gone(rank: int, mesh: Any) -> None:
    """A process that ends: the other says so, once its process group does."""
    twins = Twins("clip >> lamb", mesh, [Shard(0)])
    twins.step(1)
    twins.give(2)
    if rank:
        os._exit(0)
    with pytest.raises(RulecError, match=r"another process of .* has ended, or did not answer .* from a checkpoint"):
        twins.optimizer.step()


def of_two(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    of_rounds(rank, mesh, "clip >> lamb", [Shard(0)], 1)
    of_values(rank, mesh, "soap")
    left_behind(rank, mesh)
    of_owners(rank, mesh)
    of_teams(rank, mesh, (("begin", 1), ("gram", 2), ("added", 1), ("end", 1)), 1)
    of_launches(rank, mesh)
    gone(rank, mesh)


def test_one_of_two_processes_fails_in_work_for_both() -> None:
    check_in_processes(of_two)


def of_four(rank: int) -> None:
    """Replicas that work by themselves learn of an error too; so do four owners of a matrix."""
    grid, line = init_device_mesh("cpu", (2, 2)), init_device_mesh("cpu", (4,))
    twins = Twins("muon", grid, [Replicate(), Shard(0)])
    for seed in (1, 2):
        check_told(failed(twins, seed, fault(OwnerEvaluator, "_worked") if rank == 3 else None), 3, rank)
    twins.check()
    check_replicas(twins)
    of_teams(rank, line, (("gram", 3),), 2)
    of_rounds(rank, line, "normuon", [Shard(0)], 0)
    of_values(rank, line, "clip >> soap")
    for placed in ([Replicate(), Shard(0)], [Shard(0), Shard(1)]):
        for name in ("clip >> lamb", "adafactor"):
            of_rounds(rank, grid, name, placed, 2)


@pytest.mark.slow
def test_one_of_four_processes_fails_in_work_for_all() -> None:
    check_in_processes(of_four, 4)
