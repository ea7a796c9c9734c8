"""The living definition of the language: a program run node by node, in float64 or in 50-digit mpmath.

Slow on purpose. Every backend is compared with the float64 walk, and the float64 walk with the mpmath one.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np

from rulec.arrays import random
from rulec.arrays.reductions import REDUCTIONS
from rulec.compiler.axes import AxisInference
from rulec.compiler.ir import Program, Site, Store
from rulec.compiler.lower import check_counts
from rulec.compiler.matrix import MATRIX
from rulec.compiler.pipeline import compile
from rulec.compiler.routing import Router
from rulec.compiler.scalars import resolve_hyper
from rulec.compiler.stages import joins
from rulec.compiler.view import MatrixView, matrix_view
from rulec.errors import HyperError, RuleError, TensorError
from rulec.language.arithmetic import NUMPY, Table, mpmath_context, mpmath_table
from rulec.language.node import Kind, Node, Op, walk
from rulec.language.rule import Rule
from rulec.language.source import did_you_mean

Array = np.ndarray[Any, Any]

#: Which instance of a value: a tensor's index, a group's, or None for the whole model.
Key = int | None


def _to_float(array: Any) -> Array:
    return np.asarray(array, dtype=np.float64)


def _to_mpf(array: Any) -> Array:
    """Numbers as mpmath's with 50 digits: what is given in float64 is taken exactly."""
    convert = np.frompyfunc(mpmath_context().mpf, 1, 1)
    given = np.asarray(array)
    with np.errstate(invalid="ignore"):
        return np.asarray(convert(given if given.dtype == object else given.astype(np.float64)))


@dataclass(frozen=True)
class Arithmetic:
    """How the reference computes: the operations, and numbers into arrays it understands."""

    table: Table
    array: Any
    exact: bool


def arithmetic(name: str) -> Arithmetic:
    """`float64`, or `mpmath` with 50 digits."""
    if name == "mpmath":
        return Arithmetic(mpmath_table(), _to_mpf, exact=True)
    if name == "float64":
        return Arithmetic(NUMPY, _to_float, exact=False)
    raise ValueError(f"arithmetic is 'float64' or 'mpmath', not {name!r}")


@dataclass
class Tensor:
    """One parameter as the reference holds it: the matrix view of its value, its states, its own step count."""

    view: MatrixView
    value: Array
    group: int
    index: int
    machine_eps: float
    states: dict[str, Array] = field(default_factory=dict)
    t: int = 0


@functools.lru_cache(maxsize=512)
def _known(program: Program) -> tuple[AxisInference, dict[Node, Site]]:
    """The axes of a program's values, and the sites of its reductions over several tensors: the same in every run."""
    inference = AxisInference(program)
    return inference, {n: program.sites[n] for n in joins(program, inference)}


