"""States in codes for kernels that read floats: decoded before each stage, encoded after it, tensor by tensor.

A kernel with `formats` decodes and encodes by itself, in the nearest cache. This is the way of all other kernels in
main memory. It needs memory for the decoded states of one tensor of each shape.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rulec.backend.protocol import Backend, Call, Kernel, Rows, Scratch, Written
from rulec.compiler.ir import Program
from rulec.compiler.layout import Layout, scale_name
from rulec.compiler.view import MatrixView
from rulec.errors import BackendUnsupported
from rulec.formats import Format, decode, encode
from rulec.kernel.bucket.address import address_of, element_count
from rulec.kernel.place import used_buffers

Flat = np.ndarray[Any, Any]

#: Memory for one decoded state of a parameter, by the state's name and the parameter: float32, in its memory order.
Decoded = Callable[[str, Any], Any]


def kernel_of(backend: Backend, program: Program, layout: Layout, decoded: Decoded) -> tuple[str, Kernel]:
    """The source and the kernel of a program. BackendUnsupported for codes on a device without kernels for them."""
    if not layout.formats or decodes(backend, program, layout):
        source = backend.emit(program, layout)
        return source, backend.build(program, layout, source)
    if getattr(backend, "on_device", False):
        states = [name for name, _ in layout.formats]
        where = " in a kernel that sees rows and columns" if hasattr(backend, "decodes") else ""
        floats = f"give state_dtype={dict.fromkeys(states, 'float32')} for these states"
        what = f"states in codes ({' and '.join(states)}){where}"
        raise BackendUnsupported(backend.name, what, program.name, floats)
    source = backend.emit(program, layout.decoded)
    return source, CodedKernel(backend.build(program, layout.decoded, source), program, layout, decoded)


def decodes(backend: Backend, program: Program, layout: Layout) -> bool:
    """Whether the kernels of a backend read and write codes themselves."""
    ability: Callable[[Program, Layout], bool] | None = getattr(backend, "decodes", None)
    return ability is not None and ability(program, layout)


class CodedKernel:
    """A kernel of a layout with codes, by the kernel of the decoded layout."""

    def __init__(self, kernel: Kernel, program: Program, layout: Layout, decoded: Decoded) -> None:
        self.kernel, self.program, self.layout, self.decoded = kernel, program, layout, decoded

    def bind(
        self, params: Sequence[Any], states: Sequence[dict[str, Any]], views: Sequence[MatrixView] = ()
    ) -> CodedCall:  # fmt: skip
        """A call over these tensors; a state in codes is two arrays, `NAME` and `NAME::scale`."""
        return CodedCall(self, params, states, views)


class CodedCall:
    """A coded kernel bound to the tensors of one bucket."""

    def __init__(
        self, kernel: CodedKernel, params: Sequence[Any], states: Sequence[dict[str, Any]], views: Sequence[MatrixView]
    ) -> None:
        self._kernel, self._params, self._states, self._views = kernel, params, states, views
        self._calls: dict[int, tuple[Call, dict[str, CodedState]]] = {}
        stages = kernel.program.stages
        self._used = [frozenset(used_buffers(kernel.program, stage)) for stage in stages]
        self._stored = [frozenset(s.buffer for s in stage.stores) for stage in stages]

    def __call__(
        self, stage: int, moving: Sequence[Any], rows: Rows, scratch: Scratch | None = None, *,
        tensors: Sequence[int] | None = None, stream: Any = None,
    ) -> Written:  # fmt: skip
        """Runs one stage, tensor by tensor; see `rulec.backend.protocol.Call`."""
        fired = range(len(self._params)) if tensors is None else tensors
        reduced = []
        for place, (tensor, gradient) in enumerate(zip(fired, moving, strict=True)):
            arrays = {name: [each[place]] for name, each in (scratch or {}).items()}
            reduced.append(self._one(stage, tensor, gradient, Rows(rows.table, rows.index[[tensor]]), arrays))
        return Written(self._params, self._states, _joined(reduced))

    def _one(self, stage: int, tensor: int, gradient: Any, rows: Rows, scratch: Scratch) -> Mapping[str, Any]:
        """Runs one stage of one tensor. Its reductions, by name."""
        call, coded = self._bound(tensor)
        for name in coded.keys() & self._used[stage]:
            coded[name].decode()
        reduced = call(stage, [gradient], rows, scratch).reduced
        for name in coded.keys() & self._stored[stage]:
            coded[name].encode()
        return reduced

    def _bound(self, tensor: int) -> tuple[Call, dict[str, CodedState]]:
        """The call of one tensor over its decoded states, and these states."""
        known = self._calls.get(tensor)
        if known is None:
            param, states = self._params[tensor], dict(self._states[tensor])
            coded = {}
            for name, form in self._kernel.layout.formats:
                codes, scales = states[name], states.pop(scale_name(name))
                states[name] = self._kernel.decoded(name, param)
                coded[name] = CodedState(form, states[name], codes, scales)
            views = [self._views[tensor]] if self._views else []
            known = self._calls[tensor] = self._kernel.kernel.bind([param], [states], views), coded
        return known


class CodedState:
    """One state of one tensor: its codes and scales, and memory for its values in float32."""

    def __init__(self, form: Format, values: Any, codes: Any, scales: Any) -> None:
        self.form, self._kept = form, (values, codes, scales)
        self.values = memory(values, "float32")
        self.codes, self.scales = memory(codes, form.code_dtype), memory(scales, "float32")

    def decode(self) -> None:
        """Writes the values."""
        self.values[...] = decode(self.form, self.codes, self.scales, self.values.shape)

    def encode(self) -> None:
        """Writes the codes and the scales."""
        self.codes[...], self.scales[...] = encode(self.form, self.values)


def memory(array: Any, dtype: str) -> Flat:
    """The elements of a dense array in main memory, NumPy's or PyTorch's, in their order in memory."""
    count = element_count(array)
    if not count:
        return np.empty(0, dtype)
    size = count * np.dtype(dtype).itemsize
    held = memoryview((ctypes.c_char * size).from_address(address_of([array])(array)))
    return np.frombuffer(held, np.dtype(dtype))


def _joined(reduced: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The reductions of tensors one after the other as those of all: numbers as one array, vectors as one list."""
    if not reduced:
        return {}
    joined: dict[str, Any] = {}
    for name, first in reduced[0].items():
        each = [r[name] for r in reduced]
        joined[name] = [x for xs in each for x in xs] if isinstance(first, list) else np.concatenate(each)
    return joined
