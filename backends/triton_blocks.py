"""How many elements a program of a Triton kernel takes at a time, by the bytes that an element's update moves.

There is no tuning at run time. The table below is the default; a measurement on a GPU may write another for it
(`save`), as JSON in the folder `triton` of the kernel cache.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rulec.backend import cache
from rulec.errors import RulecError

#: The narrowest dtype must fill 16 bytes in each of 32 threads of each warp: no block is smaller than this.
SMALLEST = 256


@dataclass(frozen=True)
class Block:
    """`elements` in a block or tile, a power of two, and the `warps` that share them."""

    elements: int
    warps: int


#: Blocks by the most bytes that an element's update may move, reads and writes of one stage together: the first line
#: that is enough holds. Every thread then has two to four accesses of 16 bytes under way for each buffer.
DEFAULT: Mapping[int, Block] = {12: Block(2048, 4), 32: Block(1024, 4), 1 << 30: Block(1024, 4)}

#: What runs where there is no GPU, and its blocks: an operation costs the same there for few numbers as for many.
INTERPRETER = "Triton's interpreter"
INTERPRETED: Mapping[int, Block] = {1 << 30: Block(4096, 4)}


def block_for(moved: int, device: str) -> Block:
    """The block of a stage that moves so many bytes for an element, on a GPU of this name."""
    table = saved().get(device, INTERPRETED if device == INTERPRETER else DEFAULT)
    return next(block for most, block in sorted(table.items()) if moved <= most)


def save(device: str, table: Mapping[int, Block]) -> None:
    """Keeps a table for GPUs of this name; kernels built from now on use it.

    The keys are bytes moved for an element, as in `DEFAULT`: each line holds up to its own, and the last line's key
    must be at least 1024.
    """
    if not table or max(table) < 1024:
        raise RulecError("a table of blocks needs a last line for 1024 bytes an element or more")
    for block in table.values():
        check(block)
    known = {**saved(), device: dict(table)}
    text = {d: {str(most): [b.elements, b.warps] for most, b in t.items()} for d, t in known.items()}
    cache.write_atomically(_file(), json.dumps(text, indent=1).encode())
    saved.cache_clear()


@functools.cache
def saved() -> dict[str, dict[int, Block]]:
    """The tables that were kept, by the GPU's name; none where the file is missing or damaged."""
    try:
        found = json.loads(_file().read_text(encoding="utf-8"))
        tables = {d: {int(most): Block(*pair) for most, pair in t.items()} for d, t in found.items()}
        for table in tables.values():
            for block in table.values():
                check(block)
    except (OSError, ValueError, TypeError, AttributeError, RulecError):
        return {}
    return {d: t for d, t in tables.items() if t and max(t) >= 1024}


def check(block: Block) -> None:
    """RulecError where a block has no power of two of elements, or too few for its warps."""
    elements, warps = block.elements, block.warps
    powers = all(isinstance(n, int) and n > 0 and n & (n - 1) == 0 for n in (elements, warps))
    if not powers or elements < SMALLEST * warps or warps > 32:
        raise RulecError(
            f"a block of {elements} elements for {warps} warps: both must be powers of two, and {SMALLEST} elements "
            "the least for each warp"
        )


def _file() -> Path:
    return cache.cache_folder() / "triton" / "blocks.json"
