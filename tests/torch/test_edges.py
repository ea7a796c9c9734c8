"""Zeros, infinities, NaN and the ends of the formats in every class of torch's: finite, infinite and NaN as there.

Where not, docs/torch.md says so under "Where numbers end"; the table here has the same list.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import rulec.torch

#: First parameters and gradients: all combinations of three. The third gradient is 1.
NUMBERS = [0.0, -0.0, 1e-45, 1e-30, 1e30, 1e38, -1e38, 3e38, math.inf, -math.inf, math.nan, 1.0]
P, G0, G1 = torch.tensor([*itertools.product(NUMBERS, repeat=3)], dtype=torch.float64).unbind(1)

#: Where a result may be of another kind than torch's, and what it is here.
Differs = Callable[[Tensor, Tensor, torch.dtype], Tensor]


def nowhere(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(P, dtype=torch.bool)


def infinite_parameters(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> Tensor:
    """Decoupled decay: infinity less infinity here, and a multiple of infinity in torch."""
    return P.isinf() & ours.isnan() & theirs.isinf()


def infinite_gradients(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> Tensor:
    """The mean is infinite here; torch interpolates, and has infinity less infinity."""
    return (G0.isinf() | G1.isinf()) & ours.isinf() & theirs.isnan()


def nan_gradients(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> Tensor:
    """torch's sign of NaN is 0."""
    return (G0.isnan() | G1.isnan()) & ours.isnan()


def squares_of_means(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> Tensor:
    """The square of the mean is more than float32 holds; a fused multiply-add does not round it."""
    large = (G0.abs() > 1.8e21) | (G1.abs() > 1.8e21)
    return large & ours.isnan() & (dtype == torch.float32)


def near_the_end(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> Tensor:
    """Sums of gradient and decay within a factor of ten of the largest number."""
    return (P.abs() > 2e38) & (G0.abs() > 2e38) & (dtype == torch.float32)


DECOUPLED = {"weight_decay": 0.1, "decoupled_weight_decay": True}
CASES: list[tuple[str, dict[str, Any], Differs]] = [
    ("SGD", {}, nowhere), ("SGD", {"momentum": 0.9}, nowhere), ("SGD", {"weight_decay": 0.1}, nowhere),
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, nowhere),
    ("SGD", {"momentum": 0.9, "dampening": 0.5, "maximize": True}, nowhere),
    ("Adam", {}, nowhere), ("Adam", {"amsgrad": True, "weight_decay": 0.1}, nowhere),
    ("Adam", DECOUPLED, infinite_parameters), ("AdamW", {}, infinite_parameters),
    ("AdamW", {"amsgrad": True, "weight_decay": 0.1}, infinite_parameters),
    ("AdamW", {"weight_decay": 0.0}, infinite_parameters),
    ("Adagrad", {}, nowhere), ("Adagrad", {"weight_decay": 0.1, "lr_decay": 0.1}, nowhere),
    ("Adadelta", {}, nowhere), ("Adadelta", {"weight_decay": 0.1}, nowhere),
    ("Adamax", {}, nowhere), ("Adamax", {"weight_decay": 0.1}, nowhere),
    ("NAdam", {}, nowhere), ("NAdam", {"weight_decay": 0.1}, near_the_end), ("NAdam", DECOUPLED, infinite_parameters),
    ("RAdam", {}, infinite_gradients), ("RAdam", {"weight_decay": 0.1}, infinite_gradients),
    ("RAdam", DECOUPLED, lambda *found: infinite_parameters(*found) | infinite_gradients(*found)),
    ("ASGD", {}, nowhere), ("ASGD", {"weight_decay": 0.1}, nowhere),
    ("RMSprop", {}, nowhere), ("RMSprop", {"momentum": 0.9, "weight_decay": 0.1}, nowhere),
    ("RMSprop", {"centered": True}, squares_of_means),
    ("RMSprop", {"centered": True, "momentum": 0.9}, squares_of_means),
    ("Rprop", {}, nan_gradients), ("Rprop", {"maximize": True}, nan_gradients),
]  # fmt: skip


def stepped(library: Any, name: str, keywords: dict[str, Any], dtype: torch.dtype) -> Tensor:
    """The parameters after three steps."""
    param = torch.nn.Parameter(P.to(dtype))
    optimizer = getattr(library, name)([param], foreach=False, **keywords)
    for grad in (G0, G1, torch.ones_like(G0)):
        param.grad = grad.to(dtype)
        optimizer.step()
    return param.detach()


def kind(values: Tensor) -> Tensor:
    """2 for NaN, the sign for infinities, and 0 for finite numbers."""
    return torch.where(values.isnan(), 2, torch.where(values.isinf(), values.sign(), 0)).int()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "keywords", "differs"), CASES)
def test_numbers_end_where_those_of_torch_do(
    name: str, keywords: dict[str, Any], differs: Differs, dtype: torch.dtype
) -> None:
    ours, theirs = (stepped(library, name, keywords, dtype) for library in (rulec.torch, torch.optim))
    other = (kind(ours) != kind(theirs)) & ~differs(ours, theirs, dtype)
    assert not other.any(), [(P[i], G0[i], G1[i], theirs[i], ours[i]) for i in other.nonzero()[:3]]


def test_what_the_manual_says_of_the_ends() -> None:
    def after(library: Any, name: str, start: float, grads: list[float], **keywords: Any) -> float:
        param = torch.nn.Parameter(torch.tensor([start]))
        optimizer = getattr(library, name)([param], foreach=False, **keywords)
        for grad in grads:
            param.grad = torch.tensor([grad])
            optimizer.step()
        return param.item()

    assert math.isnan(after(rulec.torch, "Rprop", 1.0, [math.nan, 1.0]))
    assert after(torch.optim, "Rprop", 1.0, [math.nan, 1.0]) == pytest.approx(0.99)
    assert math.isnan(after(rulec.torch, "AdamW", math.inf, [1.0]))
    assert after(torch.optim, "AdamW", math.inf, [1.0]) == math.inf
    assert after(rulec.torch, "AdamW", 1e38, [1.0], weight_decay=10.0) == -math.inf
    assert after(torch.optim, "AdamW", 1e38, [1.0], weight_decay=10.0) == pytest.approx(0.99e38)
    assert math.isnan(after(rulec.torch, "RMSprop", 1.0, [1e38], centered=True))
    assert after(torch.optim, "RMSprop", 1.0, [1e38], centered=True) in (1.0, pytest.approx(math.nan, nan_ok=True))
    assert after(rulec.torch, "RMSprop", 1.0, [1e21], centered=True) == 1.0
