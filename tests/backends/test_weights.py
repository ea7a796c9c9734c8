"""Weights in 16 bits that train as in 32: every backend, against the same step in float32."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rulec
from rulec.array import Optimizer
from rulec.backend import registry
from rulec.compiler.weights import DTYPES
from rulec.errors import HyperError
from tests.backends.here import BACKENDS, BRAIN
from tests.pairs import paired

Array = np.ndarray[Any, Any]

#: `m` is the weight before the step, and the gradient is the new weight.
KEEP = rulec.parse(
    "name: Keep\nsummary: Takes the gradient for p.\nstate: {m: 0}\nstep: |\n  m = where(t > 0, p, m)\n  p = g\n"
)
FALL = rulec.parse("name: Fall\nsummary: A fixed step.\nhyper: {lr: 1e-3}\nstep: |\n  direction = g\n")


def floats(high: Array, low: Array) -> Array:
    """The float32 numbers with these halves of their bits, all with all."""
    return ((high.astype(np.uint32) << 16)[:, None] | low.astype(np.uint32)[None]).reshape(-1).view(np.float32)


def kept(backend: str, kind: str, values: Array) -> tuple[Array, Array]:
    """The weights read back after a step that stored these values, and the parameter between the two steps."""
    params = {"w": np.zeros(values.shape, BRAIN)}
    optimizer = Optimizer(KEEP, params, backend, weights=kind)
    optimizer.step({"w": values})
    stored = params["w"].astype(np.float32)
    optimizer.step({"w": np.zeros_like(values)})
    return np.array(optimizer.state("w")["m"]), stored


@pytest.mark.parametrize(("kind", "backend"), paired(["split", "master"], BACKENDS))
def test_every_float32_is_read_back_bit_for_bit(backend: str, kind: str) -> None:
    """All upper halves, with lower halves on both sides of every rounding. A NaN comes back as a NaN."""
    lows = np.array([0, 1, 2, 0x1234, 0x7FFF, 0x8000, 0x8001, 0xABCD, 0xFFFE, 0xFFFF])
    values = floats(np.arange(1 << 16), lows)
    if kind == "master":  # a parameter that is infinite counts, and a bfloat16 is from half an ulp below
        values = values[~(np.abs(values) > 3.38e38)]
    back, stored = kept(backend, kind, values)
    nan = np.isnan(values)
    assert np.isnan(back[nan]).all()
    assert np.isnan(stored[nan]).all()
    assert np.array_equal(back[~nan].view(np.uint32), values[~nan].view(np.uint32))
    with np.errstate(over="ignore", invalid="ignore"):
        nearest = values.astype(BRAIN).astype(np.float32)
    tie = (values.view(np.uint32) & 0xFFFF) == 0x8000
    assert np.array_equal(stored[~nan & ~tie], nearest[~nan & ~tie])


@pytest.mark.slow
@pytest.mark.parametrize("part", [13, *(pytest.param(i, marks=pytest.mark.whole) for i in range(32) if i != 13)])
def test_all_patterns_of_32_bits_are_read_back(part: int) -> None:
    """Each part has patterns of every sign and exponent."""
    for highs in np.split(np.arange(part, 1 << 16, 32), 8):
        values = floats(highs, np.arange(1 << 16))
        back, _ = kept("cpu", "split", values)
        nan = np.isnan(values)
        assert np.isnan(back[nan]).all()
        assert np.array_equal(back[~nan].view(np.uint32), values[~nan].view(np.uint32)), hex(highs[0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("kind", "bits"), [("split24", 16), ("kahan", 16)])
def test_a_shorter_second_part_is_rounded_to_nearest(backend: str, kind: str, bits: int) -> None:
    values = np.random.default_rng(0).standard_normal(40_000).astype(np.float32) * np.float32(1e3)
    values[:5] = [0.0, -0.0, np.inf, 1.0, -1.0]
    finite = np.isfinite(values)
    back, _ = kept(backend, kind, values)
    ulp = np.abs(values[finite]) * 2.0 ** -(bits - 1)
    assert (np.abs(back[finite] - values[finite]) <= ulp / 2).all()
    if kind == "split24":
        assert np.array_equal(back[~finite], values[~finite])


def train(backend: str, kind: str, rule: str = "adamw", dtype: Any = BRAIN, shape: tuple[int, ...] = (24, 40)) -> Any:
    """The weights after 30 small steps, and the optimizer."""
    draws = np.random.default_rng(1)
    params = {"w": draws.standard_normal(shape).astype(BRAIN).astype(dtype)}
    words = {} if dtype == np.float32 else {"weights": kind}
    optimizer = Optimizer(rule, params, backend, lr=1e-4, **words)
    for _ in range(30):
        optimizer.step({"w": draws.standard_normal(shape).astype(BRAIN)})
    return params["w"].astype(np.float32), optimizer


@pytest.mark.parametrize(("rule", "backend"), paired(["adamw", "lamb", "adafactor", "muon", "lion"], BACKENDS))
def test_a_split_weight_takes_the_steps_of_a_float32(backend: str, rule: str) -> None:
    """Bit for bit, with the states in float32 beside it; also with reductions and matrix functions."""
    exact, _ = train(backend, "", rule, np.float32)
    high, optimizer = train(backend, "split", rule)
    low = optimizer.state("w")["param::low"]
    assert low.dtype == np.int16
    assert np.array_equal((high.view(np.int32) + low.astype(np.int32)).view(np.float32), exact)
    _, twin = train(backend, "master", rule)
    assert np.array_equal(twin.state("w")["param::master"], exact)


def test_plain_weights_lose_what_the_kinds_keep() -> None:
    """The distance from the way of float32, in units of the way: each kind as its precision has it."""
    exact, _ = train("cpu", "", "adamw", np.float32)
    start = np.random.default_rng(1).standard_normal((24, 40)).astype(BRAIN).astype(np.float32)
    way = np.linalg.norm(exact - start)

    def distance(kind: str) -> float:
        weights, optimizer = train("cpu", kind)
        if kind == "kahan":
            weights = weights + optimizer.state("w")["param::lost"].astype(np.float32)
        if kind == "split24":
            low = 256 * optimizer.state("w")["param::low8"].astype(np.int32)
            weights = (weights.view(np.int32) + low).view(np.float32)
        return float(np.linalg.norm(weights - exact) / way)

    assert distance("") > 0.5
    assert distance("kahan") < 0.02
    assert distance("split24") < 0.1


@pytest.mark.parametrize("backend", BACKENDS)
def test_stochastic_rounding_is_right_in_the_mean(backend: str) -> None:
    """A step of an eighth of an ulp: its mean over the elements within four sigma; neighbours are the only values."""
    shape = (3, 64, 100)
    params = {"w": np.ones(shape, BRAIN)}
    optimizer = Optimizer(FALL, params, backend, weights="stochastic", lr=2.0**-10, seed=5)
    optimizer.step({"w": np.full(shape, -1, np.float32)})
    moved = (params["w"].astype(np.float32) - 1) * 2**7
    assert set(np.unique(moved)) == {0.0, 1.0}
    share, count = 1 / 8, moved.size
    assert abs(moved.mean() - share) < 4 * np.sqrt(share * (1 - share) / count)
    assert not np.array_equal(moved[0], moved[1])  # every matrix of a batch has numbers of its own
    long = {"w": np.ones(2000, BRAIN)}
    walk = Optimizer(FALL, long, backend, weights="stochastic", lr=2.0**-12)
    for _ in range(64):
        walk.step({"w": np.full(2000, -1, np.float32)})
    assert abs(long["w"].astype(np.float32).mean() - (1 + 64 * 2.0**-12)) < 4 * 2.0**-7 * np.sqrt(64 / 32 / 2000)


def test_stochastic_rounding_has_the_same_bits_in_every_backend() -> None:
    weights = [
        train(name, "stochastic")[0] for name in ("numpy", "c", "cpu") if not registry.get(name).unavailable_reason()
    ]
    assert all(np.array_equal(weights[0], other) for other in weights[1:])


@pytest.mark.parametrize("kind", DTYPES)
def test_infinity_and_nan_stay(kind: str) -> None:
    values = np.array([np.inf, -np.inf, np.nan, 3e38, -3e38, 0.0, -0.0, 1e-45], np.float32)
    params = {"w": np.zeros(8, BRAIN)}
    Optimizer(KEEP, params, "cpu", weights=kind).step({"w": values})
    stored = params["w"].astype(np.float32)
    assert np.array_equal(stored[:3], values[:3], equal_nan=True)
    assert np.allclose(stored[3:5], values[3:5], rtol=2.0**-7)
    assert not stored[5:].any()


def test_a_weight_that_someone_else_writes_counts() -> None:
    """As after loading the model's own checkpoint: the master copy follows."""
    params = {"w": np.ones(64, BRAIN)}
    optimizer = Optimizer(FALL, params, "cpu", weights="master")
    optimizer.step({"w": np.ones(64, np.float32)})
    params["w"][...] = 5
    optimizer.step({"w": np.ones(64, np.float32)})
    assert np.allclose(optimizer.state("w")["param::master"], 5 - 1e-3, rtol=1e-6)


