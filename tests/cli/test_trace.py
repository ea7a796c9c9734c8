"""`rulec trace`."""

from __future__ import annotations

import numpy as np
import pytest

from rulec.cli.trace import read_shape
from rulec.errors import RulecError
from tests.cli.running import error, run, run_json


def test_every_line_has_a_value_on_both_sides() -> None:
    traced = run_json("trace", "adamw", "--steps", "2", "--dtype", "float64")
    assert len(traced["steps"]) == 2
    for step in traced["steps"]:
        assert [v["target"] for v in step["lines"]][-2:] == ["direction", "p"]
        for value in step["lines"]:
            assert value["backend"] == value["reference"]
            assert value["ulps"] == 0


def test_values_are_those_of_the_rule() -> None:
    traced = run_json("trace", "sgd", "--steps", "2", "--hyper", "lr=0.5", "--dtype", "float64")
    p = traced["p"]
    for step in traced["steps"]:
        p = [x - 0.5 * g for x, g in zip(p, step["g"], strict=True)]
        assert step["lines"][-1]["reference"] == p


def test_float32_shows_the_rounding_of_each_line() -> None:
    (step,) = run_json("trace", "adam", "--steps", "1")["steps"]
    ulps = {v["target"]: v["ulps"] for v in step["lines"]}
    assert 0 < max(ulps.values()) < 8


def test_the_first_difference_is_marked_once() -> None:
    shown = run("trace", "adam", "--steps", "3")
    assert shown.count("<- the first difference") == 1
    assert "  m = beta1*m + (1 - beta1)*g\n" in shown
    assert shown.count("\nstep ") == 3


def test_a_scalar_line_shows_one_number() -> None:
    shown = run("trace", "nadam", "--steps", "1", "--backend", "none", "--shape", "2x3")
    lines = shown.splitlines()
    place = next(i for i, line in enumerate(lines) if line.strip().startswith("mu = "))
    assert len(lines[place + 1].split()) == 2
    place = next(i for i, line in enumerate(lines) if line.strip().startswith("m = "))
    assert len(lines[place + 1].split()) == 7


@pytest.mark.parametrize("backend", ["numpy", "jax"])
def test_other_backends_trace_too(backend: str) -> None:
    (step,) = run_json("trace", "lion", "--steps", "1", "--backend", backend)["steps"]
    assert max(v["ulps"] for v in step["lines"]) < 8


