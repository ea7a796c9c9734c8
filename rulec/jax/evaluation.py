"""Where the model is to be evaluated, for rules that say so: elsewhere than where it is trained, at an average."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rulec.compiler.routing import Router
from rulec.errors import RuleError
from rulec.jax.leaves import Leaf
from rulec.jax.machine import Machine, Settings, call, is_wide, machine_of, numbered
from rulec.jax.plan import Assignment, StepPlan
from rulec.jax.recipe import Given, Recipe, Rules, recipe
from rulec.jax.step import one_step
from rulec.jax.transform import options
from rulec.jax.values import Values
from rulec.language.evaluation import to_evaluation
from rulec.language.rule import Rule


def eval_params(
    rule: Rules, params: Any, state: Any, *, tags: Mapping[str, Collection[str]] | None = None, **hyper: Given
) -> Any:
    """The parameters at which the model is to be evaluated, of the shapes and dtypes of those that are trained.

    `state` is what the last `rulec.jax.step`, or `update` of `rulec.jax.transform`, returned; `rule`, `tags` and
    hyper-parameters are what these were given, functions of the count with their values in the last step. Nothing is
    changed or donated: training goes on with `params` and `state`.

    RuleError for a rule that is evaluated where it is trained; TensorError or StateMismatch as in a step.
    """
    count = getattr(state, "count", None)
    # The last step was given the number of those before it.
    own, numbers = numbered(recipe(rule, hyper, tags), None if count is None else jnp.maximum(count, 1) - 1)
    found = machine_of(Evaluation, own, Settings(options(None, False, 0), (), is_wide()))
    return call(found.evaluate, params, state, numbers)


class Evaluation(Machine):
    """The way from where the parameters of a recipe are trained to where they are evaluated."""

    def __init__(self, recipe: Recipe, settings: Settings) -> None:
        super().__init__(recipe, settings)
        if all(rule.evaluate is None for rule in self.rules):
            raise RuleError(f"{recipe.title} is evaluated where it is trained: it has no evaluate")
        self._to_evaluation = functools.cache(to_evaluation)
        self.evaluate = jax.jit(self._evaluate, inline=True)

    def _evaluate(self, params: Any, state: Any, numbers: Any) -> Any:
        tree = self._flat(params, "the parameter")
        trained, values = self._begun(state, tree, None, False)
        plan = self._moving(trained)
        hyper = self._hyper(numbers, plan)
        found, _ = one_step(plan, tree.arrays, tree.arrays, _values_of(plan, trained, values), hyper, {})
        return tree.of(found)

    def _moving(self, trained: StepPlan) -> StepPlan:
        """The plan of the one step to the evaluation point; it leaves alone what is evaluated where it is trained."""
        assigned = [self._moved(leaf, own) for leaf, own in zip(trained.leaves, trained.assigned, strict=True)]
        return StepPlan(trained.leaves, assigned, trained.options, trained.groups)

    def _moved(self, leaf: Leaf, own: Assignment | None) -> Assignment | None:
        if own is None:
            return None
        way: Rule | None = self._to_evaluation(Router(own.rule).choose(leaf.shape, own.tags, leaf.name))
        return None if way is None else replace(own, rule=way)


def _values_of(plan: StepPlan, trained: StepPlan, values: Values) -> Values:
    """The values of the leaves that move."""
    numbers = dict(values.numbers)
    for name, level in plan.numbers.items():
        if level == "tensor":
            numbers[name] = numbers[name][np.searchsorted(trained.having[name], plan.having[name])]
    return Values(values.count, values.arrays, numbers)
