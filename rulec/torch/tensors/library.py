"""The array libraries of torch tensors between the stages: NumPy on the CPU, torch itself on a device.

torch is used too for tensors on the CPU that NumPy cannot represent. Numbers known on the host are 0-d tensors on the
CPU. torch hands them to the kernels of any device as arguments. Functions that would copy them to the device, and wait
for the copy, are avoided. torch itself waits for the device in `eigh` and in singular value decompositions, to look for
failures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from rulec.array_api import bits
from rulec.array_api.functions import Functions, arithmetic
from rulec.array_api.library import Library
from rulec.array_api.matrix import blockwise, matrix_functions
from rulec.array_api.numpy import NumpyLibrary
from rulec.array_api.reductions import REDUCTIONS
from rulec.backend.capabilities import Capabilities, DrawsNumbers, ReducesSegments
from rulec.language.expr.newton_schulz import iterated_in
from rulec.language.expr.node import Node, Op
from rulec.language.expr.static import DIRECT, settings
from rulec.torch.products import TORCH
from rulec.torch.tensors import foreach
from rulec.torch.tensors.fake import has_no_memory, is_fake, plain_memory
from rulec.torch.tensors.matrix import TORCH_MATRIX
from rulec.torch.tensors.newton_schulz import ProductsChoice, TorchQuintic, newton_schulz


class TorchFunctions(Functions):
    """torch's names; numbers are made where the arrays are."""

    def cast(self, x: Tensor, dtype: Any) -> Tensor:
        """The tensor in another dtype."""
        return x.to(getattr(torch, dtype) if isinstance(dtype, str) else dtype)

    def diagonal(self, x: Tensor) -> Tensor:
        """The diagonal of the last two axes, by torch's keywords."""
        return torch.diagonal(x, dim1=-2, dim2=-1)

    def backwards(self, x: Tensor, axes: int) -> Tensor:
        """By `flip`: torch has no negative strides."""
        return torch.flip(x, (1, 2)[:axes])

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """Of stacks of equal length at once: `torch.matmul` comes to the same by five calls more."""
        return torch.bmm(a, b) if a.dim() == b.dim() == 3 and len(a) == len(b) else torch.matmul(a, b)

    def solve_upper(self, a: Tensor, b: Tensor) -> Tensor:
        """By torch's own function for triangular matrices, which does not wait for a device."""
        return cast(Tensor, torch.linalg.solve_triangular(a, b, upper=True))

    def filled(self, condition: Tensor, x: Tensor, number: float) -> Tensor:
        """With memory that is filled on the device."""
        return torch.where(condition, x, torch.full_like(x, number))

    def at_least(self, x: Tensor, least: float) -> Tensor:
        """By `clamp`, which takes a number."""
        return torch.clamp(x, min=least)

    def largest(self, x: Tensor) -> Tensor:
        """The largest of each row, by `gather`."""
        return torch.gather(x, -2, torch.argmax(torch.abs(x), dim=-2, keepdim=True))

    def like(self, number: int, words: Tensor) -> int:
        """The number as it is, for tensors of any device."""
        return number

    def sort(self, words: Tensor) -> Tensor:
        """The values that torch sorts."""
        return torch.sort(words, dim=-1).values

    def order(self, words: Tensor) -> Tensor:
        """By a stable sort, which torch has beside another one."""
        return torch.sort(words, dim=-1, stable=True).indices

    def along(self, x: Tensor, places: Tensor) -> Tensor:
        """`torch.gather` takes them."""
        return torch.gather(x, -1, places)

    def least(self, words: Tensor) -> Tensor:
        """`torch.amin` returns no indices beside it."""
        return torch.amin(words, dim=-1, keepdim=True)

    def beside(self, number: Any, x: Tensor) -> Any:
        """An array in the matrix's dtype; a number as it is."""
        return number.to(x.dtype) if isinstance(number, Tensor) else number


