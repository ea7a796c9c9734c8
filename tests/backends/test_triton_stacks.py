"""Stacks of the products of `newton_schulz`: how full they make a GPU, and what a launch costs the host."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from rulec.torch.tensors.library import _STACKED
from rulec.torch.tensors.newton_schulz import newton_schulz
from rulec_backends.triton import quintic_call
from rulec_backends.triton.product import tiles_for
from rulec_backends.triton.quintic_call import QuinticProducts, fill, kinds, stack_size
from tests.calls import profiled

#: Of a Hopper GPU.
TILES, PROCESSORS = tiles_for("bfloat16", 9), 132

#: The matrices of all layers of a model.
MODELS = {
    "GPT-2 XL": {(1600, 4800): 48, (1600, 1600): 48, (1600, 6400): 48, (6400, 1600): 48},
    "Llama 1B": {(2048, 2048): 32, (512, 2048): 32, (8192, 2048): 32, (2048, 8192): 16},
    "Llama 8B": {(4096, 4096): 64, (1024, 4096): 64, (14336, 4096): 64, (4096, 14336): 32},
}


def size(shape: tuple[int, int], count: int, form: str = "direct") -> int:
    """The stack of some matrices."""
    return int(stack_size(*shape, count, _STACKED // (shape[0] * shape[1]), TILES, PROCESSORS, form))


def filled(shape: tuple[int, int], stack: int) -> list[float]:
    """The part of the processors' turns with a tile, of each product."""
    return [fill(kind, kind.tile(TILES, PROCESSORS), PROCESSORS, stack) for kind in kinds(*shape)]


@pytest.mark.parametrize("form", ["direct", "gram"])
@pytest.mark.parametrize("model", MODELS)
def test_stacks_of_models_fill_the_processors(model: str, form: str) -> None:
    """All products to 0.91; only of 4 matrices of (8192, 2048), 64 Mi elements, two of the three to 0.82."""
    for shape, count in MODELS[model].items():
        stack = size(shape, count, form)
        least = 0.82 if sorted(shape) == [2048, 8192] else 0.91
        assert min(filled(shape, stack)) >= least, (shape, stack)
        assert stack * shape[0] * shape[1] <= 1 << 26


def test_tiles_of_hopper_have_the_stages_that_were_fastest() -> None:
    chosen = [kind.tile(TILES, PROCESSORS) for kind in kinds(1600, 6400)]
    assert [(t.high, t.wide, t.warps, t.stages) for t in chosen] == [
        (128, 128, 8, 4), (128, 128, 8, 4), (128, 256, 8, 3)
    ]  # fmt: skip
    small = [kind.tile(TILES, PROCESSORS) for kind in kinds(300, 400)]
    assert small == [TILES[-1]] * 3, "without descriptors"


def test_a_larger_stack_is_taken_where_it_takes_no_longer() -> None:
    assert size((4096, 4096), 64) == 4
    assert filled((4096, 4096), 1) == filled((4096, 4096), 4)
    assert size((1600, 6400), 48) == 4
    assert min(filled((1600, 6400), 3)) < 0.7, "what 32 Mi elements had"
    assert size((1600, 6400), 1) == 1
    assert size((14336, 14336), 3) == 1, "a matrix of more elements is a stack of its own"


# Launches


class Compiled:
    """A compiled kernel that notes its launches."""

    def __init__(self, made: Made) -> None:
        self._made = made

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self._made.again.append((grid, arguments))


class Made:
    """A kernel of Triton, which notes what it is asked for, and what is launched of what it compiled."""

    arg_names = (
        "left", "right", "added", "out", "height", "width", "depth", "share", "factor", "HALF", "ADDS", "HIGH", "WIDE",
        "DEEP", "TALL", "LEFT_DOWN", "RIGHT_DOWN", "DESCRIBED", "ALL", "EVEN", "EMULATED",
    )  # fmt: skip

    def __init__(self) -> None:
        self.first: list[Any] = []
        self.again: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **options: Any) -> Compiled:
            self.first.append((grid, arguments, options))
            return Compiled(self)

        return launch


class Dividing(Made):
    """The kernel that divides by norms."""

    arg_names = ("y", "norms", "out", "size", "BLOCK", "EMULATED")


