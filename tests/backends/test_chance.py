"""Random bits in kernels: every spelling of the function, the reference, and what the bits of a tensor follow from."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import rulec
import rulec.jax
from rulec.array import Optimizer
from rulec.array_api.bits import chance_at, words_of
from rulec.array_api.slices import Piece, piece_of
from rulec.backend import registry
from rulec.compiler.interpreter import Run, Tensor, arithmetic
from rulec.compiler.ir import Memory
from rulec.compiler.layout import layout_for
from rulec.compiler.pipeline import compile
from rulec.compiler.view import matrix_view
from rulec.errors import BackendUnsupported
from rulec.kernel.interpreter import Interpreter
from rulec.language.expr.node import RANGE, ROWS
from rulec.runtime.distributed.shards import GlobalTensor
from rulec_backends.common.text import chance_call
from rulec_backends.cpu import machine as cpu_machine
from tests.backends import c_functions
from tests.backends.triton_process import check_in_interpreter
from tests.pairs import paired

Array = np.ndarray[Any, Any]
BRAIN = np.dtype(ml_dtypes.bfloat16)
needs_c = pytest.mark.skipif(bool(registry.get("c").unavailable_reason()), reason="no C compiler")

#: A step of an eighth of an ulp below 2: the weights that grow are those with a random number above a bound.
FALL = rulec.parse("name: Fall\nsummary: A fixed step.\nhyper: {lr: 0.0009765625}\nstep: |\n  direction = g\n")
#: The same for a matrix with rows: the stage that stores sees rows and columns.
ROW_MEANS = rulec.parse(
    "name: Rows\nsummary: A step with a mean of rows.\nhyper: {lr: 0.0009765625}\n"
    "step: |\n  direction = g + 0*mean(p, per='row')\n"
)

#: The same beside a state.
KEPT = rulec.parse(
    "name: Kept\nsummary: A fixed step beside a state.\nhyper: {lr: 0.0009765625}\nstate: {m: 0}\n"
    "step: |\n  m = 0.9*m + 0.1*g\n  direction = g\n"
)

#: First places of loops, seeds and numbers of tensors.
STORAGE = [pytest.param({}, id="floats"), pytest.param({"state_dtype": {"m": "int8"}}, id="codes")]
RULES = [pytest.param(FALL, id="elements"), pytest.param(ROW_MEANS, id="rows")]
PLACES = [(0, 0, 0), (2**32 - 700, 7, 3), (2**33 - 1, 2**32 - 1, 2**24 + 5), (3 * 2**32 + 2**31, 2**16, 2**24 - 1)]


def expected(first: int, seed: int, number: int, count: int = 2000) -> Array:
    place = np.arange(count, dtype=np.uint64) + np.uint64(first)
    low, high = place.astype(np.uint32), (place >> np.uint64(32)).astype(np.uint32)
    with np.errstate(over="ignore"):
        drawn: Array = chance_at(np, low, high, (*words_of(seed, number).values(), 5, 2))
    return drawn


def written_words(seed: int, number: int, form: str) -> str:
    return ", ".join(form.format(float(word)) for word in (*words_of(seed, number).values(), 5, 2))


@needs_c
@pytest.mark.parametrize(("first", "seed", "number"), PLACES)
def test_c_has_the_numbers_of_the_definition(first: int, seed: int, number: int) -> None:
    words = written_words(seed, number, "{}f")
    run = c_functions.function(f"chance({first}LL + i, {first}LL, {words})", "float32")
    assert np.array_equal(run(np.zeros(2000, np.float32)), expected(first, seed, number))


CPU = """\
from rulec_backends.cpu.words import chance, compiled, float32, number, store_float32, word


@compiled
def kernel(job):
    out_at, start, words = word(job, 1), word(job, 2), word(job, 3)
    a, b, c = float32(number(words, 0)), float32(number(words, 1)), float32(number(words, 2))
    for i in range(start, start + word(job, 0)):
        store_float32(out_at, i - start, 0, chance(i, start, a, b, c, float32(5.0), float32(2.0)))
"""


def test_the_cpu_backend_has_the_numbers_of_the_definition() -> None:
    machine = cpu_machine.ObjectCode(cpu_machine.emit_object(cpu_machine.compile_text(CPU, Path("chance.py"))))
    for first, seed, number in PLACES:
        out, words = np.zeros(2000, np.float32), np.array([*words_of(seed, number).values()], np.float64)
        job = (ctypes.c_int64 * 4)(out.size, out.ctypes.data, first, words.ctypes.data)
        machine.run(ctypes.addressof(job))
        assert np.array_equal(out, expected(first, seed, number))


TRITON = """
import json
import torch
from rulec_backends.common.text import run_source
from rulec_backends.triton.words import words_used

