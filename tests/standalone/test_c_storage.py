"""States in codes and weights of sixteen bits in the C that `rulec build` writes, against the numpy backend."""

from __future__ import annotations

import runpy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rulec
import rulec.array
from rulec.array.arrays import numpy_dtype
from rulec.errors import HyperError, TensorError
from rulec.runtime.storage.options import Storage
from rulec.standalone.cases import CannotBuild
from rulec.standalone.prose import written
from tests.pairs import paired
from tests.standalone.c_library import CRule, CRun, drawn
from tests.standalone.test_c import FAST

#: Blocks that end in the middle of a tensor, an odd number of codes, and several chunks.
SHAPES = ((4096 + 5,), (65, 127))

WORDS: tuple[tuple[str, str | Mapping[str, str]], ...] = (
    ("adamw", "dynamic8"), ("adamw", "dynamic4"), ("adamw", "softsign8"), ("adamw", "float8_e4m3"),
    ("adamw", {"m": "int8", "v": "dynamic8/64"}), ("adamw", {"v": "int8/4096"}),
    ("adamw", {"": "bfloat16", "v": "int8"}),
    ("lion", "int8"), ("lion", "float8_e5m2"), ("momentum", "dynamic4"), ("rmsprop", "dynamic8"),
)  # fmt: skip


def text_of(word: Any) -> str:
    return ",".join(f"{k}={v}" for k, v in word.items()).replace("/", "_") if isinstance(word, Mapping) else str(word)


def alike(run: CRun, params: Sequence[Any], optimizer: Any) -> None:
    """The parameters and all states have the same bits; a state's bytes lie in the block somewhere."""
    for array, block, param, key in zip(run.arrays, run.states, params, optimizer.names, strict=True):
        assert array.tobytes() == param.tobytes()
        for name, state in optimizer.state(key).items():
            if name != "step":
                assert np.asarray(state).tobytes() in block.tobytes(), name


def check_compared(rule: rulec.Rule, crule: CRule, steps: int = 4, **keywords: Any) -> None:
    params, grads = drawn(3, SHAPES, steps)
    arrays = [p.astype(numpy_dtype(crule.dtype)) for p in params]
    run = CRun(crule, arrays, seed=keywords.get("seed", 0))
    twins = [a.copy() for a in arrays]
    optimizer = rulec.array.Optimizer(rule, twins, backend="numpy", **keywords)
    for number, each in enumerate(grads):
        # Magnitudes of a tensor differ by powers of ten, and one block of it has no gradient.
        given = [g * np.logspace(-4, 0, g.size).reshape(g.shape) for g in each]
        for g in given:
            g.reshape(-1)[512:1024] = 0
        rounded = [g.astype(numpy_dtype(crule.dtype)) for g in given]
        run.step(rounded)
        optimizer.step(rounded)
        if number == 0:
            alike(run, twins, optimizer)
    alike(run, twins, optimizer)


@pytest.mark.parametrize(("name", "word"), WORDS, ids=lambda x: text_of(x))
def test_steps_in_codes_have_the_bits_of_the_definition(name: str, word: Any, tmp_path: Path) -> None:
    rule = rulec.load(name)
    check_compared(rule, CRule(rule, tmp_path, "float32", word), state_dtype=word)


@pytest.mark.parametrize(("kind", "word"), paired(["split", "split24", "master", "kahan"], ["", "dynamic8"]))
def test_weights_of_sixteen_bits_have_the_bits_of_the_definition(kind: str, word: str, tmp_path: Path) -> None:
    rule = rulec.load("adamw")
    crule = CRule(rule, tmp_path, "bfloat16", word, weights=kind)
    check_compared(rule, crule, weights=kind, **({"state_dtype": word} if word else {}))


@pytest.mark.parametrize(
    ("name", "dtype", "kind", "word"),
    [
        ("adamw", "bfloat16", "stochastic", ""), ("adamw", "float32", "", "bfloat16_sr"),
        ("adagrad", "bfloat16", "split", {"": "bfloat16_sr"}),
        ("adamw", "bfloat16", "stochastic", {"m": "dynamic8", "v": "bfloat16_sr"}),
        ("adamw", "bfloat16", "stochastic", "dynamic4"),
    ],
    ids=lambda x: text_of(x),
)  # fmt: skip
@pytest.mark.parametrize("flags", [(), FAST], ids=["plain", "fast"])
def test_numbers_rounded_at_random_have_the_bits_of_the_definition(
    name: str, dtype: str, kind: str, word: Any, flags: Sequence[str], tmp_path: Path
) -> None:
    """Whatever the threads, of tensors with numbers of their own, from a seed of more than 16 bits."""
    rule = rulec.load(name)
    crule = CRule(rule, tmp_path, dtype, word, "-fopenmp", *flags, weights=kind)
    check_compared(rule, crule, weights=kind, seed=123456789, **({"state_dtype": word} if word else {}))


