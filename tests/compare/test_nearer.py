"""The nearness of both sides to the exact values, held against fractions."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

import rulec
from rulec.tools.compare.difference import Trial
from rulec.tools.compare.nearer import Nearness, nearness, verdict
from rulec.tools.compare.sides import Array, Inputs, ReferenceSide

LR = 0.1


class Descent:
    """Gradient descent by NumPy, in a dtype of its own; the parameter is called `w`."""

    name = "descent"

    def __init__(self, params: Sequence[Array], dtype: str) -> None:
        self.dtype = np.dtype(dtype)
        self.now = [p.astype(self.dtype) for p in params]

    def step(self, grads: Sequence[Array], inputs: Inputs | None = None) -> None:
        self.now = [p - self.dtype.type(LR) * g.astype(self.dtype) for p, g in zip(self.now, grads, strict=True)]

    def values(self) -> list[dict[str, Array]]:
        return [{"w": p} for p in self.now]


def by_fractions(trial: Trial, dtype: str) -> float:
    """The largest distance of gradient descent in a dtype from fractions, in parts of the tensor's largest so far."""
    worst, side = 0.0, Descent(trial.params, dtype)
    exact = [[Fraction(x) for x in p.reshape(-1).tolist()] for p in trial.params]
    largest = [0.0 for _ in exact]
    for grads in trial.gradients():
        side.step(grads)
        for i, (known, g) in enumerate(zip(exact, grads, strict=True)):
            known[:] = [p - Fraction(LR) * Fraction(d) for p, d in zip(known, g.reshape(-1).tolist(), strict=True)]
            largest[i] = max(largest[i], *(abs(float(x)) for x in known))
            apart = [abs(Fraction(float(p)) - x) for p, x in zip(side.now[i].reshape(-1), known, strict=True)]
            worst = max(worst, float(max(apart)) / largest[i])
    return worst


def test_distances_are_those_of_fractions() -> None:
    rule, trial = rulec.load("sgd"), Trial(steps=5)
    sides = ReferenceSide(rule, trial.params, {"lr": LR}), Descent(trial.params, "float32")
    exact = ReferenceSide(rule, trial.params, {"lr": LR}, "mpmath")
    near = nearness(*sides, exact, trial, {"p": "w"})
    assert list(near) == ["p"]
    np.testing.assert_allclose(near["p"].ours, by_fractions(trial, "float64"), rtol=1e-9)
    np.testing.assert_allclose(near["p"].theirs, by_fractions(trial, "float32"), rtol=1e-9)
    assert near["p"].nearer == "ours"


def test_the_verdict_names_every_value_once() -> None:
    near = {"m": Nearness(1e-8, 1e-16), "v": Nearness(1e-16, 1.5e-16), "p": Nearness(1e-16, 1e-8), "u": Nearness(0, 1)}
    assert verdict("Adam", near) == (
        "beside Adam's formulas in 50 digits, ours is nearer in p and u, and theirs is nearer in m, and both are "
        "equally near in v; 1.0e+00 of theirs is more than float32 rounds: theirs has other formulas, other "
        "hyper-parameters, or a shorter dtype in between"
    )
    assert verdict("Adam", {"p": Nearness(1e-3, 1e-8)}).endswith("1.0e-03 of ours is more than float32 rounds: its "
        "digits cancel, or a dtype in between is shorter")  # fmt: skip


def test_a_side_that_alone_is_not_finite_is_infinitely_far() -> None:
    rule, trial = rulec.load("sgd"), Trial(steps=1)
    broken = Descent(trial.params, "float64")
    broken.now[0][0, 0] = np.nan
    exact = ReferenceSide(rule, trial.params, {"lr": LR}, "mpmath")
    near = nearness(ReferenceSide(rule, trial.params, {"lr": LR}), broken, exact, trial, {"p": "w"})
    assert near["p"].theirs == np.inf
