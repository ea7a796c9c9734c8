"""The vectors of cpu kernels that wait for their arithmetic: which kernels have them, and their machine code."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import llvmlite.binding as llvm
import numpy as np
import pytest

from rulec.compiler.layout import layout_for
from rulec_backends.cpu import CpuBackend
from rulec_backends.cpu import machine as cpu_machine
from rulec_backends.cpu import target as cpu_target
from rulec_backends.cpu.ffi import ffi_source
from rulec_backends.cpu.words import FUNCTIONS
from rulec_backends.cpu.work import DEEP, INSTRUCTIONS, WIDE, arithmetic, vector_lines
from tests.backends.cpu_functions import assembly_text
from tests.backends.cpu_programs import bucket_of, program_of
from tests.backends.vectors import preferred_bits
from tests.library import single


def printed(rule: str, dtype: str = "float32") -> str:
    program = program_of(rule)
    return CpuBackend().emit(program, layout_for(program, dtype))


@functools.cache
def assembly_of(source: str, entry: str = cpu_machine.ENTRY) -> str:
    return cpu_machine.emit_assembly(cpu_machine.compile_text(source, Path("kernel.py"), entry))


def loops(assembly: str) -> list[list[str]]:
    """The instructions of the loops without branches inside."""
    bodies = re.findall(r"^(\.\w+):\n((?:\t.*\n)*?)\tj\w+\t(\.\w+)$", assembly, re.MULTILINE)
    return [re.findall(r"^\t(v.*)$", body, re.MULTILINE) for label, body, back in bodies if label == back]


def widest(assembly: str, stores: bool = False) -> list[str]:
    """The loop with the most instructions on the widest vectors; of those that store vectors where `stores`."""
    found = [x for x in loops(assembly) if not stores or any(re.match(r"vmov[a-z]+\t%[xyz]mm\d+, ", i) for i in x)]
    return max(found, key=lambda loop: (sum("%zmm" in i for i in loop), sum("%ymm" in i for i in loop)))


def require_choice() -> None:
    """Skips where a processor has no vectors of 512 bits, or where LLVM takes them by itself."""
    if "+avx512f" not in cpu_machine.architecture():
        pytest.skip("no vectors of 512 bits on this processor")
    if preferred_bits() >= 512:
        pytest.skip("LLVM takes vectors of 512 bits by itself on this processor")


# Which kernels


def test_arithmetic_counts_operations_and_the_longest_chain() -> None:
    assert arithmetic(["a = x * y + z", "b = a / (x - y)", "store_float32(p_at, i, 0, b)"]) == (4, 3)
    assert arithmetic(["a = float32(load_float32(p_at, i, 0))"]) == (0, 0)
    assert arithmetic(["a = power(x, y) + where(x < y, -x, y)"]) == (INSTRUCTIONS["power"] + 4, 3)
    assert arithmetic([]) == (0, 0)


def test_few_operations_leave_the_choice_to_llvm() -> None:
    product = [f"y_{i} = x * {i}" for i in range(WIDE)]
    assert vector_lines(product[:-1]) == []
    assert vector_lines(product) == ["vector_bits(512)"]


def test_long_chains_run_side_by_side() -> None:
    chain = " * ".join(["x"] * (DEEP + 1))
    others = [f"y_{i} = x * {i}" for i in range(WIDE - DEEP)]
    assert vector_lines([f"y = {chain}", *others]) == ["vector_bits(512)", "interleaved()"]
    assert vector_lines([f"y = {chain.removesuffix(' * x')}", *others, "z = x * x"]) == ["vector_bits(512)"]


#: The rules of the library whose kernels have vectors of 512 bits in float32, and the stages that have them.
EXPECTED: Mapping[str, list[str]] = {
    "adam_atan2": ["elements"], "adahessian": ["elements"], "adamg": ["elements"], "ftrl_proximal": ["elements"],
    "padam": ["elements"], "fadam": ["stage_1", "stage_2"], "ranger21": ["stage_6"], "acclip": ["elements"],
    "adopt_atan2": ["elements"], "hadam": ["elements"], "lion_k": ["stage_1", "stage_2"], "sgdf": ["elements"],
}  # fmt: skip


#: Rules whose kernels wait for memory: vectors of 512 bits were measured to be slower, or as fast.
OTHERS = ("adamw", "adan", "lamb", "lion", "nadam", "sgd")


def wide_functions(source: str) -> list[str]:
    """The names of the functions that ask for vectors of 512 bits."""
    functions = re.split(r"^def (\w+)", source, flags=re.MULTILINE)
    return [name for name, body in zip(functions[1::2], functions[2::2], strict=True) if "vector_bits(512)" in body]


@pytest.mark.parametrize("rule", [
    *EXPECTED, *OTHERS,
    *(
        pytest.param(rule, marks=pytest.mark.another) for rule in single()
        if rule not in {*EXPECTED, *OTHERS} and not rule.startswith("transforms/")
    ),
])  # fmt: skip
def test_rules_with_much_arithmetic_for_a_number_ask_for_wide_vectors(rule: str) -> None:
    source = printed(rule)
    assert wide_functions(source) == EXPECTED.get(rule, [])
    assert ("    interleaved()\n" in source) == (rule in ("adam_atan2", "adopt_atan2"))


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_kernels_of_other_dtypes_ask_for_them_too(dtype: str) -> None:
    assert wide_functions(printed("adam_atan2", dtype)) == ["elements"]
    assert wide_functions(printed("adamw", dtype)) == []


@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_words_have_the_instructions_that_are_counted(name: str) -> None:
    if "+avx512vl" not in cpu_machine.architecture():
        pytest.skip("the instructions are those of AVX-512")
    inputs = len(inspect.signature(FUNCTIONS[name]).parameters)
    arguments = ", ".join(f"x{i}" for i in range(inputs))
    text = assembly_text(f"{name}({arguments})", (name,), "float32", "float32", inputs)
    loop = [line for line in widest(cpu_machine.emit_assembly(text)) if re.search("%[yz]mm", line)]
    vectors = sum(bool(re.match(r"vmov\w+\s+%[yz]mm\d+, [^%]*\(%", line)) for line in loop)
    assert vectors
    measured = len(loop) / vectors - 1 - inputs
    assert measured == pytest.approx(INSTRUCTIONS[name], rel=0.25, abs=2)


# Machine code


@pytest.mark.parametrize(("rule", "register"), [("adam_atan2", "%zmm"), ("adamw", "%ymm")])
def test_kernels_have_the_vectors_that_they_ask_for(rule: str, register: str) -> None:
    require_choice()
    roots = [line for line in widest(assembly_of(printed(rule))) if line.startswith("vsqrtps")]
    assert roots
    assert all(register in line for line in roots)


@pytest.mark.parametrize("is_small", [True, False])
def test_both_targets_keep_the_request_in_the_function_of_a_stage(is_small: bool) -> None:
    """A stage by itself: the others of its kernel keep LLVM's choice, and so do the callers."""
    source = printed("clip_by_global_norm >> padam")
    assert wide_functions(source) == ["stage_1"]
    path = Path("kernel.py")
    if is_small:
        with cpu_target.small_target() as small:
            assert small
            text = cpu_machine._compiled(source, path, cpu_machine.ENTRY)
    else:
        text = cpu_machine._compiled(source, path, cpu_machine.ENTRY)
    groups = re.findall(r'^attributes (#\d+) = .*\bnoinline\b.*"prefer-vector-width"="512"', text, re.MULTILINE)
    heads = [line for line in text.splitlines() if line.startswith("define") and any(f"{g} " in line for g in groups)]
    assert heads
    assert all("stage_1" in head for head in heads)


