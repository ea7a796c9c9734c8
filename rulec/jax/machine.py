"""A recipe's functions on trees: the first state, a step that gives updates, and one that gives new parameters.

Each is traced once for a tree's structure, shapes and dtypes. Numbers are passed in float64 and traced: neither another
learning rate nor another step count traces anything again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from rulec.compiler.routing import Router
from rulec.errors import TensorError
from rulec.jax.leaves import Leaf, Tree, flat, like
from rulec.jax.plan import Assignment, Options, StepPlan
from rulec.jax.recipe import Recipe
from rulec.jax.state import Fields, fields_of
from rulec.jax.step import Values, first_values, one_step
from rulec.language.rule import Rule
from rulec.runtime.engine import EPS

#: Plans are kept for this many sets of shapes of a recipe.
_PLANS = 64


@dataclass(frozen=True)
class Settings:
    """What beside the recipe decides what is compiled: options, and what fields of the state are called."""

    options: Options
    renamed: tuple[tuple[str, str], ...] = ()
    #: Whether users allow JAX 64 bits: their own functions are called so.
    wide: bool = False


class Machine:
    """The functions of one recipe."""

    def __init__(self, recipe: Recipe, settings: Settings) -> None:
        self.recipe, self.settings = recipe, settings
        self.rules = _rules(recipe)
        self.fields: Fields = fields_of(self.rules, dict(settings.renamed))
        self.inputs = {name: kind for rule in self.rules for name, kind in rule.inputs.items()}
        self._plan = functools.lru_cache(maxsize=_PLANS)(self._planned)
        self.init = jax.jit(self._init, inline=True)
        self.update = jax.jit(self._update, inline=True)
        #: The same as `_step`, with parameters and state donated.
        self.step = jax.jit(self._step, donate_argnums=(0, 2))
        self.step_keeping = jax.jit(self._step, inline=True)

    # Plans

    def _planned(self, leaves: tuple[Leaf, ...], update: bool) -> StepPlan:
        groups = self.recipe.places(leaves)
        assigned = [self._assigned(leaf, group) for leaf, group in zip(leaves, groups, strict=True)]
        options = replace(self.settings.options, update=update)
        return StepPlan(leaves, assigned, options, len(self.recipe.groups))

    def _assigned(self, leaf: Leaf, group: int | None) -> Assignment | None:
        if group is None:
            return None
        own = self.recipe.groups[group]
        tags = {*own.tags, *self.recipe.tags.get(leaf.name, ())}
        return Assignment(own.rule, group, tags, own.static())

    def plan_of(self, params: Tree, grads: Tree | None, values: Values | None, update: bool) -> StepPlan:
        """The plan for these leaves; `values` says what dtypes their states have already."""
        return self._plan(tuple(_leaves(params, grads, values)), update)

    # The functions that are traced

    def _init(self, params: Any, numbers: Any) -> Any:
        tree = flat(params, "the parameter")
        plan = self.plan_of(tree, None, None, False)
        hyper = self._hyper(numbers, jnp.zeros((), jnp.int32), plan)
        number_dtype = "float64" if self.settings.wide else "float32"
        return self.fields.packed(first_values(plan, tree.arrays, hyper, number_dtype), tree)

    def _update(self, grads: Any, state: Any, params: Any, numbers: Any, inputs: Any) -> Any:
        model = flat(grads if params is None else params, "the gradient of" if params is None else "the parameter")
        tree = model if params is None else like(grads, model, "the gradient of")
        values = self.fields.unpacked(state, model, self.recipe.title)
        plan = self.plan_of(model, tree, values, True)
        if params is None and plan.reads_parameters:
            raise TensorError(f"{self.recipe.title} reads the parameters: call update(grads, state, params)")
        results, new = self._run(plan, model, tree, values, numbers, inputs)
        return tree.structure.unflatten(results), self.fields.packed(new, model)

    def _step(self, params: Any, grads: Any, state: Any, numbers: Any, inputs: Any) -> Any:
        model = flat(params, "the parameter")
        tree = like(grads, model, "the gradient of")
        values = self.fields.unpacked(state, model, self.recipe.title)
        plan = self.plan_of(model, tree, values, False)
        results, new = self._run(plan, model, tree, values, numbers, inputs)
        return model.structure.unflatten(results), self.fields.packed(new, model)

    def _run(
        self, plan: StepPlan, params: Tree, grads: Tree, values: Values, numbers: Any, inputs: Any
    ) -> tuple[Sequence[Any], Values]:
        hyper = self._hyper(numbers, values.count, plan)
        given = {name: self._input(name, value, params) for name, value in inputs.items()}
        return one_step(plan, params.arrays, grads.arrays, values, hyper, given)

    def _input(self, name: str, value: Any, params: Tree) -> Any:
        return value if self.inputs[name] != "like p" else list(like(value, params, f"the input {name} of").arrays)

    def _hyper(self, numbers: Any, count: Any, plan: StepPlan) -> list[Mapping[str, Any]]:
        # A function of the step is the user's own, and computes as it would elsewhere.
        steps = jnp.max(count) if jnp.ndim(count) else count
        with jax.enable_x64(self.settings.wide):
            found = [
                {name: given(steps) for name, given in group.hyper.items() if callable(given)}
                for group in self.recipe.groups
            ]
        return [
            group.resolved({**own, **worked_out}, _coarsest(plan, index))
            for index, (group, own, worked_out) in enumerate(zip(self.recipe.groups, numbers, found, strict=True))
        ]


def _coarsest(plan: StepPlan, group: int) -> float:
    """The machine epsilon of a group, which is that of the coarsest dtype: it has one value for all its leaves."""
    found = [
        EPS[leaf.dtype] for leaf, own in zip(plan.leaves, plan.assigned, strict=True) if own and own.group == group
    ]
    return max(found, default=EPS["float32"])


def _rules(recipe: Recipe) -> list[Rule]:
    """All rules that leaves may go to, each once."""
    rules = [rule for group in recipe.groups for rule in Router(group.rule).rules]
    return list({id(rule): rule for rule in rules}.values())


def _leaves(params: Tree, grads: Tree | None, values: Values | None) -> list[Leaf]:
    states: Mapping[str, Mapping[int, Any]] = {} if values is None else values.arrays
    return [
        Leaf(
            name, tuple(array.shape), str(array.dtype), str(array.dtype if grads is None else grads.arrays[i].dtype),
            tuple((state, str(found[i].dtype)) for state, found in states.items() if i in found),
        )
        for i, (name, array) in enumerate(zip(params.names, params.arrays, strict=True))
    ]  # fmt: skip


_machines: dict[Any, Machine] = {}


def machine(recipe: Recipe, settings: Settings) -> Machine:
    """The machine of a recipe: the same for recipes that compile to the same."""
    key = recipe.key, settings
    if key not in _machines:
        if len(_machines) >= 512:
            del _machines[next(iter(_machines))]
        _machines[key] = Machine(recipe, settings)
    return _machines[key]


def call(function: Callable[..., Any], *operands: Any) -> Any:
    """Calls one of a machine's functions, with JAX allowed 64 bits for numbers."""
    with jax.enable_x64(True):
        return function(*operands)


def is_wide() -> bool:
    """Whether users allow JAX 64 bits."""
    return bool(jax.config.read("jax_enable_x64"))  # type: ignore[no-untyped-call]
