"""Kernels with rows and columns compiled as they are launched on an H200, and what their machine code can reach.

`python -m tests.backends.triton_tiles float32, adafactor came` prints a line of JSON for each kernel, in a process of
its own: Triton must not have been imported for its interpreter.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rulec.compiler.ir import Program
from rulec.compiler.layout import Layout
from rulec.kernel.place import is_shaped
from rulec_backends.triton import TritonBackend
from rulec_backends.triton.blocks import tile_for
from rulec_backends.triton.plan import moved, vector_width
from rulec_backends.triton.registers import ALL, most_registers
from tests.backends.triton_compiled import CHECKERS, ROOT, constants, inner_loops, programs

#: The files that say how such a kernel is launched, and that read its machine code.
JUDGES = (*CHECKERS, Path(__file__), ROOT / "backends/triton/registers.py")

TARGET = "cuda:90"

#: An H200: multiprocessors, cycles a second, bytes of shared memory and threads of a multiprocessor, the bytes a second
#: of a copy as measured; about the seconds from a load to its value, and the cycles from an instruction to the next.
MULTIPROCESSORS, CLOCK, SHARED, THREADS, COPY, LATENCY, APART = 132, 1.75e9, 227 * 1024, 2048, 4.2e12, 600e-9, 4

#: The lanes of a multiprocessor that take an instruction in a cycle: of any kind, and of kinds with few lanes.
ANY = 128
FEW = {
    "special": (16, ("MUFU", "FCHK", "F2F")),
    "float64": (64, ("DADD", "DMUL", "DFMA")),
    "between lanes": (32, ("SHFL",)),
}


@dataclass(frozen=True)
class TileFacts:
    """A kernel: its bytes an element, its tile, what it takes of a multiprocessor, and its loop over whole tiles.

    `instructions` are those that a thread executes for a tile, by name, where no quotient or root is out of the common
    range. `local` counts their accesses of local memory.
    """

    kernel: str
    read: int
    written: int
    elements: int
    threads: int
    registers: int
    shared: int
    local: float
    instructions: dict[str, float]

    @property
    def programs(self) -> int:
        """How many programs share a multiprocessor."""
        by_registers = ALL // (-(-self.registers // 8) * 8 * self.threads)
        return min(by_registers, SHARED // (self.shared + 1024), THREADS // self.threads)

    def seconds(self, elements: int) -> dict[str, float]:
        """The time for this many elements by each limit: memory, the wait for values, and the instructions by kind.

        A program loads a tile, waits, and then computes with it, one after the other.
        """
        tiles = elements / self.elements / MULTIPROCESSORS
        turns = tiles * self.threads / CLOCK
        count = sum(self.instructions.values())
        counts = {kind: sum(self.instructions.get(x, 0) for x in names) for kind, (_, names) in FEW.items()}
        return {
            "memory": elements * (self.read + self.written) / COPY,
            "waiting": tiles * (LATENCY + APART * count / CLOCK) / self.programs,
            "any": turns * count / ANY,
            **{kind: turns * counts[kind] / lanes for kind, (lanes, _) in FEW.items()},
        }


def compiled(dtypes: str, rules: Sequence[str]) -> list[TileFacts]:
    """The facts of all kernels with rows and columns of these rules; `dtypes` are "of arrays,of states or nothing"."""
    kept = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, "-m", "tests.backends.triton_tiles", dtypes, *rules],
            env={**kept, "TRITON_CACHE_DIR": cache}, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [TileFacts(**json.loads(line)) for line in done.stdout.splitlines()]


def _compile(dtypes: str, rules: Sequence[str]) -> Iterator[TileFacts]:
    dtype, states = dtypes.split(",")
    for rule in rules:
        for program, layout in programs(rule, dtype, states):
            kernels = TritonBackend().build(program, layout, TritonBackend().emit(program, layout)).kernels
            for index, stage in enumerate(program.stages):
                if stage.roots and is_shaped(program, stage, layout):
                    yield _facts(f"{rule} {layout.text()} stage {index}", program, layout, index, kernels)


def _facts(name: str, program: Program, layout: Layout, index: int, kernels: dict[str, Any]) -> TileFacts:
    stage = program.stages[index]
    read, written = moved(program, stage, layout)
    vector = vector_width(program, stage, layout)
    tile = tile_for(vector, TARGET)
    bound = most_registers(read + written, vector, bool(stage.reduces), tile.threads)
    made = _made(kernels[f"stage_{index}"], constants(program, layout, index, tile), tile.threads, bound)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage, code = _tool("cuobjdump", "-res-usage", file.name), _tool("nvdisasm", "-c", file.name)
    (registers,) = re.findall(r"REG:(\d+)", usage)
    loop = whole_tiles(code)
    counts = Counter(name.split(".")[0] for name in executed(loop))
    # The compiler may make one turn of several.
    turns = 16 * sum(map(bool, map(_WIDE_LOAD.search, loop))) / (read * tile.elements / tile.threads)
    return TileFacts(
        name, read, written, tile.elements, tile.threads, int(registers), made.metadata.shared,
        (counts["LDL"] + counts["STL"]) / turns, {name: count / turns for name, count in counts.items()},
    )  # fmt: skip


def _made(kernel: Any, known: dict[str, Any], threads: int, registers: int) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kind, architecture = TARGET.split(":")
    types = {"chunks": "*i32", "known": "*i64", "moving": "*i64"}
    signature = {name: "constexpr" if name in known else types.get(name, "*fp64") for name in kernel.arg_names}
    options = {"num_warps": threads // 32, "enable_fp_fusion": False, "maxnreg": registers}
    source = ASTSource(kernel, signature, constexprs=known)
    return triton.compile(source, target=GPUTarget(kind, int(architecture), 32), options=options)


def _tool(name: str, *arguments: str) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([tool, *arguments], capture_output=True, text=True, check=True).stdout


# Machine code

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")
_OVER = re.compile(r"/\s+@!?U?P\w+\s+BRA\s+`\((\.L\w+)\)")
_WIDE_LOAD = re.compile(r"LDG\.E(?:\.\w+)*\.128")


def whole_tiles(code: str) -> list[str]:
    """The lines of the last loop with loads of 16 bytes: tiles of several rows."""
    found = [lines for lines in inner_loops(code) if any(map(_WIDE_LOAD.search, lines))]
    return found[-1]


def executed(lines: Sequence[str]) -> list[str]:
    """The names of the instructions of a loop's turn, without those that a quotient or root in range jumps over."""
    labels = {line.split(":")[0]: at for at, line in enumerate(lines) if line.startswith(".L")}
    names, at = [], 0
    while at < len(lines):
        found, over = _INSTRUCTION.search(lines[at]), _OVER.search(lines[at])
        names += [found[1]] if found else []
        to = labels.get(over[1], 0) if over else 0
        at = to if any("CALL" in line for line in lines[at:to]) else at + 1
    return names


if __name__ == "__main__":
    for facts in _compile(sys.argv[1], sys.argv[2:]):
        print(json.dumps(asdict(facts)), flush=True)
