"""Rules with matrices of other shapes than their parameters, over DTensors: all bits, and factors kept in parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import rulec
import rulec.torch
from rulec.errors import RulecError, TensorError
from rulec.torch.memory_profile.mesh import _matrix, _owners, _schedules, mesh_of
from rulec.torch.memory_profile.meter import Training
from tests.torch.eager.processes import check_in_processes
from tests.torch.test_communication import check_true, sent
from tests.torch.test_meshes import GRID, LINES, Twins, check_refused, kind_of, memory
from tests.torch.test_model_meshes import Model

#: Rules, with settings for which four steps make all branches run: bases and roots are refreshed.
CASES: dict[str, dict[str, Any]] = {
    "soap": {"every": 2},
    "shampoo": {"every": 2},
    "galore": {"rank": 1, "gap": 2},
    "apollo": {"rank": 1, "gap": 2},
    "apollo_mini": {"gap": 2},
    "clip >> soap": {"every": 2},
    "soap + decay": {"every": 2},
    "soap_axes": {"every": 2},
    "shampoo_axes": {"every": 2},
}


def check_bits(twins: Twins) -> None:
    """Parameters and states, put together of their parts, have all bits of one process."""
    for name, param in twins.whole.items():
        ours, theirs = twins.optimizer.state[twins.parts[name]], twins.alone.state[param]
        assert ours.keys() == theirs.keys()
        pairs = [(twins.parts[name], param), *((ours[state], value) for state, value in theirs.items())]
        for part, value in pairs:
            got = part.full_tensor() if isinstance(part, DTensor) else part
            assert torch.equal(got.detach(), value.detach()), name


def check_kept(twins: Twins, size: int) -> None:
    """No process keeps more of a factor than its share, and a DTensor says where the others are."""
    for name, param in twins.parts.items():
        cuts = size if any(p.is_shard() for p in param.placements) else 1  # type: ignore[attr-defined]
        for state, value in twins.optimizer.state[param].items():
            if value.dim() and value.shape != param.shape:
                assert isinstance(value, DTensor), (name, state)
                longest = max(value.shape)
                assert value.to_local().numel() <= -(-longest // cuts) * value.numel() // longest, (name, state)


def steps_of(rank: int, names: Sequence[str], placements: Sequence[Any], shape: Sequence[int]) -> None:
    mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=("a", "b")[: len(shape)])
    for name in names:
        for placed in placements:
            twins = Twins(name, mesh, placed, **CASES[name])
            for seed in (1, 2, 3, 4):
                with sent() as counts:
                    twins.step(seed)
                record = twins.optimizer.communication()
                if all(len(e.sent) == dist.get_world_size() for e in record.exchanges):  # not each replica alone
                    check_true(record, counts)
                assert sum(e.here for e in record.exchanges) == counts["exchanged"]
            # A clip takes the norm of all parts, added in another order.
            (twins.check if "clip" in name else partial(check_bits, twins))()
            if len(shape) == 1:
                check_kept(twins, shape[0])


def disagreements(rank: int) -> None:
    """An error in one process, or a gradient that one lacks, is an error in all, and nothing is written."""
    mesh = init_device_mesh("cpu", (2,))
    twins = Twins("soap", mesh, [Shard(0)], every=2)
    twins.step(1)
    for seed in (2, 3):
        before = memory(twins)
        twins.give(seed)
        kept, twins.parts["w"].grad = twins.parts["w"].grad, None if rank else twins.parts["w"].grad
        with check_refused(RulecError, "gradients of other tensors, or other rules"):
            twins.optimizer.step()
        twins.parts["w"].grad = kept
        twins.optimizer.param_groups[0]["lr"] = 0.01 if rank else -1.0
        with check_refused(RulecError, "another process takes no step" if rank else "lr=-1.0"):
            twins.optimizer.step()
        twins.optimizer.param_groups[0]["lr"] = 0.01
        assert all(map(torch.equal, before, memory(twins)))
        twins.step(seed)
    check_bits(twins)


def bytes_of(rank: int) -> None:
    """Each array goes once to the owner and changed states come back; what a step does not read stays."""
    mesh, side = init_device_mesh("cpu", (2,)), 8
    for name, settings in (("shampoo", {"every": 3}), ("soap", {"every": 3})):
        param = nn.Parameter(distribute_tensor(torch.randn(side, side), mesh, [Shard(0)]))
        optimizer = kind_of(name)([("w", param)], lr=0.01, **settings)
        sums = []
        for seed in range(1, 7):
            grad = torch.randn(side, side, generator=torch.Generator().manual_seed(seed))
            param.grad = distribute_tensor(grad, mesh, [Shard(0)])
            optimizer.step()
            (e,) = optimizer.communication().exchanges
            assert e.matrices == (1, 0)
            assert sum(e.sent) == e.least
            sums.append(sum(e.sent) // (4 * side * side // 2))  # half of a square, which the other process has or gets
        # Shampoo sends g, l, r and the direction, l, r back; roots are read between their refreshments, and sent back
        # after one. SOAP sends g, m, ql, qr, later n, l, r; two vectors come back, then the direction, l and r.
        quiet = {"shampoo": 3 + 2 + 3, "soap": 4 + 2 + 3 + 3}[name]
        fresh = {"shampoo": 3 + 5, "soap": 4 + 2 + 3 + 5}[name]
        training = Training(Model, lambda _: (), rulec.load(name), settings)
        matrices = [_matrix(training.rule, (side, side), training)]
        spreads, chosen, group = _owners(matrices, mesh_of("2"))
        paper = [s.sent(2) for s in _schedules(matrices, spreads, chosen.owners, group)]
        assert sum(map(sum, paper)) == quiet * 4 * side * side // 2
        assert sums[1:] == [fresh if (step % 3 == 0 if name == "shampoo" else step % 3 == 1) else quiet
                            for step in range(2, 7)]  # fmt: skip


def narrow(rank: int) -> None:
    """Arrays in 16 bits travel in 16 bits, and the bits stay those of one process."""
    mesh, weight = init_device_mesh("cpu", (2,)), torch.arange(35.0).reshape(7, 5).sin().bfloat16()
    for name, dtypes in (("soap", {"bfloat16", "float32"}), ("galore", {"bfloat16", "float32"})):
        params = [nn.Parameter(weight.clone()), nn.Parameter(distribute_tensor(weight.clone(), mesh, [Shard(0)]))]
        optimizers = [kind_of(name)([("w", p)], lr=0.05, **CASES[name]) for p in params]
        for seed in range(4):
            grad = torch.randn(7, 5, generator=torch.Generator().manual_seed(seed)).bfloat16()
            params[0].grad, params[1].grad = grad, distribute_tensor(grad, mesh, [Shard(0)])
            for optimizer in optimizers:
                optimizer.step()
        assert torch.equal(params[1].full_tensor(), params[0].detach())  # type: ignore[attr-defined]
        for state, value in optimizers[0].state[params[0]].items():
            got = optimizers[1].state[params[1]][state]
            assert torch.equal(got.full_tensor() if isinstance(got, DTensor) else got, value), (name, state)
        assert {*optimizers[1].communication().exchanges[0].dtype.split(", ")} == dtypes


def refusals(rank: int) -> None:
    rule = rulec.parse("name: Wide\nsummary: A wide matrix.\nhyper: {lr: 0.1}\nstep: |\n  direction = qr(g)\n")
    param = nn.Parameter(distribute_tensor(torch.ones(3, 5), init_device_mesh("cpu", (2,)), [Shard(0)]))
    optimizer = rulec.torch.optimizer(rule)([("w", param)])
    param.grad = distribute_tensor(torch.ones(3, 5), param.device_mesh, [Shard(0)])  # type: ignore[attr-defined]
    with check_refused(TensorError, "qr needs at least as many rows as columns, and Wide gives it 3 by 5 for w"):
        optimizer.step()


def everyday(rank: int) -> None:
    steps_of(rank, ["soap", "soap_axes"], LINES[:1], (2,))
    refusals(rank)


def test_factors_of_two_processes() -> None:
    check_in_processes(everyday)


def more(rank: int) -> None:
    steps_of(rank, ["galore"], LINES[:1], (2,))
    steps_of(rank, ["apollo", "shampoo"], LINES[1:2], (2,))
    disagreements(rank)
    bytes_of(rank)
    narrow(rank)


@pytest.mark.slow
def test_more_of_factors_of_two_processes() -> None:
    check_in_processes(more)


#: The rules that run on each mesh without `make whole`: every mesh, and every rule of CASES but compositions.
PICKED = {
    (1,): {"soap"},
    (2,): {"shampoo", "apollo_mini"},
    (4,): {"galore"},
    (2, 2): {"soap", "apollo"},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "name"),
    [
        pytest.param(shape, name, marks=() if name in PICKED[shape] else pytest.mark.whole, id=f"{name} on {shape}")
        for shape in PICKED
        for name in CASES
    ],
)
def test_factors_on_every_mesh(shape: tuple[int, ...], name: str) -> None:
    placements = GRID if len(shape) > 1 else LINES
    check_in_processes(partial(steps_of, names=[name], placements=placements, shape=shape), math.prod(shape))
