"""Kernels with an update in the epilogue of a product, compiled for GPUs that are not here.

`python -m tests.backends.triton_products cuda:90 bfloat16 adamw` prints a line of JSON for each kernel, in a process of
its own, because Triton must not have been imported for its interpreter.
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
from typing import Any

from rulec.compiler.ir import Program
from rulec.compiler.layout import Layout, layout_for
from rulec.testing.cases import buckets_of, loaded
from rulec_backends.triton import TritonBackend
from rulec_backends.triton.product import Tile, tiles_for
from tests.backends.triton_compiled import ROOT, approximate, memory

_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}

_WIDE = re.compile(r"\bst\.global\.(?:v4\.b32|v2\.b64)|(?:global|buffer)_store_dwordx4")
_STORE = re.compile(r"\bst\.global|(?:global|buffer)_store_")


@dataclass(frozen=True)
class Product:
    """What the assembly of a kernel says: its instructions on tensor cores, how it stores, what it keeps in memory."""

    kernel: str
    instruction: str
    products: int
    wide_stores: int
    stores: int
    stack: int
    local: int
    approximate: list[str]


def compiled_products(target: str, dtype: str, rules: Sequence[str], states: str = "", most: int = 9) -> list[Product]:
    """The facts of the kernels of these rules, of each tile (or the first ones), compiled in another process."""
    kept = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.backends.triton_products", target, f"{dtype},{states},{most}", *rules]
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            command, env={**kept, "TRITON_CACHE_DIR": cache}, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [Product(**json.loads(line)) for line in done.stdout.splitlines()]


def _program(rule: str, dtype: str, states: str) -> tuple[Program, Layout]:
    (bucket,) = buckets_of(loaded(rule), [(64, 48)])
    stored = {b.name: states or dtype for b in bucket.program.states}
    return bucket.program, layout_for(bucket.program, dtype, states=stored)


def product_source(rule: str, dtype: str, states: str) -> str:
    """The text of a rule's kernel."""
    return TritonBackend().emit_epilogue(*_program(rule, dtype, states), dtype)


def _compile(target: str, given: str, rules: Sequence[str]) -> Iterator[Product]:
    dtype, states, most = given.split(",")
    capability = int(target[5:-1]) if target.startswith("cuda") else None
    for rule in rules:
        program, layout = _program(rule, dtype, states)
        source = product_source(rule, dtype, states)
        kernel = TritonBackend().build_epilogue(program, layout, dtype, source).kernel
        for tile in tiles_for(dtype, capability)[: int(most)]:
            yield _facts(f"{target} {rule} {layout.text()} {tile}", _made(target, kernel, layout, dtype, tile))


def _facts(name: str, made: Any) -> Product:
    text = made.asm.get("ptx") or made.asm["amdgcn"]
    found = re.findall(r"\b(wgmma)\.mma_async|\b(tcgen05)\.mma|\b(mma)\.sync|\bv_(mfma)_", text)
    instructions = [next(filter(None, one)) for one in found]
    stores = [line for line in text.splitlines() if _STORE.search(line)]
    stack, local = memory(made)
    return Product(
        name, instructions[0] if instructions else "", len(instructions), sum(bool(_WIDE.search(x)) for x in stores),
        len(stores), stack, local, approximate(text),
    )  # fmt: skip


def _made(target: str, kernel: Any, layout: Layout, factors: str, tile: Tile) -> Any:
    """Compiled for whole tiles of matrices whose sizes and addresses are multiples of 16, as those of models are."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    known = {**tile.constants, "PRECISION": "ieee", "ALL": True, "EVEN": True, "EMULATED": False}
    known |= {"stays": None, "scale": None, "DESCRIBED": tile.described}
    types = dict.fromkeys(["row", "tokens", "height", "width", "outputs_line", "inputs_line"], "i32")
    types |= {"table": "*fp64"} | dict.fromkeys(["outputs", "inputs"], f"*{_SHORT[factors]}")
    if tile.described:
        sizes = {"outputs": tile.high, "inputs": tile.wide}
        types |= {name: f"tensordesc<{_SHORT[factors]}[{tile.deep},{size}]>" for name, size in sizes.items()}
    types |= {f"{b}_at": f"*{_SHORT[d]}" for b, d in layout.dtypes}
    signature = {name: "constexpr" if name in known else types[name] for name in kernel.arg_names}
    others = {*known, "row", "table", "tokens"} | {n for n, kind in types.items() if kind.startswith("tensordesc")}
    free = [i for i, name in enumerate(kernel.arg_names) if name not in others]
    kind, architecture = target.split(":")
    gpu = GPUTarget(kind, int(architecture) if kind == "cuda" else architecture, 32 if kind == "cuda" else 64)
    source = ASTSource(kernel, signature, constexprs=known, attrs={(i,): [["tt.divisibility", 16]] for i in free})
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": False}
    return triton.compile(source, target=gpu, options=options)


if __name__ == "__main__":
    for facts in _compile(*sys.argv[1:3], sys.argv[3:]):
        print(json.dumps(asdict(facts)))
