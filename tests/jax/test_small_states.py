"""States in codes under JAX: as states in floats that are rounded by the definition after every step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import rulec
import rulec.jax
import rulec.torch
from rulec.errors import HyperError, StateMismatch, TensorError
from rulec.formats import NAMES, Format, decode, encode, parse
from rulec.formats.tables import table
from rulec.functional import quantized
from rulec.jax.library import FUNCTIONS
from rulec.jax.packing import Packed
from tests.jax.narrow import drawn, same
from tests.pairs import paired

SHAPE = (72, 80)
SIZES = {"large": SHAPE, "small": (8, 16)}
PACKED = [(word, backend) for word in ("int8", "dynamic4", "bfloat16_sr") for backend in ("jax", "cpu")]
KEYS = [(name, signed) for name in NAMES for signed in (True, False)]


def form_of(name: str, signed: bool, floor: bool = False) -> Format:
    return parse(name).for_state(signed=signed, floor=floor)


def draws(seed: int, sizes: Any = SIZES) -> dict[str, Any]:
    return drawn(seed, sizes)


def encoded(form: Format, values: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    def both(values: Any) -> Any:
        coded = quantized.encode(form, values, FUNCTIONS)
        return coded.codes, coded.scales

    pair = jax.jit(both)(values)
    return np.asarray(pair[0]).reshape(form.codes_shape(values.shape)), np.asarray(pair[1]).reshape(-1)


def decoded(form: Format, pair: Any, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return np.asarray(jax.jit(lambda c, s: quantized.decode(quantized.Coded(c, s, form), shape, FUNCTIONS))(*pair))


def values_of(coded: Any, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    stored = np.asarray(coded.codes).reshape(coded.format.codes_shape(shape))
    return decode(coded.format, stored, np.asarray(coded.scales).reshape(-1), shape)


def rounded(state: Any, like: Any) -> Any:
    """A state in floats, rounded to the formats of another by the definition."""

    def one(coded: Any, array: Any) -> Any:
        if not isinstance(coded, quantized.Coded):
            return array
        return jnp.asarray(decode(coded.format, *encode(coded.format, np.asarray(array)), array.shape))

    is_coded = lambda x: isinstance(x, quantized.Coded)  # noqa: E731
    return jax.tree.map(one, like, state, is_leaf=is_coded)


# The formats


@pytest.mark.parametrize(
    ("name", "signed", "shape"), paired([pytest.param(*key) for key in KEYS], [(16, 512), (5001,)])
)
def test_codes_are_those_of_the_definition(name: str, signed: bool, shape: tuple[int, ...]) -> None:
    numbers = np.random.default_rng(3)
    form, values = form_of(name, signed, floor=True), numbers.standard_normal(shape).astype(np.float32)
    values *= np.exp(4 * numbers.standard_normal(shape)).astype(np.float32)
    values.reshape(-1)[1000:1003] = np.nan, np.inf, -np.inf
    values.reshape(-1)[2000:2002] = 3e38, -3.4e38
    values.reshape(-1)[3072:4096] = 0
    wanted, (bits, scales) = encode(form, values), encoded(form, values)
    assert bits.dtype == wanted[0].dtype
    assert np.array_equal(scales, wanted[1], equal_nan=True)
    # A code may be its neighbour where a quotient is within rounding of a threshold.
    apart = np.flatnonzero(bits != wanted[0])
    assert apart.size <= 2
    if form.bits == 8:
        assert np.all(np.abs(bits.reshape(-1)[apart].astype(int) - wanted[0].reshape(-1)[apart]) <= 1)
    # XLA may take values below 2**-126 for zero.
    values, theirs = decoded(form, wanted, shape), decode(form, *wanted, shape)
    assert np.allclose(values, theirs, rtol=0, atol=2.0**-126, equal_nan=True)
    again = encoded(form, decoded(form, (bits, scales), shape))
    assert np.array_equal(again[0], bits)
    np.testing.assert_allclose(again[1], scales, rtol=1e-6)


@pytest.mark.parametrize(("name", "signed"), KEYS)
def test_empty_blocks_and_tiny_values(name: str, signed: bool) -> None:
    form = form_of(name, signed)
    empty = encoded(form, np.zeros(SHAPE, np.float32))
    wanted = encode(form, np.zeros(SHAPE, np.float32))
    assert all(np.array_equal(ours, theirs) for ours, theirs in zip(empty, wanted, strict=True))
    assert np.all(np.abs(decoded(form, empty, SHAPE)) <= 2.0**-126)
    tiny = np.full(SHAPE, 1e-41, np.float32)
    assert np.all(np.abs(decoded(form, encoded(form, tiny), SHAPE)) <= 2.0**-126)


def test_no_positive_value_becomes_zero_under_a_floor() -> None:
    for name, signed in KEYS:
        form = form_of(name, signed, floor=True)
        values = np.full((1, form.block), 1e-20, np.float32)
        values[0, 0] = 1
        smallest = table(form)[table(form) > 0].min() * np.float32(1 / form.largest)
        np.testing.assert_allclose(decoded(form, encoded(form, values), values.shape)[0, 1:], smallest, rtol=1e-6)


# Steps


@pytest.mark.parametrize(("rule", "backend"), paired(["adamw", "lion", "lamb", "adam_mini", "amsgrad"], ["jax", "cpu"]))
def test_a_run_in_codes_is_a_run_in_floats_rounded_after_each_step(rule: str, backend: str) -> None:
    start = draws(0)
    coded = rulec.jax.init(rule, start, state_dtype="dynamic8")
    floats, steps = rulec.jax.init(rule, start), {"donate": False, "backend": backend, "lr": 0.01}
    params = [start, start]
    for seed in range(1, 4):
        params[0], coded = rulec.jax.step(rule, params[0], draws(seed), coded, **steps)
        params[1], floats = rulec.jax.step(rule, params[1], draws(seed), floats, **steps)
        floats = rounded(floats, coded)
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(coded))
    for name in SIZES:
        ours, theirs = (np.asarray(tree[name]) for tree in params)
        # The two runs are fused in other ways: a state next to a threshold may get the neighbouring code.
        assert np.mean(np.isclose(ours, theirs, rtol=1e-5, atol=1e-6)) > 0.999
        np.testing.assert_allclose(ours, theirs, atol=0.002)


def test_only_large_leaves_have_codes() -> None:
    state = rulec.jax.init("adamw", draws(0), state_dtype={"m": "int8", "v": "dynamic8"})
    m, v = state.m["large"], state.v["large"]
    assert (m.codes.dtype, m.codes.shape, m.scales.shape) == (jnp.int8, SHAPE, (180,))
    assert (m.format.key, v.format.key) == ("int8/32-signed", "dynamic8/256-unsigned-floor")
    assert v.codes.dtype == jnp.uint8
    assert state.m["small"].dtype == state.v["small"].dtype == jnp.float32


def test_a_transformation_inside_of_jit_and_a_donated_step_are_the_same() -> None:
    params, grads = draws(0), draws(1)
    tx = rulec.jax.transform("adamw", 0.01, state_dtype="int8")
    state = jax.jit(tx.init)(params)
    changes, later = jax.jit(tx.update)(grads, state, params)
    moved, stepped = rulec.jax.step(
        "adamw", params, grads, rulec.jax.init("adamw", params, state_dtype="int8"), lr=0.01
    )
    assert jax.tree.structure(state) == jax.tree.structure(later) == jax.tree.structure(stepped)
    assert np.array_equal(later.m["large"].codes, stepped.m["large"].codes)
    np.testing.assert_allclose(draws(0)["large"] + changes["large"], moved["large"], atol=1e-6)


def test_first_values_that_are_no_zeros_are_encoded() -> None:
    params = draws(0)
    state = rulec.jax.init("adagrad", params, state_dtype="dynamic8", initial=0.5)
    (field,) = (f for f in state._fields if f != "count")
    assert np.all(values_of(getattr(state, field)["large"], SHAPE) == np.float32(0.5))


# Checkpoints


def test_codes_go_from_torch_to_jax_and_back(tmp_path: Path) -> None:
    numbers, words = np.random.default_rng(5), {"m": "int8", "v": "dynamic8"}
    first, grad = (numbers.standard_normal(SHAPE).astype(np.float32) for _ in range(2))
    theirs = torch.nn.Parameter(torch.from_numpy(first.copy()))
    optimizer = rulec.torch.optimizer("adamw")([("w", theirs)], lr=0.01, state_dtype=words)
    theirs.grad = torch.from_numpy(grad)
    optimizer.step()
    rulec.torch.save(optimizer, tmp_path / "torch")
    params = {"w": jnp.asarray(theirs.detach().numpy().copy())}
    state = rulec.jax.load(tmp_path / "torch", "adamw", params, state_dtype=words)
    kept = optimizer.state[theirs]
    assert np.array_equal(state.m["w"].codes, kept["exp_avg::codes"])
    assert np.array_equal(state.v["w"].scales, kept["exp_avg_sq::scale"])
    rulec.jax.save(tmp_path / "jax", "adamw", params, state)
    rulec.torch.load(optimizer, tmp_path / "jax")
    assert np.array_equal(state.m["w"].codes, optimizer.state[theirs]["exp_avg::codes"])
    assert np.array_equal(state.v["w"].codes, optimizer.state[theirs]["exp_avg_sq::codes"])
    params, state = rulec.jax.step("adamw", params, {"w": jnp.asarray(grad)}, state, lr=0.01)
    optimizer.step()
    np.testing.assert_allclose(params["w"], theirs.detach(), atol=1e-5)


def test_a_file_in_floats_or_another_format_is_loaded_into_codes(tmp_path: Path) -> None:
    params = draws(0)
    for word in (None, "float8_e4m3", "int8"):
        state = rulec.jax.init("lion", params, state_dtype=word)
        params, state = rulec.jax.step("lion", params, draws(1), state, lr=0.01)
        rulec.jax.save(tmp_path / "file", "lion", params, state)
        loaded = rulec.jax.load(tmp_path / "file", "lion", params, state_dtype="int8").m["large"]
        before = state.m["large"]
        values = np.asarray(before) if word is None else values_of(before, SHAPE)
        assert np.array_equal(loaded.codes, encode(loaded.format, values)[0])


# Refusals


@pytest.mark.parametrize(
    ("state_dtype", "kind", "words"),
    [
        ({"x0": "int8"}, HyperError, "x0 of Prodigy cannot be int8/32"),
        ({"w": "int8"}, TensorError, "has no state 'w'"),
        ("int8/33", HyperError, "no power of two"),
    ],
)
def test_formats_that_cannot_be(state_dtype: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        rulec.jax.init("prodigy", draws(0), state_dtype=state_dtype)


@pytest.mark.parametrize(
    ("word", "backend"),
    [
        ("dynamic8", "jax"),
        *(
            pytest.param(*case, marks=pytest.mark.slow if case in PACKED[2:4] else pytest.mark.another)
            for case in PACKED
        ),
    ],
)
def test_packed_states_step_as_others_do(word: str, backend: str) -> None:
    """Of XLA's code a rule that leaves a step out, which keeps the old codes: the kernels do not know such rules."""
    rule, params = rulec.load("adamw"), draws(0)
    rule = rulec.load("skip_not_finite") >> rule if backend == "jax" else rule
    whole, packed = (rulec.jax.init(rule, params, state_dtype=word, packed=choice) for choice in (False, True))
    assert isinstance(packed.m, Packed)
    assert len(packed.m.flats) == len({str(x.dtype) for x in jax.tree.leaves(whole.m)})
    assert same(rulec.jax.unpacked(packed), whole)
    first, ours = params, packed
    for seed in (1, 2):
        skips = seed == 2 and backend == "jax"
        grads = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), params) if skips else draws(seed)
        first, ours = rulec.jax.step(rule, first, grads, ours, backend=backend, donate=False)
        params, whole = rulec.jax.step(rule, params, grads, whole, backend=backend, donate=False)
    assert isinstance(ours.m, Packed)
    assert same((first, rulec.jax.unpacked(ours)), (params, whole))


