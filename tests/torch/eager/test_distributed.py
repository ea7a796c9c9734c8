"""Two processes: an update waits for the reduced gradient, and the copies of a model stay one."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import rulec.torch
from rulec.errors import RulecError
from rulec.torch import EagerUpdate
from tests.torch.eager.processes import COUNT, check_in_processes
from tests.torch.eager.recipe import Recipe, adamw, same, scope

LR = 0.05


def net() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3))


def batch(rank: int, step: int, part: int = 0) -> Tensor:
    """A different one in every process."""
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * rank + 10 * step + part))


def train(rank: int, model: Any, opt: Any, steps: int = 4) -> list[Tensor]:
    """Ordinary steps; the parameters after them."""
    around = getattr(opt, "backward", scope)
    for step in range(steps):
        opt.zero_grad()
        loss = model(batch(rank, step)).square().mean()
        with around():
            loss.backward()
        opt.step()
    return [*model.parameters()]


def accumulate(rank: int, model: Any, opt: Any, steps: int = 3) -> list[Tensor]:
    """Steps of two micro-batches, of which the first stays in its process."""
    around = getattr(opt, "backward", scope)
    for step in range(steps):
        opt.zero_grad()
        with model.no_sync(), around(False):
            model(batch(rank, step)).square().mean().backward()
        with around():
            model(batch(rank, step, 1)).square().mean().backward()
        opt.step()
    return [*model.parameters()]


def agree(params: list[Tensor]) -> bool:
    """Whether all processes have the same parameters."""
    flat = torch.cat([p.detach().flatten() for p in params])
    found = [torch.empty_like(flat) for _ in range(COUNT)]
    dist.all_gather(found, flat)
    return all(torch.equal(flat, other) for other in found)


def eager(model: Any, **keywords: Any) -> EagerUpdate:
    return EagerUpdate(model, "adamw", lr=LR, **keywords)


def plain(model: Any, **keywords: Any) -> Any:
    return rulec.torch.AdamW(model.parameters(), lr=LR, **keywords)


def clipped(rank: int, model: Any, opt: Any, steps: int = 3) -> list[Tensor]:
    """Steps whose gradients are clipped: in one pass, or in two."""
    for step in range(steps):
        opt.zero_grad()
        if isinstance(opt, EagerUpdate):
            with opt.measure():
                model(batch(rank, step)).square().mean().backward()
        with getattr(opt, "backward", scope)():
            model(batch(rank, step)).square().mean().backward()
        if not isinstance(opt, EagerUpdate):
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        opt.step()
    return [*model.parameters()]


def parts(params: Any) -> list[Tensor]:
    """What this process has of parameters."""
    return [p.to_local() for p in params]


def check_refused(message: str, call: Callable[[], Any]) -> None:
    with pytest.raises(RulecError, match=message):
        call()


# DistributedDataParallel


def wrapped(**keywords: Any) -> DistributedDataParallel:
    """The model in buckets of few parameters."""
    return DistributedDataParallel(net(), bucket_cap_mb=0.0001, **keywords)


def replicas(rank: int) -> None:
    for view, way in itertools.product((False, True), (train, accumulate)):
        one, other = wrapped(gradient_as_bucket_view=view), wrapped(gradient_as_bucket_view=view)
        expected = way(rank, one, plain(one))
        opt = eager(other)
        found = way(rank, other, opt)
        assert same(found, expected), (view, way.__name__)
        assert agree(found)
        assert opt.report().fired == len(found)
        assert all(p.grad is None for p in found)
        loss = other(batch(rank, 9)).square().mean()
        with opt.backward():
            loss.backward()
            assert view or all(p.grad is None for p in found), "DDP makes them anew at the end of the pass"
        opt.step()

    one, other = wrapped(), wrapped()
    assert same(clipped(rank, other, eager(other, max_grad_norm=0.01)), clipped(rank, one, plain(one)))
    assert agree([*other.parameters()])

    by_hooks = wrapped()
    hooked = Recipe(by_hooks.parameters(), adamw)
    for step in range(2):
        by_hooks(batch(rank, step)).square().mean().backward()
    assert not agree([*hooked.each]), "by the recipe every process trains a model of its own"


def replicas_that_cannot(rank: int) -> None:
    inside = wrapped()
    opt = eager(inside.module)
    check_refused(
        "there are 2 processes, and 0.weight would be updated before its gradient is reduced", opt.backward().__enter__
    )
    opt.close()
    alone = net()
    assert same(train(rank, alone, eager(alone, local=True)), train(rank, twin := net(), plain(twin)))

    check_refused(
        r"find_unused_parameters=\.\.\.\) knows at the end", lambda: eager(wrapped(find_unused_parameters=True))
    )
    check_refused(r"static_graph=\.\.\.\) knows at the end", lambda: eager(wrapped(static_graph=True)))
    check_refused("epilogue= leaves no gradient for Dist", lambda: eager(wrapped(), epilogue=True))
    hooked = wrapped()
    hooked.register_comm_hook(None, allreduce_hook)
    check_refused("has a communication hook already", lambda: eager(hooked))

    twice = wrapped()
    opt = eager(twice, max_grad_norm=0.01)
    loss = twice(batch(rank, 0)).square().mean()
    with opt.measure():
        loss.backward(retain_graph=True)
    check_refused("was not reduced by DistributedDataParallel", lambda: backward(opt, loss))
    early = wrapped()
    opt = eager(early)
    with early.no_sync():
        loss = early(batch(rank, 0)).square().mean()
        check_refused("was not reduced by DistributedDataParallel", lambda: backward(opt, loss))

    # After an eager optimizer the model trains as before, and another one may come.
    one, other = wrapped(), wrapped()
    opt = eager(other)
    train(rank, other, opt, steps=2)
    opt.close()
    resumed = plain(other)
    resumed.load_state_dict(opt.state_dict())
    whole = plain(one)
    train(rank, one, whole, steps=2)
    assert same(train(rank, other, resumed, steps=2), train(rank, one, whole, steps=2))
    check_refused("arrived outside of `with opt.backward", lambda: train_outside(rank))


def backward(opt: EagerUpdate, loss: Tensor) -> None:
    with opt.backward():
        loss.backward()


def train_outside(rank: int) -> None:
    model = wrapped()
    held = eager(model)
    model(batch(rank, 0)).square().mean().backward()
    del held


# fully_shard


class Twice(nn.Module):
    """A layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(torch.tanh(self.b(torch.tanh(self.a(x)))))  # type: ignore[no-any-return]


