"""A rule on parts of a model one after another, each updated as if all of them were updated together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from rulec.errors import RuleError
from rulec.jax.first import first_values
from rulec.jax.leaves import WHOLE, Tree, check_apart, flat
from rulec.jax.machine import Machine, Settings
from rulec.jax.plan import StepPlan
from rulec.jax.recipe import Recipe
from rulec.jax.step import one_step
from rulec.jax.values import Values
from rulec.language.rule import Rule
from rulec.runtime.engine import EPS

#: What the scope of a rule reads beyond the tensor that it updates.
_BEYOND = {"group": "all tensors of its group", "model": "all tensors of the model"}


class Arguments(NamedTuple):
    """What a step is given beside arrays: hyper-parameters by group, and inputs of the rule."""

    hyper: Sequence[Mapping[str, Any]]
    inputs: Mapping[str, Any]


class Subtree(NamedTuple):
    """Some parameters of a model: the name that their paths begin with, and their tree."""

    name: str
    tree: Any


def _named(tree: Tree, name: str) -> Tree:
    if not name:
        return tree
    return replace(tree, names=tuple(name if own == WHOLE else f"{name}/{own}" for own in tree.names))


class Parts(Machine):
    """The functions of a recipe on trees that are parts of a model; its paths and tags are those of the whole model."""

    def __init__(self, recipe: Recipe, settings: Settings) -> None:
        # Patterns and tags are of all parts: `check` looks at them, a part cannot.
        super().__init__(replace(recipe, check=len), settings)
        self._check = recipe.check

    def _check_tags(self, names: Sequence[str]) -> None:
        pass

    def check(self, names: Sequence[str], plans: Sequence[StepPlan]) -> None:
        """Errors where a pattern or a tag names no parameter, or a rule reads what other parts have not yet."""
        check_apart(names)
        self._check(names)
        super()._check_tags(names)
        for rule in {id(rule): rule for plan in plans for rule in plan.rules}.values():
            check_scope(rule)

    def planned(self, part: Subtree) -> StepPlan:
        """The plan of a part before its first step, of arrays or of their shapes and dtypes."""
        return self.plan_of(self.tree(part), None, None, False)

    def tree(self, part: Subtree) -> Tree:
        """The leaves of a part, by their paths in the model."""
        found = _named(flat(part.tree, "the parameter", self.settings.wide), part.name)
        found.check_real("an eager update is of real ones")
        return found

    def first(self, part: Subtree, plans: Sequence[StepPlan], numbers: Any) -> Any:
        """The first state of a part; `plans` are those of all parts."""
        tree = self.tree(part)
        plan = self.plan_of(tree, None, None, False)
        dtype = "float64" if self.settings.wide else "float32"
        return self.fields.packed(first_values(plan, tree.arrays, self._of_all(numbers, plans), dtype), tree)

    def begun(self, part: Subtree, grads: Any, state: Any) -> tuple[Tree, Tree, StepPlan, Values]:
        """The leaves of a part and of its gradients, the plan of a step, and what the state has."""
        tree = self.tree(part)
        found = _named(flat(grads, "the gradient of", self.settings.wide), part.name)
        return tree, found, *self._begun(state, tree, found, False)

    def moved(self, part: Subtree, grads: Any, state: Any, given: Arguments, first: int) -> tuple[Any, Any]:
        """New parameters of a part and its new state; `first` is the number of its first leaf in the model."""
        tree, found, plan, values = self.begun(part, grads, state)
        new, results = values.copied(), []
        for place in range(len(plan.leaves)):
            share = share_of(plan, self.alone(plan, place), values, place)
            param, share = self.leaf_moved(
                plan, place, tree.arrays[place], found.arrays[place], share, given, first + place
            )
            results.append(param)
            put_back(plan, new, place, share)
        return tree.structure.unflatten(results), self.fields.packed(new, tree)

    def alone(self, plan: StepPlan, place: int) -> StepPlan:
        """The plan of one leaf alone: what it needs between the stages of its step then waits for no other."""
        return self._plan((plan.leaves[place],), False)

    def leaf_moved(
        self, plan: StepPlan, place: int, param: Any, grad: Any, share: Values, given: Arguments, number: Any
    ) -> tuple[Any, Values]:
        """A leaf's new array and its new share of the state; `number` is its own in the model, and may be traced."""
        own = self.alone(plan, place)
        (result,), new = one_step(own, [param], [grad], share, given.hyper, given.inputs, [number])
        return result, new

    def given(self, numbers: Any, inputs: Mapping[str, Any], plans: Sequence[StepPlan]) -> Arguments:
        """The numbers of a step; `plans` are those of all parts."""
        return Arguments(self._of_all(numbers, plans), inputs)

    def _of_all(self, numbers: Any, plans: Sequence[StepPlan]) -> list[Mapping[str, Any]]:
        """Hyper-parameters by group; the machine epsilon of a group is of its leaves in all parts."""
        return [
            group.resolved(own, _coarsest(plans, index))
            for index, (group, own) in enumerate(zip(self.recipe.groups, numbers, strict=True))
        ]


def share_of(plan: StepPlan, own: StepPlan, values: Values, place: int) -> Values:
    """What one leaf has of a part's values; `own` is the plan of this leaf alone."""
    count = values.count[place] if plan.own_counts else values.count
    share = Values(count.reshape(1) if own.own_counts else count)
    share.arrays = {name: {0: values.arrays[name][place]} for name in own.arrays}
    for name, level in own.numbers.items():
        k = plan.having[name].index(place)
        share.numbers[name] = values.numbers[name][k : k + 1] if level == "tensor" else values.numbers[name]
    return share


def put_back(plan: StepPlan, new: Values, place: int, share: Values) -> None:
    """Puts one leaf's new share among the new values of its part."""
    new.count = new.count.at[place].set(share.count.reshape(())) if plan.own_counts else share.count
    for name, arrays in share.arrays.items():
        new.arrays[name][place] = arrays[0]
    for name, found in share.numbers.items():
        level, now = plan.numbers[name], new.numbers[name]
        own = plan.assigned[place]
        assert own is not None  # it has a state
        at = plan.having[name].index(place) if level == "tensor" else own.group
        new.numbers[name] = found if level == "model" else now.at[at].set(found[0 if level == "tensor" else own.group])


def _coarsest(plans: Sequence[StepPlan], group: int) -> float:
    pairs = [pair for plan in plans for pair in zip(plan.leaves, plan.assigned, strict=True)]
    found = [EPS[leaf.dtype] for leaf, own in pairs if own is not None and own.group == group]
    return max(found, default=EPS["float32"])


def check_scope(rule: Rule) -> None:
    """RuleError for a rule whose update of one tensor reads others."""
    scope = rule.analysis.scope
    if scope in _BEYOND:
        raise RuleError(
            f"{rule.name} reads {_BEYOND[scope]} before it updates any, and an eager update drops each gradient at "
            f"once: update with rulec.jax.step"
        )
