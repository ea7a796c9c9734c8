"""Compiled functions of a recipe on trees: the first state, a step to updates, and a step to new parameters.

Each is traced once for a tree's structure, shapes and dtypes. Numbers are passed in float64 and traced: neither another
learning rate nor another step count traces anything again.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeAlias, TypeVar

import jax
import jax.numpy as jnp

from rulec.compiler.routing import Router
from rulec.compiler.weights import PARTS
from rulec.errors import HyperError, RulecError, TensorError
from rulec.functional.axes import Orientation, decomposes, reads_layout, reads_tensors
from rulec.functional.plan import Options, Route, StepPlan
from rulec.functional.step_values import Statistics
from rulec.functional.values import Leaf, Values, leaves_of
from rulec.jax import cpu
from rulec.jax.first import first_values
from rulec.jax.leaves import Tree, check_inputs, flat, is_part, like, matrices_by_leaf
from rulec.jax.library import compiler_options, is_traced
from rulec.jax.oriented import oriented, oriented_as
from rulec.jax.packing import Packed, packed
from rulec.jax.recipe import Group, Recipe
from rulec.jax.refused import explained, without_remarks
from rulec.jax.state import Fields, Shown, State, check_state, fields_of
from rulec.jax.statistics import before_a_step, shown
from rulec.jax.step import one_step
from rulec.jax.tags import check_tags
from rulec.language.inputs import LIKE_P, WORDS
from rulec.language.rule import Rule
from rulec.language.source import did_you_mean
from rulec.runtime.buckets.launch_builder import inputs_of
from rulec.runtime.evaluations import EvaluationNames
from rulec.runtime.statistics import Words, by_rule
from rulec.runtime.storage.options import Storage

#: Plans are kept for this many sets of shapes of a recipe, and machines for this many recipes.
_PLANS, _MACHINES = 64, 256

#: Pairs of a state of the rule and its field in the optimizer's state.
Renamed: TypeAlias = tuple[tuple[str, Shown], ...]


class CompiledRecipe:
    """The compiled functions of a recipe. `renamed`: state -> field of the optimizer's state, where names differ."""

    #: What users can do about a kernel whose roles are unknown.
    remedy: ClassVar = "give axes=rulec.jax.flax_axes(model), or axes={'*kernel': None} where they lie as in torch"

    def __init__(self, recipe: Recipe, options: Options, renamed: Renamed = ()) -> None:
        # A number may be traced, and must not be kept: it is passed to each call.
        self.recipe = replace(recipe, groups=[_group_without_numbers(group) for group in recipe.groups])
        self.options, self.wide = options, is_wide()
        self.rules = _rules(recipe)
        check_watch(recipe, options.watch)
        self._storage = Storage(dict(options.state_dtype), options.weights)
        self._storage.check(self.rules)
        parts = [PARTS[options.weights].name] if options.weights in PARTS else []
        self.fields: Fields = fields_of(self.rules, dict(renamed), parts)
        self.inputs = {name: kind for rule in self.rules for name, kind in inputs_of(rule).items()}
        self.passes = EvaluationNames(self.rules)
        self._has_warned, self._decomposes = False, any(map(decomposes, self.rules))
        #: Structures of parameters and of a state, and dtypes of parameters -> whether the state is held packed.
        self._packs: dict[Any, bool] = {}
        self._plan = functools.lru_cache(maxsize=_PLANS)(self._planned)
        self.init = jax.jit(self._init, inline=True)
        self.update = jax.jit(self._update, inline=True)
        #: The same as `_step`, with parameters and state donated; not for calls that others trace.
        self.step = jax.jit(self._step, donate_argnums=(0, 2), compiler_options=compiler_options())
        self.step_keeping = jax.jit(self._step, inline=True)

    # Plans

    def _planned(self, leaves: tuple[Leaf, ...], update: bool) -> StepPlan:
        groups = self.recipe.places(leaves)
        self._check_known(leaves)
        self._check_weights(leaves)
        routes = [self._routed(leaf, group) for leaf, group in zip(leaves, groups, strict=True)]
        options = replace(self.options, update=update)
        return StepPlan(leaves, routes, options, len(self.recipe.groups))

    def _routed(self, leaf: Leaf, group: int | None) -> Route | None:
        if group is None:
            return None
        chosen = self.recipe.groups[group]
        tags = {*chosen.tags, *(self.recipe.tags or {}).get(leaf.parameter, ())}
        return Route(chosen.rule, group, tags, chosen.static())

    def _check_known(self, leaves: Sequence[Leaf]) -> None:
        if self.recipe.tags is None:
            check_tags(self.recipe.groups[0].rule, leaves)

    def check_names(self, names: Sequence[str]) -> None:
        """TensorError for roles and tags of users that name none of the leaves of a whole tree."""
        self.recipe.axes.check(names)
        for name in self.recipe.tags or {}:
            if names and name not in names:
                raise TensorError(
                    f"the tags of {self.recipe.title} name {name!r}, and there is no leaf of that path"
                    f"{did_you_mean(name, names)}"
                )

    def _check_weights(self, leaves: Sequence[Leaf]) -> None:
        untrained = {*self.recipe.untrained([leaf.parameter for leaf in leaves])}
        self._storage.check_weights(leaf.dtype for leaf in leaves if leaf.parameter not in untrained)

    def plan_of(self, params: Tree, grads: Tree | None, values: Values | None, update: bool) -> StepPlan:
        """The plan for these leaves; existing states in `values` keep their dtypes."""
        states = {} if values is None else values.arrays
        gradients = params if grads is None else grads
        leaves = leaves_of(params.names, params.arrays, gradients.arrays, states, params.paired, params.paths)
        return self._plan(leaves, update)

    def packed_state(self, params: Any, grads: Any, state: Any) -> Any:
        """The state packed, where a step of its own holds it so; None elsewhere.

        It does for many small leaves on one CPU device, of rules whose kernels take them all.
        """
        if not isinstance(state, State) or any(isinstance(field, Packed) for field in state):
            return None
        arrays, structure = jax.tree.flatten(params)
        if not cpu.are_many_and_small(arrays):
            return None
        key = structure, jax.tree.structure(state), frozenset(x.dtype for x in arrays)
        if key not in self._packs:
            self._packs[key] = self._packs_all(params, grads, state)
        return packed(state) if self._packs[key] else None

    def _packs_all(self, params: Any, grads: Any, state: Any) -> bool:
        tree = self._flat(params, "the parameter")
        values = self.fields.unpacked(state, tree, self.recipe.title)
        plan = self.plan_of(tree, self._like(grads, tree, "the gradient of"), values, False)
        return not tree.paired and tree.whole is tree and cpu.packs(plan)

    def routing(self, params: Any) -> dict[str, str]:
        """The name of the rule of each leaf that has one, by its path."""
        plan = self.plan_of(self._flat(params, "the parameter"), None, None, False)
        routed = [leaf.parameter for leaf, route in zip(plan.leaves, plan.routes, strict=True) if route is not None]
        return {name: rule.name for name, rule in zip(routed, plan.rules, strict=True)}

    # The functions that are traced

    def _init(self, params: Any, numbers: Any) -> Any:
        tree = self._flat(params, "the parameter")
        plan = self.plan_of(tree, None, None, False)
        hyper = self._hyper(numbers, plan)
        number_dtype = "float64" if self.wide else "float32"
        values = first_values(plan, tree.arrays, hyper, number_dtype)
        watch = self.options.watch
        return self.fields.packed(values, tree, before_a_step(plan, self.recipe, tree, self.wide) if watch else None)

    def _update(self, grads: Any, state: Any, params: Any, numbers: Any, inputs: Any) -> Any:
        source = grads if params is None else params
        model = self._flat(source, "the gradient of" if params is None else "the parameter")
        tree = model if params is None else self._like(grads, model, "the gradient of")
        plan, values = self._begun(state, model, tree, True)
        if params is None and plan.reads_parameters:
            raise TensorError(f"{self.recipe.title} reads the parameters: call update(grads, state, params)")
        results, new, measured = self._run(plan, model, tree, values, numbers, inputs)
        # A key of random numbers has no zero that may be added to it.
        keys = {i for i in model.untrained if jnp.issubdtype(model.arrays[i].dtype, jax.dtypes.extended)}
        changes = [None if place in keys else result for place, result in enumerate(results)]
        statistics = shown(measured, plan, self.recipe, model, self.wide) if self.options.watch else None
        return tree.of(changes), self.fields.packed(new, model, statistics)

    def _step(self, params: Any, grads: Any, state: Any, numbers: Any, inputs: Any) -> Any:
        model = self._flat(params, "the parameter")
        tree = self._like(grads, model, "the gradient of")
        plan, values = self._begun(state, model, tree, False)
        results, new, measured = self._run(plan, model, tree, values, numbers, inputs)
        state = self.fields.packed(new, model)
        if not self.options.watch:
            return model.of(results), state
        return model.of(results), state, shown(measured, plan, self.recipe, model, self.wide)

    def _flat(self, tree: Any, what: str) -> Tree:
        leaves = flat(tree, what, self.wide, self.recipe.untrained)
        if not is_part(tree):
            self.check_names(leaves.names)
        return oriented(leaves, self.orientation, self._decomposes)

    def _like(self, tree: Any, model: Tree, what: str) -> Tree:
        return oriented_as(like(tree, model.whole, what, self.wide), model)

    def orientation(self, name: str, shape: tuple[int, ...]) -> Orientation | None:
        """The orientation of a leaf whose rule depends on it."""
        group = self.recipe.choose(name, shape)
        if group is None:
            return None
        rule = self.recipe.groups[group].rule
        one = self.recipe.axes.of(name, shape)
        if one is None:
            self._say_unknown(name, shape, rule)
        elif reads_layout(rule) or (one.batch and (self.options.watch or reads_tensors(rule))):
            return one
        return None

    def _say_unknown(self, name: str, shape: tuple[int, ...], rule: Rule) -> None:
        """Warns once that a layer of Flax or Keras may lie otherwise than a rule of matrices takes it."""
        is_kernel = len(shape) > 1 and name.rpartition("/")[2] == "kernel"
        if self._has_warned or not is_kernel or self.recipe.axes.knows(name) or not reads_layout(rule):
            return
        self._has_warned = True
        warnings.warn(
            f"{rule.name} takes the axes of {name}, of shape {shape}, for (outputs, inputs) as torch keeps them, and "
            f"Flax keeps (inputs, outputs): {self.remedy}",
            stacklevel=2,
        )

    def _begun(self, state: Any, params: Tree, grads: Tree | None, update: bool) -> tuple[StepPlan, Values]:
        """The plan of a step from this state, and the state's values."""
        values = self.fields.unpacked(state, params, self.recipe.title)
        plan = self.plan_of(params, grads, values, update)
        check_state(plan, values, self.fields, self.recipe.title)
        return plan, values

    def _run(
        self, plan: StepPlan, params: Tree, grads: Tree, values: Values, numbers: Any, inputs: Any
    ) -> tuple[Sequence[Any], Values, Statistics]:
        hyper = self._hyper(numbers, plan)
        inputs = {name: self._input(name, value, params) for name, value in inputs.items()}
        check_inputs(plan, inputs)
        return one_step(plan, params.arrays, grads.arrays, values, hyper, inputs)

    def _input(self, name: str, value: Any, params: Tree) -> Any:
        kind = self.inputs[name]
        if kind not in WORDS:
            return params.apart(matrices_by_leaf(value, params.whole, f"the input {name} of"))
        if kind == LIKE_P:
            return list(self._like(value, params, f"the input {name} of").arrays)
        if jnp.shape(value) != ():
            raise TensorError(
                f"the input {name} of {self.recipe.title} must be one number, and has shape {jnp.shape(value)}"
            )
        return value

    def _hyper(self, numbers: Any, plan: StepPlan) -> list[Mapping[str, Any]]:
        pairs = [*zip(self.recipe.groups, numbers, strict=True)]
        for group, group_numbers in pairs:
            for name, number in group_numbers.items():
                check_number(f"{name} of {group.rule.name}", number)
        return [group.resolved(group_numbers, plan.coarsest(i)) for i, (group, group_numbers) in enumerate(pairs)]


