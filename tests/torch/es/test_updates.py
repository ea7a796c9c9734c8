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

pytestmark = pytest.mark.usefixtures("one_thread")

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


#: Dropout tells of gains alone, and columns that are never perturbed have no estimate.
UNBIASED = [name for name in FAMILIES if name not in ("dropout", "permuted sparse rows")]


#: Families that are looked at every day.
_OFTEN = ("signflip", "lowrank")


@pytest.mark.parametrize("family", [x if x in _OFTEN else pytest.param(x, marks=pytest.mark.slow) for x in UNBIASED])
def test_the_error_of_mean_estimates_falls_as_one_over_their_root(family: str) -> None:
    """An estimate's squared error, of all families, is that of one step over the number of steps."""
    task = _Quadratic(6, 8)
    es = perturb(task.layer, perturbation_of(family, directions=8, sigma=0.1, antithetic=True))
    steps, total, squares = 80, torch.zeros(6, 8, dtype=torch.float64), 0.0
    for _ in range(steps):
        es.update(loss=task.losses(es))
        assert task.layer.weight.grad is not None
        error = task.layer.weight.grad - task.target_gradient
        total += error
        squares += float(error.square().sum())
    one = squares / steps
    mean = float((total / steps).square().sum())
    # The mean of `steps` independent errors has 1/steps of the square of one, give or take its own spread: of 48
    # elements, with at least 5 of them independent, less than 6 standard deviations of a chi-square of 5.
    assert mean < one / steps * (1 + 6 * math.sqrt(2 / 5))
    assert mean > one / steps / 20


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
