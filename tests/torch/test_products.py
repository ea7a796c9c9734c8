"""Products of a backend's own kernels in steps of Muon: which matrices they are for, and in which stacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import rulec
import rulec.torch
from rulec.backend.capabilities import capabilities_of
from rulec.errors import BackendUnsupported
from rulec.language.expr.node import Op
from rulec.runtime.buckets.context import EngineContext
from rulec.runtime.buckets.hyper import HyperValues
from rulec.runtime.engine import Engine, default_hyper
from rulec.torch.products import TORCH, TorchProducts
from rulec.torch.tensors import library as libraries
from rulec.torch.tensors.library import DEVICE_MATRIX, DeviceLibrary
from rulec.torch.tensors.newton_schulz import ProductsChoice
from rulec.torch.tensors.tensors import TorchArrays
from rulec_backends.triton import TritonBackend
from tests.runtime.elsewhere import Elsewhere
from tests.runtime.nowhere import DEVICE, Nowhere, NowhereCall, copies


class Noted(TorchProducts):
    """torch's products, for matrices of 200 rows and more, which note the stacks that they are given."""

    def __init__(self) -> None:
        self.stacks: list[tuple[int, ...]] = []

    def pays(self, rows: int, cols: int) -> bool:
        return min(rows, cols) >= 200

    def gram(self, y: Tensor, out: Tensor | None = None) -> Tensor:
        self.stacks.append(tuple(y.shape))
        return super().gram(y)


class Multiplying:
    """What a backend with products of bfloat16 has."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.products = Noted()

    def has_quintic(self, device: torch.device) -> bool:
        return True

    def emit_quintic(self, dtype: str) -> str:
        if dtype != "bfloat16":
            raise BackendUnsupported(self.name, dtype, "newton_schulz")  # type: ignore[attr-defined]
        return "source"

    def build_quintic(self, dtype: str, source: str) -> Noted:
        assert (dtype, source) == ("bfloat16", "source")
        return self.products


class HereMultiplying(Multiplying, Elsewhere):
    """On the CPU."""


class ThereMultiplying(Multiplying, Nowhere):
    """On a device without memory: what would wait for it is an error."""


SHAPES = ((200, 210), (300, 200), (100, 250), (200, 210), (12, 8), (300, 200), (12, 8))


def trained(backend: Any, shapes: Sequence[tuple[int, int]] = SHAPES, rule: str = "muon") -> list[Tensor]:
    """Parameters after a step."""
    drawn = torch.Generator().manual_seed(0)
    params = [torch.randn(shape, generator=drawn) for shape in shapes]
    engine = Engine(rulec.load(rule), TorchArrays(), backend)
    ids = tuple(engine.add(p, 0, f"tensor {i}") for i, p in enumerate(params))
    table = engine.hyper_table([default_hyper(engine.rule, {}, "float32")])
    engine.step(ids, [torch.randn(p.shape, generator=drawn) for p in params], table)
    return params


def test_large_matrices_of_one_shape_are_one_stack_and_small_ones_are_torchs() -> None:
    backend = HereMultiplying()
    ours, theirs = trained(backend), trained(Elsewhere())
    assert [*dict.fromkeys(backend.products.stacks)] == [(2, 200, 210), (2, 300, 200)]
    assert len(backend.products.stacks) == 2 * 5
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-3 * 2**-6)


def test_a_stack_has_no_more_elements_than_a_portion() -> None:
    """In the second rule all matrices wait for a norm of the whole model, and are in one portion."""
    for rule in ("muon", "clip_by_global_norm >> muon"):
        backend = HereMultiplying()
        with mock.patch.object(libraries, "_STACKED", 2 * 200 * 210 + 1):
            trained(backend, [(200, 210)] * 5, rule)
        assert [shape[0] for shape in backend.products.stacks[::5]] == [2, 2, 1]


def test_without_products_of_the_backend_large_matrices_are_worked_on_one_by_one() -> None:
    library = DeviceLibrary("cpu")
    library.adopt(capabilities_of(Elsewhere()))
    value = next(v for v in rulec.compile(rulec.load("muon")).vectors).value
    assert value.op is Op.NEWTON_SCHULZ
    stacks = [library.stacks(value, [torch.empty(1, *shape), 5.0]) for shape in ((12, 8), (200, 210))]
    assert stacks == [True, False]
    assert library.matrix is DEVICE_MATRIX
    assert library.most_stacked is None


@pytest.mark.parametrize(("capability", "has"), [((7, 0), False), ((7, 5), False), ((8, 0), True), ((12, 0), True)])
def test_nvidias_gpus_before_ampere_keep_the_products_of_torch(capability: tuple[int, int], has: bool) -> None:
    """Triton has no instructions of their tensor cores."""
    with (
        mock.patch.object(torch.version, "hip", None),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=capability),
    ):
        library = DeviceLibrary("cuda:0")
        library.adopt(capabilities_of(TritonBackend()))
    assert (library.most_stacked is not None) is has
    assert (library.matrix is not DEVICE_MATRIX) is has


def test_fake_matrices_are_stacked_as_on_a_gpu() -> None:
    """So the memory of a step on paper has the stacks."""
    shapes: list[tuple[int, ...]] = []

    class Stacks(DeviceLibrary):
        def stack(self, matrices: Sequence[Tensor], dtype: str | None = None) -> Tensor:
            stack = super().stack(matrices, dtype)
            shapes.append(tuple(stack.shape))
            return stack

    with mock.patch("rulec.torch.tensors.tensors.DeviceLibrary", Stacks), FakeTensorMode():
        params = [torch.nn.Parameter(torch.empty(shape)) for shape in [(256, 300), (300, 256), (200, 300)] * 2]
        for p in params:
            p.grad = torch.empty_like(p)
        rulec.torch.Muon(params).step()
    assert shapes == [(2, 256, 300), (2, 300, 256)]


def test_the_choice_of_products() -> None:
    """By dtype and size; torch's where there is no memory to compute with."""
    backend = HereMultiplying()
    by = ProductsChoice(backend)
    large = torch.empty(1, 200, 300, dtype=torch.bfloat16)
    assert by(large) is backend.products
    assert by(large.float()) is TORCH
    assert by(large[:, :100]) is TORCH
    assert by(large.to("meta")) is TORCH
    assert ProductsChoice()(large) is TORCH