def _group_without_numbers(group: Group) -> Group:
    settings = group.settings
    return replace(group, hyper={name: value if settings[name].static else 0.0 for name, value in group.hyper.items()})


def _rules(recipe: Recipe) -> list[Rule]:
    """All rules of leaves, routed ones too, each once."""
    rules = [rule for group in recipe.groups for rule in Router(group.rule).rules]
    return list({id(rule): rule for rule in rules}.values())


def check_watch(recipe: Recipe, watch: Words) -> None:
    """RuleError for a statistic that no rule of the recipe has, and for a mistake in an expression."""
    if watch:
        by_rule(_rules(recipe), watch)


_machines: OrderedDict[Any, Any] = OrderedDict()
_machines_lock = threading.Lock()


_Kind = TypeVar("_Kind", bound=CompiledRecipe)


def machine(recipe: Recipe, options: Options, renamed: Renamed = ()) -> CompiledRecipe:
    """The machine of a recipe; recipes of equal keys share one, as long as users allow JAX 64 bits or do not."""
    return machine_of(CompiledRecipe, recipe, options, renamed)


def machine_of(kind: type[_Kind], recipe: Recipe, options: Options, renamed: Renamed = ()) -> _Kind:
    """The machine of a kind for a recipe; the latest are kept."""
    key = kind, recipe.key, options, renamed, is_wide()
    with _machines_lock:
        instance: _Kind = _machines.pop(key, None) or kind(recipe, options, renamed)
        _machines[key] = instance
        if len(_machines) > _MACHINES:
            _machines.popitem(last=False)
    return instance


