"""The common part of eager steps in JAX: a rule with its settings, traced numbers, and a store of compiled functions.

Functions of users get the offered values among their parameters, and are traced in one mode of JAX. A first backward
pass computes reductions over all gradients that are needed before the first parameter is updated. Examples are the norm
for `clip_by_global_norm >> adamw`, and whether every gradient is finite.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rulec.compiler.routing import Router
from rulec.errors import HyperError, RuleError, StepTooLarge
from rulec.jax.compiled import call, is_wide, machine_of, numbered
from rulec.jax.eager.memory import StepBytes, bytes_of, shapes, shared_out
from rulec.jax.eager.parts import Parts
from rulec.jax.eager.tied import Tied, tied_in
from rulec.jax.library import LIBRARY, compiler_options, evaluated, is_outermost
from rulec.jax.oriented import Axes, axis_roles
from rulec.jax.recipe import Given, Rules, recipe, rules_of
from rulec.jax.transform import options
from rulec.language.compose.combine import map_nodes
from rulec.language.evaluations import check_single
from rulec.language.expr.node import LEVELS, Kind, Node, Op, name, names_in, rewrite, walk
from rulec.language.partition import Partition
from rulec.language.statistics import Watch


class Outcome(NamedTuple):
    """The results of a step beside new parameters and state.

    `aux` is the second result of the loss or of the head, and `layer_aux` the stacked second results of the layers.
    `ok` is whether all gradients were finite, None without `skip_nonfinite`.
    """

    loss: Any
    aux: Any = None
    layer_aux: Any = None
    ok: Any = None


class EagerRun(ABC):
    """The functions of one rule, traced: a first state, and a step."""

    def __init__(self, parts: Parts, shared: Tied, mode: Mode, measured: Measured) -> None:
        self.parts, self.shared, self.mode, self.measured = parts, shared, mode, measured
        self.init = jax.jit(self._init)
        #: Parameters and state are donated; not for calls that others trace.
        self.step = jax.jit(self._step, donate_argnums=(0, 1), compiler_options=compiler_options())
        self.step_inside = jax.jit(self._step, inline=True)

    @abstractmethod
    def kept(self, params: Any, batch: Any, key: Any) -> tuple[int, int]:
        """Bytes of activations for the backward pass, and of gradients that may have to live together."""

    @abstractmethod
    def _init(self, params: Any, numbers: Any) -> Any: ...

    @abstractmethod
    def _step(self, params: Any, state: Any, batch: Any, key: Any, numbers: Any, inputs: Any) -> Any: ...


@dataclass(frozen=True)
class Call:
    """A step with all its operands: arrays, or their shapes and dtypes."""

    run: EagerRun
    params: Any
    state: Any
    batch: Any
    key: Any
    numbers: Any
    inputs: Any

    @property
    def operands(self) -> tuple[Any, ...]:
        """The operands of the step's function, in order."""
        return self.params, self.state, self.batch, self.key, self.numbers, self.inputs

    def result(self, outermost: bool) -> Any:
        """The results of the step; `outermost` is whether no other jit traces it."""
        return call(self.run.step if outermost else self.run.step_inside, *self.operands)

    def bytes(self) -> StepBytes:
        """The bytes of the step. It is compiled, once for this and for a later call, and not run."""
        stats = call(lambda: self.run.step.lower(*self.operands).compile().memory_analysis())
        copies = int(stats.output_size_in_bytes) - int(stats.alias_size_in_bytes)
        operands = bytes_of(self.params), bytes_of(self.state), bytes_of((self.batch, self.key))
        kept = self.run.kept(self.params, self.batch, self.key)
        return shared_out(operands, int(stats.temp_size_in_bytes), *kept, max(0, copies))


