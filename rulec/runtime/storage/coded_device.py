"""States in codes on a device, for kernels that read floats: small kernels of the backend decode and encode them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from rulec.backend.protocol import Backend, Kernel, Rows
from rulec.compiler.ir import Program, Store
from rulec.compiler.layout import layout_for, scale_name
from rulec.compiler.pipeline import compile
from rulec.formats import Format
from rulec.language.expr.node import Op, node
from rulec.language.library.load import parse

#: The state of the two programs.
_STATE = "m"

_NO_COLUMNS = np.zeros((1, 0))


class DeviceFormats:
    """Kernels of a backend for decoding and encoding tensors, by format; `able` tells whether a format has kernels."""

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

    def state(self, form: Format, values: Any, codes: Any, scales: Any) -> DeviceState:
        """A state of one tensor: its codes and scales, and memory for its values in float32."""
        states = [{_STATE: codes, scale_name(_STATE): scales}]
        return DeviceState(values, *(self.kernel(form, decodes).bind([values], states) for decodes in (True, False)))


class DeviceState:
    """One state of one tensor on a device, with calls for decoding and encoding."""

    def __init__(self, values: Any, decoding: Any, encoding: Any) -> None:
        self.values, self._decoding, self._encoding = values, decoding, encoding

    def decode(self, rows: Rows, stream: Any) -> None:
        """Writes the values."""
        self._decoding(0, [self.values], Rows(_NO_COLUMNS, np.zeros(1, np.int64)), stream=stream)

    def encode(self, rows: Rows, stream: Any) -> None:
        """Writes the codes and the scales, unless the tensor stays as it is."""
        self._encoding(0, [self.values], Rows(_NO_COLUMNS, rows.index, rows.stays), stream=stream)


@functools.cache
def _program(decodes: bool) -> Program:
    """The program `p = m`, from a state to a parameter, or `m = p`, from the parameter to the state."""
    program = compile(parse(f"name: Codes\nstate: {{{_STATE}: 0}}\nstep: |\n  p = {_STATE}\n"))
    if decodes:
        return program
    stage = replace(program.stages[0], stores=(Store(_STATE, node(Op.LOAD, "p")),))
    return replace(program, stages=(stage,))