kernel = '''
@triton.jit(do_not_specialize=["first"])
def run(out_at, words_at, first, COUNT: tl.constexpr):
    i, draw = tl.arange(0, COUNT), tl.full((), 2.0, tl.float32)
    words = tl.load(words_at), tl.load(words_at + 1), tl.load(words_at + 2)
    numbers = chance(first.to(tl.int64) + i, words[0], words[1], words[2], tl.load(words_at + 3), draw)
    tl.store(out_at + i, numbers)
'''
head = "import triton\\nimport triton.language as tl\\n\\n\\n"
made = run_source("triton", "chance", head + "\\n\\n".join([*words_used(kernel), kernel]))
drawn = []
for first, words in PLACES:
    out = torch.empty(2048)
    made["run"][(1,)](out, torch.tensor([*words, 5.0]), first, COUNT=2048)
    drawn.append(out.tolist())
"""


def test_triton_has_the_numbers_of_the_definition() -> None:
    places = [(first, [float(x) for x in words_of(seed, number).values()]) for first, seed, number in PLACES]
    drawn = check_in_interpreter(f"PLACES = {places!r}\n{TRITON}", "drawn")
    for numbers, place in zip(drawn, PLACES, strict=True):
        assert np.array_equal(np.array(numbers, np.float32), expected(*place, 2048))


def moved(optimizer: Optimizer, params: dict[str, Array]) -> dict[str, Array]:
    """The weights that a step moves; all begin at one, and are then at one again."""
    optimizer.step({name: np.full(p.shape, -1, np.float32) for name, p in params.items()})
    grown = {name: p.astype(np.float32) > 1 for name, p in params.items()}
    for p in params.values():
        p[...] = 1
    return grown


def ones(*shape: int) -> Array:
    return np.ones(shape, BRAIN)


#: Parts of a tensor of 61 rows and 1,500 columns: some rows, an uneven share of the columns, and both.
PARTS = {
    "rows": (slice(7, 48), slice(None)), "columns": (slice(None), slice(501, 1001)),
    "both": (slice(3, 60), slice(9, 10)),
    "none": (slice(61, 61), slice(None)), "all": (slice(None), slice(None)),
}  # fmt: skip


def make_part(tensor: Any, whole: tuple[int, ...], first: Sequence[int]) -> None:
    """A tensor of an engine, before its first step, as the part of another from an index on."""
    shape = tensor.view.shape
    piece = piece_of(whole, shape, first)
    assert piece is not None
    indices = tuple(range(at, at + n) for at, n in zip(first, shape, strict=True))
    tensor.whole, tensor.view = GlobalTensor(whole, (), piece, indices), matrix_view(shape, tensor.rule.view, whole)


def of_parts(rule: rulec.Rule, backend: Any, make: Any = np.asarray, **words: Any) -> tuple[Any, Any]:
    """The weights that a step moves: of whole tensors, in the places of their parts, and of parts."""
    whole = {name: make(ones(61, 1500)) for name in PARTS}
    parts = {name: make(np.ascontiguousarray(ones(61, 1500)[cut])) for name, cut in PARTS.items()}
    grown = []
    for arrays in (whole, parts):
        optimizer = Optimizer(rule, arrays, backend, weights="stochastic", seed=70000, **words)
        for name, tensor in zip(PARTS, optimizer._engine.tensors, strict=True):
            if arrays is parts:
                first = [cut.indices(n)[0] for cut, n in zip(PARTS[name], (61, 1500), strict=True)]
                make_part(tensor, (61, 1500), first)
        optimizer.step({name: make(np.full(p.shape, -1, np.float32)) for name, p in arrays.items()})
        there = {name: np.asarray(p.get() if hasattr(p, "get") else p) for name, p in arrays.items()}
        grown.append({name: p.astype(np.float32) > 1 for name, p in there.items()})
    return {name: grown[0][name][cut] for name, cut in PARTS.items()}, grown[1]


@pytest.mark.parametrize(
    ("backend", "words"),
    paired(
        ["numpy", "cpu", pytest.param("c", marks=needs_c)],
        STORAGE,
    ),
)
def test_parts_have_the_bits_of_the_whole_tensor(backend: str, words: dict[str, Any]) -> None:
    whole, parts = of_parts(KEPT, backend, **words)
    assert all(np.array_equal(whole[name], parts[name]) for name in PARTS)
    assert 0 < whole["both"].sum() < whole["both"].size


def test_the_interpreter_of_kernels_knows_parts() -> None:
    grown = []
    for cut in (slice(None), slice(4, 6)):
        params = {"w": np.ascontiguousarray(ones(5, 9)[:, cut])}
        optimizer = Optimizer(FALL, params, Interpreter(), weights="stochastic", seed=70000)
        make_part(optimizer._engine.tensors[0], (5, 9), (0, cut.start or 0))
        grown.append(moved(optimizer, params)["w"])
    assert np.array_equal(grown[0][:, 4:6], grown[1])


#: Starts, and widths and gaps, of parts that lie far in their tensors.
FAR = [Piece(2**32 - 700), Piece(3 * 2**32 + 5, 7, 2**26 + 1), Piece(2**40 + 1, 2**24 + 3, 2**33)]


def far_numbers(piece: Piece) -> Array:
    part = np.arange(2048, dtype=np.int64)
    places = (part + piece.start + part // piece.width * piece.gap).astype(np.uint64)
    low, high = places.astype(np.uint32), (places >> np.uint64(32)).astype(np.uint32)
    with np.errstate(over="ignore"):
        drawn: Array = chance_at(np, low, high, (*words_of(7, 3).values(), 5, 2))
    return drawn


def call_of(piece: Piece, places: list[str], form: str) -> str:
    """The printed call for an element of a part."""
    names = ROWS if piece.gap else RANGE
    words = [*words_of(7, 3).values(), 5, 2, *(piece.words[name] for name in names)]
    return chance_call(places, [form.format(float(word)) for word in words])


@needs_c
@pytest.mark.parametrize("piece", FAR)
def test_c_knows_parts_that_lie_far_in_their_tensors(piece: Piece) -> None:
    run = c_functions.function(call_of(piece, ["i", "(int64_t)0"], "{}f"), "float32")
    assert np.array_equal(run(np.zeros(2048, np.float32)), far_numbers(piece))


@pytest.mark.parametrize("piece", FAR)
def test_the_cpu_backend_knows_parts_that_lie_far_in_their_tensors(piece: Piece) -> None:
    call = call_of(piece, ["i", "start"], "float32({})")
    text = CPU.replace("chance(i, start, a, b, c, float32(5.0), float32(2.0))", call)
    text = text.replace("import chance,", "import chance, in_range, in_rows,")
    machine = cpu_machine.ObjectCode(cpu_machine.emit_object(cpu_machine.compile_text(text, Path("chance.py"))))
    out, words = np.zeros(2048, np.float32), np.zeros(3)
    job = (ctypes.c_int64 * 4)(out.size, out.ctypes.data, 0, words.ctypes.data)
    machine.run(ctypes.addressof(job))
    assert np.array_equal(out, far_numbers(piece))


FAR_TRITON = """
import torch
from rulec_backends.common.text import run_source
from rulec_backends.triton.words import words_used

