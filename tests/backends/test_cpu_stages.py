"""The stages of the cpu backend against NumPy: what they store bit for bit, what they reduce to in float64."""

from __future__ import annotations

import ast
import hashlib
import math
import os
import re
import subprocess
import sys
import warnings
import weakref
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import rulec
from rulec.compiler.ir import Program
from rulec.compiler.layout import layout_for
from rulec.compiler.view import matrix_view
from rulec.errors import InternalError
from rulec.kernel.multi_tensor.chunks import CHUNK_COLUMNS
from rulec.kernel.multi_tensor.cut import Cut, Lying
from rulec.language.expr.node import Op, walk
from rulec_backends.common import threads as cpu_threads
from rulec_backends.common.threads import POLICY
from rulec_backends.cpu import CpuBackend, limit_kernel
from rulec_backends.cpu import machine as cpu_machine
from rulec_backends.cpu import print as cpu_limit
from rulec_backends.cpu import print as cpu_print
from rulec_backends.cpu import rows as cpu_rows
from rulec_backends.cpu.call import StagedCall
from rulec_backends.cpu.print import kernel_source
from rulec_backends.cpu.rows import ROWS
from tests.backends.cpu_stages import NOTHING, StagedBucket, bucket_of, program_of
from tests.backends.vectors import wide_register
from tests.library import by_share

#: Shapes that chunks of a hundredth of their size cut in every way there is.
SHAPES = [
    (), (1,), (7,), (1001,), (0,), (3, 5), (0, 4), (4, 0), (1, 800), (700, 3), (130, 257), (2, 3, 4), (5, 0, 3),
    (64, 16, 3, 3), (2, 30, 150), (9, 1, 1), (20, 900),
]  # fmt: skip

#: Shapes that whole chunks cut.
LARGE = [(70_001,), (1500, 3), (700, 257), (70, 17_000), (64, 64, 3, 3)]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"chunk": 328, "widest": 164, "least_rows": 8, "most_pieces": 16, "smallest_span": 328}
    for name, size in sizes.items():
        monkeypatch.setattr(POLICY, name, size)
    monkeypatch.setattr(cpu_rows, "NARROW", 16)


EVERY_REDUCTION = """
x = g*g - p
y = g + 0.5*p
by_row = sum(x, per="row") + max(y, per="row") - min(x, per="row")
by_col = sum(y, per="col") + max(x, per="col") - min(y, per="col")
whole = sum(x) + max(y) - min(x)
direction = y*by_row*by_col/(whole + mean(x, per="matrix"))
""".strip()

LAMB = """
m = 0.9*m + 0.1*g
v = 0.99*v + 0.01*g**2
d = m/(sqrt(v) + 1e-6) + a*p
direction = d*norm(p)/norm(d)
""".strip()

CAUTIOUS = """
m = 0.9*m + 0.1*g
keep = m*g > 0
direction = where(keep, m, 0)/maximum(mean(where(keep, 1, 0)), 0.001)
""".strip()

ADAFACTOR = """
r = r + a*(mean(g**2, per="row") - r)
c = c + a*(mean(g**2, per="col") - c)
s = r*c/maximum(mean(r, per="matrix"), 1e-30)
u = g/sqrt(maximum(s, 1e-30))
direction = maximum(1e-3, rms(p))*u/maximum(1, rms(u))
""".strip()

SM3 = """
s = minimum(r, c) + g**2
r = max(s, per="row")
c = max(s, per="col")
m = a*m + g/sqrt(s + 1e-30)
direction = m
""".strip()

#: As many reductions as a group of rows may have.
GROUPED = 'direction = g*max(p, per="row")*min(g*p, per="col")/(max(g) + sum(g*g, per="col"))'

FACTORS = "r: {init: 0, per: row}, c: {init: 0, per: col}"
MATRIX_LEVEL = 'direction = g/norm(g, per="matrix") + (max(g, per="row") > 1)*g'

