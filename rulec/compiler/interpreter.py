"""The interpreter: one step of a program, node by node, in float64 or in 50-digit mpmath.

It is the definition of the language, and slow on purpose. Every backend is compared with its float64 form, and the
float64 form with the mpmath one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from rulec.array_api import bits, random
from rulec.array_api.reductions import REDUCTIONS, reduced_to, shape_of_letters, spread_from
from rulec.compiler.across_shapes import apart
from rulec.compiler.axes import AxisInference
from rulec.compiler.ir import PARTS, Axes, Program, Site, Store
from rulec.compiler.matrix import MATRIX
from rulec.compiler.stages import joins
from rulec.compiler.view import MatrixView
from rulec.compiler.weights import number_in_memory
from rulec.errors import HyperError
from rulec.language.expr.arithmetic import NUMPY, Table, mpmath_context, mpmath_table
from rulec.language.expr.node import IN_GROUP, IN_MODEL, Kind, Node, Op, walk
from rulec.language.expr.static import ORDERS, settings, statics
from rulec.language.statistics import PREFIX, joint_place

Array = np.ndarray[Any, Any]

#: An instance of a value: a tensor's index, a group's, or None for the whole model.
Key = int | None


def _to_float(array: Any) -> Array:
    return np.asarray(array, dtype=np.float64)


def _to_mpf(array: Any) -> Array:
    """Numbers as mpmath numbers with 50 digits; float64 numbers are taken exactly."""
    convert = np.frompyfunc(mpmath_context().mpf, 1, 1)
    numbers = np.asarray(array)
    with np.errstate(invalid="ignore"):
        return np.asarray(convert(numbers if numbers.dtype == object else numbers.astype(np.float64)))


@dataclass(frozen=True)
class Arithmetic:
    """A kind of numbers: its operations, and the conversion of arrays to it. `exact` for 50 digits.

    `rounded` has numbers rounded to a spacing of the numbers above 1.
    """

    table: Table
    array: Any
    exact: bool
    rounded: Callable[[Any, float], Any]


def _rounded_floats(numbers: Array, eps: float) -> Array:
    fraction, exponent = np.frexp(numbers)
    return np.asarray(np.ldexp(np.rint(fraction * (2 / eps)) * (eps / 2), exponent))


def _rounded_digits(numbers: Array, eps: float) -> Array:
    mp = mpmath_context()

    def rounded(x: Any) -> Any:
        if not mp.isfinite(x):
            return x
        fraction, exponent = mp.frexp(x)
        return mp.ldexp(mp.nint(fraction * (2 / eps)) * (eps / 2), exponent)

    return np.asarray(np.frompyfunc(rounded, 1, 1)(numbers))


def arithmetic(name: str) -> Arithmetic:
    """The arithmetic `float64`, or `mpmath` with 50 digits; ValueError for another name."""
    if name == "mpmath":
        return Arithmetic(mpmath_table(), _to_mpf, exact=True, rounded=_rounded_digits)
    if name == "float64":
        return Arithmetic(NUMPY, _to_float, exact=False, rounded=_rounded_floats)
    raise ValueError(f"arithmetic is 'float64' or 'mpmath', not {name!r}")


@dataclass
class Tensor:
    """One parameter of the reference: its value as matrices, its states, its own step count."""

    view: MatrixView
    value: Array
    group: int
    index: int
    machine_eps: float
    states: dict[str, Array] = field(default_factory=dict)
    t: int = 0
    in_group: tuple[int, int] = (0, 1)
    layer: tuple[float, float] = (math.nan, math.nan)

    @property
    def facts(self) -> dict[str, float]:
        """The shape facts, its number in its group and its layer, and their counts."""
        numbers = zip((*IN_GROUP, *IN_MODEL), (*self.in_group, *self.layer), strict=True)
        return {**self.view.facts, **dict(numbers)}


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
        #: The nodes with all instances among the values.
        self.done: set[Node] = set()
        self.columns: dict[tuple[int, Key], Any] = {}
        self.by_index = {t.index: t for t in self.tensors}
        #: All runs of one step, this one included: reductions over several tensors join all of them.
        self.family: list[Run] = [self]

    def execute(self) -> tuple[list[tuple[str, Key, Any]], set[int]]:
        """The new values of all buffers, by instance, and the tensors with a skipped step; nothing is written."""
        pending = self._stores(self.program.scalars.stores)
        pending += self._stores(self.program.stages[0].stores)
        return pending, self._skipped()

    def write(self, pending: Sequence[tuple[str, Key, Any]], skipped: set[int]) -> set[tuple[str, Key]]:
        """Writes the new values of tensors without a skip.

        A group or the model is written where any of its tensors is. Returns the keys in `shared` of the step counts
        of groups and model to advance.
        """
        counts: set[tuple[str, Key]] = set()
        names = {b.name for b in self.program.statistics}
        for buffer, key, value in pending:
            if buffer in names:
                continue
            letters = self.program.buffer(buffer).axes.letters
            if not self._owners(letters, key) <= skipped:
                self._write(buffer, key, value)
                counts |= set() if "n" in letters else {(_count("group" if letters else "model"), key)}
        return counts

    def measured(self, pending: Sequence[tuple[str, Key, Any]], skipped: set[int]) -> dict[tuple[str, str], Any]:
        """The statistics among the new values, by name and place, where not all tensors of an instance skipped."""
        letters = {b.name: b.axes.letters for b in self.program.statistics}
        return {
            (buffer.removeprefix(PREFIX), _place(letters[buffer], key)): value
            for buffer, key, value in pending
            if buffer in letters and not self._owners(letters[buffer], key) <= skipped
        }

    def _owners(self, letters: str, key: Key) -> set[Key]:
        """The tensors of an instance of a value with these axes."""
        if "n" in letters:
            return {key}
        return {t.index for t in self.tensors if "k" not in letters or t.group == key}

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

    def one(self, value: Node) -> Any:
        """The value of an expression in a run of a single tensor."""
        self._evaluate([value])
        (key,) = self._keys(self._letters(value))
        return self.values[value, key]

    def _evaluate(self, roots: Sequence[Node]) -> None:
        with np.errstate(all="ignore"):
            for part in walk(roots, self.done):
                for key in self._keys(self._letters(part)):
                    if (part, key) not in self.values:
                        self.values[part, key] = self._compute(part, key)
                self.done.add(part)

    def _get(self, value: Node, key: Key, letters: str) -> Any:
        """The instance of `value` for the instance `key` of another value, of axes `letters`."""
        value_letters = self._letters(value)
        if "n" in value_letters:
            return self.values[value, key]
        if "k" not in value_letters:
            return self.values[value, None]
        return self.values[value, self.by_index[key].group if "n" in letters else key]  # type: ignore[index]

    def _compute(self, value: Node, key: Key) -> Any:
        if value.op.kind is Kind.LEAF:
            return self._leaf(value, key)
        if value.op.kind is Kind.REDUCE:
            return self._reduce(value, key)
        letters = self._letters(value)
        if self.program.watch and (new := number_in_memory(value)) is not None:
            return self.how.rounded(self._get(new, key, letters), self.by_index[cast(int, key)].machine_eps)
        operands = [self._get(a, key, letters) for a in value.args]
        if value.op.kind is Kind.MATRIX:
            if value.op in ORDERS and settings(value)["per"] == "tensor":
                each = zip(operands, value.args, strict=True)
                operands = [self._for_batch(x, self._letters(a), key) for x, a in each]
            return _matrix(value, [*operands, *self._statics(value, key)], self.how)
        if value.op.kind is Kind.RANDOM:
            return self._random(value, operands, key)
        if value.op is Op.SPREAD:
            extents = self.by_index[cast(int, key)].view.segments
            return spread_from(int(str(value.arg)), operands[0], extents, np.broadcast_to)
        if value.op is Op.WIDEN:
            return self._widened(value, operands[0], cast(int, key))
        if value.op is Op.CHANCE:
            return self.how.array(bits.chance(np, *operands, turned=self.by_index[cast(int, key)].view.transposed))
        return self.how.table[value.op](*operands)

    def _widened(self, value: Node, operand: Any, index: int) -> Any:
        """A value for each index of more axes of a tensor."""
        axes, view = cast(Axes, value.arg), self.by_index[index].view
        extents = {"b": view.batch, **{str(k): n for k, n in enumerate(view.segments)}}
        for letter, extent in (("i", axes.rows), ("j", axes.cols)):
            if extent is not None:
                self._evaluate([extent])
                extents[letter] = int(self._get(extent, index, "kn"))
        return np.broadcast_to(operand, shape_of_letters(axes.letters, extents))

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
            words = bits.words_of(self.seed, tensor.index)
            return array({**tensor.facts, "machine_eps": tensor.machine_eps, **words}[str(value.arg)])
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
        """A column of the scalar table, computed when it is first read, by this run or another of the step."""
        if (index, key) not in self.columns:
            column = self.program.scalars.columns[index].value
            self._evaluate([column])
            self.columns |= {(index, k): self.values[column, k] for k in self._keys(self._letters(column))}
        return self.columns[index, key]

    def _reduce(self, value: Node, key: Key) -> Any:
        have, keep = self._letters(value.args[0]), self._letters(value)
        if "n" in keep:
            return self._within(value, self.values[value.args[0], key], key)
        parts: dict[Key, Any] = {}
        for run in self.family:
            if run.joins:
                parts |= run.contributions(self.joins[value], key, self.joins, "n" in have)
        return self._joined(value.op, [*parts.values()], "n" in have)

    def _joined(self, op: Op, parts: Sequence[Any], of_tensors: bool) -> Any:
        """The reduction of the parts of several tensors, or of several groups."""
        total = None
        for part in parts:
            total = part if total is None else self._combine(op)(total, part)
        return np.asarray(total).reshape(()) if of_tensors else total

    def contributions(self, site: Site, key: Key, joins: Mapping[Node, Site], of_tensors: bool) -> dict[Key, Any]:
        """The parts of this run's tensors, or groups, in the reduction over several tensors at a site."""
        operands = (n.args[0] for n, place in self.joins.items() if place == site)
        alike = any(("n" in self._letters(x)) == of_tensors for x in operands)
        if not alike or {*joins.values()} != {*self.joins.values()}:
            raise apart(self.program.name)
        value = next(n for n, place in self.joins.items() if place == site)
        (operand,) = value.args
        self._evaluate([operand])
        have = self._letters(operand)
        keys = [k for k in self._keys(have) if self._belongs(k, have, key)]
        return {k: self._within(value, self.values[operand, k], k) for k in keys}

    def _combine(self, op: Op) -> Any:
        return {Op.SUM: np.add, Op.MIN: self.how.table[Op.MINIMUM], Op.MAX: self.how.table[Op.MAXIMUM]}[op]

    def _within(self, value: Node, operand: Any, key: Key) -> Any:
        """The operand of a reduction, reduced over the axes of one tensor."""
        x = np.asarray(operand)
        removed = set(self._letters(value.args[0])) - set(self._letters(value))
        part = set(self._letters(value)) & {*PARTS} if "b" in removed else set()
        axes = tuple(i for i, c in enumerate("bij") if c in removed or (c == "b" and removed & {*PARTS}))
        if "b" in removed:
            x = self._for_batch(x, "b", key)
        if part:
            extents = self.by_index[cast(int, key)].view.segments
            return reduced_to(int(*part), x, extents, axes, lambda values, over: self._reduced(value.op, values, over))
        return self._reduced(value.op, x, axes) if x.ndim == 3 else x

    def _for_batch(self, x: Array, letters: str, key: Key) -> Array:
        """A value for each matrix of a batch: an identity or a draw is kept once for all of them."""
        batch = self.by_index[cast(int, key)].view.batch
        return np.broadcast_to(x, (batch, *x.shape[1:])) if "b" in letters else x

    def _reduced(self, op: Op, x: Array, axes: Sequence[int]) -> Array:
        start = self.how.array(REDUCTIONS[op].nothing)[()]
        for axis in axes:
            x = self._combine(op).reduce(x, axis=axis, keepdims=True, initial=start)
        return x

    def _belongs(self, part: Key, have: str, key: Key) -> bool:
        return key is None or (self.by_index[part].group if "n" in have else part) == key  # type: ignore[index]

    def _statics(self, value: Node, key: Key) -> list[float]:
        """The static operands of an operation, for a tensor."""
        operands = statics(value)
        self._evaluate(operands)
        return [float(self._get(x, key, "kn")) for x in operands]

    def _random(self, value: Node, operands: Sequence[Any], key: Key) -> Any:
        draw, extents = settings(value)["draw"], [int(x) for x in self._statics(value, key)]
        count = int(np.prod(extents))
        position = {
            "seed": self.seed,
            "tensor": int(key or 0),
            "draw": int(draw),
            "step": random.draw_number(operands[0]),
        }
        numbers = random.normal(count, **position)
        if value.op is Op.UNIFORM:
            numbers = random.uniform(random.stream(count, **position))
        return self.how.array(numbers.reshape(1, *extents))


def _place(letters: str, key: Key) -> str:
    """The place of an instance of a statistic with these axes: `tensor 0`, `group 0` or `model`."""
    return f"tensor {key}" if "n" in letters else joint_place(letters, key)


def _count(level: Any) -> str:
    """The key of the step count of a group or the model, beside its states."""
    return f"t of the {level}"


def _matrix(value: Node, operands: Sequence[Any], how: Arithmetic) -> Any:
    function = MATRIX[value.op]
    compute = function.exact if how.exact else function.compute
    keywords = {key: setting for key, setting in settings(value).items() if key != "dtype"}
    return how.array(compute(*operands, **keywords))
