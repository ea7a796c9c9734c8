"""A rule on the parts of a model one after another, with the results of an update of all parts together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from rulec.errors import RuleError
from rulec.functional.plan import Options, StepPlan
from rulec.functional.values import Leaf, Values
from rulec.jax.compiled import CompiledRecipe, Renamed
from rulec.jax.first import first_values
from rulec.jax.leaves import WHOLE, Tree, Untrained, check_apart, flat
from rulec.jax.oriented import oriented, oriented_as
from rulec.jax.recipe import Recipe
from rulec.jax.step import one_step
from rulec.language.expr.node import NUMBERS
from rulec.language.rule import Rule
from rulec.language.rule_data import reads_numbers
from rulec.runtime.engine import EPS

#: Scope of a rule -> the tensors that it reads beyond the updated one.
_BEYOND = {"group": "all tensors of its group", "model": "all tensors of the model"}


class Arguments(NamedTuple):
    """The numbers that a step takes: hyper-parameters by group, and inputs of the rule."""

    hyper: Sequence[Mapping[str, Any]]
    inputs: Mapping[str, Any]


class Subtree(NamedTuple):
    """Some parameters of a model: the first name on their paths, and their tree."""

    name: str
    tree: Any


def _named(tree: Tree, name: str) -> Tree:
    return replace(tree, names=tuple(_path(name, path) for path in tree.names))


def _path(name: str, path: str) -> str:
    """The path in the model of a leaf at a path in a part of this name."""
    return path if not name else name if path == WHOLE else f"{name}/{path}"


class Parts(CompiledRecipe):
    """The functions of a recipe on parts of a model; paths, tags and roles of axes are of the whole model."""

    remedy = (
        "give rulec.jax.eager_step axes=rulec.jax.flax_axes(model), or axes={'*kernel': None} where they lie as in "
        "torch; eager_scan takes all layers as torch keeps them"
    )

    def __init__(self, recipe: Recipe, options: Options, renamed: Renamed = ()) -> None:
        # Patterns and tags are of all parts: `check` looks at them, a part cannot.
        super().__init__(replace(recipe, check=len), options, renamed)
        self._check = recipe.check

    def _check_known(self, leaves: Sequence[Leaf]) -> None:
        pass

    def _check_weights(self, leaves: Sequence[Leaf]) -> None:
        pass

    def check(self, names: Sequence[str], plans: Sequence[StepPlan]) -> None:
        """Errors where a pattern or a tag names no parameter, or a rule reads several tensors for one update."""
        check_apart(names)
        self._check(names)
        self.check_names(names)
        leaves = [leaf for plan in plans for leaf in plan.leaves]
        super()._check_known(leaves)
        super()._check_weights(leaves)
        for rule in {id(rule): rule for plan in plans for rule in plan.rules}.values():
            check_scope(rule)

    def planned(self, part: Subtree) -> StepPlan:
        """The plan of a part before its first step, of arrays or of their shapes and dtypes."""
        return self.plan_of(self.tree(part), None, None, False)

    def tree(self, part: Subtree) -> Tree:
        """The leaves of a part, by their paths in the model."""
        tree = _named(flat(part.tree, "the parameter", self.wide, self._untrained(part.name)), part.name)
        tree.check_real("an eager update is of real ones")
        return oriented(tree, self.orientation, self._decomposes)

    def _untrained(self, name: str) -> Untrained:
        """The choice of the leaves of a part that are not trained."""

        def untrained(paths: Sequence[str]) -> list[str]:
            chosen = {*self.recipe.untrained([_path(name, path) for path in paths])}
            return [path for path in paths if _path(name, path) in chosen]

        return untrained

    def first(self, part: Subtree, plans: Sequence[StepPlan], numbers: Any) -> Any:
        """The first state of a part; `plans` are of all parts."""
        tree = self.tree(part)
        plan = self.plan_of(tree, None, None, False)
        dtype = "float64" if self.wide else "float32"
        return self.fields.packed(first_values(plan, tree.arrays, self._of_all(numbers, plans), dtype), tree)

    def begun(self, part: Subtree, grads: Any, state: Any) -> tuple[Tree, Tree, StepPlan, Values]:
        """The leaves of a part, its gradients, the plan of a step, and the values of the state."""
        tree = self.tree(part)
        gradients = _named(flat(grads, "the gradient of", self.wide, self._untrained(part.name)), part.name)
        gradients = oriented_as(gradients, tree)
        return tree, gradients, *self._begun(state, tree, gradients, False)

    def moved(self, part: Subtree, grads: Any, state: Any, arguments: Arguments, first: int) -> tuple[Any, Any]:
        """New parameters of a part and its new state; `first` is the number of its first leaf in the model."""
        tree, gradients, plan, values = self.begun(part, grads, state)
        new, results = values.copied(), []
        for place in range(len(plan.leaves)):
            share = share_of(plan, self.alone(plan, place), values, place)
            param, share = self.leaf_moved(
                plan, place, tree.arrays[place], gradients.arrays[place], share, arguments, first + place
            )
            results.append(param)
            put_back(plan, new, place, share)
        return tree.of(results), self.fields.packed(new, tree)

    def alone(self, plan: StepPlan, place: int) -> StepPlan:
        """The plan of one leaf alone: between the stages of its step it waits for no other leaf."""
        return self._plan((plan.leaves[place],), False)

    def leaf_moved(
        self, plan: StepPlan, place: int, param: Any, grad: Any, share: Values, arguments: Arguments, number: Any
    ) -> tuple[Any, Values]:
        """A leaf's new array and its new share of the state; `number` is its number in the model, and may be traced."""
        alone = self.alone(plan, place)
        (result,), new, _ = one_step(alone, [param], [grad], share, arguments.hyper, arguments.inputs, [number])
        return result, new

    def arguments(self, numbers: Any, inputs: Mapping[str, Any], plans: Sequence[StepPlan]) -> Arguments:
        """The arguments of a step with every hyper-parameter by group; `plans` are of all parts."""
        return Arguments(self._of_all(numbers, plans), inputs)

    def _of_all(self, numbers: Any, plans: Sequence[StepPlan]) -> list[Mapping[str, Any]]:
        """Hyper-parameters by group; `machine_eps` is that of the group's coarsest leaf in all parts."""
        return [
            group.resolved(group_numbers, _coarsest(plans, index))
            for index, (group, group_numbers) in enumerate(zip(self.recipe.groups, numbers, strict=True))
        ]


