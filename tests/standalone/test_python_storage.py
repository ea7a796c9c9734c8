"""Files of their own for Python libraries with states in codes, weights in parts, and numbers rounded at random."""

from __future__ import annotations

import runpy
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import rulec
import rulec.array
from rulec.array.arrays import numpy_dtype
from rulec.formats import Format, decode, encode, parse
from rulec.functional import quantized as codes_of_jax
from rulec.jax.library import FUNCTIONS
from rulec.runtime.storage.options import Storage
from rulec.standalone.cases import CannotBuild
from rulec.standalone.prose import written
from rulec_backends.common.array_codes import code_functions
from tests.standalone.c_library import drawn
from tests.standalone.one_file import STAND_IN, Array, Case, check_ran

#: Parameters of sixteen bits come as their bits; the states are left beside the parameters.
TORCH = """
import copy
import inspect
import numpy as np
import torch
import rule
kind = next(v for v in vars(rule).values() if isinstance(v, type) and issubclass(v, torch.optim.Optimizer))


def tensor(array):
    tensor = torch.from_numpy(array.copy())
    return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor


tensors = [torch.nn.Parameter(tensor(p)) for p in params]
optimizer = kind(tensors, **{"seed": 123456789} if "seed" in inspect.signature(kind).parameters else {})
for number, grads in enumerate(steps):
    for parameter, grad in zip(tensors, grads, strict=True):
        parameter.grad = tensor(grad)
    if number == 1:
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer = kind(tensors)
        optimizer.load_state_dict(saved)
    optimizer.step()
arrays = [t.detach() for t in tensors]
arrays += [optimizer.state[t][name] for t in tensors for name in sorted(optimizer.state[t]) if name != "step"]
leave([(a.view(torch.uint16) if a.dtype is torch.bfloat16 else a).numpy() for a in arrays])
"""

NUMPY = """
import inspect
import rule
kind = next(v for v in vars(rule).values() if isinstance(v, type) and v.__module__ == "rule")
params = [p.copy() for p in params]
optimizer = kind(params, **{"seed": 123456789} if "seed" in inspect.signature(kind).parameters else {})
for grads in steps:
    optimizer.step(grads)
leave(params + [s[name] for s in optimizer.states for name in sorted(s) if name != "step"])
"""

JAX = """
import inspect
import jax
import jax.numpy as jnp
import numpy as np
import optax
import rule


def array(bits):
    return jnp.asarray(bits).view(jnp.bfloat16) if bits.dtype == np.uint16 else jnp.asarray(bits)


keywords = {"seed": 123456789} if "seed" in inspect.signature(rule.rule).parameters else {}
init, update = rule.rule(**keywords)
params = [array(p) for p in params]
state = init(params)


@jax.jit
def step(params, state, grads):
    updates, state = update(grads, state, params)
    return optax.apply_updates(params, updates), state


for grads in steps:
    params, state = step(params, state, [array(g) for g in grads])
names = [name for name in sorted(state._fields) if name != "step"]
every = [*params, *(getattr(state, name)[i] for i in range(len(params)) for name in names)]
leave([a.view(jnp.uint16) if a.dtype == jnp.bfloat16 else a for a in every])
"""

CUPY = """
import inspect
import sys
import cuda_stand_in
sys.modules["cupy"] = cuda_stand_in.CUPY
import cupy
import rule
kind = next(v for v in vars(rule).values() if isinstance(v, type) and v.__module__ == "rule")
arrays = [cupy.asarray(p) for p in params]
optimizer = kind(arrays, **{"seed": 123456789} if "seed" in inspect.signature(kind).parameters else {})
for grads in steps:
    optimizer.step([cupy.asarray(g) for g in grads])
leave([a.get() for a in arrays + [s[name] for s in optimizer.states for name in sorted(s) if name != "step"]])
"""

PROGRAMS = {"numpy": NUMPY, "jax": JAX, "triton": TORCH, "cupy": CUPY}