class Eager(ABC):
    """A rule with its options, on any model."""

    def __init__(
        self, rule: Rules, *, state_dtype: Any, weights: str, seed: int, maximize: bool,
        tags: Mapping[str, Collection[str]] | None, shared: Mapping[str, str] | None, most: int | None,
        skip_nonfinite: bool, watch: Watch | None, axes: Axes = None,
    ) -> None:  # fmt: skip
        if watch is not None:
            raise RuleError(
                "an eager update measures no statistics: give watch to rulec.jax.step or rulec.jax.transform"
            )
        self._most = most
        self._seen: set[Any] = set()
        self._tags, self._axes, self._shared = tags, axis_roles(axes), dict(shared or {})
        self._options = options(state_dtype, maximize, seed, weights)
        for part in rules_of(rule):
            check_single(part, "a step inside the backward pass")
        self._inputs = _inputs(rule)
        self._rule, reductions = in_two_passes(rule)
        self._measured = Measured(reductions, skip_nonfinite, bool(maximize))
        self._runs: dict[Any, Any] = {}

    @abstractmethod
    def _new_run(self, *common: Any) -> EagerRun:
        """A EagerRun with these common arguments."""

    @abstractmethod
    def _checked(self, params: Any) -> Any:
        """The parameters, after a check of their tree; TensorError where it is wrong."""

    @abstractmethod
    def _count(self, state: Any) -> Any:
        """The number of steps done."""

    def init(self, params: Any, **hyper: Given) -> Any:
        """The state before the first step; hyper-parameters are needed only where a state begins with one."""
        shared = tied_in(self._checked(params), self._shared)
        run, numbers = self._run(hyper, None, shared)
        return call(run.init, shared.once(params), numbers)

    def step(self, params: Any, state: Any, batch: Any, *, key: Any = None, **hyper: Given) -> tuple[Any, Any, Outcome]:
        """New parameters, the new state, and the outcome.

        Parameters and state are donated: afterwards they cannot be used, except in calls inside of another jit.
        Hyper-parameters and the rule's `inputs` are traced numbers or functions of the count.
        """
        bound = self._bound(params, state, batch, key, hyper, self._count(state))
        outermost = is_outermost(*bound.operands)
        if outermost:
            self._look_at(bound)
        params, state, outcome = bound.result(outermost)
        return bound.run.shared.everywhere(params), state, outcome

    def bytes(self, params: Any, batch: Any, *, key: Any = None, **hyper: Given) -> StepBytes:
        """The memory of a step, by kind, without doing one.

        `params` and `batch` are arrays, or `jax.ShapeDtypeStruct`s that need no memory.
        """
        bound = self._bound(shapes(params), None, shapes(batch), key, hyper, None)
        state = call(lambda: jax.eval_shape(bound.run.init, bound.params, bound.numbers))
        return replace(bound, state=state).bytes()

    def _bound(self, params: Any, state: Any, batch: Any, key: Any, hyper: Mapping[str, Given], count: Any) -> Call:
        shared = tied_in(self._checked(params), self._shared)
        keywords = dict(hyper)
        inputs = {name: self._input(name, keywords) for name in self._inputs}
        run, numbers = self._run(keywords, count, shared)
        return Call(run, shared.once(params), state, jax.tree.map(_array, batch), key, numbers, inputs)

    def _look_at(self, bound: Call) -> None:
        """StepTooLarge where a step takes more than `most` bytes; looked at once for each shape of a batch."""
        seen = id(bound.run), tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(bound.batch))
        if self._most is None or seen in self._seen:
            return
        needed = bound.bytes()
        if needed.working > self._most:
            raise _too_large(needed, self._most)
        self._seen.add(seen)

    def _input(self, name: str, keywords: dict[str, Any]) -> Any:
        if name not in keywords:
            raise HyperError(f"the rule needs {name}: give it to step as a keyword, {name}=...")
        return keywords.pop(name)

    def _run(self, hyper: Mapping[str, Given], count: Any, shared: Tied) -> tuple[EagerRun, list[dict[str, Any]]]:
        current, numbers = numbered(recipe(self._rule, hyper, self._tags, self._axes), count)
        options, mode = replace(self._options, backend="jax"), Mode.now()
        key = current.key, options, is_wide(), mode, shared
        if key not in self._runs:
            self._runs[key] = self._new_run(machine_of(Parts, current, options), shared, mode, self._measured)
        return self._runs[key], numbers


def _array(leaf: Any) -> Any:
    """A leaf as an array in the user's mode of JAX; a `jax.ShapeDtypeStruct` stays."""
    return leaf if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) else jnp.asarray(leaf)


def _inputs(rule: Rules) -> list[str]:
    """The names of the rules' inputs; RuleError for an input that is not one number."""
    inputs = {name: (kind, routed) for part in rules_of(rule) for routed in Router(part).rules
              for name, kind in routed.inputs.items()}  # fmt: skip
    for input_name, (kind, routed) in inputs.items():
        if kind == "like p":
            raise RuleError(
                f"{routed.name} needs {input_name} for every parameter, which an eager update does not keep until it "
                f"comes to it: update with rulec.jax.step"
            )
    return list(inputs)


def unless(ok: Any, old: Any, new: Any) -> Any:
    """New arrays where `ok` is true or None, else the old ones."""
    return new if ok is None else jax.tree.map(lambda o, n: jnp.where(ok, n, o), old, new)


def _too_large(needed: StepBytes, most: int) -> StepTooLarge:
    return StepTooLarge(
        f"the step needs {needed.working:,} bytes beside weights, state and batch, and most={most:,} allows no more: "
        f"{needed.activations:,} for activations, {needed.gradients:,} for gradients, {needed.temporaries:,} else",
        needed,
    )


class UserFunction:
    """A user's function of some arguments, and of the offered values that it names among its parameters."""

    def __init__(self, function: Callable[..., Any], what: str, offered: Sequence[str]) -> None:
        if not callable(function):
            raise HyperError(f"{what} must be a function, and is a {type(function).__name__}")
        self.taken = [name for name in offered if name in _parameters(function)]
        self._function = function

    def __call__(self, *arguments: Any, **offered: Any) -> Any:
        """Its result."""
        return self._function(*arguments, **{name: offered[name] for name in self.taken})


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


