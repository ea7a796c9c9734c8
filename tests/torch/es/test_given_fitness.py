"""Fitness that cannot be told apart by member, or is of no use, is an error before anything is written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rulec.errors import RulecError, TensorError
from rulec.es import Perturbation
from rulec.torch import perturb


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def _members(model: Any, **other: Any) -> Any:
    es = perturb(model, Perturbation("lowrank", 4, 0.1, seed=0, **other))
    for samples in (2, 3):
        es(es.member_batch(torch.randn(samples, 3)))
    return es


@pytest.mark.parametrize("count", [8, 16, 24])
def test_there_is_fitness_of_members_or_of_rows(model: Any, count: int) -> None:
    assert _members(model).update(torch.randn(count)).directions == 4


@pytest.mark.parametrize("count", [7, 32, 40, 48])
def test_fitness_of_tokens_or_of_several_batches_is_of_no_member(model: Any, count: int) -> None:
    es = _members(model)
    with pytest.raises(TensorError, match=f"fitness has {count} numbers, where there are 8 members and batches of 16"):
        es.update(torch.randn(count))
    assert (es.step_count, model.weight.grad) == (0, None)


@pytest.mark.parametrize("bad", ["many", [None] * 8, np.zeros(8, complex), torch.zeros(8, dtype=torch.complex64)])
def test_fitness_is_real_numbers(model: Any, bad: Any) -> None:
    with pytest.raises(TensorError, match="must be an array of real numbers"):
        _members(model).update(bad)


@pytest.mark.parametrize("antithetic", [True, False])
def test_weights_that_are_not_finite_write_nothing(model: Any, antithetic: bool) -> None:
    es = _members(model, antithetic=antithetic)
    fitness = torch.randn(es.perturbation.members, dtype=torch.float64)
    with pytest.raises(TensorError, match="makes of it is not a number or too large"):
        es.update(fitness, shaping=lambda given: given * np.nan)
    with pytest.raises(TensorError, match="fitness is not a number or too large"):
        es.update(fitness * 1e300)
    assert model.weight.grad is None
    es.update(fitness)
    assert bool(torch.isfinite(es.parameters["weight"].grad).all())


def test_what_a_shaping_makes_of_dropped_members_is_no_part_of_the_mean(model: Any) -> None:
    """Without pairs fitness counts from its mean, which is of those that count."""
    fitness = np.array([1.0, np.nan, 3.0, 8.0])
    found = []
    for shaping in (None, lambda given: np.nan_to_num(given, nan=1e3)):
        es = _members(model, antithetic=False)
        es.update(fitness, shaping=shaping)
        found.append(model.weight.grad)
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


class _InPlace(nn.Module):
    """Adds its own parameter into what a layer made, or is about to be written to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.shift = nn.Linear(3, 3), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x).add_(self.shift)
        found *= self.shift
        return found


def test_a_parameter_may_be_added_in_place_to_others() -> None:
    model, x = _InPlace().double(), torch.randn(2, 3, dtype=torch.float64)
    es = perturb(model, Perturbation("spsa", 2, 0.1))
    found = es.evaluate(lambda: model(x).sum())
    assert len(set(found.tolist())) == 4
    before = model.shift.clone()
    for write in (
        lambda: model.shift.mul_(2), lambda: model.shift.__setitem__(0, 2.0), lambda: model.shift.__iadd__(1),
        lambda: torch.add(before, 1, out=model.shift),
    ):  # fmt: skip
        with pytest.raises(RulecError, match="'shift' is written by"):
            es.evaluate(write)
    torch.testing.assert_close(model.shift, before, rtol=0, atol=0)


@pytest.mark.parametrize(("given", "message"), [(torch.zeros(2), r"gave \[2\] numbers"), (None, "real numbers")])
def test_a_closure_returns_one_number(model: Any, given: Any, message: str) -> None:
    with pytest.raises(TensorError, match=message):
        perturb(model, Perturbation("spsa", 2, 0.1)).evaluate(lambda: given)