@pytest.mark.parametrize("name", ["adafactor", "came"])
def test_rows_and_columns_rounded_at_random(name: str, tmp_path: Path) -> None:
    """Sums are in another order, so that a number may be rounded the other way here and there."""
    rule, (params, grads) = rulec.load(name), drawn(5, ((65, 127),), 3)
    run = CRun(CRule(rule, tmp_path, "float32", "bfloat16_sr"), params, seed=7)
    twins = [np.array(p, np.float32) for p in params]
    optimizer = rulec.array.Optimizer(rule, twins, backend="numpy", state_dtype="bfloat16_sr", seed=7)
    plain = [np.array(p, np.float32) for p in params]
    other = rulec.array.Optimizer(rule, plain, backend="numpy", state_dtype="bfloat16_sr", seed=8)
    for each in grads:
        rounded = [g.astype(np.float32) for g in each]
        run.step(rounded)
        optimizer.step(rounded)
        other.step(rounded)
    assert np.abs(run.arrays[0] - twins[0]).mean() < 0.02 * np.abs(plain[0] - twins[0]).mean()


def test_stages_of_rows_and_columns_have_values_of_codes(tmp_path: Path) -> None:
    """Greatest numbers of rows and columns have the same bits in every order; the last tensor is a column of codes."""
    rule = rulec.load("sm3")
    word = {"m": "dynamic4"}
    check_compared(rule, CRule(rule, tmp_path, "float32", word, "-fopenmp", *FAST), state_dtype=word)


@pytest.mark.parametrize("name", [pytest.param("came", marks=pytest.mark.slow), "adam_mini"])
def test_sums_of_rows_of_codes(name: str, tmp_path: Path) -> None:
    """Sums are in another order, so a code may be the next one here and there."""
    rule, (params, grads) = rulec.load(name), drawn(5, ((65, 127),), 3)
    run = CRun(CRule(rule, tmp_path, "float32", "dynamic8", "-fopenmp"), params)
    ours, floats = ([np.array(p, np.float32) for p in params] for _ in range(2))
    optimizers = [
        rulec.array.Optimizer(rule, arrays, backend="numpy", state_dtype=word)
        for arrays, word in ((ours, "dynamic8"), (floats, "float32"))
    ]
    for each in grads:
        rounded = [g.astype(np.float32) for g in each]
        run.step(rounded)
        for optimizer in optimizers:
            optimizer.step(rounded)
    off = np.abs(run.arrays[0] - ours[0]).mean()
    assert off < 1e-3 * np.abs(floats[0] - ours[0]).mean()


def test_a_master_copy_of_float16(tmp_path: Path) -> None:
    rule = rulec.load("lion")
    check_compared(
        rule, CRule(rule, tmp_path, "float16", "int8", weights="master"), weights="master", state_dtype="int8"
    )


def test_the_header_tells_of_the_storage() -> None:
    header = written(rulec.load("adamw"), "c", dtype="bfloat16", storage=Storage({"v": "dynamic4"}, "split"))["adamw.h"]
    assert "v dynamic4/128" in header
    assert "Weights are stored as split" in header


def test_fortran_and_julia_take_the_seed_and_the_number_of_a_tensor() -> None:
    files = written(rulec.load("adamw"), "c", dtype="bfloat16", storage=Storage(weights="stochastic"))
    assert "Rounded up or down at random: param." in files["adamw.h"]
    assert "adamw_init(state, param, count, NULL, seed, number)" in files["adamw.h"]
    assert "integer(c_int64_t), value :: seed" in files["adamw.f90"]
    assert "function init(param::AbstractArray, rule::Rule, seed::Integer, number::Integer)" in files["adamw.jl"]


def test_what_the_manual_says_to_compile_with_changes_no_bit(tmp_path: Path) -> None:
    rule, word = rulec.load("adamw"), {"m": "int8", "v": "dynamic8"}
    check_compared(
        rule, CRule(rule, tmp_path, "bfloat16", word, *FAST, weights="split"), state_dtype=word, weights="split"
    )


def test_a_value_that_is_not_finite_takes_its_block_alone(tmp_path: Path) -> None:
    rule = rulec.load("lion")
    run = CRun(CRule(rule, tmp_path, "float32", "dynamic8"), [np.ones(4096, np.float32)])
    grad = np.ones(4096, np.float32)
    grad[300] = np.inf
    run.step([grad])
    run.step([np.ones(4096, np.float32)])
    assert np.isnan(run.arrays[0][256:512]).all()
    assert np.isfinite(np.delete(run.arrays[0], np.arange(256, 512))).all()


