"""`newton_schulz` by Gram matrices in Triton: its products in the interpreter; launches, waves and tables as counts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import rulec
from rulec.kernel.multi_tensor.uploads import Ring, Uploads
from rulec.language.expr.newton_schulz import multiplications, product_counts
from rulec.language.expr.node import Op
from rulec.torch.tensors.library import DeviceLibrary
from rulec.torch.tensors.newton_schulz import newton_schulz
from rulec_backends.triton.memory import Slot, TorchDevice
from rulec_backends.triton.quintic_call import QuinticProducts, fill, kinds
from tests.backends.test_triton_stacks import MODELS, PROCESSORS, TILES, Dividing, Made, hopper, size, stack
from tests.backends.triton_process import check_in_interpreter as in_the_interpreter
from tests.calls import profiled

# In the interpreter

PRODUCTS = """
import torch
from tests.backends.quintics import FAULTS, integers, products

def circulant(batch, side):
    lines = integers((batch, side), 'float16', 'cpu')
    distance = (torch.arange(side)[:, None] - torch.arange(side)).abs()
    return lines[:, torch.minimum(distance, side - distance)]

def same(side, fault=''):
    x, y = circulant(2, side), circulant(3, side)[:2]
    found = products('float16', fault).multiplied(x, y, 1.5)
    exact = 1.5 * x.double() + x.double() @ y.double()
    return torch.equal(found, exact.half()) and torch.equal(found, found.mT)

exact = [same(side) for side in (33, 64)]
planted = [fault for fault in FAULTS if fault not in ('terms beyond the end',) and same(70, fault)]
"""


def test_products_of_whole_numbers_are_exact_but_for_one_rounding() -> None:
    """Symmetric circulant matrices commute. The faults are those of the kernel."""
    assert in_the_interpreter(PRODUCTS, "[exact, planted]") == [[True, True], []]


DIVIDED = """
import torch
from tests.backends.quintics import products

drawn = torch.Generator().manual_seed(1)
found = []
for dtype in (torch.bfloat16, torch.float16):
    y = torch.randn((3, 40, 70), generator=drawn).to(dtype)
    norms = torch.rand((3, 1, 1), generator=drawn) * 1e5
    out = products('float16').divided(y, norms, out=torch.empty((3, 40, 70), dtype=torch.float16))
    found.append(torch.equal(out, (y.float() / norms).half()))
    found.append(torch.equal(products('float16').divided(y.half(), norms.half()), y.half() / norms.half()))
"""


def test_matrices_in_bfloat16_are_divided_by_norms_in_float32_and_rounded_once() -> None:
    assert in_the_interpreter(DIVIDED, "found") == [True] * 4


STEPS = """
import torch
import rulec.torch
from rulec_backends.triton import quintic_call

launches = []
launch = quintic_call.QuinticProducts._launch

def counted(self, left, right, added, out, *others):
    launches.append([str(out.dtype), *out.shape])
    return launch(self, left, right, added, out, *others)

def trained(backend):
    drawn = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=drawn)) for shape in shapes]
    opt = rulec.torch.Muon(params, lr=0.02, ns_steps=3, ns_form='gram', backend=backend)
    for p in params:
        p.grad = torch.randn(p.shape, generator=drawn)
    opt.step()
    return params

quintic_call.QuinticProducts._launch = counted
quintic_call._WORTH_HALVING = 32
shapes = [(40, 48), (70, 33)]
ours, theirs = trained('triton'), trained('cpu')
far = max(float((a - b).abs().max()) for a, b in zip(ours, theirs))
"""


def test_steps_of_muon_are_those_of_a_processor_within_rounding() -> None:
    """Three iterations are a pair, of seven products, and one of three; all are in float16."""
    launches, far = in_the_interpreter(STEPS, "[launches, far]")
    half = "torch.float16"
    wide = [*[[half, 1, 40, 40]] * 6, [half, 1, 40, 48], *[[half, 1, 40, 40]] * 2, [half, 1, 40, 48]]
    tall = [*[[half, 1, 33, 33]] * 6, [half, 1, 70, 33], *[[half, 1, 33, 33]] * 2, [half, 1, 70, 33]]
    assert launches in ([*wide, *tall], [*tall, *wide])
    assert 0 < far < 0.02 * 2**-6


# Launches


@pytest.mark.parametrize("shape", [(3, 1600, 6400), (3, 6400, 1600)])
def test_five_iterations_are_seventeen_products_by_the_kernels_that_there_are(shape: tuple[int, int, int]) -> None:
    """Of the form's products none asks Triton for a kernel beside those of the direct form."""
    kernel, dividing = Made(), Dividing()
    by = QuinticProducts(kernel, dividing=dividing)
    with hopper():
        newton_schulz(stack(*shape), 5, "float16", products=lambda y: by)
        assert (len(kernel.first), len(kernel.again)) == (3, 12)
        newton_schulz(stack(*shape), 5, "float16", form="gram", products=lambda y: by)
        assert (len(kernel.first), len(kernel.again)) == (3, 12 + 17)
        newton_schulz(stack(3, 1600, 1600), 5, "float16", form="gram", products=lambda y: by)
    assert len(kernel.again) + len(kernel.first) == 15 + 17 + 15


