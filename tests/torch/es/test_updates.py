"""Gradients from fitness: against the sum over directions term by term, and against gradients that are known."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rulec.es import Perturbation
from rulec.es.dense import estimate, noise
from rulec.es.fitness import weights
from rulec.es.streams import SCALE, short_weights
from rulec.torch import perturb
from tests.torch.es.families import FAMILIES, perturbation_of

MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(6, 8), (6,)),
    "conv2d in groups": (lambda: nn.Sequential(nn.Conv2d(8, 12, 3, groups=2), nn.Flatten()), (8, 4, 5)),
}


def _rounded(p: Perturbation, fitness: np.ndarray[Any, Any], ndim: int) -> np.ndarray[Any, Any]:
    """The weights of directions as they are rounded before they are used."""
    found = weights(fitness.reshape(p.signs, -1), p).values
    own = p.family in ("independent", "spsa") or ndim < 2
    return short_weights(found, p.values) / SCALE[p.values] if own else short_weights(found, "rademacher")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("family", [*FAMILIES, "spsa"])
@pytest.mark.parametrize("values", [pytest.param("normal", marks=pytest.mark.slow), "popcount"])
def test_a_gradient_is_the_weighted_sum_of_noise(family: str, model: str, values: str) -> None:
    make, shape = MODELS[model]
    torch.manual_seed(1)
    es = perturb(make().double(), perturbation_of(family, values=values))
    fitness = torch.randn(es.perturbation.members, dtype=torch.float64)
    for step in range(2):
        if family == "spsa":
            es.evaluate(lambda: float(es.model(torch.zeros(1, *shape, dtype=torch.float64)).sum()))
        else:
            es(es.member_batch(torch.randn(3, *shape, dtype=torch.float64)))
        es.update(fitness)
        for number, param in enumerate(es.parameters.values()):
            short = _rounded(es.perturbation, fitness.numpy(), param.dim())
            expected = estimate(es.perturbation, param.detach().numpy(), number, step, short)
            np.testing.assert_allclose(param.grad, expected, rtol=0, atol=3e-6 * np.abs(short).sum())


class _Quadratic:
    """A loss of one linear layer that is quadratic in its weight, with the gradient it has."""

    def __init__(self, rows: int, columns: int, dtype: torch.dtype = torch.float64) -> None:
        torch.manual_seed(3)
        self.layer = nn.Linear(columns, rows, bias=False).to(dtype)
        self.x = torch.eye(columns, dtype=dtype)
        self.target = torch.randn(columns, rows, dtype=dtype)
        self.target_gradient = 2 * (self.layer.weight.detach() - self.target.t())

    def losses(self, es: Any) -> Tensor:
        """Each member's loss: the squared distance of its weight from the target."""
        out = es(es.member_batch(self.x))
        errors = out - es.member_batch(self.target)
        return errors.square().sum(1).view(es.perturbation.signs, -1, es.perturbation.directions).sum(1).flatten()


#: Dropout tells of gains alone.
UNBIASED = [name for name in FAMILIES if name != "dropout"]


def _errors(family: str, steps: int, directions: int = 8) -> Tensor:
    """What so many steps' estimates are off the gradient by, (steps, elements)."""
    task = _Quadratic(6, 8)
    es = perturb(task.layer, perturbation_of(family, directions=directions, sigma=0.1))
    found = []
    for _ in range(steps):
        es.update(loss=task.losses(es))
        assert task.layer.weight.grad is not None
        found.append((task.layer.weight.grad - task.target_gradient).flatten())
    return torch.stack(found)


@pytest.mark.parametrize("steps", [128, pytest.param(512, marks=pytest.mark.another)])
@pytest.mark.parametrize("family", UNBIASED)
def test_the_error_of_mean_estimates_falls_as_one_over_the_root_of_their_number(family: str, steps: int) -> None:
    """A bias would stay where the rest falls: n times the squared error of a mean of n is that of one estimate."""
    errors = _errors(family, steps)
    one = float(errors.square().sum(1).mean())
    for n in (4, 16, 64)[: 2 if steps < 512 else 3]:  # at least eight means
        means = errors.view(-1, n, errors.shape[1]).mean(1)
        share = n * float(means.square().sum(1).mean()) / one
        # Of the 48 elements of a mean at least 5 are independent: 6 standard deviations of a chi-square of as many, in
        # its upper tail, where a bias would be.
        spread = math.sqrt(2 / (5 * len(means)))
        assert 1 - 6 * spread < share < 1 + 6 * spread
        assert share > 1 / 4


@pytest.mark.parametrize(
    ("counts", "bound"),
    [({4: 128, 16: 32}, 0.8), pytest.param({4: 512, 16: 128, 64: 32}, 0.4, marks=pytest.mark.another)],
)
@pytest.mark.parametrize("family", ["independent", "sparse", "lowrank"])
def test_the_error_falls_as_one_over_the_root_of_the_number_of_directions(
    family: str, counts: dict[int, int], bound: float
) -> None:
    """Where directions share no noise: twice as many are worth two steps."""
    by_count = {n: n * float(_errors(family, steps, n).square().sum(1).mean()) for n, steps in counts.items()}
    # A squared error of 4 directions is spread by less than 1.5 of its mean, and 512 or 128 are averaged:
    # 6 * 1.5 / sqrt(512) or 6 * 1.5 / sqrt(128).
    assert all(abs(found / by_count[4] - 1) < bound for found in by_count.values())


def test_signs_of_all_patterns_give_the_exact_gradient() -> None:
    """With rows' and columns' signs uncorrelated the mean over all patterns of r E c is E's share of the gradient."""
    rows, columns = 2, 2
    task = _Quadratic(rows, columns)
    es = perturb(task.layer, Perturbation("signflip", 1000, 0.5, values="rademacher", sides="both", seed=2))
    es.update(loss=task.losses(es))
    p = es.perturbation
    each = np.stack([noise(p, (rows, columns), 0, 0, d).ravel() for d in range(p.directions)])
    second = each.T @ each / p.directions
    expected = second @ task.target_gradient.numpy().ravel()
    np.testing.assert_allclose(task.layer.weight.grad.numpy().ravel(), expected, atol=1e-4)  # type: ignore[union-attr]
