"""One step of a rule on MLX's arrays as a pure function: new parameters and states out of old ones.

The loop is that of `rulec.runtime`: for each leaf its stages, and between them what is narrower than a parameter, in
float64 on the CPU's stream, which every machine has. Nothing is computed here: MLX is lazy, and `mx.compile` sees all.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from rulec.backend import registry
from rulec.compiler.layout import layout_for, scheduled
from rulec.compiler.lower import check_counts
from rulec.compiler.pipeline import compile
from rulec.compiler.scalars import ScalarTable, evaluate_once
from rulec.compiler.view import matrix_view
from rulec.errors import BackendUnsupported, RuleError
from rulec.language.node import Node, Op, walk
from rulec.language.rule import Rule
from rulec.mlx.arrays import LIBRARY, number
from rulec.runtime.between import Between
from rulec.runtime.device import known_number
from rulec.runtime.engine import EPS
from rulec.runtime.joins import Join, Joining, Processes, joined
from rulec.runtime.plan import Gap, Plan
from rulec.runtime.state import state_specs


def dtype_name(array: Any) -> str:
    """The dtype of an array by our names."""
    return str(array.dtype).rpartition(".")[2]


def evaluated(roots: Sequence[Node], leaf: Any) -> dict[Node, Any]:
    """The values of expressions and of all their parts."""
    values: dict[Node, Any] = {}
    for part in walk(roots):
        values[part] = leaf(part) if not part.args else LIBRARY.arithmetic[part.op](*(values[a] for a in part.args))
    return values


class LeafPlan:
    """What follows from a rule and a leaf's shape and dtypes: its program, kernel and states."""

    def __init__(
        self, rule: Rule, shape: tuple[int, ...], dtypes: tuple[str, str], states: Mapping[str, str],
        static: Mapping[str, float],
    ) -> None:  # fmt: skip
        self.view = matrix_view(shape, rule.view)
        self.facts = {**self.view.facts, "machine_eps": EPS[dtypes[0]]}
        self.static = {name: static[name] for name, hyper in rule.hyper.items() if hyper.static}
        program = check_counts(compile(rule, self.facts, self.static), {**self.facts, **self.static})
        if program.skip is not None:
            raise BackendUnsupported("mlx", "steps that are skipped", rule.name)
        stored = {b.name: states.get(b.name, dtypes[0]) for b in program.states}
        self.program, self.layout = scheduled(program, layout_for(program, *dtypes, stored))
        backend = registry.usable("mlx")
        self.kernel: Any = backend.build(self.program, self.layout, backend.emit(self.program, self.layout))
        self.plan, self.table = Plan(self.program), ScalarTable(self.program.scalars)
        self.specs = state_specs(self.program, self.layout)
        #: The states that are numbers, each with whether it is one of all leaves.
        arrays = {spec.name for spec in self.specs}
        self.numbers = {b.name: "n" not in b.axes.letters for b in self.program.states if b.name not in arrays}

    def first(self, param: Any, hyper: Mapping[str, Any]) -> dict[str, Any]:
        """The states before the first step, by name; numbers are 0-d."""

        def leaf(value: Node) -> Any:
            if value.op is Op.LOAD:
                return LIBRARY.cast(param, self.layout.compute)
            known = value.arg if value.op is Op.CONST else {**hyper, **self.facts}[str(value.arg)]
            return number(known)

        made = {}
        for spec in self.specs:
            shape = param.shape if spec.reads_parameter else tuple(spec.shape(self.view, self.static, self.facts))
            found = param if spec.copies_parameter else evaluated([spec.init], leaf)[spec.init]
            made[spec.name] = mx.broadcast_to(found.astype(getattr(mx, spec.dtype)), shape)
        for name in self.numbers:
            init = self.program.buffer(name).init
            assert init is not None
            made[name] = evaluated([init], leaf)[init].astype(mx.float32).reshape(())
        return made


#: Matrix functions that every device has; the others are the CPU's alone.
_ANYWHERE = frozenset({Op.MATMUL, Op.NEWTON_SCHULZ})


class _Between(Between):
    """Never tile by tile, which MLX is left to; products of float32 are the device's."""

    def _matrix_function(self, value: Node) -> Callable[..., Any]:
        function = super()._matrix_function(value)

        def on_device(*operands: Any) -> Any:
            if any(isinstance(x, mx.array) and x.dtype == mx.float64 for x in operands):
                return function(*operands)
            with mx.stream(self.around.device):  # type: ignore[attr-defined]
                return function(*operands)

        return on_device if value.op in _ANYWHERE else function

    def work_out(self, gap: Gap) -> Joining:
        """Everything of a gap that is needed after it."""
        yield from self._each(gap.values, gap)


