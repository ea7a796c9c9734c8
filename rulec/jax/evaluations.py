"""The passes of a step: pure functions to the points, where a function of the caller gives the gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

import jax
import jax.numpy as jnp

from rulec.compiler.routing import Router
from rulec.errors import HyperError
from rulec.functional.plan import Options, Route, StepPlan, values_of
from rulec.functional.values import Hypers
from rulec.jax.compiled import CompiledRecipe, Renamed, call, machine_of
from rulec.jax.library import LIBRARY, is_traced
from rulec.jax.recipe import Recipe
from rulec.jax.step import one_step
from rulec.language.expr.node import Node, Op
from rulec.language.rule import Rule
from rulec.runtime.evaluations import move_at

#: A function from parameters to their gradients.
Gradient = Callable[[Any], Any]


class Moves(CompiledRecipe):
    """The functions of a recipe from parameters and gradients to the points of its passes."""

    def __init__(self, recipe: Recipe, options: Options, renamed: Renamed = ()) -> None:
        super().__init__(recipe, options, renamed)
        self.move = jax.jit(self._move, static_argnums=0, inline=True)
        self.wanted = jax.jit(self._wanted, static_argnums=0, inline=True)

    def always(self, place: int) -> bool:
        """Whether every step has the pass at this place."""
        return any(rule.moves[place].when is None for rule in self.rules if place < len(rule.moves))

    def _move(self, place: int, params: Any, grads: Any, state: Any, numbers: Any, inputs: Any) -> Any:
        model = self._flat(params, "the parameter")
        tree = self._like(grads, model, "the gradient of")
        ended, values = self._begun(state, model, tree, False)
        routes = [self._moved(place, *pair) for pair in zip(ended.leaves, ended.routes, strict=True)]
        plan = StepPlan(ended.leaves, routes, ended.options, ended.groups)
        arguments = {name: self._input(name, value, model) for name, value in inputs.items()}
        moved, _, _ = one_step(
            plan, model.arrays, tree.arrays, values_of(plan, ended, values), self._hyper(numbers, plan), arguments
        )
        return model.of(moved)

    def _moved(self, place: int, leaf: Any, route: Route | None) -> Route | None:
        """The route of a leaf to the rule of a pass; values of the model span the leaves of the same owner."""
        if route is None:
            return None
        way = move_at(place)(self._routers(route.rule).choose(leaf.shape, route.tags, leaf.name))
        return None if way is None else replace(route, rule=cast(Rule, way), owner=route.rule)

    @functools.cached_property
    def _routers(self) -> Callable[[Rule], Router[Rule]]:
        # One router for each rule: it makes the rules to which it routes.
        return functools.cache(Router)

    def _wanted(self, place: int, params: Any, state: Any, numbers: Any) -> Any:
        """Whether any leaf has the pass at this place in the next step."""
        model = self._flat(params, "the parameter")
        plan, values = self._begun(state, model, None, False)
        hyper = self._hyper(numbers, plan)
        t = jnp.asarray(values.count, "float64") + 1
        return jnp.stack([jnp.any(jnp.asarray(x) != 0) for x in self._conditions(place, plan, hyper, t)]).any()

    def _conditions(self, place: int, plan: StepPlan, hyper: Hypers, t: Any) -> Iterator[Any]:
        for bucket in plan.buckets:
            moves = bucket.program.rule.moves
            when = moves[place].when if place < len(moves) else None
            if when is None:
                continue
            for facts, group in zip(bucket.facts, bucket.groups, strict=True):
                known = {**hyper[group], **facts, "t": t}
                yield LIBRARY.evaluated([when], functools.partial(_leaf, known))[when]


def _leaf(known: Mapping[str, Any], value: Node) -> Any:
    return LIBRARY.constant(value.arg if value.op is Op.CONST else known[str(value.arg)])


def passed(
    recipe: Recipe, options: Options, renamed: Renamed, operands: tuple[Any, ...], inputs: Mapping[str, Any],
    gradient: Gradient | None,
) -> tuple[Any, dict[str, Any]]:  # fmt: skip
    """The gradients at the last point of a step, and the inputs of its end.

    `operands` are parameters, gradients there, the state, and numbers. Under jit, a pass of some steps is a
    condition of XLA: `gradient` is traced once, and runs in these steps.
    """
    params, grads, state, numbers = operands
    moves = machine_of(Moves, recipe, replace(options, update=False, backend="jax", watch=()), renamed)
    if gradient is None or params is None:
        raise HyperError(
            f"{recipe.title} evaluates the model again in a step: give step or update the parameters and gradient=, a "
            f"function from parameters to gradients"
        )
    arguments = dict(inputs)
    for place in range(moves.passes.count):
        kept = jax.tree.map(lambda g: -g, grads) if options.maximize else grads
        arguments |= dict.fromkeys(moves.passes.kept[place], kept)

        def again(grads: Any, place: int = place, arguments: Mapping[str, Any] = dict(arguments)) -> Any:
            return gradient(call(functools.partial(moves.move, place), params, grads, state, numbers, arguments))

        if moves.always(place):
            grads = again(grads)
            continue
        wanted = call(functools.partial(moves.wanted, place), params, state, numbers)
        if is_traced(wanted):
            grads = jax.lax.cond(wanted, again, lambda same: same, grads)
        elif wanted:
            grads = again(grads)
    return grads, arguments