#: A rule, the dtype of parameters, the words of states, and the kind of weights.
CASES = (
    ("adamw", "float32", {"": "dynamic8"}, ""), ("adamw", "float32", {"m": "int8", "v": "dynamic8/64"}, ""),
    ("adamw", "float32", {"m": "dynamic4", "v": "softsign8"}, ""), ("lion", "float32", {"": "float8_e4m3/1024"}, ""),
    ("adamw", "bfloat16", {"": "dynamic8"}, "split"), ("lion", "bfloat16", {}, "master"),
    ("lion", "bfloat16", {}, "kahan"), ("adamw", "bfloat16", {}, "stochastic"),
    ("adamw", "float32", {"": "bfloat16_sr"}, ""),
    ("adamw", "bfloat16", {"m": "dynamic8", "v": "bfloat16_sr"}, "stochastic"),
)  # fmt: skip

#: What NumPy and JAX have beyond.
OTHERS = (
    ("adamw", "float32", {"m": "softsign8/8", "v": "float8_e5m2"}, ""), ("adamw", "float16", {}, "master"),
    ("lion", "bfloat16", {"": "int8"}, "split24"), ("adamw", "bfloat16", {}, ""), ("lion", "float16", {}, ""),
)  # fmt: skip


#: Arithmetic in float64 beside codes, and states of composed rules.
WIDE = (
    ("adamw", "float64", {"": "dynamic8"}, ""), ("lookahead(adam, k=2)", "float32", {"": "softsign8"}, ""),
    ("clip_by_value >> adan", "bfloat16", {"": "bfloat16_sr"}, "kahan"),
)  # fmt: skip


def prepared(cases: Sequence[tuple[str, str, dict[str, str], str]]) -> tuple[list[Case], list[list[Array]]]:
    """The cases, and the parameters and states of each after three steps by the numpy backend."""
    params, grads = drawn(3, ((4096 + 5,), (65, 127)), 3)
    runs, wanted = [], []
    for name, dtype, words, kind in cases:
        arrays = [p.astype(numpy_dtype(dtype)) for p in params]
        steps = [[g.astype(numpy_dtype(dtype)) for g in each] for each in grads]
        bits = [[a.view(np.uint16) for a in x] for x in (arrays, *steps)] if dtype == "bfloat16" else [arrays, *steps]
        copies = [[a.copy() for a in x] for x in bits]
        runs.append(Case(name, copies[0], copies[1:], dtype, storage=Storage(words, kind)))
        options: dict[str, Any] = {"state_dtype": words or None, "weights": kind or None, "seed": 123456789}
        optimizer = rulec.array.Optimizer(rulec.load(name), arrays, backend="numpy", **options)
        for each in steps:
            optimizer.step(each)
        states = [optimizer.state(key) for key in optimizer.names]
        wanted.append([*arrays, *(np.asarray(s[n]) for s in states for n in sorted(s) if n != "step")])
    return runs, wanted


def test_files_for_numpy_have_the_bits_of_the_definition(tmp_path: Path) -> None:
    check_bits(tmp_path, "numpy", [CASES[1], CASES[9]])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "cases"),
    [("numpy", (*CASES, *OTHERS, *WIDE)), ("triton", (*CASES, *WIDE)), ("cupy", (*CASES, *OTHERS, *WIDE))],
)
def test_every_storage_has_the_bits_of_the_definition(
    backend: str, cases: Sequence[tuple[str, str, dict[str, str], str]], tmp_path: Path
) -> None:
    check_bits(tmp_path, backend, cases)


def check_bits(folder: Path, backend: str, cases: Sequence[tuple[str, str, dict[str, str], str]]) -> None:
    """Parameters and states of written files are those of the numpy backend, bit for bit."""
    if backend == "cupy":
        for name in STAND_IN:
            shutil.copy(Path(__file__).parents[1] / "backends" / name, folder)
    runs, wanted = prepared(cases)
    for case, arrays, expected in zip(cases, check_ran(folder, backend, PROGRAMS[backend], *runs), wanted, strict=True):
        assert [x.tobytes() for x in arrays] == [x.tobytes() for x in expected], case


