"""Sides give the same numbers for the same rule, whatever runs it."""

from __future__ import annotations

import numpy as np
import pytest

import rulec
from rulec.errors import RulecError, RuleError
from rulec.runtime.engine import default_hyper
from rulec.tools.compare.difference import Trial, compare, order_of_values, shapes_for
from rulec.tools.compare.oracle import exactness
from rulec.tools.compare.sides import ReferenceSide, backend_side, check_inputs
from rulec.tools.compare.target import resolve


@pytest.mark.parametrize(
    ("name", "backend"), [("adamw", "numpy"), ("nadam", "cpu"), ("nadam", "jax"), ("rprop", "jax"), ("madgrad", "cpu")]
)
def test_a_backend_follows_the_reference(name: str, backend: str) -> None:
    rule = rulec.load(name).standalone()
    hyper, trial = default_hyper(rule, {}), Trial("float64", 4)
    ours, reference = backend_side(rule, trial.params, hyper, backend), ReferenceSide(rule, trial.params, hyper)
    order = order_of_values(rule)
    found = compare(ours, reference, trial, order, 16 * 2.0**-52, {state: state for state in rule.state})
    assert found.first is None
    assert set(found.largest) == set(order)


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("lamb", "cpu"), ("adafactor", "jax"), ("prodigy", "numpy"), ("prodigy", "jax"), ("soap", "numpy"),
        ("normuon", "jax"), ("came", "numpy"), ("lookahead(adamw)", "cpu"),
    ],
)  # fmt: skip
def test_a_backend_with_stages_follows_the_reference(name: str, backend: str) -> None:
    rule = rulec.load(name).standalone()
    hyper, trial = default_hyper(rule, {}), Trial("float64", 4)
    ours, reference = backend_side(rule, trial.params, hyper, backend), ReferenceSide(rule, trial.params, hyper)
    order = order_of_values(rule)
    found = compare(ours, reference, trial, order, 2.0**-36, {state: state for state in rule.state})
    if (name, backend) == ("normuon", "jax"):
        # Its iteration in bfloat16 rounds where XLA's products do.
        assert max(found.largest.values()) < 0.1
        return
    assert found.first is None
    assert "p" in found.largest


def test_a_backend_steps_what_a_rule_routes_and_leaves_what_it_skips() -> None:
    params = Trial().params
    skipping = rulec.parse("name: Late\nskip: t < 3\nstep: |\n  direction = g\n")
    side = backend_side(skipping, params, {}, "jax")
    side.step([np.full(p.shape, 0.5) for p in params])
    np.testing.assert_array_equal(side.values()[0]["p"], params[0])
    side = backend_side(rulec.parse(
        "name: Flat\napplies_to: ndim == 2\notherwise: sgd\nstep: |\n  direction = sign(g)\n"
    ), params, {"lr": 1.0}, "jax")  # fmt: skip
    side.step([np.full(p.shape, 0.5) for p in params])
    np.testing.assert_allclose(side.values()[0]["p"], params[0] - 1.0)
    np.testing.assert_allclose(side.values()[1]["p"], params[1] - 0.5)


@pytest.mark.parametrize("backend", ["numpy", "jax", None])
def test_every_side_has_statistics_by_the_same_places(backend: str | None) -> None:
    words = {
        "each": "sum(g)",
        "rows": 'max(g, per="row")',
        "group": 'sum(g, per="group")',
        "all": 'sum(g, per="model")',
    }
    rule, trial = rulec.load("adamw"), Trial("float64", 1)
    reference = ReferenceSide(rule, trial.params, {}, watch=words)
    side = backend_side(rule, trial.params, {}, backend, words) if backend else reference
    (grads,) = trial.gradients()
    side.step(grads)
    sums = {f"tensor {i}": pytest.approx(g.sum()) for i, g in enumerate(grads)}
    total = pytest.approx(sum(g.sum() for g in grads))
    measured = side.statistics()
    assert {*measured} == {*words}
    assert [dict(measured[name]) for name in ("each", "group", "all")] == [sums, {"group 0": total}, {"model": total}]
    for i, g in enumerate(grads):
        np.testing.assert_array_equal(np.ravel(measured["rows"][f"tensor {i}"]), np.ravel(g.max(axis=-1)))


def test_the_trial_is_the_same_in_every_dtype() -> None:
    wide = Trial("float64", 3)
    for dtype in ("float32", "bfloat16", "float16"):
        narrow = Trial(dtype, 3)
        for a, b in zip(wide.params, narrow.params, strict=True):
            assert b.dtype.name == dtype
            np.testing.assert_array_equal(a, b.astype(np.float64))


def test_gradients_are_fresh_copies() -> None:
    trial = Trial("float64", 1)
    (first,) = trial.gradients()
    first[0][...] = 0
    (again,) = trial.gradients()
    assert np.any(again[0] != 0)


def test_shapes_a_rule_has_no_update_for_are_left_out() -> None:
    only = "name: Only\napplies_to: {}\nstep: |\n  direction = g\n"
    assert shapes_for(rulec.parse(only.format("ndim == 2"))) == ((4, 6),)
    assert shapes_for(rulec.load("sgd")) == ((4, 6), (5,))
    with pytest.raises(RuleError, match="does not apply"):
        shapes_for(rulec.parse(only.format("ndim == 3")))


FED = "name: Fed\ninputs: {c: like p, loss: scalar}\nstate: {h: 0}\nstep: |\n  if t % 2 == 1:\n    h = 0.9*h + 0.1*c\n"
FED += "  direction = loss*g/(abs(h) + 1)\n"


@pytest.mark.parametrize("backend", ["numpy", "cpu", "jax"])
def test_a_rule_is_given_its_inputs(backend: str) -> None:
    trial = Trial("float32", 4)
    found = exactness(rulec.parse(FED), {"lr": 0.1}, trial, backend)
    assert found.ulps.keys() == {"h", "p"}
    assert max(found.ulps.values()) < 8
    first, second = trial.inputs(rulec.parse(FED)), trial.inputs(rulec.parse(FED))
    assert [x.tobytes() for x in next(first)["c"]] == [x.tobytes() for x in next(second)["c"]]
    assert next(first)["loss"] > 0


def test_another_library_has_no_inputs() -> None:
    with pytest.raises(RulecError, match=r"Fed has inputs \(c, loss\), which only rulec check and rulec trace have"):
        check_inputs(rulec.parse(FED))


def test_names_with_dots_and_with_a_colon_are_the_same() -> None:
    assert resolve("torch.optim.Adam") is resolve("torch.optim:Adam")
    with pytest.raises(RulecError, match="there is no module 'nothing' here"):
        resolve("nothing.at.all")