head = "import triton\\nimport triton.language as tl\\n\\n\\n"
drawn = []
for call in CALLS:
    kernel = f'''
@triton.jit
def run(out_at, COUNT: tl.constexpr):
    i = tl.arange(0, COUNT)
    start = tl.full((), 0, tl.int64)
    tl.store(out_at + i, {call})
'''
    made = run_source("triton", "chance", head + "\\n\\n".join([*words_used(kernel), kernel]))
    out = torch.empty(2048)
    made["run"][(1,)](out, COUNT=2048)
    drawn.append(out.tolist())
"""


def test_triton_knows_parts_that_lie_far_in_their_tensors() -> None:
    calls = [call_of(piece, ["start + i"], "tl.full((), {}, tl.float32)") for piece in FAR]
    drawn = check_in_interpreter(f"CALLS = {calls!r}\n{FAR_TRITON}", "drawn")
    for numbers, piece in zip(drawn, FAR, strict=True):
        assert np.array_equal(np.array(numbers, np.float32), far_numbers(piece))


@pytest.mark.parametrize(
    ("backend", "rule"),
    paired(
        ["interpreter", "numpy", "cpu", pytest.param("c", marks=needs_c)],
        RULES,
    ),
)
def test_the_bits_of_a_tensor_follow_from_its_number_the_step_and_the_seed(rule: rulec.Rule, backend: str) -> None:
    """And from nothing else: not from the shape, the order of memory that a rule sees, or the other tensors."""
    params = {"a": ones(33, 7), "b": ones(33, 7), "c": ones(11, 21)}
    chosen: Any = Interpreter() if backend == "interpreter" else backend
    optimizer = Optimizer(rule, params, chosen, weights="stochastic", seed=70000)
    for step in (1, 2):
        grown = moved(optimizer, params)
        for number, name in enumerate(params):
            low, high = np.arange(33 * 7, dtype=np.uint32), np.array(0, np.uint32)
            with np.errstate(over="ignore"):
                drawn = chance_at(np, low, high, (*words_of(70000, number).values(), step, 0))
            # The step is an eighth of an ulp: 2**13 of 2**16, and what is behind the point is cleared.
            assert np.array_equal(grown[name].reshape(-1), drawn >= 7 * 2**13), (step, name)


def test_the_reference_has_the_same_bits() -> None:
    shape, number = (3, 8, 5), 3
    params = {name: ones(*shape) for name in "abcd"}
    grown = moved(Optimizer(FALL, params, "numpy", weights="stochastic", seed=9), params)["d"]
    view = matrix_view(shape, FALL.view)
    program = compile(FALL, {**view.facts, "machine_eps": 2.0**-7}, memory=Memory("stochastic"))
    tensor = Tensor(view, np.ones((3, 8, 5)), 0, number, 2.0**-7, t=1)
    run = Run(program, [tensor], [{"lr": 2.0**-10}], arithmetic("float64"), {}, {number: np.full((3, 8, 5), -1.0)}, 9)
    ((_, _, new),) = run.execute()[0]
    assert np.array_equal(new > 1, grown)


def test_a_matrix_seen_turned_has_the_bits_of_its_memory() -> None:
    """Muon's view of a tall matrix: the rule's rows are the columns in memory."""
    weights = []
    for backend in ("numpy", "cpu", *["c"] * (not registry.get("c").unavailable_reason())):
        draws = np.random.default_rng(0)
        params = {
            "w": draws.standard_normal((12, 5)).astype(BRAIN),
            "x": draws.standard_normal((2, 9, 4)).astype(BRAIN),
        }
        optimizer = Optimizer("galore", params, backend, weights="stochastic", state_dtype="float32")
        for _ in range(3):
            optimizer.step({name: draws.standard_normal(p.shape).astype(BRAIN) for name, p in params.items()})
        weights.append(params)
    for other in weights[1:]:
        assert all(np.array_equal(weights[0][name], other[name]) for name in weights[0])


@pytest.mark.parametrize("backend", ["cpu", pytest.param("c", marks=needs_c)])
def test_states_in_codes_leave_the_bits_of_weights_as_they_are(backend: str) -> None:
    """The first parts of a chunk and a later chunk, by the weights that a step of a fixed size moves."""
    grown = []
    for words in ({}, {"state_dtype": {"m": "int8"}}):
        params = {"w": ones(70_000)}
        grown.append(moved(Optimizer(KEPT, params, backend, weights="stochastic", **words), params)["w"])
    assert np.array_equal(*grown)
    assert 0 < grown[0].sum() < grown[0].size


def test_jax_has_the_same_bits_with_and_without_the_kernel() -> None:
    shapes = {"a": (160, 130), "b": (130, 160)}
    params = {name: ones(*shape) for name, shape in shapes.items()}
    grown = moved(Optimizer(FALL, params, "cpu", weights="stochastic", seed=5), params)
    for backend in ("jax", "cpu"):
        there = {name: jnp.ones(shape, jnp.bfloat16) for name, shape in shapes.items()}
        grads = {name: jnp.full(shape, -1, jnp.bfloat16) for name, shape in shapes.items()}
        state = rulec.jax.init(FALL, there, weights="stochastic")
        new, _ = rulec.jax.step(FALL, there, grads, state, weights="stochastic", seed=5, backend=backend)
        assert all(np.array_equal(np.asarray(new[name]) > 1, grown[name]) for name in shapes)


def test_noise_in_the_place_of_a_gradient_is_refused() -> None:
    program = compile(FALL, memory=Memory("stochastic"))
    layout = layout_for(program, "bfloat16")
    for name in ("cpu", "c", "cupy", "triton"):
        with pytest.raises(BackendUnsupported, match="stochastic rounding beside noise"):
            registry.get(name).emit_estimate(program, layout, "normal")