@dataclass(frozen=True)
class Mode:
    """How a user's program is traced: whether JAX is allowed 64 bits, and which dtypes may meet."""

    wide: bool
    promotion: Any

    @classmethod
    def now(cls) -> Mode:
        """As JAX is configured here."""
        return cls(is_wide(), jax.config.jax_numpy_dtype_promotion)  # type: ignore[attr-defined]

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Functions are traced so within."""
        with jax.enable_x64(self.wide), jax.numpy_dtype_promotion(self.promotion):
            yield


#: Reduction -> how parts of it over all gradients are combined, and its first value.
_SUM = (jnp.add, 0.0)
_JOIN: Mapping[Op, tuple[Callable[..., Any], float]] = {
    Op.SUM: _SUM, Op.MEAN: _SUM, Op.NORM: _SUM, Op.RMS: _SUM, Op.COUNT_NONZERO: _SUM,
    Op.MIN: (jnp.minimum, float("inf")), Op.MAX: (jnp.maximum, float("-inf")),
}  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """Reductions over all gradients by the names of a rule's inputs, and whether all gradients must be finite.

    The carried value has a float64 number for each reduction, the number of elements, and whether all are finite.
    """

    reductions: Mapping[str, Node]
    finite: bool
    maximize: bool

    def __bool__(self) -> bool:
        return bool(self.reductions) or self.finite

    def nothing(self) -> Any:
        """The carried value before any gradient."""
        starts = {key: jnp.float64(_JOIN[reduction.op][1]) for key, reduction in self.reductions.items()}
        return starts, jnp.float64(0), jnp.bool_(True)

    def more(self, known: Any, grads: Any) -> Any:
        """The carried value with these gradients too."""
        numbers, count, finite = known
        for grad in jax.tree.leaves(grads):
            g = LIBRARY.read(-grad if self.maximize else grad)
            numbers = {k: _JOIN[n.op][0](numbers[k], _part(n, g)) for k, n in self.reductions.items()}
            count = count + float(grad.size)
            finite = finite & jnp.all(jnp.isfinite(grad)) if self.finite else finite
        return numbers, count, finite

    def ok(self, known: Any) -> Any:
        """Whether all gradients are finite; None where this is not measured."""
        return known[2] if self.finite else None

    def one(self, known: Any, count: Any) -> Any:
        """1, from which a second backward pass begins. If XLA knew that, it would keep the first pass's gradients.

        It depends on all that is measured, so the second pass cannot begin before. `count` is never negative.
        """
        truth = known[2] if self.finite else next(iter(known[0].values())) > 0
        return jnp.where((jnp.max(count) < 0) & truth, 0, 1)

    def inputs(self, known: Any) -> dict[str, Any]:
        """The inputs of the rule, by name."""
        numbers, count, _ = known
        return {key: _whole(reduction.op, numbers[key], count) for key, reduction in self.reductions.items()}


def _part(reduction: Node, g: Any) -> Any:
    """The part of one gradient in a reduction, in float64; elements are computed in the dtype of `g`."""

    def leaf(value: Node) -> Any:
        return g if value.op is Op.NAME else jnp.asarray(value.arg, g.dtype)

    operand = reduction.args[0]
    x = evaluated([operand], leaf)[operand]
    if reduction.op in (Op.NORM, Op.RMS):
        x = x * x
    if reduction.op is Op.COUNT_NONZERO:
        x = x != 0
    if reduction.op in (Op.MIN, Op.MAX):
        return LIBRARY.reduce(reduction.op, x)
    return LIBRARY.reduce(Op.SUM, x)


def _whole(op: Op, total: Any, count: Any) -> Any:
    mean = total / count if op in (Op.MEAN, Op.RMS) else total
    return jnp.sqrt(mean) if op in (Op.NORM, Op.RMS) else mean


def in_two_passes(rule: Rules) -> tuple[Rules, dict[str, Node]]:
    """The rule with inputs in the place of its reductions over all raw gradients, and input -> reduction.

    A rule that reduces anything else over more than a tensor comes back unchanged, and so does a partition.
    """
    if isinstance(rule, Partition):
        return rule, {}
    (single,) = rules_of(rule)
    keys: dict[Node, str] = {}

    def change(value: Node) -> Node:
        if not _of_gradients(value):
            return value
        return name(keys.setdefault(value, f"measured_{len(keys) + 1}"))

    step = map_nodes(single.step, lambda value: rewrite([value], change)[0])
    skip = None if single.skip is None else rewrite([single.skip], change)[0]
    inputs = dict.fromkeys(keys.values(), "scalar")
    changed = replace(single, step=step, skip=skip, inputs={**single.inputs, **inputs}, function=None)
    if not keys or single.applies_to is not None or changed.analysis.scope in LEVELS[LEVELS.index("tensor") + 1 :]:
        return single, {}
    return changed, {key: value for value, key in keys.items()}


def _of_gradients(value: Node) -> bool:
    """Whether a value is a reduction over all tensors of something of the raw gradient's elements alone."""
    if value.op not in _JOIN or value.arg not in LEVELS[LEVELS.index("tensor") + 1 :]:
        return False
    plain = all(part.op.kind not in (Kind.REDUCE, Kind.MATRIX, Kind.RANDOM, Kind.CALL) for part in walk(value.args))
    return plain and {*names_in(value.args)} <= {"g", "grad"}
