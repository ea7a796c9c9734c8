"""Strategies of NumPy arrays: members, batched products, estimates and steps, against definitions in float64."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rulec.array import Optimizer
from rulec.array.es import Report, Strategy
from rulec.errors import HyperError, RulecError, StateMismatch, TensorError
from rulec.es import Perturbation
from tests.jax.es.reference import CASES, estimate, member, members_of_rows


def parameters(dtype: Any = np.float32) -> dict[str, Any]:
    rng = np.random.default_rng(4)
    shapes = {"kernel": (8, 5), "bias": (5,), "conv": (3, 2, 6, 4), "scale": ()}
    return {name: np.asarray(rng.standard_normal(shape), dtype) for name, shape in shapes.items()}


def check_near(found: Any, expected: Any, ulps: int = 128) -> None:
    assert found.shape == expected.shape
    limit = ulps * np.finfo(np.asarray(found).dtype).eps
    assert np.abs(found - expected).max() <= limit * max(1.0, np.abs(expected).max())


@pytest.mark.parametrize("name", CASES)
def test_a_family_is_what_its_definition_says(name: str) -> None:
    perturbation, params = CASES[name], parameters()
    before = {key: array.copy() for key, array in params.items()}
    es = Strategy(params, perturbation)
    es.load_state_dict({**es.state_dict(), "step": 2})
    members = {key: [] for key in es.names}
    fitness = np.cos(2.0 * np.arange(perturbation.members))  # weights of both signs

    def seen(own: Any) -> float:
        for key in es.names:
            members[key].append(own[key])
        return 0.0

    es.evaluate(seen)
    order = [d + s * perturbation.directions for d in range(perturbation.directions) for s in range(perturbation.signs)]
    x = np.random.default_rng(6).standard_normal((2 * perturbation.members, 3, 8)).astype(np.float32)
    rows, kernels = members_of_rows(perturbation, len(x)), {}
    for number, key in enumerate(es.names):
        for index, found in zip(order, members[key], strict=True):
            expected = member(perturbation, before[key], number, 2, index)
            check_near(found, expected)
            kernels[key, index] = expected
    check_near(es.product(x, "kernel"), np.stack([row @ kernels["kernel", i] for row, i in zip(x, rows, strict=True)]))
    if "bias" in es.names:
        check_near(es.rows("bias", x), np.stack([kernels["bias", i] for i in rows])[:, None])
    grads = es.update(fitness)
    assert grads["scale"] is None
    for number, key in enumerate(es.names):
        check_near(grads[key], estimate(perturbation, before[key], number, 2, fitness))
        assert np.array_equal(params[key], before[key])
    assert es.step_count == 3


@pytest.mark.parametrize(
    ("rule", "dtype"),
    [
        ("lion", np.float32),
        *(pytest.param("adam", dtype, marks=pytest.mark.slow) for dtype in (np.float32, np.float64)),
    ],
)
def test_a_step_by_noise_is_that_of_a_gradient_bit_for_bit(rule: str, dtype: Any) -> None:
    results = []
    for fused in (True, False):
        params = parameters(dtype)
        es, opt = (
            Strategy(params, Perturbation("independent", 4, values="popcount", seed=0)),
            Optimizer(rule, params, lr=0.1),
        )
        for step in range(3):
            fitness = es.evaluate(lambda own: -float(np.sum(own["kernel"] ** 2) + np.sum(own["conv"])))
            fitness[step] = np.nan
            if fused:
                report = es.step(fitness, opt)
                assert report == es.report == Report(step, 3, 1, fused=("kernel", "bias", "conv"))
            else:
                opt.step(es.update(fitness))
        results.append((params, opt.state("kernel")))
    for a, b in zip(*results, strict=True):
        assert all(np.array_equal(a[key], b[key]) for key in a)
    assert not np.array_equal(results[0][0]["kernel"], parameters(dtype)["kernel"])


def check_as_with_gradients(rule: str, perturbation: Perturbation, fused: tuple[str, ...]) -> None:
    """That steps by noise for some arrays are steps by gradients, bit for bit, states and counts included."""
    both: list[tuple[Any, Optimizer]] = []
    for by_noise in (True, False):
        params = parameters()
        es, opt = Strategy(params, perturbation), Optimizer(rule, params)
        for _ in range(3):
            fitness = es.evaluate(lambda own: -float(np.sum(own["kernel"] ** 2)))
            if by_noise:
                report = es.step(fitness, opt)
                assert report.fused == fused
                assert report.gradient_bytes == sum(params[name].nbytes for name in es.names if name not in fused)
            else:
                opt.step(es.update(fitness))
        both.append((params, opt))
    (params, opt), (others, other) = both
    for name in es.names:
        assert not np.array_equal(params[name], parameters()[name])
        assert np.array_equal(params[name], others[name])
        states, expected = opt.state(name), other.state(name)
        assert states.keys() == expected.keys()
        assert all(np.array_equal(states[key], expected[key]) for key in states)


def test_arrays_of_one_bucket_may_have_noise_and_gradients() -> None:
    check_as_with_gradients("adam", Perturbation("signflip", 4, values="popcount", seed=0), ("bias",))


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "fused"), [("lamb", ()), ("muon", ("bias", "conv"))])
def test_arrays_whose_rule_joins_elements_have_gradients(rule: str, fused: tuple[str, ...]) -> None:
    check_as_with_gradients(rule, Perturbation("independent", 2, values="rademacher", seed=0), fused)


def test_arrays_in_fortran_order_and_in_lists() -> None:
    own = [np.asfortranarray(parameters()["kernel"]), (parameters()["bias"],)]
    es, opt = Strategy(own, Perturbation("independent", 2)), Optimizer("sgd", own, lr=1.0)
    fitness = es.evaluate(lambda p: float(p[0].sum() + p[1][0].sum()))
    expected = estimate(es.perturbation, parameters()["kernel"], 0, 0, fitness)
    assert es.step(fitness, opt).fused == ("1/0",)
    check_near(own[0], parameters()["kernel"] - expected)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["independent", "sparse", "permuted", "signflip", "lowrank"])
def test_the_gradient_of_a_quadratic_is_its_mean(family: str) -> None:
    """Over draws of the same size the error of their mean falls as the root of their number."""
    params = {"w": np.linspace(-1, 1, 48).reshape(8, 6)}
    es = Strategy(params, Perturbation(family, 40, 0.1, sparsity=4 if family == "sparse" else None))
    draws = np.stack([es.update(es.evaluate(lambda p: -0.5 * np.sum(p["w"] ** 2)))["w"] for _ in range(25)])
    error = draws.mean(axis=0) - params["w"]
    spread = draws.std(axis=0, ddof=1) / np.sqrt(len(draws))
    assert np.abs(error / spread).max() < 9  # of Student's t with 24 degrees of freedom: 2e-9 for each
    assert np.linalg.norm(error) < 0.4 * np.mean([np.linalg.norm(draw - params["w"]) for draw in draws])


def test_where_no_fitness_is_finite_the_step_is_skipped_and_said_so() -> None:
    params = parameters()
    es, opt = Strategy(params, Perturbation("lowrank", 2)), Optimizer("adam", params)
    es.evaluate(lambda own: np.nan)
    with pytest.warns(RuntimeWarning, match="step 0 is skipped: 4 of 4 members have no finite fitness") as said:
        assert es.step([np.nan] * 4, opt) == Report(0, 0, 4, skipped=True)
    assert said[0].filename == __file__
    assert es.step_count == 1
    assert all(np.array_equal(params[name], array) for name, array in parameters().items())
    assert opt.state("kernel") == {}


def test_a_resumed_run_goes_on_with_the_same_noise() -> None:
    es = Strategy(parameters(), Perturbation("signflip", 2, seed=1))
    es.evaluate(lambda own: 0.0)
    es.update(np.arange(4.0))
    again = Strategy(parameters(), es.perturbation)
    again.load_state_dict(es.state_dict())
    with es.member(1, -1) as a, again.member(1, -1) as b:
        assert all(np.array_equal(a[name], b[name]) for name in a)
    with pytest.raises(StateMismatch, match="saved perturbation has seed=1, where this one has 2"):
        Strategy(parameters(), Perturbation("signflip", 2, seed=2)).load_state_dict(es.state_dict())
    with pytest.raises(StateMismatch, match="other parameters"):
        Strategy([np.ones(3)], es.perturbation).load_state_dict(es.state_dict())


def test_sigma_changes_between_steps_alone() -> None:
    params, pairs = parameters(), Perturbation("lowrank", 2, 0.5, seed=1)
    es = Strategy(params, pairs)
    with pytest.raises(AttributeError):
        es.perturbation = pairs  # type: ignore[misc]
    rows = np.ones((4, 8), np.float32)
    for see in (
        lambda: es.evaluate(lambda own: 0.0),
        lambda: es.product(rows, "kernel"),
        lambda: es.rows("bias", rows),
    ):
        see()
        with pytest.raises(RulecError, match=r"has had members, .* call update before set_sigma"):
            es.set_sigma(0.25)
        assert es.perturbation == pairs
        es.update(np.arange(4.0))
    es.set_sigma(0.25)
    again, other = Strategy(params, pairs), Strategy(params, Perturbation("lowrank", 2, 0.25, seed=1))
    again.load_state_dict(es.state_dict())
    other.load_state_dict(es.state_dict())
    found = []
    for each in (es, again, other):
        with each.member(1) as own:
            found.append((own["kernel"], each.update(np.arange(4.0))["kernel"]))
    for mine, its in zip(found[0] * 2, found[1] + found[2], strict=True):
        assert np.array_equal(mine, its)
    with pytest.warns(RuntimeWarning, match="too small for float32") as said:
        es.set_sigma(1e-20)
    assert said[0].filename == __file__


def test_arrays_of_a_pattern_have_its_perturbation() -> None:
    params = {"body": {"kernel": parameters()["kernel"], "scale": parameters()["bias"]}, "head": parameters()["kernel"]}
    mixed = {
        "body": Perturbation("signflip", 3, 0.2, values="rademacher"),
        "h*": Perturbation("independent", 3, 0.05, values="rademacher"),
    }
    fitness, steps = np.linspace(-1, 2, 6) ** 2, []
    for fused in (True, False):
        own = {"body": {k: v.copy() for k, v in params["body"].items()}, "head": params["head"].copy()}
        es, opt = Strategy(own, {k: replace(p, seed=2) for k, p in mixed.items()}), Optimizer("sgd", own, lr=1.0)
        assert es.names == ["body/kernel", "body/scale", "head"]
        with es.member(1, -1) as moved:
            flat = {"body/kernel": moved["body"]["kernel"], "body/scale": moved["body"]["scale"], "head": moved["head"]}
        if fused:
            assert es.step(fitness, opt).fused == ("body/scale", "head")
        else:
            opt.step(es.update(fitness))
        steps.append([own["body"]["kernel"], own["body"]["scale"], own["head"]])
    starts = [params["body"]["kernel"], params["body"]["scale"], params["head"]]
    for number, (name, start) in enumerate(zip(es.names, starts, strict=True)):
        p = es.perturbation[name[0] + "*" if name == "head" else "body"]
        check_near(flat[name], member(p, start, number, 0, 1 + 3))
        check_near(start - steps[0][number], estimate(p, start, number, 0, fitness))
        assert np.array_equal(steps[0][number], steps[1][number])
    with pytest.raises(HyperError, match="'kernel' matches no parameter"):
        Strategy(params, {"*": mixed["body"], "kernel": mixed["body"]})
    with pytest.raises(HyperError, match=r"nothing that the pattern 'head' matches .*head: it is in left_alone"):
        Strategy(params, {"head": mixed["body"], "*": mixed["body"]}, left_alone=["head"])


def test_strategies_without_a_seed_have_noise_of_their_own() -> None:
    pairs, found = Perturbation("independent", 2), []
    for _ in range(2):
        with Strategy(parameters(), pairs).member(0) as own:
            found.append(own["kernel"])
    assert not np.array_equal(*found)


def test_half_precision_is_rounded_once() -> None:
    params = {"w": parameters()["kernel"].astype(np.float16)}
    es = Strategy(params, Perturbation("lowrank", 2, 0.5))
    with es.member(1) as own:
        check_near(own["w"], member(es.perturbation, params["w"], 0, 0, 1), ulps=1)


def test_mistakes_are_told() -> None:
    params, pairs = parameters(), Perturbation("lowrank", 2)
    es = Strategy(params, pairs, left_alone=["conv"])
    assert es.names == ["kernel", "bias"]
    with pytest.raises(HyperError, match="must be a rulec"):
        Strategy(params, "lowrank")  # type: ignore[arg-type]
    with pytest.raises(TensorError, match="left_alone has 'kernal', which is no parameter"):
        Strategy(params, pairs, left_alone=["kernal"])
    with pytest.raises(TensorError, match="no array is perturbed"):
        Strategy({"scale": params["scale"]}, pairs)
    with pytest.raises(HyperError, match="5 inputs have no halves"):
        Strategy({"w": np.ones((5, 4))}, Perturbation("dropout", 2))
    with pytest.raises(RulecError, match="step 0 has had no forward"):
        es.update([0.0] * 4)
    with pytest.raises(HyperError, match="no direction 2"), es.member(2):
        pass
    with pytest.raises(HyperError, match="sign=2"), es.member(0, 2):
        pass
    with pytest.raises(TensorError, match="must be one number"):
        es.evaluate(lambda own: own["bias"])
    with pytest.raises(TensorError, match="fitness has 3 numbers, where there are 4 members"):
        es.update([1.0, 2.0, 3.0])
    with pytest.raises(TensorError, match="batch of 6 rows"):
        es.product(np.ones((6, 8)), "kernel")
    with pytest.raises(TensorError, match="no matrix for rows of 7 inputs"):
        es.product(np.ones((4, 7)), "kernel")
    with pytest.raises(TensorError, match="'conv' is no array that is perturbed"):
        es.product(np.ones((4, 6)), "conv")
    with pytest.raises(TensorError, match="only vectors"):
        es.rows("kernel", np.ones((4, 8)))
    with pytest.raises(TensorError, match="the optimizer's kernel is not the array"):
        es.step([1.0] * 4, Optimizer("sgd", parameters()))
    with pytest.raises(HyperError, match="shaping='rank'"):
        es.update([1.0] * 4, shaping="rank")


def test_noise_that_is_rounded_away_is_told() -> None:
    """In arrays of few bits or of large numbers, however they lie in memory, when the strategy is made."""
    perturbation = Perturbation("permuted", 2, 1e-4, values="rademacher")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Strategy(parameters(), perturbation)
        Strategy({"empty": np.ones((0, 3)), "w": np.ones((2, 3))}, perturbation)
    with pytest.warns(
        RuntimeWarning, match=r"0.0001 is too small for float16: 100% of weights \(of a sample\)"
    ) as said:
        Strategy({"w": np.ones((3, 4), np.float16, order="F"), "left": np.ones(9)}, perturbation, ["left"])
    assert said[0].filename == __file__
    with pytest.warns(RuntimeWarning, match=r"too small for float32: 25% of weights"):
        Strategy({"w": np.full((3, 4), 1e5, np.float32).T, "v": np.ones(36)}, perturbation)