#: The largest share of codes and low places that may differ where XLA joins a product with a sum, and by how many.
NEAR = {"uint8": (0.002, 16), "int8": (0.002, 1), "int16": (0.05, 256)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(CASES[::4], id="some"),
        # Updates of plain weights in 16 bits are rounded themselves.
        pytest.param(
            (*CASES[1::4], *CASES[2::4], *CASES[3::4], *OTHERS[:-2], *WIDE), marks=pytest.mark.whole, id="rest"
        ),
    ],
)
def test_files_for_jax_have_them_but_where_xla_rounds_in_other_ways(
    cases: Sequence[tuple[str, str, dict[str, str], str]], tmp_path: Path
) -> None:
    runs, wanted = prepared(cases)
    for case, arrays, expected in zip(cases, check_ran(tmp_path, "jax", JAX, *runs), wanted, strict=True):
        assert len(arrays) == len(expected)
        for x, y in zip(arrays, expected, strict=True):
            if y.dtype.name not in NEAR:
                check_near(x.view(y.dtype), y, str(case))
                continue
            share, units = NEAR[y.dtype.name]
            apart = np.abs(x.astype(int) - y.astype(int))
            assert (apart > 0).mean() <= share, case
            assert apart.max() <= units, case


def check_near(x: Array, y: Array, case: str) -> None:
    """Floats differ by units of their last places; of 16 bits, few differ at all."""
    narrow = y.dtype.itemsize == 2
    x, y = x.astype(np.float64), y.astype(np.float64)
    assert not narrow or (x != y).mean() <= 0.002, case
    np.testing.assert_allclose(x, y, rtol=2.0**-7 if narrow else 1e-5, atol=1e-6 * np.abs(y).max(), err_msg=case)


#: A file for JAX, a rule, and parameters that fall below 2**-16 of themselves: no float32 change leads to each.
FALLING = """
import jax
import jax.numpy as jnp
import optax
import rule
init, update = rule.rule(lr=1.0)
params = {"w": jnp.asarray([1.0, -3.0, 100.0, 1e30], jnp.bfloat16)}
state = init(params)
grads = {"w": params["w"] - jnp.asarray([1e-9, -1e-12, 0.0, 1e10], jnp.bfloat16)}
updates, state = update(grads, state, params)
after = optax.apply_updates(params, updates)
weight = after["w"].astype(jnp.float32).view(jnp.int32) + state.param__low["w"].astype(jnp.int32)
old = params["w"].astype(jnp.float32)
new = (old - grads["w"].astype(jnp.float32))
assert (jnp.abs(weight.view(jnp.float32) - new) <= 2.0**-23 * jnp.abs(old)).all(), (weight.view(jnp.float32), new)
try:
    update(grads, state, {"w": params["w"].astype(jnp.float32)})
    raise AssertionError("taken")
except TypeError as error:
    assert "a parameter is float32, and was bfloat16: add updates with optax.apply_updates" in str(error), error
leave([])
"""


@pytest.mark.slow
def test_weights_of_jax_follow_what_users_add(tmp_path: Path) -> None:
    check_ran(tmp_path, "jax", FALLING, Case("sgd", [], [], "bfloat16", storage=Storage({}, "split")))


HARD = (
    "zeros", "one", "nan", "infinity", "subnormal", "largest", "negative", "powers", "odd", "empty", "number",
)  # fmt: skip


def hard(name: str, block: int) -> Array:
    """float32 values that formats treat in ways of their own."""
    rng = np.random.default_rng(5)
    usual = rng.standard_normal(3 * block + 5)
    values = {
        "zeros": np.zeros(block), "one": np.where(np.arange(block) == 3, 1.0, -0.0), "odd": usual[: block + 1],
        "nan": np.where(np.arange(usual.size) == block + 1, np.nan, usual), "empty": usual[:0],
        "infinity": np.where(np.arange(usual.size) == 2, -np.inf, usual), "subnormal": usual * 2.0**-130,
        "largest": usual / np.abs(usual).max() * 3.4028234e38, "negative": -np.abs(usual),
        "powers": usual * 10.0 ** -rng.integers(0, 9, usual.size), "number": np.array(0.3),
    }  # fmt: skip
    return values[name].astype(np.float32)


