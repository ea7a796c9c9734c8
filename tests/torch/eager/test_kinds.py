"""What may be run: rules in any form, partitions, and optimizers of others; and how long it lives."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler

import rulec
import rulec.torch
from rulec.errors import HyperError, RulecError
from rulec.torch import EagerUpdate
from tests.torch.eager.training import equal, gone, loss_of, model


def train(opt: Any, net: nn.Module, numbers: range) -> None:
    """Some steps, inside the backward pass where that is open to the optimizer."""
    for number in numbers:
        if isinstance(opt, EagerUpdate):
            with opt.backward():
                loss_of(net, number).backward()
            opt.step()
        else:
            opt.zero_grad()
            loss_of(net, number).backward()
            opt.step()


def assert_alike(ours: nn.Module, theirs: nn.Module) -> None:
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


# Kinds


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.SGD, torch.optim.AdamW, torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adagrad,
        torch.optim.NAdam, torch.optim.Rprop, torch.optim.Adafactor, partial(torch.optim.AdamW, foreach=True),
        partial(torch.optim.SGD, momentum=0.9, nesterov=True), partial(torch.optim.AdamW, fused=True),
    ],
)  # fmt: skip
def test_optimizers_of_others(make: Callable[..., Optimizer]) -> None:
    ours, theirs = model(), model()
    opt, twin = EagerUpdate(ours, make, scope="tensor", lr=0.01), make(theirs.parameters(), lr=0.01)
    train(opt, ours, range(5))
    train(twin, theirs, range(5))
    assert_alike(ours, theirs)
    assert opt.report().fired == 9
    assert equal(opt.state_dict(), twin.state_dict())
    assert gone(ours)


def test_an_optimizer_of_ones_own() -> None:
    class Signs(Optimizer):
        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.sub_(p.grad.sign(), alpha=group["lr"])

    ours, theirs = model(), model()
    groups = [{"params": [*ours.parameters()][:3], "lr": 0.1}, {"params": [*ours.parameters()][3:]}]
    twins = [{"params": [*theirs.parameters()][:3], "lr": 0.1}, {"params": [*theirs.parameters()][3:]}]
    train(EagerUpdate(groups, Signs, scope="elementwise", lr=0.01), ours, range(4))
    train(Signs(twins, lr=0.01), theirs, range(4))
    assert_alike(ours, theirs)


def test_partitions() -> None:
    parts = rulec.partition({"0/*": rulec.part("sgd", lr=0.1), "**/bias": "lion", "...": ("adamw", {"lr": 0.01})})
    ours, theirs = model(), model()
    opt, twin = EagerUpdate(ours, parts), rulec.torch.Partitioned(parts, theirs.named_parameters())
    train(opt, ours, range(5))
    train(twin, theirs, range(5))
    assert_alike(ours, theirs)
    assert opt.report().fired == 9
    assert equal(opt.state_dict(), twin.state_dict())


@pytest.mark.parametrize("given", ["model", "parameters", "named", "groups"])
@pytest.mark.parametrize("rule", ["name", "rule", "class"])
def test_rules_and_parameters_in_any_form(given: str, rule: str) -> None:
    net, twin = model(), model()
    forms: dict[str, Any] = {
        "model": net, "parameters": net.parameters(), "named": net.named_parameters(),
        "groups": [{"params": net.parameters(), "lr": 0.01}],
    }  # fmt: skip
    rules: dict[str, Any] = {"name": "lion", "rule": rulec.load("lion"), "class": rulec.torch.Lion}
    opt = EagerUpdate(forms[given], rules[rule], lr=0.01)
    train(opt, net, range(3))
    train(rulec.torch.Lion(twin.parameters(), lr=0.01), twin, range(3))
    assert_alike(net, twin)
    assert opt._passes.parameter_index.names[1] == ("1.weight" if given in ("model", "named") else "parameter 1")


def test_parameters_in_another_order_of_memory_and_complex_ones() -> None:
    def parameters() -> list[nn.Parameter]:
        made = torch.Generator().manual_seed(1)
        image = torch.randn(2, 3, 4, 4, generator=made).to(memory_format=torch.channels_last)
        return [nn.Parameter(image), nn.Parameter(torch.randn(4, dtype=torch.complex64, generator=made))]

    for rule in ("adamw", "lamb"):
        pairs = [parameters(), parameters()]
        if rule == "lamb":
            pairs = [pair[:1] for pair in pairs]
        opt, twin = EagerUpdate(pairs[0], rule), rulec.torch.optimizer(rule)(pairs[1])
        for number in range(4):
            with opt.backward():
                sum((p.abs() ** 2).sum() * (number + 1) for p in pairs[0]).backward()  # type: ignore[union-attr]
            opt.step()
            twin.zero_grad()
            sum((p.abs() ** 2).sum() * (number + 1) for p in pairs[1]).backward()  # type: ignore[union-attr]
            twin.step()
        assert all(torch.equal(a, b) for a, b in zip(*pairs, strict=True))


def test_schedulers() -> None:
    ours, theirs = model(), model()
    opt, twin = EagerUpdate(ours, "adamw", lr=0.1), rulec.torch.AdamW(theirs.parameters(), lr=0.1)
    plans = [lr_scheduler.OneCycleLR(each, 0.1, total_steps=12) for each in (opt, twin)]
    for number in range(8):
        for each, net, plan in ((opt, ours, plans[0]), (twin, theirs, plans[1])):
            train(each, net, range(number, number + 1))
            plan.step()
    assert_alike(ours, theirs)


# Life


def test_a_closed_one_is_the_optimizer_inside() -> None:
    ours, theirs = model(), model()
    opt, twin = EagerUpdate(ours, "adamw"), rulec.torch.AdamW(theirs.parameters())
    train(opt, ours, range(2))
    opt.close()
    with pytest.raises(RulecError, match=r"was closed: call loss.backward\(\) and step\(\)"), opt.backward():
        pass
    train(opt.inner, ours, range(2, 4))
    train(twin, theirs, range(4))
    assert_alike(ours, theirs)
    assert not any(p._post_accumulate_grad_hooks for p in ours.parameters())  # type: ignore[attr-defined]


@pytest.mark.slow
def test_what_nobody_has_any_more_leaves_no_hooks() -> None:
    net = model()
    opt = EagerUpdate(net, "adamw")
    scheduler = lr_scheduler.StepLR(opt, 1)
    train(opt, net, range(2))
    gone_with_it = weakref.ref(opt)
    del opt, scheduler
    gc.collect()
    assert gone_with_it() is None
    assert not any(p._post_accumulate_grad_hooks for p in net.parameters())  # type: ignore[attr-defined]
    loss_of(net, 0).backward()
    assert all(p.grad is not None for p in net.parameters())


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))  # noqa: S301 (our own)


def saved(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled, saved])
@pytest.mark.parametrize("rule", ["adamw", "partition"])
def test_copies_train_on_their_own(copied: Callable[[Any], Any], rule: str) -> None:
    net = model()
    kind: Any = rulec.partition({"**/bias": "sgd", "...": "adamw"}) if rule == "partition" else rule
    opt = EagerUpdate(net, kind, only="[1-6].*", max_grad_norm=None)
    train(opt, net, range(2))
    other_net, other = copied((net, opt))
    train(opt, net, range(2, 5))
    before = [p.detach().clone() for p in net.parameters()]
    train(other, other_net, range(2, 5))
    assert_alike(net, other_net)
    assert (other.report().fired, other.report().deferred) == (8, 1)
    assert other._passes.parameter_index.names == opt._passes.parameter_index.names
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))


def test_a_copy_in_the_middle_of_a_step_is_refused() -> None:
    net = model()
    opt = EagerUpdate(net, "adamw", contributions=1)
    with opt.backward():
        loss_of(net, 0).backward()
    with pytest.raises(RulecError, match="a copy in the middle of a step"):
        copy.deepcopy(opt)
    opt.step()


def test_it_is_an_optimizer_with_the_groups_and_states_of_the_one_inside() -> None:
    net = model()
    opt = EagerUpdate(net, "adamw", lr=0.5)
    assert isinstance(opt, Optimizer)
    assert opt.param_groups is opt.inner.param_groups
    train(opt, net, range(1))
    assert opt.state is opt.inner.state
    assert opt.param_groups[0]["lr"] == 0.5
    assert "AdamW" in type(opt.inner).__name__
    with pytest.raises(HyperError, match="AdamW has no keyword 'learning_rate'"):
        EagerUpdate(net, "adamw", learning_rate=1)