def _where(condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Truth from the scalar table is a number."""
    condition = condition if condition.dtype is torch.bool else condition != 0
    device = next((x.device for x in (condition, a, b) if x.device.type != "cpu"), condition.device)
    return torch.where(_on(device, condition), _on(device, a), _on(device, b))


def _on(device: torch.device, value: Tensor) -> Tensor:
    if value.device == device:
        return value
    return torch.full((), value.item(), dtype=value.dtype, device=device)


def _power(x: Tensor, y: Tensor) -> Tensor:
    """C99's pow. For exponents of 0.5 and -0.5 torch takes a square root, which is -0 at -0 and NaN at -inf: there the
    result follows from the sizes."""
    result = torch.pow(x, y)
    half = torch.eq(torch.abs(y), 0.5)
    special = torch.logical_and(half, torch.logical_or(torch.eq(x, 0), torch.eq(x, -torch.inf)))
    size = torch.abs(x).to(result.dtype)
    return _where(special, _where(torch.gt(y, 0), size, 1 / size), result)


def _remainder(a: Tensor, b: Tensor) -> Tensor:
    """The remainder of a division rounded down; a zero too has the sign of `b`."""
    left = torch.remainder(a, b)
    return _where(torch.eq(left, 0), torch.copysign(torch.zeros_like(left), b), left)


def _cbrt(x: Tensor) -> Tensor:
    """A power near the root, and one step of Newton's in float64, away from zero and infinity."""
    size = torch.abs(x.double())
    plain = torch.logical_and(size > 0, size < torch.inf)
    value = torch.where(plain, size, torch.ones_like(size))
    root = torch.pow(value, 1 / 3)
    root = root - (root - value / (root * root)) / 3
    return torch.where(plain, torch.copysign(root, x), x.double()).to(x.dtype)


def _log1p(x: Tensor) -> Tensor:
    """log(1 + x). The result for a subnormal x is x itself, whose digits torch's vectors lose."""
    return torch.where(torch.lt(torch.abs(x), torch.finfo(x.dtype).tiny), x, torch.log1p(x))


def _chance(like: Tensor, *words: Tensor) -> Tensor:
    """The random bits of elements, where they are: torch has few operations of uint32."""
    with torch.device(like.device):
        return cast(Tensor, bits.chance(torch, like, *words, word=torch.int64))


def _rsqrt(x: Tensor) -> Tensor:
    """The inverse of the root, rounded twice as in NumPy: torch's own may be off by a bit."""
    return torch.reciprocal(torch.sqrt(x))


FUNCTIONS = TorchFunctions(torch)

#: The operations, in the tensors' own dtype.
ARITHMETIC: Mapping[Op, Callable[..., Any]] = arithmetic(
    FUNCTIONS,
    power=_power,
    remainder=_remainder,
    equal=torch.eq,
    where=_where,
    cbrt=_cbrt,
    rsqrt=_rsqrt,
    log1p=_log1p,
    chance=_chance,
)

#: The matrix functions, where the tensors are.
DEVICE_MATRIX: Mapping[Op, Callable[..., Any]] = blockwise(
    FUNCTIONS, {**matrix_functions(FUNCTIONS), Op.NEWTON_SCHULZ: newton_schulz}
)


class HostLibrary(NumpyLibrary):
    """NumPy in the memory of tensors on the CPU, with torch's products of matrices."""

    matrix = TORCH_MATRIX

    def read(self, array: Any) -> np.ndarray[Any, Any]:
        """The same memory, or a copy in float32 of 16 bits."""
        array = array.detach()
        wide = array if array.dtype in (torch.float32, torch.float64) else array.float()
        return wide.numpy()  # type: ignore[no-any-return]

    def write(self, array: Any, values: np.ndarray[Any, Any]) -> None:
        self.copy_all([array], [values])

    def copy_all(self, into: Sequence[Any], arrays: Sequence[Any]) -> None:
        with plain_memory():
            for one, other in zip(into, arrays, strict=True):
                one.copy_(_tensor(np.ascontiguousarray(other)).reshape(one.shape))

    def handed(self, values: np.ndarray[Any, Any], dtype: str, copied: bool) -> Tensor:
        """The same memory as a tensor, or a copy: torch has no tensors of memory that may not be written."""
        with plain_memory():
            return _tensor(super().handed(values, dtype, copied))

    def product(self, a: Any, b: Any, into: Any = None) -> np.ndarray[Any, Any]:
        """By torch, in the memory of the arrays as it lies."""
        with plain_memory():
            product = accumulated(_tensor(a), _tensor(b), None if into is None else torch.from_numpy(into))
            return product.numpy()

    def quintic(self, dtype: str, form: str = DIRECT) -> TorchQuintic:
        return TorchQuintic(dtype, form)

    def numbers(self, values: Any) -> np.ndarray[Any, Any]:
        """The same array; what is on a device is waited for, and of a fake one the numbers are not known: zeros."""
        if is_fake(values):
            return np.zeros(tuple(values.shape))
        return numbers_on_host(values)


def as_tensor(values: Any) -> Tensor:
    """An array between stages as a tensor: the tensor itself, or a copy of an array of NumPy."""
    return values if isinstance(values, Tensor) else torch.tensor(values)


def numbers_on_host(values: Any) -> np.ndarray[Any, Any]:
    """Numbers as NumPy has them; those on a device are waited for."""
    return np.asarray(values.cpu() if isinstance(values, Tensor) else values)


#: Most elements of a stack of large matrices: enough for every processor several times. In 16 bits a stack takes up to
#: 10 bytes for each, few beside what a training keeps.
_STACKED = 1 << 26

#: The number of sets of indices that a device remembers: more than a step of a model of very many groups has.
_PLACES = 1 << 13


def _tensor(values: np.ndarray[Any, Any]) -> Tensor:
    return torch.from_numpy(values if values.flags.writeable else values.copy())


def accumulated(a: Tensor, b: Tensor, into: Tensor | None) -> Tensor:
    """The product of stacks of matrices, of which `a` may be one matrix for all; where there is `into`, added to it."""
    if into is None:
        return torch.matmul(a, b)
    return torch.baddbmm(into, a.expand(len(b), -1, -1), b, out=into)


def _in_memory(matrices: Sequence[Tensor]) -> Tensor | None:
    """The stack of contiguous matrices that lie one after the other in the same memory; None for others."""
    first, batch = matrices[0], sum(len(x) for x in matrices)
    storage, place = first.untyped_storage()._cdata, first.storage_offset()
    for x in matrices:
        if not x.is_contiguous() or x.untyped_storage()._cdata != storage or x.storage_offset() != place:
            return None
        place += x.numel()
    _, rows, cols = first.shape
    return first.as_strided((batch, rows, cols), (rows * cols, cols, 1))


class DeviceLibrary(Library):
    """torch on one device, which is never waited for, with the exceptions of `rulec.torch.tensors.library`.

    Numbers known on the host are 0-d tensors on the CPU: torch passes them to kernels as arguments.
    """

    of = FUNCTIONS
    flattens = True
    #: A product of two matrices of 512 by 512 takes as long as its launch.
    most_in_set = 1 << 18
    arithmetic = ARITHMETIC
    matrix: Mapping[Op, Callable[..., Any]] = DEVICE_MATRIX

    _REDUCE: Mapping[Op, str] = {Op.SUM: "sum", Op.MIN: "amin", Op.MAX: "amax"}
    _SEGMENTS: Mapping[Op, str] = {Op.SUM: "sum", Op.MIN: "min", Op.MAX: "max"}

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self._places: dict[bytes, Tensor] = {}
        self._held: list[Any] = []
        self._products = ProductsChoice()
        self._capabilities = Capabilities()

    @property
    def joins_segments(self) -> bool:  # type: ignore[override]
        """Whether a backend has a kernel for segments; torch's sums of runs have a fixed order on the CPU alone."""
        return self._capabilities.segments is not None or self.device.type in ("cpu", "meta")

    @cached_property
    def _segments(self) -> ReducesSegments | None:
        kernels = self._capabilities.segments
        return None if kernels is None else kernels.build_segments(kernels.emit_segments())

    @property
    def draws_by_kernel(self) -> bool:  # type: ignore[override]
        """Whether the backend has a kernel for random numbers."""
        return self._capabilities.draws is not None

    @cached_property
    def _drawing(self) -> DrawsNumbers | None:
        kernels = self._capabilities.draws
        return None if kernels is None else kernels.build_draws(kernels.emit_draws())

    def several(self, op: Op, operands: Sequence[Sequence[Any]]) -> list[Any]:
        results = foreach.together(op, operands)
        return super().several(op, operands) if results is None else [*results]

    def adopt(self, capabilities: Capabilities) -> None:
        self._capabilities = capabilities
        kernels = capabilities.quintic
        if kernels is None or not kernels.has_quintic(self.device):
            return
        self.most_stacked, self._products = _STACKED, ProductsChoice(kernels)
        iterate = partial(newton_schulz, products=self._products)
        self.matrix = blockwise(FUNCTIONS, {**DEVICE_MATRIX, Op.NEWTON_SCHULZ: iterate})

    def stacks(self, value: Node, operands: Sequence[Any]) -> bool:
        """Small matrices, and all whose products are a backend's: torch's may have other bits in a large stack."""
        if super().stacks(value, operands):
            return True
        rows, cols = operands[0].shape[-2:]
        dtype, _ = self._iterated(value)
        return dtype is not None and self._products.of(dtype, rows, cols) is not TORCH

    def stack_size(self, value: Node, shape: Sequence[int], count: int) -> int:
        """As many as fill the device, where the products are a backend's, and no more than a portion has."""
        if self.most_stacked is None:
            return count
        batch, rows, cols = shape
        dtype, form = self._iterated(value)
        by = TORCH if dtype is None else self._products.of(dtype, rows, cols)
        size = by.stack_size(self.device, dtype or "", rows, cols, batch * count, self.most_stacked, form)
        return max(1, size // max(1, batch))

    @staticmethod
    def _iterated(value: Node) -> tuple[str | None, str]:
        """The dtype of a `newton_schulz`, None where it has the matrix's own, and its form. Others have no dtype."""
        keywords = settings(value) if value.op is Op.NEWTON_SCHULZ else {}
        form = str(keywords.get("form", DIRECT))
        return iterated_in(keywords.get("dtype"), form), form

    def stack(self, matrices: Sequence[Tensor], dtype: str | None = None) -> Tensor:
        """Copies the matrices in one pass, rounded too; matrices that are a stack in memory are not copied."""
        if dtype is None or dtype == str(matrices[0].dtype).removeprefix("torch."):
            stack = _in_memory(matrices)
            return torch.cat([*matrices]) if stack is None else stack
        batches = [len(x) for x in matrices]
        stack = matrices[0].new_empty((sum(batches), *matrices[0].shape[1:]), dtype=getattr(torch, dtype))
        torch._foreach_copy_([*torch.split(stack, batches)], [*matrices])
        return stack

    def quintic(self, dtype: str, form: str = DIRECT) -> TorchQuintic:
        return TorchQuintic(dtype, form)

    def constant(self, value: float) -> Tensor:
        """A number on the CPU."""
        return torch.tensor(value, dtype=torch.float64, device="cpu")

    def numbers(self, values: Any) -> Tensor:
        """A copy on the device, by way of pinned memory, which torch's allocator keeps until it has been read.

        A tensor on the device stays the same, and one number on the CPU stays a number known on the host.
        """
        if isinstance(values, Tensor):
            known = values.device.type == "cpu" and not values.dim()
            return values if known or values.device == self.device else values.to(self.device)
        with plain_memory():
            host = torch.from_numpy(np.array(values, order="C"))
            if self.device.type in ("cpu", "meta"):
                return host.to(self.device)
            return host.pin_memory().to(self.device, non_blocking=True)

    def read(self, array: Any) -> Tensor:
        """The tensor, or a copy in float32 of 16 bits."""
        tensor: Tensor = array.detach() if array.requires_grad else array
        return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()

    def write(self, array: Any, values: Tensor) -> None:
        array.copy_(values if values.shape == array.shape else values.reshape(array.shape))

    def handed(self, values: Tensor, dtype: str, copied: bool) -> Tensor:
        """The same tensor where it will do."""
        tensor = values.to(getattr(torch, dtype)).contiguous()
        return tensor.clone() if copied and tensor is values else tensor

    def cast(self, values: Tensor, dtype: str) -> Tensor:
        return values.to(getattr(torch, dtype))

    def copy(self, values: Tensor) -> Tensor:
        return values.clone()

    def spread(self, values: Tensor, shape: tuple[int, ...]) -> Tensor:
        """A view; of a number known on the host, filled memory on the device."""
        if values.device != self.device:
            return torch.full(shape, values.item(), dtype=values.dtype, device=self.device)
        return values if tuple(values.shape) == shape else values.broadcast_to(shape)

    def take(self, values: Tensor, places: np.ndarray[Any, Any]) -> Tensor:
        """The numbers at these indices; from the second time on the indices are on the device already."""
        return torch.index_select(values, 0, self.places(places))

    def picked(self, values: Tensor, places: Tensor) -> Tensor:
        return torch.index_select(values, 0, places)

    def columns(self, table: Tensor) -> Sequence[Tensor]:
        return table.unbind(1)

    def first_row(self, table: Tensor) -> Sequence[Tensor]:
        return table[0].unbind()

    def address(self, array: Tensor) -> int:
        """torch's, for a tensor's `data` may be replaced; 0 without memory."""
        return 0 if has_no_memory(array) else array.data_ptr()

    def copy_all(self, into: Sequence[Tensor], arrays: Sequence[Tensor]) -> None:
        """Copies all arrays in one pass."""
        if into:
            with torch.no_grad():
                torch._foreach_copy_([*into], [*arrays])

    def put(self, into: Any, places: np.ndarray[Any, Any] | slice, values: Any) -> None:
        cast = values.to(into.dtype)
        if isinstance(places, slice):
            into[places] = cast
        else:
            index = self.places(places)
            into.index_copy_(0, index, self.spread(cast, tuple(index.shape)))

    def places(self, places: np.ndarray[Any, Any]) -> Tensor:
        """Whole numbers as an array on the device, kept for the next time."""
        key = places.tobytes()
        if key not in self._places:
            if len(self._places) >= _PLACES:
                del self._places[next(iter(self._places))]
            self._places[key] = self.numbers(np.asarray(places, np.int64))
        self.hold(self._places[key])
        return self._places[key]

    def hold(self, thing: Any) -> None:
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self.keep(thing)

    def keep(self, thing: Any) -> None:
        """Keeps something for good."""
        self._held.append(thing)

    def together(self, numbers: Sequence[Any]) -> Tensor:
        return torch.stack([self.spread(x.reshape(()), ()).double() for x in numbers])

    def in_one(self, arrays: Sequence[Tensor]) -> Tensor:
        """`torch.stack` makes one copy of all arrays."""
        with torch.no_grad():
            return torch.stack([*arrays])

    def cut(self, array: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
        """The parts are views."""
        return torch.split(array, [*sizes])

    def moved(self, array: Tensor, axes: Sequence[int]) -> Tensor:
        """The result is a view."""
        return array.permute(*axes)

    def split(self, matrices: Tensor, count: int) -> Sequence[Tensor]:
        return torch.split(matrices, len(matrices) // count) if len(matrices) else [matrices] * count

    def reduce(self, op: Op, values: Tensor, axes: tuple[int, ...] | None = None) -> Tensor:
        """By torch, whose order of adding is the same in every run."""
        values, kept = self.spread(values, tuple(values.shape)).double(), axes is not None
        axes = tuple(range(values.dim())) if axes is None else axes
        if op is not Op.SUM and not all(values.shape[axis] for axis in axes):
            shape = [1 if i in axes else n for i, n in enumerate(values.shape)] if kept else []
            return values.new_full(shape, REDUCTIONS[op].nothing)
        function: Callable[..., Tensor] = getattr(torch, self._REDUCE[op])
        return function(values, dim=axes, keepdim=kept) if axes else values

    def segments(self, op: Op, values: Tensor, ends: Tensor) -> Tensor:
        """By a backend's kernel; by torch on the CPU, which takes the terms of a run one after the other."""
        if has_no_memory(values):
            return values.new_empty(len(ends) - 1, dtype=torch.float64)
        if self._segments is not None:
            return cast(Tensor, self._segments(op, values.double(), ends))
        wide = values.double()
        return torch.segment_reduce(wide, self._SEGMENTS[op], offsets=ends, initial=REDUCTIONS[op].nothing)

    def draws(self, op: Op, counts: Sequence[int], position: Mapping[str, Any], dtype: str, first: int = 0) -> Tensor:
        """By a backend's kernel where it has one. The ends of tensors and their numbers are remembered."""
        if self._drawing is None:
            return cast(Tensor, super().draws(op, counts, position, dtype, first))
        out = torch.empty(sum(counts), dtype=getattr(torch, dtype), device=self.device)
        ends, tensors = self.places(np.cumsum([0, *counts])), self.places(position["tensor"])
        step, seed, draw = (position[key] for key in ("step", "seed", "draw"))
        steps = step if isinstance(step, int) else self._steps(step)
        self._drawing(op, out, ends, tensors, steps, most=max(counts), seed=seed, draw=draw, first=first)
        return out

    def _steps(self, steps: Tensor) -> Tensor:
        return self.spread(steps.reshape(-1), (steps.numel(),)).double()

    def blank(self, like: Any, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=like.dtype, device=self.device)

    def empty(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.float64, device=self.device)

    def product(self, a: Tensor, b: Tensor, into: Tensor | None = None) -> Tensor:
        """The product that torch computes."""
        return accumulated(a, b, into)

    def counted(self, first: int, stop: int) -> Tensor:
        """The tensor is on the device."""
        return torch.arange(first, stop, dtype=torch.int64, device=self.device)
