"""Kernels of the triton backend compiled for GPUs that are not here, and what their assembly says.

`python -m tests.backends.triton_compiled cuda:90 float32 adamw lamb` prints a line of JSON for each kernel. It is a
process of its own, because Triton must not have been imported for its interpreter.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rulec.compiler.ir import Program
from rulec.compiler.layout import Layout, layout_for, scheduled
from rulec.kernel.nest import Nest
from rulec.kernel.place import ROW, is_shaped
from rulec.testing.cases import buckets_of, loaded
from rulec_backends.triton import TritonBackend
from rulec_backends.triton.blocks import Block, block_for, reducing, tile_for
from rulec_backends.triton.plan import FINISHED, moved, vector_width
from rulec_backends.triton.scalars import LANES
from tests.ledger import KERNEL

ROOT = Path(__file__).parent.parent.parent

#: What is compiled for: Ampere, Hopper, Blackwell, and CDNA 3.
TARGETS = ("cuda:80", "cuda:90", "cuda:100", "hip:gfx942")

#: The files that say what a kernel should move, and that read its assembly.
CHECKERS = (
    Path(__file__), *(ROOT / name for name in (*KERNEL, "backends/triton/plan.py", "backends/triton/blocks.py"))
)  # fmt: skip

#: The rule whose scalar program, and whose kernel that finishes reductions, are compiled.
HELPED = "novograd"

#: Of one matrix, so that it is the program for matrices that is compiled, where there are two.
SHAPES = ((64, 48),)


@dataclass(frozen=True)
class Loop:
    """The accesses of global memory by a thread in a loop: of 16 bytes, narrower ones, and wide ones under a mask."""

    wide_loads: int
    wide_stores: int
    loads: int
    stores: int
    masked: int


@dataclass(frozen=True)
class Facts:
    """What the program says of a kernel, and what its assembly says.

    `read` and `written` are the program's bytes an element; `threads` share `block` elements. `rows` are the values of
    rows that are read, and left, in each row of a tile. `loops` are those with accesses of 16 bytes. `stack` is
    the bytes of it; `local` counts accesses of local memory in these loops of the machine's code, or in all of AMD's.
    """

    kernel: str
    shaped: bool
    read: int
    written: int
    rows: tuple[int, int]
    block: int
    threads: int
    loops: list[Loop]
    stack: int
    local: int
    fused: int
    approximate: list[str]


def compiled(target: str, dtype: str, rules: Sequence[str], states: str = "") -> list[Facts]:
    """The facts of every kernel of these rules, compiled in another process."""
    kept = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.backends.triton_compiled", target, f"{dtype},{states}", *rules]
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            command, env={**kept, "TRITON_CACHE_DIR": cache}, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return [Facts(**{**f, "loops": [Loop(**loop) for loop in f["loops"]]}) for f in found]


def programs(rule: str, dtype: str, states: str = "") -> Iterator[tuple[Program, Layout]]:
    """The program of a rule, as it is compiled here."""
    for bucket in buckets_of(loaded(rule), SHAPES)[:1]:
        stored = {b.name: states or dtype for b in bucket.program.states}
        yield scheduled(bucket.program, layout_for(bucket.program, dtype, states=stored, transposed=bucket.transposed))


@functools.lru_cache(maxsize=1024)
def sources(rule: str, dtype: str, states: str = "") -> tuple[str, ...]:
    """The text of a rule's kernels."""
    return tuple(TritonBackend().emit(program, layout) for program, layout in programs(rule, dtype, states))


def _compile(target: str, dtypes: str, rules: Sequence[str]) -> Iterator[Facts]:
    dtype, states = dtypes.split(",")
    for rule in rules:
        for program, layout in programs(rule, dtype, states):
            backend = TritonBackend()
            kernels = backend.build(program, layout, backend.emit(program, layout)).kernels
            for index, stage in enumerate(program.stages):
                if stage.roots:
                    yield _facts(f"{rule} {layout.text()} stage {index}", target, program, layout, index, kernels)


def _facts(
    name: str, target: str, program: Program, layout: Layout, index: int, kernels: dict[str, Any]
) -> Facts:  # fmt: skip
    stage = program.stages[index]
    read, written = moved(program, stage, layout)
    vector = vector_width(program, stage, layout)
    block = tile_for(vector, target) if is_shaped(program, stage, layout) else block_for(read + written, target)
    if stage.reduces and not is_shaped(program, stage, layout):
        block = reducing(block)
    made = made_for(target, kernels[f"stage_{index}"], constants(program, layout, index, block), block.threads)
    text = made.asm.get("ptx") or made.asm["amdgcn"]
    nest = Nest(program, layout, stage)
    stack, local = memory(made)
    return Facts(
        f"{target} {name}", is_shaped(program, stage, layout), read, written,
        (len(nest.read(ROW)), len(nest.totals(ROW))), block.elements, block.threads,
        [loop for loop in loops(text) if loop.wide_loads + loop.wide_stores], stack, local,
        len(re.findall(r"\bfma\.rn\.f32|v_fma_f32|v_fmac_f32", text)), approximate(text),
    )  # fmt: skip


def approximate(text: str) -> list[str]:
    """The instructions that are not IEEE's.

    Three are allowed: the floor, whose faults with subnormal numbers `floor` mends; float64's reciprocal, which only
    begins the Newton steps of a logarithm's quotient; and the size of a float64's upper word, an exponential's range.
    """
    instructions = re.findall(r"(?<![\w.])[a-z]\w*(?:\.\w+)+", _UPPER_WORD.sub("", text))
    loose = [x for x in instructions if {"approx", "full", "ftz"} & set(x.split("."))]
    return [x for x in loose if not x.startswith(("cvt.rmi.", "rcp.approx.ftz.f64"))]