def test_a_stack_is_rounded_as_it_is_made() -> None:
    library = DeviceLibrary("cpu")
    matrices = [torch.randn(n, 3, 4, generator=torch.Generator().manual_seed(n)) for n in (1, 2)]
    assert torch.equal(library.stack(matrices, "bfloat16"), torch.cat(matrices).bfloat16())
    assert library.stack(matrices, "float32").dtype is torch.float32


def test_matrices_that_lie_in_a_row_are_a_stack_without_a_copy() -> None:
    library = DeviceLibrary("cpu")
    memory = torch.randn(6, 3, 4)
    pieces = [memory[1:2], memory[2:4], memory[4:5]]
    stack = library.stack(pieces, "float32")
    assert torch.equal(stack, torch.cat(pieces))
    assert stack.data_ptr() == memory[1].data_ptr()
    others = (
        pieces[::-1],
        [memory[:1], memory[2:3]],
        [memory[:1], memory[1:2].clone()],
        [memory.mT[:1], memory.mT[1:2]],
    )
    for apart in others:
        stack = library.stack(apart, "float32")
        assert torch.equal(stack, torch.cat([*apart]))
        assert stack.untyped_storage().data_ptr() != memory.untyped_storage().data_ptr()


def test_scratch_of_tensors_of_one_shape_lies_in_a_row_and_is_kept() -> None:
    """A smaller set of tensors has the memory of a larger one; what a captured graph may use stays."""
    common = EngineContext(TorchArrays(), HyperValues.__new__(HyperValues), None, 0)  # type: ignore[arg-type]
    likes = [torch.empty(3, 4), torch.empty(2), torch.empty(3, 4), torch.empty(5, 3).mT, torch.empty(3, 4)]
    first = common.scratches("o", likes, "bfloat16")
    assert [tuple(x.shape) for x in first] == [tuple(x.shape) for x in likes]
    assert first[3].stride() == likes[3].stride()
    addresses = [x.data_ptr() for x in first]
    assert addresses[2] - addresses[0] == addresses[4] - addresses[2] == 3 * 4 * 2
    assert [x.data_ptr() for x in common.scratches("o", likes[:1] * 2, "bfloat16")] == addresses[:3:2]
    assert common.scratches("o", likes[:1] * 4, "bfloat16")[0].data_ptr() != addresses[0]
    assert [x.data_ptr() for x in common.scratches("o", likes, "bfloat16")] == addresses
    assert common.scratches("other", likes[:1] * 2, "bfloat16")[0].data_ptr() != addresses[0]


#: Operations that only look at memory in another way, or ask for some.
_VIEWS = {
    "view", "transpose", "slice", "detach", "t", "expand", "split", "_unsafe_view", "select", "empty", "new_empty",
    "split_with_sizes", "unsqueeze", "squeeze", "empty_like", "as_strided", "alias",
}  # fmt: skip


class Launches(TorchDispatchMode):
    """Counts operations on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        given = [y for x in args for y in (x if isinstance(x, list | tuple) else [x]) if isinstance(y, Tensor)]
        self.names += [name] * (name not in _VIEWS and any(x.is_meta for x in given))
        return function(*args, **(kwargs or {}))


def counted(backend: Any, layers: int) -> tuple[int, list[str]]:
    """The kernels and the other operations of the second step of the matrices of GPT-2 XL, with so many layers."""
    shapes = ([(1600, 1600)] * 4 + [(6400, 1600), (1600, 6400)]) * layers
    params = [torch.empty(shape, device=DEVICE) for shape in shapes]
    engine = Engine(rulec.load("muon"), TorchArrays(), backend)
    ids = tuple(engine.add(p, 0, f"tensor {i}") for i, p in enumerate(params))
    table = engine.hyper_table([default_hyper(engine.rule, {}, "float32")])
    kernels: list[int] = []
    call = NowhereCall.__call__

    def noted(self: Any, *arguments: Any, **keywords: Any) -> Any:
        kernels.append(1)
        return call(self, *arguments, **keywords)

    with copies(), mock.patch.object(NowhereCall, "__call__", noted):
        engine.step(ids, params, table)
        kernels.clear()
        with Launches() as launches:
            engine.step(ids, params, table)
    return len(kernels), launches.names


@pytest.mark.parametrize("layers", [3])
def test_a_step_of_a_large_model_is_few_launches_and_never_waits_for_the_device(layers: int) -> None:
    """18 matrices: a stack of 12 and one of 3, updated together, and another of 3; of each 15 products, the stack, a
    norm and its division, and a cast."""
    kernels, names = counted(ThereMultiplying(), layers)
    assert names.count("bmm") + names.count("baddbmm") == 3 * 15
    assert kernels == 2 * 2
    before, one_by_one = counted(Nowhere(), layers)
    assert one_by_one.count("bmm") + one_by_one.count("baddbmm") == 6 * layers * 15
    assert before == 2 * 6 * layers
    assert len(names) - 3 < len(one_by_one) / 5
