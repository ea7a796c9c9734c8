"""The library as a whole: what is in it, what every file says, and how its rules relate to each other."""

from __future__ import annotations

import numpy as np
import pytest

import rulec
from tests.rules.measure import Trial, largest_difference
from tests.rules.peer import Peer
from tests.rules.peers import FIRST
from tests.rules.runs import OurRun

RULES = {
    "sgd", "momentum", "nesterov", "adagrad", "adadelta", "rmsprop", "rmsprop_centered", "rmsprop_momentum", "adam",
    "adamw", "amsgrad", "adamax", "nadam", "radam", "rprop", "asgd", "lion", "signum", "adabelief", "yogi", "adan",
    "ademamix", "qhadam", "laprop", "madgrad", "adopt", "lamb", "lars", "larc", "novograd", "stable_adamw", "adai",
    "adamp", "sgdp", "fromage", "mars_adamw", "grams", "schedule_free_sgd", "schedule_free_adamw", "cautious_adamw",
    "dog", "dowg", "prodigy", "dadapt_adam", "accsgd", "acprop", "adabound", "adamaxw", "adamc", "adamg", "adamod",
    "adapnm", "aggmo", "amsbound", "ano", "cocob", "diffgrad", "exadam", "focus", "ftrl", "grokfast_adamw", "kate",
    "msvag", "nadamw", "optimistic_adam", "optimistic_gradient_descent", "pid", "pnm", "qhm", "radamw", "sgdw",
    "simplified_ademamix", "sparse_adam", "tiger", "vsgd",
}  # fmt: skip
TRANSFORMS = {
    "decay", "l2", "sign", "scale", "nesterov", "clip_by_value", "clip_by_norm", "clip_by_global_norm", "adaptive_clip",
    "trust_ratio", "cautious", "centralize", "normalize", "noise", "skip_not_finite", "projection", "mechanic",
    "grokfast",
}  # fmt: skip

#: Hyper-parameters that may be any number.
UNLIMITED = {("transforms/scale", "factor"), ("polyak_sgd", "f_min"), ("momo", "lower"), ("momo_adam", "lower")}


def test_names() -> None:
    assert RULES | {f"transforms/{name}" for name in TRANSFORMS} <= set(rulec.rules())


def test_a_rule_hides_the_transform_of_its_name() -> None:
    assert rulec.load("nesterov") != rulec.load("transforms/nesterov")
    assert rulec.load("clip_by_value") == rulec.load("transforms/clip_by_value")


@pytest.mark.parametrize("name", rulec.rules())
def test_file_is_complete(name: str) -> None:
    rule = rulec.load(name)
    assert rule.summary.endswith(".")
    if rule.paper or not name.startswith("transforms/"):
        assert set(rule.paper) == {"title", "authors", "year", "url"}
        assert 1900 < rule.paper["year"] < 2100
        assert rule.paper["url"].startswith("https://")
    for key, hyper in rule.hyper.items():
        assert hyper.default is not None or rule.wraps
        assert hyper.range_text() or (name, key) in UNLIMITED, f"{key} of {name} has no range"


@pytest.mark.parametrize("name", rulec.rules())
def test_yaml_round_trip(name: str) -> None:
    rule = rulec.load(name)
    assert rulec.parse(rule.to_yaml()) == rule


#: What transforms share with rules on purpose: the same thing, in another measure.
SHARED = {"weight_decay", "momentum"}


@pytest.mark.parametrize("name", [name for name in rulec.rules(wrappers=False) if name.startswith("transforms/")])
def test_transform_meets_no_other_hyper_parameter(name: str) -> None:
    """Of two parts with one name the defaults must agree, so a transform's names are its own: it composes as it is."""
    own = rulec.load(name).hyper
    for other in rulec.rules(wrappers=False):
        theirs = rulec.load(other).hyper
        clashing = {key for key in own.keys() & theirs.keys() if own[key].default != theirs[key].default}
        assert clashing <= SHARED, f"{name} with {other}"


_ADAM = {"lr": 0.03, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6}

