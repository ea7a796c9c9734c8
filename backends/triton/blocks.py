"""The number of elements that a program of a Triton kernel takes at a time, by the bytes moved for an element.

There is no tuning at run time. The table below is the default. A measurement on a GPU may save another table for it
(`save`), as JSON in the folder `triton` of the kernel cache.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass

from rulec.backend import cache
from rulec.errors import RulecError

#: The file in the kernel cache.
_PLACE = "triton", "blocks.json"

#: Elements of the narrowest dtype in 16 bytes: the least elements of a block for each of its threads.
SMALLEST = 8


@dataclass(frozen=True)
class Block:
    """A block or tile of `elements`, a power of two, shared by `threads`."""

    elements: int
    threads: int


#: Blocks by the most bytes moved for an element, reads and writes of one stage together: the first line with enough
#: bytes holds. Every thread then has one to four accesses of 16 bytes in flight for each buffer.
DEFAULT: Mapping[int, Block] = {12: Block(2048, 128), 1 << 30: Block(1024, 128)}

#: The name for a machine without a GPU, and its blocks: an operation costs the same there for few and for many numbers.
INTERPRETER = "Triton's interpreter"
INTERPRETED: Mapping[int, Block] = {1 << 30: Block(4096, 128)}

#: The threads of a tile in a stage with rows and columns, each with 16 bytes of the narrowest array. Such a stage keeps
#: many values for each element, and more elements would not fit into registers.
TILE_THREADS = 256


def block_for(moved: int, device: str) -> Block:
    """The block of a stage that moves `moved` bytes for an element, on a GPU of this name."""
    table = saved().get(device, INTERPRETED if device == INTERPRETER else DEFAULT)
    return next(block for most, block in sorted(table.items()) if moved <= most)


#: The most elements of a thread in a stage with reductions: each is in float64.
MOST_REDUCED = 8


def reducing(block: Block) -> Block:
    """The block of a stage with reductions, from the block of one without."""
    return Block(min(block.elements, MOST_REDUCED * block.threads), block.threads)


def tile_for(vector: int, device: str) -> Block:
    """The tile of a stage with rows and columns; `vector` elements of the narrowest array are 16 bytes."""
    elements = 4096 if device == INTERPRETER else TILE_THREADS * vector
    return Block(elements, TILE_THREADS)


def save(device: str, table: Mapping[int, Block]) -> None:
    """Saves a table for GPUs of this name; kernels built from now on use it.

    The keys are bytes moved for an element, as in `DEFAULT`: each line holds up to its key. RulecError where the last
    key is below 1024, or a block is not possible.
    """
    if not table or max(table) < 1024:
        raise RulecError("a table of blocks needs a last line for 1024 bytes an element or more")
    for block in table.values():
        check(block)
    known = {**saved(), device: dict(table)}
    text = {d: {str(most): [b.elements, b.threads] for most, b in t.items()} for d, t in known.items()}
    cache.write_single(*_PLACE, json.dumps(text, indent=1).encode())
    saved.cache_clear()


@functools.cache
def saved() -> dict[str, dict[int, Block]]:
    """The saved tables by the GPU's name; none where the file is missing or damaged."""
    try:
        found = json.loads(cache.read_single(*_PLACE) or b"{}")
        tables = {d: {int(most): Block(*pair) for most, pair in t.items()} for d, t in found.items()}
        for table in tables.values():
            for block in table.values():
                check(block)
    except (ValueError, TypeError, AttributeError, RulecError):
        return {}
    return {d: t for d, t in tables.items() if t and max(t) >= 1024}


def check(block: Block) -> None:
    """RulecError where a block has no power of two of elements, or too few for its threads."""
    elements, threads = block.elements, block.threads
    powers = all(isinstance(n, int) and n > 0 and n & (n - 1) == 0 for n in (elements, threads))
    if not powers or elements < SMALLEST * threads or not 64 <= threads <= 1024:
        raise RulecError(
            f"a block of {elements} elements for {threads} threads: both must be powers of two, the threads 64 to "
            f"1024, and the elements at least {SMALLEST} for each"
        )
