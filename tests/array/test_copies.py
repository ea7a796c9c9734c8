"""Copies of an optimizer of plain arrays go on as it does, bit for bit, on arrays of their own."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

import rulec
from rulec.array import Optimizer
from rulec.errors import HyperError, RulecError

SHAPES = {"embed": (6, 4), "dense": {"weight": (5, 4), "bias": (5,)}, "gain": ()}

WAYS = {"deepcopy": copy.deepcopy, "pickle": lambda x: pickle.loads(pickle.dumps(x))}  # noqa: S301


def tree(seed: int, dtype: str = "float32") -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    make = lambda shape: np.asarray(rng.normal(size=shape), dtype)  # noqa: E731
    return {k: {n: make(s) for n, s in v.items()} if isinstance(v, dict) else make(v) for k, v in SHAPES.items()}


def leaves(params: dict[str, Any]) -> list[np.ndarray]:
    return [params["embed"], params["dense"]["weight"], params["dense"]["bias"], params["gain"]]


NUMPY = {"backend": "numpy"}  # it has nothing to compile

#: Rules with arrays, with numbers of arrays, groups and the model, with random numbers, matrices, several rules at
#: once, an evaluation point, and a norm over everything.
CASES: list[tuple[str, dict[str, Any]]] = [
    ("adamw", {}),
    ("adam", {"state_dtype": {"v": "float64"}, "maximize": True}),
    ("nadam", NUMPY),
    ("asgd", NUMPY),
    ("adam_mini", NUMPY),
    ("prodigy", NUMPY),
    ("noise >> adamw", {"seed": 7, **NUMPY}),
    ("clip_by_global_norm >> adafactor", NUMPY),
    ("muon", {"tags": {"embed": {"embedding"}}, **NUMPY}),
    ("galore", {"rank": 2, **NUMPY}),
    ("schedule_free_adamw", {}),
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("rule", "options"), CASES, ids=[rule for rule, _ in CASES])
def test_copies_go_on_alike_and_apart(rule: str, options: dict[str, Any], way: str) -> None:
    params = tree(0)
    opt = Optimizer(rule, params, lr=0.01, **options)
    late = {**tree(1), "embed": None}  # one array joins later than the others, and counts its own steps
    opt.step(late)
    opt.step(tree(2))
    opt.hyper["lr"] = 0.02
    copied_params, copied = WAYS[way]((params, opt))
    assert all(a is not b for a, b in zip(leaves(params), leaves(copied_params), strict=True))
    for seed in (3, 4):
        opt.step(tree(seed))
    went_on = [x.copy() for x in leaves(params)]
    for seed in (3, 4):
        copied.step(tree(seed))
    assert all((a == b).all() for a, b in zip(went_on, leaves(params), strict=True))
    assert all((a == b).all() for a, b in zip(went_on, leaves(copied_params), strict=True))
    assert copied.hyper == opt.hyper
    assert copied.routing == opt.routing
    np.testing.assert_equal(copied.state_dict(), opt.state_dict())


def test_a_copy_before_the_first_step() -> None:
    params = tree(0)
    both = copy.deepcopy((params, Optimizer("adamw", params)))
    both[1].step(tree(1))
    Optimizer("adamw", params).step(tree(1))
    assert all((a == b).all() for a, b in zip(leaves(params), leaves(both[0]), strict=True))


def test_a_copy_keeps_gradients_of_another_dtype_and_the_evaluation_point() -> None:
    params = tree(0)
    opt = Optimizer("schedule_free_sgd", params, "numpy", lr=0.1)
    opt.step(tree(1, "float64"))
    opt.eval()
    copied_params, copied = copy.deepcopy((params, opt))
    with pytest.raises(RulecError, match="call train"):
        copied.step(tree(2, "float64"))
    for one in (opt, copied):
        one.train()
        one.step(tree(2, "float64"))
    assert all((a == b).all() for a, b in zip(leaves(params), leaves(copied_params), strict=True))


def test_states_are_copied_as_they_were_made() -> None:
    """Their shapes follow from the rank that there was at the first step."""
    params = tree(0)
    opt = Optimizer("galore", params, "numpy", rank=2)
    opt.step(tree(1))
    opt.hyper["rank"] = 3
    copied_params, copied = copy.deepcopy((params, opt))
    for one in (opt, copied):
        one.hyper["rank"] = 2
        one.step(tree(2))
    assert all((a == b).all() for a, b in zip(leaves(params), leaves(copied_params), strict=True))


def test_a_rule_of_a_function_and_of_a_text_is_copied() -> None:
    momentum = rulec.rule(lambda g, s, *, beta=0.5: beta * s.m + g, name="Heavy", state={"m": 0})
    text = rulec.parse("name: Plain\nstate: {m: 0}\nstep: |\n  m = m + g\n  direction = m\n")
    for rule in (momentum, text):
        params = tree(0)
        opt = Optimizer(rule, params, "numpy")
        opt.step(tree(1))
        for way in WAYS.values():
            assert way(opt).rule == rule


def test_the_middle_of_a_step_is_not_copied() -> None:
    opt = Optimizer("sgd", tree(0))
    with opt.partial(), pytest.raises(RulecError, match=r"^a copy inside partial\(\), which is open: close it first$"):
        copy.deepcopy(opt)


def test_a_copy_has_hyper_parameters_of_its_own() -> None:
    opt = Optimizer("sgd", tree(0), lr=0.5)
    copied = copy.deepcopy(opt)
    copied.hyper["lr"] = -1.0
    assert opt.hyper["lr"] == 0.5
    with pytest.raises(HyperError, match="must be at least 0"):
        copied.step(tree(1))