def test_a_float16_weight_has_a_master_copy() -> None:
    params = {"w": np.ones(64, np.float16)}
    optimizer = Optimizer(FALL, params, "cpu", weights="master", lr=1e-5)
    for _ in range(100):
        optimizer.step({"w": np.ones(64, np.float32)})
    assert np.allclose(optimizer.state("w")["param::master"], 1 - 1e-3, rtol=1e-5)
    assert np.array_equal(params["w"], np.full(64, 1 - 1e-3, np.float16))


def test_an_empty_weight_is_no_error() -> None:
    for kind in DTYPES:
        optimizer = Optimizer(FALL, {"w": np.ones((0, 3), BRAIN)}, "cpu", weights=kind)
        optimizer.step({"w": np.ones((0, 3), np.float32)})
        assert {np.shape(state) for state in optimizer.state("w").values()} <= {(), (0, 3)}


@pytest.mark.parametrize(
    ("words", "dtype", "message"),
    [
        ({"weights": "splt"}, BRAIN, "none of split, .*did you mean 'split'"),
        ({"weights": "split"}, np.float32, "is for parameters of bfloat16, and these are of float32"),
        ({"weights": "kahan"}, np.float16, "is for parameters of bfloat16, and these are of float16"),
        ({"weights": "split", "state_dtype": "float64"}, BRAIN, "computes in float32"),
    ],
)
def test_a_kind_that_cannot_be_is_one_sentence(words: dict[str, str], dtype: Any, message: str) -> None:
    with pytest.raises(HyperError, match=message):
        Optimizer("adamw", {"w": np.ones(8, dtype)}, **words)
