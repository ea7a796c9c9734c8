"""The products of `newton_schulz` compiled for GPUs that are not here.

`python -m tests.backends.triton_quintic cuda:90 bfloat16` prints a line of JSON for each kernel, in a process of its
own, because Triton must not have been imported for its interpreter.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from rulec_backends.triton import TritonBackend
from rulec_backends.triton.product import Tile, tiles_for
from rulec_backends.triton.quintic_call import tuned
from tests.backends.triton_compiled import ROOT, approximate, memory

_SHORT = {"bfloat16": "bf16", "float16": "fp16"}

#: How the factors of each product lie: whether terms are down the columns of the left one, and of the right one;
#: whether it is symmetric, and has an addend.
KINDS = {
    "gram": (False, False, True, False), "gram of tall": (True, True, True, False),
    "polynomial": (False, False, True, True), "following": (False, True, False, True),
}  # fmt: skip

_WIDE_STORE = re.compile(r"\bst\.global\.(?:v4\.b32|v2\.b64)|(?:global|buffer)_store_dwordx4")
_STORE = re.compile(r"\bst\.global|(?:global|buffer)_store_")
_WIDE_LOAD = re.compile(
    r"\bcp\.async\.cg\.shared\.global [^;]*0x10|\bcp\.async\.bulk\.tensor|\bld\.global\.(?:v4\.b32|v2\.b64)"
    r"|(?:global|buffer)_load_dwordx4"
)
_LOAD = re.compile(r"\bcp\.async\.(?:c[ag]\.|bulk\.tensor)|\bld\.global|(?:global|buffer)_load_")
#: Copies into shared memory past registers; with them the loads of the next terms run beside products.
_COPY = re.compile(r"\bcp\.async\.(?:cg\.|bulk\.tensor)")


@dataclass(frozen=True)
class Facts:
    """What the assembly says of a kernel.

    `products` are instructions of tensor cores, `copies` those that load past registers; there are `loads` and `stores`
    in all, and those of 16 bytes or more. `stack` is its bytes, `local` the accesses of local memory in loops.
    """

    kernel: str
    instruction: str
    products: int
    copies: int
    loads: int
    wide_loads: int
    stores: int
    wide_stores: int
    stack: int
    local: int
    approximate: list[str]


def compiled(target: str, dtype: str, kinds: str = "") -> list[Facts]:
    """The facts of the kernels of every tile, of every kind or those named, compiled in another process."""
    kept = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.backends.triton_quintic", target, dtype, kinds]
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            command, env={**kept, "TRITON_CACHE_DIR": cache}, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [Facts(**json.loads(line)) for line in done.stdout.splitlines()]


def cases(target: str, dtype: str, kinds: str = "") -> list[tuple[str, Tile, bool]]:
    """The kernels for a target: a kind, a tile, and whether all tiles of a matrix are whole."""
    tiles = tiles_for(dtype, int(target[5:-1]) if target.startswith("cuda") else None)
    chosen = [kind for kind in KINDS if not kinds or kind in kinds.split(",")]
    every = product(chosen, tiles, (True, False))
    return [
        (kind, tuned(tile, *KINDS[kind][2:]), whole)
        for kind, tile, whole in every
        if tile.high == tile.wide or not KINDS[kind][2]
    ]


def _compile(target: str, dtype: str, kinds: str) -> Iterator[Facts]:
    source = TritonBackend().emit_quintic(dtype)
    kernel = TritonBackend().build_quintic(dtype, source)._kernel
    for kind, tile, whole in cases(target, dtype, kinds):
        made = _made(target, kernel, dtype, kind, tile, whole)
        yield _facts(f"{target} {kind} {tile}{'' if whole else ' with ends'}", made)


def _facts(name: str, made: Any) -> Facts:
    text = made.asm.get("ptx") or made.asm["amdgcn"]
    found = re.findall(r"\b(wgmma)\.mma_async|\b(tcgen05)\.mma|\b(mma)\.sync|\bv_(mfma)_", text)
    instructions = [next(filter(None, one)) for one in found]
    lines = text.splitlines()

    def count(pattern: re.Pattern[str]) -> int:
        return sum(bool(pattern.search(line)) for line in lines)

    numbers = [count(pattern) for pattern in (_COPY, _LOAD, _WIDE_LOAD, _STORE, _WIDE_STORE)]
    first = instructions[0] if instructions else ""
    return Facts(name, first, len(instructions), *numbers, *memory(made), approximate(text))


def _made(target: str, kernel: Any, dtype: str, kind: str, tile: Tile, whole: bool) -> Any:
    """Compiled for matrices whose sizes and addresses are multiples of 16, as those of models are."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    left, right, half, adds = KINDS[kind]
    known: dict[str, Any] = {k: v for k, v in tile.constants.items() if k != "PARTS"}
    known |= {"HALF": half, "ADDS": adds, "LEFT_DOWN": left, "RIGHT_DOWN": right, "DESCRIBED": tile.described}
    known |= {"ALL": whole, "EVEN": True, "EMULATED": False} | ({} if adds else {"added": None})
    short = _SHORT[dtype]
    types = dict.fromkeys(["height", "width", "depth"], "i32") | dict.fromkeys(["share", "factor"], "fp32")
    types |= dict.fromkeys(["left", "right", "added", "out"], f"*{short}")
    if tile.described:
        for name, lines, down in (("left", tile.high, left), ("right", tile.wide, right)):
            extents = (tile.deep, lines) if down else (lines, tile.deep)
            types[name] = "tensordesc<{}[1,{},{}]>".format(short, *extents)
    signature = {name: "constexpr" if name in known else types[name] for name in kernel.arg_names}
    free = [i for i, n in enumerate(kernel.arg_names) if n not in known and types[n][0] in "*i"]
    kind_of_gpu, architecture = target.split(":")
    cuda = kind_of_gpu == "cuda"
    gpu = GPUTarget(kind_of_gpu, int(architecture) if cuda else architecture, 32 if cuda else 64)
    source = ASTSource(kernel, signature, constexprs=known, attrs={(i,): [["tt.divisibility", 16]] for i in free})
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": False}
    return triton.compile(source, target=gpu, options=options)


if __name__ == "__main__":
    for facts in _compile(*sys.argv[1:4]):
        print(json.dumps(asdict(facts)))
