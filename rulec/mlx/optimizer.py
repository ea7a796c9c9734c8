"""A rule as an optimizer of mlx.optimizers: its state is a tree, so that `mx.compile` and saving see all of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.optimizers import Optimizer
from mlx.utils import tree_flatten, tree_map

from rulec.compiler.layout import scale_name
from rulec.compiler.routing import Router
from rulec.compiler.weights import PARTS
from rulec.errors import BackendUnsupported, HyperError, RulecError, StateMismatch
from rulec.functional.hyper import peak_of, resolved
from rulec.functional.init import check_values, number_states
from rulec.functional.keyed import by_key, by_name, of_keys
from rulec.functional.optimizer import check_rule, first_rate
from rulec.functional.plan import Options, Route, StepPlan
from rulec.functional.quantized import Coded, Unbiased
from rulec.functional.values import Values, dtype_name, leaves_of
from rulec.language.hyper import AT_START, checked_seed
from rulec.language.rule import Rule
from rulec.language.sizes import sized
from rulec.language.statistics import Watch
from rulec.mlx.arrays import LIBRARY, Older, is_traced, state_names
from rulec.mlx.entries import Entry, hyper_of
from rulec.mlx.statistics import MEASURED, OptimizerStatistics
from rulec.mlx.step import first_values, one_step
from rulec.mlx.trees import check, is_moved, is_trained, together, trained_leaves, without_none
from rulec.runtime.keyed import Key
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
        check_rule(rule, "MLX")
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
        rate = first_rate(rule, learning_rate, "a number or a function of the step")
        if rate is not None:
            self._maybe_schedule("learning_rate", rate)
        if AT_START in self._settings and AT_START not in self._hyper:
            self._note_start(rate)
        self._plans: dict[Any, StepPlan] = {}

    def _note_start(self, rate: Rate) -> None:
        """Keeps the learning rate at the start in the state, where second rates follow it: of a schedule the peak."""

        def value_at(counts: Any) -> Any:
            return np.array(rate(mx.array(counts)))  # type: ignore[operator]

        start = peak_of(value_at, value_at) if callable(rate) else rate
        if start is not None:
            self.state[AT_START] = mx.array(start, mx.float32)

    def init(self, parameters: Any) -> None:
        """Makes the states of parameters without one; numbers of all parameters together stay as they are.

        None, and whole numbers, as quantized layers keep, have no state. TensorError for a parameter of another dtype;
        StateMismatch where a number of all parameters is missing beside their states.
        """
        plan, values = self.before_a_step(trained_leaves(parameters))
        super().init(parameters)
        states = self.states_of(parameters)
        shared = self._shared()
        self._check_shared(plan, shared, states)
        fresh = {place: state for place, state in enumerate(states) if not state}
        self._store(plan, {**by_key(plan, values), **shared}, fresh)
        if self._statistics:
            self.state.setdefault(MEASURED, self._statistics.before_a_step(plan))

    def before_a_step(self, leaves: Mapping[str, Any]) -> tuple[StepPlan, Values]:
        """The plan of a step of these arrays by path, and the values of their states before the first one."""
        names, arrays = [*leaves], [*leaves.values()]
        plan = self._plan(names, arrays, arrays, {})
        return plan, first_values(plan, arrays, self.step, self._values(plan, self._rate()))

    def states_of(self, parameters: Any) -> list[dict[str, Any]]:
        """The states of the trained leaves of a tree; TensorError for a leaf without a place in `state`."""
        return [state for leaf, state in together(without_none(parameters), self.state, "state") if is_trained(leaf)]

    def init_single(self, parameter: Any, state: dict[str, Any]) -> None:
        """Nothing: `init` makes the states of all parameters at once."""

    def current(self, parameters: Any) -> tuple[StepPlan, Values]:
        """The plan of a step of the trained leaves of a tree, and the values of their states as they are now.

        A leaf without a state has that of `init`; `state` stays as it is. Errors are those of `init` and of a step.
        """
        before, begun = self._state, self._initialized
        self._state = tree_map(lambda entry: entry, before)
        try:
            self.init(parameters)
            leaves = trained_leaves(parameters)
            return self._unpacked([*leaves], [(x, x) for x in leaves.values()], self.states_of(parameters))
        finally:
            self._state, self._initialized = before, begun

    def begin_with(self, parameters: Any, plan: StepPlan, values: Values) -> None:
        """Puts values of a plan in the place of all states, in the same `state`, with the number of steps."""
        for name in [name for name, entry in self.state.items() if not isinstance(entry, mx.array)]:
            del self.state[name]
        self.init(parameters)
        self._store(plan, by_key(plan, values), dict(enumerate(self.states_of(parameters))))
        self.state["step"] = values.count

    @property
    def static(self) -> dict[str, Any]:
        """The values of the static hyper-parameters."""
        hyper: dict[str, Any] = self._hyper
        return {name: hyper.get(name, setting.default) for name, setting in self._settings.items() if setting.static}

    @property
    def numbers(self) -> dict[str, float]:
        """The hyper-parameters that are numbers now, the learning rate among them."""
        known: dict[str, Any] = {name: self._hyper.get(name, s.default) for name, s in self._settings.items()}
        known |= {"lr": self.learning_rate.item()} if "lr" in known else {}
        return {name: float(value) for name, value in known.items() if isinstance(value, int | float)}

    def apply_gradients(self, gradients: Any, parameters: Any) -> Any:
        """New parameters, in the structure of the gradients, of which `parameters` may have more. The state is new.

        A parameter of whole numbers stays as it is, and so does a parameter with the gradient None.
        """
        every = zip(dict(tree_flatten(gradients)), together(gradients, parameters, "parameters"), strict=True)
        moved = {name: pair for name, pair in every if is_moved(*pair)}
        for name, pair in moved.items():
            check(name, *pair)
        names, pairs = [*moved], [*moved.values()]
        trained = tree_map(lambda g, p: p if is_moved(g, p) else None, gradients, parameters)
        if not self._initialized:
            self.init(trained)
        states = self.states_of(trained)
        rate = self._rate()
        arrays = [parameter for _, parameter in pairs]
        plan, values = self._unpacked(names, pairs, states)
        traced = bool(self._statistics) and is_traced(values.count)
        due = self._statistics is None or self._statistics.is_due(traced)
        new_arrays, new, measured = one_step(
            plan if due else plan.plain, arrays, [g for g, _ in pairs], values, self._values(plan, rate), traced
        )
        self._store(plan, by_key(plan, new), dict(enumerate(states)))
        if self._statistics:
            if due:
                self.state[MEASURED] = self._statistics.after_a_step(plan, measured, values.count)
            self._statistics.schedule.advance()
        self.state |= {"step": new.count} if rate is None else {"step": new.count, "learning_rate": rate}
        results = iter(new_arrays)
        return tree_map(lambda g, p: next(results) if is_moved(g, p) else p, gradients, parameters)

    def _rate(self) -> Any:
        """The learning rate of the next step; None where the rule has none and none was given."""
        scheduler = self._schedulers.get("learning_rate")
        return self.state.get("learning_rate") if scheduler is None else mx.array(scheduler(self.step))

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
        stored: dict[Key, Any] = {}
        scales: dict[Key, Any] = {}
        for name, theirs in self._names.items():
            for place, state in enumerate(states):
                if theirs in state:
                    stored[name, place] = self._marked(name, self._spread(name, state[theirs]))
                if scale_name(theirs) in state:
                    scales[name, place] = state[scale_name(theirs)]
        # Formats of states in codes follow from the optimizer's options.
        floats = {key: array for key, array in stored.items() if key not in scales}
        arrays = by_name(floats, [name for name in self._names if name not in self._numbers])
        plan = self._plan(names, [p for _, p in pairs], [g for g, _ in pairs], arrays)
        values = of_keys(plan, self.step, {**_joined(plan, stored, scales), **self._shared()}, LIBRARY)
        check_values(plan, values, self._names, self._rule.name)
        return plan, values

    def _spread(self, name: str, array: Any) -> Any:
        """A state of MLX with the axes that it has here."""
        return mx.expand_dims(array, self.entry.missing[name]) if name in self.entry.missing else array

    def _shared(self) -> dict[Key, Any]:
        """The numbers of all parameters together that the state has."""
        shared = self.state.get(SHARED, {})
        self._older.rename(shared)
        return {(name, None): shared[theirs].reshape(1) for name, theirs in self._names.items() if theirs in shared}

    def _check_shared(self, plan: StepPlan, shared: Mapping[Key, Any], states: Sequence[Any]) -> None:
        """StateMismatch where parameters have states without the number that goes with them."""
        for name, level in plan.numbers.items():
            if level != "tensor" and (name, None) not in shared and any(states[place] for place in plan.having[name]):
                raise StateMismatch(
                    f"parameters have a state, and the number {SHARED}.{self._names[name]} of {self._rule.name} that "
                    f"belongs to it is missing: load all of what optimizer.state had"
                )

    def _marked(self, name: str, array: Any) -> Any:
        """The array; if `state_dtype` says so, a state in bfloat16 is marked as rounded at random."""
        return Unbiased(array) if name in self._unbiased and dtype_name(array) == "bfloat16" else array

    def _store(self, plan: StepPlan, values: Mapping[Key, Any], states: Mapping[int, dict[str, Any]]) -> None:
        """Puts values into the states of parameters, by place, and into that of all together."""
        for (name, place), value in values.items():
            theirs = self._names[name]
            if place is None:
                self.state.setdefault(SHARED, {})[theirs] = value.reshape(())
            elif place not in states:
                continue
            elif isinstance(value, Coded):
                states[place][theirs] = value.codes.reshape(value.format.codes_shape(plan.leaves[place].shape))
                states[place][scale_name(theirs)] = value.scales.reshape(-1)
            else:
                array, axis = value.values if isinstance(value, Unbiased) else value, self.entry.missing.get(name)
                states[place][theirs] = array if axis is None else mx.squeeze(array, axis)

    def _plan(
        self, names: Sequence[str], parameters: Sequence[Any], gradients: Sequence[Any],
        states: Mapping[str, Mapping[int, Any]],
    ) -> StepPlan:  # fmt: skip
        leaves = leaves_of(names, parameters, gradients, states)
        if leaves not in self._plans:
            routes = [Route(self._rule, static=self.static)] * len(leaves)
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


def _joined(plan: StepPlan, states: Mapping[Key, Any], scales: Mapping[Key, Any]) -> dict[Key, Any]:
    """The states, with codes and scales together. StateMismatch for codes without a format, or of another one."""
    formats: dict[Key, Any] = {
        (name, place): form for bucket in plan.buckets for name, form in bucket.formats.items()
        for place in bucket.places
    }  # fmt: skip
    joined: dict[Key, Any] = {}
    for (name, place), array in states.items():
        form, scale = formats.get((name, place)), scales.get((name, place))
        codes = form is not None and dtype_name(array) == form.code_dtype
        if codes != (scale is not None):
            raise StateMismatch(
                f"{name} of {plan.leaves[place or 0].name} is not in the format that state_dtype names: give the "
                f"state_dtype that the state is of"
            )
        joined[name, place] = Coded(array, scale, form) if form is not None and codes else array
    return joined