def share_of(plan: StepPlan, alone: StepPlan, values: Values, place: int) -> Values:
    """One leaf's share of a part's values; `alone` is the plan of this leaf alone."""
    count = values.count[place] if plan.own_counts else values.count
    share = Values(count.reshape(1) if alone.own_counts else count)
    share.arrays = {name: {0: values.arrays[name][place]} for name in alone.arrays}
    for name, level in alone.numbers.items():
        k = plan.having[name].index(place)
        share.numbers[name] = values.numbers[name][k : k + 1] if level == "tensor" else values.numbers[name]
    return share


def put_back(plan: StepPlan, new: Values, place: int, share: Values) -> None:
    """Puts one leaf's new share among the new values of its part."""
    new.count = new.count.at[place].set(share.count.reshape(())) if plan.own_counts else share.count
    for name, arrays in share.arrays.items():
        new.arrays[name][place] = arrays[0]
    for name, number in share.numbers.items():
        if plan.numbers[name] == "model":
            new.numbers[name] = number
            continue
        route, numbers = plan.routes[place], new.numbers[name]
        assert route is not None  # it has a state
        of_leaf = plan.numbers[name] == "tensor"
        at = plan.having[name].index(place) if of_leaf else route.group
        new.numbers[name] = numbers.at[at].set(number[0 if of_leaf else route.group])


def _coarsest(plans: Sequence[StepPlan], group: int) -> float:
    pairs = [pair for plan in plans for pair in zip(plan.leaves, plan.routes, strict=True)]
    epsilons = [EPS[leaf.dtype] for leaf, route in pairs if route and route.group == group]
    return max(epsilons, default=EPS["float32"])


def check_scope(rule: Rule) -> None:
    """RuleError for a rule that reads other tensors to update one, or its number among them."""
    scope = rule.analysis.scope
    if scope in _BEYOND:
        raise RuleError(
            f"{rule.name} reads {_BEYOND[scope]} before it updates any, and an eager update drops each gradient at "
            f"once: update with rulec.jax.step"
        )
    read = next((number for number in NUMBERS if reads_numbers(rule, (number,))), None)
    if read is not None:
        raise RuleError(
            f"{rule.name} reads {read}, and an eager update sees one parameter at a time: update with rulec.jax.step"
        )
