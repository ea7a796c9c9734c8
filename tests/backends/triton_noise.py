"""Triton's kernels that make noise, compiled for GPUs that are not here.

`python -m tests.backends.triton_noise cuda:90 float32 adamw popcount` prints a line of JSON for each kind of values. It
is a process of its own, because Triton must not have been imported for its interpreter.
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

import rulec
from rulec.compiler.layout import ITEM_SIZE, layout_for
from rulec_backends.triton import TritonBackend
from rulec_backends.triton.noise import NOISY
from rulec_backends.triton.plan import moved
from tests.backends.triton_compiled import ROOT, Loop, approximate, inner_loops, loops, made_for, memory


@dataclass(frozen=True)
class Facts:
    """What the program moves for each element, but for a gradient, and what the assembly of its kernel says.

    `loops` are those with accesses of 16 bytes, `products` the instructions that give the upper word of a product, and
    `exchanges` what threads give each other in the loops that have such.
    """

    kernel: str
    read: int
    written: int
    block: int
    threads: int
    loops: list[Loop]
    stack: int
    local: int
    products: int
    exchanges: int
    approximate: list[str]


def compiled_noise(target: str, dtype: str, rule: str, values: Sequence[str]) -> list[Facts]:
    """The facts of a rule's kernel for each kind of values, compiled in another process."""
    kept = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, "-m", "tests.backends.triton_noise", target, dtype, rule, *values], cwd=ROOT,
            env={**kept, "TRITON_CACHE_DIR": cache}, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return [Facts(**{**f, "loops": [Loop(**loop) for loop in f["loops"]]}) for f in found]


def _compile(target: str, dtype: str, rule: str, values: Sequence[str]) -> Iterator[Facts]:
    program, backend = rulec.compile(rulec.load(rule)), TritonBackend()
    layout = layout_for(program, dtype)
    read, written = moved(program, program.stages[0], layout)
    known = {"stays": None, "scale": None, "BLOCK": NOISY.elements}
    known |= {"EMULATED": False} if dtype == "bfloat16" else {}
    for kind in values:
        kernels = backend.build_estimate(program, layout, kind, backend.emit_estimate(program, layout, kind)).kernels
        made = made_for(target, kernels["stage_0"], known, NOISY.threads)
        text = made.asm.get("ptx") or made.asm["amdgcn"]
        yield Facts(
            f"{target} {dtype} {rule} {kind}", read - ITEM_SIZE[dtype], written, NOISY.elements, NOISY.threads,
            [loop for loop in loops(text) if loop.wide_loads + loop.wide_stores], *memory(made),
            len(_PRODUCT.findall(text)), sum(map(_exchanges, inner_loops(text))), approximate(text),
        )  # fmt: skip


_PRODUCT = re.compile(r"\bmul\.(?:hi|wide)\.u32|v_mul_hi_u32|v_mad_u64_u32")
_EXCHANGE = re.compile(r"\b(?:ld|st)\.shared|\bbar\.sync|\bshfl|\bds_|s_barrier")


def _exchanges(lines: Sequence[str]) -> int:
    text = "\n".join(lines)
    return len(_EXCHANGE.findall(text)) if _PRODUCT.search(text) else 0


if __name__ == "__main__":
    for facts in _compile(*sys.argv[1:4], sys.argv[4:]):
        print(json.dumps(asdict(facts)))