_UPPER_WORD = re.compile(r"mov\.b64 \{tmp, (%r\d+)\}, %rd\d+; \}\s+abs\.ftz\.f32\s+%r\d+, \1;")


def constants(program: Program, layout: Layout, index: int, block: Block) -> dict[str, Any]:
    """What a stage's kernel is specialised for, on a GPU."""
    stage = program.stages[index]
    found: dict[str, Any] = {
        "stays": None,
        "scale": None,
        "BLOCK": block.elements,
    }
    if is_shaped(program, stage, layout):
        found["VECTOR"] = vector_width(program, stage, layout)
    if any(layout.dtype(s.buffer) == "bfloat16" for s in stage.stores):
        found["EMULATED"] = False
    return found


def made_for(target: str, kernel: Any, known: dict[str, Any], threads: int) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {"chunks": "*i32", "known": "*i64", "moving": "*i64", "jobs": "*i64", "counts": "*fp32", "groups": "*i64"}
    types |= {"tensors": "i32", "kinds": "i32"}
    signature = {name: "constexpr" if name in known else types.get(name, "*fp64") for name in kernel.arg_names}
    kind, architecture = target.split(":")
    gpu = GPUTarget(kind, int(architecture) if kind == "cuda" else architecture, 32 if kind == "cuda" else 64)
    options = {"num_warps": threads // gpu.warp_size, "enable_fp_fusion": False}
    return triton.compile(ASTSource(kernel, signature, constexprs=known), target=gpu, options=options)


def memory(made: Any) -> tuple[int, int]:
    """The bytes of stack, or on AMD's GPUs the registers that are spilled, and the accesses of local memory."""
    if "amdgcn" in made.asm:
        text = made.asm["amdgcn"]
        # Those of scalar registers go into lanes of vector registers, not into memory.
        spilled = re.findall(r"\.vgpr_spill_count:\s+(\d+)", text)
        private = re.findall(r"\.private_segment_fixed_size:\s+(\d+)", text)
        assert spilled
        assert private
        return sum(map(int, spilled)), sum(map(int, private)) + len(re.findall(r"scratch_(?:load|store)", text))
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [tools / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True, check=True
        )
        code = subprocess.run([tools / "nvdisasm", "-c", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", usage.stdout)
    assert found, usage.stdout
    return int(found[2]), int(found[3]) + sum(_local_accesses(lines) for lines in inner_loops(code.stdout))


def _local_accesses(lines: Sequence[str]) -> int:
    """The accesses of local memory in a loop of NVIDIA's machine code, where there are any of 16 bytes."""
    wide = any(re.search(r"\b(?:LDG|STG)\.E\.128", line) for line in lines)
    return wide * sum(bool(re.search(r"\b(?:LDL|STL)\b", line)) for line in lines)


_LABEL = re.compile(r"^(\$?\.?L\w+):")
_BRANCH = re.compile(r"\b(?:bra(?:\.uni)?|s_c?branch\w*|BRA)\s+(?:`\()?(\$?\.?L\w+)")
_WIDE = re.compile(r"\.global\.(?:v4\.b32|v2\.b64)|_dwordx4")
_LOAD = re.compile(r"\bld\.global|\bglobal_load|\bbuffer_load")
_STORE = re.compile(r"\bst\.global|\bglobal_store|\bbuffer_store")


def loops(assembly: str) -> Iterator[Loop]:
    """The global accesses of a kernel's loops."""
    return map(_loop, inner_loops(assembly))


def inner_loops(assembly: str) -> Iterator[list[str]]:
    """The loops of a kernel that hold no other: what lies between a label and a branch back to it."""
    lines = [line.strip() for line in assembly.splitlines()]
    labels = {found[1]: i for i, line in enumerate(lines) if (found := _LABEL.match(line))}
    spans = []
    for end, line in enumerate(lines):
        branch = _BRANCH.search(line)
        if branch and labels.get(branch[1], end) < end:
            spans.append((labels[branch[1]], end))
    for first, last in spans:
        if not any(first <= a and b <= last and (a, b) != (first, last) for a, b in spans):
            yield lines[first:last]


def _loop(lines: Sequence[str]) -> Loop:
    loads, stores = ([line for line in lines if kind.search(line)] for kind in (_LOAD, _STORE))
    wide_loads, wide_stores = ([line for line in x if _WIDE.search(line)] for x in (loads, stores))
    masked = [line for line in [*wide_loads, *wide_stores] if line.startswith("@")]
    return Loop(
        len(wide_loads), len(wide_stores), len(loads) - len(wide_loads), len(stores) - len(wide_stores), len(masked)
    )


def compiled_helpers() -> dict[str, int]:
    """How many of the two kernels beside the stages' compile without local memory, for each target."""
    kept = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, "-m", "tests.backends.triton_compiled"], env={**kept, "TRITON_CACHE_DIR": cache}, cwd=ROOT,
            stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, int] = json.loads(done.stdout)
    return found


def _helpers() -> dict[str, int]:
    """The same, in the process that compiles: the scalar program of a rule, and what finishes its reductions."""
    ((program, layout),) = programs(HELPED, "float32")
    kernels = TritonBackend().build(program, layout, TritonBackend().emit(program, layout)).kernels
    known = {"finish": {"LANES": FINISHED}, "scalars": {"LANES": LANES}}
    counted = {}
    for target in TARGETS:
        made = [made_for(target, kernels[name], constants, 128) for name, constants in known.items()]
        counted[target] = sum(memory(x) == (0, 0) for x in made)
    return counted


if __name__ == "__main__":
    if len(sys.argv) == 1:
        print(json.dumps(_helpers()))
    for facts in _compile(*sys.argv[1:3], sys.argv[3:]) if sys.argv[1:] else ():
        print(json.dumps(asdict(facts)))
