"""Statistics of a step as trees: values of leaves in a tree like the parameters, of groups and the model as numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from rulec.errors import RulecError
from rulec.functional.plan import StepPlan
from rulec.functional.step_values import Statistics
from rulec.jax.leaves import Tree
from rulec.jax.packing import STATISTICS
from rulec.jax.recipe import Recipe
from rulec.jax.state import State


def statistics(state: Any) -> dict[str, Any]:
    """The statistics of the last step, by name, from the state of a transformation with `watch`.

    `state` may be a larger state of optax. Masked transformations in it, as of `optax.multi_transform`, have their
    leaves in one tree. Values of a tensor are a tree like the parameters, with None for a leaf without them, and NaN
    before the first step and where a leaf skipped it. A value of a group or the model is one number, or in a partition
    a vector over its parts. All are float32, or float64 where JAX is allowed it.

    RulecError where nothing was measured, or where two transformations measured one name for the same leaves.
    """
    leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, State))
    measured = [getattr(x, STATISTICS) for x in leaves if isinstance(x, State) and hasattr(x, STATISTICS)]
    if not measured:
        raise RulecError(
            "the state holds no statistics: make the transformation with watch='norms', or with expressions by name, "
            "and give the state that its init or update returned"
        )
    joined: dict[str, Any] = {}
    for each in measured:
        joined |= {name: _joined(name, joined[name], x) if name in joined else x for name, x in each.items()}
    return joined


def _joined(name: str, first: Any, second: Any) -> Any:
    """The values of two transformations of different leaves as one tree."""
    mistake = RulecError(
        f"two transformations in the state measure {name} for the same leaves: read each from its own part of the state"
    )

    def either(x: Any, y: Any) -> Any:
        if not (_is_masked(x) or _is_masked(y)):
            raise mistake
        return y if _is_masked(x) else x

    try:
        return jax.tree.map(either, first, second, is_leaf=_is_masked)
    except ValueError as error:
        raise mistake from error


def _is_masked(value: Any) -> bool:
    return value is None or isinstance(value, optax.MaskedNode)


def shown(measured: Statistics, plan: StepPlan, recipe: Recipe, tree: Tree, wide: bool) -> dict[str, Any]:
    """The statistics of a step as users see them, in float64 where JAX is `wide`, else in float32."""
    dtype = jnp.float64 if wide else jnp.float32
    done: dict[str, Any] = {}
    for name, level in plan.statistics.items():
        values = {place: value.astype(dtype) for place, value in measured[name].items()}
        if level in ("group", "model"):
            alone = len(recipe.groups) == 1 or (level == "model" and len({id(g.rule) for g in recipe.groups}) == 1)
            done[name] = _shared(values, plan) if alone else _of_groups(values, plan)
        else:
            done[name] = tree.holding([values.get(place) for place in range(len(tree.arrays))])
    return done


def _shared(values: Mapping[int, Any], plan: StepPlan) -> Any:
    """The number that leaves share, from their places: NaN only where all of them skipped the step."""
    if all(bucket.program.skip is None for bucket in plan.buckets):
        return values[min(values)]
    return jnp.nanmax(jnp.stack([*values.values()]), axis=0)


def _of_groups(values: Mapping[int, Any], plan: StepPlan) -> Any:
    """The number of each group, or of its model; NaN for a group without leaves."""
    by_group: dict[int, dict[int, Any]] = {}
    for place, route in enumerate(plan.routes):
        if route and place in values:
            by_group.setdefault(route.group, {})[place] = values[place]
    numbers = {group: _shared(each, plan) for group, each in by_group.items()}
    return jnp.stack([numbers.get(group, jnp.nan) for group in range(plan.groups)])


def before_a_step(plan: StepPlan, recipe: Recipe, tree: Tree, wide: bool) -> Any:
    """The statistics before the first step: NaN in the structure of later ones.

    Of no leaves, as optax asks where parameters stand in a state, they are one number, which stands for none of them.
    """
    if not tree.arrays:
        return jnp.zeros(())
    measured: Statistics = {}
    for name, place, shape in plan.measured():
        measured.setdefault(name, {})[place] = jnp.full(shape, jnp.nan)
    return shown(measured, plan, recipe, tree, wide)
