"""Statistics of optimizers of plain arrays."""

from __future__ import annotations

import copy
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import rulec
from rulec.errors import HyperError, RulecError, RuleError
from tests.weights import KINDS, RATES, check_unchanged, first_weights, gradient, options, weights

SHAPES = {"w": (4, 6), "b": (6,), "k": (2, 3, 5)}


def trained(rule: str, steps: int = 3, **keywords: Any) -> tuple[Any, dict[str, Any], dict[str, Any], dict[str, Any]]:
    """An optimizer after some steps, the arrays before and after the last one, and its gradients."""
    drawn = np.random.default_rng(0)
    params = {name: drawn.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
    optimizer = rulec.array.Optimizer(rule, params, **keywords)
    old: dict[str, Any] = {}
    grads: dict[str, Any] = {}
    for _ in range(steps):
        old = copy.deepcopy(params)
        grads = {name: drawn.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
        optimizer.step(grads)
    return optimizer, old, params, grads


@pytest.mark.parametrize("backend", ["cpu", "numpy", "c"])
@pytest.mark.parametrize("rule", ["adamw", "lamb", "adafactor"])
def test_norms_are_those_of_the_arrays(rule: str, backend: str) -> None:
    optimizer, old, new, grads = trained(rule, watch="norms", backend=backend)
    statistics = optimizer.statistics()
    for name in SHAPES:
        update = new[name].astype(np.float64) - old[name]
        np.testing.assert_allclose(statistics["update_norm"][name], np.linalg.norm(update), rtol=3e-4)
        np.testing.assert_allclose(statistics["grad_norm"][name], np.linalg.norm(grads[name].astype(float)), rtol=1e-6)
    _, _, plain, _ = trained(rule, backend=backend)
    assert all(np.array_equal(new[name], plain[name]) for name in SHAPES)


@pytest.mark.parametrize("backend", ["cpu", "numpy", "c"])
@pytest.mark.parametrize("rule", RATES)
@pytest.mark.parametrize("kind", KINDS)
def test_unchanged_weights_are_those_that_their_memory_keeps(kind: str, rule: str, backend: str) -> None:
    dtype = np.float32 if kind == "float32" else ml_dtypes.bfloat16
    params = {"w": first_weights().astype(dtype)}
    words: dict[str, Any] = {"lr": RATES[rule], "weight_decay": 0, "watch": "norms", **options(kind)}
    optimizer = rulec.array.Optimizer(rule, params, backend, **words)
    measured, seen = [], [weights("", params["w"], None)]
    for step in range(3):
        optimizer.step({"w": gradient(step).astype(dtype)})
        measured.append(optimizer.statistics()["unchanged"]["w"])
        (part,) = [x for name, x in optimizer.state("w").items() if name.startswith("param::")] or [None]
        seen.append(weights(kind, params["w"], part))
    check_unchanged(measured, seen)


def test_a_schedule_and_copies_go_on() -> None:
    optimizer, _, _, _ = trained("adamw", steps=3, watch={"t": "t"}, watch_every=2)
    assert optimizer.statistics().step == 3
    other = copy.deepcopy(optimizer)
    for _ in range(2):
        other.step({name: np.ones(shape, np.float32) for name, shape in SHAPES.items()})
    assert other.statistics().numbers() == {"t/w": 5.0, "t/b": 5.0, "t/k": 5.0}


def test_a_saved_state_goes_on_with_statistics() -> None:
    optimizer, _, _, _ = trained("adamw", watch="norms")
    plain, _, _, _ = trained("adamw")
    assert optimizer.state_dict().keys() == plain.state_dict().keys()
    optimizer.load_state_dict(plain.state_dict())
    optimizer.step({name: np.ones(shape, np.float32) for name, shape in SHAPES.items()})
    assert optimizer.statistics()["grad_norm"]["b"] == pytest.approx(6**0.5)


def test_a_step_layer_by_layer_measures_numbers_of_arrays_alone() -> None:
    optimizer, _, _, _ = trained("adamw", watch={"norm": "norm(g)"})
    with optimizer.partial():
        for name, shape in SHAPES.items():
            optimizer.update(name, np.ones(shape, np.float32))
    assert optimizer.statistics().numbers()["norm/b"] == pytest.approx(6**0.5)
    joint, _, _, _ = trained("adamw", watch={"all": 'norm(g, per="model")'})
    assert [*joint.statistics().numbers()] == ["all"]
    message = "the statistic all is of a group or of the model, and an update layer by"
    with pytest.raises(RulecError, match=message), joint.partial():
        pass


def test_mistakes_are_named() -> None:
    with pytest.raises(RuleError, match="has no statistic 'normz'"):
        trained("adamw", watch="normz")
    with pytest.raises(HyperError, match=r"watch_every of rulec\.array\.Optimizer of AdamW is a whole number of steps"):
        trained("adamw", watch="norms", watch_every=True)
    with pytest.raises(RulecError, match="AdamW measures no statistics"):
        trained("adamw")[0].statistics()
