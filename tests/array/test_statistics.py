"""Statistics of optimizers of plain arrays."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import rulec
from rulec.errors import HyperError, RulecError, RuleError
from rulec.runtime.statistics import WatchSchedule
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


@pytest.mark.parametrize("backend", ["cpu", "numpy", "c"])
def test_a_sum_stays_in_a_stage_that_overwrites_its_operand(backend: str) -> None:
    """LAMB stores m in its first stage; the last one reads the new m, and g for the other statistic."""
    watch = {"agree": "sum(m*g)", "cosine": "sum(update*grad)"}
    optimizer, _, _, grads = trained("lamb", watch=watch, backend=backend)
    for name, states in optimizer.state_dict()["state"].items():
        wanted = np.sum(states["m"].astype(np.float64) * grads[name])
        assert optimizer.statistics()["agree"][name] == pytest.approx(wanted, rel=1e-5)


def test_a_schedule_and_copies_go_on() -> None:
    optimizer, _, _, _ = trained("adamw", steps=3, watch={"t": "t"}, watch_every=2)
    assert optimizer.statistics().step == 3
    other = copy.deepcopy(optimizer)
    for _ in range(2):
        other.step({name: np.ones(shape, np.float32) for name, shape in SHAPES.items()})
    assert other.statistics().numbers() == {"t/w": 5.0, "t/b": 5.0, "t/k": 5.0}


@pytest.mark.parametrize("steps", range(7))
def test_a_pickled_schedule_keeps_its_turn(steps: int) -> None:
    """A pickle has no turn, as those of earlier versions: the count of steps decides it."""
    schedule = WatchSchedule(3)
    for _ in range(steps):
        schedule.advance()
    state = schedule.__getstate__()
    assert state == {"every": 3, "steps": steps, "last": 0}
    again = pickle.loads(pickle.dumps(schedule))  # noqa: S301 - of this test
    assert (again.due, again.steps) == (schedule.due, steps) == (steps % 3 == 0, steps)


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


BRANCHED = """
name: Branched
state: {m: 0, r: {init: 0, per: row, if: ndim >= 2}}
step: |
  m = m + g
  if ndim >= 2:
    r = norm(g, per="row")
    ratio = norm(m)
    direction = m/ratio
  else:
    half = m/2
    direction = half
"""


@pytest.mark.parametrize("backend", ["cpu", "numpy"])
def test_what_tensors_of_some_shapes_lack_has_a_value_for_the_others(backend: str) -> None:
    rule = rulec.parse(BRANCHED)
    watch = {"ratio": "ratio", "half": "sum(half)", "rows": "max(r)", "norm": "norm(g)", "all": 'norm(g, per="model")'}
    params = {"w": np.zeros((2, 8), np.float32), "b": np.zeros(4, np.float32)}
    optimizer = rulec.array.Optimizer(rule, params, lr=0.1, backend=backend, watch=watch)
    optimizer.step({name: np.ones_like(p) for name, p in params.items()})
    assert optimizer.statistics().numbers() == pytest.approx(
        {"ratio/w": 4, "half/b": 2, "rows/w": 8**0.5, "norm/w": 4, "norm/b": 2, "all": 20**0.5}
    )
    joint = rulec.array.Optimizer(rule, params, lr=0.1, backend=backend, watch={"x": 'sum(ratio, per="model")'})
    with pytest.raises(RuleError, match="'ratio' of Branched has no value here"):
        joint.step({name: np.ones_like(p) for name, p in params.items()})


TAKEN = """
name: Taken
hyper: {top: {default: 0, static: true}}
state: {m: {init: 0, if: top > 0}}
step: |
  if top > 0:
    m = m + g
    direction = m
  else:
    direction = g
"""


def test_a_state_that_a_static_hyper_parameter_takes_away_is_a_mistake() -> None:
    rule = rulec.parse(TAKEN)
    params = {"w": np.zeros(3, np.float32)}
    with pytest.raises(RuleError, match="'m' of Taken has no value here"):
        rulec.array.Optimizer(rule, params, lr=0.1, watch={"x": "max(m)"})


@pytest.mark.parametrize("watch", [{3: "norm(g)"}, [3], [{"x": "norm(g)"}], [["norms"]], [None], b"norms"], ids=str)
def test_names_that_are_no_text_are_named(watch: Any) -> None:
    with pytest.raises(HyperError, match="is a name such as 'norms', a list of names, or expressions by name, not"):
        trained("adamw", watch=watch)


def test_mistakes_are_named() -> None:
    with pytest.raises(RuleError, match="has no statistic 'normz'"):
        trained("adamw", watch="normz")
    with pytest.raises(HyperError, match=r"watch_every of rulec\.array\.Optimizer of AdamW is a whole number of steps"):
        trained("adamw", watch="norms", watch_every=True)
    with pytest.raises(RulecError, match="AdamW measures no statistics"):
        trained("adamw")[0].statistics()
