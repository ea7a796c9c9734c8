"""One backend running the stages of one program over some tensors, step by step, beside their definition.

Each stage is judged alone: it is given what lies in the backend's own arrays, and for what the runtime works out
between stages, numbers that are drawn. What may differ is the rounding of one stage, whose bounds are derived in
`bounds`, and errors do not add up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rulec.array.arrays import numpy_dtype
from rulec.backend.protocol import Backend, Kernel, Rows
from rulec.compiler.ir import Program, Result
from rulec.compiler.layout import Layout, is_shaped, kernel_buffers
from rulec.compiler.scalars import evaluate_once, resolve_hyper
from rulec.compiler.view import MatrixView, matrix_view
from rulec.errors import InternalError
from rulec.language.node import is_boolean
from rulec.language.rule import Rule
from rulec.testing.bounds import Bounds, Given, rounded_to
from rulec.testing.interval import Array, Range, point
from rulec.testing.kinds import ArrayKind
from rulec.testing.numerics import EPS, Numerics
from rulec.testing.scalars import ScalarRows
from rulec.testing.totals import exact, reduced

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


@dataclass
class Drawn:
    """What one step is given beside parameters and states, by tensor: gradients, scratch, inputs, vectors, columns."""

    grads: Mapping[int, Array]
    arrays: dict[str, dict[int, Any]] = field(default_factory=dict)
    values: dict[str, dict[int, Array]] = field(default_factory=dict)
    columns: dict[int, Array] = field(default_factory=dict)


@dataclass(frozen=True)
class OnDevice:
    """What a backend that works on the device is given more: the scalar table as an array there.

    Tensors that `stays` names are to be left as they are, and gradients were multiplied by `scale`.
    """

    stays: Sequence[int] | None = None
    scale: float | None = None

    @property
    def inverse(self) -> float:
        """What gradients are multiplied by as they are loaded: the reciprocal, a float32."""
        return 1.0 if self.scale is None else float(np.float32(1 / np.float64(np.float32(self.scale))))


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
        self.views = [matrix_view(shape, rule.view) for shape in self.shapes]
        eps = EPS[layout.dtype("p")]
        facts = [{**view.facts, "machine_eps": eps} for view in self.views]
        resolved = [resolve_hyper(program.hyper, h, eps, rule.name) for h in hyper]
        wide = kernel_buffers(program)
        self.buffers = [b.name for b in wide if b.role in ("param", "state")]
        self.passed = [b.name for b in wide if b.role in ("scratch", "input")]
        self.inputs = [b.name for b in wide if b.role == "input"]
        self.bounds = [Bounds(program, layout.compute, subject.numerics, i) for i in range(len(program.stages))]
        self.scalars = ScalarRows(program, resolved, facts)
        start = [p.astype(numpy_dtype(layout.dtype("p"))) for p in params]
        # Every second array lies off the alignment of its kind: kernels take what they are given.
        self.params = [subject.kind.make(p, i % 2) for i, p in enumerate(start)]
        self.states = [self._initial_states(i, p, resolved[i], facts[i]) for i, p in enumerate(start)]
        #: The reductions of the last step, by stage and name: for each tensor fired its array.
        self.reductions: dict[tuple[int, str], list[Array]] = {}
        #: What the last step was given on the device; None where the table was NumPy's.
        self.on_device: OnDevice | None = None
        #: Whether the numbers of this step are compared with anything.
        self.judged = True
        self.kernel = kernel or subject.kernel(program, layout)
        views = [self.views] if is_shaped(program) else []
        self.call = self.kernel.bind(self.params, self.states, *views)

    def _initial_states(
        self, index: int, param: Array, hyper: Mapping[str, float], facts: Mapping[str, float]
    ) -> dict[str, Any]:
        arrays = {}
        for name in self.buffers:
            buffer = self.program.buffer(name)
            if buffer.role != "state":
                continue
            if buffer.init is None:
                raise InternalError(f"state {name} of {self.name} has no initial value")
            value = evaluate_once(buffer.init, hyper, facts, {"p": param.astype(np.float64)})
            full = np.broadcast_to(np.asarray(value, np.float64), param.shape)
            arrays[name] = self.subject.kind.make(full.astype(numpy_dtype(self.layout.dtype(name))), index % 2)
        return arrays

    def values(self, index: int) -> dict[str, Array]:
        """What one tensor's arrays hold, in the dtypes they store."""
        arrays = {"p": self.params[index], **self.states[index]}
        return {name: self.subject.kind.read(arrays[name]) for name in self.buffers}

    def step(
        self, grads: Mapping[int, Array], skipped: Sequence[int] = (), on_device: OnDevice | None = None,
        judged: bool = True,
    ) -> None:  # fmt: skip
        """One step of the tensors among `grads`, in that order, with those gradients (float64, rounded as stored).

        The last stage leaves out those `skipped`. AssertionError, in one sentence, where anything differs from what
        the language and the protocol say; where not `judged`, numbers may be any.
        """
        self.on_device, self.judged = on_device, judged
        with np.errstate(all="ignore"):
            self._step(grads, skipped)

    def _step(self, grads: Mapping[int, Array], skipped: Sequence[int]) -> None:
        fired = list(grads)
        drawn = self._draw(fired, grads)
        self.reductions = {}
        for index in range(len(self.program.stages)):
            if index and index == len(self.program.stages) - 1:
                fired = [i for i in fired if i not in skipped]
            self._stage(index, fired, drawn)

    # What a step is given

    def _draw(self, fired: Sequence[int], grads: Mapping[int, Array]) -> Drawn:
        dtype = numpy_dtype(self.layout.dtype("g"))
        drawn = Drawn({i: np.asarray(g).astype(dtype) for i, g in grads.items()})
        known = self.scalars.advance(fired)
        for place, i in enumerate(fired):
            # What a tensor is given depends on nothing but its place and its steps, not on which others there are.
            random = np.random.default_rng([i, self.scalars.counts[i]])
            late = [_drawn(random, (), is_boolean(c.value)) for c in self.program.late]
            drawn.columns[i] = np.array([*known[place], *late], np.float64)
            for name in self.passed:
                shape = self.shapes[i]
                values = _drawn(random, shape) if name in self.inputs else np.full(shape, np.nan)
                self._pass(drawn, name, i, values.astype(numpy_dtype(self.layout.dtype(name))))
            for vector in self.program.vectors:
                values = _drawn(random, _extents(vector.axes.letters, self.views[i]), is_boolean(vector.value))
                self._pass(drawn, vector.name, i, values.astype(self.layout.compute))
        return drawn

    def _pass(self, drawn: Drawn, name: str, index: int, values: Array) -> None:
        drawn.arrays.setdefault(name, {})[index] = self.subject.kind.make(values, index % 2)
        drawn.values.setdefault(name, {})[index] = values

    def _rows(self, index: int, fired: Sequence[int], drawn: Drawn) -> Rows:
        """The rows in another order than the tensors, behind one of NaN that belongs to the tensors not fired.

        Late columns are NaN before the stage that names them.
        """
        known = len(self.program.scalars.columns)
        named = {c for stage in self.program.stages[: index + 1] for c in stage.columns}
        hidden = [c for c in range(known, len(self.program.columns)) if c not in named]
        table = np.full((len(fired) + 1, len(self.program.columns)), np.nan)
        rows = np.zeros(len(self.params), np.int64)
        for place, i in enumerate(fired):
            rows[i] = len(fired) - place
            table[rows[i]] = drawn.columns[i]
        table[:, hidden] = np.nan
        if self.on_device is None:
            return Rows(table, rows)
        make = self.subject.kind.make
        return Rows(make(table), rows, self._stays(rows, len(table)), self._scale())

    def _stays(self, rows: Array, count: int) -> Any:
        """Which rows are those of tensors that stay as they are, as an array on the device."""
        assert self.on_device is not None
        if self.on_device.stays is None:
            return None
        found = np.zeros(count, np.bool_)
        found[rows[list(self.on_device.stays)]] = True
        return self.subject.kind.make(found)

    def _scale(self) -> Any:
        """What gradients were multiplied by, as an array on the device."""
        assert self.on_device is not None
        scale = self.on_device.scale
        return None if scale is None else self.subject.kind.make(np.array([scale], np.float32))

    # One stage

    def _stage(self, index: int, fired: Sequence[int], drawn: Drawn) -> None:
        before = [self.values(i) for i in range(len(self.params))]
        given = self._given(index, fired, before, drawn)
        written = self._run(index, fired, drawn)
        after = self._after(index, fired, drawn)
        self._read_reductions(index, fired, written)
        stays = [] if self.on_device is None else list(self.on_device.stays or ())
        if self.judged and not self._is_rounded(index, fired, given, after, stays):
            self._judge(index, fired, given, after, stays)
        stored = {s.buffer for s in self.program.stages[index].stores}
        self._compare_untouched([i for i in fired if i not in stays], stored, before, after)

    def _is_rounded(self, index: int, fired: Sequence[int], given: Given, after: Values, stays: Sequence[int]) -> bool:
        """Whether all is what NumPy gives, each operation rounded to the nearest number, which lies in every bound.

        A sum may be of any order. Where the machine works otherwise, or a function is not exact, the answer is no.
        """
        bounds = self.bounds[index]
        if not bounds.is_rounded:
            return False
        wanted, operands = bounds.rounded(given)
        count = given.loads["g"].shape
        with np.errstate(all="ignore"):
            for name, want in wanted.items():
                stored = np.broadcast_to(want, count).astype(numpy_dtype(self.layout.dtype(name))).astype(np.float64)
                if not np.array_equal(self._got(fired, name, after, stored, stays), stored, equal_nan=True):
                    return False
        spread = {name: point(np.broadcast_to(x, count)) for name, x in operands.items()}
        return all(
            got.shape == allowed.low.shape and _inside(got, allowed).all()
            for *_, got, allowed in self._pieces(index, fired, spread)
        )

    def _judge(self, index: int, fired: Sequence[int], given: Given, after: Values, stays: Sequence[int]) -> None:
        """AssertionError where a number is not one that a machine with these numerics may give."""
        stored, totals = self.bounds[index].ranges(given)
        wanted, operands = self.bounds[index].exact(given)
        for name, r in stored.items():
            ends = np.broadcast_arrays(r.low, r.high, r.nan, given.loads["g"])[:3]
            want = np.broadcast_to(wanted[name], ends[0].shape)
            self._compare(fired, name, after, rounded_to(Range(*ends), self.layout.dtype(name)), want, stays)
        self._compare_reductions(index, fired, totals, operands)

    def _given(self, index: int, fired: Sequence[int], before: Values, drawn: Drawn) -> Given:
        sign = -1.0 if self.layout.maximize else 1.0
        loads = {name: _flat([before[i][name] for i in fired]) for name in self.buffers}
        loads |= {name: _flat([drawn.values[name][i] for i in fired]) for name in self.passed}
        factor = 1.0 if self.on_device is None else self.on_device.inverse
        loads["g"] = sign * factor * _flat([drawn.grads[i] for i in fired])
        vectors = {
            name: _flat([_spread(drawn.values[name][i], self.views[i]) for i in fired])
            for name in self.program.stages[index].reads
        }
        sizes = [drawn.grads[i].size for i in fired]
        columns = np.repeat(np.array([drawn.columns[i] for i in fired]), sizes, axis=0)
        return Given(loads, columns.reshape(sum(sizes), len(self.program.columns)), vectors)

    def _run(self, index: int, fired: Sequence[int], drawn: Drawn) -> Mapping[str, Any]:
        """Calls the stage; gives its reductions."""
        kind = self.subject.kind
        stage = self.program.stages[index]
        moving = [kind.make(drawn.grads[i], i % 2) for i in fired]
        tensors = None if list(fired) == list(range(len(self.params))) else fired
        scratch = {name: [drawn.arrays[name][i] for i in fired] for name in [*self.passed, *stage.reads]}
        try:
            written = self.call(index, moving, self._rows(index, fired, drawn), scratch, tensors=tensors)
        except Exception as error:
            raise AssertionError(f"{self.title()} a step raises {type(error).__name__}: {error}") from error
        params, states, *rest = written
        if kind.mutable:
            if any(kind.read(m).tobytes() != drawn.grads[i].tobytes() for m, i in zip(moving, fired, strict=True)):
                raise AssertionError(f"{self.title()} writes into a gradient, which a step only reads")
            if [*map(id, params)] != [*map(id, self.params)]:
                raise AssertionError(f"{self.title()} returns other arrays than the mutable ones it was bound to")
        self.params, self.states = list(params), [dict(s) for s in states]
        if not kind.mutable:
            for name in self.passed:
                drawn.arrays[name].update(zip(fired, scratch[name], strict=True))
        found: Mapping[str, Any] = rest[0] if rest else {}
        names = [r.name for r in stage.reduces]
        if sorted(found) != sorted(names):
            raise AssertionError(f"{self.title()} stage {index} returns the reductions {sorted(found)}, not {names}")
        return found

    def _after(self, index: int, fired: Sequence[int], drawn: Drawn) -> list[dict[str, Array]]:
        """The values of all tensors after a stage, what was passed to it included; that is only stored where due."""
        after = [self.values(i) for i in range(len(self.params))]
        stored = {s.buffer for s in self.program.stages[index].stores}
        for name, arrays in drawn.arrays.items():
            for i in fired:
                value = self.subject.kind.read(arrays[i])
                if name not in stored and value.tobytes() != drawn.values[name][i].tobytes():
                    raise AssertionError(f"{self.title()} stage {index} writes into {name}, which it only reads")
                drawn.values[name][i] = after[i][name] = value
        return after

    # What is compared

    def title(self) -> str:
        """The backend, rule and dtype that a message begins with."""
        dtypes = {d for _, d in self.layout.dtypes}
        layout = dtypes.pop() if len(dtypes) == 1 else self.layout.text()
        return f"backend {self.subject.backend.name!r}, {self.name} in {layout}:"

    def _compare(
        self, fired: Sequence[int], name: str, after: Values, allowed: Range, want: Array, stays: Sequence[int]
    ) -> None:
        stored = want.astype(numpy_dtype(self.layout.dtype(name))).astype(np.float64)
        self._check_bounds(name, stored, allowed)
        sizes = self._sizes(fired)
        got = self._got(fired, name, after, stored, stays)
        if _inside(got, allowed).all():
            return
        at = _farthest(got, stored, allowed)
        ends = np.cumsum(sizes)
        place = int(np.searchsorted(ends, at, side="right"))
        element = at - (int(ends[place - 1]) if place else 0)
        self._fail(fired[place], f"element {element} of {name}", got, stored, allowed, at)

    def _sizes(self, fired: Sequence[int]) -> list[int]:
        return [int(np.prod(self.shapes[i])) for i in fired]

    def _got(self, fired: Sequence[int], name: str, after: Values, stored: Array, stays: Sequence[int]) -> Array:
        """What a buffer holds after a stage; of tensors that stay, which are compared with what they were, `stored`."""
        got = _flat([after[i][name] for i in fired])
        return np.where(np.repeat([i in stays for i in fired], self._sizes(fired)), stored, got)

    def _read_reductions(self, index: int, fired: Sequence[int], found: Mapping[str, Any]) -> None:
        for reduction in self.program.stages[index].reduces:
            name, level = reduction.name, str(reduction.value.arg)
            self.reductions[index, name] = self._read(name, found[name], len(fired), level)

    def _pieces(
        self, index: int, fired: Sequence[int], operands: Mapping[str, Range]
    ) -> Iterator[tuple[Result, int, slice, Array, Range]]:
        """Each reduction of each tensor: the tensor, where its elements lie, what was found and what it may be."""
        ends = np.cumsum([0, *self._sizes(fired)])
        for reduction in self.program.stages[index].reduces:
            op, level, r = reduction.value.op, str(reduction.value.arg), operands[reduction.name]
            for place, i in enumerate(fired):
                piece = slice(ends[place], ends[place + 1])
                allowed = reduced(op, level, Range(r.low[piece], r.high[piece], r.nan[piece]), self.views[i])
                yield reduction, i, piece, self.reductions[index, reduction.name][place], allowed

    def _compare_reductions(
        self, index: int, fired: Sequence[int], operands: Mapping[str, Range], wanted: Mapping[str, Array]
    ) -> None:
        for reduction, i, piece, got, allowed in self._pieces(index, fired, operands):
            level = str(reduction.value.arg)
            want = exact(reduction.value.op, level, wanted[reduction.name][piece], self.views[i])
            self._compare_reduction(i, reduction.name, level, got, allowed, want)

    def _read(self, name: str, found: Any, count: int, level: str) -> list[Array]:
        """A reduction as float64 arrays, one for each tensor fired."""
        arrays = [x if isinstance(x, np.ndarray | np.generic) else self.subject.kind.read(x) for x in found]
        if len(arrays) != count or any(np.asarray(x).dtype != np.float64 for x in arrays):
            raise AssertionError(f"{self.title()} the reduction {name} is not one of float64 for each tensor")
        return [np.asarray(x) if level != "tensor" else np.asarray(x).reshape(1, 1, 1) for x in arrays]

    def _compare_reduction(self, tensor: int, name: str, level: str, got: Array, allowed: Range, want: Array) -> None:
        if got.shape != want.shape:
            fault = f"the reduction {name} of a tensor of shape {self.shapes[tensor]} has shape {got.shape}"
            raise AssertionError(f"{self.title()} {fault}, not {want.shape}")
        flat = _flattened(allowed)
        got, want = got.reshape(-1), want.reshape(-1)
        self._check_bounds(name, want, flat)
        if not _inside(got, flat).all():
            at = _farthest(got, want, flat)
            what = name if level == "tensor" else f"{level} {at} of {name}"
            self._fail(tensor, what, got, want, flat, at)

    def _check_bounds(self, name: str, want: Array, allowed: Range) -> None:
        if not _inside(want, allowed).all():
            at = int(np.flatnonzero(~_inside(want, allowed))[0])
            raise InternalError(
                f"the bounds of {name} of {self.name} ({allowed.low[at]!r} to {allowed.high[at]!r}) "
                f"leave out the reference's own value {want[at]!r}"
            )

    def _fail(self, tensor: int, what: str, got: Array, want: Array, allowed: Range, at: int) -> None:
        limits = "only NaN" if allowed.surely_nan[at] else f"{allowed.low[at]:.9g} to {allowed.high[at]:.9g}"
        distance = np.abs(got[at] - want[at])
        raise AssertionError(
            f"{self.title()} in a tensor of shape {self.shapes[tensor]}, at its step {self.scalars.counts[tensor]}, "
            f"{what} became {got[at]:.9g} where the reference has {want[at]:.9g} "
            f"(largest difference {np.inf if np.isnan(distance) else distance:.3g}; allowed is {limits})"
        )

    def _compare_untouched(self, fired: Sequence[int], stored: set[str], before: Values, after: Values) -> None:
        for i in range(len(self.params)):
            for name in self.buffers:
                value, old = after[i][name], before[i][name]
                if (i in fired and name in stored) or value.tobytes() == old.tobytes():
                    continue
                change = np.max(np.abs(value.astype(np.float64) - old.astype(np.float64)))
                left_out = "stays or was not among `tensors`"
                reason = "is not stored by this stage" if i in fired else left_out
                owner = "" if i in fired else f"a tensor of shape {self.shapes[i]} {left_out}, yet its "
                raise AssertionError(
                    f"{self.title()} {owner}{name} {'' if owner else reason + ', yet it '}changed "
                    f"(largest difference {change:.3g})"
                )


