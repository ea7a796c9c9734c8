"""A rule as an optimizer of mlx.optimizers: its state is a tree, so that `mx.compile` and saving see all of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np
from mlx import optimizers
from mlx.optimizers import Optimizer
from mlx.utils import tree_flatten, tree_map

from rulec.compiler.layout import FLOATS, scale_name
from rulec.compiler.routing import Router
from rulec.compiler.weights import PARTS
from rulec.errors import BackendUnsupported, HyperError, RulecError, StateMismatch, TensorError
from rulec.functional.hyper import peak_of, resolved
from rulec.functional.init import check_values, number_states
from rulec.functional.plan import Options, Route, StepPlan
from rulec.functional.quantized import Coded, Unbiased
from rulec.functional.values import Values, dtype_name, leaves_of
from rulec.language.evaluations import check_single
from rulec.language.hyper import AT_START, checked_seed
from rulec.language.library.load import load
from rulec.language.rule import Rule
from rulec.language.sizes import sized
from rulec.language.statistics import Watch
from rulec.mlx.arrays import LIBRARY, Older, is_traced, state_names
from rulec.mlx.entries import Entry, entry_of, hyper_of
from rulec.mlx.statistics import MEASURED, OptimizerStatistics
from rulec.mlx.step import first_values, one_step
from rulec.runtime.statistics import StepStatistics
from rulec.runtime.storage.options import Storage

#: A learning rate: a number, or a function of the number of steps before this one.
Rate = float | Callable[[Any], Any]

#: The entry of the state for numbers of all parameters together.
SHARED = "rulec"


class RuleOptimizer(Optimizer):
    """A rule on trees of MLX's arrays, by the methods of mlx.optimizers.

    Parameters are float32, float16, bfloat16, or float64 on the CPU; states have their parameter's dtype, or
    the `state_dtype` of all or by name: a dtype or one of `rulec.formats`, as in `{"m": "int8", "v": "dynamic8"}`, by
    the rule's names. A state `m` in codes is two arrays of a parameter of 4096 elements or more, `m` (int8 or uint8)
    and `m::scale` (float32); one in `bfloat16_sr` is bfloat16, rounded at random. `seed` is for the rule's random
    numbers and for rounding. `weights` is the kind of parameters of 16 bits in memory (`split`, `split24`, `master`,
    `kahan`, `stochastic`), with its part in a state such as `param::low`. `watch` are statistics to measure in the
    first of every `watch_every` steps: 'norms', a name that the rule declares, names, or expressions by name;
    `statistics()` has them, and the entry `rulec_statistics` of the state holds them. A step is pure and lazy.
    HyperError for a keyword without meaning to the rule, RuleError for a statistic without meaning, TensorError for a
    gradient out of place.
    """

    entry: Entry

    def __init__(
        self, learning_rate: Rate | None = None, *, seed: int = 0, state_dtype: str | Mapping[str, str] | None = None,
        weights: str = "", watch: Watch | None = None, watch_every: int = 1, **keywords: Any,
    ) -> None:  # fmt: skip
        super().__init__()  # type: ignore[no-untyped-call]
        rule, keywords = sized(self.entry.rule, keywords)
        if rule.inputs or rule.wraps:
            what = f"the input {min(rule.inputs)}" if rule.inputs else "a rule to wrap"
            raise HyperError(f"{rule.name} needs {what}, which an optimizer of MLX does not give: compose a rule first")
        check_single(rule, "an optimizer of MLX")
        rules = Router(rule).rules
        dtypes = _dtypes(state_dtype, rules)
        self._storage = Storage(dict(dtypes), weights)
        self._storage.check_weights(())
        self._unbiased = {state for each in rules for state in self._storage.memory_of(each, "float32").unbiased}
        self._rule = rule
        self._statistics = OptimizerStatistics.of(rule.name, rules, watch, watch_every)
        words = self._statistics.words if self._statistics else ()
        self._options = Options(
            seed=checked_seed(seed), state_dtype=dtypes, weights=weights, functions="mlx", watch=words
        )
        self._settings, self._hyper = rule.settings, hyper_of(rule, keywords)
        #: The names that users know the states by, and the states that are numbers.
        parts = [part.name for kind, part in PARTS.items() if kind == weights]
        self._names = state_names(rules, self.entry.state, parts)
        self._older = Older(self._names)
        self._numbers = number_states(rules)
        lr = self._settings.get("lr")
        default = 0.0 if lr is None else lr.default
        if learning_rate is None and not isinstance(default, int | float):
            raise HyperError(f"{rule.name} needs a learning_rate: give a number or a function of the step")
        if lr is not None and isinstance(learning_rate, int | float):
            lr.check("learning_rate", learning_rate, rule.name)
        rate: Any = default if learning_rate is None else learning_rate
        self._maybe_schedule("learning_rate", rate)
        if AT_START in self._settings and AT_START not in self._hyper:
            self._note_start(rate)
        self._plans: dict[Any, StepPlan] = {}

    def _note_start(self, rate: Rate) -> None:
        """Keeps the learning rate at the start in the state, where second rates follow it: of a schedule the peak."""
        start = peak_of(lambda counts: np.array(rate(mx.array(counts)))) if callable(rate) else rate
        if start is not None:
            self.state[AT_START] = mx.array(start, mx.float32)

    def init(self, parameters: Any) -> None:
        """Makes the states of parameters without one; numbers of all parameters together stay as they are.

        Whole numbers, as quantized layers keep, have no state. TensorError for a parameter of another dtype;
        StateMismatch where a number of all parameters is missing beside their states.
        """
        every: dict[str, Any] = dict(tree_flatten(parameters))
        leaves = {name: array for name, array in every.items() if not _is_whole(array)}
        names, arrays = [*leaves], [*leaves.values()]
        for name, parameter in leaves.items():
            _check(name, parameter, parameter)
        plan = self._plan(names, arrays, arrays, Values(self.step))
        values = first_values(plan, arrays, self.step, self._values(plan, self.learning_rate))
        super().init(parameters)
        states = [state for leaf, state in _together(parameters, self.state, "state") if not _is_whole(leaf)]
        shared = self._shared(plan)
        self._check_shared(plan, shared, states)
        values.numbers |= shared
        self._store(plan, values, {place: state for place, state in enumerate(states) if not state})
        if self._statistics:
            self.state.setdefault(MEASURED, self._statistics.before_a_step(plan))

    def init_single(self, parameter: Any, state: dict[str, Any]) -> None:
        """Nothing: `init` makes the states of all parameters at once."""

    def apply_gradients(self, gradients: Any, parameters: Any) -> Any:
        """New parameters, in the structure of the gradients, of which `parameters` may have more. The state is new."""
        pairs = _together(gradients, parameters, "parameters")
        names = [*dict(tree_flatten(gradients))]
        for name, (gradient, parameter) in zip(names, pairs, strict=True):
            _check(name, gradient, parameter)
        if not self._initialized:
            self.init(tree_map(lambda _, p: p, gradients, parameters))
        states = [state for _, state in _together(gradients, self.state, "state")]
        scheduler = self._schedulers.get("learning_rate")
        rate = self.learning_rate if scheduler is None else mx.array(scheduler(self.step))
        arrays = [parameter for _, parameter in pairs]
        plan, values = self._unpacked(names, pairs, states)
        traced = bool(self._statistics) and is_traced(values.count)
        due = self._statistics is None or self._statistics.is_due(traced)
        new_arrays, new, measured = one_step(
            plan if due else plan.plain, arrays, [g for g, _ in pairs], values, self._values(plan, rate), traced
        )
        self._store(plan, new, dict(enumerate(states)))
        if self._statistics:
            if due:
                self.state[MEASURED] = self._statistics.after_a_step(plan, measured, values.count)
            self._statistics.schedule.advance()
        self.state["learning_rate"], self.state["step"] = rate, new.count
        results = iter(new_arrays)
        return tree_map(lambda _: next(results), gradients)

    def statistics(self) -> StepStatistics:
        """The statistics of the last step that measured them: name -> parameter's name -> value.

        They wait for the step to be computed. RulecError where the optimizer was made without `watch`.
        """
        if self._statistics is None:
            raise RulecError(
                f"{self._rule.name} measures no statistics: make it with watch='norms', or with expressions by name"
            )
        return self._statistics.shown(self.state.get(MEASURED))

    # The state as a tree, and as a plan's values

    def _unpacked(
        self, names: Sequence[str], pairs: Sequence[tuple[Any, Any]], states: Sequence[dict[str, Any]]
    ) -> tuple[StepPlan, Values]:
        """The plan of a step from these states, and their values; StateMismatch where they are of another rule."""
        for state in states:
            self._older.rename(state)
        stored = {
            name: {place: state[theirs] for place, state in enumerate(states) if theirs in state}
            for name, theirs in self._names.items()
        }
        values = Values(self.step, {name: arrays for name, arrays in stored.items() if name not in self._numbers})
        scales = {
            name: {
                place: states[place][scale_name(theirs)]
                for place in stored[name]
                if scale_name(theirs) in states[place]
            }
            for name, theirs in self._names.items()
        }
        self._mark(values)
        plan = self._plan(names, [p for _, p in pairs], [g for g, _ in pairs], _in_floats(values, scales))
        _join(plan, values, scales)
        values.numbers |= self._shared(plan)
        for name, level in plan.numbers.items():
            if level == "tensor" and stored[name].keys() >= {*plan.having[name]}:
                values.numbers[name] = mx.stack([stored[name][place] for place in plan.having[name]])
        check_values(plan, values, self._names, self._rule.name)
        return plan, values

    def _shared(self, plan: StepPlan) -> dict[str, Any]:
        """The numbers of all parameters together that the state has, in the shapes of the plan."""
        shared = self.state.get(SHARED, {})
        self._older.rename(shared)
        shapes = {name: () if level == "model" else 1 for name, level in plan.numbers.items() if level != "tensor"}
        return {
            name: shared[self._names[name]].reshape(shape)
            for name, shape in shapes.items()
            if self._names[name] in shared
        }

    def _check_shared(self, plan: StepPlan, shared: Mapping[str, Any], states: Sequence[Any]) -> None:
        """StateMismatch where parameters have states without the number that goes with them."""
        for name, level in plan.numbers.items():
            if level != "tensor" and name not in shared and any(states[place] for place in plan.having[name]):
                raise StateMismatch(
                    f"parameters have a state, and the number {SHARED}.{self._names[name]} of {self._rule.name} that "
                    f"belongs to it is missing: load all of what optimizer.state had"
                )

    def _mark(self, values: Values) -> None:
        """Says of states in bfloat16 that they are rounded at random, where `state_dtype` does."""
        for name in self._unbiased & values.arrays.keys():
            arrays = values.arrays[name]
            arrays.update((k, Unbiased(x)) for k, x in arrays.items() if dtype_name(x) == "bfloat16")

    def _store(self, plan: StepPlan, values: Values, states: Mapping[int, dict[str, Any]]) -> None:
        """Puts values into the states of parameters, by place, and into that of all together."""
        for name, arrays in values.arrays.items():
            theirs = self._names[name]
            for place in states.keys() & arrays.keys():
                array = arrays[place]
                if isinstance(array, Coded):
                    shape = plan.leaves[place].shape
                    codes, scales = array.format.codes_shape(shape), (-1,)
                    states[place][theirs] = array.codes.reshape(codes)
                    states[place][scale_name(theirs)] = array.scales.reshape(scales)
                else:
                    states[place][theirs] = array.values if isinstance(array, Unbiased) else array
        for name, level in plan.numbers.items():
            if level != "tensor":
                self.state.setdefault(SHARED, {})[self._names[name]] = values.numbers[name].reshape(())
                continue
            for i, place in enumerate(plan.having[name]):
                if place in states:
                    states[place][self._names[name]] = values.numbers[name][i]

    def _plan(
        self, names: Sequence[str], parameters: Sequence[Any], gradients: Sequence[Any], values: Values
    ) -> StepPlan:
        leaves = leaves_of(names, parameters, gradients, values.arrays)
        if leaves not in self._plans:
            static: Any = {k: self._hyper.get(k, s.default) for k, s in self._settings.items() if s.static}
            routes = [Route(self._rule, static=static)] * len(leaves)
            self._storage.check_weights(leaf.dtype for leaf in leaves)
            plan = StepPlan(leaves, routes, self._options, 1)
            if plan.own_counts:
                raise BackendUnsupported("mlx", "a skip of some parameters alone", self._rule.name)
            self._plans[leaves] = plan
        return self._plans[leaves]

    def _values(self, plan: StepPlan, rate: Any) -> dict[str, Any]:
        """The value of every hyper-parameter, by name."""
        hyper: dict[str, Any] = {**self._hyper, "lr": rate} if "lr" in self._settings else self._hyper
        if AT_START in self.state:
            hyper[AT_START] = self.state[AT_START]
        with mx.stream(mx.cpu):
            return resolved(self._rule.name, self._settings, hyper, hyper, plan.coarsest(0), LIBRARY)


def _dtypes(state_dtype: Any, rules: Sequence[Rule]) -> tuple[tuple[str, str], ...]:
    """The option `state_dtype` of a plan; TensorError or HyperError for what these rules cannot have."""
    words = state_dtype if isinstance(state_dtype, Mapping) else {} if state_dtype is None else {"": state_dtype}
    if not all(isinstance(word, str) for word in words.values()):
        raise HyperError(
            f"state_dtype={state_dtype!r} is neither a dtype or format by its name, nor names of states with one each"
        )
    Storage(words).check(rules)
    return tuple(sorted(words.items()))


#: State -> place of a leaf -> the scales of its codes.
_Scales = Mapping[str, Mapping[int, Any]]


def _in_floats(values: Values, scales: _Scales) -> Values:
    """The values without states in codes: their formats follow from the optimizer's options."""
    kept = {name: {k: x for k, x in arrays.items() if k not in scales[name]} for name, arrays in values.arrays.items()}
    return Values(values.count, kept)