def test_a_packed_state_of_codes_is_saved_by_leaves_and_loaded_packed(tmp_path: Path) -> None:
    params, file = draws(0), tmp_path / "run.safetensors"
    state = rulec.jax.init("lion", params, state_dtype="int8", packed=True)
    rulec.jax.save(file, "lion", params, state)
    assert same(rulec.jax.load(file, "lion", params, like=state), state)


@pytest.mark.parametrize("form", ["dynamic8", "dynamic4", "int8"])
def test_states_with_flat_codes_and_scales_go_on(form: str) -> None:
    """As they were saved before codes and scales had the axes of their parameter."""
    params = {"w": jnp.arange(8192.0).reshape(16, 512) / 8192}
    state = rulec.jax.init("lion", params, state_dtype=form)
    params, state = rulec.jax.step("lion", params, params, state, lr=0.01, donate=False)
    flat = jax.tree.map(
        lambda x: quantized.Coded(x.codes.reshape(x.format.codes_shape((16, 512))), x.scales.reshape(-1), x.format),
        state.m, is_leaf=lambda x: isinstance(x, quantized.Coded),
    )  # fmt: skip
    one, other = (
        rulec.jax.step("lion", params, params, each, lr=0.01, donate=False) for each in (state, state._replace(m=flat))
    )
    assert jnp.array_equal(one[0]["w"], other[0]["w"])
    assert [x.shape for x in jax.tree.leaves(other[1].m)] == [x.shape for x in jax.tree.leaves(flat)]
    assert jnp.array_equal(one[1].m["w"].scales.reshape(-1), other[1].m["w"].scales)
    assert jnp.array_equal(one[1].m["w"].codes.reshape(-1), other[1].m["w"].codes.reshape(-1))


def test_codes_of_another_shape_are_refused() -> None:
    state = rulec.jax.init("lion", {"large": jnp.ones(5000)}, state_dtype="int8")
    other = {"large": jnp.ones(6000)}
    with pytest.raises(StateMismatch, match="codes and scales that are not of shape"):
        rulec.jax.step("lion", other, other, state)
