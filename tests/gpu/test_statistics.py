"""Statistics of steps on the device: the set norms beside torch's, the same bits with them, and those of graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import rulec.torch
from benchmarks.gpu.host import capture
from tests.gpu.training import bits, check_no_waiting, give, gradients, parameters

pytestmark = pytest.mark.gpu

SHAPES = ((7,), (64, 3), (1000,), (33, 65), (300, 1000))

KINDS = ("AdamW", "LAMB", "Adafactor", "Muon", "ScheduleFreeAdamW", "NAdam")


def made(kind: str, **keywords: Any) -> tuple[list[Tensor], Any]:
    """Parameters, and an optimizer of them; Muon's are matrices."""
    params = parameters([shape for shape in SHAPES if kind != "Muon" or len(shape) == 2])
    return params, getattr(rulec.torch, kind)([(f"w{i}", p) for i, p in enumerate(params)], **keywords)


def step(params: list[Tensor], optimizer: Any, number: int) -> tuple[list[Tensor], list[Tensor]]:
    """A step; the parameters before it and its gradients, in float64."""
    give(params, gradients(params, number))
    before = [p.detach().double().clone() for p in params], [g.double() for p in params if (g := p.grad) is not None]
    optimizer.step()
    return before


def norms(after: Tensor, old: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """The set `norms` of a parameter, by torch in float64."""
    update = after.detach().double() - old
    sizes = {"grad_norm": grad.norm(), "update_norm": update.norm(), "param_norm": old.norm()}
    return {
        **sizes, "update_ratio": sizes["update_norm"] / sizes["param_norm"],
        "grad_ratio": sizes["grad_norm"] / sizes["param_norm"],
        "cosine": (update * grad).sum() / sizes["update_norm"] / sizes["grad_norm"],
        "nonfinite": (~grad.isfinite()).sum().double(), "unchanged": (update == 0).sum().double(),
    }  # fmt: skip


def check(statistics: Any, params: list[Tensor], olds: list[Tensor], grads: list[Tensor]) -> None:
    for number, (param, old, grad) in enumerate(zip(params, olds, grads, strict=True)):
        wanted = norms(param, old, grad)
        assert [*statistics] == [*wanted]
        for key, value in wanted.items():
            seen = torch.as_tensor(statistics[key][f"w{number}"]).double().to(value.device)
            torch.testing.assert_close(seen, value, rtol=3e-4, atol=1e-7, msg=f"{key} of {tuple(param.shape)}")


@pytest.mark.parametrize("kind", KINDS)
def test_norms_are_those_that_torch_computes(kind: str, backend: str) -> None:
    params, optimizer = made(kind, watch="norms", backend=backend)
    for number in range(3):
        olds, grads = step(params, optimizer, number)
    assert optimizer.statistics().step == 3
    check(optimizer.statistics(), params, olds, grads)


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_parameters_have_the_same_bits_with_statistics(kind: str, every: int, backend: str) -> None:
    runs = [made(kind, **words, backend=backend) for words in ({"watch": "norms", "watch_every": every}, {})]
    for number in range(4):
        for params, optimizer in runs:
            step(params, optimizer, number)
    assert bits(runs[0][0]) == bits(runs[1][0])


def test_a_step_with_statistics_does_not_wait() -> None:
    params, optimizer = made("AdamW", watch="norms")
    for number in range(3):
        step(params, optimizer, number)
    with check_no_waiting():
        optimizer.step()


def test_replays_of_a_captured_step_write_new_values() -> None:
    params, optimizer = made("AdamW", watch="norms", capturable=True)
    give(params, gradients(params, 0))
    graph = capture(optimizer.step)
    for number in (1, 2):
        for param, grad in zip(params, gradients(params, number), strict=True):
            assert param.grad is not None
            param.grad.copy_(grad)
        olds, grads = [p.detach().double().clone() for p in params], [p.grad.double() for p in params]  # type: ignore[union-attr]
        graph.replay()
        check(optimizer.statistics(), params, olds, grads)
