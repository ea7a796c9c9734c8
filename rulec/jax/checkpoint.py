"""Checkpoints of JAX states, in the format of all frameworks.

A tree of JAX's arrays and a state become a run for checkpoints. Loading returns a state with the values of a
checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rulec import checkpoint
from rulec.checkpoint import Leaf, Names, Shared, Stored
from rulec.compiler.weights import part_name
from rulec.errors import RulecError, StateMismatch, TensorError
from rulec.functional.axes import AxisRoles
from rulec.functional.filling import Filling, states_of
from rulec.functional.plan import StepPlan
from rulec.functional.quantized import Unbiased
from rulec.functional.values import Values
from rulec.jax.compiled import CompiledRecipe, call, machine
from rulec.jax.layout_in_files import ARRAYS, placed, roles_in, stored_as, without_turned_codes
from rulec.jax.leaves import Tree, Untrained, flat
from rulec.jax.library import is_traced
from rulec.jax.oriented import Axes, axis_roles, oriented, turned_and_seen
from rulec.jax.packing import STATISTICS, Packed, packed, unpacked
from rulec.jax.recipe import Given, Group, Rules, recipe
from rulec.jax.state import Fields, State
from rulec.jax.transform import options
from rulec.language.expr.node import Node
from rulec.language.hyper import checked_seed


def save(
    file: str | Path, rule: Rules, params: Any, state: Any, *, parameters: bool = False, seed: int = 0,
    weights: str = "", tags: Mapping[str, Collection[str]] | None = None, axes: Axes = None, **hyper: Given,
) -> None:  # fmt: skip
    """Writes a state, and with `parameters` the parameters, as a safetensors file for every framework.

    `state` is the result of `rulec.jax.step` or of a transformation of the rule, or a larger state of optax with it
    inside. Parameters are called by their paths in the tree. `seed`, `weights`, `tags` and `axes` are as they were for
    `init`; `hyper` is written for information. Parameters with roles of axes, and their states, lie in the file as
    torch keeps them, each index of a batch by itself, as `blocks/kernel/0`. The file is there as a whole, or the one
    before it stays.

    Raises StateMismatch where the state is of another rule, TensorError for arrays of other processes.
    """
    _, inner = inner_state(state)
    run = run_of(rule, hyper, tags, params, seed, state=inner, weights=weights, axes=axis_roles(axes))
    _check_here([("the state", x) for x in jax.tree.leaves(inner)], "save")
    _check_here(list(zip(run.tree.names, run.tree.arrays, strict=True)) if parameters else [], "save")
    checkpoint.save(run, file, parameters)


def load(
    file: str | Path, rule: Rules, params: Any, *, like: Any = None, names: Names = None, axes: Axes = None,
    rule_may_differ: bool = False, seed: int = 0, state_dtype: Any = None, weights: str = "",
    tags: Mapping[str, Collection[str]] | None = None, **hyper: Given,
) -> Any:  # fmt: skip
    """The state in a file that `save` has written here, or in another framework.

    Without `like` it has the structure of `rulec.jax.init` of these arguments. With `like`, a state such as
    `tx.init(params)`, it has the structure and dtypes of that state. `names` is a mapping of the file's names to the
    paths here, or a function. `axes` has the roles of axes, as for `init`; a file lies as torch keeps parameters. Or it
    has for parameters, by their paths here, the axis of the file for each of their own, as in `{"dense/kernel": (1,
    0)}`, for rules that treat all elements alike. `rule_may_differ` takes the states of a rule with other equations,
    `seed` is the seed of the steps to come. Arrays get the sharding of their parameters. States of leaves that had not
    been updated when the file was saved are as in `rulec.jax.init`, whatever `like` has.

    StateMismatch where the file belongs to other parameters or another rule, or is damaged.
    """
    existing = None if like is None else inner_state(like)[1]
    turned, roles = turned_and_seen(axes)
    run = run_of(rule, hyper, tags, params, seed, state_dtype, existing, weights, roles)
    loaded = checkpoint.load(run, file, run.plan.groups, names, turned, rule_may_differ)
    first = run.first(params)
    put, inner = inner_state(first if like is None else like)
    fresh = run.values_of(inner_state(first)[1])
    filling = Filling(str(file), loaded, run.plan, run.places, run.tree.arrays, fresh, ARRAYS)
    state = run.state_of(filling.values(run.values_of(inner)), inner)
    return put(packed(state) if any(isinstance(field, Packed) for field in inner) else state)


def load_params(file: str | Path, params: Any, *, names: Names = None, axes: Axes = None) -> Any:
    """The parameters of a file that was saved with `parameters=True`, in the tree, dtypes and shardings of `params`.

    `names` and `axes` are as for `load`.
    """
    turned, roles = turned_and_seen(axes)
    tree = oriented(real_tree(params), roles.of)
    named = [*zip(leaf_names(tree), tree.arrays, strict=True)]
    shapes = {name: tuple(array.shape) for name, array in named}
    said = dict(zip(shapes, roles_in(tree, roles), strict=True))
    values = checkpoint.load_values(file, shapes, names, turned, said)
    return placed(tree, [ARRAYS.array(value, array, array) for value, (_, array) in zip(values, named, strict=True)])


def _check_here(arrays: Sequence[tuple[str, Any]], verb: str) -> None:
    """TensorError for an array whose values are not at hand."""
    for name, array in arrays:
        if is_traced(array):
            raise TensorError(f"{name} is traced: {verb} outside of jit")
        if getattr(array, "is_deleted", bool)():
            raise TensorError(f"{name} was donated to a later step: {verb} what that step returned")
        if not getattr(array, "is_fully_addressable", True):
            raise TensorError(
                f"{name} is spread over several processes: gather it first, as with "
                f"jax.experimental.multihost_utils.process_allgather, or use Orbax"
            )


@dataclass(frozen=True)
class JaxRun:
    """A rule for a tree of parameters, and where there is one a state, in the terms of `rulec.checkpoint.Run`."""

    machine: CompiledRecipe
    tree: Tree
    plan: StepPlan
    hyper: Sequence[Group]
    seed: int
    state: Any = None
    axes: AxisRoles = field(default_factory=AxisRoles)

    @cached_property
    def places(self) -> list[int]:
        """The places in the tree of the leaves that have a rule."""
        return [place for place, route in enumerate(self.plan.routes) if route is not None]

    def leaves(self) -> list[Leaf]:
        """The leaves that have a rule, by their paths."""
        names, routes, roles = leaf_names(self.tree), self.plan.routes, roles_in(self.tree, self.axes)
        return [
            Leaf(
                names[place], tuple(self.tree.arrays[place].shape), str(self.tree.arrays[place].dtype), rule, place,
                getattr(routes[place], "group", 0), self._rounds(place),
                part_name(self.machine.options.weights, str(self.tree.arrays[place].dtype)),
                getattr(routes[place], "static", {}), roles[place],
            )
            for place, rule in zip(self.places, self.plan.rules, strict=True)
        ]  # fmt: skip

    def _rounds(self, place: int) -> bool:
        """Whether a step rounds the leaf at a place of the tree, or a state of it, at random."""
        arrays = () if self.state is None else self.values.arrays.values()
        planned = any(bucket.program.memory.random for bucket in self.plan.buckets if place in bucket.places)
        return planned or any(isinstance(of_leaves.get(place), Unbiased) for of_leaves in arrays)

    def states(self, place: int) -> tuple[int, dict[str, Stored]]:
        """The number of updates of a leaf, and its states by name."""
        leaf, count = self.places[place], np.asarray(self.values.count)
        return int(count[leaf] if count.ndim else count), states_of(self.plan, self.values, leaf, ARRAYS)

    def value(self, place: int) -> Stored:
        """The parameter itself."""
        return ARRAYS.stored(self.tree.arrays[self.places[place]])

    def shared(self) -> Shared:
        """Hyper-parameters that are numbers here and now, and the numbers of groups and the model."""
        kept = [name for name, level in self.plan.numbers.items() if level != "tensor"]
        numbers = {name: np.asarray(self.values.numbers[name], np.float64).reshape(-1).tolist() for name in kept}
        updates = int(np.asarray(self.values.count).max(initial=0))
        return Shared([_plain(group) for group in self.hyper], numbers, [updates] * self.plan.groups, updates)

    @cached_property
    def values(self) -> Values:
        """The values of the state."""
        return self.values_of(self.state)

    def first(self, params: Any) -> Any:
        """The state before the first step."""
        return call(self.machine.init, params, [group.numbers() for group in self.hyper])

    def values_of(self, state: Any) -> Values:
        """The values of a state, of each leaf apart."""
        plain = unpacked(state) if isinstance(state, State) else state
        fields = self.fields_of(state)
        if self.tree is not self.tree.whole:
            plain = without_turned_codes(plain, fields, self.tree, self.machine.orientation)
        return fields.unpacked(plain, self.tree, self.machine.recipe.title)

    def state_of(self, values: Values, like: Any) -> Any:
        """The state with these values, in the fields, codes and shardings of a state of the same rule."""
        with jax.enable_x64(True):
            state = self.fields_of(like).packed(values, self.tree, getattr(like, STATISTICS, None))
            if self.tree is self.tree.whole:
                return state
            return stored_as(unpacked(like) if isinstance(like, State) else like, state)

    def fields_of(self, state: Any) -> Fields:
        """The fields of a state, which a transformation may call otherwise than the rule, in the same order."""
        fields = self.machine.fields
        if not isinstance(state, State):
            return fields
        names = [name for name in state._fields[1:] if name != STATISTICS]  # type: ignore[attr-defined]
        if len(names) != len(fields.every):
            raise StateMismatch(
                f"the state has {', '.join(names) or 'no states'}, and {self.machine.recipe.title} has "
                f"{', '.join(fields.every) or 'none'}: give the rule that it is of"
            )
        called = dict(zip(fields.every, names, strict=True))
        leaves = {n: jax.tree.leaves(getattr(state, called[n])) for n in fields.arrays}
        complexes = frozenset(n for n, arrays in leaves.items() if arrays and all(map(jnp.iscomplexobj, arrays)))
        return Fields({n: called[n] for n in fields.arrays}, {n: called[n] for n in fields.numbers}, complexes)


def run_of(
    rule: Rules, hyper: Mapping[str, Given], tags: Mapping[str, Collection[str]] | None, params: Any, seed: int,
    state_dtype: Any = None, state: Any = None, weights: str = "", axes: AxisRoles | None = None,
) -> JaxRun:  # fmt: skip
    """The run of these arguments of `rulec.jax.init`; `state` is the state of the rule by itself.

    The tree of the run has every leaf as torch keeps it, whatever its rule.
    """
    prescription = recipe(rule, hyper, tags, axes)
    engine = machine(prescription, options(state_dtype, False, 0, weights))
    leaves = real_tree(params, prescription.untrained)
    engine.check_names(leaves.names)
    tree = oriented(leaves, prescription.axes.of)
    plan = engine.plan_of(tree, None, None, False)
    return JaxRun(engine, tree, plan, prescription.groups, checked_seed(seed), state, prescription.axes)


def real_tree(params: Any, untrained: Untrained = lambda names: ()) -> Tree:
    """The leaves of parameters; TensorError where a trained one is complex."""
    tree = flat(params, "the parameter", untrained=untrained)
    tree.check_real("files that other frameworks read have real ones")
    return tree


def leaf_names(tree: Tree) -> list[str]:
    """The paths of a tree's leaves; of a tree that is a leaf itself its place."""
    return ["0"] if tree.names == ("the parameter",) else list(tree.names)


def inner_state(state: Any) -> tuple[Callable[[Any], Any], Any]:
    """The one state of a rule inside a larger one, after a function that puts another in its place."""
    structure: Any
    leaves, structure = jax.tree.flatten(state, is_leaf=lambda x: isinstance(x, State))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, State)]
    if len(places) > 1:
        raise RulecError(
            f"there are {len(places)} states of rules in the state: save and load each by itself, in a file of its own"
        )
    if not places:
        return lambda new: new, state
    return lambda new: structure.unflatten([*leaves[: places[0]], new, *leaves[places[0] + 1 :]]), leaves[places[0]]


def _plain(group: Group) -> dict[str, float]:
    """The hyper-parameters of a group that are numbers here and now."""
    settings = {name: group.hyper.get(name, setting.default) for name, setting in group.settings.items()}
    known = {k: v for k, v in settings.items() if not (v is None or callable(v) or is_traced(v) or isinstance(v, Node))}
    return {name: float(value) for name, value in known.items()}
