"""States in codes through the engine: as states in floats that are rounded to the format after every step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import rulec
from rulec.array import Optimizer
from rulec.compiler.layout import scale_name
from rulec.errors import HyperError, TensorError
from rulec.formats import Format, decode, encode, parse
from rulec.runtime.storage import FEWEST_CODED
from tests.backends.here import BACKENDS
from tests.pairs import paired

Array = np.ndarray[Any, Any]
SHAPE = (72, 80)
RULES = ["adamw", "lamb", "adam_mini", "adamp", "amsgrad", "adan", "lion", "momentum", "cautious_adamw"]


def coded_formats(optimizer: Optimizer) -> dict[str, Format]:
    engine = optimizer._engine
    return {name: form for i in engine.ids.values() for name, form in engine.formats(i).items()}


def rounded(optimizer: Optimizer, formats: Mapping[str, Format]) -> None:
    """Rounds the states of an optimizer of one array to these formats, in place."""
    states = optimizer.state("p")
    for name, form in formats.items():
        states[name][...] = decode(form, *encode(form, states[name]), states[name].shape)


@pytest.mark.parametrize(
    ("rule", "name", "backend"),
    [*paired(RULES, ["int8", "dynamic8"], BACKENDS), *paired(["came"], ["softsign8"], BACKENDS)],
)
def test_a_run_in_codes_is_a_run_in_floats_rounded_after_each_step(backend: str, rule: str, name: str) -> None:
    draws = np.random.default_rng(1)
    first = draws.standard_normal(SHAPE).astype(np.float32)
    params = [{"p": first.copy()}, {"p": first.copy()}]
    coded = Optimizer(rule, params[0], backend, state_dtype=name)
    floats = Optimizer(rule, params[1], backend)
    for _ in range(4):
        grad = {"p": draws.standard_normal(SHAPE).astype(np.float32)}
        coded.step(grad)
        floats.step(grad)
        formats = coded_formats(coded)
        assert formats
        rounded(floats, formats)
        assert params[0]["p"].tobytes() == params[1]["p"].tobytes()
    for state, form in formats.items():
        values = decode(form, coded.state("p")[state], coded.state("p")[scale_name(state)], SHAPE)
        assert values.tobytes() == floats.state("p")[state].tobytes()


def test_small_arrays_and_arrays_in_another_order_keep_floats() -> None:
    sizes = {"small": np.ones(FEWEST_CODED - 1, np.float32), "large": np.ones(FEWEST_CODED, np.float32),
             "turned": np.ones((128, 64), np.float32, order="F")}  # fmt: skip
    optimizer = Optimizer("adamw", sizes, state_dtype="int8")
    optimizer.step({name: array.copy(order="K") for name, array in sizes.items()})
    assert {name: optimizer.state(name)["m"].dtype.name for name in sizes} == {
        "small": "float32", "large": "int8", "turned": "float32",
    }  # fmt: skip


def test_states_that_must_be_exact_stay_so_and_all_others_get_codes() -> None:
    optimizer = Optimizer("prodigy", {"p": np.ones(5000, np.float32)}, state_dtype="dynamic8")
    optimizer.step({"p": np.ones(5000, np.float32)})
    assert "x0" not in coded_formats(optimizer)
    assert {"m", "v"} <= coded_formats(optimizer).keys()


@pytest.mark.parametrize(
    ("rule", "asked", "kind", "words"),
    [
        ("prodigy", {"x0": "int8"}, HyperError, ["x0", "Prodigy", "int8/32"]),
        ("adamw", {"w": "int8"}, TensorError, ["no state 'w'"]),
        ("adamw", {"v": "int9"}, TensorError, ["'int9'", "int8", "bfloat16"]),
        ("adamw", {"v": "int8/0"}, HyperError, ["0", "power of two"]),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_made(
    rule: str, asked: dict[str, str], kind: type[Exception], words: list[str]
) -> None:
    with pytest.raises(kind) as caught:
        Optimizer(rule, {"p": np.ones(5000, np.float32)}, state_dtype=asked)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_first_value_that_is_no_zero_is_encoded() -> None:
    rule = rulec.load("adagrad")
    optimizer = Optimizer(rule, {"p": np.ones(5000, np.float32)}, state_dtype="dynamic8", initial=0.5)
    optimizer.step({"p": np.zeros(5000, np.float32)})
    (name, form), *_ = coded_formats(optimizer).items()
    state = optimizer.state("p")
    assert np.all(decode(form, state[name], state[scale_name(name)], (5000,)) == np.float32(0.5))
    assert form == parse("dynamic8").for_state(signed=False, floor=True)


def test_a_rule_keeps_a_state_exact_whatever_is_asked_for_all() -> None:
    rule = rulec.parse("""
name: Exact
hyper: {lr: 0.1}
state: {m: 0, n: 0}
storage: {n: exact}
step: |
  m = 0.9*m + g
  n = 0.9*n + g
  direction = m + n
""")
    for word, other in (("int8", "int8"), ("bfloat16", "bfloat16")):
        optimizer = Optimizer(rule, {"p": np.ones(5000, np.float32)}, state_dtype=word)
        optimizer.step({"p": np.ones(5000, np.float32)})
        assert optimizer.state("p")["n"].dtype == np.float32
        assert optimizer.state("p")["m"].dtype.name == other
    with pytest.raises(HyperError, match="n of Exact"):
        Optimizer(rule, {"p": np.ones(5000, np.float32)}, state_dtype={"n": "int8"})
