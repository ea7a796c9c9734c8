"""Training inside the backward pass is training after it, bit for bit, for every rule that allows it."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import rulec
import rulec.torch
from rulec.errors import RuleError
from rulec.torch import EagerUpdate
from tests.torch.eager.training import Pair, equal, gone, loss_of, model, rules

EVERYDAY = [
    "adamw", "sgd", "lion", "nadam", "rprop", "adagrad", "adamax", "schedule_free_adamw", "lamb", "adafactor", "sm3",
    "apollo",
]  # fmt: skip

#: Rules that need, at their own rate, more than this model has to give.
RATES = {"shampoo": {"lr": 1e-2}, "adadelta": {"lr": 0.1}}


def every_day_or_later(names: list[str]) -> list[Any]:
    """The rules, those that are no everyday ones marked `another`."""
    return [pytest.param(name, marks=() if name in EVERYDAY else pytest.mark.another) for name in names]


@pytest.mark.parametrize("rule", every_day_or_later(rules("elementwise", "tensor")))
def test_steps_and_checkpoints_both_ways(rule: str) -> None:
    pair = Pair(rule, **RATES.get(rule, {}))
    for number in range(12):
        if number in (4, 8):  # each goes on from what the other saved
            ours, theirs = (copy.deepcopy(opt.state_dict()) for opt in (pair.eager, pair.deferred))
            pair.eager.load_state_dict(theirs)
            pair.deferred.load_state_dict(ours)
        pair.step()
    assert pair.same()
    report = pair.eager.report()
    assert (report.fired, report.deferred, report.untouched) == (9, 0, 0)
    assert gone(pair.ours)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float64, marks=pytest.mark.slow)])
def test_other_dtypes(dtype: torch.dtype) -> None:
    pair = Pair("adamw", dtype)
    for _ in range(5):
        pair.step()
    assert pair.same()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_projections_in_many_tiles(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rulec.runtime.stages.kernel_arguments.room_for", lambda own, largest: 1000)
    pair = Pair("apollo", dtype)
    for _ in range(4):
        pair.step()
    assert pair.same()


@pytest.mark.parametrize("rule", rules("group", "model"))
def test_rules_that_need_all_gradients_are_refused(rule: str) -> None:
    with pytest.raises(RuleError, match=r"needs a value of the whole (group|model) .* use the optimizer itself"):
        EagerUpdate(model(), rule)


def test_a_rule_that_takes_more_than_gradients_is_refused() -> None:
    rule = rulec.parse("name: Polyak\ninputs: {loss: scalar}\nstep: |\n  direction = g*loss\n")
    with pytest.raises(RuleError, match="Polyak takes the input 'loss' at every step, which is not there inside"):
        EagerUpdate(model(), rule)


def test_a_rule_of_its_own_point_of_evaluation_is_trained_where_it_is_trained() -> None:
    pair = Pair("schedule_free_adamw")
    pair.step()
    pair.eager.inner.eval()
    pair.deferred.eval()  # type: ignore[attr-defined]
    assert all(torch.equal(a, b) for a, b in zip(pair.ours.parameters(), pair.theirs.parameters(), strict=True))
    with pytest.raises(Exception, match="call train"), pair.eager.backward():
        loss_of(pair.ours, 0).backward()
    pair.eager.inner.train()
    pair.deferred.train()  # type: ignore[attr-defined]
    for _ in range(3):
        pair.step()
    assert pair.same()


def trained_with(rule: rulec.Rule, infinite: int = -1) -> tuple[nn.Sequential, nn.Sequential, EagerUpdate, Any]:
    """Four steps of two models; the gradients of batch `infinite` of two parameters are."""
    ours, theirs = model(), model()
    opt, twin = EagerUpdate(ours, rule, lr=0.1), rulec.torch.optimizer(rule)(theirs.parameters(), lr=0.1)
    for number in range(4):
        for each, net in ((opt, ours), (twin, theirs)):
            bad = sum(net[i].weight.sum() for i in (1, 4)) * (float("inf") if number == infinite else 0.0)
            with each.backward() if each is opt else nullcontext():
                (loss_of(net, number) + bad).backward()
            each.step()
            each.zero_grad()
    return ours, theirs, opt, twin


def test_what_groups_remember_advances_once_in_a_step() -> None:
    text = "name: Slowing\nstate: {k: {init: 0, per: group}}\nstep: |\n  k = k + 1\n  direction = g/k\n"
    ours, theirs, opt, twin = trained_with(rulec.parse(text))
    assert opt.report().fired == 9
    assert (opt.param_groups[0]["k"], opt.param_groups[0]["updates"]) == (4.0, 4)
    assert equal(opt.state_dict(), twin.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


@pytest.mark.filterwarnings("ignore:.*skipped the step")
def test_tensors_are_skipped_one_by_one_and_steps_counted() -> None:
    text = "name: Careful\nskip: not isfinite(norm(g))\nstate: {m: 0}\nstep: |\n  m = m/2 + g\n  direction = m\n"
    rule = rulec.parse(text)
    ours, theirs, opt, twin = trained_with(rule, infinite=2)
    assert opt.report().fired == 9
    assert opt.inner.skipped_steps == twin.skipped_steps == 1
    assert equal(opt.state_dict(), twin.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
