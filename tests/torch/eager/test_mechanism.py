"""When parameters fire, what waits, and what it takes of memory."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from rulec.errors import HyperError, RulecError, TensorError
from rulec.torch import SGD, EagerUpdate
from rulec.torch.eager import Report
from rulec.torch.eager.on_gradient import Gather
from rulec.torch.eager.params import Released
from tests.torch.eager.training import Pair, cloned, gone, loss_of, model


def chain(count: int = 6, width: int = 64) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(count)])


def take(opt: EagerUpdate, net: nn.Module, width: int = 64) -> None:
    """One step."""
    with opt.backward():
        net(torch.ones(2, width)).square().mean().backward()
    opt.step()


# Arrivals


def test_the_first_step_is_watched_and_the_next_are_early() -> None:
    pair = Pair("adamw")
    pair.step()
    assert (pair.eager.report().fired, pair.eager.report().deferred) == (0, 9)
    pair.step()
    assert (pair.eager.report().fired, pair.eager.report().deferred) == (9, 0)
    pair.eager.relearn()
    pair.step()
    assert pair.eager.report().deferred == 9
    assert pair.same()


def test_the_first_step_is_early_where_gradients_are_said_to_arrive_once() -> None:
    pair = Pair("adamw", contributions=1)
    pair.step()
    assert pair.eager.report().fired == 9
    assert pair.same()


def test_a_parameter_without_a_gradient_is_untouched() -> None:
    net = model()
    opt = EagerUpdate(net, "adamw", contributions=1)
    before = cloned(net.parameters())
    with opt.backward():
        net[1](torch.ones(1, 12)).sum().backward()
    opt.step()
    assert (opt.report().fired, opt.report().untouched) == (2, 7)
    moved = [not torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True)]
    assert moved == [False, True, True, *[False] * 6]


def test_a_frozen_parameter_is_left_alone_and_joins_when_it_thaws() -> None:
    pair = Pair("adamw")
    for net in (pair.ours, pair.theirs):
        net[0].weight.requires_grad_(False)
    pair.step()
    pair.step()
    assert (pair.eager.report().fired, pair.eager.report().untouched) == (8, 1)
    for net in (pair.ours, pair.theirs):
        net[0].weight.requires_grad_(True)
        net[1].weight.requires_grad_(False)
    pair.step()
    assert (pair.eager.report().fired, pair.eager.report().deferred) == (7, 1)
    pair.step()
    assert pair.eager.report().fired == 8
    assert pair.same()


def test_a_gradient_given_by_hand_is_used_in_the_step() -> None:
    net = model()
    opt = EagerUpdate(net, "sgd", lr=0.5)
    before = net[0].weight.detach().clone()
    net[0].weight.grad = torch.ones_like(before)
    opt.step()
    assert torch.equal(net[0].weight, before - 0.5)
    assert gone(net)
    assert opt.report().deferred == 1


def test_parameters_added_later_are_watched_first() -> None:
    nets, extra = [model(), model()], [nn.Linear(5, 5), nn.Linear(5, 5)]
    extra[1].load_state_dict(extra[0].state_dict())
    from rulec.torch import AdamW

    opt, twin = EagerUpdate(nets[0], "adamw", lr=0.01), AdamW(nets[1].parameters(), lr=0.01)

    def step(number: int, joined: bool) -> None:
        ours, theirs = ((nn.Sequential(n, e) if joined else n) for n, e in zip(nets, extra, strict=True))
        with opt.backward():
            loss_of(ours, number).backward()
        opt.step()
        twin.zero_grad()
        loss_of(theirs, number).backward()
        twin.step()

    step(0, False)
    step(1, False)
    for each, net in ((opt, extra[0]), (twin, extra[1])):
        each.add_param_group({"params": [*net.parameters()], "lr": 0.1})
    step(2, True)
    assert opt.report().deferred == 11
    step(3, True)
    assert opt.report().fired == 11
    ours, theirs = [[*n.parameters(), *e.parameters()] for n, e in zip(nets, extra, strict=True)]
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_gradient_that_is_not_there_when_hooks_run_is_no_arrival() -> None:
    net = chain(1)
    opt = EagerUpdate(net, "adamw", contributions=1)

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight: Tensor) -> Tensor:  # type: ignore[no-untyped-def, override]
            return weight.sum()

        @staticmethod
        def backward(ctx, grad: Tensor) -> None:  # type: ignore[no-untyped-def, override]
            return None

    with opt.backward():
        (Nothing.apply(net[0].weight) + net[0].bias.sum()).backward()
    opt.step()
    assert (opt.report().fired, opt.report().untouched) == (1, 1)


# Part of a model


def test_only_some_are_early() -> None:
    net = model()
    opt = EagerUpdate(net, "adamw", only=["1.*", "6.bias"], contributions=1)
    with opt.backward():
        loss_of(net, 0).backward()
    assert [isinstance(p.grad, Released) for p in net.parameters()] == [False, True, True, *[False] * 5, True]
    opt.step()
    assert (opt.report().fired, opt.report().deferred) == (3, 6)
    pair = Pair("adamw", only=["1.*", "4.*"])
    for _ in range(3):
        pair.step()
    assert (pair.eager.report().fired, pair.eager.report().deferred) == (4, 5)
    assert pair.same()


@pytest.mark.parametrize(
    ("only", "error", "message"),
    [("layer.*", TensorError, "only='layer.*' matches no parameter"), (3, HyperError, "must be a pattern")],
)
def test_patterns_that_are_none(only: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        EagerUpdate(model(), "adamw", only=only)  # type: ignore[arg-type]


# Memory


def test_gradients_are_gone_and_at_most_one_large_one_was_there() -> None:
    net, width = chain(12, 96), 96
    opt = EagerUpdate(net, "adamw")
    take(opt, net, width)
    whole = sum(p.nbytes for p in net.parameters())
    assert opt.report().peak_gradient_bytes == whole
    alive: list[int] = []

    def count(grad: Tensor) -> None:
        alive.append(sum(g() is not None for g in grads))
        grads.append(weakref.ref(grad.untyped_storage()))

    grads: list[weakref.ref[object]] = []
    for layer in net:
        layer.weight.register_hook(count)
    take(opt, net, width)
    report, largest = opt.report(), 96 * 96 * 4
    assert report.fired == 24
    assert report.bytes_freed == whole
    assert report.largest_gradient_bytes == largest
    assert report.peak_gradient_bytes <= 1.05 * largest
    assert report.launches < 24  # biases fire together
    assert max(alive) == 0, "another gradient was there when one arrived"


def test_small_gradients_wait_for_each_other_within_their_room() -> None:
    gather = Gather(room=100)
    assert gather.takes(100)
    assert not gather.takes(101)
    assert gather.add(5, 40) == []
    assert gather.add(3, 40) == []
    assert gather.add(4, 40) == [3, 5]
    gather.withdraw(4)
    assert gather.take() == []
    gather.add(1, 100)
    assert gather.take() == [1]
    assert not gather.waiting


def test_a_report_says_what_happened() -> None:
    text = str(Report(2, 1, 3, 0, 2, 3 << 20, 2048, 1024))
    assert text.splitlines() == [
        "fired              2 parameters, in 2 launches", "deferred           1", "untouched          3",
        "gradients freed    3 MiB", "gradients at most  2 KiB", "largest gradient   1 KiB",
    ]  # fmt: skip


# What is left in the place of gradients


def test_a_gradient_that_is_gone_says_so() -> None:
    net = chain(2)
    opt = EagerUpdate(net, "adamw", contributions=1)
    with opt.backward():
        net(torch.ones(2, 64)).sum().backward()
    left = net[0].weight.grad
    assert isinstance(left, Released)
    assert "freed" in repr(left)
    for use in (lambda g: g + 1, lambda g: g.norm(), lambda g: g.dtype, torch.isfinite):
        with pytest.raises(RulecError, match=r"freed: change gradients with Tensor.register_hook, clip them with"):
            use(left)  # type: ignore[no-untyped-call]
    opt.step()
    assert gone(net)


# Hooks of others


def test_hooks_of_others_see_the_whole_gradient_whenever_they_were_registered() -> None:
    net = chain(2)
    seen: list[bool] = []
    net[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad is not None))
    opt = EagerUpdate(net, SGD, lr=0.1, contributions=1)
    net[0].weight.register_post_accumulate_grad_hook(lambda p: _none(p.grad.mul_(0)))
    before = net[0].weight.detach().clone()
    take(opt, net)
    assert seen == [True]
    assert opt.report().fired == 4
    assert torch.equal(net[0].weight, before), "a hook that was registered later had its say"


def _none(value: object) -> None:
    """What hooks must return."""


def test_a_hook_on_the_tensor_changes_the_gradient() -> None:
    net = chain(2)
    net[0].weight.register_hook(torch.zeros_like)
    opt, before = EagerUpdate(net, SGD, lr=0.1, contributions=1), net[0].weight.detach().clone()
    take(opt, net)
    assert torch.equal(net[0].weight, before)


def test_step_hooks_of_optimizers_run_once_in_a_step() -> None:
    net = chain(3)
    seen: list[object] = []
    for rule, more in ((SGD, {}), (torch.optim.SGD, {"scope": "elementwise"})):
        opt = EagerUpdate(net, rule, lr=0.1, contributions=1, **more)  # type: ignore[arg-type]
        opt.register_step_post_hook(lambda o, args, kwargs: seen.append(o))
        handle = register_optimizer_step_post_hook(lambda o, args, kwargs: seen.append(o))
        take(opt, net)
        handle.remove()
        assert seen == [opt, opt]
        opt.close()
        seen.clear()
