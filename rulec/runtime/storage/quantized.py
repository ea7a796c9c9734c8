"""Quantized states for kernels that read floats: states are dequantized before each stage and quantized after it.

A kernel with `formats` dequantizes and quantizes by itself, in the nearest cache. All other kernels need this module.
In main memory tensors are converted one by one, with memory for the floats of one tensor of each shape. On a device
small kernels of the backend convert them.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from rulec.array_api.slices import Pieces
from rulec.backend.capabilities import Capabilities, DeviceScalars, capabilities_of, scalars_of
from rulec.backend.protocol import Backend, Call, Kernel, Rows, Scratch, Written
from rulec.compiler.ir import Program, Store
from rulec.compiler.layout import Layout, layout_for, scale_name
from rulec.compiler.pipeline import compile
from rulec.compiler.view import MatrixView
from rulec.errors import BackendUnsupported
from rulec.formats import Format, decode, encode
from rulec.kernel.multi_tensor.address import address_of, element_count
from rulec.kernel.place import used_buffers
from rulec.language.expr.node import Op, node
from rulec.language.library.load import parse

Flat = np.ndarray[Any, Any]

#: Memory for one dequantized state of a parameter, by the state's name and the parameter: float32, in its memory order.
Decoded = Callable[[str, Any], Any]

#: Arrays of one dimension, one after the other as one array.
Joined = Callable[[Sequence[Any]], Any]


def kernel_of(
    backend: Backend, program: Program, layout: Layout, decoded: Decoded, joined: Joined = np.concatenate
) -> tuple[str, Kernel]:
    """The source and the kernel of a program. BackendUnsupported for codes on a device without kernels for them."""
    capabilities = capabilities_of(backend)
    if not layout.formats or capabilities.decodes(program, layout):
        source = backend.emit(program, layout)
        return source, backend.build(program, layout, source)
    there = _there(backend, capabilities, program, layout) if capabilities.on_device else None
    source = backend.emit(program, layout.decoded)
    return source, CodedKernel(backend.build(program, layout.decoded, source), program, layout, decoded, there, joined)


def _there(backend: Backend, capabilities: Capabilities, program: Program, layout: Layout) -> DeviceFormats:
    """The kernels of a device's formats; BackendUnsupported where it has none."""
    there = DeviceFormats(backend, capabilities.decodes)
    lacking = [name for name, form in layout.formats if not there.has(form)]
    if lacking:
        floats = f"give state_dtype={dict.fromkeys(lacking, 'float32')} for these states"
        raise BackendUnsupported(backend.name, f"states in codes ({' and '.join(lacking)})", program.name, floats)
    return there


class CodedKernel:
    """A kernel of a layout with codes, by the kernel of the layout of dequantized states."""

    def __init__(
        self, kernel: Kernel, program: Program, layout: Layout, decoded: Decoded,
        there: DeviceFormats | None = None, joined: Joined = np.concatenate,
    ) -> None:  # fmt: skip
        self.kernel, self.program, self.layout, self.decoded = kernel, program, layout, decoded
        self.joined, self.state = joined, host_state if there is None else there.state

    def bind(
        self, params: Sequence[Any], states: Sequence[dict[str, Any]], views: Sequence[MatrixView] = ()
    ) -> CodedCall:  # fmt: skip
        """A call over these tensors; a quantized state is two arrays, `NAME` and `NAME::scale`."""
        return CodedCall(self, params, states, views)


class CodedCall:
    """A kernel of quantized states, bound to the tensors of one bucket."""

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
            row = replace(rows, index=rows.index[[tensor]])
            reduced.append(self._one(stage, tensor, gradient, row, arrays, stream))
        return Written(self._params, self._states, _joined(reduced, self._kernel.joined))

    def _one(
        self, stage: int, tensor: int, gradient: Any, rows: Rows, scratch: Scratch, stream: Any
    ) -> Mapping[str, Any]:
        """Runs one stage of one tensor. Its reductions, by name."""
        call, coded = self._bound(tensor)
        for name in coded.keys() & self._used[stage]:
            coded[name].decode(rows, stream)
        reduced = call(stage, [gradient], rows, scratch, stream=stream).reduced
        for name in coded.keys() & self._stored[stage]:
            coded[name].encode(rows, stream)
        return reduced

    def _bound(self, tensor: int) -> tuple[Call, dict[str, CodedState]]:
        """The call of one tensor over its dequantized states, and these states."""
        known = self._calls.get(tensor)
        if known is None:
            held, states = self._states[tensor], self._floats(tensor)
            coded: dict[str, CodedState] = {
                name: self._kernel.state(form, states[name], held[name], held[scale_name(name)])
                for name, form in self._kernel.layout.formats
            }
            views = [self._views[tensor]] if self._views else []
            known = self._calls[tensor] = self._kernel.kernel.bind([self._params[tensor]], [states], views), coded
        return known

    def _floats(self, tensor: int) -> dict[str, Any]:
        """The states of a tensor, with memory for values in place of codes and scales."""
        states = dict(self._states[tensor])
        for name, _ in self._kernel.layout.formats:
            del states[scale_name(name)]
            states[name] = self._kernel.decoded(name, self._params[tensor])
        return states

    @functools.cached_property
    def scalars(self) -> DeviceScalars | None:
        """`scalars` of the kernel bound to all tensors; None where it computes no scalar table."""
        states = [self._floats(tensor) for tensor in range(len(self._params))]
        return scalars_of(self._kernel.kernel.bind(self._params, states, self._views))