def numbered(recipe: Recipe, count: Any = None) -> tuple[Recipe, list[dict[str, Any]]]:
    """A recipe, and the hyper-parameters that are passed to its machine.

    Functions of the `count` of steps are replaced by their values; without a count, by those before the first step.
    """
    if any(callable(value) for group in recipe.groups for value in group.hyper.values()):
        count = jnp.zeros((), jnp.int32) if count is None else count
        recipe = replace(recipe, groups=[_at(group, count) for group in recipe.groups])
    # Under jax.jvp a tracer may stand for a number of Python: it gets its own dtype.
    return recipe, [
        {name: jnp.array(number) if is_traced(number) else number for name, number in group.numbers().items()}
        for group in recipe.groups
    ]


def _at(group: Group, count: Any) -> Group:
    settings = group.settings
    values = {
        name: value_at(count, value, f"{name} of {group.rule.name}")
        for name, value in group.hyper.items()
        if callable(value) and not settings[name].static
    }
    return replace(group, hyper={**group.hyper, **values})


def call(function: Callable[..., Any], *operands: Any) -> Any:
    """Calls one of a machine's functions, with JAX allowed 64 bits for numbers and to mix dtypes.

    TensorError where an operand is no array, or was donated before.
    """
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        try:
            return function(*operands)
        except RulecError as error:
            without_remarks(error)
            raise
        except (TypeError, RuntimeError, ValueError) as error:
            mistake = explained(error, function, operands)
            if mistake is None:
                raise
            raise mistake from error


