"""Histories in torch: states and checkpoints have every entry under its name, though arrays go in a circle."""

from __future__ import annotations

import copy
from typing import Any

import torch

import rulec
import rulec.torch
from rulec.compiler.reference import ReferenceOptimizer

TEXT = """
name: Delayed
hyper: {lr: 0.1, keep: {default: 3, min: 1, static: true, whole: true}}
state: {s: {history: keep}}
step: |
  old = s[keep - 1]
  s = g
  direction = old + s[0]
"""


def parameters(optimizer: Any) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def step(optimizer: Any, number: int) -> None:
    for place, p in enumerate(parameters(optimizer)):
        p.grad = torch.full_like(p, 10.0**place + number)
    optimizer.step()


def test_the_state_has_every_entry_under_its_name() -> None:
    optimizer = rulec.torch.optimizer(rulec.parse(TEXT))([torch.nn.Parameter(torch.ones(3)) for _ in range(2)], keep=4)
    for number in range(6):
        step(optimizer, number)
        for place, p in enumerate(parameters(optimizer)):
            for age in range(4):
                wanted = 10.0**place + number - age if age <= number else 0.0
                assert torch.equal(optimizer.state[p][f"s_{age}"], torch.full((3,), wanted))


def test_a_copy_and_a_checkpoint_go_on_alike() -> None:
    kind = rulec.torch.optimizer(rulec.parse(TEXT))
    optimizer = kind([torch.nn.Parameter(torch.ones(3))], keep=2)
    for number in range(3):
        step(optimizer, number)
    twin = copy.deepcopy(optimizer)
    loaded = kind([torch.nn.Parameter(parameters(optimizer)[0].detach().clone())], keep=2)
    loaded.load_state_dict(optimizer.state_dict())
    for number in range(3, 6):
        for each in (optimizer, twin, loaded):
            step(each, number)
    assert torch.equal(parameters(optimizer)[0], parameters(twin)[0])
    assert torch.equal(parameters(optimizer)[0], parameters(loaded)[0])


def test_an_edited_state_is_taken_over() -> None:
    optimizer = rulec.torch.optimizer(rulec.parse(TEXT))([torch.nn.Parameter(torch.zeros(3))], keep=2)
    step(optimizer, 0)
    (p,) = parameters(optimizer)
    optimizer.state[p]["s_0"] = torch.full((3,), 100.0)
    for number in (1, 2):
        before = p.detach().clone()
        step(optimizer, number)
    torch.testing.assert_close(before - p.detach(), torch.full((3,), 0.1 * (100 + 3)))
    assert torch.equal(optimizer.state[p]["s_1"], torch.full((3,), 2.0))


def test_inside_the_backward_pass() -> None:
    torch.manual_seed(0)
    models = [torch.nn.Linear(4, 3, dtype=torch.float64) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    rule = rulec.parse(TEXT)
    eager = rulec.torch.EagerUpdate(models[0], rule, keep=3)
    plain = rulec.torch.optimizer(rule)(models[1].parameters(), keep=3)
    for _ in range(7):
        x = torch.randn(5, 4, dtype=torch.float64)
        with eager.backward():
            models[0](x).square().mean().backward()
        eager.step()
        plain.zero_grad()
        models[1](x).square().mean().backward()
        plain.step()
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_the_reference() -> None:
    p = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = rulec.torch.AdaShift([p], lr=0.1, keep=3)
    reference = ReferenceOptimizer(rulec.load("adashift"), [p.detach().numpy().copy()], {"lr": 0.1, "keep": 3})
    for number in range(8):
        p.grad = torch.arange(3, dtype=torch.float64) - 0.3 * number
        reference.step([p.grad.numpy()])
        optimizer.step()
    torch.testing.assert_close(p.detach(), torch.from_numpy(reference.params[0]), rtol=1e-12, atol=1e-12)