FORMATS = [
    parse(name).for_state(signed=signed, floor=floor)
    for name in ("int8", "softsign8", "dynamic8/64", "dynamic4", "float8_e4m3", "float8_e5m2")
    for signed, floor in ((True, False), (False, True))
]


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.key)
def test_printed_functions_of_numpy_are_the_definition(form: Format, tmp_path: Path) -> None:
    lines = ["import math", "import numpy as np", *code_functions("m", form, "np", flushes=False)]
    names = run("\n".join(lines), tmp_path)
    for name in HARD:
        values = hard(name, form.block)
        with np.errstate(all="ignore"):
            codes, scales = names["encode_m"](values)
            expected, of_blocks = encode(form, values)
            assert (codes.dtype, codes.shape, codes.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())
            assert scales.tobytes() == of_blocks.tobytes()
            back = names["decode_m"](codes, scales, values.shape)
            assert back.tobytes() == decode(form, codes, scales, values.shape).tobytes()
            assert (back.dtype, back.shape) == (np.float32, values.shape)


#: Of a byte for each number, and of half a byte with a floor.
OFTEN = ("int8/32-signed", "dynamic4/128-unsigned-floor")


@pytest.mark.slow
@pytest.mark.parametrize(
    "form", [pytest.param(f, marks=() if f.key in OFTEN else pytest.mark.whole, id=f.key) for f in FORMATS]
)
def test_printed_functions_of_jax_are_those_of_rulecs_steps(form: Format, tmp_path: Path) -> None:
    lines = ["import math", "import numpy as np", "import jax.numpy as jnp"]
    names = run("\n".join([*lines, *code_functions("m", form, "jnp", flushes=True)]), tmp_path)
    for name in HARD:
        values = jnp.asarray(hard(name, form.block))
        codes, scales = names["encode_m"](values)
        expected = codes_of_jax.encode(form, values, FUNCTIONS)
        assert codes.dtype == expected.codes.dtype
        wanted = np.array(expected.codes)
        if form.bits == 4 and values.size % 2:
            wanted[-1] &= 0xF0  # the half after the last code, which the definition has as 0
        np.testing.assert_array_equal(codes, wanted)
        np.testing.assert_array_equal(scales, expected.scales)
        back = names["decode_m"](codes, scales, values.shape)
        np.testing.assert_array_equal(back, codes_of_jax.decode(expected, values.shape, FUNCTIONS))


def test_a_file_for_numpy_takes_the_bits_or_the_arrays_of_ml_dtypes(tmp_path: Path) -> None:
    kind = class_of("lion", "bfloat16", Storage({}, "split"), tmp_path)
    weights = np.linspace(-2, 2, 40, dtype=np.float32).reshape(5, 8).astype(ml_dtypes.bfloat16)
    gradient = np.ones((5, 8), ml_dtypes.bfloat16)
    bits = weights.view(np.uint16).copy()
    one, other = kind([weights]), kind([bits])
    for _ in range(3):
        one.step([gradient])
        other.step([gradient.view(np.uint16)])
    assert weights.tobytes() == bits.tobytes()
    assert one.states[0]["param::low"].any()
    with pytest.raises(TypeError, match="a gradient is float32, and this file is for bfloat16"):
        one.step([np.ones((5, 8), np.float32)])
    with pytest.raises(TypeError, match="a parameter is float64, and this file is for bfloat16"):
        kind([np.ones(3)])


def test_a_file_for_numpy_rounds_numbers_that_are_not_finite(tmp_path: Path) -> None:
    kind = class_of("sgd", "bfloat16", Storage({}, "stochastic"), tmp_path)
    weights = np.array([1.0, np.nan, np.inf, -np.inf, 3e38], ml_dtypes.bfloat16)
    kind([weights], lr=1.0, seed=3).step([np.array([0, 0, 0, 0, -3e38], ml_dtypes.bfloat16)])
    np.testing.assert_array_equal(weights.astype(float), [1.0, np.nan, np.inf, -np.inf, np.inf])
    with pytest.raises(ValueError, match=r"seed=-1 must be a whole number from 0 to 2\*\*32 - 1"):
        kind([weights], seed=-1)