PROGRAMS = {
    "lamb": (LAMB, {"states": "m: 0, v: 0"}),
    "cautious": (CAUTIOUS, {"states": "m: 0"}),
    "adafactor": (ADAFACTOR, {"states": FACTORS}),
    "clip by the model's norm": ('direction = g/maximum(1, norm(g, per="model"))', {}),
    "every reduction": (EVERY_REDUCTION, {}),
    "matrices and truth": (MATRIX_LEVEL, {}),
    "sm3": (SM3, {"states": f"m: 0, {FACTORS}"}),
    "every reduction of a group": (GROUPED, {}),
    "a matrix function": ("m = 0.9*m + g\ndirection = newton_schulz(m) + a*p", {"states": "m: 0"}),
    "an input": ("direction = g/maximum(h, 1e-8)", {"inputs": "{h: like p}"}),
    "an input, reduced": ("direction = g*max(h)/maximum(h, 1e-8)", {"inputs": "{h: like p}"}),
}  # fmt: skip


def program(name: str) -> Program:
    step, more = PROGRAMS[name]
    return program_of(step, **more)


def check_every_stage(bucket: StagedBucket) -> None:
    for stage in range(len(bucket.program.stages)):
        bucket.check(stage)


#: Every program, every dtype, and every dtype of the program that reduces in all ways.
COMBINED = [(name, "float32") for name in PROGRAMS]
COMBINED += [("every reduction", dtype) for dtype in ("bfloat16", "float64", "float16")]
COMBINED += [("adafactor", "bfloat16"), ("lamb", "float64"), ("matrices and truth", "bfloat16")]


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(("name", "dtype"), COMBINED)
def test_every_stage_of_every_shape_is_numpys(name: str, dtype: str) -> None:
    check_every_stage(bucket_of(program(name), SHAPES, dtype=dtype))


@pytest.mark.parametrize("name", ["lamb", "adafactor", "every reduction"])
def test_large_tensors(name: str) -> None:
    check_every_stage(bucket_of(program(name), LARGE))


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("name", ["lamb", "adafactor"])
def test_storage_of_several_widths(name: str) -> None:
    found = program(name)
    layout = layout_for(found, "bfloat16", "float32", {"m": "float64", "v": "float16", "r": "float32"})
    check_every_stage(bucket_of(found, SHAPES, layout))


@pytest.mark.usefixtures("small_chunks")
def test_maximize_negates_gradients_in_every_stage() -> None:
    found = program("every reduction")
    check_every_stage(bucket_of(found, SHAPES, layout_for(found, "float32", maximize=True)))


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("name", ["adafactor", "every reduction", "a matrix function"])
def test_rows_of_a_rule_may_be_columns_in_memory(name: str) -> None:
    step, more = PROGRAMS[name]
    found = program_of(step, **more, view="{short: first}")
    shapes = [(5, 3), (700, 3), (300, 257), (6, 40, 20), (4, 0), (900, 20)]
    check_every_stage(bucket_of(found, shapes, transposed=True))


def test_dimensions_may_be_flattened_to_columns() -> None:
    step, more = PROGRAMS["adafactor"]
    check_every_stage(bucket_of(program_of(step, **more, view="{flatten: rest}"), [(64, 16, 3, 3), (5, 0), (8,), ()]))


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("name", PROGRAMS)
def test_some_tensors_of_a_bucket(name: str) -> None:
    bucket = bucket_of(program(name), SHAPES)
    for stage in range(len(bucket.program.stages)):
        for fired in ([5, 3, 10], [10], [4], [], [3, 5, 10], range(len(SHAPES))):
            bucket.check(stage, list(fired))


def test_no_tensors_at_all() -> None:
    for name in ("lamb", "every reduction"):
        check_every_stage(bucket_of(program(name), []))
        check_every_stage(bucket_of(program(name), [(0,), (0, 3)]))


