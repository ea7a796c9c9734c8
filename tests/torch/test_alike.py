"""Processes of DTensors whose optimizers are not alike: paired by name, or one sentence in all; nothing is written."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim.lr_scheduler import LambdaLR

import rulec
import rulec.torch
from rulec.errors import RulecError
from rulec.torch.distributed.comparison import difference
from tests.torch.eager.processes import check_in_processes
from tests.torch.test_communication import everywhere, sent
from tests.torch.test_meshes import kind_of

#: Two formulas under one name.
FORMULA = "name: X\nhyper: {lr: 0.1}\nstep: |\n  n = sqrt(sum(g**2, per='model'))\n  direction = g/(n + %s)\n"


def net_of(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Two layers of one shape, and one of another."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 6)).to(dtype)


def split(net: nn.Sequential, mesh: Any) -> nn.Sequential:
    for layer in net:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net


def give(net: nn.Module, seed: int) -> None:
    """Gradients of other sizes for each parameter, the same in all processes."""
    draw = torch.Generator().manual_seed(seed)
    for k, param in enumerate(net.parameters()):
        grad = torch.randn(param.shape, generator=draw) * 10.0**-k
        param.grad = grad.to(param.dtype)
        if isinstance(param, DTensor):
            param.grad = distribute_tensor(grad.to(param.dtype), param.device_mesh, param.placements)


def whole(param: Any) -> torch.Tensor:
    return param.full_tensor().detach().clone() if isinstance(param, DTensor) else param.detach().clone()


def error_of(step: Callable[[], object]) -> str:
    """The one error that all processes raise."""
    with pytest.raises(RulecError) as caught:
        step()
    (text,) = {*everywhere(str(caught.value))}
    return str(text)


# Order


def matrices(name: str, items: Sequence[Any]) -> list[Any]:
    return [item for item in items if name != "muon" or item[1].ndim == 2]


def groups_of(net: nn.Module, name: str, named: bool, mixed: bool) -> list[dict[str, Any]]:
    """Two groups; where `mixed` both are in another order, and so are the tensors in them."""
    items = matrices(name, [*net.named_parameters()])
    sides = [items[::2], items[1::2]]
    if mixed:
        sides = [side[::-1] for side in sides][::-1]
    return [{"params": side if named else [param for _, param in side]} for side in sides]


def check_order(name: str, named: bool, mixed: bool, mesh: Any, **keywords: Any) -> None:
    """Steps with tensors in another order have the numbers of one process."""
    dtype = torch.bfloat16 if "weights" in keywords else torch.float32
    net, alone = split(net_of(dtype), mesh), net_of(dtype)
    optimizers = [
        kind_of(name)(groups_of(net, name, named, mixed), lr=0.1, backend="c", **keywords),
        kind_of(name)(groups_of(alone, name, True, False), lr=0.1, backend="c", **keywords),
    ]
    for seed in (1, 2, 3):
        give(net, seed)
        give(alone, seed)
        if seed == 2:
            net[1].weight.grad = alone[1].weight.grad = None
        for optimizer in optimizers:
            optimizer.step()
    for ours, theirs in zip(net.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(whole(ours), theirs.detach(), rtol=1e-5, atol=1e-6)


def of_order(rank: int, names: Sequence[str]) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for name in names:
        for named in (True, False):
            check_order(name, named, rank == 1, mesh)
    check_order("adamw", False, rank == 1, mesh, weights="stochastic")


def test_tensors_in_another_order_are_paired_by_name() -> None:
    check_in_processes(partial(of_order, names=("lamb", "muon")))


@pytest.mark.slow
def test_tensors_in_another_order_are_paired_by_name_under_rules_of_each_kind() -> None:
    check_in_processes(
        partial(of_order, names=("adafactor", "soap", "clip >> lamb", "prodigy", "noise >> adam", "shampoo"))
    )


def placed(mesh: Any, shapes: Sequence[tuple[int, ...]]) -> list[nn.Parameter]:
    """Parameters that no model has."""
    return [nn.Parameter(distribute_tensor(torch.ones(shape), mesh, [Shard(0)])) for shape in shapes]


def filled(params: Sequence[nn.Parameter]) -> None:
    for param in params:
        param.grad = torch.ones_like(param)


def of_unnamed(rank: int) -> None:
    """Without any names, tensors of other shapes are refused; rules of elements need no order."""
    mesh = init_device_mesh("cpu", (2,))
    params = placed(mesh, [(8, 4), (6,), (4, 8)])
    order = params[::-1] if rank else params
    for name in ("lamb", "muon", "adafactor"):
        optimizer = kind_of(name)([{"params": order, "tags": ()}], lr=0.1)
        filled(params)
        before = [whole(p) for p in params]
        text = error_of(optimizer.step)
        assert text.startswith("process 1 has shape (4, 8) at place 0, where process 0 has shape (8, 4)")
        assert "tensors without names are paired by their order" in text
        assert all(map(torch.equal, before, map(whole, params)))
        assert not any(optimizer.state.values())
        optimizer.param_groups[0]["params"] = params
        optimizer.step()
    plain = kind_of("adamw")(order, lr=0.1)
    for _ in range(2):
        plain.step()


# What differs

#: What one process has otherwise: (rule, keywords of the others, of this one, words, dtype).
OTHERWISE: list[tuple[Any, dict[str, Any], dict[str, Any], str, torch.dtype]] = [
    ("lamb", {"lr": 0.1}, {"lr": 0.2}, "lr=0.2 for 0.weight, where process 0 has lr=0.1:", torch.float32),
    ("lamb", {"lr": 0.1}, {"betas": (0.8, 0.99)}, "beta1=0.8 for 0.weight", torch.float32),
    ("adamw", {"lr": 0.1}, {"lr": 0.2}, "lr=0.2 for 0.weight", torch.float32),
    ("adamw", {"lr": 0.1}, {"maximize": True}, "maximize=True for 0.weight", torch.float32),
    ("adamw", {"lr": 0.1}, {"state_dtype": torch.bfloat16}, "state_dtype={'': 'bfloat16'}", torch.float32),
    ("adamw", {"weights": "stochastic"}, {"weights": "stochastic", "seed": 1}, "seed=1", torch.bfloat16),
    ("adamw", {"weights": "kahan"}, {"weights": "split"}, "weights='split'", torch.bfloat16),
    ("clip >> lamb", {"max_norm": 1.0}, {"max_norm": 0.5}, "max_norm=0.5 for 0.weight", torch.float32),
    ("noise >> adam", {"seed": 1}, {"seed": 2}, "seed=2, where process 0 has seed=1", torch.float32),
]


def check_refused(optimizer: Any, net: nn.Module, words: str) -> None:
    """All processes refuse two steps in the same words, and write nothing."""
    before = [whole(p) for p in net.parameters()]
    for _ in range(2):
        give(net, 1)
        text = error_of(optimizer.step)
        assert words in text, text
        assert text.startswith("process ")
        assert text.endswith("make the optimizers of all processes alike; nothing was changed")
    assert all(map(torch.equal, before, map(whole, net.parameters())))


def of_differences(rank: int, mesh: Any, other: Sequence[int], cases: Sequence[int]) -> None:
    for case in cases:
        name, usual, otherwise, words, dtype = OTHERWISE[case]
        net = split(net_of(dtype), mesh)
        keywords = {**usual, **(otherwise if rank in other else {})}
        check_refused(kind_of(name)(net.parameters(), **{"lr": 0.1, **keywords}), net, words)
    net = split(net_of(), mesh)
    kind = rulec.torch.optimizer(rulec.parse(FORMULA % ("100" if rank in other else "1")))
    words = f"process {other[0]} has other equations of the rule X for 0.weight than process 0:"
    check_refused(kind(net.parameters(), lr=0.1), net, words)
    optimizer = kind_of("lamb" if rank in other else "lars")(net.parameters(), lr=0.1)
    check_refused(
        optimizer, net, f"process {other[0]} has the rule LAMB for 0.weight, where process 0 has the rule LARS"
    )
    params = [*net.named_parameters()]
    optimizer = kind_of("lamb")(params[:-1] if rank in other else params, lr=0.1)
    check_refused(optimizer, net, f"process 0 has 2.bias, and process {other[0]} lacks it")


def of_schedules(rank: int) -> None:
    """Numbers that change in each step are compared in messages that are sent anyway."""
    mesh = init_device_mesh("cpu", (2,))
    for name in ("lamb", "muon", "adafactor"):
        net = split(net_of(), mesh)
        optimizer = kind_of(name)(matrices(name, [*net.named_parameters()]), lr=0.1)
        scheduler, counts = LambdaLR(optimizer, lambda k: 1 / (1 + k // 4)), []
        for seed in range(1, 8):
            give(net, seed)
            with sent() as count:
                optimizer.step()
            counts.append(dict(count))
            scheduler.step()
        assert counts[2] == counts[3] == counts[4] == counts[6]  # before the rate changes, as it does, and after
        optimizer.param_groups[0]["lr"] = 0.3 if rank else 0.2
        check_refused(optimizer, net, "process 1 has lr=0.3 for 0.weight, where process 0 has lr=0.2:")
        optimizer.param_groups[0]["lr"] = 0.2
        optimizer.step()


def of_allowed(rank: int) -> None:
    """What no common step depends on may differ."""
    mesh = init_device_mesh("cpu", (2,))
    net = split(net_of(), mesh)
    weights = [(n, p) for n, p in net.named_parameters() if p.ndim == 2]
    give(net, 1)
    rulec.torch.Muon([{"params": weights, "tags": ()}], lr=0.1, adamw_lr=0.1 + rank).step()  # of no tensor here
    rate = torch.tensor(0.1)
    kind_of("lamb")(net.parameters(), lr=rate).step()
    own = nn.Parameter(torch.ones(3, 3 + rank))
    own.grad = torch.ones_like(own)
    groups = [{"params": [p for _, p in weights]}, {"params": [own], "lr": 0.1 + rank}]
    for name in ("adamw", "lamb"):
        kind_of(name)(groups, lr=0.1).step()
    stage = nn.Parameter(torch.ones(3))
    stage.grad = torch.ones(3)
    kind_of("clip >> lamb")([stage], lr=0.1 + rank, max_norm=1.0, reduce_over=dist.group.WORLD).step()


def of_first_rates(rank: int) -> None:
    """A learning rate of 0 in one process, where a first step may ask for states alone; and states before steps."""
    mesh = init_device_mesh("cpu", (2,))
    for name in ("adamw", "lamb"):
        net = split(net_of(), mesh)
        optimizer = kind_of(name)(net.parameters(), lr=0.0 if rank else 0.1)
        check_refused(optimizer, net, "process 1 has lr=0.0 for 0.weight, where process 0 has lr=0.1:")
        optimizer = kind_of(name)(net.parameters(), lr=0.0)
        for param in net.parameters():
            param.grad = torch.zeros_like(param)
        optimizer.step()  # makes states
        optimizer.param_groups[0]["lr"] = 0.2 if rank else 0.1
        check_refused(optimizer, net, "process 1 has lr=0.2 for 0.weight, where process 0 has lr=0.1:")


def of_stages(rank: int) -> None:
    """Processes of `reduce_over`, which have other tensors: one formula of what they have together, and its numbers."""
    world = dist.group.WORLD
    formula = rulec.torch.optimizer(rulec.parse(FORMULA % ("100" if rank else "1")))
    clip = kind_of("clip >> lamb")
    makers: list[tuple[Callable[[Any], Any], str]] = [
        (lambda params: formula(params, lr=0.1, reduce_over=world), "other equations"),
        (lambda params: clip(params, lr=0.1, max_norm=1.0 + rank, reduce_over=world), "other hyper-parameters"),
        (
            lambda params: ZeroRedundancyOptimizer(params, clip, reduce_over=world, max_norm=1.0 + rank),
            "other hyper-parameters",
        ),
    ]
    for make, words in makers:
        params = [nn.Parameter(torch.ones(3)) for _ in range(2)]
        optimizer = make(params)
        for _ in range(2):
            for param in params:
                param.grad = torch.ones(3)
            text = error_of(optimizer.step)
            assert text.startswith(f"process 1 of reduce_over has {words}"), text
            assert all(torch.equal(param.detach(), torch.ones(3)) for param in params)
    sizes, one = [], nn.Parameter(torch.ones(3))
    other = kind_of("clip >> adafactor" if rank else "clip >> lamb")([one], lr=0.1, max_norm=1.0, reduce_over=world)
    for k in range(4):
        other.param_groups[0]["lr"] = 0.1 * (1 + rank) if k < 2 else 0.3
        one.grad = torch.ones(3)
        with sent() as counts:
            other.step()
        sizes.append(dict(counts))
    assert sizes[0] == sizes[1] == sizes[2] == sizes[3]


def of_eager(rank: int) -> None:
    """Eager updates: compared where the backward pass begins, and paired by name at the end of the step."""
    mesh = init_device_mesh("cpu", (2,))
    for name in ("adamw", "lamb"):
        net, alone = split(net_of(), mesh), net_of()
        params = [*net.parameters()]
        eager = rulec.torch.EagerUpdate(params[::-1] if rank else params, name, lr=0.1)
        plain = kind_of(name)(alone.parameters(), lr=0.1)
        for k in range(3):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(k))
            with eager.backward():
                net(x).square().mean().backward()
            eager.step()
            plain.zero_grad()
            alone(x).square().mean().backward()
            plain.step()
        for ours, theirs in zip(params, alone.parameters(), strict=True):
            torch.testing.assert_close(whole(ours), theirs.detach(), rtol=1e-5, atol=1e-6)
        eager.close()
        other = rulec.torch.EagerUpdate(params, name, lr=0.1 + rank)
        loss = net(torch.ones(4, 8)).square().mean()

        def scope(eager: Any = other, loss: torch.Tensor = loss) -> None:
            with eager.backward():
                loss.backward()
            eager.step()

        assert "process 1 has lr=1.1 for 0.weight, where process 0 has lr=0.1" in error_of(scope)


# Closures


class Bad(nn.Module):
    """A layer that fails in some process."""

    fails = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails == "in":
            raise ValueError("bad layer")
        return x


def check_closures(rank: int, optimizer: Any, net: nn.Module, how: str) -> None:
    """What one process raises before a step is an error in all, and steps go on."""
    steps, failing = [0], (1, 3)

    def fail(*words: Any) -> None:
        if rank == 1 and steps[0] in failing:
            raise ValueError("bad")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = net(torch.ones(4, 8)).square().mean()
        loss.backward()
        fail()
        return loss

    if how == "hook":
        optimizer.register_step_pre_hook(fail)
    for _ in range(5):
        steps[0] += 1
        before = [whole(p) for p in net.parameters()]
        expected = nullcontext()
        if steps[0] in failing:
            kind, words = (ValueError, "bad") if rank else (RulecError, "process .*takes no step")
            expected = pytest.raises(kind, match=words)
        with expected:
            if how == "closure":
                optimizer.step(closure)
            else:
                net(torch.ones(4, 8)).square().mean().backward()
                optimizer.step()
        same = all(map(torch.equal, before, map(whole, net.parameters())))
        assert same == (steps[0] in failing), (how, steps)


def of_closures(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for name in ("lamb", "muon"):
        for how in ("closure", "hook"):
            net = split(net_of(), mesh)
            check_closures(rank, kind_of(name)(matrices(name, [*net.named_parameters()]), lr=0.1), net, how)
    net = split(net_of(), mesh)
    params = [*net.named_parameters()]
    both = rulec.partition({"*/bias": rulec.part("lamb"), "...": rulec.part("lars")})
    check_closures(rank, rulec.torch.Partitioned(both, params, lr=0.1), net, "closure")
    plain = nn.Linear(8, 8)
    keywords = {"max_norm": 1.0, "reduce_over": dist.group.WORLD}
    check_closures(rank, kind_of("clip >> lamb")(plain.parameters(), lr=0.1, **keywords), plain, "closure")


def in_the_model(rank: int) -> None:
    """A model that fails in its forward pass, or before it: its process raises that at once, and sends nothing."""
    mesh = init_device_mesh("cpu", (2,))
    net = split(nn.Sequential(nn.Linear(8, 8), Bad(), nn.Linear(8, 8)), mesh)
    optimizer = kind_of("lamb")(net.parameters(), lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        if net[1].fails == "before":
            raise ValueError("bad batch")
        loss: torch.Tensor = net(torch.ones(4, 8)).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    for fails, words in (("before", "bad batch"), ("in", "bad layer")):
        net[1].fails = fails
        with sent() as counts, pytest.raises(ValueError, match=words):
            optimizer.step(closure)
        assert not counts


def of_two(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    of_unnamed(rank)
    of_differences(rank, mesh, (1,), range(0, len(OTHERWISE), 3))
    of_schedules(rank)
    of_allowed(rank)
    of_first_rates(rank)
    of_stages(rank)
    of_eager(rank)


def test_what_differs_is_one_sentence_in_all_processes() -> None:
    check_in_processes(of_two)


def closures_of_two(rank: int) -> None:
    of_closures(rank)
    in_the_model(rank)


def test_a_closure_or_hook_that_raises_in_one_process_is_an_error_in_all() -> None:
    check_in_processes(closures_of_two)


def of_four(rank: int) -> None:
    """Replicas, and parts cut both ways."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    of_differences(rank, grid, (2, 3), range(len(OTHERWISE)))
    of_differences(rank, grid, (1,), (0, 5))
    for name in ("lamb", "muon", "soap"):
        for named in (True, False):
            check_order(name, named, rank in (1, 2), grid)
    check_order("adamw", False, rank == 3, grid, weights="stochastic")
    same = nn.Parameter(distribute_tensor(torch.ones(4, 4), grid, [Replicate(), Replicate()]))
    same.grad = torch.ones_like(same)
    optimizer = rulec.torch.Muon([same], lr=0.2 if rank == 3 else 0.1)
    assert "process 3 has lr=0.2 at place 0, where process 0 has lr=0.1" in error_of(optimizer.step)