def class_of(rule: str, dtype: str, storage: Storage, folder: Path) -> Any:
    """The class of a file for NumPy."""
    ((_, text),) = written(rulec.load(rule), "numpy", name="mine", dtype=dtype, storage=storage).items()
    return run(text, folder)["Mine"]


def run(text: str, folder: Path) -> dict[str, Any]:
    """The names of a module with this text."""
    (folder / "mine.py").write_text(text)
    return runpy.run_path(str(folder / "mine.py"))


@pytest.mark.parametrize("backend", ["numpy", "jax"])
def test_files_with_storage_are_tidy(backend: str) -> None:
    for rule, dtype, words, kind in (*CASES, *OTHERS):
        ((_, text),) = written(rulec.load(rule), backend, dtype=dtype, storage=Storage(words, kind)).items()
        compile(text, "rule.py", "exec")
        assert not [line for line in text.splitlines() if line != line.rstrip() or "\t" in line]
        assert "rulec." not in text
        assert ("seed" in text.partition("import")[2]) == Storage(words, kind).random
        states = {"adamw": ["m", "v"], "lion": ["m"]}[rule] if "" in words else [*words]
        coded = [state for state in states if words.get(state, words.get("")) not in ("bfloat16_sr", None)]
        assert text.count("def encode_") == text.count("def decode_") == len(coded)


def test_a_file_for_torch_has_the_formats_functions_and_tables() -> None:
    storage = Storage({"m": "int8", "v": "dynamic8/2048"}, "split")
    ((_, text),) = written(rulec.load("adamw"), "triton", dtype="bfloat16", storage=storage).items()
    compile(text, "adamw.py", "exec")
    assert "BLOCK=4096" in text
    assert 'state["v::scale"] = torch.full(\n            (-(-p.numel() // 2048),)' in text
    assert 'state["param::low"] = like(p, 0.0, torch.int16)' in text
    assert text.count("def encode_") == 2


def test_a_file_for_torch_that_rounds_at_random_takes_a_seed() -> None:
    ((_, text),) = written(
        rulec.load("adamw"), "triton", dtype="bfloat16", storage=Storage({"v": "bfloat16_sr"}, "stochastic")
    ).items()
    compile(text, "adamw.py", "exec")
    assert "seed=0" in text
    assert 'state["v"] = like(p, 0.0, torch.bfloat16)' in text
    assert text.count("def chance(") == 1
    ((_, plain),) = written(rulec.load("adamw"), "triton", dtype="bfloat16").items()
    assert "seed" not in plain


def test_a_file_for_cupy_decodes_and_encodes_in_its_kernel() -> None:
    storage = Storage({"m": "int8", "v": "bfloat16_sr"}, "split")
    ((_, text),) = written(rulec.load("adamw"), "cupy", dtype="bfloat16", storage=storage).items()
    compile(text, "adamw.py", "exec")
    assert 'state["m::scale"] = cupy.zeros(-(-p.size // 32), np.float32)' in text
    assert 'state["param::low"] = cupy.zeros(p.shape, np.int16)' in text
    assert text.count("void encode_") == text.count("void decode_") == 1
    assert "seed=0" in text
    ((_, plain),) = written(rulec.load("adamw"), "cupy").items()
    assert "seed" not in plain


@pytest.mark.parametrize(
    ("rule", "storage", "why"),
    [
        (
            "lion",
            Storage({"m": "int8/8"}, "split24"),
            "a thread takes more neighbouring elements than a block of int8/8",
        ),
        ("adagrad", Storage({"": "float8_e4m3"}), "its state s, in float8_e4m3/256, begins with more than a number"),
    ],
)
def test_what_kernels_of_cupy_cannot_have(rule: str, storage: Storage, why: str) -> None:
    with pytest.raises(CannotBuild, match=f"rulec build cannot write .* as a file for CuPy: {why}"):
        written(rulec.load(rule), "cupy", dtype="bfloat16" if storage.weights else "float32", storage=storage)
