"""Programs of several stages, one stage at a time on random numbers, and what NumPy makes of the same stage.

Whatever is worked out between stages is drawn at random here: a stage is right or wrong by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import rulec
from rulec.backend.protocol import Rows, Written
from rulec.compiler.ir import Program, Result, Stage
from rulec.compiler.layout import Layout, kernel_buffers, layout_for
from rulec.compiler.view import MatrixView, matrix_view
from rulec.language.expr.node import Node, Op, is_boolean, walk
from rulec_backends.cpu import CpuBackend, CpuKernel
from tests.backends.cpu_functions import Array
from tests.backends.cpu_programs import operation

_UFUNC: Mapping[Op, np.ufunc] = {Op.SUM: np.add, Op.MIN: np.minimum, Op.MAX: np.maximum}
NOTHING = {Op.SUM: 0.0, Op.MIN: np.inf, Op.MAX: -np.inf}
_AXES = {"row": (2,), "col": (1,), "tensor": (0, 1, 2)}


def program_of(step: str, *, states: str = "", view: str = "", inputs: str = "") -> Program:
    """The program of a step, with hyper-parameters `lr` and `a`."""
    lines = "\n".join(f"  {line}" for line in step.splitlines())
    more = (f"view: {view}\n" if view else "") + (f"inputs: {inputs}\n" if inputs else "")
    text = f"name: Tested\nsummary: A rule of a test.\nhyper: {{lr: 0.1, a: 0.7}}\nstate: {{{states}}}\n{more}"
    return rulec.compile(rulec.parse(f"{text}step: |\n{lines}\n"))


def widened(array: Array, storage: str) -> Array:
    """Stored numbers as numbers: bfloat16 is NumPy's uint16 here."""
    return (array.astype(np.uint32) << 16).view(np.float32) if storage == "bfloat16" else array


def narrowed(numbers: Array, storage: str) -> Array:
    """Numbers as they are stored, rounded to nearest, halves to even."""
    if storage != "bfloat16":
        with np.errstate(over="ignore"):
            return numbers.astype(storage)
    # Rounded once from float64, to the seven fraction bits that are left; what follows is exact.
    bits = np.asarray(numbers, np.float64).view(np.uint64)
    kept = (bits + np.uint64(2**44 - 1) + ((bits >> np.uint64(45)) & np.uint64(1))) >> np.uint64(45) << np.uint64(45)
    with np.errstate(over="ignore"):
        return np.asarray(kept.view(np.float64).astype(np.float32).view(np.uint32) >> 16, np.uint16)


