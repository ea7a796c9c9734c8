"""The cpu backend against NumPy: every bit of every rule, whatever the storage, the neighbours and the threads."""

from __future__ import annotations

import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba.core.typing import context as numba_context

import rulec
from rulec.backend.protocol import Rows
from rulec.compiler.layout import Layout, layout_for
from rulec.errors import BackendUnsupported
from rulec.language.expr.node import Op
from rulec.testing import IEEE, NumpyKind
from rulec.testing.cases import hostile_rules, staged_rules
from rulec.testing.conformance import check_rule
from rulec.testing.trial import Subject
from rulec_backends.common import threads as cpu_threads
from rulec_backends.common.threads import POLICY
from rulec_backends.cpu import CpuBackend, limit_kernel
from rulec_backends.cpu import machine as cpu_machine
from rulec_backends.cpu import print as cpu_limit
from rulec_backends.cpu import stage as cpu_stage
from rulec_backends.cpu import target as cpu_target
from tests.backends.cpu_programs import Bucket, bucket_of, interpret, kernel_of, program_of
from tests.backends.kinds import ELEMENTWISE, check_extremes, check_piece, pieces
from tests.backends.vectors import wide_register
from tests.library import by_share, single

SIZES = [1, 7, 16, 1000, 0, 33_000]


def step(bucket: Bucket) -> None:
    bucket.call()(0, bucket.grads, bucket.rows)


def assert_step_is_numpys(bucket: Bucket) -> None:
    wanted = [bucket.expected(i) for i in range(len(bucket.params))]
    step(bucket)
    for tensor, stored in enumerate(wanted):
        for name, values in stored.items():
            got = bucket.buffers(tensor)[name]
            assert np.array_equal(got, values, equal_nan=True), (bucket.program.name, tensor, name)


@pytest.mark.parametrize(("name", "dtype"), [
    *((name, "float32") for name in (*ELEMENTWISE, "radam", "yogi")),
    ("adamw", "float64"), ("madgrad", "float64"), ("rprop", "float64"), ("transforms/clip_by_value", "float64"),
])  # fmt: skip
def test_rules_of_one_stage_equal_numpy_bit_for_bit(name: str, dtype: str) -> None:
    assert_step_is_numpys(bucket_of(name, SIZES, dtype=dtype))


@pytest.mark.parametrize("names", by_share(single(), "bits on the CPU"))
def test_every_rule_of_one_stage_equals_numpy_bit_for_bit(names: list[str]) -> None:
    rules = {name: rulec.load(name) for name in names}
    elementwise = [name for name, rule in rules.items() if not rule.wraps and rulec.compile(rule).elementwise]
    assert len(elementwise) > 5
    for name in elementwise:
        assert_step_is_numpys(bucket_of(name, SIZES))


@pytest.mark.parametrize("expression", [
    "where(g > 0 and p < 0, g, -p)", "where(g > 0 or p < 0, g, 2)", "where(not g >= p, g/0, -1e-30)",
    "sign(g)*abs(p) + minimum(g, p)*maximum(g, 0)", "clip(g, -0.5, 0.5)", "floor(3*g) + g % 0.3 + g // 0.7",
    "where(isfinite(1/g), sqrt(g), rsqrt(p))", "where(g == p, 1, 0) + where(g != p, p, g)", "g**2 + g**4 + 1/p",
    "-(g - (p - a)) / (a / (g / p))", "(g > 0) + (p <= 0)",
    "exp(g)*log(abs(p))", "tanh(g) - sigmoid(p)*erf(g)", "cbrt(g) + abs(p)**a", "abs(g)**1.5 - p**-3",
])  # fmt: skip
def test_every_operation_equals_numpy_bit_for_bit(expression: str) -> None:
    bucket = bucket_of(f"direction = {expression}", [1000])
    bucket.grads[0][:6] = [0, -0.0, np.inf, -np.inf, np.nan, 1e-45]
    bucket.params[0][3:9] = [0, -0.0, np.inf, -np.inf, np.nan, 1e-45]
    assert_step_is_numpys(bucket)


