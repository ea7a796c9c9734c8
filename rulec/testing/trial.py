"""One backend running one rule over some tensors, step by step, beside the reference.

Before every step the reference takes over what the backend has stored, so that each step is judged alone: what may
differ is the rounding of one step, whose bounds are derived in `bounds`, and errors do not add up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rulec.array.arrays import numpy_dtype
from rulec.backend.layout import Layout, kernel_buffers
from rulec.backend.protocol import Backend, Kernel, Rows
from rulec.compiler.ir import Program
from rulec.compiler.reference import Run, Tensor, arithmetic
from rulec.compiler.scalars import ScalarTable, evaluate_once, resolve_hyper
from rulec.compiler.view import matrix_view
from rulec.errors import InternalError
from rulec.language.rule import Rule
from rulec.testing.bounds import Bounds, rounded_to
from rulec.testing.interval import Array, Range
from rulec.testing.kinds import ArrayKind
from rulec.testing.numerics import EPS, Numerics

#: What the buffers of each tensor hold.
Values = Sequence[Mapping[str, Array]] | Mapping[int, Mapping[str, Array]]


@dataclass(frozen=True)
class Subject:
    """What is being tested: a backend, the arrays it is given, and how exact its machine is said to be."""

    backend: Backend
    kind: ArrayKind
    numerics: Numerics

    def kernel(self, program: Program, layout: Layout) -> Kernel:
        """The kernel of a program, as the runtime would get it."""
        return self.backend.build(program, layout, self.backend.emit(program, layout))


class Trial:
    """Tensors of one bucket under a backend, each with hyper-parameters of its own."""

    def __init__(
        self, subject: Subject, rule: Rule, program: Program, layout: Layout, params: Sequence[Array],
        hyper: Sequence[Mapping[str, float]], kernel: Kernel | None = None,
    ) -> None:  # fmt: skip
        """`params` are in float64 and become the nearest numbers of their dtype; `hyper` has one dict for each."""
        self.subject, self.program, self.layout = subject, program, layout
        self.name = rule.name
        self.shapes = [p.shape for p in params]
        self.eps = EPS[layout.dtype("p")]
        self.hyper = [resolve_hyper(program.hyper, h, self.eps, rule.name) for h in hyper]
        self.buffers = [b.name for b in kernel_buffers(program) if b.role != "grad"]
        self.bounds = Bounds(program, layout.compute, subject.numerics)
        self.table = ScalarTable(program.scalars)
        start = [p.astype(numpy_dtype(layout.dtype("p"))) for p in params]
        self.tensors = [
            Tensor(matrix_view(p.shape, rule.view), p.astype(np.float64), i, i, self.eps) for i, p in enumerate(start)
        ]
        #: The states of groups (each tensor is one) and of the model, as the reference keeps them.
        self.shared: dict[tuple[str, int | None], Array] = {}
        # Every second array lies off the alignment of its kind: kernels take what they are given.
        self.params = [subject.kind.make(p, i % 2) for i, p in enumerate(start)]
        self.states = [self._initial_states(t) for t in self.tensors]
        self.kernel = kernel or subject.kernel(program, layout)
        self.call = self.kernel.bind(self.params, self.states)

    def _facts(self, tensor: Tensor) -> dict[str, float]:
        return {**tensor.view.facts, "machine_eps": self.eps}

    def _initial_states(self, tensor: Tensor) -> dict[str, Any]:
        """The arrays of a tensor's elementwise states; others go to where the reference keeps them."""
        arrays = {}
        for buffer in self.program.states:
            if buffer.init is None:
                raise InternalError(f"state {buffer.name} of {self.name} has no initial value")
            value = evaluate_once(buffer.init, self.hyper[tensor.index], self._facts(tensor), {"p": tensor.value})
            letters = buffer.axes.letters
            if buffer.name in self.buffers:
                full = np.broadcast_to(np.asarray(value, np.float64), tensor.value.shape)
                rounded = full.astype(numpy_dtype(self.layout.dtype(buffer.name)))
                arrays[buffer.name] = self.subject.kind.make(rounded, tensor.index % 2)
            elif "n" in letters:
                tensor.states[buffer.name] = np.full((1, 1, 1), value)
            else:
                self.shared.setdefault((buffer.name, tensor.group if "k" in letters else None), np.asarray(value))
        return arrays

    def arrays(self, index: int) -> dict[str, Any]:
        """The arrays of one tensor, by buffer."""
        return {"p": self.params[index], **self.states[index]}

    def values(self, index: int) -> dict[str, Array]:
        """What one tensor's arrays hold, in the dtypes they store."""
        return {name: self.subject.kind.read(self.arrays(index)[name]) for name in self.buffers}

    def step(self, grads: Mapping[int, Array]) -> None:
        """One step of the tensors among `grads`, in that order, with those gradients (float64, rounded as stored).

        AssertionError, in one sentence, where anything differs from what the reference and the protocol say.
        """
        with np.errstate(all="ignore"):
            self._step(grads)

    def _step(self, grads: Mapping[int, Array]) -> None:
        before = [self.values(i) for i in range(len(self.params))]
        fired = list(grads)
        dtype = numpy_dtype(self.layout.dtype("g"))
        given = {i: np.asarray(g).astype(dtype) for i, g in grads.items()}
        for i in fired:
            self.tensors[i].t += 1
        columns = self._columns(fired)
        ranges = self._ranges(fired, before, given, columns)
        wanted = self._reference_step(fired, before, given)
        self._run(fired, given, columns)
        self._compare(fired, ranges, wanted)
        self._compare_untouched(set(range(len(self.params))) - set(fired), before)

    def _columns(self, fired: Sequence[int]) -> Array:
        """Each fired tensor's row of the scalar table."""
        columns = np.empty((len(fired), len(self.program.scalars.columns)))
        for place, i in enumerate(fired):
            tensor = self.tensors[i]
            states = {k: float(v[0, 0, 0]) for k, v in tensor.states.items() if k not in self.buffers}
            states |= {k: float(v) for (k, key), v in self.shared.items() if key in (None, tensor.group)}
            levels = {"group": tensor.t, "model": max(self.tensors[j].t for j in fired)}
            columns[place] = self.table.evaluate((), self.hyper[i], tensor.t, self._facts(tensor), states, levels)[0]
        return columns

    def _rows(self, fired: Sequence[int], columns: Array) -> Rows:
        """The rows in another order than the tensors, behind one of NaN that belongs to the tensors not fired."""
        table = np.full((len(fired) + 1, columns.shape[1]), np.nan)
        index = np.zeros(len(self.params), np.int64)
        for place, i in enumerate(fired):
            index[i] = len(fired) - place
            table[index[i]] = columns[place]
        return Rows(table, index)

    @staticmethod
    def _flat(fired: Sequence[int], arrays: Values, name: str) -> Array:
        return np.concatenate([arrays[i][name].astype(np.float64).reshape(-1) for i in fired])

    def _ranges(
        self, fired: Sequence[int], before: Values, grads: Mapping[int, Array], columns: Array
    ) -> dict[str, Range]:
        sign = -1.0 if self.layout.maximize else 1.0
        loads = {name: self._flat(fired, before, name) for name in self.buffers}
        loads["g"] = sign * np.concatenate([grads[i].astype(np.float64).reshape(-1) for i in fired])
        rows = np.repeat(columns, [grads[i].size for i in fired], axis=0)
        found = {}
        for name, r in self.bounds.stored(loads, rows).items():
            ends = np.broadcast_arrays(r.low, r.high, r.nan, loads["g"])[:3]
            found[name] = rounded_to(Range(*ends), self.layout.dtype(name))
        return found

    def _reference_step(self, fired: Sequence[int], before: Values, grads: Mapping[int, Array]) -> dict[str, Array]:
        sign = -1.0 if self.layout.maximize else 1.0
        tensors = [self.tensors[i] for i in fired]
        for tensor in tensors:
            for name in self.buffers:
                value = tensor.view.matrices(before[tensor.index][name].astype(np.float64))
                if name == "p":
                    tensor.value = value
                else:
                    tensor.states[name] = value
        gradients = {i: self.tensors[i].view.matrices(sign * grads[i].astype(np.float64)) for i in fired}
        Run(self.program, tensors, self.hyper, arithmetic("float64"), self.shared, gradients).execute()
        after = {t.index: {**t.states, "p": t.value} for t in tensors}
        return {name: self._flat(fired, after, name) for name in self.buffers}

    def _run(self, fired: Sequence[int], grads: Mapping[int, Array], columns: Array) -> None:
        kind = self.subject.kind
        moving = [kind.make(grads[i], i % 2) for i in fired]
        everything = fired == list(range(len(self.params)))
        try:
            written = self.call(0, moving, self._rows(fired, columns), None, tensors=None if everything else fired)
        except Exception as error:
            raise AssertionError(f"{self.title()} a step raises {type(error).__name__}: {error}") from error
        params, states, _ = written
        if kind.mutable:
            if any(kind.read(m).tobytes() != grads[i].tobytes() for m, i in zip(moving, fired, strict=True)):
                raise AssertionError(f"{self.title()} writes into a gradient, which a step only reads")
            if [*map(id, params)] != [*map(id, self.params)]:
                raise AssertionError(f"{self.title()} returns other arrays than the mutable ones it was bound to")
        self.params, self.states = list(params), [dict(s) for s in states]

    def title(self) -> str:
        """The backend, rule and dtype that a message begins with."""
        dtypes = {d for _, d in self.layout.dtypes}
        layout = dtypes.pop() if len(dtypes) == 1 else self.layout.text()
        return f"backend {self.subject.backend.name!r}, {self.name} in {layout}:"

    def _compare(self, fired: Sequence[int], ranges: Mapping[str, Range], wanted: Mapping[str, Array]) -> None:
        after = [self.values(i) for i in range(len(self.params))]
        for name in self.buffers:
            if name not in ranges:
                continue
            got, want, allowed = self._flat(fired, after, name), wanted[name], ranges[name]
            stored = want.astype(numpy_dtype(self.layout.dtype(name))).astype(np.float64)
            if not _inside(stored, allowed).all():
                at = int(np.flatnonzero(~_inside(stored, allowed))[0])
                raise InternalError(
                    f"the bounds of {name} of {self.name} ({allowed.low[at]!r} to {allowed.high[at]!r}) "
                    f"leave out the reference's own value {stored[at]!r}"
                )
            if not _inside(got, allowed).all():
                raise AssertionError(self._difference(fired, name, got, stored, allowed))

    def _difference(self, fired: Sequence[int], name: str, got: Array, want: Array, allowed: Range) -> str:
        distance = np.where(_inside(got, allowed), 0.0, np.abs(got - want))
        distance[np.isnan(distance)] = np.inf
        at = int(np.argmax(distance))
        ends = np.cumsum([int(np.prod(self.shapes[i])) for i in fired])
        place = int(np.searchsorted(ends, at, side="right"))
        index = fired[place]
        element = at - (int(ends[place - 1]) if place else 0)
        limits = "only NaN" if allowed.surely_nan[at] else f"{allowed.low[at]:.9g} to {allowed.high[at]:.9g}"
        return (
            f"{self.title()} in a tensor of shape {self.shapes[index]}, at its step {self.tensors[index].t}, "
            f"element {element} of {name} became {got[at]:.9g} where the reference has {want[at]:.9g} "
            f"(largest difference {distance[at]:.3g}; allowed is {limits})"
        )

    def _compare_untouched(self, rest: set[int], before: Values) -> None:
        for i in sorted(rest):
            for name, value in self.values(i).items():
                if value.tobytes() != before[i][name].tobytes():
                    change = np.max(np.abs(value.astype(np.float64) - before[i][name].astype(np.float64)))
                    raise AssertionError(
                        f"{self.title()} a tensor of shape {self.shapes[i]} was not among `tensors`, yet its {name} "
                        f"changed (largest difference {change:.3g})"
                    )


def _inside(x: Array, allowed: Range) -> Array:
    return np.where(np.isnan(x), allowed.nan, (allowed.low <= x) & (x <= allowed.high))