def test_empty_tensors_reduce_to_what_leaves_others_alone() -> None:
    bucket = bucket_of(program("every reduction"), [(0, 3), (3, 0), (0,)])
    written = bucket.check(0)
    for reduction in bucket.program.stages[0].reduces:
        for found in written.reduced[reduction.name]:
            assert (np.asarray(found) == NOTHING[reduction.value.op]).all(), reduction.name
    shapes = {r.name: [np.shape(x) for x in written.reduced[r.name]] for r in bucket.program.stages[0].reduces}
    assert shapes["sum_x_row"] == [(1, 0, 1), (1, 3, 1), (1, 1, 1)]
    assert shapes["min_y_col"] == [(1, 1, 3), (1, 1, 0), (1, 1, 0)]
    assert shapes["max_y"] == [(), (), ()]


def test_nan_and_infinities_reach_every_reduction_without_a_warning() -> None:
    bucket = bucket_of(program("every reduction"), [(300, 200), (300, 200), (5, 4), (40_000,)])
    bucket.buffers[0]["g"][7, 9] = np.nan
    bucket.buffers[1]["p"][7, 9] = np.inf
    bucket.buffers[1]["p"][250, 9] = -np.inf
    bucket.buffers[3]["g"][[5, 39_999]] = -np.nan
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = bucket.call(0).reduced
    for reduction in bucket.program.stages[0].reduces:
        numbers = found[reduction.name]
        assert np.isnan(numbers[0]).any(), reduction.name
        assert np.isnan(numbers[3]).any(), reduction.name
        assert np.isfinite(numbers[2]).all(), reduction.name
        spoilt = np.isnan(numbers[1]) | np.isinf(numbers[1])
        assert spoilt.any(), reduction.name
        if str(reduction.value.arg) == "row":
            assert set(np.flatnonzero(np.isnan(numbers[0]))) == {7}
    bucket.check(0)


def test_sums_are_those_of_float64() -> None:
    """Of seventeen million, more than float32 can count by ones, and what is lost beside them in float32."""
    found = program_of("direction = g/sum(g)")
    bucket = bucket_of(found, [(70_001,)])
    bucket.buffers[0]["g"][...] = 256
    bucket.buffers[0]["g"][-1] = 2.0**-20
    (number,) = bucket.call(0).reduced["sum_g"]
    assert number == 256 * 70_000 + 2.0**-20


@pytest.mark.parametrize("name", ["lamb", "adafactor"])
def test_unaligned_arrays_are_read_as_they_lie(name: str) -> None:
    shapes = [(130, 257), (999,)]
    plain, moved = (bucket_of(program(name), shapes) for _ in range(2))
    for held in [*moved.buffers, *({k: v[i] for k, v in moved.scratch.items()} for i in range(2))]:
        for key, array in held.items():
            held[key] = _unaligned(array)
    for key, arrays in moved.scratch.items():
        moved.scratch[key] = [_unaligned(a) for a in arrays]
    for stage in range(len(plain.program.stages)):
        wanted, got = plain.check(stage).reduced, moved.check(stage).reduced
        for reduction in wanted:
            assert [np.asarray(x).tobytes() for x in wanted[reduction]] == [
                np.asarray(x).tobytes() for x in got[reduction]
            ]


def _unaligned(array: np.ndarray) -> np.ndarray:
    memory = np.zeros(array.nbytes + 1, np.uint8)
    found = memory[1:].view(array.dtype).reshape(array.shape)
    found[...] = array
    assert not found.flags.aligned
    return found


# Bits


def fingerprint(bucket: StagedBucket, tensors: list[int] | None = None) -> dict[int, str]:
    """A digest of all bits that the stages leave for each tensor."""
    fired = list(range(len(bucket.views))) if tensors is None else tensors
    digests = {tensor: hashlib.sha256() for tensor in fired}
    for stage in range(len(bucket.program.stages)):
        reduced = bucket.call(stage, tensors).reduced
        for place, tensor in enumerate(fired):
            for name in reduced:
                digests[tensor].update(np.asarray(reduced[name][place]).tobytes())
    for tensor, digest in digests.items():
        for array in bucket.writable(tensor).values():
            digest.update(array.tobytes())
    return {tensor: digest.hexdigest() for tensor, digest in digests.items()}


