"""`rulec bench gpu --tune`: block sizes for the triton backend, by the bytes that an element's update moves."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from benchmarks.gpu.device import Bench
from benchmarks.gpu.part import Part
from benchmarks.gpu.rules import QUICK_ROUNDS, ROUNDS, parameter, step_of
from benchmarks.gpu.tensors import FULL, QUICK
from benchmarks.gpu.time import Step, timed
from benchmarks.result import Row

#: Rules whose updates move more and more for an element, and the dtype that all of it is stored in.
TRIED = (
    ("sgd", "bfloat16"), ("adamw", "bfloat16"), ("sgd", "float32"), ("lion", "float32"), ("adamw", "float32"),
    ("amsgrad", "float32"), ("adan", "float32"),
)  # fmt: skip

#: Blocks that are tried: elements, and the threads that share them.
BLOCKS = (
    (512, 64), (1024, 64), (1024, 128), (2048, 64), (2048, 128), (2048, 256), (4096, 128), (4096, 256), (4096, 512),
    (8192, 256),
)  # fmt: skip

#: A block takes the place of the default only where it is faster by more than figures scatter.
GAIN = 1.01

#: The last line of a table holds for whatever moves more.
_ENDLESS = 1 << 30

MEASURE = "the best block, times as fast as the default"


def parts() -> list[Part]:
    """A part for each rule, in which all blocks are tried."""
    return [Part(f"blocks for {rule} in {dtype}", blocks, (rule, dtype), 90.0, 10.0) for rule, dtype in TRIED]


def blocks(bench: Bench, rule: str, dtype: str) -> Iterator[Row]:
    """The device's time of a rule's step with every block, by turns."""
    import torch

    param = parameter(bench, (QUICK if bench.quick else FULL,), dtype)
    kind = getattr(torch, dtype)
    contenders: dict[str, Sequence[Step]] = {}
    moved, default = _bound(rule, param, kind, None, contenders, "default")
    for block in BLOCKS:
        if block != default:
            _bound(rule, param, kind, block, contenders, _name(block))
    times = timed(bench.device, contenders, QUICK_ROUNDS if bench.quick else ROUNDS, 20.0)
    best = max(contenders, key=lambda name: times.ratio("default", name))
    gain = times.ratio("default", best)
    chosen = default if gain < GAIN else _block(best)
    seconds = {name: times.median(name) for name in contenders}
    detail = {"bytes": moved, "block": list(chosen), "default": list(default), "seconds": seconds}
    yield Row(f"{rule}, {dtype}, {moved} bytes an element", MEASURE, gain, detail=detail)


def _bound(
    rule: str, param: Any, dtype: Any, block: tuple[int, int] | None, contenders: dict[str, Sequence[Step]], name: str
) -> tuple[int, tuple[int, int]]:
    """Adds the step with this block, or with the table's own; the bytes for an element, and the block that it has."""
    with _blocks_of(block) as seen:
        step = step_of(rule, [param], state_dtype=dtype)
        step()
    contenders[name] = [step]
    return seen[-1]


@contextmanager
def _blocks_of(block: tuple[int, int] | None) -> Iterator[list[tuple[int, tuple[int, int]]]]:
    """Kernels that are bound within have this block; what they move for an element, and their blocks, are listed."""
    work, kinds = (importlib.import_module(f"rulec_backends.triton.{name}") for name in ("work", "blocks"))
    plain, seen = work.block_for, list[tuple[int, tuple[int, int]]]()

    def block_for(moved: int, device: str) -> Any:
        found = plain(moved, device) if block is None else kinds.Block(*block)
        seen.append((moved, (found.elements, found.threads)))
        return found

    work.block_for = block_for  # type: ignore[attr-defined]
    try:
        yield seen
    finally:
        work.block_for = plain  # type: ignore[attr-defined]


def _name(block: tuple[int, int]) -> str:
    return f"{block[0]} elements, {block[1]} threads"


def _block(name: str) -> tuple[int, int]:
    (found,) = (block for block in BLOCKS if _name(block) == name)
    return found


def table(rows: Sequence[Row]) -> dict[int, tuple[int, int]]:
    """Blocks by the most bytes that an element's update may move, from what was measured; the last without an end."""
    found = {int(row.detail["bytes"]): tuple(row.detail["block"]) for row in rows if row.measure == MEASURE}
    if not found:
        return {}
    most = max(found)
    return {_ENDLESS if moved == most else moved: (block[0], block[1]) for moved, block in sorted(found.items())}


def save(device: str, chosen: Mapping[int, tuple[int, int]]) -> None:
    """Writes the table where the triton backend reads that of this GPU."""
    kinds = importlib.import_module("rulec_backends.triton.blocks")
    kinds.save(device, {most: kinds.Block(*block) for most, block in chosen.items()})
