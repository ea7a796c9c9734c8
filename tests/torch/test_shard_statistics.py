"""Statistics of sharded parameters: those of whole tensors, the same in every process."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import rulec
import rulec.torch
from rulec.errors import RulecError, TensorError
from tests.torch.eager.processes import check_in_processes

SHAPES = {"uneven": (7, 6), "even": (8, 4), "few": (1, 50), "line": (9,)}
WATCH = {
    "norm": "norm(update)", "ratio": "norm(update)/norm(p)", "most": "max(abs(g))", "cosine": "sum(update*grad)",
    "mean": "mean(abs(g))",
}  # fmt: skip


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
        place = partial(distribute_tensor, device_mesh=mesh, placements=[placement])
        optimizer, without = trained(kind, place, WATCH), trained(kind, place, None)
        _check_numbers(optimizer, plain)
        pairs = zip(optimizer.param_groups[0]["params"], without.param_groups[0]["params"], strict=True)
        assert all(torch.equal(p.to_local(), q.to_local()) for p, q in pairs)


def _check_numbers(optimizer: Any, plain: dict[str, float]) -> None:
    """The statistics are those of whole tensors, and have the same bits in all ranks."""
    numbers = optimizer.statistics().numbers()
    assert numbers.keys() == plain.keys()
    for name, number in numbers.items():
        assert math.isclose(number, plain[name], rel_tol=2e-4, abs_tol=1e-9), (name, number, plain[name])
    others: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(others, numbers)
    assert all(other == numbers for other in others)


def _check_all(_: int) -> None:
    for kind in ("AdamW", "LAMB", "Adafactor", "Muon"):
        _check(kind)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_statistics_of_shards_are_those_of_whole_tensors(count: int) -> None:
    check_in_processes(_check_all, count)


class Sent:
    """A count of the optimizer's messages from this process."""

    def __init__(self) -> None:
        self.count = 0
        for name in ("all_reduce", "all_gather", "all_to_all_single"):
            setattr(torch.distributed, name, self._counting(getattr(torch.distributed, name)))

    def _counting(self, send: Any) -> Any:
        def counted(*given: Any, **named: Any) -> Any:
            self.count += 1
            return send(*given, **named)

        return counted


#: Statistics of tensors, with extremes, and of the model.
WATCHES: tuple[Any, ...] = (
    "norms", WATCH,
    {"total": 'norm(update, per="model")', "largest": 'max(abs(g), per="model")', "mean": 'mean(update, per="group")'},
)  # fmt: skip


def _messages(sent: Sent, kind: str, place: Any, **keywords: Any) -> tuple[Any, list[int]]:
    """An optimizer after nine steps, and the number of messages of each step."""
    params = {name: nn.Parameter(place(value)) for name, value in values(0).items() if kind != "Muon" or value.ndim > 1}
    if kind == "clip":
        rule = rulec.load("clip_by_global_norm") >> rulec.load("adamw")
        optimizer = rulec.torch.optimizer(rule)([*params.items()], max_norm=1.0, **keywords)
    else:
        optimizer = getattr(rulec.torch, kind)([*params.items()], **keywords)
    counts = []
    for step in range(1, 10):
        for name, param in params.items():
            param.grad = place(values(step)[name])
        before = sent.count
        optimizer.step()
        counts.append(sent.count - before)
    return optimizer, counts


def _check_messages(_: int) -> None:
    sent, size = Sent(), torch.distributed.get_world_size()
    meshes: list[tuple[Any, tuple[Any, ...]]] = [(init_device_mesh("cpu", (size,)), (Shard(0),))]
    if size == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        meshes = [(mesh, (Shard(0), Shard(-1))), (mesh, (Replicate(), Shard(0)))]
    for mesh, placements in meshes:
        place = partial(distribute_tensor, device_mesh=mesh, placements=placements)
        for kind in ("AdamW", "Lion", "LAMB", "Muon", "Adafactor", "clip"):
            _, plain = _messages(sent, kind, place)
            for watch in WATCHES:
                measuring, messages = _messages(sent, kind, place, watch=watch)
                assert [a - b for a, b in zip(messages[4:], plain[4:], strict=True)] == [1] * 5, (kind, messages)
                whole, _ = _messages(sent, kind, lambda value: value, watch=watch)
                _check_numbers(measuring, whole.statistics().numbers())
            seldom, messages = _messages(sent, kind, place, watch="norms", watch_every=4)
            assert [a - b for a, b in zip(messages[4:], plain[4:], strict=True)] == [1, 0, 0, 0, 1], (kind, messages)
            whole, _ = _messages(sent, kind, lambda value: value, watch="norms", watch_every=4)
            assert seldom.statistics().step == 9
            _check_numbers(seldom, whole.statistics().numbers())


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_statistics_of_shards_are_one_message_more(count: int) -> None:
    check_in_processes(_check_messages, count)