@dataclass
class StagedBucket:
    """Tensors of one program and layout with random numbers in all that its stages read.

    `scratch` has every name that a call may need: scratch buffers, inputs and vectors.
    """

    program: Program
    layout: Layout
    views: list[MatrixView]
    buffers: list[dict[str, Array]]
    scratch: dict[str, list[Array]]
    rows: Rows
    bound: Any = field(default=None)

    def call(self, stage: int, tensors: Sequence[int] | None = None) -> Written:
        """Runs a stage, with all arguments as the runtime gives them."""
        if self.bound is None:
            self.bind()
        fired = range(len(self.views)) if tensors is None else tensors
        grads = [self.buffers[i]["g"] for i in fired]
        scratch = {name: [arrays[i] for i in fired] for name, arrays in self.scratch.items()}
        written: Written = self.bound(stage, grads, self.rows, scratch, tensors=tensors)
        return written

    def raw(self, stage: int) -> Written:
        """Runs a stage with whatever `scratch` has."""
        written: Written = self.bound(stage, [b["g"] for b in self.buffers], self.rows, self.scratch)
        return written

    def bind(self, kernel: CpuKernel | None = None) -> None:
        """Binds the program's kernel, or another of the same buffers."""
        backend = CpuBackend()
        kernel = kernel or backend.build(self.program, self.layout, backend.emit(self.program, self.layout))
        states = [b.name for b in kernel_buffers(self.program) if b.role == "state"]
        params = [b["p"] for b in self.buffers]
        self.bound = kernel.bind(params, [{s: b[s] for s in states} for b in self.buffers], self.views)

    def only(self, tensor: int) -> StagedBucket:
        """A bucket of this tensor alone."""
        scratch = {name: [arrays[tensor]] for name, arrays in self.scratch.items()}
        rows = Rows(self.rows.table, self.rows.index[tensor : tensor + 1].copy())
        return StagedBucket(self.program, self.layout, [self.views[tensor]], [self.buffers[tensor]], scratch, rows)

    def expected(self, stage: int, tensor: int) -> tuple[dict[str, Array], dict[str, tuple[Array, Array]]]:
        """What a stage stores in each buffer, and each of its reductions in float64 with the sum of magnitudes."""
        work = self.program.stages[stage]
        values = self._values(work, tensor)
        stores = {}
        for s in work.stores:
            shaped = np.broadcast_to(values[s.value], self._shape(tensor))
            stores[s.buffer] = narrowed(self.views[tensor].tensor(shaped), self.layout.dtype(s.buffer))
        return stores, {r.name: self._reduced(r, values, tensor) for r in work.reduces}

    def _reduced(self, reduction: Result, values: Mapping[Node, Any], tensor: int) -> tuple[Array, Array]:
        op, level = reduction.value.op, str(reduction.value.arg)
        numbers = np.broadcast_to(values[reduction.value.args[0]], self._shape(tensor)).astype(np.float64)
        axes, keep = _AXES[level], level != "tensor"
        with np.errstate(all="ignore"):
            found = _UFUNC[op].reduce(numbers, axis=axes, keepdims=keep, initial=NOTHING[op])
            return found, np.sum(np.abs(numbers), axis=axes, keepdims=keep)

    def _shape(self, tensor: int) -> tuple[int, int, int]:
        view = self.views[tensor]
        return view.batch, view.rows, view.cols

    def _values(self, stage: Stage, tensor: int) -> dict[Node, Any]:
        """Every value of a stage as `batch x rows x cols`, each operation rounded to the compute dtype."""
        compute = np.dtype(self.layout.compute)
        row = self.rows.table[self.rows.index[tensor]]
        values: dict[Node, Any] = {}
        with np.errstate(all="ignore"):
            for part in walk(stage.roots):
                if part.op is Op.CONST:
                    values[part] = compute.type(part.arg)  # type: ignore[arg-type]
                elif part.op is Op.SCALAR:
                    truth = is_boolean(self.program.columns[part.arg].value)  # type: ignore[index]
                    number = row[part.arg]  # type: ignore[index]
                    values[part] = number != 0 if truth else compute.type(number)
                elif part.op is Op.LOAD:
                    values[part] = self._loaded(str(part.arg), tensor)
                elif part.op is Op.RESULT:
                    values[part] = self._vector(str(part.arg), tensor)
                else:
                    values[part] = operation(part.op, [values[a] for a in part.args], self.layout.compute)
        return values

    def _loaded(self, name: str, tensor: int) -> Array:
        held = self.scratch[name] if name in self.scratch else [b[name] for b in self.buffers]
        stored = widened(held[tensor], self.layout.dtype(name))
        numbers = self.views[tensor].matrices(stored.astype(self.layout.compute))
        return -numbers if self.layout.maximize and name == "g" else numbers

    def _vector(self, name: str, tensor: int) -> Array:
        batch, rows, cols = self._shape(tensor)
        result = self.program.result(name)
        letters, array = result.axes.letters, self.scratch[name][tensor]
        if {"i", "j"} <= set(letters):
            return self.views[tensor].matrices(array)
        shaped = array.reshape(batch, rows if "i" in letters else 1, cols if "j" in letters else 1)
        return shaped != 0 if is_boolean(result.value) else shaped

    def check(self, stage: int, tensors: Sequence[int] | None = None) -> Written:
        """Runs a stage; stores must be NumPy's bit for bit, minima and maxima too, sums within float64's rounding."""
        before = [{n: a.copy() for n, a in self.writable(i).items()} for i in range(len(self.views))]
        wanted = [self.expected(stage, i) for i in range(len(self.views))]
        written = self.call(stage, tensors)
        fired = list(range(len(self.views))) if tensors is None else list(tensors)
        for tensor in range(len(self.views)):
            stored = wanted[tensor][0] if tensor in fired else {}
            for name, got in self.writable(tensor).items():
                assert np.array_equal(got, stored.get(name, before[tensor][name]), equal_nan=got.dtype.kind == "f"), (
                    self.program.name, stage, tensor, name,
                )  # fmt: skip
        assert set(written.reduced) == {r.name for r in self.program.stages[stage].reduces}
        for reduction in self.program.stages[stage].reduces:
            for place, tensor in enumerate(fired):
                self._check_reduced(reduction, written.reduced[reduction.name][place], wanted[tensor][1])
        return written

    def writable(self, tensor: int) -> dict[str, Array]:
        """All that a stage may write of a tensor, by name."""
        scratch = [b.name for b in self.program.buffers if b.role == "scratch"]
        return {**self.buffers[tensor], **{name: self.scratch[name][tensor] for name in scratch}}

    def _check_reduced(self, reduction: Result, got: Any, wanted: Mapping[str, tuple[Array, Array]]) -> None:
        exact, size = wanted[reduction.name]
        assert np.shape(got) == np.shape(exact), reduction.name
        assert np.asarray(got).dtype == np.float64
        if reduction.value.op is Op.SUM and np.isfinite(size).all():
            # A chunk's sum takes up to 32768 roundings, were it made one by one; in float32 it would be far outside.
            assert (np.abs(got - exact) <= 32768 * 2.0**-53 * size).all(), (reduction.name, got, exact)
        else:
            assert np.array_equal(got, exact, equal_nan=True), (reduction.name, got, exact)