@pytest.mark.parametrize("name", ["lamb", "adafactor", "every reduction"])
def test_bits_depend_neither_on_neighbours_nor_on_who_fires(name: str) -> None:
    wanted = fingerprint(bucket_of(program(name), LARGE))
    for tensors in ([3, 0], [4, 2, 1], [3]):
        found = fingerprint(bucket_of(program(name), LARGE), tensors)
        assert found == {t: wanted[t] for t in tensors}
    for tensor in (0, 2, 3):
        alone = bucket_of(program(name), LARGE).only(tensor)
        assert fingerprint(alone)[0] == wanted[tensor]


IN_A_PROCESS = """
import sys
from tests.backends.test_cpu_stages import LARGE, bucket_of, fingerprint, program
print([fingerprint(bucket_of(program(name), LARGE)) for name in ("lamb", "adafactor", "every reduction")])
"""


@pytest.mark.parametrize("name", ["adafactor", "every reduction"])
def test_bits_do_not_depend_on_the_number_of_threads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = fingerprint(bucket_of(program(name), LARGE))
    team = cpu_threads._Team(3)
    for setting, value in {"thread_count": lambda: 4, "_openmp": lambda loaded: None, "_team": lambda: team}.items():
        monkeypatch.setattr(cpu_threads, setting, value)
    assert fingerprint(bucket_of(program(name), LARGE)) == wanted


@pytest.mark.slow
def test_bits_do_not_depend_on_threads() -> None:
    """In a process each: with PyTorch's threads, and with Python's."""
    runs = [("1", ""), ("2", ""), ("8", ""), ("8", "import torch")]
    started = [
        subprocess.Popen(
            [sys.executable, "-c", f"{loaded}\n{IN_A_PROCESS}"], stdout=subprocess.PIPE, text=True,
            env={**os.environ, "RULEC_NUM_THREADS": threads}, cwd=Path(__file__).parents[2],
        )
        for threads, loaded in runs
    ]  # fmt: skip
    printed = [process.communicate(timeout=300)[0] for process in started]
    assert all(process.returncode == 0 for process in started)
    assert len(printed[0]) > 64 * 3 * len(LARGE)
    assert set(printed) == {printed[0]}


@pytest.mark.usefixtures("small_chunks")
def test_a_call_is_the_same_again() -> None:
    """Slots are emptied by each pass: nothing of the one before is left in them."""
    bucket = bucket_of(program("every reduction"), SHAPES)
    for _ in range(2):
        bucket.check(0)
    for held in bucket.buffers:
        held["g"][...] *= -0.125
    bucket.check(0)


def test_gradients_are_not_kept_after_a_stage() -> None:
    bucket = bucket_of(program("lamb"), [(5,), (6,)])
    grads = [b["g"].copy() for b in bucket.buffers]
    bucket.bind()
    bucket.bound(0, grads, bucket.rows, {})
    kept = [weakref.ref(g) for g in grads]
    del grads
    assert [k() for k in kept] == [None, None]


def test_a_gradient_for_each_tensor() -> None:
    bucket = bucket_of(program("lamb"), [(5,), (6,)])
    bucket.bind()
    with pytest.raises(InternalError, match="the cpu kernel needs 2 gradients and was given 1"):
        bucket.bound(0, [bucket.buffers[0]["g"]], bucket.rows, {})


def test_a_later_stage_may_be_given_other_gradients() -> None:
    bucket = bucket_of(program("lamb"), [(50,), (60,)])
    bucket.check(0)
    for held in bucket.buffers:
        held["g"] = held["g"] * 3
    bucket.check(1)


# Chunks


@pytest.mark.parametrize("shape", [
    (1, 1, 1), (1, 1, 1_000_000), (3, 5, 7), (1, 100_000, 3), (1, 40_000, 5000), (2, 64, 4097), (70_000, 3, 3),
    (1, 7, 50_000), (3, 200, 300),
])  # fmt: skip
def test_chunks_cover_each_element_once(shape: tuple[int, int, int]) -> None:
    cut = cut_of(shape)
    rows = cut.table(CHUNK_COLUMNS[1:]).tolist()
    seen = 0
    for first, last, height, width, top, bottom, left, right, _, _ in rows:
        assert (height, width) == shape[1:]
        assert 0 <= first < last <= shape[0]
        assert 0 <= top < bottom <= height
        assert 0 <= left < right <= width
        assert last - first == 1 or (top, bottom, left, right) == (0, height, 0, width)
        seen += (last - first) * (bottom - top) * (right - left)
    assert seen == math.prod(shape)
    assert len({(c[0], c[4], c[6]) for c in rows}) == len(rows)


