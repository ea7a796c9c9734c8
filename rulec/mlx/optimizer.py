"""A rule as an optimizer of mlx.optimizers: its state is a tree, so that `mx.compile` and saving see all of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import mlx.core as mx
from mlx.optimizers import Optimizer
from mlx.utils import tree_flatten, tree_map

from rulec.compiler.layout import ITEM_SIZE
from rulec.compiler.routing import Router
from rulec.errors import HyperError, StateMismatch, TensorError
from rulec.language.hyper import number_of
from rulec.language.library import load
from rulec.language.node import Node, names_in
from rulec.language.rule import Rule
from rulec.language.seed import checked_seed
from rulec.mlx.arrays import number
from rulec.mlx.entries import KEYWORDS, Entry, entry_of, hyper_of, plain
from rulec.mlx.step import LeafPlan, LeafStep, dtype_name, run
from rulec.runtime.engine import EPS
from rulec.runtime.joins import Processes

#: A learning rate: a number, or a function of the number of steps before this one.
Rate = float | Callable[[Any], Any]

#: Where the state keeps what is one number of all parameters.
SHARED = "rulec"


class RuleOptimizer(Optimizer):
    """A rule on trees of MLX's arrays, by the methods of mlx.optimizers.

    Parameters are float32, float16, bfloat16, or float64 on the CPU; states have their parameter's dtype. A step is
    pure and lazy. HyperError for keywords that the rule does not have, TensorError for gradients that do not fit.
    """

    entry: ClassVar[Entry]

    def __init__(self, learning_rate: Rate | None = None, *, seed: int = 0, **keywords: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._prepare(self.entry, learning_rate, keywords, seed)

    def _prepare(self, entry: Entry, learning_rate: Rate | None, keywords: Mapping[str, Any], seed: int) -> None:
        rule = entry.rule
        if rule.inputs or rule.wraps:
            what = f"the input {min(rule.inputs)}" if rule.inputs else "a rule to wrap"
            raise HyperError(f"{rule.name} needs {what}, which an optimizer of MLX does not give: compose a rule first")
        self._entry, self._router, self._seed = entry, Router(rule), checked_seed(seed)
        self._hyper = hyper_of(rule, keywords)
        lr = rule.settings.get("lr")
        default = 0.0 if lr is None else lr.default
        if learning_rate is None and not isinstance(default, int | float):
            raise HyperError(f"{rule.name} needs a learning_rate: give a number or a function of the step")
        if lr is not None and isinstance(learning_rate, int | float):
            lr.check("learning_rate", learning_rate, rule.name)
        rate: Any = default if learning_rate is None else learning_rate
        self._maybe_schedule("learning_rate", rate)
        self._plans: dict[Any, LeafPlan] = {}

    def init(self, parameters: Any) -> None:
        """Makes the states of these parameters; those that are there stay."""
        super().init(parameters)
        plans = [self._plan(name, p, p, {}) for name, p in _flat(parameters)]
        shared = {name for plan in plans for name, is_shared in plan.numbers.items() if is_shared}
        if shared and SHARED not in self.state:
            hyper = self._values("float32")
            with mx.stream(mx.cpu):
                made = [plan.first(p, hyper) for plan, (_, p) in zip(plans, _flat(parameters), strict=True)]
            self.state[SHARED] = {name: next(m[name] for m in made if name in m) for name in sorted(shared)}

    def init_single(self, parameter: Any, state: dict[str, Any]) -> None:
        """Makes the states of one parameter."""
        plan = self._plan("a parameter", parameter, parameter, {})
        with mx.stream(mx.cpu):
            made = plan.first(parameter, self._values(dtype_name(parameter)))
        state |= {self._theirs(name): array for name, array in made.items() if not plan.numbers.get(name, False)}

    def apply_gradients(self, gradients: Any, parameters: Any) -> Any:
        """New parameters, in the structure of the gradients, of which `parameters` may have more. The state is new."""
        pairs = _together(gradients, parameters, "parameters")
        names = [name for name, _ in _flat(gradients)]
        for name, (gradient, parameter) in zip(names, pairs, strict=True):
            _check(name, gradient, parameter)
        if not self._initialized:
            self.init(tree_map(lambda _, p: p, gradients, parameters))
        states = [state for _, state in _together(gradients, self.state, "state")]
        scheduler = self._schedulers.get("learning_rate")
        rate = self.learning_rate if scheduler is None else _rate(scheduler(self.step))
        steps = self._steps(names, pairs, states, rate)
        run(steps, self._entry.rule.name)
        self._take_over(steps, states)
        self.state["learning_rate"], self.state["step"] = rate, self.step + 1
        results = iter(steps)
        return tree_map(lambda _: next(results).result, gradients)

    def _take_over(self, steps: Sequence[LeafStep], states: Sequence[dict[str, Any]]) -> None:
        for step, state in zip(steps, states, strict=True):
            for spec in step.plan.specs:
                state[self._theirs(spec.name)] = step.arrays[spec.name]
            for name, is_shared in step.plan.numbers.items():
                (self.state[SHARED] if is_shared else state)[name if is_shared else self._theirs(name)] = step.arrays[
                    name
                ]

    def _steps(
        self, names: Sequence[str], pairs: Sequence[tuple[Any, Any]], states: Sequence[dict[str, Any]], rate: Any
    ) -> list[LeafStep]:
        owner, tables = Processes(), dict[Any, Any]()
        device = mx.default_device()
        steps: list[LeafStep] = []
        coarsest = max((dtype_name(p) for _, p in pairs), key=EPS.__getitem__, default="float32")
        with mx.stream(mx.cpu):
            t, hyper = number(self.step) + 1, {**self._values(coarsest), "lr": rate}
        for place, (name, (g, p), state) in enumerate(zip(names, pairs, states, strict=True)):
            own = {ours: state[self._theirs(ours)] for ours in self._router.states if self._theirs(ours) in state}
            plan = self._plan(name, p, g, own)
            own |= {ours: self.state[SHARED][ours] for ours, is_shared in plan.numbers.items() if is_shared}
            self._check_state(name, plan, own, p)
            with mx.stream(mx.cpu):
                arrays = {"p": p, "g": g, **own}
                steps.append(LeafStep(plan, place, owner, device, arrays, t, hyper, self._seed, tables))
        return steps

    def _check_state(self, name: str, plan: LeafPlan, own: Mapping[str, Any], parameter: Any) -> None:
        for spec in plan.specs:
            shape = tuple(spec.shape(plan.view, plan.static, plan.facts))
            if spec.name not in own or tuple(own[spec.name].shape) != shape:
                found = "is missing" if spec.name not in own else f"has shape {own[spec.name].shape}, not {shape}"
                raise StateMismatch(
                    f"the state {self._theirs(spec.name)} of {name} {found}: give the state of the same optimizer for "
                    "the same parameters"
                )

    def _plan(self, name: str, parameter: Any, gradient: Any, states: Mapping[str, Any]) -> LeafPlan:
        _check(name, gradient, parameter)
        rule = self._router.choose(tuple(parameter.shape), (), name)
        dtypes = dtype_name(parameter), dtype_name(gradient)
        stored = tuple(sorted((ours, dtype_name(array)) for ours, array in states.items() if array.ndim))
        key = id(rule), tuple(parameter.shape), dtypes, stored
        if key not in self._plans:
            static = {k: float(v) for k, v in self._values(dtypes[0]).items() if isinstance(v, int | float)}
            self._plans[key] = LeafPlan(rule, tuple(parameter.shape), dtypes, dict(stored), static)
        return self._plans[key]

    def _values(self, dtype: str) -> dict[str, Any]:
        """Every hyper-parameter: given, or by default."""
        values: dict[str, Any] = {"machine_eps": EPS[dtype], **self._hyper, "lr": self.learning_rate}
        pending = {k: s.default for k, s in self._entry.rule.settings.items() if k not in values}
        while pending:
            ready = [k for k, v in pending.items() if not isinstance(v, Node) or {*names_in([v])} <= values.keys()]
            for name in ready:
                default = pending.pop(name)
                if default is None:
                    raise HyperError(f"{name} of {self._entry.rule.name} has no default: give it a value")
                values[name] = self._default(default, values) if isinstance(default, Node) else default
        return values

    @staticmethod
    def _default(default: Node, values: Mapping[str, Any]) -> Any:
        named = {name: values[name] for name in names_in([default])}
        if len(named) == 1 and str(default.arg) in named:
            return named[str(default.arg)]
        return number_of(default, {name: float(value) for name, value in named.items()})

    def _theirs(self, state: str) -> str:
        return self._entry.state.get(state, state)


def _rate(value: Any) -> Any:
    return value if isinstance(value, mx.array) else mx.array(value)


def _flat(tree: Any) -> list[tuple[str, Any]]:
    found: Any = tree_flatten(tree)
    return list(found)


def _together(gradients: Any, tree: Any, what: str) -> list[tuple[Any, Any]]:
    """Each gradient with what a tree has in its place; TensorError where it has nothing there."""
    pairs: list[tuple[Any, Any]] = []
    try:
        tree_map(lambda gradient, other: pairs.append((gradient, other)), gradients, tree)
    except (KeyError, IndexError) as error:
        raise TensorError(
            f"the gradients have {error.args[0]!r}, and the {what} nothing there: give gradients of the parameters "
            "that the optimizer was made ready for, by init"
        ) from None
    return pairs


def _check(name: str, gradient: Any, parameter: Any) -> None:
    for what, array in (("parameter", parameter), ("gradient", gradient)):
        if not isinstance(array, mx.array) or dtype_name(array) not in ITEM_SIZE:
            kind = dtype_name(array) if isinstance(array, mx.array) else type(array).__name__
            raise TensorError(
                f"the {what} {name} is of {kind}, and only {', '.join(ITEM_SIZE)} can be updated: cast it"
            )
    if gradient.shape != parameter.shape:
        raise TensorError(f"the gradient of {name} has shape {gradient.shape}, its parameter {parameter.shape}")


class MlxOptimizer(RuleOptimizer):
    """A rule under a name, the keywords and the defaults of mlx.optimizers."""

    own: ClassVar[str]

    def __init__(self, learning_rate: Rate, *values: Any, **keywords: Any) -> None:
        Optimizer.__init__(self)  # type: ignore[no-untyped-call]
        known = KEYWORDS[self.own]
        if len(values) > len(known):
            raise HyperError(f"{self.own} takes at most {len(known)} values after learning_rate, not {len(values)}")
        placed = dict(zip(known, values, strict=False))
        twice = [name for name in keywords if name in placed]
        unknown = [name for name in keywords if name not in known]
        if unknown or twice:
            what = f"has no keyword {unknown[0]!r}: it has {', '.join(known)}" if unknown else f"has {twice[0]} twice"
            raise HyperError(f"{self.own} {what}")
        entry, given = entry_of(self.own, {**known, **placed, **keywords})
        self._prepare(entry, learning_rate, given, 0)


def optimizer(rule: Rule | str | Path) -> type[RuleOptimizer]:
    """The optimizer class of a rule, a library name (`"lion"`) or the path of a rule file.

    Its keywords are `learning_rate` and the rule's other hyper-parameters; `beta1`, `beta2`, ... are one tuple,
    `betas`. What it computes is the library's rule, also where mlx.optimizers has another of that name.
    """
    loaded = rule if isinstance(rule, Rule) else load(rule)
    return type(loaded.name, (RuleOptimizer,), {"entry": plain(loaded), "__doc__": loaded.summary})
