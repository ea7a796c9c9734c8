"""Exchanges of matrices: shared by replicas, and bucket by bucket behind the work."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import rulec
import rulec.torch
from rulec.errors import RulecError
from rulec.runtime.distributed import all_to_all, owners
from rulec.runtime.distributed.owner_plan import OwnerPlan
from rulec.runtime.stages.owner_values import OwnerEvaluator
from rulec.torch.distributed.mesh import MeshGroup, SentMessage
from rulec.torch.distributed.traffic import Communication
from rulec.torch.tensors.newton_schulz import TorchQuintic
from tests.torch import test_meshes
from tests.torch.eager.processes import check_in_processes
from tests.torch.test_communication import check_true, everywhere, sent
from tests.torch.test_meshes import Twins, check_refused, draws


def bits(twins: Twins) -> list[torch.Tensor]:
    """The parameters' parts here, and their states'."""
    tensors = [x for p in twins.parts.values() for x in (p.detach(), *twins.optimizer.state[p].values())]
    return [(x.to_local() if isinstance(x, DTensor) else x).clone() for x in tensors]


def check_replicas(twins: Twins) -> None:
    """Processes with the same part of a parameter have the same bits."""
    for param in twins.parts.values():
        mesh, placements, here = param.device_mesh, param.placements, param.to_local().detach()  # type: ignore[attr-defined]
        for axis, placement in enumerate(placements):
            if placement.is_replicate():
                parts = [torch.empty_like(here) for _ in range(mesh.size(axis))]
                dist.all_gather(parts, here.contiguous(), group=mesh.get_group(axis))
                assert all(torch.equal(parts[0], other) for other in parts)


@contextmanager
def buckets_of(size: int) -> Iterator[None]:
    """Buckets of so many bytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(all_to_all, "BUCKET", size)
        yield


@contextmanager
def noted() -> Iterator[list[str]]:
    """The calls of an exchange in order: where messages begin, where they are waited for, and work."""
    calls: list[str] = []
    real = MeshGroup.exchange, SentMessage.wait, OwnerEvaluator._worked

    def begin(self: MeshGroup, *words: Any) -> Any:
        calls.append("begin")
        return real[0](self, *words)

    def wait(self: SentMessage) -> Any:
        calls.append("wait")
        return real[1](self)

    def work(self: OwnerEvaluator, delegation: Any, arrays: Any) -> Any:
        if arrays:
            calls.append("work")
        return real[2](self, delegation, arrays)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MeshGroup, "exchange", begin)
        patch.setattr(SentMessage, "wait", wait)
        patch.setattr(OwnerEvaluator, "_worked", work)
        yield calls