def test_sums_of_columns_cost_little_beside_the_elements() -> None:
    for shape in [(1, 50_000, 768), (1, 4096, 4096), (1, 1_000_000, 64), (1, 300, 100_000), (8, 2048, 2048)]:
        cut, size = cut_of(shape), math.prod(shape)
        assert cut.deep[0] * shape[0] * shape[2] * 16 <= 0.1 * 4 * size, shape
        assert cut.counts[0] >= min(8, size // POLICY.chunk), "enough for several threads"


def cut_of(shape: tuple[int, int, int]) -> Cut:
    """A tensor of so many matrices, rows and columns, cut for a stage that reduces columns."""
    return POLICY.cut(Lying(*(np.array([n]) for n in shape)), tall=True)


# Source text


def test_the_source_of_stages_reads_like_the_rule() -> None:
    found = program("adafactor")
    source = CpuBackend().emit(found, layout_for(found, "float32"))
    assert source == CpuBackend().emit(found, layout_for(found, "float32"))
    assert "3 stages" in source.splitlines()[0]
    for line in (
        "def stage_2(pointers, tensors, tensor, row, chunk, place):", "for matrix in range(first, last):",
        "u = g / sqrt(maximum(s, float32(1e-30)))", "sum_g_squared_row = accumulate(sum_g_squared_row, x0)",
    ):  # fmt: skip
        assert re.search(rf"^ *{re.escape(line)}$", source, re.MULTILINE), line
    assert max(map(len, source.splitlines())) <= 120


@pytest.mark.usefixtures("small_chunks")
def test_names_of_a_rule_never_hide_words_of_a_stage() -> None:
    names = [
        "matrix",
        "line",
        "back",
        "j",
        "place",
        "chunk",
        "first",
        "top",
        "width",
        "stage_0",
        "accumulate",
        "lowest",
    ]
    lines = [f'{name} = sum(g*{k + 2}, per="{("row", "col", "tensor")[k % 3]}")' for k, name in enumerate(names)]
    check_every_stage(bucket_of(program_of("\n".join([*lines, f"direction = g*({' + '.join(names)})"])), SHAPES))


# Rows in groups


@pytest.mark.parametrize(("name", "arrays"), [("adafactor", 2), ("sm3", 3)])
def test_totals_of_columns_are_moved_once_for_a_group_of_rows(name: str, arrays: int) -> None:
    found = program(name)
    source = CpuBackend().emit(found, layout_for(found, "float32"))
    group, single = re.findall(r"for line in.*?(?=for line in|@compiled)", source, re.DOTALL)[:2]
    for text, rows in ((group, ROWS), (single, 1)):
        assert len(re.findall(r" = load_float32\(\w+, i, ", text)) == rows * arrays
        assert len(re.findall(r"load_float64\(\w+, j, ", text)) == 1
        assert len(re.findall(r"store_float64\(\w+, j, ", text)) == 1


FACTORED = ("adafactor", "adafactor_paper", "adalomo", "came")


@pytest.mark.parametrize("name", FACTORED)
def test_values_of_columns_are_read_once_for_a_group_of_rows_where_nothing_is_stored(name: str) -> None:
    found = rulec.compile(rulec.load(name))
    source = CpuBackend().emit(found, layout_for(found, "float32"))
    stages = [text for text in source.split("@compiled\n") if text.startswith("def stage_")]
    reduced = ["j" in {r.axes.letters[-1] for r in stage.reduces} for stage in found.stages]
    stored = [bool(stage.stores) for stage in found.stages]
    assert [f"alone, {ROWS})" in text for text in stages] == [
        here or not kept for here, kept in zip(reduced, stored, strict=True)
    ]
    assert len(re.findall(r"= load_float32\(b_at, j, ", stages[1])) == 2, "one for a group, one for a row by itself"


@pytest.mark.parametrize("name", FACTORED)
def test_rules_of_rows_and_columns_divide_no_element(name: str) -> None:
    """A root and a division for each element take longer than reading it."""
    values = [n.op for stage in rulec.compile(rulec.load(name)).stages for n in walk(stage.roots)]
    assert not {Op.DIV, Op.SQRT, Op.RSQRT}.intersection(values)


@pytest.mark.slow
def test_a_group_of_rows_is_vectors_of_full_width() -> None:
    register = wide_register()
    assembly = loops(SM3, states=f"m: 0, {FACTORS}")
    assert len(re.findall(rf"vsqrtps\s.*{register}", assembly)) >= ROWS


# Machine code


def loops(text: str, dtype: str = "float32", states: str = "") -> str:
    found = program_of(text, states=states)
    source = CpuBackend().emit(found, layout_for(found, dtype))
    return cpu_machine.emit_assembly(cpu_machine.compile_text(source, Path("kernel.py")))


def instructions(assembly: str) -> list[str]:
    """The names of the instructions, in order."""
    return re.findall(r"^\t([a-z]\w*)", assembly, re.MULTILINE)


@pytest.mark.parametrize(("step", "wanted"), [
    ("direction = g/norm(g)", ["vmulps", "vcvtps2pd", "vaddpd"]),
    *(pytest.param(f'direction = g/sum(g*p, per="{line}")', ["vmulps", "vcvtps2pd", "vaddpd"], marks=pytest.mark.slow)
      for line in ("row", "col")),
    ("direction = g/max(g*p)", ["vmulps", "vminps|vmaxps"]),
])  # fmt: skip
def test_reductions_are_vectors(step: str, wanted: list[str]) -> None:
    wide = wide_register()
    assembly = loops(step)
    for instruction in wanted:
        register = "%[yz]mm" if instruction in ("vmulps", "vcvtps2pd") else wide
        assert re.search(rf"(?:{instruction})\s.*{register}", assembly), instruction
    assert "vfmadd" not in assembly


@pytest.mark.slow
def test_float64_sums_leave_float32_arithmetic_at_full_width() -> None:
    register = wide_register()
    assembly = loops(CAUTIOUS.replace("g > 0", "g/p > 0"), states="m: 0")
    divisions = re.findall(r"vdivps\s.*", assembly)
    wide = [line for line in divisions if re.search(register, line)]
    assert len(wide) > len(divisions) / 2, "sums of float64 narrow the loop that takes them"


@pytest.mark.slow
def test_compiling_a_kernel_that_sums_changes_no_other() -> None:
    before = instructions(loops("direction = g/(p + a)", "float16"))
    loops("direction = g/sum(g*p)")
    assert instructions(loops("direction = g/(p + a)", "float16")) == before


# What goes wrong


def test_a_stage_that_is_not_given_what_it_reads_says_so() -> None:
    bucket = bucket_of(program("adafactor"), [(3, 5), (4, 4)])
    bucket.check(0)
    name = next(n for n in bucket.program.stages[1].reads if "j" in bucket.program.result(n).axes.letters)
    bucket.scratch[name], kept = [], bucket.scratch[name]
    with pytest.raises(InternalError, match=f"'{name}' for 2 tensors and was given 0 arrays"):
        bucket.raw(1)
    bucket.scratch[name] = [kept[0], kept[1][..., :2]]
    with pytest.raises(InternalError, match=f"'{name}' for 2 tensors"):
        bucket.raw(1)


def test_matrices_need_views_that_fit_the_layout() -> None:
    found = program("adafactor")
    layout = layout_for(found, "float32")
    kernel = CpuBackend().build(found, layout, CpuBackend().emit(found, layout))
    params = [np.zeros((5, 3), np.float32)]
    with pytest.raises(InternalError, match="bind its cpu kernel with a view"):
        kernel.bind(params, [{}])
    with pytest.raises(InternalError, match="not seen as its bucket's layout says"):
        kernel.bind(params, [{}], [matrix_view((5, 3), {"short": "first"})])


# The limit


@pytest.mark.parametrize(("name", "dtype"), [
    ("lamb", "float32"), ("adafactor", "bfloat16"), ("every reduction", "float32"), ("a matrix function", "bfloat16"),
    ("an input, reduced", "float32"),
])  # fmt: skip
def test_the_limit_of_stages_moves_the_same_arrays_and_changes_nothing(name: str, dtype: str) -> None:
    bucket = bucket_of(program(name), SHAPES, dtype=dtype)
    before = [{k: a.copy() for k, a in bucket.buffers[i].items()} for i in range(len(SHAPES))]
    bucket.bind(limit_kernel(bucket.program, bucket.layout))
    for stage in range(len(bucket.program.stages)):
        bucket.call(stage)
    for held, old in zip(bucket.buffers, before, strict=True):
        assert all(np.array_equal(held[k], old[k], equal_nan=dtype == "float32") for k in old)


def test_the_limit_reads_what_a_stage_only_reduces() -> None:
    found = program("lamb")
    source = cpu_limit.limit_source(found, layout_for(found, "float32"))
    first = source.split("def stage_1")[0]
    assert all(f"{b} = load_bits_float32({b}_at, i" in first for b in "pgmv")
    assembly = cpu_machine.emit_assembly(cpu_machine.compile_text(source, Path("limit.py")))
    assert not re.search(r"v(?:add|sub|mul|div|sqrt)p[sd]", assembly)


def test_a_program_of_one_elementwise_stage_goes_the_short_way() -> None:
    simple = bucket_of(program_of("direction = g"), [(3,)])
    simple.check(0)
    assert not isinstance(simple.bound, StagedCall)
    given = bucket_of(program("an input"), [(3,)])
    given.check(0)
    assert isinstance(given.bound, StagedCall)


def test_the_library_has_every_reduction_that_is_tested_here() -> None:
    ops = {r.value.op for s in program("every reduction").stages for r in s.reduces}
    assert ops == {Op.SUM, Op.MIN, Op.MAX}


MATRICES = [(40, 60), (64, 64), (3, 200), (2, 5, 7)]


@pytest.mark.parametrize("name", ["sm3", "prodigy", "transforms/skip_not_finite"])
def test_stages_of_rules(name: str) -> None:
    check_every_stage(bucket_of(rulec.compile(rulec.load(name)), MATRICES))


@pytest.mark.parametrize("names", by_share(rulec.rules(), "stages on the CPU"))
def test_stages_of_the_library(names: list[str]) -> None:
    programs = [rulec.compile(rulec.load(name)) for name in names if not rulec.load(name).wraps]
    staged = [found for found in programs if not found.elementwise]
    assert len(staged) > 10
    for found in staged:
        check_every_stage(bucket_of(found, MATRICES))


def norms(count: int) -> str:
    """A step with so many norms, of what it stores, and of rows."""
    names = [f"n{i}" for i in range(count)]
    lines = [f'{name} = norm(m*g - {i}.5, per="{("tensor", "row")[i % 2]}")' for i, name in enumerate(names)]
    terms = [" + ".join(names[at : at + 50]) for at in range(0, count, 50)]
    return "\n".join(["m = 0.9*m + g", *lines, f"direction = m*({' + '.join(f'({term})' for term in terms)})"])


def test_a_stage_of_many_reductions_runs_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_print, "MOST_REDUCED", 3)
    check_every_stage(bucket_of(program_of(norms(8), states="m: 0"), [(7, 5), (3,), ()]))


@pytest.mark.slow
def test_numba_s_work_for_reductions_grows_with_their_number() -> None:
    """It looks through all statements of a function for every name that is assigned again."""

    def work(count: int) -> int:
        program = program_of(norms(count), states="m: 0")
        total = 0
        for function in ast.parse(kernel_source(program, layout_for(program, "float32"))).body:
            targets = [n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
            again = sum(count > 1 for count in Counter(targets).values())
            total += again * sum(isinstance(n, ast.stmt) for n in ast.walk(function))
        return total

    assert work(128) < 2.2 * work(64)
