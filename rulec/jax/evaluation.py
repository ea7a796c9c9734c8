"""The parameters at which a model is evaluated, by rules with an `evaluate`: an average of the trained ones, mostly."""

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
from rulec.jax.machine import Machine, Renamed, call, machine_of, numbered
from rulec.jax.recipe import Given, Recipe, Rules, recipe
from rulec.jax.step import one_step
from rulec.jax.transform import options
from rulec.language.evaluation import to_evaluation
from rulec.language.rule import Rule
from rulec.pure.plan import Options, Route, StepPlan
from rulec.pure.values import Leaf, Values


def eval_params(
    rule: Rules, params: Any, state: Any, *, tags: Mapping[str, Collection[str]] | None = None, **hyper: Given
) -> Any:
    """The parameters at which the model is evaluated, in the shapes and dtypes of the trained ones.

    `state` is the last result of `rulec.jax.step` or of `update` of `rulec.jax.transform`. `rule`, `tags` and
    hyper-parameters are as for these calls; functions of the count have their values in the last step. Nothing is
    changed or donated: training goes on with `params` and `state`.

    RuleError for a rule that is evaluated where it is trained; TensorError or StateMismatch as in a step.
    """
    count = getattr(state, "count", None)
    # The last step was given the number of those before it.
    current, numbers = numbered(recipe(rule, hyper, tags), None if count is None else jnp.maximum(count, 1) - 1)
    functions = machine_of(Evaluation, current, options(None, False, 0))
    return call(functions.evaluate, params, state, numbers)


class Evaluation(Machine):
    """The functions from the trained parameters of a recipe to the parameters for evaluation."""

    def __init__(self, recipe: Recipe, options: Options, renamed: Renamed = ()) -> None:
        super().__init__(recipe, options, renamed)
        if all(rule.evaluate is None for rule in self.rules):
            raise RuleError(f"{recipe.title} is evaluated where it is trained: it has no evaluate")
        self._to_evaluation = functools.cache(to_evaluation)
        self.evaluate = jax.jit(self._evaluate, inline=True)

    def _evaluate(self, params: Any, state: Any, numbers: Any) -> Any:
        tree = self._flat(params, "the parameter")
        trained, values = self._begun(state, tree, None, False)
        plan = self._moving(trained)
        hyper = self._hyper(numbers, plan)
        evaluated, _ = one_step(plan, tree.arrays, tree.arrays, _values_of(plan, trained, values), hyper, {})
        return tree.of(evaluated)

    def _moving(self, trained: StepPlan) -> StepPlan:
        """The plan of the one step to the evaluation point; leaves of rules without `evaluate` stay."""
        routes = [self._moved(*pair) for pair in zip(trained.leaves, trained.routes, strict=True)]
        return StepPlan(trained.leaves, routes, trained.options, trained.groups)

    def _moved(self, leaf: Leaf, route: Route | None) -> Route | None:
        if route is None:
            return None
        way: Rule | None = self._to_evaluation(Router(route.rule).choose(leaf.shape, route.tags, leaf.name))
        return None if way is None else replace(route, rule=way)


def _values_of(plan: StepPlan, trained: StepPlan, values: Values) -> Values:
    """The values of the leaves that move."""
    numbers = dict(values.numbers)
    for name, level in plan.numbers.items():
        if level == "tensor":
            numbers[name] = numbers[name][np.searchsorted(trained.having[name], plan.having[name])]
    return Values(values.count, values.arrays, numbers)