def test_symmetric_matrices_share_the_memory_of_three() -> None:
    asked: list[Any] = []

    class Noted(QuinticProducts):
        def _launch(self, left: Any, right: Any, added: Any, out: Any, *others: Any) -> Any:
            assert all(out is not x for x in (left, right, added))
            asked.append(out)
            return out

    with hopper():
        by = Noted(Made(), dividing=Dividing())
        newton_schulz(stack(3, 1600, 6400), 5, "bfloat16", form="gram", products=lambda y: by)
    sides = [tuple(x.shape[1:]) for x in asked]
    small = {id(x) for x, s in zip(asked, sides, strict=True) if s == (1600, 1600)}
    assert (len(asked), len(small), len({id(x) for x in asked})) == (17, 3, 5)


def calls_of(launch: Any) -> tuple[list[str], list[str]]:
    """The calls of Python's functions, and of C's, in a launch."""
    python: list[str] = []
    native: list[str] = []

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            python.append(frame.f_code.co_name)
        elif event == "c_call":
            native.append(getattr(argument, "__qualname__", str(argument)))

    profiled(launch, note)
    return python, native[:-1]  # the last is that of setprofile itself


@pytest.mark.parametrize("name", ["gram", "polynomial", "multiplied", "following"])
def test_every_product_is_few_calls(name: str) -> None:
    """Of Python's functions and of C's together, but for those of the stubs and of Triton's compiled kernel.

    A launch of 145 calls took the host 56 to 79 microseconds, so 12 microseconds are 22 calls. Four ask
    for the current device, and a stub answers here.
    """
    kernel = Made()
    by, y, small, other = QuinticProducts(kernel), stack(3, 1600, 6400), stack(3, 1600, 1600), stack(3, 1600, 1600)
    room = stack(3, 1600, 6400) if name == "following" else stack(3, 1600, 1600)
    launches: dict[str, Any] = {
        "gram": lambda: by.gram(y, out=room), "polynomial": lambda: by.polynomial(small, 1.0, 2.0, out=room),
        "multiplied": lambda: by.multiplied(small, other, 1.0, out=room),
        "following": lambda: by.following(y, small, 1.0, out=room),
    }  # fmt: skip
    with hopper():
        launches[name]()
        python, native = calls_of(launches[name])
    assert len(kernel.again) == 1
    stubs = ("<lambda>", "__getitem__", "__init__", "list.append")
    calls = [name for name in (*python, *native) if name not in stubs]
    assert calls.count("Tensor.data_ptr") <= 4
    assert len(calls) <= 22 - 4, calls


# Waves and operations


