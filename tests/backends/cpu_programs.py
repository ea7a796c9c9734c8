"""Programs with arrays to run them on, and what plain NumPy makes of the same program in the same precision.

Where NumPy's functions have ulps of their own, the cpu backend's take their place, called alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import rulec
from rulec.backend.protocol import Rows
from rulec.compiler.ir import Program
from rulec.compiler.layout import Layout, kernel_buffers, layout_for
from rulec.language.expr.arithmetic import NUMPY
from rulec.language.expr.node import Node, Op, is_boolean, walk
from rulec_backends.cpu import CpuBackend, CpuKernel
from rulec_backends.cpu.call import OneStageCall
from tests.backends.cpu_functions import Array, elementary

#: The words that are no single IEEE operation; test_cpu_math.py says how exact they are.
INEXACT = {
    Op.EXP: "exp", Op.LOG: "log", Op.TANH: "tanh", Op.SIGMOID: "sigmoid", Op.ERF: "erf", Op.CBRT: "cbrt",
    Op.POW: "power",
}  # fmt: skip

NUMPY_DTYPES = {"float32": np.float32, "float64": np.float64, "float16": np.float16}


def program_of(text: str) -> Program:
    """The program of a rule of the library, or of a step written here."""
    if "\n" not in text and "=" not in text:
        return rulec.compile(rulec.load(text))
    step = "\n".join(f"  {line}" for line in text.splitlines())
    states = "".join(f"{name}: 0, " for name in ("m", "v") if f"{name} =" in text)
    header = f"name: Tested\nsummary: A rule of a test.\nhyper: {{lr: 0.1, a: 0.7}}\nstate: {{{states.rstrip(', ')}}}\n"
    return rulec.compile(rulec.parse(f"{header}step: |\n{step}\n"))


def kernel_of(program: Program, layout: Layout) -> CpuKernel:
    backend = CpuBackend()
    return backend.build(program, layout, backend.emit(program, layout))


@dataclass
class Bucket:
    """Tensors of one program and layout, with gradients, states and scalar rows of random numbers."""

    program: Program
    layout: Layout
    params: list[Array]
    grads: list[Array]
    states: list[dict[str, Array]]
    rows: Rows

    def call(self) -> OneStageCall:
        call = kernel_of(self.program, self.layout).bind(self.params, self.states)
        assert isinstance(call, OneStageCall)
        return call

    def buffers(self, tensor: int) -> dict[str, Array]:
        return {"p": self.params[tensor], "g": self.grads[tensor], **self.states[tensor]}

    def expected(self, tensor: int) -> dict[str, Array]:
        """What a step stores in each buffer of a tensor, computed by NumPy in the layout's compute dtype."""
        row = self.rows.table[self.rows.index[tensor]]
        return interpret(self.program, self.layout, self.buffers(tensor), row)

    def results(self, tensor: int) -> dict[str, Array]:
        """A copy of the buffers that a step stores."""
        stored = [s.buffer for s in self.program.stages[0].stores]
        return {name: value.copy() for name, value in self.buffers(tensor).items() if name in stored}


def bucket_of(
    text: str, sizes: Sequence[int], layout: Layout | None = None, dtype: str = "float32", seed: int = 0
) -> Bucket:
    """A bucket of tensors of these sizes, with one row of scalars for every second tensor."""
    program = program_of(text)
    layout = layout or layout_for(program, dtype)
    random = np.random.default_rng(seed)

    def numbers(buffer: str, size: int) -> Array:
        drawn = random.standard_normal(size)
        return (drawn if buffer in "pg" else np.abs(drawn)).astype(NUMPY_DTYPES[layout.dtype(buffer)])

    states = [b.name for b in kernel_buffers(program) if b.role == "state"]
    columns = program.scalars.columns
    table = random.uniform(0.1, 0.9, (2, len(columns)))
    for index, column in enumerate(columns):
        if is_boolean(column.value):
            table[:, index] = (0, 1)
    return Bucket(
        program, layout, [numbers("p", n) for n in sizes], [numbers("g", n) for n in sizes],
        [{s: numbers(s, n) for s in states} for n in sizes], Rows(table, np.arange(len(sizes)) % 2),
    )  # fmt: skip


def interpret(program: Program, layout: Layout, buffers: dict[str, Array], row: Array) -> dict[str, Array]:
    """One step, node by node, each operation rounded to the compute dtype: what a kernel must give bit for bit."""
    compute = np.dtype(layout.compute)
    stores = program.stages[0].stores
    values: dict[Node, Any] = {}
    with np.errstate(all="ignore"):
        for part in walk([s.value for s in stores]):
            if part.op is Op.CONST:
                values[part] = compute.type(part.arg)  # type: ignore[arg-type]
            elif part.op is Op.SCALAR:
                number = row[part.arg]  # type: ignore[index]
                truth = is_boolean(program.scalars.columns[part.arg].value)  # type: ignore[index]
                values[part] = number != 0 if truth else compute.type(number)
            elif part.op is Op.LOAD:
                loaded = buffers[str(part.arg)].astype(compute)
                values[part] = -loaded if layout.maximize and part.arg == "g" else loaded
            else:
                values[part] = operation(part.op, [values[a] for a in part.args], layout.compute)
        return {
            s.buffer: np.broadcast_to(values[s.value], buffers[s.buffer].shape).astype(buffers[s.buffer].dtype)
            for s in stores
        }


def operation(op: Op, operands: list[Any], compute: str) -> Any:
    """One operation of NumPy in the precision of its operands; the cpu backend's where NumPy has ulps of its own."""
    if op not in INEXACT:
        return NUMPY[op](*operands)
    arrays = np.broadcast_arrays(*operands)
    return elementary(INEXACT[op], compute)(*map(np.ascontiguousarray, arrays)).reshape(arrays[0].shape)