def _flat(arrays: Sequence[Array]) -> Array:
    return np.concatenate([np.asarray(a).astype(np.float64).reshape(-1) for a in arrays])


def _drawn(random: np.random.Generator, shape: tuple[int, ...], truth: bool = False) -> Array:
    """Numbers of ordinary size, or truth as 0 and 1."""
    if truth:
        return np.asarray(random.random(shape) < 0.5, np.float64)
    return np.asarray(random.uniform(0.25, 2, shape) * np.where(random.random(shape) < 0.25, -1.0, 1.0))


def _extents(letters: str, view: MatrixView) -> tuple[int, ...]:
    """The shape of a vector: the parameter's where it has all axes, else `(batch, rows, cols)` with 1 for others."""
    if {"b", "i", "j"} <= set(letters):
        return view.shape
    sizes = {"b": view.batch, "i": view.rows, "j": view.cols}
    return tuple(sizes[c] if c in letters else 1 for c in "bij")


def _spread(vector: Array, view: MatrixView) -> Array:
    """A vector's value for each element of the parameter."""
    if vector.shape == view.shape:
        return vector
    return view.tensor(np.broadcast_to(vector, (view.batch, view.rows, view.cols)))


def _farthest(got: Array, want: Array, allowed: Range) -> int:
    distance = np.where(_inside(got, allowed), 0.0, np.abs(got - want))
    distance[np.isnan(distance)] = np.inf
    return int(np.argmax(distance))


def _flattened(r: Range) -> Range:
    return Range(r.low.reshape(-1), r.high.reshape(-1), r.nan.reshape(-1))


def _inside(x: Array, allowed: Range) -> Array:
    return np.where(np.isnan(x), allowed.nan, (allowed.low <= x) & (x <= allowed.high))