class Run:
    """One step of a program over some tensors: values by node and instance."""

    def __init__(
        self, program: Program, tensors: Sequence[Tensor], hyper: Sequence[Mapping[str, float]], how: Arithmetic,
        shared: dict[tuple[str, Key], Array], gradients: Mapping[int, Array], seed: int = 0,
        inputs: Mapping[tuple[str, Key], Array] | None = None,
    ) -> None:  # fmt: skip
        self.program, self.tensors, self.hyper, self.how = program, list(tensors), hyper, how
        self.inputs = inputs or {}
        self.shared, self.gradients, self.seed = shared, gradients, seed
        self.inference, self.joins = _known(program)
        self.values: dict[tuple[Node, Key], Any] = {}
        #: The nodes of which every instance is among the values.
        self.done: set[Node] = set()
        self.columns: dict[tuple[int, Key], Any] = {}
        self.by_index = {t.index: t for t in self.tensors}
        #: The runs of one step, this one among them: what several tensors share is reduced over all of them.
        self.family: list[Run] = [self]

    def execute(self) -> tuple[list[tuple[str, Key, Any]], set[int]]:
        """The new values of all buffers, by instance, and the tensors whose step is skipped; nothing is written."""
        pending = self._stores(self.program.scalars.stores)
        pending += self._stores(self.program.stages[0].stores)
        return pending, self._skipped()

    def write(self, pending: Sequence[tuple[str, Key, Any]], skipped: set[int]) -> set[tuple[str, Key]]:
        """Takes over the new values of what is not skipped; which groups have any, and whether the model has."""
        counts: set[tuple[str, Key]] = set()
        for buffer, key, value in pending:
            letters = self.program.buffer(buffer).axes.letters
            sharing = {t.index for t in self.tensors if "n" not in letters and ("k" not in letters or t.group == key)}
            if not ({key} if "n" in letters else sharing) <= skipped:
                self._write(buffer, key, value)
                counts |= set() if "n" in letters else {(_count("group" if letters else "model"), key)}
        return counts

    def _skipped(self) -> set[int]:
        skip = self.program.skip
        if skip is None:
            return set()
        self._evaluate([skip])
        return {t.index for t in self.tensors if bool(np.all(self._get(skip, t.index, "kn")))}

    def _stores(self, stores: Sequence[Store]) -> list[tuple[str, Key, Any]]:
        pending = []
        for store in stores:
            self._evaluate([store.value])
            letters = self.program.buffer(store.buffer).axes.letters
            for key in self._keys(letters):
                pending.append((store.buffer, key, self._get(store.value, key, letters)))
        return pending

    def _write(self, buffer: str, key: Key, value: Any) -> None:
        letters = self.program.buffer(buffer).axes.letters
        if "n" not in letters:
            self.shared[buffer, key] = value
        elif buffer == "p":
            tensor = self.by_index[key]  # type: ignore[index]
            tensor.value = np.broadcast_to(value, tensor.value.shape).copy()
        else:
            states = self.by_index[key].states  # type: ignore[index]
            states[buffer] = np.broadcast_to(value, states[buffer].shape).copy()

    def _keys(self, letters: str) -> list[Key]:
        if "n" in letters:
            return [t.index for t in self.tensors]
        return list(dict.fromkeys(t.group for t in self.tensors)) if "k" in letters else [None]

    def _letters(self, value: Node) -> str:
        return self.inference.axes(value).letters

    def _evaluate(self, roots: Sequence[Node]) -> None:
        with np.errstate(all="ignore"):
            for part in walk(roots, self.done):
                for key in self._keys(self._letters(part)):
                    if (part, key) not in self.values:
                        self.values[part, key] = self._compute(part, key)
                self.done.add(part)

    def _get(self, value: Node, key: Key, letters: str) -> Any:
        """The instance of `value` that the instance `key` of something with axes `letters` sees."""
        own = self._letters(value)
        if "n" in own:
            return self.values[value, key]
        if "k" not in own:
            return self.values[value, None]
        return self.values[value, self.by_index[key].group if "n" in letters else key]  # type: ignore[index]

    def _compute(self, value: Node, key: Key) -> Any:
        if value.op.kind is Kind.LEAF:
            return self._leaf(value, key)
        if value.op.kind is Kind.REDUCE:
            return self._reduce(value, key)
        letters = self._letters(value)
        operands = [self._get(a, key, letters) for a in value.args]
        if value.op.kind is Kind.MATRIX:
            return _matrix(value, operands, self.how)
        if value.op.kind is Kind.RANDOM:
            return self._random(value, operands, key)
        return self.how.table[value.op](*operands)

    def _leaf(self, value: Node, key: Key) -> Any:
        array = self.how.array
        if value.op is Op.CONST:
            return array(value.arg)
        if value.op is Op.HYPER:
            return array(self.hyper[key][str(value.arg)])  # type: ignore[index]
        if value.op is Op.MODEL_HYPER:
            return array(self._model_hyper(str(value.arg)))
        if value.op is Op.SCALAR:
            return self._column(cast(int, value.arg), key)
        if value.op is Op.STEP:
            return array(self._step(value.arg, key))
        if value.op is Op.FACT:
            tensor = self.by_index[key]  # type: ignore[index]
            return array({**tensor.view.facts, "machine_eps": tensor.machine_eps}[str(value.arg)])
        return self._load(str(value.arg), key)

    def _model_hyper(self, name: str) -> float:
        values = {group[name] for group in self.hyper}
        if len(values) > 1:
            raise HyperError(
                f"{name} of {self.program.name} is part of a state of the whole model, so every group needs the same "
                f"value, not {', '.join(map(str, sorted(values)))}"
            )
        return values.pop()

    def _step(self, level: Any, key: Key) -> int:
        if level is None:
            return self.by_index[key].t  # type: ignore[index]
        return int(self.shared.get((_count(level), key), 0)) + 1

    def _load(self, buffer: str, key: Key) -> Any:
        if (buffer, key) in self.shared:
            return self.shared[buffer, key]
        if self.program.buffer(buffer).role == "input":
            return self.inputs[buffer, key]
        tensor = self.by_index[key]  # type: ignore[index]
        if buffer == "p":
            return tensor.value
        return self.gradients[tensor.index] if buffer == "g" else tensor.states[buffer]

    def _column(self, index: int, key: Key) -> Any:
        """A column of the scalar table, computed when it is first read: another run of the step may be the first."""
        if (index, key) not in self.columns:
            column = self.program.scalars.columns[index].value
            self._evaluate([column])
            self.columns |= {(index, k): self.values[column, k] for k in self._keys(self._letters(column))}
        return self.columns[index, key]

    def _reduce(self, value: Node, key: Key) -> Any:
        have, keep = self._letters(value.args[0]), self._letters(value)
        if "n" in keep:
            return self._within(value, np.asarray(self.values[value.args[0], key]))
        parts: dict[Key, Any] = {}
        for run in self.family:
            if run.joins:
                parts |= run.contributions(self.joins[value], key, self.joins)
        total = None
        for part in parts.values():
            total = part if total is None else self._combine(value.op)(total, part)
        return np.asarray(total).reshape(()) if "n" in have else total

    def contributions(self, site: Site, key: Key, joins: Mapping[Node, Site]) -> dict[Key, Any]:
        """What this run's tensors (or groups) add to the reduction over several tensors of that site."""
        if {*joins.values()} != {*self.joins.values()}:
            raise RuleError(
                f"the tensors of {self.program.name} do not all have the same values across the model: "
                f"reduce per group and per model outside of branches on the shape"
            )
        value = next(n for n, own in self.joins.items() if own == site)
        (operand,) = value.args
        self._evaluate([operand])
        have = self._letters(operand)
        keys = [k for k in self._keys(have) if self._belongs(k, have, key)]
        return {k: self._within(value, np.asarray(self.values[operand, k])) for k in keys}

    def _combine(self, op: Op) -> Any:
        return {Op.SUM: np.add, Op.MIN: self.how.table[Op.MINIMUM], Op.MAX: self.how.table[Op.MAXIMUM]}[op]

    def _within(self, value: Node, x: Array) -> Any:
        """The operand of a reduction reduced over the axes that one tensor has."""
        removed = set(self._letters(value.args[0])) - set(self._letters(value))
        start = self.how.array(REDUCTIONS[value.op].nothing)[()]
        for axis, letter in enumerate("bij"):
            if letter in removed and x.ndim == 3:
                x = self._combine(value.op).reduce(x, axis=axis, keepdims=True, initial=start)
        return x

    def _belongs(self, part: Key, have: str, key: Key) -> bool:
        return key is None or (self.by_index[part].group if "n" in have else part) == key  # type: ignore[index]

    def _random(self, value: Node, operands: Sequence[Any], key: Key) -> Any:
        draw, *sizes = cast(tuple[Any, ...], value.arg)
        self._evaluate(sizes)
        extents = [int(self._get(x, key, "kn")) for x in sizes]
        count = int(np.prod(extents))
        position = {
            "seed": self.seed,
            "tensor": int(key or 0),
            "draw": int(draw),
            "step": random.draw_number(operands[0]),
        }
        made = random.normal(count, **position)
        if value.op is Op.UNIFORM:
            made = random.uniform(random.stream(count, **position))
        return self.how.array(made.reshape(1, *extents))