@pytest.mark.parametrize(
    ("rule", "shape"),
    [
        ("lamb", "3"), ("adafactor", "2x3"), ("prodigy", "3"), ("soap", "3x2"), ("galore", "5x6"), ("apollo", "5x6"),
        ("muon", "3x2"), ("ema(sgd)", "3"), ("skip_not_finite >> clip_by_global_norm >> sgd", "3"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("backend", ["numpy", pytest.param("cpu", marks=pytest.mark.slow)])
def test_rules_with_reductions_matrices_and_skips_are_traced_beside_the_reference(
    rule: str, shape: str, backend: str
) -> None:
    traced = run_json("trace", rule, "--shape", shape, "--steps", "2", "--dtype", "float64", "--backend", backend)
    assert traced["backend"] == backend
    for step in traced["steps"]:
        assert "p" in [value["target"] for value in step["lines"]]
        for value in step["lines"]:
            ours, theirs = np.array(value["backend"]), np.array(value["reference"])
            np.testing.assert_allclose(ours.reshape(-1), theirs.reshape(-1), rtol=1e-9, atol=1e-12)


def test_a_tensor_is_traced_by_the_rule_it_is_routed_to() -> None:
    shown = run("trace", "muon", "--steps", "1")
    assert shown.startswith("a tensor of shape (3,) goes to AdamW\n")
    assert "newton_schulz" not in shown
    assert "newton_schulz" in run("trace", "muon", "--steps", "1", "--shape", "2x2")


def test_a_rule_with_passes_shows_its_points_and_inputs() -> None:
    traced = run_json("trace", "looksam(polyak_sgd)", "--steps", "2", "--dtype", "float64", "--hyper", "k=2")
    first, second = ({v["line"]: v["reference"] for v in step["lines"]} for step in traced["steps"])
    p, (step, later) = np.array(traced["p"]), traced["steps"]
    point = next(np.array(value) for line, value in first.items() if line.startswith("climb.p = "))
    np.testing.assert_allclose(point, p + 0.1 * np.array(step["g"]) / np.linalg.norm(step["g"]), rtol=1e-11)
    assert first["climb.g = climb.gradient"] == step["inputs"]["climb.gradient"]
    assert second["climb.g = g"] == later["g"]
    assert step["inputs"]["loss"] > 0
    assert "\n  climb.gradient = " in run("trace", "sam(sgd)", "--steps", "1")


def test_shapes() -> None:
    assert read_shape("3") == (3,)
    assert read_shape("2x4") == (2, 4)
    for text in ("", "0", "2x", "-1", "axb"):
        with pytest.raises(RulecError, match="is no shape"):
            read_shape(text)
    with pytest.raises(RulecError, match="more than the 64"):
        read_shape("9x9")


def test_mistakes() -> None:
    assert "there is no backend 'gpu'" in error("trace", "adam", "--backend", "gpu")
    assert "is no shape" in error("trace", "adam", "--shape", "big")
    assert "wraps another rule and has none here" in error("trace", "lookahead")


@pytest.mark.parametrize("backend", ["numpy", "cpu", "none", "jax"])
def test_statistics_are_of_the_step_that_is_traced(backend: str) -> None:
    arguments = ("trace", "lamb", "--steps", "2", "--shape", "2x3", "--backend", backend, "--dtype", "float64")
    traced = run_json(*arguments, "--watch", "trust", "--watch", 'rows=max(abs(update), per="row")')
    before = np.array(traced["p"])
    assert len(traced["steps"]) == 2
    for step in traced["steps"]:
        lines = {each["target"]: np.array(each["reference"]) for each in step["lines"]}
        trust, rows = step["statistics"]["trust"], step["statistics"]["rows"]
        np.testing.assert_allclose(trust["reference"], (lines["a"] / lines["b"]).flat[0], rtol=1e-12)
        np.testing.assert_allclose(np.ravel(rows["reference"]), abs(lines["p"] - before).max(axis=1), rtol=1e-9)
        for each in (trust, rows):
            assert (each["backend"] is None) == (backend == "none")
            if each["backend"] is not None:
                np.testing.assert_allclose(each["backend"], each["reference"], rtol=1e-9)
        before = lines["p"]


def test_a_trace_without_statistics_has_none_and_one_with_some_prints_them() -> None:
    assert all(step["statistics"] == {} for step in run_json("trace", "adamw", "--steps", "2")["steps"])
    shown = run("trace", "dog", "--steps", "3", "--watch", "distance")
    assert shown.count("  statistic distance\n      reference  ") == 3
    assert "statistic" not in run("trace", "dog", "--steps", "3")


@pytest.mark.parametrize("backend", ["numpy", "jax"])
def test_statistics_of_groups_and_of_float32_are_traced_by_the_backend(backend: str) -> None:
    sizes = ("--watch", "step=lr*norm(update)", "--watch", "rate=lr", "--watch", 'all=norm(update, per="model")')
    (step,) = run_json("trace", "adamw", "--steps", "1", "--backend", backend, *sizes)["steps"]
    values = {name: (each["reference"], each["backend"]) for name, each in step["statistics"].items()}
    assert values.keys() == {"step", "rate", "all"}
    for reference, measured in values.values():
        assert measured == pytest.approx(reference, rel=1e-5)
    assert values["all"][0] != values["all"][1]


def test_the_statistics_of_the_rule_for_other_tensors_are_its_own() -> None:
    assert "Adam has no statistic 'clip'" in error("trace", "fira", "--shape", "3", "--watch", "clip")
    (step,) = run_json("trace", "fira", "--shape", "4x6", "--steps", "1", "--watch", "clip")["steps"]
    assert step["statistics"]["clip"]["reference"] == 1