def _join(plan: StepPlan, values: Values, scales: _Scales) -> None:
    """Puts codes and scales together. StateMismatch for codes without a format, or of another one."""
    formats = {
        (name, place): f for bucket in plan.buckets for name, f in bucket.formats.items() for place in bucket.places
    }
    for name, arrays in values.arrays.items():
        for place in arrays:
            form, scale = formats.get((name, place)), scales[name].get(place)
            codes = form is not None and dtype_name(arrays[place]) == form.code_dtype
            if codes != (scale is not None):
                raise StateMismatch(
                    f"{name} of {plan.leaves[place].name} is not in the format that state_dtype names: give the "
                    f"state_dtype that the state is of"
                )
            if form is not None and codes:
                arrays[place] = Coded(arrays[place], scale, form)


def _together(gradients: Any, tree: Any, what: str) -> list[tuple[Any, Any]]:
    """Each gradient with the entry of a tree in its place; TensorError for a place without one."""
    pairs: list[tuple[Any, Any]] = []
    try:
        tree_map(lambda gradient, other: pairs.append((gradient, other)), gradients, tree)
    except (KeyError, IndexError) as error:
        raise TensorError(
            f"the gradients have {error.args[0]!r}, and the {what} nothing there: give gradients of the parameters "
            "that the optimizer was made ready for, by init"
        ) from None
    return pairs