class LeafStep:
    """One leaf's share of a step: the surroundings of what is worked out between its stages, and the loop over them."""

    fill_noise = None
    library = LIBRARY

    def __init__(
        self, plan: LeafPlan, place: int, owner: Processes, device: Any, arrays: Mapping[str, Any], t: Any,
        hyper: Mapping[str, Any], seed: int, tables: dict[Any, dict[Node, Any]],
    ) -> None:  # fmt: skip
        self.plan, self.program, self.place, self.owner, self.seed = plan, plan.program, place, owner, seed
        #: Parameter, gradient, states and scratch by name; all but the parameter are replaced as they are stored.
        self.arrays, self.result = dict(arrays), arrays["p"]
        self.t, self.hypers, self.compute = t, hyper, plan.layout.compute
        #: Where elements are computed; all else is the CPU's.
        self.device = device
        self.groups = np.zeros(1, np.int64)
        own = bool(plan.table.facts or plan.table.loads)
        roots = [*plan.table.columns, *(s.value for s in plan.table.stores)]
        key = place if own else (plan.program, tuple(plan.static.items()))
        if key not in tables:
            tables[key] = evaluated(roots, self._scalar)
        self.values = tables[key]
        self.between = _Between(plan.plan, self)
        self.reads = {**self.arrays}

    def __len__(self) -> int:
        return 1

    def _scalar(self, value: Node) -> Any:
        if value.op is Op.CONST:
            return LIBRARY.constant(float(value.arg))  # type: ignore[arg-type]
        if value.op is Op.STEP:
            return self.t
        if value.op in (Op.HYPER, Op.MODEL_HYPER):
            return number(self.hypers[str(value.arg)])
        if value.op is Op.FACT:
            return number(self.plan.facts[str(value.arg)])
        return self.numbers(str(value.arg))

    # Where values between the stages come from

    def column(self, index: int) -> Any:
        """A column of the scalar table."""
        return self.values[self.plan.table.columns[index]]

    def numbers(self, buffer: str) -> Any:
        """The value of a buffer that is a number, before the step."""
        return number(self.arrays[buffer])

    def matrices(self, buffer: str, i: int) -> Any:
        """A buffer as `(batch, rows, cols)`: vectors in float64, matrices in the compute dtype."""
        view, axes = self.plan.view, self.program.buffer(buffer).axes
        found = LIBRARY.read(self.arrays[buffer])
        found = view.matrices(found) if axes.elementwise else found.reshape(view.batch, *found.shape[-2:])
        return LIBRARY.cast(found, self.compute if {"i", "j"} <= set(axes.letters) else "float64")

    def room(self, i: int) -> int:
        """Any number of bytes."""
        return sys.maxsize

    def facts(self, i: int) -> Mapping[str, float]:
        """The shape facts."""
        return self.plan.facts

    def hyper(self, i: int) -> Mapping[str, float]:
        """The hyper-parameters that decide what is compiled."""
        return self.plan.static

    def tensor_number(self, i: int) -> int:
        """What tells a leaf's random numbers from others': its place."""
        return self.place

    def known(self, value: Node, found: Any, i: int) -> Any:
        """The number: Python's where it follows from static hyper-parameters."""
        static = self.plan.static
        expression = known_number(value, self.program, static, {})
        return LIBRARY.at(found, i) if expression is None else float(evaluate_once(expression, static, {}, {}))

    # The loop

    def steps(self) -> Joining:
        """Works out everything. Yields where other leaves must come as far."""
        gaps = self.plan.plan.gaps
        for index, stage in enumerate(self.program.stages):
            yield from self.between.work_out(gaps[index])
            vectors = {name: self._vector(name) for name in stage.vectors}
            self.reads |= vectors
            scalars = [self._kernel_scalar(column) for column in self.plan.kernel.columns(index)]
            with mx.stream(self.device):
                new, reduced = self.plan.kernel.stage(index, self.reads, scalars, self.plan.view)
            self.result = new.pop("p", self.result)
            self.arrays |= new
            self.reads |= new
            for reduction in stage.reduces:
                found = reduced[reduction.name]
                per_tensor = set(reduction.axes.letters) <= {"k", "n"}
                self.between.reduced[reduction.name] = LIBRARY.together([found]) if per_tensor else [number(found)]
        yield from self.between.work_out(gaps[-1])
        self._write_narrow()

    def _kernel_scalar(self, index: int) -> Any:
        late = index >= len(self.plan.table.columns)
        value = self.program.columns[index].value
        found = self.between.values[value] if late else self.values[value]
        return LIBRARY.cast(found, self.compute).reshape(())

    def _vector(self, name: str) -> Any:
        result, view = self.program.result(name), self.plan.view
        axes, (array,) = result.axes, self.between.values[result.value]
        sides = view.batch, 1 if axes.rows is None else view.rows, 1 if axes.cols is None else view.cols
        whole = LIBRARY.cast(LIBRARY.spread(array, sides), self.compute)
        return view.tensor(whole) if axes.elementwise else whole

    def _write_narrow(self) -> None:
        new = {s.buffer: self.between.values[s.value] for s in self.program.finish}
        new |= {s.buffer: self.values[s.value] for s in self.plan.table.stores}
        for name, value in new.items():
            old = self.arrays[name]
            value = value[0] if isinstance(value, list) else value
            if name not in self.plan.numbers:
                value = LIBRARY.spread(value, (self.plan.view.batch, *old.shape[-2:]))
            self.arrays[name] = value.astype(old.dtype).reshape(old.shape)


def run(steps: Sequence[LeafStep], name: str) -> None:
    """Runs the steps of all leaves, which wait for each other where they share reductions, on the CPU's stream."""
    with mx.stream(mx.cpu):
        _run(steps, name)


def _run(steps: Sequence[LeafStep], name: str) -> None:
    running = [step.steps() for step in steps]
    waiting: list[Join | None] = [next(each, None) for each in running]
    while any(waiting):
        joins = [join for join in waiting if join is not None]
        if len(joins) < len(waiting) or len({(join.site, join.op, join.level) for join in joins}) > 1:
            raise RuleError(
                f"the leaves of {name} do not all have the same values across the model: reduce per group and per "
                f"model outside of branches on the shape"
            )
        waiting = [_next(each, result) for each, result in zip(running, joined(joins), strict=True)]


def _next(steps: Joining, result: Any) -> Join | None:
    try:
        return steps.send(result)
    except StopIteration:
        return None