def by_waves(shape: tuple[int, int], count: int, form: str, stack: int = 0) -> tuple[float, float]:
    """The tiles of all matrices of a shape, and those of full waves, weighed by the terms of their sums.

    The matrices are in stacks of this many, or of as many as the form has.
    """
    stack, used, room = stack or size(shape, count, form), 0.0, 0.0
    for number, kind in zip(product_counts(*shape, 5, form), kinds(*shape), strict=True):
        tile = kind.tile(TILES, PROCESSORS)
        for together, times in ((stack, count // stack), (count % stack, 1)):
            if together:
                work = number * times * together * kind.count(tile) * tile.high * tile.wide * kind.depth
                used, room = used + work, room + work / fill(kind, tile, PROCESSORS, together)
    return used, room


@pytest.mark.parametrize("form", ["direct", "gram"])
@pytest.mark.parametrize("model", MODELS)
def test_stacks_of_a_model_fill_the_processors(model: str, form: str) -> None:
    """Over all products of a step, the last and smaller stacks among them: of each shape, and of the model."""
    assert all(filled_by({shape: count}, form) >= 0.85 for shape, count in MODELS[model].items())
    assert filled_by(MODELS[model], form) >= 0.9


def filled_by(matrices: Mapping[tuple[int, int], int], form: str) -> float:
    """The part of the processors' turns with a tile, over all products of a step."""
    parts = [by_waves(shape, count, form) for shape, count in matrices.items()]
    return sum(used for used, _ in parts) / sum(room for _, room in parts)


def test_stacks_are_chosen_for_the_products_of_the_form() -> None:
    """Three long products in place of five, and eleven symmetric ones in place of five: other stacks are best."""
    shape, count = (2048, 5632), 36
    assert (size(shape, count), size(shape, count, "gram")) == (4, 5)
    best = min(range(1, 6), key=lambda stack: time_of(shape, count, stack, "gram"))
    assert best == 5
    assert min(range(1, 6), key=lambda stack: time_of(shape, count, stack, "direct")) == 4


def time_of(shape: tuple[int, int], count: int, stack: int, form: str) -> float:
    """The turns of all processors for all products of some matrices, weighed by the terms of their sums."""
    return by_waves(shape, count, form, stack)[1]


def test_the_library_asks_for_the_stacks_of_the_form() -> None:
    """Where a step takes its stacks: of the dtype that the form iterates in."""
    asked: list[tuple[Any, ...]] = []

    class Asked(QuinticProducts):
        def stack_size(self, *arguments: Any) -> int:
            asked.append(arguments)
            return 1

    library = DeviceLibrary("cpu")
    library.most_stacked, library._products = 1 << 26, mock.Mock(of=lambda dtype, *_: Asked(dtype))
    for form in ("direct", "gram"):
        rule = rulec.load("muon").in_form(form)
        value = next(v.value for v in rulec.compile(rule).vectors if v.value.op is Op.NEWTON_SCHULZ)
        assert library.stack_size(value, (1, 2048, 5632), 36) == 1
    shape = (library.device, 2048, 5632, 36, 1 << 26)
    assert asked == [(shape[0], "bfloat16", *shape[1:], "direct"), (shape[0], "float16", *shape[1:], "gram")]


def test_operations_of_models() -> None:
    """In the table of docs/gpu.md: 1e12 multiplications with halves of symmetric products, and launches of products.

    The last two columns are of waves.
    """
    assert {model: operations(model) for model in MODELS} == {
        "GPT-2 XL": {"direct": (19.661, 480), "gram": (14.942, 540)},
        "Llama 1B": {"direct": (16.289, 225), "gram": (12.539, 251)},
        "Llama 8B": {"direct": (235.88, 1770), "gram": (185.783, 1974)},
    }
    page = (Path(__file__).parents[2] / "docs/gpu.md").read_text()
    for model in MODELS:
        (direct, before), (gram, after) = operations(model).values()
        waves = " | ".join(f"{filled_by(MODELS[model], form):.2f}" for form in ("direct", "gram"))
        assert f"| {model} | {direct:.1f} | {gram:.1f} | {gram / direct:.2f} | {before} | {after} | {waves} |" in page


def operations(model: str) -> dict[str, tuple[float, int]]:
    """Of each form: the multiplications of a step, and its launches of products."""
    result = {}
    for form in ("direct", "gram"):
        work = launches = 0.0
        for shape, count in MODELS[model].items():
            work += count * multiplications(*shape, 5, form, symmetric_share=0.5)
            launches += -(-count // size(shape, count, form)) * sum(product_counts(*shape, 5, form))
        result[form] = round(work / 1e12, 3), int(launches)
    return result


# Tables


class Event:
    """An event of a driver. It has happened where `happened` says so, and nobody may wait for it."""

    happened = False
    recorded = 0

    def query(self) -> bool:
        return Event.happened

    def record(self, *_: Any) -> None:
        Event.recorded += 1

    def synchronize(self) -> None:
        raise AssertionError("the host waits for the device")

    wait = synchronize


class OnTheGpu:
    """Memory on a device, and parts of it."""

    is_cuda = True

    def __getitem__(self, part: slice) -> OnTheGpu:
        return self

    def copy_(self, source: Any, non_blocking: bool) -> None:
        assert non_blocking


@pytest.mark.parametrize("count", [16, 17, 96, 1000])
def test_no_number_of_tables_makes_the_host_wait(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the device has taken none of a step's tables, each has memory of its own; later they take turns in it."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", Event().synchronize)
    monkeypatch.setattr(Event, "happened", False)
    monkeypatch.setattr(Event, "recorded", 0)
    slots: list[Slot] = []

    class Device(TorchDevice):
        def pinned(self, words: int) -> Slot:
            slots.append(super().pinned(words))
            return slots[-1]

        def memory(self, words: int) -> Any:
            return OnTheGpu()

    uploads = Uploads(Ring(Device(torch.device("cpu"))), 3, 0)
    for number in range(count):
        uploads.put(np.array([number, 0, 0]), None, "", False)
    assert (len(slots), Event.recorded) == (count, count)
    Event.happened = True
    for number in range(count):
        uploads.put(np.array([number, 1, 0]), None, "", False)
    assert (len(slots), Event.recorded) == (count, 2 * count)