class CodedState(NamedTuple):
    """One state of one tensor: functions that write its values, and its codes and scales.

    Both take the rows of a stage and a stream. `kept` holds their memory.
    """

    decode: Callable[[Rows, Any], None]
    encode: Callable[[Rows, Any], None]
    kept: Any = None


def host_state(form: Format, values: Any, codes: Any, scales: Any) -> CodedState:
    """A state in main memory: its codes and scales, and memory for its values in float32."""
    floats, coded, scaled = memory(values, "float32"), memory(codes, form.code_dtype), memory(scales, "float32")

    def decode_all(rows: Rows, stream: Any) -> None:
        floats[...] = decode(form, coded, scaled, floats.shape)

    def encode_all(rows: Rows, stream: Any) -> None:
        coded[...], scaled[...] = encode(form, floats)

    return CodedState(decode_all, encode_all, (values, codes, scales))


def memory(array: Any, dtype: str) -> Flat:
    """The elements of a dense array in main memory, NumPy's or PyTorch's, in their order in memory."""
    count = element_count(array)
    if not count:
        return np.empty(0, dtype)
    size = count * np.dtype(dtype).itemsize
    held = memoryview((ctypes.c_char * size).from_address(address_of([array])(array)))
    return np.frombuffer(held, np.dtype(dtype))


def _joined(reduced: Sequence[Mapping[str, Any]], join: Joined) -> Mapping[str, Any]:
    """The reductions of tensors one after the other as those of all: numbers as one array, vectors as one list."""
    if not reduced:
        return {}
    joined: dict[str, Any] = {}
    for name, first in reduced[0].items():
        each = [r[name] for r in reduced]
        joined[name] = [x for xs in each for x in xs] if isinstance(first, list | Pieces) else join(each)
    return joined


#: The state of the two programs.
_STATE = "m"

_NO_COLUMNS = np.zeros((1, 0))


class DeviceFormats:
    """Kernels of a backend that dequantize and quantize tensors, by format; `able` says which formats have kernels."""

    def __init__(self, backend: Backend, able: Callable[[Program, Any], bool]) -> None:
        self._backend, self._able = backend, able
        self._kernels: dict[tuple[str, bool], Kernel] = {}

    def has(self, form: Format) -> bool:
        """Whether the backend has kernels for a format."""
        return self._able(_program(True), layout_for(_program(True), "float32", formats={_STATE: form}))

    def kernel(self, form: Format, decodes: bool) -> Kernel:
        """The kernel that writes the values of codes, or the codes of values."""
        key = form.key, decodes
        if key not in self._kernels:
            program = _program(decodes)
            layout = layout_for(program, "float32", formats={_STATE: form})
            self._kernels[key] = self._backend.build(program, layout, self._backend.emit(program, layout))
        return self._kernels[key]

    def state(self, form: Format, values: Any, codes: Any, scales: Any) -> CodedState:
        """A state of one tensor on the device. Of a tensor that stays as it is, codes and scales are not written."""
        states = [{_STATE: codes, scale_name(_STATE): scales}]
        decoding, encoding = (self.kernel(form, decodes).bind([values], states) for decodes in (True, False))

        def decode_all(rows: Rows, stream: Any) -> None:
            decoding(0, [values], Rows(_NO_COLUMNS, np.zeros(1, np.int64)), stream=stream)

        def encode_all(rows: Rows, stream: Any) -> None:
            encoding(0, [values], Rows(_NO_COLUMNS, rows.index, rows.stays), stream=stream)

        return CodedState(decode_all, encode_all)


@functools.cache
def _program(decodes: bool) -> Program:
    """The program `p = m`, from a state to a parameter, or `m = p`, from the parameter to the state."""
    program = compile(parse(f"name: Codes\nstate: {{{_STATE}: 0}}\nstep: |\n  p = {_STATE}\n"))
    if decodes:
        return program
    stage = replace(program.stages[0], stores=(Store(_STATE, node(Op.LOAD, "p")),))
    return replace(program, stages=(stage,))