def bucket_of(
    program: Program, shapes: Sequence[tuple[int, ...]], layout: Layout | None = None, dtype: str = "float32",
    seed: int = 0, transposed: bool = False,
) -> StagedBucket:  # fmt: skip
    """A bucket of tensors of these shapes, with a row of scalars for every second tensor."""
    layout = layout or layout_for(program, dtype, transposed=transposed)
    random = np.random.default_rng(seed)
    views = [matrix_view(shape, program.rule.view) for shape in shapes]
    assert all(v.transposed == layout.transposed for v in views)

    def numbers(shape: tuple[int, ...] | int, storage: str, positive: bool) -> Array:
        drawn = random.standard_normal(shape)
        return narrowed(np.asarray(np.abs(drawn) + 0.01 if positive else drawn, np.float32), storage)

    held = [b for b in kernel_buffers(program) if b.role in ("param", "grad", "state")]
    given = [b for b in kernel_buffers(program) if b.role in ("scratch", "input")]
    buffers = [{b.name: numbers(v.shape, layout.dtype(b.name), b.role == "state") for b in held} for v in views]
    scratch = {b.name: [numbers(v.shape, layout.dtype(b.name), False) for v in views] for b in given}
    for result in program.vectors:
        scratch[result.name] = [_vector_of(result, v, layout, random) for v in views]
    table = random.uniform(0.1, 0.9, (2, len(program.columns)))
    for index, column in enumerate(program.columns):
        if is_boolean(column.value):
            table[:, index] = (0, 1)
    return StagedBucket(program, layout, views, buffers, scratch, Rows(table, np.arange(len(shapes)) % 2))


def _vector_of(result: Result, view: MatrixView, layout: Layout, random: np.random.Generator) -> Array:
    """Random numbers for a vector, in the shape that the rule sees, or the parameter's where it has all axes."""
    letters = set(result.axes.letters)
    if {"i", "j"} <= letters:
        return random.standard_normal(view.shape).astype(layout.compute)
    shape = (view.batch, view.rows if "i" in letters else 1, view.cols if "j" in letters else 1)
    if is_boolean(result.value):
        return random.integers(0, 2, shape).astype(layout.compute)
    return random.uniform(0.1, 2, shape).astype(layout.compute)
