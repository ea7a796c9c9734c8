"""Evaluating arrays at another point than they are trained at."""

from __future__ import annotations

import numpy as np
import pytest

import rulec
import rulec.array
from rulec.errors import RulecError, RuleError
from rulec.language.rule import Rule


def trained(rule: Rule, **hyper: float) -> tuple[rulec.array.Optimizer, dict[str, np.ndarray]]:  # type: ignore[type-arg]
    numbers = np.random.default_rng(0)
    params = {"w": numbers.standard_normal((3, 4)), "b": numbers.standard_normal(4)}
    optimizer = rulec.array.Optimizer(rule, params, backend="numpy", **hyper)
    for _ in range(5):
        optimizer.step({name: numbers.standard_normal(x.shape) for name, x in params.items()})
    return optimizer, params


@pytest.mark.parametrize("name", ["schedule_free_adamw", "clip_by_global_norm >> schedule_free(adam(beta1=0))"])
def test_there_and_back(name: str) -> None:
    optimizer, params = trained(rulec.load(name), lr=0.1)
    before = {name: x.copy() for name, x in params.items()}
    z = optimizer.state("w")["z"].copy()
    optimizer.eval()
    assert np.allclose(params["w"], before["w"] + (1 - 1 / 0.9) * (z - before["w"]), rtol=1e-14)
    assert np.abs(params["w"] - before["w"]).max() > 1e-3
    kept = params["w"].copy()
    optimizer.eval()
    assert np.array_equal(params["w"], kept)
    optimizer.train()
    optimizer.train()
    assert all(np.allclose(params[name], before[name], rtol=1e-14) for name in params)
    assert optimizer.state("w")["step"] == 5


def test_an_average_is_exchanged() -> None:
    optimizer, params = trained(rulec.load("ema")(rulec.load("sgd")), ema_decay=0.9)
    before, average = params["w"].copy(), optimizer.state("w")["average"].copy()
    optimizer.eval()
    assert np.array_equal(params["w"], average)
    optimizer.train()
    assert np.array_equal(params["w"], before)
    assert np.array_equal(optimizer.state("w")["average"], average)


def test_no_step_is_taken_there_and_a_checkpoint_says_so() -> None:
    optimizer, params = trained(rulec.load("schedule_free_sgd"))
    optimizer.eval()
    with pytest.raises(RulecError, match=r"where ScheduleFreeSGD is evaluated: call train\(\) before a step"):
        optimizer.step(params)
    with pytest.raises(RulecError, match="call train"), optimizer.partial():
        pass
    again = rulec.array.Optimizer("schedule_free_sgd", {k: v.copy() for k, v in params.items()}, backend="numpy")
    again.load_state_dict(optimizer.state_dict())
    with pytest.raises(RulecError, match="call train"):
        again.step(params)


def test_a_rule_that_is_evaluated_where_it_trains() -> None:
    optimizer, _ = trained(rulec.load("adamw"))
    with pytest.raises(RuleError, match="AdamW is evaluated where it is trained: it has no evaluate"):
        optimizer.eval()
