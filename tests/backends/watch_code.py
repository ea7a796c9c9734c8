"""Machine code of steps with and without statistics, for a GPU that is not here: the path of whole packs of a loop.

`python -m tests.backends.watch_code` writes docs/data/watch_code.json, from which docs/watch.md has its table. `python
-m tests.backends.watch_code cupy float32 adamw lamb` prints a line of JSON for each stage. It is a process of its own,
because Triton must not have been imported for its interpreter.
"""

from __future__ import annotations

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

import rulec
from rulec.compiler.ir import Program
from rulec.compiler.layout import ITEM_SIZE, Layout, layout_for, scheduled
from rulec.compiler.pipeline import compile
from rulec.compiler.routing import Router
from rulec.compiler.view import view_of
from rulec.kernel.nest import Nest
from rulec.kernel.place import COL, is_shaped
from rulec.language.statistics import watched

ROOT = Path(__file__).parent.parent.parent
FILE = ROOT / "docs" / "data" / "watch_code.json"

#: The GPU that is compiled for, the rules of the table, and the dtypes of their parameters and states.
ARCHITECTURE = 90
RULES = ("adamw", "lion", "sgd", "lamb", "adafactor", "muon")
DTYPES = ("float32", "bfloat16")
BACKENDS = ("cupy", "triton")

#: A rule's tensors: one matrix, so that it is the program for matrices that is compiled.
SHAPE = (64, 48)


@dataclass(frozen=True)
class Cost:
    """What a thread does for one element: instructions, those of float64, and bytes of global memory. And in all:
    the registers of a thread, and the bytes that it keeps in local memory."""

    instructions: float
    wide: float
    read: float
    written: float
    registers: int
    stack: int


@dataclass(frozen=True)
class StageCost:
    """A stage of a rule's step without statistics and with the set `norms`."""

    backend: str
    rule: str
    dtype: str
    stage: int
    plain: Cost
    measured: Cost


@dataclass(frozen=True)
class Instruction:
    """An instruction of SASS: its address, whether it has a predicate, its name, and where it may jump to."""

    address: int
    predicated: bool
    name: str
    target: int

    @property
    def moved(self) -> int:
        """The bytes of global memory that it moves."""
        if not self.name.startswith(("LDG", "STG")):
            return 0
        sizes = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1, "16": 2, "8": 1}
        return next((sizes[word] for word in self.name.split(".") if word in sizes), 4)


_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);")
_TARGET = re.compile(r"0x[0-9a-f]+")


def instructions(text: str) -> list[Instruction]:
    """The instructions of a kernel, from what cuobjdump prints."""
    found = []
    for address, predicate, name, operands in _LINE.findall(text):
        targets = _TARGET.findall(operands) if name.startswith("BRA") else []
        found.append(Instruction(int(address, 16), bool(predicate), name, int(targets[-1], 16) if targets else 0))
    return found


def usual_path(code: Sequence[Instruction]) -> list[Instruction]:
    """The way through a kernel's main loop in which most bytes are moved 16 at a time.

    Of the ways with as many it is that without calls, then the shortest: quotients and roots have long ways for
    subnormal numbers. The main loop is that with most such bytes, of those that hold no other with any.
    """
    places = {x.address: i for i, x in enumerate(code)}
    loops = [(places[x.target], i) for i, x in enumerate(code) if x.name.startswith("BRA") and places[x.target] < i]
    ways = {loop: _best_way(code, places, *loop) for loop in loops}
    wide = [loop for loop, way in ways.items() if any(x.moved == 16 for x in way)]
    inner = [a for a in wide if not any(a[0] <= b[0] and b[1] <= a[1] and a != b for b in wide)]
    return min((ways[loop] for loop in inner), key=_rank)


def _rank(way: Sequence[Instruction]) -> tuple[int, int, int]:
    calls = sum(x.name.startswith("CALL") for x in way)
    return -sum(x.moved == 16 for x in way), calls, len(way)


def _best_way(code: Sequence[Instruction], places: dict[int, int], first: int, last: int) -> list[Instruction]:
    """The way of least rank from the head of a loop to the branch back, along branches forward alone."""
    best: dict[int, list[Instruction]] = {first: []}
    for i in range(first, last):
        if i not in best:
            continue
        way, x = [*best.pop(i), code[i]], code[i]
        jumps = x.name.startswith("BRA")
        after = [places[x.target]] * jumps + [i + 1] * (x.predicated or not jumps)
        for place in after:
            if i < place <= last and (place not in best or _rank(way) < _rank(best[place])):
                best[place] = way
    return [*best[last], code[last]] if last in best else []


