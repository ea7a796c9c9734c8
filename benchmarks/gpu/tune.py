"""`rulec bench gpu --tune`: block sizes for the triton backend, by the bytes of an element's update."""

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

#: Rules in the order of the bytes of an element's update, each with the dtype of all its arrays.
TRIED = (
    ("sgd", "bfloat16"), ("adamw", "bfloat16"), ("sgd", "float32"), ("lion", "float32"), ("adamw", "float32"),
    ("amsgrad", "float32"), ("adan", "float32"),
)  # fmt: skip

#: Blocks to try: elements, and the threads that share them.
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
    """A part for each rule; it tries all blocks."""
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
    seconds = times.medians()
    detail = {"bytes": moved, "block": list(chosen), "default": list(default), "seconds": seconds}
    yield Row(f"{rule}, {dtype}, {moved} bytes an element", MEASURE, gain, detail=detail)


def _bound(
    rule: str, param: Any, dtype: Any, block: tuple[int, int] | None, contenders: dict[str, Sequence[Step]], name: str
) -> tuple[int, tuple[int, int]]:
    """Adds the step with this block, or with the table's; returns the bytes of an element's update, and the block."""
    with _blocks_of(block) as seen:
        step = step_of(rule, [param], state_dtype=dtype)
        step()
    contenders[name] = [step]
    return seen[-1]


@contextmanager
def _blocks_of(block: tuple[int, int] | None) -> Iterator[list[tuple[int, tuple[int, int]]]]:
    """Within, kernels are bound with this block; the list has the bytes of each one's update, and its block."""
    work, kinds = (importlib.import_module(f"rulec_backends.triton.{name}") for name in ("work", "blocks"))
    plain, seen = work.block_for, list[tuple[int, tuple[int, int]]]()

    def block_for(moved: int, device: str) -> Any:
        chosen = plain(moved, device) if block is None else kinds.Block(*block)
        seen.append((moved, (chosen.elements, chosen.threads)))
        return chosen

    work.block_for = block_for  # type: ignore[attr-defined]
    try:
        yield seen
    finally:
        work.block_for = plain  # type: ignore[attr-defined]


def _name(block: tuple[int, int]) -> str:
    return f"{block[0]} elements, {block[1]} threads"


def _block(name: str) -> tuple[int, int]:
    return next(block for block in BLOCKS if _name(block) == name)


def table(rows: Sequence[Row]) -> dict[int, tuple[int, int]]:
    """Largest bytes of an element's update -> block, from measured rows; the last entry has no limit."""
    measured = {int(row.detail["bytes"]): tuple(row.detail["block"]) for row in rows if row.measure == MEASURE}
    if not measured:
        return {}
    most = max(measured)
    return {_ENDLESS if moved == most else moved: (block[0], block[1]) for moved, block in sorted(measured.items())}


def save(device: str, chosen: Mapping[int, tuple[int, int]]) -> None:
    """Writes the table of this GPU for the triton backend."""
    kinds = importlib.import_module("rulec_backends.triton.blocks")
    kinds.save(device, {most: kinds.Block(*block) for most, block in chosen.items()})
