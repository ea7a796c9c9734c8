"""Tensors on a device for steps: their shapes, and several sets of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from benchmarks.gpu.device import Bench
from benchmarks.gpu.time import Step, sets_past

Shape = tuple[int, ...]

#: Elements of the largest tensors: 100 Mi, and as few as make a step run.
FULL, QUICK = 100 * 2**20, 2**16

#: Of the memory that is free, how much is used; bytes that a step may need for each of a parameter, of four bytes:
#: itself, its gradient, two states each of ours and theirs, and what theirs allocates on the way.
USED, BYTES_EACH = 0.8, 36


@dataclass(frozen=True)
class Size:
    """Tensors of one dtype, with a name for all of them."""

    name: str
    shapes: Sequence[Shape]
    dtype: str = "float32"

    @property
    def elements(self) -> int:
        """The elements of all tensors together."""
        return sum(prod(shape) for shape in self.shapes)


def make(bench: Bench, shape: Shape, dtype: str = "float32", spread: float = 1.0) -> Any:
    """A tensor of normal random numbers."""
    import torch

    return torch.empty(shape, dtype=getattr(torch, dtype), device=bench.device.name).normal_(0.0, spread)


def parameters(bench: Bench, size: Size) -> list[Any]:
    """Parameters with gradients."""
    params = [make(bench, shape, size.dtype).requires_grad_() for shape in size.shapes]
    for param in params:
        param.grad = make(bench, tuple(param.shape), size.dtype)
    return params


def copying(bench: Bench, elements: int) -> Step:
    """A copy of `elements` float32 numbers from one tensor to another, as a measure of the memory's speed."""
    source, target = make(bench, (elements,)), make(bench, (elements,))
    return lambda: target.copy_(source)


def in_sets(bench: Bench, steps: Callable[[], Sequence[Step]], bytes_each: int) -> list[list[Step]]:
    """Steps of some contenders, each over several sets of inputs, so many that no cache holds one when it recurs.

    `steps` makes one set for all contenders, of at least `bytes_each`; the result has the steps of each contender.
    """
    count = sets_past(bench.device.cache_bytes(), bytes_each)
    return [list(of_one) for of_one in zip(*(steps() for _ in range(count)), strict=True)]


def gpt2_xl() -> list[Shape]:
    """The parameters of GPT-2 XL: 48 layers of 1600."""
    return gpt(48, 1600)


def gpt(layers: int, wide: int) -> list[Shape]:
    """The parameters of a GPT-2 with so many layers of this width."""
    layer: list[Shape] = [(wide,), (wide,), (wide, 3 * wide), (3 * wide,), (wide, wide), (wide,)]
    layer += [(wide,), (wide,), (wide, 4 * wide), (4 * wide,), (4 * wide, wide), (wide,)]
    return [(50257, wide), (1024, wide), *(layer * layers), (wide,), (wide,)]


def llama_7b(layers: int = 32) -> list[Shape]:
    """The parameters of a Llama of 7 billion, or of as many of its layers."""
    wide, inner, words = 4096, 11008, 32000
    layer: list[Shape] = [(wide, wide)] * 4 + [(inner, wide)] * 2 + [(wide, inner), (wide,), (wide,)]
    return [(words, wide), *(layer * layers), (wide,), (words, wide)]


def llama_1b() -> list[Shape]:
    """146 tensors with the shapes of Llama 3.2 1B except its embeddings: 16 layers of 2048, and two vectors."""
    wide, inner, keys = 2048, 8192, 512
    layer: list[Shape] = [(wide, wide), (keys, wide), (keys, wide), (wide, wide)]
    layer += [(inner, wide), (inner, wide), (wide, inner), (wide,), (wide,)]
    return [*(layer * 16), (wide,), (wide,)]


#: What the sizes are called before they are made, in the order of the targets.
MANY = "1000 tensors"
SIZES = ("100 Mi", MANY, "GPT-2 XL", "Llama 7B", "2**31 + 17")


def sizes(bench: Bench) -> dict[str, Callable[[], Size]]:
    """Name -> maker of a size for AdamW; a size is made at its turn, because one depends on the free memory."""
    if bench.quick:
        few = [lambda: Size("one tensor of 64 Ki elements", [(QUICK,)])]
        return dict(zip(SIZES, [*few, lambda: Size("10 tensors of 1000 elements", [(1000,)] * 10)], strict=False))
    makers: list[Callable[[], Size]] = [
        lambda: Size("one tensor of 100 Mi elements", [(FULL,)]),
        lambda: Size("1000 tensors of 1000 elements", [(1000,)] * 1000),
        lambda: Size("the tensors of GPT-2 XL", gpt2_xl()),
        lambda: fitting_llama(bench.device.free_bytes()),
        lambda: Size("one tensor of 2**31 + 17 elements", [(2**31 + 17,)]),
    ]
    return dict(zip(SIZES, makers, strict=True))


def fitting_llama(free: int) -> Size:
    """As many layers of a Llama of 7 billion parameters as there is memory for; one at least."""
    room = int(USED * free / BYTES_EACH)
    bare = Size("", llama_7b(0)).elements
    each = Size("", llama_7b(1)).elements - bare
    layers = max(1, min(32, (room - bare) // each))
    of = "" if layers == 32 else f", {layers} of its 32 layers"
    return Size(f"the tensors of Llama 7B{of}", llama_7b(layers))
