"""CUDA C as text, and as the machine code that NVRTC makes of it for GPUs that are not here."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import rulec
from rulec.compiler.ir import Program, Stage
from rulec.compiler.layout import ITEM_SIZE, Layout, layout_for, scheduled
from rulec.compiler.pipeline import compile
from rulec.kernel.nest import Nest
from rulec.kernel.place import COL, ELEMENT
from rulec.language.expr.node import Op, walk
from rulec.testing.cases import MATRIX_SHAPES, buckets_of, loaded
from rulec_backends.cupy import CupyBackend
from rulec_backends.cupy.plan import PACK, kernel_name, pack_width
from rulec_backends.cupy.print import kernel_source
from tests import ledger
from tests.backends.cuda_assembly import ARCHITECTURES, CHECKERS, CompileError, compiled, kernels, missing
from tests.backends.kinds import KINDS

needs_nvrtc = pytest.mark.skipif(bool(missing()), reason=missing() or "NVRTC is here")


def programs(name: str, dtype: str) -> Iterator[tuple[Program, Layout]]:
    """The programs of a rule for tensors of all kinds of shapes, as the runtime has them printed."""
    for bucket in buckets_of(loaded(name), MATRIX_SHAPES):
        yield scheduled(bucket.program, layout_for(bucket.program, dtype, transposed=bucket.transposed))


def moved(program: Program, layout: Layout, stage: Stage) -> tuple[int, int]:
    """The bytes that the program says an element reads and writes, without what is shared by lines."""
    loads = {str(n.arg) for n in walk(stage.roots) if n.op is Op.LOAD}
    beside = Nest(program, layout, stage).read(ELEMENT, COL)
    read = sum(ITEM_SIZE[layout.dtype(b)] for b in loads) + len(beside) * ITEM_SIZE[layout.compute]
    return read, sum(ITEM_SIZE[layout.dtype(s.buffer)] for s in stage.stores)


def check_machine_code(names: Sequence[str], dtype: str, architectures: Sequence[str] = ARCHITECTURES) -> None:
    """Proves, for these architectures, the kernels of the rules whose text, compiler or check changed since."""
    known = ledger.checker(Path(__file__), *CHECKERS)
    texts = {name: [kernel_source(*one) for one in programs(name, dtype)] for name in names}
    for architecture in architectures:
        claims = {name: ledger.digest(known, architecture, *text) for name, text in texts.items()}
        ledger.prove(claims, lambda changed, at=architecture: [check_rule(name, dtype, at) for name in changed])


def check_rule(name: str, dtype: str, architecture: str) -> None:
    """Asserts what every kernel of a rule must be."""
    for program, layout in programs(name, dtype):
        stages = [kernel_name(program, i) for i, stage in enumerate(program.stages) if stage.roots]
        found = kernels(kernel_source(program, layout), architecture, stages)
        for index, stage in enumerate(program.stages):
            if not stage.roots:
                continue
            title = f"{name} in {dtype} for {architecture}, stage {index}"
            code = found[kernel_name(program, index)]
            assert (code.local(), code.stack) == ([], 0), title
            wide = pack_width(program, layout, stage)
            read, written = moved(program, layout, stage)
            # Where a condition is the same for all elements there is a loop for each outcome, which may need less.
            assert (wide * read, wide * written) in code.wide_accesses(), title
            assert all(r <= wide * read and w == wide * written for r, w in code.wide_accesses()), title


@needs_nvrtc
def test_compiling_leaves_the_bytes_of_python_as_they_are() -> None:
    compiled('extern "C" __global__ void kernel(float* x) { x[threadIdx.x] = 1; }', "sm_90")
    assert io.BytesIO(bytes([32])).read(1)[0] == 32


@needs_nvrtc
@pytest.mark.proof
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_elements_are_moved_by_16_bytes_and_once(dtype: str) -> None:
    check_machine_code(KINDS, dtype)


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.proof
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_every_rule_for_every_architecture(dtype: str) -> None:
    check_machine_code(ledger.selected(rulec.rules(), KINDS), dtype)


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.proof
def test_every_rule_in_float32() -> None:
    check_machine_code(rulec.rules(), "float32", ["sm_90"])


@needs_nvrtc
@pytest.mark.proof
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_operation_compiles(dtype: str) -> None:
    rule = rulec.parse(
        "name: Every\nstate: {a: 0}\nstep: |\n"
        "  x = exp(g) + log(p) + tanh(g) + sigmoid(g) + erf(g) + cbrt(p) + abs(g)**p + g % p + g // p\n"
        "  y = sign(x) + floor(x) + rsqrt(x) + minimum(x, 0.1) + clip(x, -1, p)\n"
        "  a = where(isfinite(x) and not (x > y or t == 1), x, a)\n"
        "  p = p - y*max(g) - min(p)\n"
    )
    program = compile(rule)
    source = kernel_source(program, layout_for(program, dtype, states={"a": "float16"}))
    claim = ledger.digest(ledger.checker(Path(__file__), *CHECKERS), "compiles", source)
    ledger.prove({"sm_90": claim}, lambda _: compiled(source, "sm_90"))


@needs_nvrtc
def test_what_nvrtc_refuses_is_no_success() -> None:
    with pytest.raises(CompileError, match="is undefined"):
        compiled("__global__ void k() { x = 1; }", "sm_90")


def lines(name: str, **layout: object) -> list[str]:
    program = compile(loaded(name))
    program, chosen = scheduled(program, layout_for(program, **layout))  # type: ignore[arg-type]
    return [line.strip() for line in CupyBackend().emit(program, chosen).splitlines()]


def test_the_code_reads_like_the_rule() -> None:
    found = lines("lion", param="bfloat16", states={"m": "float32"}, maximize=True)
    for line in (
        "const float g = -from_bfloat16(g_at[i]) * unscale;",
        "const float direction = signf(c) + weight_decay * p;",
        "m_at[i] = m_new;",
        "p_at[i] = to_bfloat16(p_new);",
        "for (int64_t i = chunk.start + 8 * threadIdx.x; i < packed; i += 8 * blockDim.x) {",
        "auto m = pack<8>(m_at + i);",
        "pack<8>(p_at + i) = p;",
        'asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(to) : "f"(from));',
    ):
        assert line in found


def test_only_what_is_used_is_printed() -> None:
    plain = "\n".join(lines("sgd", param="float32"))
    for word in ("Tile", "finish", "over_block", "uint16_t", "INFINITY", "minimum"):
        assert word not in plain
    reducing = "\n".join(lines("lamb", param="float32"))
    assert "over_block(SUM" in reducing
    assert "leave_columns" not in reducing


@pytest.mark.parametrize(
    ("param", "states", "wide"),
    [("float32", None, 4), ("float64", None, 2), ("bfloat16", None, 8), ("float32", {"v": "bfloat16"}, 8)],
)
def test_packs_have_16_bytes_of_the_narrowest(param: str, states: dict[str, str] | None, wide: int) -> None:
    program = compile(loaded("adamw"))
    layout = layout_for(program, param, states=states)
    assert pack_width(program, layout, program.stages[0]) == wide
    narrowest = min(ITEM_SIZE[d] for _, d in layout.dtypes)
    assert wide * narrowest == PACK


def test_hyper_parameters_are_nowhere_in_the_text() -> None:
    program = compile(rulec.load("adamw"))
    source = kernel_source(program, layout_for(program, "float32"))
    body = source[source.index("*/") :]
    assert not any(text in body for text in ("0.001", "0.999", "1e-08", "0.9f"))
