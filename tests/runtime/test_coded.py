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
from rulec.runtime.storage.options import FEWEST_CODED
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


#: Lines of a rule with the states `m`, `v`, a history `q` and numbers `n` of tensors and `k` of the group.
BRANCHES = [
    "if t % 2 == 0:\n  m = 0\nelse:\n  m = 0.9*m + 0.1*g\nx = sum(m + 1, per='tensor')/numel + m",
    "if n > 0:\n  m = mean(g, per='row')\nelse:\n  m = m + g\nx = m + norm(m, per='col')",
    "v = 0.9*v + 0.1*g*g\nif t > 2:\n  v = 1\n  if k > 0.5:\n    m = mean(v, per='model')\nx = g/(sqrt(v) + 0.1) + m",
    "if g > 0:\n  v = mean(g*g, per='row')\nelse:\n  v = 3\nif mean(v, per='row') > 1:\n  m = t\nx = m*sqrt(v)",
    "if h > 0.5:\n  q = g\nelse:\n  q = 0\nif sum(g, per='model') > 0:\n  m = q[1]\nx = q[0] + q[1] + m/sum(q[1] + 1)",
]


@pytest.mark.parametrize("lines", BRANCHES, ids=map(str, range(len(BRANCHES))))
@pytest.mark.parametrize("name", ["int8", "float8_e4m3"])
def test_arms_that_assign_states_in_codes(lines: str, name: str) -> None:
    check_follows_floats(lines, name, "numpy")


@pytest.mark.slow
@pytest.mark.parametrize("lines", BRANCHES, ids=map(str, range(len(BRANCHES))))
@pytest.mark.parametrize("name", ["dynamic8", "softsign8"])
@pytest.mark.parametrize("backend", ["cpu", "c"])
def test_compiled_arms_that_assign_states_in_codes(lines: str, name: str, backend: str) -> None:
    check_follows_floats(lines, name, backend)


def branching(lines: str) -> rulec.Rule:
    numbers = "n = 0.5*n + mean(g, per='tensor')\nk = 0.5*k + mean(abs(g), per='group')\n"
    used = " + 0*m + 0*v + 0*q[0] + 0*q[1]"
    step = "".join(f"  {line}\n" for line in f"{numbers}{lines}\ndirection = x{used}".replace("'", '"').splitlines())
    states = "m: 0, v: 0, q: {init: 0, history: 2}, n: {init: 0, per: tensor}, k: {init: 0, per: group}"
    return rulec.parse(f"name: Arms\nhyper: {{lr: 0.01, h: 0.7}}\nstate: {{{states}}}\nstep: |\n{step}")


def check_follows_floats(lines: str, name: str, backend: str) -> None:
    """Three steps of two arrays, the second late: in codes, and in floats that are rounded after each step."""
    draws, shapes = np.random.default_rng(2), {"p": SHAPE, "late": (5003,)}
    first = {key: draws.standard_normal(shape).astype(np.float32) for key, shape in shapes.items()}
    params = [{key: x.copy() for key, x in first.items()} for _ in range(2)]
    coded = Optimizer(branching(lines), params[0], backend, state_dtype=name)
    floats = Optimizer(branching(lines), params[1], backend)
    for step in range(3):
        sizes = np.exp(draws.standard_normal())
        here = {key: shape for key, shape in shapes.items() if key == "p" or step > 0}
        grads = {key: (draws.standard_normal(shape) * sizes).astype(np.float32) for key, shape in here.items()}
        coded.step({key: x.copy() for key, x in grads.items()})
        floats.step(grads)
        for key in grads:
            for state, form in coded._engine.formats(coded._engine.ids[key]).items():
                codes = coded.state(key)[state], coded.state(key)[scale_name(state)]
                values, held = decode(form, *codes, shapes[key]), floats.state(key)[state]
                assert form.signed or np.all(held >= 0)
                if values.tobytes() != held.tobytes():  # an arm that leaves the state leaves its codes
                    held[...] = decode(form, *encode(form, held), held.shape)
                assert values.tobytes() == held.tobytes()
            assert params[0][key].tobytes() == params[1][key].tobytes()


@pytest.mark.parametrize(
    "asked",
    ["dynamic8", {"q_0": "dynamic8"}, {"q_1": "int8"}, {"q_0": "int8/64", "q_1": "int8/32"}, {"q_0": "bfloat16"}],
    ids=str,
)
def test_entries_of_a_history_that_are_stored_in_several_ways(asked: str | dict[str, str]) -> None:
    rule = rulec.parse("""
name: Apart
hyper: {lr: 0.1}
state: {q: {init: 0, history: 2}}
step: |
  direction = g/(sqrt(q[0]) + 1e-3) + q[1]
  q = g*g
""")
    draws, params = np.random.default_rng(3), [{"p": np.ones(SHAPE, np.float32)} for _ in range(2)]
    coded, floats = Optimizer(rule, params[0], "numpy", state_dtype=asked), Optimizer(rule, params[1], "numpy")
    for _ in range(4):
        grad = {"p": (draws.standard_normal(SHAPE) * np.exp(3 * draws.standard_normal(SHAPE))).astype(np.float32)}
        coded.step(grad)
        floats.step(grad)
        rounded(floats, coded_formats(coded))
        if "bfloat16" in str(asked):
            floats.state("p")["q_0"][...] = floats.state("p")["q_0"].astype("bfloat16")
        assert params[0]["p"].tobytes() == params[1]["p"].tobytes()


def test_a_state_that_an_arm_sets_to_a_mean_of_an_axis_is_analysed() -> None:
    rule = rulec.parse("""
name: Axis
hyper: {lr: 0.1, h: 0.3}
state: {m: 0}
step: |
  if h < 0.5:
    m = mean(g, per=axis(-1))
  direction = g + m
""")
    optimizer = Optimizer(rule, {"p": np.ones(SHAPE, np.float32)}, "numpy", state_dtype="float8_e5m2")
    optimizer.step({"p": np.ones(SHAPE, np.float32)})
    assert coded_formats(optimizer).keys() == {"m"}