@contextlib.contextmanager
def hopper() -> Iterator[None]:
    """Tensors without memory are on a GPU of 132 processors, the current one."""
    with (
        mock.patch.object(quintic_call, "machine", return_value=(TILES, PROCESSORS)),
        mock.patch.object(quintic_call, "current", lambda device, stream: contextlib.nullcontext()),  # noqa: PT008
    ):
        yield


def stack(*shape: int) -> Tensor:
    """Matrices without memory."""
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


@pytest.mark.parametrize("shape", [(3, 1600, 6400), (3, 6400, 1600)])
def test_only_the_first_launch_of_a_product_asks_triton_for_a_kernel(shape: tuple[int, int, int]) -> None:
    """Its arguments are those of the later ones, and behind them the constants, in the kernel's order."""
    kernel = Made()
    by = QuinticProducts(kernel, dividing=Dividing())
    with hopper():
        newton_schulz(stack(*shape), 5, "bfloat16", products=lambda y: by)
        assert (len(kernel.first), len(kernel.again)) == (3, 12)
        newton_schulz(stack(5, *shape[1:]), 5, "bfloat16", products=lambda y: by)
    assert (len(kernel.first), len(kernel.again)) == (3, 12 + 15)
    for k, (grid, arguments, options) in enumerate(kernel.first):
        constants = [options[name] for name in Made.arg_names[9:]]
        later = kernel.again[k]
        assert later[0] == (*grid, 1, 1)
        assert [*later[1][9:]] == constants
        assert [*later[1][4:9]] == [*arguments[4:]]
        assert [x.block_shape for x in later[1][:2]] == [x.block_shape for x in arguments[:2]]


def test_memory_that_is_not_aligned_has_a_kernel_of_its_own() -> None:
    kernel = Made()
    by, y = QuinticProducts(kernel), stack(2, 1024, 1536)
    with hopper():
        for address in (0, 8, 16, 24):
            with mock.patch.object(quintic_call, "_room", return_value=Placed(address)):
                by.gram(y)
    assert (len(kernel.first), len(kernel.again)) == (2, 2)


class Placed:
    """A result at an address."""

    device, dtype, shape = torch.device("meta"), torch.bfloat16, (2, 1024, 1024)

    def __init__(self, address: int) -> None:
        self.data_ptr = lambda: address


def test_a_launch_is_few_calls_and_makes_no_descriptor_anew() -> None:
    """Calls of Python's functions in one launch, but for those of Triton's compiled kernel: there were 67 before."""
    kernel = Made()
    by, y, out = QuinticProducts(kernel), stack(3, 1600, 6400), stack(3, 1600, 1600)
    calls: list[str] = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            calls.append(frame.f_code.co_name)

    with hopper():
        by.gram(y, out=out)
        made = quintic_call._remembered.cache_info().misses
        profiled(lambda: by.gram(y, out=out), note)
    assert len(kernel.again) == 1
    assert quintic_call._remembered.cache_info().misses == made
    assert len(calls) <= 15, calls


def test_a_descriptor_keeps_no_tensor_alive() -> None:
    kernel = Made()
    with hopper():
        y = stack(3, 1024, 1536)
        gone = weakref.ref(y)
        QuinticProducts(kernel).gram(y)
        del y
        kernel.first.clear()
    gc.collect()
    assert gone() is None


def test_iterations_take_turns_in_the_memory_of_two_stacks() -> None:
    """The Gram matrices of all iterations are in the same memory, and their polynomials in another."""
    asked: list[Any] = []

    class Noted(QuinticProducts):
        def _launch(self, left: Tensor, right: Tensor, added: Any, out: Tensor, *others: Any) -> Tensor:
            asked.append(out)
            return out

    with hopper():
        by = Noted(Made(), dividing=Dividing())
        newton_schulz(stack(3, 1600, 6400), 5, "bfloat16", products=lambda y: by)
    assert len({id(x) for x in asked}) == 4
    assert len({id(x) for x in asked[0::3]}) == len({id(x) for x in asked[1::3]}) == 1
    assert len({id(x) for x in asked[2::3]}) == 2


def test_results_are_never_written_to_memory_in_another_order() -> None:
    """The first stack may lie by columns; a kernel writes by rows."""
    with hopper():
        y = stack(3, 640, 512).mT
        out = QuinticProducts(Made()).following(y, stack(3, 512, 512), 1.0, out=stack(3, 640, 512).mT)
    assert out.is_contiguous()
