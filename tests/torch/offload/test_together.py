"""Offload together with what else an optimizer does: the weights have the bits of the same without offload."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rulec
import rulec.torch
from rulec.errors import HyperError
from rulec.es.perturbation import Perturbation
from tests.torch.offload.runs import assert_same_bits

Run = Callable[[nn.Module, dict[str, Any]], nn.Module]

X = torch.randn(8, 40, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)

PARTITION = {"**/bias": rulec.part("lion", lr=1e-3), "...": rulec.part("adamw", lr=1e-2)}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 9)).to(torch.bfloat16)


def loss(made: nn.Module) -> Tensor:
    value: Tensor = made(X).float().square().mean()
    return value


def gradients_of_segments(made: nn.Module, words: dict[str, Any]) -> nn.Module:
    optimizer = rulec.torch.AdamW(made.parameters(), **words)
    for _ in range(3):
        grads = rulec.torch.GradStore()
        grads.backward(loss(made), made.parameters())
        grads.step(optimizer, [*made.parameters()][:2])
        grads.step(optimizer)
    return made


def copies(made: nn.Module, words: dict[str, Any]) -> nn.Module:
    optimizer = rulec.torch.AdamW(made.parameters(), **words)
    for step in range(4):
        optimizer.zero_grad()
        loss(made).backward()
        optimizer.step()
        if step == 1:
            made, optimizer = copy.deepcopy((made, optimizer))
    return made


def compiled_steps(made: nn.Module, words: dict[str, Any]) -> nn.Module:
    optimizer = rulec.torch.AdamW(made.parameters(), **words)
    step = torch.compile(lambda: optimizer.step(), backend="eager")
    for _ in range(3):
        optimizer.zero_grad()
        loss(made).backward()
        step()
    return made


def closures(made: nn.Module, words: dict[str, Any]) -> nn.Module:
    optimizer = rulec.torch.AdamW(made.parameters(), **words)

    def closure() -> Any:
        optimizer.zero_grad()
        value = loss(made)
        value.backward()
        return value

    for _ in range(3):
        optimizer.step(closure)
    return made


def tagged(made: nn.Module, words: dict[str, Any]) -> nn.Module:
    optimizer = rulec.torch.Muon(rulec.torch.tagged_groups(made), lr=0.02, **words)
    for _ in range(3):
        optimizer.zero_grad()
        loss(made).backward()
        optimizer.step()
    return made


def loaded_weights(made: nn.Module, words: dict[str, Any]) -> nn.Module:
    optimizer = rulec.torch.AdamW(made.parameters(), **words)
    for _ in range(2):
        optimizer.zero_grad()
        loss(made).backward()
        optimizer.step()
        made.load_state_dict({name: value * 0.5 for name, value in made.state_dict().items()})
    return made


def eager(rule: Any, **more: Any) -> Run:
    def run(made: nn.Module, words: dict[str, Any]) -> nn.Module:
        optimizer = rulec.torch.EagerUpdate(made, rule, **more, **words)
        for _ in range(3):
            if "max_grad_norm" in more:
                with optimizer.measure():
                    loss(made).backward()
            with optimizer.backward():
                loss(made).backward()
            optimizer.step()
        return made

    return run


def evolution(fused: bool) -> Run:
    def run(made: nn.Module, words: dict[str, Any]) -> nn.Module:
        strategy = rulec.torch.perturb(made, Perturbation("lowrank", directions=8, sigma=0.1, seed=3))
        optimizer = rulec.torch.AdamW(strategy.parameters.values(), **words)
        for _ in range(3):
            values = strategy(strategy.member_batch(X)).float().square().mean(-1)
            if fused:
                strategy.step(None, optimizer, loss=values)
            else:
                strategy.update(loss=values)
                optimizer.step()
        return made

    return run


RUNS: dict[str, Run] = {
    "gradients of segments": gradients_of_segments,
    "copies": copies,
    "compiled steps": compiled_steps,
    "closures": closures,
    "tags": tagged,
    "loaded weights": loaded_weights,
    "a partition in the backward pass": eager(rulec.partition(PARTITION)),
    "a clip of two passes": eager("adamw", lr=1e-2, max_grad_norm=0.01),
    "an evolution strategy": evolution(fused=False),
    "an evolution strategy without gradients": evolution(fused=True),
    "statistics in the backward pass": eager("adamw", lr=1e-2, watch="norms"),
}


@pytest.mark.parametrize("offload", ["step", "states"])
@pytest.mark.parametrize("name", RUNS)
def test_bits_are_those_without_offload(name: str, offload: str) -> None:
    plain = RUNS[name](model(), {"weights": "master"})
    moved = RUNS[name](model(), {"weights": "master", "offload": offload, "offload_buffer": 4096})
    assert_same_bits([*moved.parameters()], [*plain.parameters()])


@pytest.mark.parametrize("offload", ["step", "states"])
def test_a_capturable_group_that_comes_later_is_refused(offload: str) -> None:
    made, later = model(), model()
    optimizer = rulec.torch.AdamW(made.parameters(), offload=offload)
    with pytest.raises(HyperError, match="a group has capturable=True or fused=True"):
        optimizer.add_param_group({"params": [*later.parameters()], "capturable": True})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [*later.parameters()]})
    others = model(), model()
    plain = rulec.torch.AdamW(others[0].parameters(), weights="master")
    plain.add_param_group({"params": [*others[1].parameters()]})
    for nets, opt in (((made, later), optimizer), (others, plain)):
        (loss(nets[0]) + 2 * loss(nets[1])).backward()
        opt.step()
    for mine, other in zip((made, later), others, strict=True):
        assert_same_bits([*mine.parameters()], [*other.parameters()])