@pytest.mark.parametrize(
    ("name", "dtype", "kind"),
    [
        ("lamb", "float32", ""), ("clip_by_norm >> adamw", "float32", ""), ("schedule_free(adam)", "float32", ""),
        ("schedule_free(adam)", "bfloat16", "split"),
    ],
)  # fmt: skip
def test_sums_and_points_of_evaluation(name: str, dtype: str, kind: str, tmp_path: Path) -> None:
    """Sums are in another order, so a code may be the next one here and there."""
    rule, (params, grads) = rulec.load(name), drawn(5, SHAPES, 2)
    crule, own = CRule(rule, tmp_path, dtype, "dynamic8", "-fopenmp", weights=kind), numpy_dtype(dtype)
    arrays = [p.astype(own) for p in params]
    run = CRun(crule, arrays)
    twins, options = [a.copy() for a in arrays], {"state_dtype": "dynamic8", "weights": kind or None}
    optimizers: list[Any] = [rulec.array.Optimizer(rule, [a], backend="numpy", **options) for a in twins]
    for each in grads:
        rounded = [g.astype(own) for g in each]
        run.step(rounded)
        for optimizer, grad in zip(optimizers, rounded, strict=True):
            optimizer.step([grad])
    if rule.evaluate is not None:
        run.move("to_evaluation")
        for optimizer in optimizers:
            optimizer.eval()
    for ours, theirs, before in zip(run.arrays, twins, arrays, strict=True):
        ours, theirs, before = (x.astype(np.float64) for x in (ours, theirs, before))
        assert np.abs(ours - theirs).mean() <= 1e-4 * np.abs(theirs - before).mean()


@pytest.mark.parametrize(
    "pair",
    [
        ({"word": "dynamic8"}, {"word": "float8_e4m3"}), ({"word": {"v": "int8"}}, {"word": {"v": "softsign8/256"}}),
        ({"kind": "split"}, {"kind": "kahan"}),
    ],
)  # fmt: skip
def test_a_block_of_another_storage_is_refused(pair: Sequence[Mapping[str, Any]], tmp_path: Path) -> None:
    rule, runs = rulec.load("adamw"), []
    for number, each in enumerate(pair):
        folder = tmp_path / str(number)
        folder.mkdir()
        crule = CRule(rule, folder, "bfloat16", each.get("word", ""), weights=each.get("kind", ""))
        runs.append(CRun(crule, [np.ones(5000, numpy_dtype("bfloat16"))]))
    with pytest.raises(AssertionError, match="was not initialised"):
        CRun.step(_with_states(*runs), [np.ones(5000, np.float32)])


def _with_states(run: CRun, other: CRun) -> CRun:
    run.states = [block.copy() for block in other.states]
    return run


@pytest.mark.parametrize(
    ("name", "storage", "kind", "words"),
    [
        ("adamw", Storage({"w": "dynamic8"}), TensorError, "no state 'w'"),
        ("adamw", Storage({"v": "int7"}), TensorError, "int7"),
        ("prodigy", Storage({"x0": "int8"}), HyperError, "x0"),
        ("adamw", Storage(weights="splitt"), HyperError, "splitt"),
        ("transforms/orthogonalize", Storage(), CannotBuild, "reads the gradient in bfloat16"),
    ],
)
def test_storages_that_cannot_be_are_refused_by_name(name: str, storage: Storage, kind: Any, words: str) -> None:
    with pytest.raises(kind, match=words):
        written(rulec.load(name), "c", dtype="bfloat16", storage=storage)


BEGUN = """
name: Begun
hyper: {lr: 0.1, a: 0.5}
state: {m: a}
step: |
  m = 0.5*m + g
  direction = m
"""


def test_codes_begin_with_a_hyper_parameter_in_c(tmp_path: Path) -> None:
    rule = rulec.parse(BEGUN)
    check_compared(rule, CRule(rule, tmp_path, "float32", {"m": "dynamic4"}), state_dtype={"m": "dynamic4"})


@pytest.mark.parametrize("backend", ["triton", "cupy"])
def test_codes_that_begin_with_more_than_a_number_are_refused_for_gpus(backend: str) -> None:
    with pytest.raises(CannotBuild, match="more than a number"):
        written(rulec.parse(BEGUN), backend, storage=Storage({"m": "int8"}))


def test_codes_begin_with_a_hyper_parameter_in_numpy(tmp_path: Path) -> None:
    ((name, text),) = written(rulec.parse(BEGUN), "numpy", storage=Storage({"m": "dynamic4"})).items()
    (tmp_path / name).write_text(text)
    kind = runpy.run_path(str(tmp_path / name))["Begun"]
    gradient = np.random.default_rng(4).standard_normal(5001).astype(np.float32)
    ours, theirs = np.ones(5001, np.float32), np.ones(5001, np.float32)
    optimizer = kind([ours], a=-0.25)
    reference = rulec.array.Optimizer(
        rulec.parse(BEGUN), [theirs], backend="numpy", state_dtype={"m": "dynamic4"}, a=-0.25
    )
    for _ in range(2):
        optimizer.step([gradient])
        reference.step([gradient])
    assert ours.tobytes() == theirs.tobytes()
    assert optimizer.states[0]["m"].tobytes() == reference.state(reference.names[0])["m"].tobytes()