@pytest.mark.slow
def test_what_differs_among_four_processes() -> None:
    check_in_processes(of_four, 4)


# Sentences, without processes

FACTS = {
    "shape": [8, 4], "dtype": "float32", "mesh": [2], "placements": "(Shard(dim=0),)", "rule": "LAMB",
    "equations": "ab", "maximize": False,
}  # fmt: skip


def said(names: Sequence[str] = ("a", "b"), column: int = 0) -> dict[str, Any]:
    tensors = [["", "", 0, 0, 0] for _ in names]
    for tensor, name in zip(tensors, names, strict=True):
        tensor[column] = name
    return {
        "optimizer": {"seed": 0, "weights": "", "state_dtype": {}}, "tensors": tensors, "facts": [dict(FACTS)],
        "hyper": [{"lr": "0.1"}], "ordered": True, "grouped": False, "across": False,
    }  # fmt: skip


CHANGES: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda x: x["optimizer"].update(seed=3), "seed=3, where process 0 has seed=0"),
    (lambda x: x["optimizer"].update(weights="kahan"), "weights='kahan', where"),
    (lambda x: x["facts"][0].update(shape=[4, 4]), "shape (4, 4)"),
    (lambda x: x["facts"][0].update(dtype="bfloat16"), "dtype bfloat16"),
    (lambda x: x["facts"][0].update(mesh=[4]), "a mesh of (4,)"),
    (lambda x: x["facts"][0].update(placements="(Replicate(),)"), "placements (Replicate(),)"),
    (lambda x: x["facts"][0].update(rule="LARS"), "the rule LARS"),
    (lambda x: x["facts"][0].update(equations="cd"), "process 1 has other equations of the rule LAMB"),
    (lambda x: x["facts"][0].update(maximize=True), "maximize=True"),
    (lambda x: x["hyper"][0].update(lr="0.2"), "lr=0.2"),
    (lambda x: x["tensors"].pop(), ""),
    (lambda x: x["facts"].__setitem__(0, None), ""),
]


