"""Checkpoints of JAX states, in the format of all frameworks.

A tree of JAX's arrays and a state become a run for checkpoints. Loading returns a state with the values of a
checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rulec import checkpoint
from rulec.checkpoint import Axes, Leaf, Loaded, Names, Parameter, Shared, Stored
from rulec.checkpoint.convert import decoded
from rulec.compiler.layout import scale_name
from rulec.compiler.weights import part_name
from rulec.errors import RulecError, StateMismatch, TensorError
from rulec.formats import UNBIASED, decode, encode
from rulec.functional.plan import StepPlan
from rulec.functional.quantized import Coded, Unbiased
from rulec.functional.values import Values
from rulec.jax.compiled import CompiledRecipe, call, machine
from rulec.jax.leaves import Tree, Untrained, flat
from rulec.jax.library import is_traced
from rulec.jax.packing import STATISTICS, Packed, packed, unpacked
from rulec.jax.recipe import Given, Group, Rules, recipe
from rulec.jax.state import Fields, State
from rulec.jax.transform import options
from rulec.language.expr.node import Node
from rulec.language.hyper import checked_seed


def save(
    file: str | Path, rule: Rules, params: Any, state: Any, *, parameters: bool = False, seed: int = 0,
    weights: str = "", tags: Mapping[str, Collection[str]] | None = None, **hyper: Given,
) -> None:  # fmt: skip
    """Writes a state, and with `parameters` the parameters, as a safetensors file for every framework.

    `state` is the result of `rulec.jax.step` or of a transformation of the rule, or a larger state of optax with it
    inside. Parameters are called by their paths in the tree. `seed`, `weights` and `tags` are as they were for `init`;
    `hyper` is written for information. The file is there as a whole, or the one before it stays.

    Raises StateMismatch where the state is of another rule, TensorError for arrays of other processes.
    """
    _, inner = inner_state(state)
    run = run_of(rule, hyper, tags, params, seed, state=inner, weights=weights)
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
    paths here, or a function. `axes` has for parameters, by their paths here, the axis of the file for each of their
    own, as in `{"dense/kernel": (1, 0)}`. `rule_may_differ` takes the states of a rule with other equations, `seed` is
    the seed of the steps to come. Arrays get the sharding of their parameters. States of leaves that had not been
    updated when the file was saved are as in `rulec.jax.init`, whatever `like` has.

    StateMismatch where the file belongs to other parameters or another rule, or is damaged.
    """
    existing = None if like is None else inner_state(like)[1]
    run = run_of(rule, hyper, tags, params, seed, state_dtype, existing, weights)
    loaded = checkpoint.load(run, file, run.plan.groups, names, axes, rule_may_differ)
    first = run.first(params)
    put, inner = inner_state(first if like is None else like)
    values = Filling(run, str(file), loaded, run.values_of(inner_state(first)[1])).values(run.values_of(inner))
    state = run.fields_of(inner).packed(values, run.tree, getattr(inner, STATISTICS, None))
    return put(packed(state) if any(isinstance(field, Packed) for field in inner) else state)