def _is_whole(array: Any) -> bool:
    """Whether an array is of whole numbers or of truth values, which are not trained."""
    return isinstance(array, mx.array) and (mx.issubdtype(array.dtype, mx.integer) or array.dtype == mx.bool_)


def _check(name: str, gradient: Any, parameter: Any) -> None:
    for what, array in (("parameter", parameter), ("gradient", gradient)):
        if not isinstance(array, mx.array) or dtype_name(array) not in FLOATS:
            kind = dtype_name(array) if isinstance(array, mx.array) else type(array).__name__
            raise TensorError(f"the {what} {name} is of {kind}, and only {', '.join(FLOATS)} can be updated: cast it")
    if gradient.shape != parameter.shape:
        raise TensorError(f"the gradient of {name} has shape {gradient.shape}, its parameter {parameter.shape}")


class MlxOptimizer(RuleOptimizer):
    """A rule under a name, the keywords and the defaults of mlx.optimizers."""

    signature: ClassVar[inspect.Signature]

    def __init__(
        self, *values: Any, seed: int = 0, state_dtype: str | Mapping[str, str] | None = None, weights: str = "",
        watch: Watch | None = None, watch_every: int = 1, **keywords: Any,
    ) -> None:  # fmt: skip
        name = type(self).__name__
        try:
            arguments = self.signature.bind(*values, **keywords)
        except TypeError as error:
            raise HyperError(f"{error}: rulec.mlx.{name} takes {', '.join(self.signature.parameters)}") from None
        arguments.apply_defaults()
        learning_rate = arguments.arguments.pop("learning_rate")
        self.entry, hyper = entry_of(name, arguments.arguments)
        options: dict[str, Any] = {"state_dtype": state_dtype, "weights": weights}
        super().__init__(learning_rate, seed=seed, watch=watch, watch_every=watch_every, **options, **hyper)


def mlx_optimizer(name: str) -> type[RuleOptimizer]:
    """The class with the name and the signature of a class of mlx.optimizers."""
    signature = inspect.signature(getattr(optimizers, name))
    body = {"signature": signature, "__signature__": signature, "__doc__": f"{name} as mlx.optimizers has it."}
    return type(name, (MlxOptimizer,), body | {"__module__": "rulec.mlx"})


def optimizer(rule: Rule | str | Path) -> type[RuleOptimizer]:
    """The optimizer class of a rule, a library name (`"lion"`) or the path of a rule file.

    Its keywords are `learning_rate` and the rule's other hyper-parameters; `beta1`, `beta2`, ... are one tuple,
    `betas`. It computes the library's rule, even with a class of the same name in mlx.optimizers.
    """
    loaded = rule if isinstance(rule, Rule) else load(rule)
    body = {"entry": Entry(loaded), "__doc__": loaded.summary, "__module__": "rulec.mlx"}
    return type(loaded.name, (RuleOptimizer,), body)