@pytest.mark.parametrize("names", [("a", "b"), ("", "")], ids=["named", "unnamed"])
@pytest.mark.parametrize("column", [0, 1])
@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize(("change", "words"), CHANGES, ids=[words[:12] for _, words in CHANGES])
def test_every_difference_is_told(
    change: Callable[[dict[str, Any]], object], words: str, names: Sequence[str], column: int, ordered: bool
) -> None:
    mine, first = said(names, column), {**said(names, column), "ordered": ordered}
    assert difference(mine, first, 1, 0).text == "" == "".join(difference(mine, first, 1, 0).order)
    change(mine)
    text = difference(mine, first, 1, 0).text
    assert words in text
    assert text.endswith("; nothing was changed")


def test_the_order_is_that_of_names_where_all_know_them() -> None:
    for column in (0, 1):
        there, mine = said("abc", column), said("cab", column)
        assert difference(mine, there, 1, 0).order == ("a", "b", "c")
        assert difference(mine, {**there, "ordered": False}, 1, 0).order == ()
    mine, there = said("cab", 0), said("abc", 1)  # each knows names of its own kind
    assert difference(mine, there, 1, 0) == difference(said("abc"), said("abc"), 1, 0)
    mine, there = said("aab"), said("aba")  # two tensors of one name
    assert difference(mine, there, 1, 0).order == ()
    mine = said("ba")
    mine["tensors"][0][4] = 1
    assert difference(mine, {**said("ab"), "grouped": True}, 1, 0).text.startswith(
        "process 1 has other parameter groups"
    )
    both = copy.deepcopy(said("ab"))
    both["tensors"][1][4] = 1
    mine["tensors"] = [["b", "", 0, 0, 0], ["a", "", 0, 0, 1]]  # groups in another order
    assert difference(mine, {**both, "grouped": True}, 1, 0).order == ("a", "b")
    assert "other parameter groups" in difference(mine, {**both, "grouped": True, "across": True}, 1, 0).text