def _check_mixed(_: int) -> None:
    """Other dimensions of one mesh cut each tensor, and none cuts the last: there is one message."""
    sent = Sent()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    ways = {"uneven": (Shard(0), Shard(1)), "even": (Replicate(), Shard(0)), "few": (Shard(1), Replicate())}
    ways["line"] = (Replicate(), Replicate())
    place = {name: partial(distribute_tensor, device_mesh=mesh, placements=way) for name, way in ways.items()}
    params = {name: nn.Parameter(place[name](value)) for name, value in values(0).items()}
    plain = {name: nn.Parameter(value) for name, value in values(0).items()}
    optimizer = rulec.torch.AdamW([*params.items()], watch=WATCH)
    whole = rulec.torch.AdamW([*plain.items()], watch=WATCH)
    for step in range(1, 4):
        for name, value in values(step).items():
            params[name].grad, plain[name].grad = place[name](value), value
        before = sent.count
        optimizer.step()
        whole.step()
    assert sent.count - before == 1
    _check_numbers(optimizer, whole.statistics().numbers())


@pytest.mark.slow
def test_tensors_that_other_dimensions_cut_are_in_one_message() -> None:
    check_in_processes(_check_mixed, 4)


def _check_dependent(rank: int) -> None:
    """Statistics of reduced values, with more messages, and names in another order."""
    watch = {"spread": "rms(update - mean(update))", "rows": 'max(norm(update, per="row"))', "norm": "norm(update)"}
    plain = trained("AdamW", lambda value: value, watch).statistics().numbers()
    mesh = init_device_mesh("cpu", (2,))
    place = partial(distribute_tensor, device_mesh=mesh, placements=[Shard(0)])
    _check_numbers(trained("AdamW", place, watch), plain)
    params = {name: nn.Parameter(place(value)) for name, value in values(0).items()}
    pairs = [*params.items()]
    optimizer = rulec.torch.AdamW(pairs[::-1] if rank else pairs, watch=WATCH)
    for step in range(1, 4):
        for name, param in params.items():
            param.grad = place(values(step)[name])
        optimizer.step()
    _check_numbers(optimizer, trained("AdamW", lambda value: value, WATCH).statistics().numbers())


@pytest.mark.slow
def test_statistics_of_reduced_values_and_of_other_orders_are_those_of_whole_tensors() -> None:
    check_in_processes(_check_dependent, 2)


def _check_eager(_: int) -> None:
    sent = Sent()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    whole = copy.deepcopy(model)
    fully_shard(model)
    eager = rulec.torch.EagerUpdate(model, "adamw", lr=1e-3, watch=WATCH)
    plain = rulec.torch.AdamW(whole.named_parameters(), lr=1e-3, watch=WATCH)
    rows = torch.randn(4, 5)
    for _ in range(4):
        before = sent.count
        with eager.backward():
            model(rows).square().mean().backward()
        eager.step()
        messages = sent.count - before
        whole(rows).square().mean().backward()
        plain.step()
        plain.zero_grad()
    assert messages == 1
    _check_numbers(eager, plain.statistics().numbers())


@pytest.mark.slow
def test_eager_updates_send_one_message_for_a_backward_pass() -> None:
    check_in_processes(_check_eager, 2)


def _check_other_gradients(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    place = partial(distribute_tensor, device_mesh=mesh, placements=[Shard(0)])
    params = {name: nn.Parameter(place(value)) for name, value in values(0).items()}
    optimizer = rulec.torch.AdamW([*params.items()], watch=WATCH)
    for step in range(1, 6):
        for name, param in params.items():
            param.grad = place(values(step)[name])
        if step == 3 and rank:
            params["even"].grad = None
        optimizer.step()
        if step == 3:
            with pytest.raises(RulecError, match="statistics of other tensors, or in other steps"):
                optimizer.statistics()
        else:
            assert len(optimizer.statistics()["norm"]) == 4


@pytest.mark.slow
def test_gradients_of_other_tensors_in_one_rank_leave_no_statistics() -> None:
    check_in_processes(_check_other_gradients, 2)


def _check_failed(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    place = partial(distribute_tensor, device_mesh=mesh, placements=[Shard(0)])
    param = nn.Parameter(place(values(0)["even"]))
    optimizer = rulec.torch.AdamW([param], watch=WATCH)
    grads = [place(values(number)["even"]) for number in range(5)]

    def step(number: int) -> None:
        param.grad = grads[number]
        optimizer.step()

    step(1)
    saved = copy.deepcopy(optimizer.state_dict())
    first = optimizer.statistics().numbers()

    def fail() -> float:
        raise ValueError("no loss")

    if rank:
        with pytest.raises(ValueError, match="no loss"):
            optimizer.step(fail)
        assert optimizer.statistics().numbers() == first
    else:
        step(2)
        with pytest.raises(RulecError, match="another process took no step"):
            optimizer.statistics()
    if rank:
        with pytest.raises(RulecError, match="load a checkpoint in every process"):
            step(3)
    else:
        step(3)
        with pytest.raises(RulecError, match="another process took no step"):
            optimizer.statistics()
    optimizer.load_state_dict(saved)
    step(4)
    assert optimizer.statistics().numbers().keys() == first.keys()


@pytest.mark.slow
def test_a_rank_without_a_step_leaves_no_statistics_in_others() -> None:
    check_in_processes(_check_failed, 2)


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
    assert len(first) == 20
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
