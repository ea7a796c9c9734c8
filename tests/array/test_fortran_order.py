"""Arrays in Fortran order: steps have the bits of those in C order, whatever the rule sees of rows and columns."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

import rulec
import rulec.array
from rulec.array import es
from rulec.errors import TensorError
from rulec.es import Perturbation

SHAPES = {"a": (4, 6), "b": (6, 4), "c": (5,)}


def arrays(order: Any, seed: int) -> dict[str, Any]:
    made = np.random.default_rng(seed)
    return {name: np.array(made.standard_normal(shape), np.float32, order=order) for name, shape in SHAPES.items()}


def both(rule: str, **hyper: Any) -> list[tuple[Any, dict[str, Any], str]]:
    """An optimizer, its arrays and their order, for each order."""
    made = [(arrays(order, 0), order) for order in ("C", "F")]
    return [(rulec.array.Optimizer(rule, params, **hyper), params, order) for params, order in made]


def assert_alike(runs: list[tuple[Any, dict[str, Any], str]]) -> None:
    (one, first, _), (other, second, _) = runs
    for name in SHAPES:
        assert first[name].tobytes() == second[name].tobytes()
        for state, value in one.state(name).items():
            assert value.tobytes() == other.state(name)[state].tobytes()
    assert second["a"].flags.f_contiguous


@pytest.mark.parametrize(
    "rule",
    ["adafactor", pytest.param("muon", marks=pytest.mark.slow), pytest.param("soap", marks=pytest.mark.slow), "adamw"],
)
def test_steps_have_the_bits_of_c_order(rule: str) -> None:
    runs = both(rule)
    before = [(array, array.__array_interface__["data"]) for array in runs[1][1].values()]
    for step in range(3):
        for optimizer, _, order in runs:
            optimizer.step(arrays(order, 1 + step))
    assert_alike(runs)
    assert all(array.__array_interface__["data"] == place for array, place in before)


def test_what_users_write_between_steps_counts() -> None:
    runs = both("adafactor")
    for step in range(2):
        for optimizer, params, order in runs:
            optimizer.step(arrays(order, 1 + step))
            params["a"] *= 2
    assert_alike(runs)


def test_layers_copies_and_checkpoints_go_on_alike() -> None:
    runs = both("adafactor")
    for optimizer, _, order in runs:
        with optimizer.partial():
            for name, grad in arrays(order, 1).items():
                optimizer.update(name, grad)
    runs = [(*copy.deepcopy((optimizer, params)), order) for optimizer, params, order in runs]
    for optimizer, _, order in runs:
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.step(arrays(order, 2))
    assert_alike(runs)


def test_a_step_that_is_refused_changes_nothing() -> None:
    (_, (optimizer, params, _)) = both("adafactor")
    optimizer.step(arrays("F", 1))
    before = {name: array.tobytes() for name, array in params.items()}
    with pytest.raises(TensorError, match="the gradient of a has shape"):
        optimizer.step({**arrays("F", 2), "a": np.ones((6, 4), np.float32, order="F")})
    with pytest.raises(TensorError, match="the gradient of a is not contiguous"):
        optimizer.step({**arrays("F", 2), "a": np.ones((8, 6), np.float32)[::2]})
    assert {name: array.tobytes() for name, array in params.items()} == before


def test_steps_of_evolution_strategies_are_alike() -> None:
    runs = both("adafactor")
    for optimizer, params, _ in runs:
        strategy = es.Strategy(params, Perturbation("independent", 2, sigma=0.1, seed=0))
        strategy.step(strategy.evaluate(lambda p: float(sum(x.sum() for x in p.values()))), optimizer)
    for name in SHAPES:
        np.testing.assert_allclose(runs[0][1][name], runs[1][1][name], rtol=1e-6)
