"""PyTorch tensors as the runtime sees them: dense memory in any stride order, and guards that recognise seen tensors.

Asking each of a thousand gradients for its dtype, size and order takes longer than a small kernel. torch's compiler has
a function that asks them all in one call. If torch lacks the function, or the function finds a difference, the guards
ask each tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import Parameter, is_lazy

from rulec.errors import TensorError
from rulec.kernel.multi_tensor.address import Located
from rulec.runtime.arrays import Arrays, Vector
from rulec.runtime.storage.allocator import STATE_SIZE, StateSpec
from rulec.torch.tensors.dtensor import local_tensor
from rulec.torch.tensors.fake import is_fake, plain_memory, real_memory, resolved
from rulec.torch.tensors.library import DeviceLibrary, HostLibrary
from rulec.torch.tensors.memory import Spans, check_gradient_memory, check_memory, span_of

#: The dtypes that kernels store, by our names.
DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16,
}  # fmt: skip

#: The dtypes of states: these, and those of codes.
STATE_DTYPES: Mapping[str, torch.dtype] = {**DTYPES, "int16": torch.int16, "int8": torch.int8, "uint8": torch.uint8}

_NAMES = {dtype: name for name, dtype in DTYPES.items()}

#: The backend for each type of device; others have none.
_BACKENDS = {"cpu": "cpu", "cuda": "triton"}

Check = Callable[[Sequence[Tensor]], Sequence[Tensor]]


def real_view(tensor: Tensor) -> Tensor:
    """The memory of a tensor as kernels see it: a complex number is a pair of reals, as in torch.optim.

    Of a DTensor it is the local tensor.
    """
    tensor = local_tensor(tensor).detach()
    if not tensor.is_complex() or tensor.layout is not torch.strided:
        return tensor
    return torch.view_as_real(resolved(tensor))


def real_gradient(grad: Tensor, name: str) -> Tensor:
    """The same of the gradient of a parameter of this name; TensorError where it lacks memory, which may be read."""
    here = local_tensor(grad)
    if here.is_complex():
        check_gradient_memory(here, name)
    return real_view(here)


def dtype_name(dtype: torch.dtype) -> str:
    """Our name for a dtype, or for the parts of a complex one; TensorError for a dtype that no kernel stores."""
    name = _NAMES.get(dtype.to_real() if dtype.is_complex else dtype)
    if name is None:
        raise TensorError(f"a tensor of {dtype} cannot be optimized: use one of {', '.join(DTYPES)}")
    return name


def memory_order(tensor: Tensor) -> tuple[tuple[int, int], ...]:
    """The dimensions that matter to where elements lie, as (extent, stride), the slowest first."""
    pairs = [(n, s) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n != 1]
    return tuple(sorted(pairs, key=lambda pair: -pair[1]))


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one piece of memory, each its own place, in whatever order; of none, that is so."""
    if not tensor.numel():
        return True
    expected = 1
    for extent, stride in reversed(memory_order(tensor)):
        if stride != expected:
            return False
        expected *= extent
    return True


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether elements may share memory: a dimension does not step over all that the faster ones reach."""
    reached = 0
    for extent, stride in reversed(memory_order(tensor)):
        if stride <= reached:
            return True
        reached += (extent - 1) * stride
    return False


def same_order(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape have their elements in the same order in memory."""
    if a.stride() == b.stride():
        return True
    extents = a.shape
    return all(n == 1 or s == t for n, s, t in zip(extents, a.stride(), b.stride(), strict=True))