class Recomputed(Twice):
    """The same, with layers that run again inside the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(checkpoint(self.a, x, use_reentrant=False))
        return self.a(torch.tanh(checkpoint(self.b, hidden, use_reentrant=False)))  # type: ignore[no-any-return]


def sharded(make: Callable[[], nn.Module] = net) -> nn.Module:
    """A model of which each process has a part, of seven rows four and three."""
    mesh = init_device_mesh("cpu", (COUNT,))
    model = make()
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)  # type: ignore[return-value]


def accumulate_sharded(rank: int, model: Any, opt: Any, synchronise: bool = False) -> list[Tensor]:
    """Steps of two micro-batches, of which the first is reduced or not."""
    around = getattr(opt, "backward", scope)
    for step in range(3):
        opt.zero_grad()
        for part in range(2):
            model.set_requires_gradient_sync(synchronise or part == 1)
            with around(part == 1):
                model(batch(rank, step, part)).square().mean().backward()
        opt.step()
    return [*model.parameters()]


def accumulate_reduced(rank: int, model: Any, opt: Any) -> list[Tensor]:
    """The same, where every micro-batch is reduced."""
    return accumulate_sharded(rank, model, opt, synchronise=True)


def split(rank: int) -> None:
    for make, way in (
        (net, train), (net, accumulate_sharded), (net, accumulate_reduced), (Twice, train), (Recomputed, train),
    ):  # fmt: skip
        one, other = sharded(make), sharded(make)
        expected = parts(way(rank, one, plain(one)))
        opt = eager(other)
        found = way(rank, other, opt)
        assert same(parts(found), expected), (make.__name__, way.__name__)
        assert opt.report().fired == len(found)
        assert opt.report().bytes_freed == sum(part.nbytes for part in parts(found))
    one, other = sharded(), sharded()
    found = clipped(rank, other, eager(other, max_grad_norm=0.01))
    assert same(parts(found), parts(clipped(rank, one, plain(one))))


def split_states(rank: int) -> None:
    one, other = sharded(), sharded()
    train(rank, one, torch.optim.AdamW(one.parameters(), lr=LR, foreach=False))
    opt = eager(other)
    train(rank, other, opt)
    for p, q in zip(parts(one.parameters()), parts(other.parameters()), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    weight = next(iter(other.parameters()))
    moment = opt.state[weight]["exp_avg"]
    assert (moment.placements, moment.shape) == (weight.placements, weight.shape)

    # On from there by the plain optimizer, in another model.
    later = sharded()
    later.load_state_dict(other.state_dict())
    resumed = plain(later)
    resumed.load_state_dict(opt.state_dict())
    assert same(parts(train(rank, later, resumed)), parts(train(rank, other, opt)))

    # States that were saved whole are cut to the parts that are here.
    whole, again = net(), sharded()
    full = plain(whole)
    train(0, whole, full, steps=2)
    taken = plain(again)
    taken.load_state_dict(full.state_dict())
    for p, q in zip(again.parameters(), whole.parameters(), strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(taken.state[p][key].full_tensor(), full.state[q][key])
    check_refused("save needs whole tensors", lambda: rulec.torch.save(taken, "nowhere"))


def split_that_meet(rank: int) -> None:
    """What reduces DTensors waits for `step()`, where processes meet once; all else is updated in the backward pass."""
    for rule in ("muon", "lamb", "soap"):
        one, other = sharded(), sharded()
        groups = [rulec.torch.tagged_groups(model, {"head": []}) for model in (one, other)]
        keywords = {"lr": LR, **({"adamw_lr": LR} if rule == "muon" else {})}
        alone = rulec.torch.optimizer(rule)(groups[0], **keywords)
        opt = EagerUpdate(groups[1], rule, contributions=1, **keywords)
        assert same(parts(train(rank, other, opt)), parts(train(rank, one, alone)))
        local = [p for p in other.parameters() if rule == "lamb" or p.dim() == 2]
        sizes = [part.nbytes for part in parts(local)]
        early = [part.nbytes for part in parts(p for p in other.parameters() if all(p is not q for q in local))]
        report = opt.report()
        assert (report.fired, report.deferred) == (len(early), len(local))
        assert sum(sizes) <= report.peak_gradient_bytes <= sum(sizes) + max(early, default=0)
        before = [part.clone() for part in parts(local)]
        with opt.backward():
            other(batch(rank, 9)).square().mean().backward()
        opt.inner.param_groups[0]["lr"] = 1.0 if rank else LR
        check_refused("'lr' of a parameter group was changed" if rank else "another process takes no step", opt.step)
        assert same(parts(local), before)


def split_that_cannot(rank: int) -> None:
    store = rulec.torch.GradStore()
    mesh = init_device_mesh("cpu", (COUNT,))
    weight = nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)]))
    opt = rulec.torch.LAMB([weight], lr=0.1)
    weight.grad = distribute_tensor(torch.ones(4, 3), weight.device_mesh, [Shard(0)])
    store.collect([weight])
    check_refused(
        "LAMB reduces DTensors over their processes, which meet once in a step", lambda: store.step(opt, weight)
    )
    table = nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [Replicate()]))
    plain_table = nn.Parameter(torch.ones(4, 3))
    for p in (table, plain_table):
        opt = rulec.torch.LAMB([p], lr=0.1)
        p.grad = (
            torch.full((4, 3), 0.5)
            if p is plain_table
            else distribute_tensor(torch.full((4, 3), 0.5), mesh, [Replicate()])
        )
        opt.step()
    assert torch.equal(table.to_local(), plain_table), "what every process has whole may follow any rule"
    row = nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)]))
    row.grad = distribute_tensor(torch.ones(4, 3), mesh, [Shard(1)])
    check_refused(r"the gradient of parameter 0 is placed as .*Shard\(dim=1\)", rulec.torch.AdamW([row]).step)


@pytest.mark.slow
@pytest.mark.parametrize("work", [replicas, split])
def test_two_processes(work: Callable[[int], None]) -> None:
    check_in_processes(work)


@pytest.mark.slow
@pytest.mark.parametrize("work", [replicas_that_cannot, split_states, split_that_meet, split_that_cannot])
def test_two_processes_at_length(work: Callable[[int], None]) -> None:
    check_in_processes(work)
