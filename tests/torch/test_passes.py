"""Rules with several gradients in a step, in torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import rulec
import rulec.torch
from rulec.compiler.reference import ReferenceOptimizer
from rulec.errors import HyperError, RulecError, RuleError, TensorError
from tests.array.test_passes import gradient, start
from tests.language.test_passes import EVERY_OTHER, THREE


def parameters() -> list[Any]:
    return [torch.nn.Parameter(torch.tensor(p)) for p in start()]


def closure_of(optimizer: Any, params: list[Any], sign: float = 1.0) -> Callable[[], Any]:
    def closure() -> Any:
        optimizer.zero_grad()
        loss = sum((p.sin().sum() for p in params), torch.zeros(())) * sign
        loss.backward()
        return loss

    return closure


@pytest.mark.parametrize("form", ["closure", "calls"])
@pytest.mark.parametrize("maximize", [False, True])
def test_both_forms_do_what_the_reference_does(form: str, maximize: bool) -> None:
    for rule in (rulec.parse(THREE), rulec.parse(EVERY_OTHER), rulec.load("looksam(adamw, k=2)")):
        params = parameters()
        optimizer = rulec.torch.optimizer(rule)(params, maximize=maximize)
        closure, reference = closure_of(optimizer, params, -1 if maximize else 1), ReferenceOptimizer(rule, start())
        for _ in range(4):
            expected = sum(np.sin(p).sum() for p in reference.params) * (-1 if maximize else 1)
            reference.step(gradient(reference.params), gradient=gradient)
            if form == "closure":
                assert float(optimizer.step(closure).detach()) == pytest.approx(expected)  # the loss of before the step
                continue
            closure()
            while optimizer.next_pass():
                closure()
            optimizer.step()
        for ours, theirs in zip(params, reference.params, strict=True):
            np.testing.assert_allclose(ours.detach(), theirs, rtol=0, atol=1e-14)


def test_groups_share_one_climb() -> None:
    params = parameters()
    optimizer = rulec.torch.optimizer(rulec.load("sam(sgd)"))([{"params": [p]} for p in params], lr=0.1, rho=0.3)
    reference = ReferenceOptimizer(rulec.load("sam(sgd)"), start(), {"lr": 0.1, "rho": 0.3})
    reference.step(gradient(reference.params), gradient=gradient)
    optimizer.step(closure_of(optimizer, params))
    for ours, theirs in zip(params, reference.params, strict=True):
        np.testing.assert_allclose(ours.detach(), theirs, rtol=0, atol=1e-15)


def test_parameters_with_gaps_in_memory() -> None:
    wide = torch.tensor(start()[0]).repeat_interleave(2, dim=1)
    params = [torch.nn.Parameter(wide[:, ::2])]
    assert not params[0].is_contiguous()
    optimizer = rulec.torch.optimizer("sam(adamw)")(params)
    reference = ReferenceOptimizer(rulec.load("sam(adamw)"), start()[:1])
    reference.step(gradient(reference.params), gradient=gradient)
    optimizer.step(closure_of(optimizer, params))
    np.testing.assert_allclose(params[0].detach(), reference.params[0], rtol=0, atol=1e-15)


def test_an_exception_in_a_pass_puts_the_parameters_back() -> None:
    params = parameters()
    optimizer = rulec.torch.optimizer("sam(adamw)")(params)
    closure = closure_of(optimizer, params)
    optimizer.step(closure)
    before, calls = [p.detach().clone() for p in params], []

    def failing() -> Any:
        calls.append([torch.equal(p, b) for p, b in zip(params, before, strict=True)])
        if len(calls) == 2:
            raise ZeroDivisionError
        return closure()

    with pytest.raises(ZeroDivisionError):
        optimizer.step(failing)
    assert calls == [[True, True], [False, False]]
    assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))
    assert optimizer.state[params[0]]["step"] == 1
    optimizer.step(closure)


def test_between_passes_nothing_else_is_done() -> None:
    params = parameters()
    optimizer = rulec.torch.optimizer("sam(adamw)")(params)
    closure = closure_of(optimizer, params)
    with pytest.raises(RulecError, match="SAMAdamW evaluates the model again in a step: give step"):
        optimizer.step()
    closure()
    assert optimizer.next_pass()
    assert all(p.grad is None for p in params)
    group = {"params": [torch.nn.Parameter(torch.zeros(2))]}
    calls: tuple[Callable[[], Any], ...] = (
        optimizer.state_dict, lambda: optimizer.load_state_dict({}), lambda: copy.deepcopy(optimizer),
        lambda: optimizer.step(closure), lambda: optimizer.add_param_group(group),
    )  # fmt: skip
    for call in calls:
        with pytest.raises(RulecError, match="between the passes of a step: call put_back"):
            call()
    optimizer.put_back()
    assert all(torch.equal(p, torch.tensor(b)) for p, b in zip(params, start(), strict=True))
    copy.deepcopy(optimizer)


def test_every_pass_must_reach_the_same_parameters() -> None:
    params = parameters()
    optimizer = rulec.torch.optimizer("sam(adamw)")(params)
    closure_of(optimizer, params)()
    assert optimizer.next_pass()
    params[0].grad = torch.zeros_like(params[0])
    with pytest.raises(TensorError, match="2 in the first and 1 now; every pass must reach all of them"):
        optimizer.next_pass()
    assert all(torch.equal(p, torch.tensor(b)) for p, b in zip(params, start(), strict=True))


def test_what_cannot_run_passes_says_so() -> None:
    params = parameters()
    kind = rulec.torch.optimizer("sam(adamw)")
    optimizer = kind(params)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(closure_of(optimizer, params)())
    with pytest.raises(RulecError, match="GradScaler scales one gradient: train in bfloat16 without it"):
        scaler.step(optimizer)
    asked = kind(params, capturable=True)
    with pytest.raises(HyperError, match="cannot be capturable or fused"):
        asked.step(closure_of(asked, params))
    with pytest.raises(RuleError, match="an update inside the backward pass has one gradient in a step"):
        rulec.torch.EagerUpdate(params, "sam(adamw)")
    with pytest.raises(RuleError, match="Partitioned has one gradient in a step"):
        rulec.torch.Partitioned(rulec.partition({"...": "sam(adamw)"}), [("a", params[0])])


def test_a_rule_without_passes_has_none() -> None:
    params = parameters()
    optimizer = rulec.torch.optimizer("lion")(params)
    assert not optimizer.next_pass()
    optimizer.step(closure_of(optimizer, params))