@pytest.mark.parametrize("dtypes", [
    ("float32", "float16", "float32", "float16"), ("float16", "float16", "float32", "float32"),
    ("float16", "float32", "float16", "float16"), ("float64", "float32", "float16", "float64"),
    ("float32", "float64", "float32", "float32"),
])  # fmt: skip
def test_storage_formats_mix_freely(dtypes: tuple[str, str, str, str]) -> None:
    layout = Layout(tuple(zip(("p", "g", "m", "v"), dtypes, strict=True)))
    assert_step_is_numpys(bucket_of("adamw", SIZES, layout))


@pytest.mark.parametrize("maximize", [False, True])
def test_brain_floats_are_float32_cut_short(maximize: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in chunks of an odd number of elements: each begins with the halves of two words."""
    monkeypatch.setattr(POLICY, "chunk", 37)
    program = program_of("adam")
    layout = layout_for(program, "bfloat16", maximize=maximize)
    values = np.random.default_rng(0).uniform(0.1, 2, (4, 999)).astype(np.float32)
    stored = [(v.view(np.uint32) >> 16).astype(np.uint16) for v in values]
    wide = {n: (s.astype(np.uint32) << 16).view(np.float32) for n, s in zip("pgmv", stored, strict=True)}
    row = np.linspace(0.2, 0.9, len(program.scalars.columns))
    wanted = interpret(program, layout_for(program, "float32", maximize=maximize), wide, row)
    call = kernel_of(program, layout).bind([stored[0]], [{"m": stored[2], "v": stored[3]}])
    call(0, [stored[1]], Rows(row[None].copy(), np.zeros(1, np.int64)))
    for name, bits in zip("pmv", (stored[0], stored[2], stored[3]), strict=True):
        exact = wanted[name].view(np.uint32)
        assert np.array_equal(bits, ((exact + 0x7FFF + ((exact >> 16) & 1)) >> 16).astype(np.uint16))


@pytest.mark.parametrize("kept", ["bfloat16", "float32"])
@pytest.mark.parametrize("other", ["float32", "float16", "float64", "bfloat16"])
def test_a_nan_of_odd_bits_is_still_one_in_bfloat16(other: str, kept: str) -> None:
    """Rounding adds to the bits: all ones would become a zero."""
    program = program_of("m = m + g\np = p - lr*m")
    layout = Layout((("p", "bfloat16"), ("g", other), ("m", kept)))
    grad = np.full(100, -1, {"float32": np.int32, "float64": np.int64}.get(other, np.int16))
    param = np.full(100, 0x3F80, np.uint16)
    state = param.copy() if kept == "bfloat16" else np.full(100, -1, np.int32).view(np.float32)
    rows = np.full((1, len(program.scalars.columns)), -1, np.int64).view(np.float64)
    kernel_of(program, layout).bind([param], [{"m": state}])(0, [grad], Rows(rows, np.zeros(1, np.int64)))
    for stored in (param, state) if kept == "bfloat16" else (param,):
        assert np.isnan((stored.astype(np.uint32) << 16).view(np.float32)).all()


def test_maximize_negates_gradients() -> None:
    program = program_of("adamw")
    assert_step_is_numpys(bucket_of("adamw", SIZES, layout_for(program, "float32", maximize=True)))


def test_unaligned_gradients_are_read_as_they_lie() -> None:
    bucket = bucket_of("adamw", [999])
    memory = np.zeros(999 * 4 + 1, np.uint8)
    unaligned = memory[1:].view(np.float32)
    unaligned[:] = bucket.grads[0]
    assert not unaligned.flags.aligned
    wanted = bucket.expected(0)
    bucket.call()(0, [unaligned], bucket.rows)
    assert all(np.array_equal(bucket.buffers(0)[n], v) for n, v in wanted.items())


def test_some_tensors_of_a_bucket() -> None:
    bucket = bucket_of("adamw", [500, 40_000, 3, 0, 70_000])
    before = [bucket.results(i) for i in range(5)]
    wanted = [bucket.expected(i) for i in range(5)]
    call = bucket.call()
    call(0, [bucket.grads[4], bucket.grads[1]], bucket.rows, tensors=[4, 1])
    for tensor in range(5):
        for name, values in (wanted if tensor in (1, 4) else before)[tensor].items():
            assert np.array_equal(bucket.buffers(tensor)[name], values), (tensor, name)
    call(0, [bucket.grads[2]], bucket.rows, tensors=[2])
    call(0, [], bucket.rows, tensors=[])
    assert np.array_equal(bucket.params[2], wanted[2]["p"])
    assert np.array_equal(bucket.params[0], before[0]["p"])


def test_a_bucket_of_nothing() -> None:
    for sizes in ([], [0], [0, 0]):
        assert_step_is_numpys(bucket_of("adamw", sizes))


def test_a_call_returns_what_it_was_bound_to() -> None:
    bucket = bucket_of("adamw", [5])
    params, states, _ = bucket.call()(0, bucket.grads, bucket.rows)
    assert params is bucket.params
    assert states is bucket.states


def test_bits_depend_neither_on_neighbours_nor_on_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    together = bucket_of("radam", [100_003, 5, 40_000])
    alone = bucket_of("radam", [100_003, 5, 40_000])
    step(together)
    monkeypatch.setattr(POLICY, "chunk", 37)
    for tensor in range(3):
        rows = Rows(alone.rows.table, alone.rows.index[tensor : tensor + 1])
        one = Bucket(
            alone.program, alone.layout, [alone.params[tensor]], [alone.grads[tensor]], [alone.states[tensor]], rows
        )
        step(one)
        for name, values in together.results(tensor).items():
            assert np.array_equal(values, alone.buffers(tensor)[name])


@pytest.fixture
def four_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python threads, four of them, for jobs of any size."""
    monkeypatch.setattr(cpu_threads, "thread_count", lambda: 4)
    monkeypatch.setattr(cpu_threads, "_openmp", lambda loaded: None)
    monkeypatch.setattr(cpu_threads, "_FEW_SPANS", 2)
    monkeypatch.setattr(POLICY, "chunk", 100)
    monkeypatch.setattr(POLICY, "smallest_span", 100)
    team = cpu_threads._Team(3)
    monkeypatch.setattr(cpu_threads, "_team", lambda: team)


@pytest.mark.usefixtures("four_threads")
def test_bits_do_not_depend_on_threads() -> None:
    assert_step_is_numpys(bucket_of("adamw", [10_000, 3, 0, 777]))


@pytest.mark.usefixtures("four_threads")
def test_optimizers_in_several_threads_share_the_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a helper comes late to a job of which nobody else remembers the kernel."""
    monkeypatch.setattr(cpu_threads, "_openmp", lambda torch_is_loaded: None)
    buckets = [bucket_of("adamw", [20_000, 1000], seed=i) for i in range(6)]
    wanted = [[b.expected(i) for i in range(2)] for b in buckets]
    with ThreadPoolExecutor(len(buckets)) as threads:
        list(threads.map(step, buckets))
    for bucket, stored in zip(buckets, wanted, strict=True):
        for tensor in range(2):
            for name, values in stored[tensor].items():
                assert np.array_equal(bucket.buffers(tensor)[name], values)


def test_an_unreadable_number_of_threads_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RULEC_NUM_THREADS", "many")
    with pytest.raises(rulec.RulecError, match="RULEC_NUM_THREADS is 'many'"):
        cpu_threads.asked_for.__wrapped__()


# Source text


def test_source_is_one_text_and_names_what_the_author_named() -> None:
    program = program_of("adamw")
    layout = layout_for(program, "float32")
    source = CpuBackend().emit(program, layout)
    assert source == CpuBackend().emit(program, layout)
    for line in ("m_new = beta1 * m + one_minus_beta1 * g", "direction = adam_direction + decay_direction"):
        assert f"        {line}\n" in source
    assert max(map(len, source.splitlines())) <= 120


def test_names_of_a_rule_never_hide_words_of_a_kernel() -> None:
    names = ["word", "row", "start", "stop", "i", "place", "exp", "load_float32", "compiled", "p_at", "kernel", "job"]
    lines = [f"{name} = g*{k + 2} + sqrt(abs(p))" for k, name in enumerate(names)]
    bucket = bucket_of("\n".join([*lines, f"direction = {' + '.join(names)}"]), [100])
    assert_step_is_numpys(bucket)


def test_an_operation_without_a_word_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_stage, "OPS", {op: text for op, text in cpu_stage.OPS.items() if op is not Op.SQRT})
    program = program_of("adamw")
    with pytest.raises(BackendUnsupported, match=r"'cpu' cannot express 'sqrt' of rule 'AdamW'"):
        CpuBackend().emit(program, layout_for(program, "float32"))


@pytest.mark.parametrize(
    ("power", "word"), [("2", "g * g"), ("-2", "inverse_square(g)"), ("0.5", "root(g)"), ("-0.5", "inverse_root(g)")]
)
def test_common_constant_powers_are_products_and_roots(power: str, word: str) -> None:
    program = program_of(f"direction = g**{power}")
    source = CpuBackend().emit(program, layout_for(program, "float32"))
    assert f"direction = {word}\n" in source
    assert "power(" not in source


# Machine code


def assembly_of(text: str, dtype: str = "float32") -> str:
    program = program_of(text)
    source = CpuBackend().emit(program, layout_for(program, dtype))
    return cpu_machine.emit_assembly(cpu_machine.compile_text(source, Path("kernel.py")))


@pytest.mark.parametrize("rule", [
    "adam", "direction = exp(g)*log(p) + cbrt(g) + tanh(p) + abs(g)**a + erf(g)*sigmoid(p)",
    *(pytest.param(rule, marks=pytest.mark.slow) for rule in ("lion", "ademamix", "adan")),
])  # fmt: skip
def test_kernels_are_vectors_of_full_width(rule: str) -> None:
    register = wide_register()
    assembly = assembly_of(rule)
    stores = re.findall(rf"vmovups\s+{register}\d+, \(%r", assembly)
    assert len(stores) >= len(program_of(rule).stages[0].stores)


def test_nothing_is_contracted() -> None:
    assert "vfmadd" not in assembly_of("adam")


@pytest.mark.parametrize("storage", ["float16", "bfloat16"])
def test_narrow_storage_is_vectors_too(storage: str) -> None:
    register = wide_register()
    assembly = assembly_of("adam", storage)
    assert len(re.findall(rf"v(?:sqrt|div)ps\s+.*{register}", assembly)) >= 4
    if storage == "float16":
        assert "vcvtph2ps" in assembly
        assert "vcvtps2ph" in assembly


def test_bfloat16_is_read_and_written_two_at_once() -> None:
    """Elsewhere each is moved to a lane twice as wide and back, in half of a kernel's instructions."""
    alone, mixed = (
        CpuBackend().emit(program_of("adam"), layout_for(program_of("adam"), "bfloat16", states=states))
        for states in ({}, {"m": "float32"})
    )
    assert alone.count(" = lower_bfloat16(") == alone.count(" = upper_bfloat16(") == 4
    assert alone.count("store_two_bfloat16(") == alone.count("    store_bfloat16(") == 3
    assert "lower_bfloat16" not in mixed
    assert max(map(len, alone.splitlines())) <= 120
    in_vectors = re.findall(rf"vpmov(?:zxwd|dw)\s.*{wide_register()}", assembly_of("adam", "bfloat16"))
    assert in_vectors == []


# The limit


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_limit_kernel_moves_the_same_arrays_and_computes_nothing(dtype: str) -> None:
    bucket = bucket_of("adamw", [1000, 3], dtype=dtype)
    before = [bucket.results(i) for i in range(2)]
    kernel = limit_kernel(bucket.program, bucket.layout)
    kernel.bind(bucket.params, bucket.states)(0, bucket.grads, bucket.rows)
    for tensor in range(2):
        for name, values in before[tensor].items():
            assert np.array_equal(bucket.buffers(tensor)[name], values), name
    source = cpu_limit.limit_source(bucket.program, bucket.layout)
    assembly = cpu_machine.emit_assembly(cpu_machine.compile_text(source, Path("limit.py")))
    assert not re.search(r"v(?:add|sub|mul|div|sqrt)p[sd]", assembly)
    register = wide_register()
    assert len(re.findall(rf"vmov\w+\s+{register}\d+, \(%r", assembly)) >= 3, "p, m and v are written"
    assert len(re.findall(rf"\(%r\w+,%r\w+(?:,\d)?\), {register}", assembly)) >= 4, "p, g, m and v are read"


def test_the_limit_kernel_of_storage_of_several_widths() -> None:
    bucket = bucket_of(
        "adamw", [1000], Layout((("p", "float32"), ("g", "float16"), ("m", "float64"), ("v", "float16")))
    )
    before = bucket.results(0)
    limit_kernel(bucket.program, bucket.layout).bind(bucket.params, bucket.states)(0, bucket.grads, bucket.rows)
    for name, values in before.items():
        assert np.array_equal(bucket.buffers(0)[name], values), name


@pytest.mark.parametrize("name", ["Sometimes", "Nothing", "Seldom"])
def test_arms_that_store_nothing_or_read_no_input(name: str) -> None:
    (rule,) = (rule for rule in (*hostile_rules(), *staged_rules()) if rule.name == name)
    check_rule(Subject(CpuBackend(), NumpyKind(), IEEE), rule, "float32", [(), (7,), (0,), (33, 65)])


def test_extremes_of_numbers_of_one_sign() -> None:
    check_extremes(Subject(CpuBackend(), NumpyKind(), IEEE))


@pytest.mark.parametrize("piece", pieces("float32", everyday=["adamw", "Sometimes", "Nothing", "Seldom"]))
def test_the_contract(piece: str) -> None:
    check_piece(Subject(CpuBackend(), NumpyKind(), IEEE), piece, "float32")


def arithmetic(text: str) -> Counter[tuple[str, str]]:
    """The operations on floats in LLVM assembly, with their types, without comparisons.

    LLVM writes a comparison in one of two ways, by `fcmp` or by `llvm.is.fpclass`.
    """
    kinds = r"= (f(?!cmp)\w+|call|tail call)\b(?!.*is\.fpclass)[^=\n]*?(<\d+ x (?:float|double)>|float|double)\b"
    return Counter(re.findall(kinds, text))


@pytest.mark.parametrize("name", ["sgd", "adam", "padam"])
def test_the_small_target_computes_as_numbas_own(name: str) -> None:
    """Numba optimises each function by itself, and then once more as a part of its callers."""
    source = CpuBackend().emit(program_of(name), layout_for(program_of(name), "float32"))
    path = Path("kernel.py")
    with cpu_target.small_target() as small:
        assert small, "Numba lost what targets are made of: compiling takes three times as long"
        text = cpu_machine._compiled(source, path, cpu_machine.ENTRY)
    assert arithmetic(text) == arithmetic(cpu_machine._compiled(source, path, cpu_machine.ENTRY)) != Counter()


def test_the_small_target_asks_nothing_that_loads_numbas_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    typeof = numba_context.typeof

    def recorded(value: object, *purpose: object) -> Any:
        asked.append(value)
        return typeof(value, *purpose)

    monkeypatch.setattr(numba_context, "typeof", recorded)
    source = CpuBackend().emit(program_of("sgd"), layout_for(program_of("sgd"), "float32"))
    with cpu_target.small_target():
        cpu_machine._compiled(source, Path("kernel.py"), cpu_machine.ENTRY)
    assert asked
    assert bool not in asked
    assert range not in asked


def test_functions_of_a_kernel_stay_apart() -> None:
    """Numba knows compiled functions by objects: with one for all, each call would be of the last."""
    program = program_of("a2grad")
    source = CpuBackend().emit(program, layout_for(program, "float32"))
    with cpu_target.small_target():
        text = cpu_machine._compiled(source, Path("kernel.py"), cpu_machine.ENTRY)
    assert "fpext" in text, "the first stage, whose sums are float64, is missing"


def test_whatever_the_small_target_fails_at_numbas_own_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(**_: object) -> None:
        raise AttributeError("a Numba of another version")

    monkeypatch.setattr(cpu_target, "_dispatcher", lambda: fails)
    source = CpuBackend().emit(program_of("sgd"), layout_for(program_of("sgd"), "float32"))
    assert "rulec_kernel" in cpu_machine.compile_text(source, Path("kernel.py"))