def cost(cubin: bytes, kernel: str, elements: int, moved: int) -> Cost:
    """The cost of a kernel whose thread takes so many elements at a time, or several times as many in an unrolled loop.

    `moved` are the bytes of an element that move 16 at a time.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text, usage = _cuobjdump("-sass", "-fun", kernel, file.name), _cuobjdump("-res-usage", file.name)
    way = usual_path(instructions(text))
    resources = re.search(rf"Function {kernel}:\s+REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", usage)
    assert resources, usage
    names = [x.name for x in way]
    elements *= max(1, sum(x.moved for x in way if x.moved == 16) // (elements * moved))
    loads, stores = (sum(x.moved for x in way if x.name.startswith(kind)) for kind in ("LDG", "STG"))
    wide = sum(bool(re.match(r"D(ADD|MUL|FMA|SETP|MNMX)|\w+.*F64", name)) for name in names)
    return Cost(
        len(way) / elements, wide / elements, loads / elements, stores / elements, int(resources[1]),
        int(resources[2]) + int(resources[3]),
    )  # fmt: skip


def _cuobjdump(*arguments: str) -> str:
    import triton

    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=True).stdout


def program_of(name: str, dtype: str, watch: str) -> tuple[Program, Layout]:
    """The program of a rule for a matrix, with the statistics of a set or without."""
    rule = Router(rulec.load(name)).choose(SHAPE, ())
    view = view_of(rule, SHAPE)
    program = compile(rule, view.facts, watch=watched(rule, watch))
    return scheduled(program, layout_for(program, dtype, transposed=view.transposed))


def by_cupy(program: Program, layout: Layout) -> list[Cost]:
    """The costs of a program's stages in CUDA C."""
    from rulec_backends.cupy.plan import kernel_name, pack_width
    from rulec_backends.cupy.print import kernel_source
    from rulec_backends.triton.plan import moved
    from tests.backends.cuda_assembly import compiled

    cubin = compiled(kernel_source(program, layout), f"sm_{ARCHITECTURE}")
    stages = [(kernel_name(program, i), stage) for i, stage in enumerate(program.stages) if stage.roots]
    costs = []
    for name, stage in stages:
        columns = len(Nest(program, layout, stage).read(COL)) * ITEM_SIZE[layout.compute]
        size = sum(moved(program, stage, layout)) + columns
        costs.append(cost(cubin, name, pack_width(program, layout, stage), size))
    return costs


def by_triton(program: Program, layout: Layout) -> list[Cost]:
    """The costs of a program's stages in Triton."""
    from rulec_backends.triton import TritonBackend
    from rulec_backends.triton.blocks import block_for, reducing, tile_for
    from rulec_backends.triton.plan import moved, vector_width
    from tests.backends.triton_compiled import constants, made_for

    target, backend, costs = f"cuda:{ARCHITECTURE}", TritonBackend(), []
    kernels = backend.build(program, layout, backend.emit(program, layout)).kernels
    for index, stage in enumerate(program.stages):
        if not stage.roots:
            continue
        size = sum(moved(program, stage, layout))
        if is_shaped(program, stage, layout):
            block = tile_for(vector_width(program, stage, layout), target)
        else:
            block = reducing(block_for(size, target)) if stage.reduces else block_for(size, target)
        known = constants(program, layout, index, block)
        made = made_for(target, kernels[f"stage_{index}"], known, block.threads)
        costs.append(cost(made.asm["cubin"], made.metadata.name, block.elements // block.threads, size))
    return costs


def measure(backend: str, dtype: str, rules: Sequence[str]) -> Iterator[StageCost]:
    """The costs of the stages of rules, which are as many with statistics as without."""
    costs = by_cupy if backend == "cupy" else by_triton
    for rule in rules:
        plain, measured = (costs(*program_of(rule, dtype, watch)) for watch in ("", "norms"))
        for stage, (without, with_norms) in enumerate(zip(plain, measured, strict=True)):
            yield StageCost(backend, rule, dtype, stage, without, with_norms)


def measured_elsewhere(backend: str, dtype: str, rules: Sequence[str]) -> list[StageCost]:
    """The same, in another process."""
    kept = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.backends.watch_code", backend, dtype, *rules]
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            command, env={**kept, "TRITON_CACHE_DIR": cache}, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [stage_cost(json.loads(line)) for line in done.stdout.splitlines()]


def stage_cost(data: dict[str, Any]) -> StageCost:
    """A stage's cost from its JSON."""
    return StageCost(**{**data, "plain": Cost(**data["plain"]), "measured": Cost(**data["measured"])})


if __name__ == "__main__":
    if sys.argv[1:]:
        for each in measure(sys.argv[1], sys.argv[2], sys.argv[3:]):
            print(json.dumps(asdict(each)), flush=True)
    else:
        table = [asdict(x) for b in BACKENDS for d in DTYPES for x in measured_elsewhere(b, d, RULES)]
        FILE.write_text("[\n" + ",\n".join(map(json.dumps, table)) + "\n]\n")