class TorchArrays(Arrays):
    """Strided tensors of float32, float64, bfloat16 and float16, dense in any memory order."""

    def dtype(self, array: Tensor) -> str:
        return dtype_name(array.dtype)

    def device(self, array: Tensor) -> str:
        """The device, such as `cpu` or `cuda:0`."""
        return str(array.device)

    def backend(self, device: str) -> str:
        """The fused kernels for that device; TensorError where there are none."""
        kind = device.partition(":")[0]
        if kind not in _BACKENDS:
            raise TensorError(f"a tensor on {device!r} cannot be optimized: move it to one of {', '.join(_BACKENDS)}")
        return _BACKENDS[kind]

    def gradient_check(self, params: Sequence[Tensor], dtype: str, names: Sequence[str]) -> Check:
        """A function that gives gradients in their parameters' memory order, and copies a gradient in another order.

        It raises TensorError, naming the tensor, for one that is sparse or has another shape, and OtherDtype.
        """
        return _GradientCheck(params, DTYPES[dtype], names)

    def allocate(
        self, params: Sequence[Tensor], specs: Sequence[StateSpec], shapes: Sequence[Sequence[tuple[int, ...]]],
        hyper: Sequence[Mapping[str, float]], facts: Sequence[Mapping[str, float]],
    ) -> list[dict[str, Tensor]]:  # fmt: skip
        """For each parameter its states: tensors of their own, those of its shape in its memory order."""
        with plain_memory(), _memory_for(params, shapes, specs):
            return [
                {spec.name: _initial(spec, param, shape, h, f) for spec, shape in zip(specs, state_shapes, strict=True)}
                for param, state_shapes, h, f in zip(params, shapes, hyper, facts, strict=True)
            ]

    def scratch(self, like: Tensor, dtype: str) -> Tensor:
        with plain_memory():
            return torch.empty_like(like, dtype=DTYPES[dtype])

    def scratches(self, like: Tensor, dtype: str, count: int) -> Sequence[Tensor]:
        """One after the other: a stack of them needs no copy."""
        with plain_memory():
            return torch.unbind(like.detach().new_empty((count, *like.shape), dtype=DTYPES[dtype]))

    def plain(self, array: Tensor) -> bool:
        """Whether the tensor is contiguous."""
        return array.is_contiguous()

    def library(self, device: str, on_device: bool) -> HostLibrary | DeviceLibrary:
        """NumPy and torch on the CPU, or torch alone on a device."""
        return DeviceLibrary(device) if on_device else HostLibrary()

    def vector(self, values: np.ndarray[Any, Any], device: str | None = None) -> Vector:
        """A copy of the numbers, with a 0-d view of each: step counts in float32 as torch.optim has them."""
        with plain_memory(), real_memory() if device is None else nullcontext():
            dtype = torch.float32 if values.dtype.kind == "i" else torch.float64
            numbers = torch.empty(len(values), dtype=dtype, device=device or "cpu")
            numbers.copy_(torch.from_numpy(values))
            views = [numbers[i] for i in range(len(numbers))]
            return Vector(numbers if device is not None else numbers.numpy(), views)

    def vector_now(self, vector: Vector) -> Vector | None:
        there = vector.numbers if isinstance(vector.numbers, Tensor) else vector.numbers.base
        if not isinstance(there, Tensor):  # no number
            return vector
        first, size = there.data_ptr(), there.element_size()
        alike = [(v.dtype, v.dim(), v.is_neg()) == (there.dtype, 0, False) for v in vector.views]
        if not all(alike) or [v.data_ptr() for v in vector.views] != [first + size * i for i in range(len(there))]:
            return None
        return Vector(there if there is vector.numbers else there.numpy(), vector.views)


@contextmanager
def _memory_for(
    params: Sequence[Tensor], shapes: Sequence[Sequence[tuple[int, ...]]], specs: Sequence[StateSpec]
) -> Iterator[None]:
    """TensorError, with how much was wanted, where a device has no memory for it."""
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        wanted = sum(
            math.prod(s) * STATE_SIZE[spec.dtype]
            for state_shapes in shapes
            for s, spec in zip(state_shapes, specs, strict=True)
        )
        raise TensorError(
            f"{params[0].device} has no memory for the states of {len(params)} tensors ({wanted / 2**20:.0f} MiB): "
            f"nothing was changed; use fewer or narrower states (state_dtype), or free memory"
        ) from error


class OtherDtype(TensorError):
    """A gradient of another dtype than the kernel reads."""