def test_the_handler_for_xla_has_them_too() -> None:
    require_choice()
    program = program_of("direction = g**a")
    source = ffi_source(program, layout_for(program, "float32"))
    assert any("%zmm" in line for line in widest(assembly_of(source, cpu_machine.FFI_ENTRY)))


def waiting(loop: list[str]) -> float:
    """The share of instructions that read what the one before them has written."""
    registers = [re.findall(r"%[yz]mm\d+", line) for line in loop]
    waits = [bool(before) and before[-1] in after[:-1] for before, after in pairwise(registers)]
    return sum(waits) / len(loop)


def test_long_chains_stand_side_by_side_in_machine_code(monkeypatch: pytest.MonkeyPatch) -> None:
    if not cpu_machine._has_many_registers():
        pytest.skip("too few registers on this processor")
    text = cpu_machine.compile_text(printed("adam_atan2"), Path("kernel.py"))
    loop = widest(cpu_machine.emit_assembly(text))
    assert sum(line.startswith("vsqrtps") for line in loop) == 4
    assert waiting(loop) < 0.25
    monkeypatch.setattr(cpu_machine, "_order", lambda text: {})
    assert waiting(widest(cpu_machine.emit_assembly(text))) > 0.4


def test_options_of_llvm_end_with_their_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    if not cpu_machine._has_many_registers():
        pytest.skip("too few registers on this processor")
    chosen: list[str] = []
    monkeypatch.setattr(llvm, "set_option", lambda name, option: chosen.append(option))
    cpu_machine.emit_object(cpu_machine.compile_text(printed("adam_atan2"), Path("kernel.py")))
    loop = ["-force-vector-interleave=4", "-force-vector-interleave=0"]
    assert chosen == [*loop, "-enable-misched=false", "-enable-misched=true"]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("rule", ["adam_atan2", "padam"])
def test_wide_vectors_have_the_bits_of_single_numbers(rule: str, dtype: str) -> None:
    """Whole turns of interleaved vectors, some vectors and some numbers."""
    bucket = bucket_of(rule, [1, 15, 16, 64, 200, 1000], dtype=dtype)
    expected = [bucket.expected(tensor) for tensor in range(len(bucket.params))]
    bucket.call()(0, bucket.grads, bucket.rows)
    for tensor, arrays in enumerate(expected):
        for name, wanted in arrays.items():
            assert np.array_equal(bucket.buffers(tensor)[name], wanted, equal_nan=True), (tensor, name)
