"""States in bfloat16 that are rounded at random, on every backend: the bits, the mean, and what bits follow from."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

import rulec
from rulec.array import Optimizer
from rulec.array_api.bits import chance_at, words_of
from rulec.backend import registry
from rulec.compiler.interpreter import Run, Tensor, arithmetic
from rulec.compiler.ir import Memory
from rulec.compiler.pipeline import compile
from rulec.compiler.view import matrix_view
from rulec.errors import HyperError, TensorError
from rulec.kernel.interpreter import Interpreter
from tests.backends.here import BACKENDS, BRAIN
from tests.pairs import paired

Array = np.ndarray[Any, Any]
MATRICES = {"flat": (12, 20), "tall": (20, 12)}
SHAPES = {"w": (24, 40), "b": (40,), "z": (3, 40, 9)}

#: A mean of beta 0.999, beside one that is as fast as its gradient.
SLOW = rulec.parse(
    "name: Slow\nsummary: A slow mean.\nhyper: {lr: 1e-3, beta: 0.999}\nstate: {m: 0, v: 0}\n"
    "step: |\n  m = g\n  v = beta*v + (1 - beta)*g**2\n  direction = m\n"
)


def gradients(count: int, dtype: Any = np.float32) -> list[dict[str, Array]]:
    draws = np.random.default_rng(1)
    return [{name: draws.standard_normal(shape).astype(dtype) for name, shape in SHAPES.items()} for _ in range(count)]


def parameters(dtype: Any = np.float32) -> dict[str, Array]:
    return gradients(1, dtype)[0]


def trained(backend: Any, rule: Any, count: int = 4, dtype: Any = np.float32, **words: Any) -> tuple[Any, Optimizer]:
    params = parameters(dtype)
    optimizer = Optimizer(rule, params, backend, **{"state_dtype": "bfloat16_sr", "seed": 3, **words})
    for grads in gradients(count, dtype):
        optimizer.step(grads)
    return params, optimizer


def rounded(values: Array, seed: int, number: int, step: int, draw: int) -> Array:
    """The definition: a random number below 2**16 is added to the bits of a float32, and the lower half is cleared."""
    places, high = np.arange(values.size, dtype=np.uint32), np.array(0, np.uint32)
    with np.errstate(over="ignore"):
        drawn = chance_at(np, places, high, (*words_of(seed, number).values(), step, draw)).astype(np.uint32)
    bits = values.astype(np.float32).reshape(-1).view(np.uint32) + drawn
    return (bits & 0xFFFF0000).view(np.float32).reshape(values.shape)


@pytest.mark.parametrize(("rule", "backend"), paired(["adamw", "adagrad", "lion", "adafactor", "came"], BACKENDS))
def test_a_step_is_one_in_floats_whose_states_are_rounded_afterwards(backend: str, rule: str) -> None:
    """Parameters take the step of the new states before they are rounded, bit for bit."""
    params, floats = parameters(), parameters()
    ours = Optimizer(rule, params, backend, state_dtype="bfloat16_sr", seed=70000)
    theirs = Optimizer(rule, floats, backend, state_dtype="float32")
    order = {name: place for place, name in enumerate(rulec.load(rule).state)}
    for step, grads in enumerate(gradients(3), start=1):
        ours.step(grads)
        theirs.step(grads)
        for number, name in enumerate(params):
            assert np.array_equal(params[name], floats[name]), (step, name)
            states = theirs.state(name)
            for state in states.keys() - {"step"}:
                states[state][...] = rounded(states[state], 70000, number, step, order[state] + 1)
                assert ours.state(name)[state].dtype == BRAIN
                assert np.array_equal(ours.state(name)[state].astype(np.float32), states[state]), (step, name, state)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", ["galore", "shampoo", "soap", "apollo"])
def test_states_of_a_shape_of_their_own_are_rounded_too(backend: str, rule: str) -> None:
    """Of matrices that a rule sees turned, too; where a step keeps a state, it stays as it is."""
    draws, order = np.random.default_rng(0), {name: place for place, name in enumerate(rulec.load(rule).state)}
    params = {name: draws.standard_normal(shape).astype(np.float32) for name, shape in MATRICES.items()}
    floats = {name: p.copy() for name, p in params.items()}
    ours = Optimizer(rule, params, backend, state_dtype="bfloat16_sr", seed=7)
    theirs = Optimizer(rule, floats, backend, state_dtype="float32", seed=7)
    for step in (1, 2, 3):
        grads = {name: draws.standard_normal(shape).astype(np.float32) for name, shape in MATRICES.items()}
        ours.step(grads)
        theirs.step(grads)
        for number, name in enumerate(params):
            assert np.array_equal(params[name], floats[name]), (step, name)
            states, words = theirs.state(name), ours.storage()[name]
            unbiased = [state for state, word in words.items() if word == "bfloat16_sr"]
            assert unbiased
            for state in unbiased:
                states[state][...] = rounded(states[state], 7, number, step, order[state] + 1)
                assert np.array_equal(ours.state(name)[state].astype(np.float32), states[state]), (step, name, state)


@pytest.mark.parametrize(
    ("dtype", "rule"),
    paired([np.float32, pytest.param(BRAIN, id="bfloat16")], ["adamw", "adagrad", "lion", "adafactor"]),
)
def test_every_backend_has_the_same_bits(rule: str, dtype: Any) -> None:
    names = [name for name in ("numpy", "c", "cpu") if not registry.get(name).unavailable_reason()]
    (first, one), *others = [trained(backend, rule, count=2, dtype=dtype) for backend in (Interpreter(), *names)]
    for params, optimizer in others:
        for name, p in params.items():
            assert np.array_equal(p, first[name])
            for state, value in optimizer.state(name).items():
                assert np.array_equal(value, one.state(name)[state])


def test_the_reference_has_the_same_bits() -> None:
    _, optimizer = trained("numpy", "adagrad", count=1)
    for number, (name, p) in enumerate(parameters().items()):
        view = matrix_view(p.shape, rulec.load("adagrad").view)
        program = compile(rulec.load("adagrad"), {**view.facts, "machine_eps": 0}, memory=Memory("", frozenset("s")))
        shape = (view.batch, view.rows, view.cols)
        grad = gradients(1)[0][name].astype(np.float64)
        tensor = Tensor(view, p.reshape(shape), 0, number, 0.0, {"s": np.zeros(shape)}, t=1)
        hyper = {"lr": 1e-2, "eps": 1e-10, "lr_decay": 0.0, "initial": 0.0}
        run = Run(program, [tensor], [hyper], arithmetic("float64"), {}, {number: grad.reshape(shape)}, 3)
        new = {buffer: value for buffer, _, value in run.execute()[0]}
        assert np.array_equal(new["s"].reshape(p.shape), optimizer.state(name)["s"].astype(np.float64))


@pytest.mark.filterwarnings("ignore:plain of Means moves")
def test_a_slow_mean_follows_float32_where_plain_bfloat16_stands_still() -> None:
    """Beta 0.999: 4,000 steps of one gradient from nothing, then 4,000 steps without gradients."""
    storages = {"exact": "float32", "plain": "bfloat16", "ours": "bfloat16_sr"}
    lines = "".join(f"  {name} = beta*{name} + (1 - beta)*g**2\n" for name in storages)
    means = rulec.parse(
        "name: Means\nsummary: One mean three times.\nhyper: {lr: 1e-3, beta: 0.999}\n"
        f"state: {{exact: 0, plain: 0, ours: 0}}\nstep: |\n{lines}  direction = exact + plain + ours\n"
    )
    optimizer = Optimizer(means, {"w": np.zeros(2000, np.float32)}, "cpu", state_dtype=storages)
    for size in (1, 0):
        grads = {"w": np.full(2000, size, np.float32)}
        for _ in range(4000):
            optimizer.step(grads)
        states = optimizer.state("w")
        exact, plain, ours = (float(np.mean(states[name], dtype=np.float64)) for name in storages)
        assert abs(ours / exact - 1) < 0.02
        assert abs(plain / exact - 1) > 0.5


@pytest.mark.parametrize("backend", BACKENDS)
def test_rounding_is_right_in_the_mean(backend: str) -> None:
    """A value an eighth of a unit above a bfloat16: its neighbours alone, and their mean within four sigma."""
    shape = (4, 50, 100)
    params = {"w": np.zeros(shape, np.float32)}
    optimizer = Optimizer(SLOW, params, backend, state_dtype={"m": "bfloat16_sr"}, seed=5)
    optimizer.step({"w": np.full(shape, -(1 + 2.0**-10), np.float32)})
    units = (-optimizer.state("w")["m"].astype(np.float64) - 1) * 2**7
    assert {*np.unique(units)} == {0.0, 1.0}
    share = 1 / 8
    assert abs(units.mean() - share) < 4 * np.sqrt(share * (1 - share) / units.size)


@pytest.mark.parametrize("backend", BACKENDS)
def test_states_of_rows_are_rounded_too(backend: str) -> None:
    rows = rulec.parse(
        "name: Rows\nsummary: The largest of each row.\nhyper: {lr: 1e-3}\nstate: {r: {init: 0, per: row}}\n"
        "step: |\n  r = max(g, per='row')\n  direction = r + 0*g\n"
    )
    shape = (20_000, 2)
    optimizer = Optimizer(rows, {"w": np.zeros(shape, np.float32)}, backend, state_dtype="bfloat16_sr")
    optimizer.step({"w": np.full(shape, 1 + 2.0**-9, np.float32)})
    units = (optimizer.state("w")["r"].astype(np.float64) - 1) * 2**7
    assert {*np.unique(units)} == {0.0, 1.0}
    assert abs(units.mean() - 1 / 4) < 4 * np.sqrt(3 / 16 / units.size)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bits_follow_from_the_seed_the_state_and_the_tensor_alone(backend: str) -> None:
    """Not from the storage of the other state, nor from the other tensors of a bucket."""
    twins = rulec.parse(
        "name: Twins\nsummary: Two states with one value.\nhyper: {lr: 1e-3}\nstate: {m: 0, v: 0}\n"
        "step: |\n  m = g\n  v = g\n  direction = m + v\n"
    )
    grads = {f"layer{i}": g for i, g in enumerate([np.linspace(1, 2, 999, dtype=np.float32)] * 40)}

    def states(words: Any, seed: int = 3) -> list[dict[str, Array]]:
        params = {name: np.zeros_like(g) for name, g in grads.items()}
        optimizer = Optimizer(twins, params, backend, state_dtype=words, seed=seed)
        optimizer.step(grads)
        return [{k: v.astype(np.float32) for k, v in optimizer.state(name).items()} for name in params]

    both = states("bfloat16_sr")
    assert not np.array_equal(both[0]["m"], both[0]["v"])
    assert len({each["m"].tobytes() for each in both}) == len(both)
    alone = states({"m": "float32", "v": "bfloat16_sr"})
    assert all(np.array_equal(a["v"], b["v"]) for a, b in zip(alone, both, strict=True))
    assert not np.array_equal(states("bfloat16_sr", seed=4)[0]["v"], both[0]["v"])


@pytest.mark.parametrize("backend", BACKENDS)
def test_stochastic_weights_and_states_draw_apart(backend: str) -> None:
    """A parameter that takes twice the value of a state: each is rounded on its own."""
    same = rulec.parse(
        "name: Same\nsummary: A value and its double.\nstate: {m: 0}\nstep: |\n  m = g + 0*m\n  p = 2*g + 0*m\n"
    )
    params = {"w": np.zeros(5000, BRAIN)}
    optimizer = Optimizer(same, params, backend, weights="stochastic", state_dtype="bfloat16_sr")
    optimizer.step({"w": np.full(5000, 1 + 2.0**-8, np.float32)})
    up = [x.astype(np.float32) > least for x, least in ((params["w"], 2), (optimizer.state("w")["m"], 1))]
    assert all(abs(each.mean() - 0.5) < 4 * 0.5 / np.sqrt(5000) for each in up)
    assert abs((up[0] == up[1]).mean() - 0.5) < 4 * 0.5 / np.sqrt(5000)


def test_infinity_and_nan_stay() -> None:
    values = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, 1e-45], np.float32)
    optimizer = Optimizer(SLOW, {"w": np.zeros(6, np.float32)}, "cpu", state_dtype={"m": "bfloat16_sr"})
    optimizer.step({"w": values})
    kept = optimizer.state("w")["m"].astype(np.float32)
    assert np.array_equal(kept[:3], values[:3], equal_nan=True)
    assert not kept[3:].any()


def test_a_tall_matrix_seen_turned_has_the_bits_of_its_memory() -> None:
    rule = rulec.parse(
        "name: Turned\nsummary: The short side first.\nhyper: {lr: 1e-3}\nview: {short: first}\nstate: {m: 0}\n"
        "step: |\n  m = g + 0*m*mean(g, per='row')\n  direction = m\n"
    )
    grad = np.random.default_rng(2).standard_normal((12, 5)).astype(np.float32)
    expected = rounded(grad, 9, 0, 1, 1)
    for backend in (Interpreter(), "numpy", "cpu", *["c"] * (not registry.get("c").unavailable_reason())):
        optimizer = Optimizer(rule, {"w": np.zeros((12, 5), np.float32)}, backend, state_dtype="bfloat16_sr", seed=9)
        optimizer.step({"w": grad})
        assert np.array_equal(optimizer.state("w")["m"].astype(np.float32), expected)


def test_a_state_dict_goes_on_with_the_same_bits_and_changes_its_storage() -> None:
    whole, one = trained("cpu", "adamw", count=4)
    params, first = trained("cpu", "adamw", count=2)
    saved = first.state_dict()
    assert saved["formats"] == {"m": "bfloat16_sr", "v": "bfloat16_sr"}
    second = Optimizer("adamw", params, "cpu", state_dtype="bfloat16_sr")
    second.load_state_dict(saved)
    for grads in gradients(4)[2:]:
        second.step(grads)
    assert all(np.array_equal(whole[name], params[name]) for name in whole)
    assert all(np.array_equal(one.state(name)["v"], second.state(name)["v"]) for name in whole)
    for storage in ("float32", "bfloat16"):
        other = Optimizer("adamw", parameters(), "cpu", state_dtype={"m": storage, "v": "float32"})
        other.load_state_dict(second.state_dict())
        assert np.array_equal(other.state("w")["v"], second.state("w")["v"].astype(np.float32))
        back = Optimizer("adamw", parameters(), "cpu", state_dtype="bfloat16_sr")
        back.load_state_dict(other.state_dict())
        assert np.array_equal(back.state("w")["v"], second.state("w")["v"])
    other.step(gradients(1)[0])
    back.load_state_dict(other.state_dict())
    assert np.array_equal(back.state("w")["v"], other.state("w")["v"].astype(BRAIN))


def test_bytes_are_those_of_bfloat16() -> None:
    _, optimizer = trained("cpu", "adamw")
    states = optimizer.state("w")
    assert sum(states[name].nbytes for name in "mv") == 2 * 2 * 24 * 40
    assert optimizer.storage()["w"] == {"m": "bfloat16_sr", "v": "bfloat16_sr"}


def test_a_name_for_all_leaves_what_must_be_exact() -> None:
    optimizer = Optimizer("prodigy", {"w": np.ones((8, 8), BRAIN)}, "cpu", state_dtype="bfloat16_sr")
    optimizer.step({"w": np.ones((8, 8), BRAIN)})
    assert optimizer.storage()["w"] == {"m": "bfloat16_sr", "v": "bfloat16_sr", "s": "bfloat16_sr", "x0": "float32"}
    wide = Optimizer("adamw", {"w": np.ones(8)}, "cpu", state_dtype="bfloat16_sr")
    wide.step({"w": np.ones(8)})
    assert wide.storage()["w"] == {"m": "float64", "v": "float64"}


@pytest.mark.parametrize(
    ("rule", "words", "message"),
    [
        ("prodigy", {"x0": "bfloat16_sr"}, "x0 is a copy or a mean of the parameter"),
        ("prodigy", {"d": "bfloat16_sr"}, "d is one number for the whole model"),
        ("muon", {"m": "bfloat16_sr"}, "m goes into a matrix decomposition"),
        ("shampoo", {"l": "bfloat16_sr"}, "l goes into a matrix decomposition"),
    ],
)
def test_a_state_that_must_be_exact_is_refused(rule: str, words: dict[str, str], message: str) -> None:
    with pytest.raises(HyperError, match=message):
        Optimizer(rule, {"w": np.ones((8, 8), np.float32)}, state_dtype=words)


@pytest.mark.parametrize(
    ("dtypes", "words", "message"),
    [
        ((np.float64, np.float64), {"state_dtype": {"v": "bfloat16_sr"}}, "for v computes in float32, and w is of f"),
        ((BRAIN, np.float64), {"state_dtype": "bfloat16_sr"}, "and the gradient of w is of float64"),
        ((np.float32, np.float32), {"state_dtype": {"m": "float64", "v": "bfloat16_sr"}}, "and m of w is of float64"),
        ((BRAIN, np.float64), {"weights": "split"}, "weights='split' computes in float32, and the gradient of w"),
    ],
)
def test_float64_beside_it_is_one_sentence(dtypes: Any, words: dict[str, Any], message: str) -> None:
    params = {"w": np.ones(8, dtypes[0])}
    optimizer = Optimizer("adamw", params, "cpu", **words)
    with pytest.raises(TensorError, match=message):
        optimizer.step({"w": np.ones(8, dtypes[1])})
    assert np.array_equal(params["w"], np.ones(8, dtypes[0]))


@pytest.mark.parametrize(
    ("rule", "words", "hyper", "message"),
    [
        ("adamw", {"v": "bfloat16"}, {}, "v of AdamW moves by 0.001 of the way .* spacing of bfloat16 is lost: give "),
        ("adamw", "bfloat16", {}, r"give state_dtype=\{'v': 'bfloat16_sr'\}"),
        ("adagrad", "dynamic8", {}, "s of Adagrad adds without decay, .* spacing of dynamic8 is lost"),
    ],
)
def test_a_state_that_would_stand_still_is_told(rule: str, words: Any, hyper: Any, message: str) -> None:
    params = {"w": np.ones((80, 80), np.float32)}
    optimizer = Optimizer(rule, params, "cpu", state_dtype=words, **hyper)
    with pytest.warns(RuntimeWarning, match=message) as told:
        optimizer.step({"w": np.ones((80, 80), np.float32)})
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step({"w": np.ones((80, 80), np.float32)})


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("rule", "words", "hyper"),
    [
        ("adamw", {"m": "bfloat16"}, {}),
        ("adamw", "bfloat16", {"beta2": 0.95}),
        ("adamw", "dynamic8", {}),
        ("adagrad", "bfloat16_sr", {}),
    ],
)
def test_a_state_that_moves_is_no_warning(rule: str, words: Any, hyper: Any) -> None:
    params = {"w": np.ones((80, 80), np.float32)}
    Optimizer(rule, params, "cpu", state_dtype=words, **hyper).step({"w": np.ones((80, 80), np.float32)})
    assert (params["w"] < 1).all()