def _count(level: Any) -> str:
    """Where the steps of a group or the model are counted, beside its states."""
    return f"t of the {level}"


def _matrix(value: Node, operands: Sequence[Any], how: Arithmetic) -> Any:
    function = MATRIX[value.op]
    if how.exact and not function.exact:
        raise RuleError(f"{value.op.symbol} has no 50-digit form: use the float64 reference")
    return function.compute(*operands)


class ReferenceOptimizer:
    """A rule run by the reference over a list of parameters: the oracle that tests compare everything with.

    `params` are arrays of any shape, `hyper` the values that differ from their defaults (or one dict per group,
    with `groups` giving each parameter's). `tags` are each parameter's words for `tagged(...)`.
    """

    def __init__(
        self, rule: Rule, params: Sequence[Any],
        hyper: Mapping[str, float] | Sequence[Mapping[str, float]] | None = None,
        arithmetic: str = "float64", *, groups: Sequence[int] | None = None, tags: Sequence[set[str]] | None = None,
        seed: int = 0,
    ) -> None:  # fmt: skip
        self.how = _arithmetic(arithmetic)
        given = [hyper or {}] if not isinstance(hyper, Sequence) else list(hyper)
        self.rule = rule
        self.seed = seed
        group_of = list(groups or [0] * len(params))
        words = list(tags or [set()] * len(params))
        self.tensors: list[Tensor] = []
        self._parts: dict[Hashable, _Part] = {}
        self._shared: dict[int, dict[tuple[str, Key], Array]] = {}
        router = Router(rule)
        for index, (param, group) in enumerate(zip(params, group_of, strict=True)):
            eps = float(np.finfo(np.asarray(param).dtype).eps) if np.asarray(param).dtype.kind == "f" else 2.0**-52
            routed = router.choose(np.shape(param), words[index], f"parameter {index}")
            view = matrix_view(np.shape(param), routed.view)
            self.tensors.append(Tensor(view, view.matrices(self.how.array(param)).copy(), group, index, eps))
            self._add(index, routed, [_own(g, routed) for g in given])
        known = rule.settings
        for key in (key for group in given for key in group):
            if key not in known:
                raise HyperError(f"{rule.name} has no hyper-parameter {key!r}{did_you_mean(key, known)}")

    def _add(self, index: int, rule: Rule, given: list[Mapping[str, float]]) -> None:
        tensor = self.tensors[index]
        hyper = [resolve_hyper(rule.hyper, g, tensor.machine_eps, rule.name) for g in given]
        static = {k: v for k, v in hyper[tensor.group].items() if rule.hyper[k].static}
        program = compile(rule, tensor.view.facts, static, whole=True)
        # A default may be the machine epsilon of the tensor's own dtype.
        values = tuple(tuple(group.items()) for group in hyper)
        shared = self._shared.setdefault(id(rule), {})
        part = self._parts.setdefault((id(program), values), _Part(program, hyper, shared))
        part.tensors.append(tensor)

    def _initialise(self, part: _Part, tensor: Tensor, state: str) -> None:
        buffer = part.program.buffer(state)
        key = tensor.index if "n" in buffer.axes.letters else tensor.group if "k" in buffer.axes.letters else None
        run = Run(part.program, [tensor], part.hyper, self.how, part.shared, {}, self.seed)
        assert buffer.init is not None
        run._evaluate([buffer.init])
        value = next(iter(run.values[buffer.init, k] for k in run._keys(run._letters(buffer.init))))
        if "n" not in buffer.axes.letters:
            part.shared.setdefault((state, key), value)
            return
        extent = {"b": tensor.view.batch, "i": 1, "j": 1}
        for letter, size in (("i", buffer.axes.rows), ("j", buffer.axes.cols)):
            if size is not None:
                run._evaluate([size])
                extent[letter] = int(run._get(size, tensor.index, "kn"))
        shape = tuple(extent[c] if c in buffer.axes.letters else 1 for c in "bij")
        tensor.states[state] = np.broadcast_to(value, shape).copy()

    def copy(self) -> ReferenceOptimizer:
        """Another run that goes on from where this one is."""
        twin = copy.copy(self)
        # A step puts new arrays in the place of old ones, and changes none.
        twin.tensors = [replace(t, states=dict(t.states)) for t in self.tensors]
        twin._shared = {key: dict(shared) for key, shared in self._shared.items()}
        places = {id(shared): key for key, shared in self._shared.items()}
        twin._parts = {
            key: _Part(
                part.program, [dict(h) for h in part.hyper], twin._shared[places[id(part.shared)]],
                [twin.tensors[t.index] for t in part.tensors],
            )
            for key, part in self._parts.items()
        }  # fmt: skip
        return twin

    @property
    def params(self) -> list[Array]:
        """The parameters now, in their own shapes."""
        return [t.view.tensor(t.value) for t in self.tensors]

    def state(self, index: int) -> dict[str, Array]:
        """The states of one parameter now; those of its shape in its shape. Empty before its first gradient."""
        tensor = self.tensors[index]
        return {k: tensor.view.tensor(v) if v.shape == tensor.value.shape else v for k, v in tensor.states.items()}

    def step(
        self, grads: Sequence[Any | None], hyper: Mapping[str, float] | None = None,
        inputs: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """One step with these gradients; None leaves a parameter as it is. `hyper` changes values from here on.

        `inputs` gives what the rule names under `inputs`: a number for a scalar, a list of one array per parameter
        for what is like p.
        """
        missing = [key for key in self.rule.inputs if key not in (inputs or {})]
        if missing:
            raise TensorError(f"{self.rule.name} needs the input {missing[0]!r} at every step")
        for part in self._parts.values():
            for group in part.hyper if hyper else ():
                group.update({k: v for k, v in (hyper or {}).items() if k in group})
        runs = [run for part in self._parts.values() if (run := self._run(part, grads, inputs or {})).tensors]
        for run in runs:
            run.family = runs
        done = [run.execute() for run in runs]
        advanced: dict[tuple[int, tuple[str, Key]], dict[tuple[str, Key], Array]] = {}
        for run, (pending, skipped) in zip(runs, done, strict=True):
            advanced |= {(id(run.shared), place): run.shared for place in run.write(pending, skipped)}
            for tensor in run.tensors:
                tensor.t -= tensor.index in skipped
        for (_, place), shared in advanced.items():
            shared[place] = np.asarray(shared.get(place, 0)) + 1

    def _run(self, part: _Part, grads: Sequence[Any | None], inputs: Mapping[str, Any]) -> Run:
        active = [t for t in part.tensors if grads[t.index] is not None]
        for tensor in active:
            # As in an optimizer, states begin with the hyper-parameters of the tensor's first update.
            if tensor.t == 0:
                check_counts(part.program, {**tensor.view.facts, **part.hyper[tensor.group]})
            for buffer in part.program.states if tensor.t == 0 else ():
                self._initialise(part, tensor, buffer.name)
            tensor.t += 1
        gradients = {t.index: t.view.matrices(self.how.array(grads[t.index])) for t in active}
        given = self._inputs(part.program, active, inputs)
        return Run(part.program, active, part.hyper, self.how, part.shared, gradients, self.seed, given)

    def _inputs(
        self, program: Program, active: Sequence[Tensor], inputs: Mapping[str, Any]
    ) -> dict[tuple[str, Key], Array]:
        found: dict[tuple[str, Key], Array] = {}
        for buffer in program.buffers:
            if buffer.role == "input" and not buffer.axes.letters:
                found[buffer.name, None] = self.how.array(inputs[buffer.name])
            elif buffer.role == "input":
                for t in active:
                    found[buffer.name, t.index] = t.view.matrices(self.how.array(inputs[buffer.name][t.index]))
        return found


@dataclass
class _Part:
    """The tensors that one program serves, and what they share."""

    program: Program
    hyper: list[dict[str, float]]
    shared: dict[tuple[str, Key], Array]
    tensors: list[Tensor] = field(default_factory=list)


_arithmetic = arithmetic


def _own(given: Mapping[str, float], rule: Rule) -> dict[str, float]:
    """The given hyper-parameters that a routed rule has."""
    known = set(rule.standalone().hyper)
    return {k: v for k, v in given.items() if k in known}