@contextmanager
def held() -> Iterator[list[int]]:
    """The bytes of whole matrices, and of their results, alive in this process, after each that joins them."""
    now, peaks = [0], [0]
    real = all_to_all._Bucket.take, all_to_all._Bucket.work

    def note(bucket: all_to_all._Bucket) -> None:
        for array in (x for each in bucket.wholes.values() for arrays in each.values() for x in arrays):
            now[0] += array.nbytes
            weakref.finalize(array, lambda size=array.nbytes: now.__setitem__(0, now[0] - size))
        peaks.append(now[0])

    def take(self: all_to_all._Bucket) -> None:
        real[0](self)
        note(self)

    def work(self: all_to_all._Bucket) -> None:
        real[1](self)
        note(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(all_to_all._Bucket, "take", take)
        patch.setattr(all_to_all._Bucket, "work", work)
        yield peaks


#: Enough matrices for four processes, that two cut unevenly.
SEVERAL = {f"m{k}": (41 + 8 * k, 25 + 2 * k) for k in range(8)}


@contextmanager
def shapes_of(shapes: dict[str, tuple[int, ...]]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_meshes, "SHAPES", shapes)
        yield


def of_replicas(rank: int) -> None:
    """All four processes work, one replica sends each part, and the numbers are those of one process."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for name, placed in (
        ("muon", [Replicate(), Shard(0)]),
        ("normuon", [Replicate(), Shard(1)]),
        ("muon", [Shard(0), Replicate()]),
        ("muon", [Shard(0), Shard(0)]),
    ):
        with shapes_of(SEVERAL):
            twins = Twins(name, mesh, placed)
            for seed in (1, 2):
                with sent() as counts:
                    twins.step(seed)
                record = twins.optimizer.communication()
                check_true(record, counts)
        twins.check()
        check_replicas(twins)
        (e,) = record.exchanges
        assert (e.processes, e.buckets, e.rank) == ("replicate x shard (4)", 1, dist.get_rank())
        assert sum(e.matrices) == len(SEVERAL)
        assert max(e.work) < 0.3
        parts = [everywhere(twins.parts[n].to_local().numel()) for n in twins.names]  # type: ignore[attr-defined]
        wholes = [twins.whole[n].numel() for n in twins.names]
        assert e.least == 2 * sum(whole + sum(part) - 2 * max(part) for whole, part in zip(wholes, parts, strict=True))
        assert e.least <= sum(e.sent) <= 1.05 * e.least
    few = Twins("muon", mesh, [Replicate(), Shard(0)])
    few.step(1)
    few.check()
    check_replicas(few)
    # The largest of three has half of the work: each replica works by itself, and nothing goes to the other.
    (e,) = few.optimizer.communication().exchanges
    assert (e.processes, sum(e.matrices)) == ("shard (2)", 3)


def of_buckets(rank: int) -> None:
    """Messages of a bucket travel behind the work on its neighbours, and bits are those of one bucket."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    groups = [init_device_mesh("cpu", (4,)), [Shard(0)]], [mesh, [Replicate(), Shard(0)]]
    for some, placed in groups:
        plain, cut = Twins("muon", some, placed), Twins("muon", some, placed)
        for seed in (1, 2):
            plain.step(seed)
            with buckets_of(1), noted() as calls, held() as peaks:
                cut.give(seed)
                cut.optimizer.step()
        assert all(map(torch.equal, bits(plain), bits(cut)))
        assert plain.optimizer.communication().exchanges[0].sent == cut.optimizer.communication().exchanges[0].sent
        (e,) = cut.optimizer.communication().exchanges
        assert (max(peaks) > 0) == (e.matrices[e.rank] > 0)
    mesh = init_device_mesh("cpu", (4,))
    draw = torch.Generator().manual_seed(0)
    params = [nn.Parameter(distribute_tensor(torch.randn(64, 32, generator=draw), mesh, [Shard(0)])) for _ in range(16)]
    optimizer = rulec.torch.Muon(params, lr=0.1)
    for param in params:
        param.grad = distribute_tensor(torch.randn(64, 32, generator=draw), mesh, [Shard(0)])
    with buckets_of(1), noted() as calls, held() as peaks:
        optimizer.step()
    inner = ["wait", "begin", "work", "wait", "begin"]
    assert calls == ["begin", "wait", "begin", "work", "begin", *inner, *inner, "wait", "work", "wait", "begin", "wait"]
    # The matrices of one bucket or their results; by the order of calls, the messages of two others at most.
    assert max(peaks) == 4 * 64 * 32
    assert optimizer.communication().exchanges[0].buckets == 4


def disagreements(rank: int) -> None:
    """What goes wrong in one replica is an error in all processes, and nothing is written."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for name in ("lamb", "muon"):
        twins = Twins(name, mesh, [Replicate(), Shard(0)])
        twins.step(1)
        before = bits(twins)
        twins.give(2)
        kept = twins.parts["w"].grad
        twins.parts["w"].grad = None if rank == 3 else kept
        with check_refused(RulecError, "gradients of other tensors"):
            twins.optimizer.step()
        twins.parts["w"].grad = kept
        twins.optimizer.param_groups[0]["lr"] = 0.01 if rank else -1.0
        with check_refused(RulecError, "another process takes no step" if rank else "lr=-1.0"):
            twins.optimizer.step()
        assert all(map(torch.equal, before, bits(twins)))
        twins.optimizer.param_groups[0]["lr"] = 0.01
        twins.step(2)
        twins.check()
        check_replicas(twins)


@contextmanager
def free_bytes() -> Iterator[None]:
    """Sending takes no time, so that small matrices have several owners too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owners, "BYTE", 0.0)
        owners.assignment.cache_clear()
        yield
    owners.assignment.cache_clear()


#: Muon's step without momentum, in other dtypes.
PLAIN = """
name: Plain
hyper: {lr: 1e-2}
view: {flatten: rest}
state: {m: 0}
step: |
  m = m/2 + g
  direction = newton_schulz(m, steps=5, dtype="%s", coefficients="polar_express", normalize=1.5, form="%s")
"""

#: Name -> the dtype and the form of its iteration, and how far it may be from that of one process.
ITERATIONS = {
    "exact": ("float64", "direct", 0.0), "single": ("float32", "direct", 1e-5), "gram": ("float64", "gram", 0.0),
    "gram in 16 bits": ("bfloat16", "gram", 2**-8),
}  # fmt: skip

#: One matrix with most of the work, wide or tall, that two owners cut unevenly, and three small ones.
LARGE = {"wide": (72, 171), "a": (24, 40), "b": (9, 33), "c": (31, 12)}