class _GradientCheck:
    """Looks at gradients: at all of them together where they look as they did before, else at each."""

    def __init__(self, params: Sequence[Tensor], dtype: torch.dtype, names: Sequence[str]) -> None:
        self._params, self._dtype, self._names = params, dtype, names
        self._counts = [p.numel() for p in params]
        self._contiguous = [p.is_contiguous() for p in params]
        self._ordered = [i for i, plain in enumerate(self._contiguous) if not plain]
        self._spans = Spans(params, dtype)
        self._guard: Guard = never
        self._guards_left = 4

    def __call__(self, grads: Sequence[Tensor]) -> Sequence[Tensor]:
        if isinstance(grads, Located):
            return grads
        known = self._guard(*grads)
        if not known and not self._usual(grads):
            each = zip(grads, self._params, self._names, strict=True)
            return [_conforming(grad, param, self._dtype, name) for grad, param, name in each]
        if not self._spans.are_held(grads):
            for grad, name in zip(grads, self._names, strict=True):
                check_gradient_memory(grad, name)
        if not known and self._guards_left:
            self._guards_left -= 1
            self._guard = guard_for(grads)
        return grads

    def _usual(self, grads: Sequence[Tensor]) -> bool:
        """Whether kernels can read them as they are."""
        try:
            if [*map(_numel, grads)] != self._counts or [*map(_is_contiguous, grads)] != self._contiguous:
                return False
        except RuntimeError:  # a sparse gradient has no memory order
            return False
        if not {Tensor, Parameter}.issuperset(map(type, grads)):
            return False
        if {g.dtype for g in grads} - {self._dtype} or any(map(_is_neg, grads)):  # it may lie negated in memory
            return False
        return all(same_order(grads[i], self._params[i]) for i in self._ordered)


def _address(tensor: Tensor) -> int:
    """The address where a tensor's storage begins: 0 where it has no memory."""
    return tensor.data_ptr() - int(tensor.storage_offset()) * tensor.element_size()


_numel = Tensor.numel
_is_contiguous = Tensor.is_contiguous
_is_neg = Tensor.is_neg


def check_conforms(grad: Tensor, param: Tensor, name: str) -> None:
    """TensorError where a gradient is sparse, has another shape than its parameter, or lacks memory."""
    if grad.layout is not torch.strided:
        raise TensorError(
            f"the gradient of {name} is sparse ({grad.layout}), which this rule does not take: use SparseAdam, make "
            f"its layer with sparse=False, or give param.grad.to_dense()"
        )
    if grad.shape != param.shape:
        raise TensorError(f"the gradient of {name} has shape {tuple(grad.shape)}, its parameter {tuple(param.shape)}")
    if type(grad).__torch_dispatch__ is not Tensor.__torch_dispatch__ and not is_fake(grad) and _address(grad) <= 0:
        raise TensorError(
            f"the gradient of {name} is a {type(grad).__name__} without memory of its own: give the plain tensor in it"
        )
    check_gradient_memory(grad, name)


