"""Stacks of layers, as for `eager_scan`, to a list of layers, as for `rulec.jax.step` and checkpoints; and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rulec.functional.plan import StepPlan
from rulec.functional.values import Values


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
