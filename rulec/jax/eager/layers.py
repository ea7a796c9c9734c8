"""Stacked layers in JAX: stacks for `eager_scan` to lists for `rulec.jax.step` and checkpoints, and writes in place.

XLA reads and writes one layer of a stack in place on three conditions. The read slice keeps the layer as an axis of
length one: no change of shape stands between reading and writing. XLA looks for a harmless order of reads and writes;
`rulec.jax.library` asks for that. Such an order exists: where it does not, a leaf is cut out first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rulec.compiler.ir import Program
from rulec.functional.plan import StepPlan
from rulec.functional.values import Values
from rulec.jax.eager.memory import shape_of
from rulec.jax.eager.parts import Arguments, Parts, Subtree, put_back, share_of
from rulec.language.expr.node import Op, walk


def listed(params: Any) -> Any:
    """Parameters with a list of layers."""
    stacks, structure = jax.tree.flatten(params["layers"])
    layers = zip(*(list(stack) for stack in stacks), strict=True)
    return {"layers": [jax.tree.unflatten(structure, layer) for layer in layers], "rest": params["rest"]}


def stacked(params: Any) -> Any:
    """Parameters with a stack for each array of a layer."""
    return {"layers": jax.tree.map(lambda *layers: jnp.stack(layers), *params["layers"]), "rest": params["rest"]}


def _layer(stack: Any, i: int) -> Any:
    """A layer of a state of stacks, such as codes and scales."""
    return jax.tree.map(lambda array: array[i], stack)


def _stack(layers: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *arrays: jnp.stack(arrays), *layers)


@dataclass(frozen=True)
class Split:
    """The plans of one layer and of the rest, and how many layers there are."""

    layer: StepPlan
    rest: StepPlan
    count: int

    @property
    def leaves(self) -> int:
        """The number of leaves of all layers together."""
        return len(self.layer.leaves) * self.count

    @property
    def own_counts(self) -> bool:
        """Whether each leaf has a count of its own in the state of all parameters as one tree."""
        buckets = [*self.layer.buckets, *self.rest.buckets]
        skips = any(bucket.program.skip is not None for bucket in buckets)
        several = len({*self.layer.rules, *self.rest.rules}) > 1
        return self.layer.own_counts or self.rest.own_counts or (skips and several)

    def level(self, name: str) -> str:
        """The level of a state that is a number."""
        return self.layer.numbers.get(name) or self.rest.numbers[name]

    def joined(self, layers: Values, rest: Values) -> Values:
        """The values of all parameters as one tree, from the values of stacks and of the rest."""
        width = len(self.layer.leaves)
        values = Values(self._count(layers.count, rest.count))
        for name in {**layers.arrays, **rest.arrays}:
            stacks = layers.arrays.get(name, {})
            values.arrays[name] = {
                i * width + j: _layer(stack, i) for i in range(self.count) for j, stack in stacks.items()
            }
            values.arrays[name] |= {self.leaves + k: array for k, array in rest.arrays.get(name, {}).items()}
        for name in {**layers.numbers, **rest.numbers}:
            pair = layers.numbers.get(name), rest.numbers.get(name)
            values.numbers[name] = self._number(self.level(name), *pair)
        return values

    def _count(self, layers: Any, rest: Any) -> Any:
        if not self.own_counts:
            return layers[0]
        each = layers if layers.ndim > 1 else jnp.broadcast_to(layers[:, None], (self.count, len(self.layer.leaves)))
        return jnp.concatenate([each.reshape(-1), jnp.broadcast_to(rest, (len(self.rest.leaves),))])

    def _number(self, level: str, layers: Any, rest: Any) -> Any:
        if layers is None or rest is None:
            alone = rest if layers is None else layers
            return alone if layers is None else alone.reshape(-1) if level == "tensor" else alone[0]
        if level == "tensor":
            return jnp.concatenate([layers.reshape(-1), rest])
        if level == "model":
            return layers[0]
        groups = {route.group for route in self.layer.routes if route is not None}
        return jnp.where(np.array([group in groups for group in range(self.layer.groups)]), layers[0], rest)

    def parted(self, whole: Values) -> tuple[Values, Values]:
        """The values of stacks and of the rest, from the values of all parameters as one tree."""
        width, (layer_count, rest_count) = len(self.layer.leaves), self._counts(whole.count)
        layers, rest = Values(layer_count), Values(rest_count)
        for name, arrays in whole.arrays.items():
            rest.arrays[name] = {k - self.leaves: array for k, array in arrays.items() if k >= self.leaves}
            having = [j for j in range(width) if j in arrays]
            layers.arrays[name] = {j: _stack([arrays[i * width + j] for i in range(self.count)]) for j in having}
        for name, number in whole.numbers.items():
            cut = len(self.layer.having.get(name, ())) * self.count if self.level(name) == "tensor" else None
            if name in self.layer.numbers:
                layers.numbers[name] = self._repeated(number[:cut] if cut is not None else number, cut is not None)
            if name in self.rest.numbers:
                rest.numbers[name] = number if cut is None else number[cut:]
        return layers, rest

    def _counts(self, count: Any) -> tuple[Any, Any]:
        if not self.own_counts:
            return jnp.broadcast_to(count, (self.count,)), count
        layers, rest = count[: self.leaves].reshape(self.count, -1), count[self.leaves :]
        return (layers if self.layer.own_counts else layers[:, 0]), (rest if self.rest.own_counts else rest[0])

    def _repeated(self, number: Any, each: bool) -> Any:
        return number.reshape(self.count, -1) if each else jnp.broadcast_to(number, (self.count, *number.shape))


class Stacks:
    """The update of one layer of stacks; `layer` has the shapes and dtypes of one layer."""

    def __init__(self, parts: Parts, layer: Subtree, arguments: Arguments) -> None:
        self._parts, self._layer, self._arguments = parts, layer, arguments

    def replaced(self, index: Any, grads: Any, stacks: tuple[Any, Any]) -> tuple[Any, Any]:
        """Stacks of parameters and of the state with new values for one layer, by its number and its gradients."""
        params, state = stacks
        _, gradients, plan, _ = self._parts.begun(self._layer, grads, jax.tree.map(_one, state))
        whole = self._parts.tree(self._layer._replace(tree=params))
        values = self._parts.fields.unpacked(state, whole, self._parts.recipe.title)
        old = Values(_at(values.count, index), {}, {name: _at(x, index) for name, x in values.numbers.items()})
        new, results, turn = old.copied(), list(whole.arrays), index
        first = index.astype(jnp.int64) * len(results)
        for place, grad in enumerate(gradients.arrays):
            leaf_states = [arrays for arrays in values.arrays.values() if place in arrays]
            stacks_of_leaf = [results[place], *(arrays[place] for arrays in leaf_states)]
            names = [name for name, arrays in values.arrays.items() if place in arrays]
            leaf = _Leaf(self._parts, plan, place, names, self._arguments, first + place, old)
            updated, share, turn = leaf.moved(grad, [_cut(stack, turn) for stack in stacks_of_leaf], turn)
            put_back(plan, new, place, share)
            results[place], *changed = map(_put, stacks_of_leaf, updated, [index] * len(updated))
            for arrays, stack in zip(leaf_states, changed, strict=True):
                arrays[place] = stack
        values.count = values.count.at[index].set(new.count)
        values.numbers = {name: x.at[index].set(new.numbers[name]) for name, x in values.numbers.items()}
        return whole.structure.unflatten(results), self._parts.fields.packed(values, whole)


@dataclass(frozen=True)
class _Leaf:
    """One leaf of one layer: its place in the plan of the layer, the states it has, and its number in the model.

    `old` has the numbers of the layer's state.
    """

    parts: Parts
    plan: StepPlan
    place: int
    names: list[str]
    arguments: Arguments
    number: Any
    old: Values

    def moved(self, grad: Any, held: list[Any], turn: Any) -> tuple[list[Any], Values, Any]:
        """New values of the parameter and the states in `held`, each a stack of one; new numbers; the next `turn`."""
        alone = self.parts.alone(self.plan, self.place)
        if all(in_place(bucket.program) for bucket in alone.buckets):
            arrays, (count, numbers) = jax.vmap(self._new, out_axes=(0, None))(grad[None], *held)
            return arrays, Values(count, {}, numbers), turn
        layer = _first(held)
        share = self._share(layer[1:])
        start = layer, (share.count, share.numbers)
        (arrays, (count, numbers)), turn = _apart(lambda carried: self._new(grad, *carried[0]), start, turn)
        return _stack_of_one(arrays), Values(count, {}, numbers), turn

    def _new(self, grad: Any, param: Any, *arrays: Any) -> tuple[list[Any], Any]:
        share = self._share(arrays)
        result, new = self.parts.leaf_moved(self.plan, self.place, param, grad, share, self.arguments, self.number)
        return [result, *(new.arrays[name][0] for name in self.names)], (new.count, new.numbers)

    def _share(self, arrays: Any) -> Values:
        states = {name: {self.place: array} for name, array in zip(self.names, arrays, strict=True)}
        values = Values(self.old.count, states, self.old.numbers)
        return share_of(self.plan, self.parts.alone(self.plan, self.place), values, self.place)


def in_place(program: Program) -> bool:
    """Whether XLA can write new values over old ones as it makes them, one buffer after the other.

    It makes a pass for each buffer. It can where in some order no pass reads a buffer that an earlier pass wrote.
    """
    if not program.elementwise:
        return False
    stores = {store.buffer: store.value for store in program.stages[0].stores}
    reads = {name: {str(n.arg) for n in walk([value]) if n.op is Op.LOAD} for name, value in stores.items()}
    try:
        TopologicalSorter({name: (loads & stores.keys()) - {name} for name, loads in reads.items()}).prepare()
    except CycleError:
        return False
    return True


def _apart(function: Callable[[Any], Any], operands: Any, turn: Any) -> tuple[Any, Any]:
    """The function's results, in the shapes of its operands, and `turn` again, as a number that depends on them.

    They are computed in a loop of one turn, apart from all operations around it. The operands are cut out of the
    stacks before the loop, and its results are written back after it. The number of turns depends on `turn`, so XLA
    does not know it. `turn` is never negative.
    """
    turns = jnp.where(turn < 0, jnp.int32(0), jnp.int32(1))
    done, results = jax.lax.while_loop(
        lambda carried: carried[0] < turns,
        lambda carried: (carried[0] + 1, function(carried[1])),
        (jnp.int32(0), operands),
    )
    return results, turn + done - 1


def _one(stack: Any) -> Any:
    return shape_of(stack.shape[1:], stack.dtype)


def _first(stacks: Any) -> Any:
    return jax.tree.map(lambda stack: stack[0], stacks)


def _stack_of_one(layer: Any) -> Any:
    return jax.tree.map(lambda array: array[None], layer)


def _at(stack: Any, index: Any) -> Any:
    return jax.lax.dynamic_index_in_dim(stack, index, 0, keepdims=False)


def _cut(stack: Any, index: Any) -> Any:
    """A layer of a state of stacks, such as codes and scales."""
    return jax.tree.map(lambda array: jax.lax.dynamic_slice_in_dim(array, index, 1, 0), stack)


def _put(stack: Any, layer: Any, index: Any) -> Any:
    return jax.tree.map(lambda array, new: jax.lax.dynamic_update_slice_in_dim(array, new, index, 0), stack, layer)