def _conforming(grad: Tensor, param: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    check_conforms(grad, param, name)
    if grad.dtype != dtype:
        raise OtherDtype(f"the gradient of {name} is of {grad.dtype}, where {dtype} is expected")
    if same_order(grad, param) and not grad.is_neg():
        return grad
    with plain_memory():
        return torch.empty_like(param, dtype=grad.dtype).copy_(grad)


def _initial(
    spec: StateSpec, param: Tensor, shape: tuple[int, ...], hyper: Mapping[str, float], facts: Mapping[str, float]
) -> Tensor:
    dtype = STATE_DTYPES[spec.dtype]
    if spec.like_parameter:
        state = torch.empty_like(param, dtype=dtype)
    else:
        state = param.new_empty(shape, dtype=dtype)
    if spec.copies_parameter:
        return state.copy_(param)
    if spec.reads_parameter and not is_fake(param):
        values = spec.values(hyper, facts, param.double().cpu().numpy())
        return state.copy_(torch.from_numpy(np.asarray(values)))
    return state.fill_(spec.number(hyper, facts))


def check_parameters(params: Sequence[Tensor], names: Sequence[str]) -> None:
    """TensorError where a parameter cannot be updated in its own memory."""
    for param, name in zip(params, names, strict=True):
        _check_parameter(local_tensor(param), name)
    check_apart(params, names)


def _check_parameter(param: Tensor, name: str) -> None:
    if is_lazy(param):
        raise TensorError(f"{name} has no shape yet: run the model once before making the optimizer")
    if param.layout is not torch.strided:
        raise TensorError(f"{name} is sparse ({param.layout}): only dense parameters can be optimized")
    if type(param).__torch_dispatch__ is not Tensor.__torch_dispatch__ and not is_fake(param):
        raise TensorError(
            f"{name} is a {type(param).__name__}, which need not have memory of its own: pass the plain tensors in it"
        )
    if param.is_inference():
        raise TensorError(f"{name} was made in inference mode, where nothing can be trained: make it outside")
    if param.is_conj() or param.is_neg():
        raise TensorError(f"{name} is a conjugate or negative view: pass param.resolve_conj().resolve_neg()")
    if param.numel() and overlaps_itself(param):
        raise TensorError(
            f"{name} is a view with stride {param.stride()} that repeats memory: pass a parameter that is contiguous, "
            f"or the whole tensor it is a view of"
        )
    dtype_name(param.dtype)
    TorchArrays().backend(str(param.device))
    check_memory(param, name)


def check_apart(params: Sequence[Tensor], names: Sequence[str]) -> None:
    """TensorError where two parameters share memory, or one is given twice."""
    placed = [(local_tensor(p), name) for p, name in zip(params, names, strict=True) if not is_fake(p) and p.numel()]
    spans = [(str(p.device), p.data_ptr(), span_of(p) * p.element_size(), i) for i, (p, _) in enumerate(placed)]
    near: list[tuple[str, int, int, int]] = []
    for span in sorted(spans):
        near = [before for before in near if span[0] == before[0] and span[1] < before[1] + before[2]]
        for before in near:
            (first, one), (second, other) = placed[before[3]], placed[span[3]]
            if (is_dense(first) and is_dense(second)) or _meet(first, second):
                raise TensorError(f"{one} and {other} share memory: give each tensor once")
        near.append(span)


def _meet(first: Tensor, second: Tensor) -> bool:
    """Whether tensors whose memory is interleaved have an element in common, or it takes too long to say."""
    start = min(first.data_ptr(), second.data_ptr())
    ends = [t.data_ptr() - start + span_of(t) * t.element_size() for t in (first, second)]
    memory = np.empty(max(ends), np.uint8)  # of which no byte is touched
    shares: Any = np.shares_memory
    try:
        return bool(shares(*(_standing_for(t, memory, start) for t in (first, second)), max_work=1_000_000))
    except np.exceptions.TooHardError:
        return True


def _standing_for(tensor: Tensor, memory: np.ndarray[Any, Any], start: int) -> np.ndarray[Any, Any]:
    """An array whose elements lie in `memory` as a tensor's behind the address `start`."""
    size = tensor.element_size()
    strides = [stride * size for stride in tensor.stride()]
    return np.ndarray(tuple(tensor.shape), f"V{size}", memory, tensor.data_ptr() - start, strides)


Guard = Callable[..., bool]


def guard_for(tensors: Sequence[Tensor]) -> Guard:
    """A function of tensors, its arguments: true where they have the same types, dtypes, devices, sizes, strides and
    dispatch keys as these (sparse, conjugate and negated ones have others). False may mean nothing.
    """
    try:
        from torch._C._dynamo.guards import TensorGuards

        sizes: Any = [[*t.size()] for t in tensors]
        strides: Any = [[*t.stride()] for t in tensors]
        check: Guard = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    except (ImportError, TypeError, RuntimeError):
        return never
    return check


def never(*tensors: Tensor) -> bool:
    """Always returns False."""
    return False
