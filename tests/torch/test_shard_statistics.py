"""Statistics of sharded parameters: those of whole tensors, the same in every process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import rulec.torch
from rulec.errors import RulecError, TensorError
from tests.torch.eager.processes import check_in_processes

SHAPES = {"uneven": (7, 6), "even": (8, 4), "few": (1, 50), "line": (9,)}
WATCH = {"norm": "norm(update)", "ratio": "norm(update)/norm(p)", "most": "max(abs(g))", "cosine": "sum(update*grad)"}


def values(seed: int) -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=drawn) for name, shape in SHAPES.items()}


def trained(kind: str, place: Any, watch: Any, steps: int = 3) -> Any:
    """An optimizer after some steps of parameters that `place` distributes."""
    params = {name: nn.Parameter(place(value)) for name, value in values(0).items() if kind != "Muon" or value.ndim > 1}
    keywords = {} if watch is None else {"watch": watch}
    optimizer = getattr(rulec.torch, kind)([*params.items()], **keywords)
    for step in range(1, steps + 1):
        for name, param in params.items():
            param.grad = place(values(step)[name])
        optimizer.step()
    return optimizer


def _check(kind: str) -> None:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    plain = trained(kind, lambda value: value, WATCH).statistics().numbers()
    for placement in (Shard(0), Shard(-1), Replicate()):
        optimizer = trained(kind, lambda value, at=placement: distribute_tensor(value, mesh, [at]), WATCH)
        numbers = optimizer.statistics().numbers()
        assert numbers.keys() == plain.keys()
        for name, number in numbers.items():
            assert math.isclose(number, plain[name], rel_tol=2e-4, abs_tol=1e-9), (kind, placement, name)
        without = trained(kind, lambda value, at=placement: distribute_tensor(value, mesh, [at]), None)
        pairs = zip(optimizer.param_groups[0]["params"], without.param_groups[0]["params"], strict=True)
        assert all(torch.equal(p.to_local(), q.to_local()) for p, q in pairs)
        _check_messages(optimizer, without)


def _check_messages(optimizer: Any, without: Any) -> None:
    """Statistics take few messages, however many tensors there are: of the ranks' agreement, of sums and of maxima."""
    measured, plain = (sum(r.rounds for r in o.communication().reductions) for o in (optimizer, without))
    assert measured <= plain + 7, (measured, plain)


def _check_all(_: int) -> None:
    for kind in ("AdamW", "LAMB", "Adafactor", "Muon"):
        _check(kind)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_statistics_of_shards_are_those_of_whole_tensors(count: int) -> None:
    check_in_processes(_check_all, count)


def _check_fsdp(_: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    fully_shard(model)
    rows = {"rows": 'norm(update, per="row")', **WATCH}
    refused = rulec.torch.AdamW(model.named_parameters(), watch=rows)
    optimizer = rulec.torch.AdamW(model.named_parameters(), watch=WATCH, watch_every=2)
    model(torch.randn(4, 5)).square().mean().backward()
    before = [param.to_local().clone() for param in model.parameters()]
    with pytest.raises(TensorError, match="the statistic rows has a number for each row, column or matrix, and"):
        refused.step()
    assert all(torch.equal(old, p.to_local()) for old, p in zip(before, model.parameters(), strict=True))
    optimizer.step()
    first = optimizer.statistics().numbers()
    assert len(first) == 16
    optimizer.step()
    assert optimizer.statistics().numbers() == first


@pytest.mark.slow
def test_sharded_modules_measure_numbers_and_refuse_rows() -> None:
    check_in_processes(_check_fsdp, 2)


def _check_flat(_: int) -> None:
    torch.manual_seed(0)
    for kept in (True, False):
        model = FullyShardedDataParallel(nn.Linear(5, 7), use_orig_params=kept, device_id=torch.device("cpu"))
        optimizer = rulec.torch.AdamW(model.parameters(), watch="norms")
        model(torch.randn(4, 5)).square().mean().backward()
        before = [param.detach().clone() for param in model.parameters()]
        with pytest.raises(TensorError, match="whose statistics would be those of the part: use fully_shard"):
            optimizer.step()
        assert all(torch.equal(old, param) for old, param in zip(before, model.parameters(), strict=True))


@pytest.mark.slow
def test_flat_parameters_are_refused() -> None:
    check_in_processes(_check_flat, 2)


def _check_other(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    param = nn.Parameter(distribute_tensor(values(0)["even"], mesh, [Shard(0)]))
    optimizer = rulec.torch.AdamW([param], watch="norms" if rank else {"norm": "norm(update)"})
    param.grad = distribute_tensor(values(1)["even"], mesh, [Shard(0)])
    before = param.to_local().clone()
    with pytest.raises(RulecError, match="watch="):
        optimizer.step()
    assert torch.equal(param.to_local(), before)


@pytest.mark.slow
def test_ranks_that_watch_something_else_are_refused() -> None:
    check_in_processes(_check_other, 2)