#: Rules that are the same function at these values: (rule, its values, the other, its values).
RELATIONS = [
    ("momentum", {"momentum": 0}, "sgd", {}),
    ("nesterov", {"momentum": 0}, "sgd", {}),
    ("rmsprop_momentum", {"momentum": 0}, "rmsprop", {}),
    ("rmsprop_centered_momentum", {"momentum": 0}, "rmsprop_centered", {}),
    ("qhadam", {**_ADAM, "nu1": 1, "nu2": 1}, "adam", _ADAM),
    ("ademamix", {**_ADAM, "alpha": 0, "weight_decay": 0.1}, "adamw", {**_ADAM, "weight_decay": 0.1}),
    ("adamw", {**_ADAM, "weight_decay": 0}, "adam", _ADAM),
    ("laprop", {**_ADAM, "beta1": 0}, "adam", {**_ADAM, "beta1": 0}),
    ("lion", {"lr": 0.01, "beta1": 0.8, "beta2": 0.8}, "signum", {"lr": 0.01, "momentum": 0.8}),
    ("adan", {**_ADAM, "beta2": 0, "beta3": 0.95, "weight_decay": 0}, "adam", _ADAM),
    ("asgd", {"lr": 0.01, "lambd": 0}, "sgd", {"lr": 0.01}),
    ("qhm", {"lr": 0.01, "nu": 0}, "sgd", {"lr": 0.01}),
    ("pnm", {"lr": 0.01, "beta0": 0, "beta1": 0}, "sgd", {"lr": 0.01}),
    ("pid", {"lr": 0.01, "momentum": 0.8, "integral": 0.8, "derivative": 0}, "nesterov", {"lr": 0.01, "momentum": 0.8}),
    ("aggmo", {"lr": 0.01, "betas": [0.8, 0.8]}, "momentum", {"lr": 0.01, "momentum": 0.8}),
    ("adamc", {**_ADAM, "weight_decay": 0.1}, "adamw", {**_ADAM, "weight_decay": 0.1}),
    ("grokfast_adamw", {**_ADAM, "grokfast_lamb": 0}, "adamw", _ADAM),
    ("optimistic_adam", {**_ADAM, "beta": 0}, "adam", _ADAM),
    ("simplified_ademamix", {**_ADAM, "beta1": 0}, "adam", {**_ADAM, "beta1": 0}),
]


@pytest.mark.parametrize(("name", "hyper", "other", "other_hyper"), RELATIONS)
def test_relation(name: str, hyper: dict[str, float], other: str, other_hyper: dict[str, float]) -> None:
    trial = Trial("float64")
    one = OurRun(rulec.load(name), trial.params, hyper, "numpy")
    two = OurRun(rulec.load(other), trial.params, other_hyper, "numpy")
    # No learning rate is named here, so it does not change: ASGD would be a step late.
    assert largest_difference(one, two, trial, {}).relative <= 1e-13


def test_adamw_is_adam_plus_decay() -> None:
    composed = rulec.load("adam") + rulec.load("decay")
    library = rulec.load("adamw")
    assert (library.step, library.hyper, library.state) == (composed.step, composed.hyper, composed.state)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_centered_variance_never_negative(dtype: str) -> None:
    """A constant gradient has no variance; what rounding leaves of it may be below zero."""
    params = [np.ones(300, dtype)]
    grads = [np.linspace(0.1, 3, 300, dtype=dtype)]
    run = OurRun(rulec.load("rmsprop_centered"), params, {"alpha": 0.5}, "numpy")
    for _ in range(60):
        run.step(grads, {})
    assert np.isfinite(run.params()[0]).all()


def test_adopt_does_not_move_at_first() -> None:
    trial = Trial("float64", steps=2)
    run = OurRun(rulec.load("adopt"), trial.params, {}, "numpy")
    moved = []
    for grads, _ in trial.moves({"lr": 1e-3}):
        run.step(grads, {})
        moved.append([float(np.abs(a - b).max()) for a, b in zip(run.params(), trial.params, strict=True)])
    assert max(moved[0]) == 0
    assert min(moved[1]) > 0


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("peer", FIRST, ids=lambda peer: peer.composed)
def test_bad_gradient_stays_in_its_element(peer: Peer, bad: float) -> None:
    trial = Trial("float64", steps=4)
    clean = OurRun(peer.ours(), trial.params, peer.hyper, "numpy")
    dirty = OurRun(peer.ours(), trial.params, peer.hyper, "numpy")
    for grads, now in trial.moves(peer.hyper):
        clean.step(grads, now)
        grads[0][2] = bad
        dirty.step(grads, now)
    others = np.arange(5) != 2
    np.testing.assert_array_equal(dirty.params()[0][others], clean.params()[0][others])
    np.testing.assert_array_equal(dirty.params()[1], clean.params()[1])
    if np.isnan(bad):
        assert np.isnan(dirty.params()[0][2])
