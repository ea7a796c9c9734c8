"""The c backend against NumPy: every bit of every rule of exact operations, whatever the storage and the threads."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import rulec
from rulec.backend.protocol import Rows
from rulec.compiler.ir import Program
from rulec.compiler.layout import Layout, layout_for
from rulec.errors import BackendUnsupported, TensorError
from rulec.language.expr.node import Op, walk
from rulec.testing import IEEE, NumpyKind, TorchKind
from rulec.testing.cases import MATRIX_SHAPES, loaded
from rulec.testing.conformance import check_rule
from rulec.testing.trial import Subject
from rulec_backends.c import CBackend, CKernel
from rulec_backends.c import call as c_threads
from rulec_backends.c.call import CCall
from rulec_backends.c.compile import FLAGS, compiler, processor
from rulec_backends.common.threads import POLICY
from rulec_backends.cstyle import element as c_print
from tests.backends.c_programs import programs
from tests.backends.cpu_programs import INEXACT, Bucket, bucket_of, interpret, program_of
from tests.backends.cpu_stages import NOTHING
from tests.backends.cpu_stages import bucket_of as staged_bucket_of
from tests.backends.kinds import (
    AWKWARD,
    CUTS,
    KINDS,
    check_every_operation,
    check_extremes,
    check_piece,
    pieces,
    rule_of,
    suite_names,
)
from tests.backends.test_cpu_stages import COMBINED, LARGE, SHAPES, program
from tests.library import by_share, single

pytestmark = pytest.mark.skipif(CBackend().unavailable_reason() is not None, reason="there is no C compiler")

SIZES = [1, 7, 16, 1000, 0, 33_000]

DTYPES = ("float32", "float64", "bfloat16", "float16")

SUBJECT = Subject(CBackend(), NumpyKind(), IEEE)


def kernel_of(program: Program, layout: Layout) -> CKernel:
    return CBackend().build(program, layout, CBackend().emit(program, layout))


def call_of(bucket: Bucket) -> CCall:
    return kernel_of(bucket.program, bucket.layout).bind(bucket.params, bucket.states)


def step(bucket: Bucket) -> None:
    call_of(bucket)(0, bucket.grads, bucket.rows)


def assert_step_is_numpys(bucket: Bucket) -> None:
    wanted = [bucket.expected(i) for i in range(len(bucket.params))]
    step(bucket)
    for tensor, stored in enumerate(wanted):
        for name, values in stored.items():
            got = bucket.buffers(tensor)[name]
            assert np.array_equal(got, values, equal_nan=True), (bucket.program.name, tensor, name)


def exact(names: Sequence[str]) -> list[str]:
    """The elementwise rules among them, without a function that has ulps of its own."""
    found = {name: rulec.compile(rulec.load(name)) for name in names if not rulec.load(name).wraps}
    return [
        name for name, program in found.items()
        if program.elementwise and not any(n.op in INEXACT for n in walk(program.stages[0].roots))
    ]  # fmt: skip


# The suite


@pytest.mark.parametrize("name", [*KINDS, *AWKWARD])
def test_rules_of_every_kind(name: str) -> None:
    check_rule(SUBJECT, rule_of(name), "float32")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_operation(dtype: str) -> None:
    check_every_operation(SUBJECT, dtype)


@pytest.mark.parametrize(("name", "dtype"), [*zip(CUTS, ("float64", "bfloat16", "float16"), strict=True)])
def test_other_dtypes_on_torch_tensors(name: str, dtype: str) -> None:
    pytest.importorskip("torch")
    check_rule(Subject(CBackend(), TorchKind(), IEEE), loaded(name), dtype, MATRIX_SHAPES[5:])


@pytest.mark.another
@pytest.mark.parametrize("name", [name for name in rulec.rules() if name not in KINDS])
def test_every_rule(name: str) -> None:
    check_rule(SUBJECT, loaded(name), "float32")


def test_extremes_of_numbers_of_one_sign() -> None:
    check_extremes(SUBJECT)


@pytest.mark.parametrize("piece", pieces(*DTYPES))
def test_the_contract_in_every_dtype_on_torch_tensors(piece: str) -> None:
    pytest.importorskip("torch")
    kind = TorchKind()
    assert [*kind.dtypes] == [*DTYPES]
    check_piece(Subject(CBackend(), kind, IEEE), piece, *DTYPES)


# One stage, bit for bit


@pytest.mark.parametrize(("name", "dtype"), [
    ("adamw", "float32"), ("adan", "float64"), ("rprop", "float32"), ("rprop", "float64"), ("radam", "float32"),
    ("transforms/clip_by_value", "float64"),
])  # fmt: skip
def test_rules_of_exact_operations_equal_numpy_bit_for_bit(name: str, dtype: str) -> None:
    assert_step_is_numpys(bucket_of(name, SIZES, dtype=dtype))


@pytest.mark.parametrize("names", by_share(single(), "bits in C"))
def test_every_rule_of_exact_operations_equals_numpy_bit_for_bit(names: list[str]) -> None:
    assert len(exact(names)) > 5
    for name in exact(names):
        assert_step_is_numpys(bucket_of(name, SIZES))


@pytest.mark.parametrize("expression", [
    "where(g > 0 and p < 0, g, -p)", "where(g > 0 or p < 0, g, 2)", "where(not g >= p, g/0, -1e-30)",
    "sign(g)*abs(p) + minimum(g, p)*maximum(g, 0)", "clip(g, -0.5, 0.5)", "floor(3*g) + g % 0.3 + g // 0.7",
    "where(isfinite(1/g), sqrt(g), rsqrt(p))", "where(g == p, 1, 0) + where(g != p, p, g)", "g**2 + g**4 + 1/p",
    "-(g - (p - a)) / (a / (g / p))", "(g > 0) + (p <= 0)", "g % p", "g - (p - (a - g)) - (p*g)*a/(p/g)",
])  # fmt: skip
def test_every_exact_operation_equals_numpy_bit_for_bit(expression: str) -> None:
    bucket = bucket_of(f"direction = {expression}", [1000])
    bucket.grads[0][:6] = [0, -0.0, np.inf, -np.inf, np.nan, 1e-45]
    bucket.params[0][3:9] = [0, -0.0, np.inf, -np.inf, np.nan, 1e-45]
    assert_step_is_numpys(bucket)


@pytest.mark.parametrize("dtypes", [
    ("float32", "float16", "float32", "float16"), ("float16", "float16", "float32", "float32"),
    ("float64", "float32", "float16", "float64"), ("float32", "float64", "float32", "float32"),
])  # fmt: skip
def test_storage_formats_mix_freely(dtypes: tuple[str, str, str, str]) -> None:
    layout = Layout(tuple(zip(("p", "g", "m", "v"), dtypes, strict=True)))
    assert_step_is_numpys(bucket_of("adamw", SIZES, layout))


def test_brain_floats_are_float32_rounded_once() -> None:
    program = program_of("adam")
    values = np.random.default_rng(0).uniform(0.1, 2, (4, 999)).astype(np.float32)
    stored = [(v.view(np.uint32) >> 16).astype(np.uint16) for v in values]
    wide = {n: (s.astype(np.uint32) << 16).view(np.float32) for n, s in zip("pgmv", stored, strict=True)}
    row = np.linspace(0.2, 0.9, len(program.scalars.columns))
    wanted = interpret(program, layout_for(program, "float32"), wide, row)
    call = kernel_of(program, layout_for(program, "bfloat16")).bind([stored[0]], [{"m": stored[2], "v": stored[3]}])
    call(0, [stored[1]], Rows(row[None].copy(), np.zeros(1, np.int64)))
    for name, bits in zip("pmv", (stored[0], stored[2], stored[3]), strict=True):
        exact = wanted[name].view(np.uint32)
        assert np.array_equal(bits, ((exact + 0x7FFF + ((exact >> 16) & 1)) >> 16).astype(np.uint16))


def test_maximize_negates_gradients() -> None:
    program = program_of("adamw")
    assert_step_is_numpys(bucket_of("adamw", SIZES, layout_for(program, "float32", maximize=True)))


def test_some_tensors_of_a_bucket() -> None:
    bucket = bucket_of("adamw", [500, 40_000, 3, 0, 70_000])
    before = [bucket.results(i) for i in range(5)]
    wanted = [bucket.expected(i) for i in range(5)]
    call = call_of(bucket)
    call(0, [bucket.grads[4], bucket.grads[1]], bucket.rows, tensors=[4, 1])
    for tensor in range(5):
        for name, values in (wanted if tensor in (1, 4) else before)[tensor].items():
            assert np.array_equal(bucket.buffers(tensor)[name], values), (tensor, name)
    call(0, [], bucket.rows, tensors=[])
    assert np.array_equal(bucket.params[0], before[0]["p"])


def test_a_bucket_of_nothing() -> None:
    for sizes in ([], [0], [0, 0]):
        assert_step_is_numpys(bucket_of("adamw", sizes))


def test_a_call_returns_what_it_was_bound_to() -> None:
    bucket = bucket_of("adamw", [5])
    params, states, _ = call_of(bucket)(0, bucket.grads, bucket.rows)
    assert params is bucket.params
    assert states is bucket.states


# Several stages

SMALL = {"chunk": 328, "widest": 164, "least_rows": 8, "most_pieces": 16, "smallest_span": 328}


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in SMALL.items():
        monkeypatch.setattr(POLICY, name, size)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(("name", "dtype"), COMBINED)
def test_every_stage_of_every_shape_is_numpys(name: str, dtype: str) -> None:
    bucket = staged_bucket_of(program(name), SHAPES, dtype=dtype)
    bucket.bind(kernel_of(bucket.program, bucket.layout))
    for stage in range(len(bucket.program.stages)):
        bucket.check(stage)


@pytest.mark.parametrize("name", ["lamb", "adafactor", "every reduction"])
def test_large_tensors(name: str) -> None:
    bucket = staged_bucket_of(program(name), LARGE)
    bucket.bind(kernel_of(bucket.program, bucket.layout))
    for stage in range(len(bucket.program.stages)):
        bucket.check(stage)


def test_reducing_nothing() -> None:
    bucket = staged_bucket_of(program("every reduction"), [(0,), (3, 0), (0, 4)])
    bucket.bind(kernel_of(bucket.program, bucket.layout))
    written = bucket.call(0)
    for reduction in bucket.program.stages[0].reduces:
        for got in written.reduced[reduction.name]:
            assert (np.asarray(got) == NOTHING[reduction.value.op]).all()


# Neighbours and threads


def reductions(shapes: list[tuple[int, ...]], name: str = "every reduction") -> dict[str, bytes]:
    """The bits of what the first of these tensors is reduced to."""
    bucket = staged_bucket_of(program(name), shapes)
    bucket.bind(kernel_of(bucket.program, bucket.layout))
    return {name: np.asarray(found[0]).tobytes() for name, found in bucket.call(0).reduced.items()}


def test_bits_depend_neither_on_neighbours_nor_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [(301, 250), (7,), (40_000,), (33, 65)]
    alone = reductions(shapes[:1])
    monkeypatch.setattr(POLICY, "smallest_span", 1)
    monkeypatch.setattr(c_threads, "FEW_SPANS", 2)
    for threads in (1, 2, 5):
        monkeypatch.setattr(c_threads, "most", lambda threads=threads: threads)
        assert reductions(shapes) == alone


def test_where_an_array_begins_does_not_change_a_sum() -> None:
    found = set()
    for skip in range(4):
        memory = np.zeros(5000 + skip, np.float32)
        bucket = staged_bucket_of(program("lamb"), [(5000,)])
        memory[skip:] = bucket.buffers[0]["p"]
        bucket.buffers[0]["p"] = memory[skip:]
        bucket.bind(kernel_of(bucket.program, bucket.layout))
        found.add(repr({name: values[0].tobytes() for name, values in bucket.call(0).reduced.items()}))
    assert len(found) == 1


def test_four_threads_store_what_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c_threads, "most", lambda: 4)
    monkeypatch.setattr(POLICY, "chunk", 100)
    monkeypatch.setattr(POLICY, "smallest_span", 100)
    assert_step_is_numpys(bucket_of("adamw", [10_000, 3, 0, 777]))


def test_little_work_wakes_no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c_threads, "most", lambda: 4)
    assert [c_threads.threads(spans) for spans in (0, 1, 7, 8, 100)] == [1, 1, 1, 4, 4]


def test_optimizers_in_several_threads() -> None:
    buckets = [bucket_of("adamw", [20_000, 1000], seed=i) for i in range(6)]
    wanted = [[b.expected(i) for i in range(2)] for b in buckets]
    threads = [threading.Thread(target=step, args=(b,)) for b in buckets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for bucket, stored in zip(buckets, wanted, strict=True):
        for tensor in range(2):
            for name, values in stored[tensor].items():
                assert np.array_equal(bucket.buffers(tensor)[name], values)


# What the runtime does with it


def test_optimizers_of_both_kinds_of_arrays_take_it() -> None:
    torch = pytest.importorskip("torch")
    from rulec.array import Optimizer
    from rulec.torch import AdamW

    start = np.linspace(-1, 1, 3000, dtype=np.float32)
    found = []
    for backend in ("c", "cpu"):
        ours = [start.copy(), start[:7].copy()]
        opt = Optimizer(rulec.load("adamw"), ours, backend)
        tensor = torch.nn.Parameter(torch.tensor(start))
        theirs = AdamW([tensor], backend=backend)
        for _ in range(3):
            opt.step([p * 0.1 for p in ours])
            tensor.grad = tensor.detach() * 0.1
            theirs.step()
        found.append([*ours, tensor.detach().numpy()])
    for c, cpu in zip(*found, strict=True):
        assert np.array_equal(c, cpu)
        assert not np.array_equal(c, start[: c.size])


# Arrays that it cannot take


def bound(params: list[np.ndarray]) -> CCall:
    program = program_of("sgd")
    return kernel_of(program, layout_for(program, "float32")).bind(params, [{} for _ in params])


def test_arrays_that_are_not_contiguous_are_refused_before_anything_is_written() -> None:
    whole, part = np.ones(8, np.float32), np.ones(8, np.float32)[::2]
    with pytest.raises(TensorError, match=r"^p of tensor 1 is not contiguous: make it so$"):
        bound([whole, part])
    call = bound([whole[:4], whole[4:]])
    rows = Rows(np.ones((1, 4)), np.zeros(2, np.int64))
    with pytest.raises(TensorError, match=r"^g of tensor 1 is not contiguous: make it so$"):
        call(0, [whole[:4], part], rows)
    assert (whole == 1).all()


def test_dense_arrays_are_walked_as_they_lie() -> None:
    images = np.ones((2, 3, 4, 5), np.float32).transpose(0, 3, 1, 2)
    bound([images])
    torch = pytest.importorskip("torch")
    program = program_of("sgd")
    kernel = kernel_of(program, layout_for(program, "float32"))
    kernel.bind([torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)], [{}])
    with pytest.raises(TensorError, match="p of tensor 0 is not contiguous"):
        kernel.bind([torch.ones(2, 3, 4, 5)[..., ::2]], [{}])
    with pytest.raises(TensorError, match="p of tensor 0 is not contiguous"):
        kernel.bind([torch.ones(1).expand(5)], [{}])


def test_arrays_elsewhere_are_refused() -> None:
    torch = pytest.importorskip("torch")
    program = program_of("sgd")
    kernel = kernel_of(program, layout_for(program, "float32"))
    with pytest.raises(TensorError, match=r"^p of tensor 0 is on meta, and the c backend works in main memory: choose"):
        kernel.bind([torch.ones(3, device="meta")], [{}])
    with pytest.raises(TensorError, match="p of tensor 0 is of type list: the c backend takes NumPy arrays and"):
        kernel.bind([[1.0, 2.0]], [{}])
    odd = np.zeros(9, np.uint8)[1:].view(np.float32)
    with pytest.raises(TensorError, match="p of tensor 0 does not begin at a multiple of its elements' size: copy it"):
        kernel.bind([odd], [{}])


# Source text


def test_source_is_one_text_and_names_what_the_author_named() -> None:
    program = program_of("adamw")
    layout = layout_for(program, "float32")
    source = CBackend().emit(program, layout)
    assert source == CBackend().emit(program, layout)
    for line in (
        " *     sigma = sqrt(v)/sqrt(1 - beta2**t)",
        "    const float one_minus_beta1_t = (float)row[4];  // 1 - beta1**t",
        "    const float direction = adam_direction + decay_direction;",
        "    for (int64_t i = at->first; i < at->last; i++) {",
    ):
        assert f"\n{line}\n" in source


def test_names_of_a_rule_never_hide_names_of_the_source() -> None:
    names = ["bucket", "at", "row", "lane", "line", "stop", "i", "span", "chunk", "table", "LANES", "sqrtf", "double"]
    lines = [f"{name} = g*{k + 2} + sqrt(abs(p))" for k, name in enumerate(names)]
    step_text = "\n".join([*lines, f"direction = ({' + '.join(names)})/(1 + norm(g))"])
    bucket = staged_bucket_of(program_of(step_text), [(100,), (3, 40)])
    bucket.bind(kernel_of(bucket.program, bucket.layout))
    for stage in range(2):
        bucket.check(stage)


def test_what_a_rule_says_cannot_leave_its_comment() -> None:
    text = 'name: Odd\nsummary: "*/ int main(void) { } /* \\\\"\nstep: |\n  direction = g\n'
    source = CBackend().emit(program := rulec.compile(rulec.parse(text)), layout_for(program, "float32"))
    kernel_of(program, layout_for(program, "float32"))
    assert "* / int main(void) { } / *" in source


def test_an_operation_without_a_spelling_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c_print, "SPELLINGS", {k: v for k, v in c_print.SPELLINGS.items() if k is not Op.SQRT})
    program = program_of("adamw")
    with pytest.raises(BackendUnsupported, match=r"'c' cannot express 'sqrt' of rule 'AdamW'"):
        CBackend().emit(program, layout_for(program, "float32"))


@pytest.mark.parametrize(
    ("dtype", "names"),
    [
        ("float64", (*CUTS, *AWKWARD)),
        pytest.param("float32", None, marks=pytest.mark.slow, id="suite"),
        *(pytest.param("bfloat16", *p.values, marks=p.marks, id=p.id) for p in by_share(rulec.rules(), "C sources")),
    ],
)
def test_sources_compile_without_a_warning(dtype: str, names: Sequence[str] | None, tmp_path: Path) -> None:
    """Of rules, or of all that the suite has."""
    files = []
    for number, pair in enumerate(programs(dtype, suite_names() if names is None else names)):
        files.append(tmp_path / f"{number}.c")
        files[-1].write_text(CBackend().emit(*pair))
    checks = ["-std=c99", "-pedantic", "-fopenmp", "-Wall", "-Wextra", "-Wvla", "-Werror", "-fsyntax-only"]
    done = subprocess.run([*compiler(), *checks, *map(str, files)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:2000]
    assert max(len(line) for file in files for line in file.read_text().splitlines()) <= 128


# Machine code


def assembly_of(text: str, dtype: str = "float32") -> str:
    program = program_of(text)
    source = CBackend().emit(program, layout_for(program, dtype))
    command = [*compiler(), *FLAGS, "-march=native", "-fopenmp-simd", "-S", "-o", "-", "-x", "c", "-"]
    return subprocess.run(command, input=source, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(("rule", "dtype"), [
    ("adam", "float32"), ("adam", "float64"), ("adam", "bfloat16"), ("adam", "float16"), ("lamb", "float32"),
    ("sm3", "float32"), ("radam", "float32"),
])  # fmt: skip
def test_loops_are_vectors(rule: str, dtype: str) -> None:
    if " avx2" not in processor():
        pytest.skip("no wide vectors on this processor")
    letter = "d" if dtype == "float64" else "s"
    roots = [line for line in assembly_of(rule, dtype).splitlines() if f"sqrtp{letter}" in line]
    assert any("%ymm" in line or "%zmm" in line for line in roots)


def test_nothing_is_contracted() -> None:
    assert "vfmadd" not in assembly_of("adam")