def is_wide() -> bool:
    """Whether users allow JAX 64 bits."""
    return bool(jax.config.read("jax_enable_x64"))  # type: ignore[no-untyped-call]


#: Compiled functions are kept for this many.
_KEPT = 256

_compiled: OrderedDict[int, Callable[[Any], Any]] = OrderedDict()
_lock = threading.Lock()


def value_at(count: Any, function: Callable[[Any], Any], what: str) -> Any:
    """The value of a user's function at a count of steps, computed as under the user's own jit.

    `count` is a whole number, or one for each leaf: then the largest is taken. HyperError where the value is not one
    real number; `what` names the function in it.
    """

    def value(count: Any) -> Any:
        number = function(jnp.max(count) if jnp.ndim(count) else count)
        check_number(f"what the function for {what} returns", number)
        return number

    if is_traced(count):
        return value(count)
    with _lock:
        # It holds the function, whose id is therefore no other's.
        compiled = _compiled.pop(id(function), None) or jax.jit(value)
    try:
        number = compiled(count)
    except RulecError as error:
        without_remarks(error)
        raise
    # What the function closes over may be traced, and must not be kept.
    if not is_traced(number):
        with _lock:
            _compiled[id(function)] = compiled
            if len(_compiled) > _KEPT:
                _compiled.popitem(last=False)
    return number


def check_number(what: str, number: Any) -> None:
    """HyperError for anything but one real number."""
    if not hasattr(number, "dtype") and not isinstance(number, bool | int | float):
        raise HyperError(f"{what} must be one number, and is a {type(number).__name__}")
    if jnp.ndim(number):
        raise HyperError(f"{what} must be one number, and is an array of shape {jnp.shape(number)}")
    if jnp.iscomplexobj(number):
        raise HyperError(f"{what} must be a real number, and is complex")