def of_teams(rank: int, shape: tuple[int, ...], names: Sequence[str]) -> None:
    """Several processes orthogonalize the largest matrix together; numbers are those of one process."""
    if len(shape) == 1:
        meshes = [(init_device_mesh("cpu", shape), [placed]) for placed in (Shard(0), Shard(1))]
    else:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        meshes = [(mesh, placed) for placed in ([Replicate(), Shard(0)], [Shard(1), Shard(0)], [Shard(0), Shard(0)])]
    for number, name in enumerate(names):
        mesh, placed = meshes[number % len(meshes)]
        turned = {k: v[::-1] for k, v in LARGE.items()} if number % 2 else LARGE
        with shapes_of(turned), free_bytes(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(test_meshes, "OF_MATRICES", tuple(names))
            for title, (dtype, form, _) in ITERATIONS.items():
                patch.setitem(test_meshes.COMPOSED, title, partial(rulec.parse, PLAIN % (dtype, form)))
            twins = Twins(name, mesh, placed)
            for seed in (1, 2, 3):
                with sent() as counts:
                    twins.step(seed)
                record = twins.optimizer.communication()
                check_shared(record.exchanges[0], counts)
            check_near(twins, ITERATIONS[name][2] if name in ITERATIONS else 2**-8)
            check_replicas(twins)
            of_columns(twins, seed=4)


def check_near(twins: Twins, most: float) -> None:
    """The numbers of one process; what a matrix of several owners has changed by differs by so much of it at most.

    Sums in another order are rounded otherwise now and then, in bfloat16 by 2^-8.
    """
    starts = draws(0)
    for name, param in twins.whole.items():
        change = (param - starts[name]).norm()
        assert (twins.parts[name].full_tensor() - param).norm() <= (most if name == "wide" else 0.0) * change + 1e-6  # type: ignore[attr-defined]
    if not most:
        twins.check()


def check_shared(e: Any, counts: Any) -> None:
    """What owners send to one another is in the record, and is what torch was given."""
    assert e.count == len(LARGE)
    assert e.shared >= 1
    assert sum(e.matrices) > e.count
    assert e.here + e.between[e.rank] == counts["exchanged"]
    assert [*e.between] == everywhere(counts["exchanged"] - e.here)
    assert 2 * e.buckets + e.rounds == counts["exchanges"]
    assert max(e.work) < 0.75
    assert e.least <= sum(e.sent)
    assert f"{sum(e.between):,}" in str(Communication(exchanges=(e,)))


def of_columns(twins: Twins, seed: int) -> None:
    """A process that does not count what others send it computes other numbers: the comparison sees it."""
    real = TorchQuintic.added

    def alone(self: TorchQuintic, sums: Any) -> Any:
        return real(self, sums[:1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchQuintic, "added", alone)
        twins.step(seed)
    with pytest.raises(AssertionError):
        check_near(twins, 2**-8)


def of_plans(rank: int) -> None:
    """The cost model of owners is asked once for each tensor, also under a schedule; anew for other tensors."""
    mesh = init_device_mesh("cpu", (2,))
    real, calls = OwnerPlan.work, [0]

    def work(self: OwnerPlan, *words: Any) -> Any:
        calls[0] += 1
        return real(self, *words)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OwnerPlan, "work", work)
        for name in ("muon", "soap"):
            twins = Twins(name, mesh, [Shard(0)])
            asked = []
            for seed, rate in enumerate((0.01, 0.01, 0.02, 0.03, 0.03, 0.03), 1):
                for optimizer in (twins.alone, twins.optimizer):
                    optimizer.param_groups[0]["lr"] = rate
                twins.give(seed)
                if seed > 4:
                    twins.whole["w"].grad = twins.parts["w"].grad = None
                calls[0] = 0
                twins.alone.step()
                twins.optimizer.step()
                asked.append(calls[0])
            # SOAP's first step is one of another kind.
            assert [count > 0 for count in asked[2:]] == [False, False, True, False], (name, asked)
            assert asked[0] > 0
            twins.check()


def all_of_two(rank: int) -> None:
    of_plans(rank)
    of_teams(rank, (2,), ("muon", "exact", "gram"))


def test_two_processes_share_the_work_on_a_matrix() -> None:
    check_in_processes(all_of_two)


def all_of_four(rank: int) -> None:
    of_teams(rank, (2, 2), ("muon", "normuon"))
    of_teams(rank, (4,), ("muon", "normuon", "adamuon", "scion", "exact", "single", "gram", "gram in 16 bits"))
    disagreements(rank)
    of_replicas(rank)
    of_buckets(rank)


@pytest.mark.slow
def test_replicas_share_the_work_and_buckets_travel_behind_it() -> None:
    check_in_processes(all_of_four, 4)