def load_params(file: str | Path, params: Any, *, names: Names = None, axes: Axes = None) -> Any:
    """The parameters of a file that was saved with `parameters=True`, in the tree, dtypes and shardings of `params`."""
    tree = real_tree(params)
    shapes = {name: tuple(array.shape) for name, array in zip(leaf_names(tree), tree.arrays, strict=True)}
    values = checkpoint.load_values(file, shapes, names, axes)
    return tree.structure.unflatten(
        array_of(value, array, array) for value, array in zip(values, tree.arrays, strict=True)
    )


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

    @cached_property
    def places(self) -> list[int]:
        """The places in the tree of the leaves that have a rule."""
        return [place for place, route in enumerate(self.plan.routes) if route is not None]

    def leaves(self) -> list[Leaf]:
        """The leaves that have a rule, by their paths."""
        names, routes = leaf_names(self.tree), self.plan.routes
        return [
            Leaf(
                names[place], tuple(self.tree.arrays[place].shape), str(self.tree.arrays[place].dtype), rule, place,
                getattr(routes[place], "group", 0), self._rounds(place),
                part_name(self.machine.options.weights, str(self.tree.arrays[place].dtype)),
                getattr(routes[place], "static", {}),
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
        return int(count[leaf] if count.ndim else count), states_of(self.plan, self.values, leaf)

    def value(self, place: int) -> Stored:
        """The parameter itself."""
        return Stored.of(np.asarray(self.tree.arrays[self.places[place]]))

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
        return self.fields_of(state).unpacked(plain, self.tree, self.machine.recipe.title)

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
    state_dtype: Any = None, state: Any = None, weights: str = "",
) -> JaxRun:  # fmt: skip
    """The run of these arguments of `rulec.jax.init`; `state` is the state of the rule by itself."""
    prescription = recipe(rule, hyper, tags)
    engine = machine(prescription, options(state_dtype, False, 0, weights))
    tree = real_tree(params, prescription.untrained)
    plan = engine.plan_of(tree, None, None, False)
    return JaxRun(engine, tree, plan, prescription.groups, checked_seed(seed), state)


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


def states_of(plan: StepPlan, values: Values, place: int) -> dict[str, Stored]:
    """The states of the leaf at a place of the tree, by name."""
    states = {name: arrays[place] for name, arrays in values.arrays.items() if place in arrays}
    coded = {name: state for name, state in states.items() if isinstance(state, Coded)}
    unbiased = {name: state for name, state in states.items() if isinstance(state, Unbiased)}
    states |= {name: state.values for name, state in unbiased.items()}
    for name, state in coded.items():
        states[name] = state.codes.reshape(state.format.codes_shape(plan.leaves[place].shape))
        states[scale_name(name)] = state.scales.reshape(-1)
    for name, level in plan.numbers.items():
        if level == "tensor" and place in plan.having[name]:
            states[name] = np.asarray(values.numbers[name])[plan.having[name].index(place)]
    keys = {name: state.format.key for name, state in coded.items()} | dict.fromkeys(unbiased, UNBIASED)
    return {name: Stored.of(np.asarray(array), format=keys.get(name, "")) for name, array in states.items()}


def _plain(group: Group) -> dict[str, float]:
    """The hyper-parameters of a group that are numbers here and now."""
    settings = {name: group.hyper.get(name, setting.default) for name, setting in group.settings.items()}
    known = {k: v for k, v in settings.items() if not (v is None or callable(v) or is_traced(v) or isinstance(v, Node))}
    return {name: float(value) for name, value in known.items()}


@dataclass(frozen=True)
class Filling:
    """A file's content on its way into a state; `fresh` has the first values of leaves that were never updated."""

    run: JaxRun
    file: str
    loaded: Loaded
    fresh: Values

    def values(self, like: Values) -> Values:
        """The content in the structure, dtypes and shardings of a state."""
        values = Values(self._count(like.count))
        for state, arrays in like.arrays.items():
            values.arrays[state] = {place: self._filled(place, state, array) for place, array in arrays.items()}
        for state, numbers in like.numbers.items():
            values.numbers[state] = call(jnp.asarray, self._numbers(state, numbers).astype(numbers.dtype))
        return values

    @cached_property
    def _saved(self) -> dict[int, Parameter]:
        """The saved parameters by their places in the tree."""
        return dict(zip(self.run.places, map(decoded, self.loaded.parameters), strict=True))

    def _count(self, first: Any) -> Any:
        steps = [*(p.steps for p in self.loaded.parameters), *self.loaded.group_steps, *self.loaded.model_steps]
        if jnp.ndim(first):
            counts = np.zeros(first.shape, first.dtype)
            counts[self.run.places] = steps[: len(self.run.places)]
            return jnp.asarray(counts)
        if len({*steps}) > 1:
            raise StateMismatch(self._other_counts(steps))
        return jnp.asarray(steps[0] if steps else 0, first.dtype)

    def _other_counts(self, steps: Sequence[int]) -> str:
        other = next(i for i, count in enumerate(steps) if count != steps[0])
        names = [p.name for p in self.loaded.parameters]
        title = names[other] if other < len(names) else "their group or the model"
        return (
            f"in {self.file} {names[0]} was updated {steps[0]} times and {title} {steps[other]} times, and a state "
            f"here has one count for all: save when all were updated equally often, and none but those that are trained"
        )

    def _filled(self, place: int, state: str, like: Any) -> Any:
        """A state as `like` is stored."""
        if isinstance(like, Coded):
            return self._codes(place, state, like)
        if isinstance(like, Unbiased):
            return Unbiased(self._array(place, state, like.values))
        return self._array(place, state, like)

    def _array(self, place: int, state: str, like: Any) -> Any:
        saved, param = self._state(place, state), self.run.tree.arrays[place]
        if saved.shape != tuple(like.shape):
            raise StateMismatch(
                f"{state} of {self._saved[place].name} was saved with shape {saved.shape}, where it has "
                f"{tuple(like.shape)}: give the hyper-parameters that decide it as they were"
            )
        return array_of(saved, like, param if saved.shape == tuple(param.shape) else like)

    def _codes(self, place: int, state: str, like: Coded) -> Coded:
        """A state in the format of `like`: the saved codes where they are in it."""
        form, param = like.format, self.run.tree.arrays[place]
        saved = self.loaded.parameters[self.run.places.index(place)].states
        codes, scales = saved.get(state), saved.get(scale_name(state))
        if codes is None or scales is None or codes.format != form.key:
            values = self._state(place, state)
            if values.shape != tuple(param.shape):
                raise StateMismatch(
                    f"{state} of {self._saved[place].name} was saved with shape {values.shape}, where it has "
                    f"{tuple(param.shape)}: give the hyper-parameters that decide it as they were"
                )
            codes, scales = map(Stored.of, encode(form, values.values))
        placed_as = param if form.bits == 8 else like.codes
        return Coded(array_of(codes, like.codes, placed_as), array_of(scales, like.scales, like.scales), form)

    def _state(self, place: int, state: str) -> Stored:
        """A state of a leaf, decoded, or its first value where the leaf was never updated."""
        saved = self._saved[place].states
        if state in saved:
            return saved[state]
        fresh = self.fresh.arrays.get(state, {}).get(place)
        if isinstance(fresh, Coded):
            form, shape = fresh.format, tuple(self.run.tree.arrays[place].shape)
            codes, scales = np.asarray(fresh.codes).reshape(form.codes_shape(shape)), np.asarray(fresh.scales)
            return Stored.of(decode(form, codes, scales.reshape(-1), shape))
        return states_of(self.run.plan, self.fresh, place)[state]

    def _numbers(self, state: str, like: Any) -> np.ndarray[Any, Any]:
        """A state of numbers: for each of its leaves, for each group or for the model."""
        plan, loaded = self.run.plan, self.loaded
        level = plan.numbers[state]
        if level == "tensor":
            return np.array([self._state(place, state).number for place in plan.having[state]])
        if not loaded.begun:
            return np.asarray(self.fresh.numbers[state])
        if level == "group" and np.shape(like) != (plan.groups,):
            raise StateMismatch(
                f"{state} of the state has shape {np.shape(like)}, and the rule has {plan.groups} groups"
            )
        return np.array(loaded.numbers[state]).reshape(np.shape(like))


def array_of(stored: Stored, like: Any, placed_as: Any) -> Any:
    """A saved array in the shape and dtype of `like`, on the devices of `placed_as`."""
    values = np.array(stored.values.astype(like.dtype)).reshape(like.shape)
    with jax.enable_x64(True):
        sharding = getattr(placed_as, "sharding", None)
        committed = getattr(placed_as, "committed", False)
        return jax.device_put(values, sharding) if committed else jnp.array(values)
