"""What a step needs in memory, from shapes alone: bytes by kind, by XLA's own analysis of the compiled step."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

from rulec.jax.machine import Settings, call, is_wide, machine, numbered
from rulec.jax.recipe import Given, Rules, recipe
from rulec.jax.transform import options


@dataclass(frozen=True)
class StepBytes:
    """Bytes that live at the peak of a step.

    `weights`, `state` and `batch` are what a step is given, `copies` results that do not lie where old values did. Of
    what XLA allocates for the step itself, `activations` are kept from the forward pass for the backward one,
    `gradients` may have to live together, both as shapes tell, and `temporaries` are the rest.
    """

    weights: int
    state: int
    batch: int
    activations: int
    gradients: int
    temporaries: int
    copies: int = 0

    @property
    def working(self) -> int:
        """What XLA allocates for the step itself."""
        return self.activations + self.gradients + self.temporaries

    @property
    def peak(self) -> int:
        """All of it."""
        return self.weights + self.state + self.batch + self.working + self.copies

    def as_dict(self) -> dict[str, int]:
        """All of it by name, the sum as `peak`."""
        return {**asdict(self), "peak": self.peak}

    def __str__(self) -> str:
        return "\n".join(f"{name:12}{number:>18,}" for name, number in self.as_dict().items())


def shared_out(given: tuple[int, int, int], working: int, activations: int, gradients: int, copies: int) -> StepBytes:
    """The bytes of a step whose temporary buffer is `working`: at most so many activations and gradients, then others.

    `given` are weights, state and batch.
    """
    kept = min(activations, working)
    alive = min(gradients, working - kept)
    return StepBytes(*given, kept, alive, working - kept - alive, copies)


def deferred_bytes(
    loss: Callable[..., Any], rule: Rules, params: Any, *others: Any, state_dtype: Any = None,
    tags: Mapping[str, Collection[str]] | None = None, **hyper: Given,
) -> StepBytes:  # fmt: skip
    """What a step takes in two calls: all gradients by `jax.grad` of `loss(params, *others)`, then `rulec.jax.step`.

    `params` and `others` are arrays, or `jax.ShapeDtypeStruct`s that need no memory.
    """
    params, others = shapes(params), shapes(others)
    backward: Any = jax.jit(jax.value_and_grad(loss)).lower(params, *others).compile().memory_analysis()
    made, numbers = numbered(recipe(rule, hyper, tags))
    found = machine(made, Settings(options(state_dtype, False, 0), (), is_wide()))
    state = call(lambda: jax.eval_shape(found.init, params, numbers))
    update = call(lambda: found.step.lower(params, params, state, numbers, {}).compile()).memory_analysis()
    # Gradients are results of the one and operands of the other.
    first, second = int(backward.temp_size_in_bytes), int(update.temp_size_in_bytes)
    kept = min(residual_bytes(loss, params, *others), first) if first >= second else 0
    copies = max(0, int(update.output_size_in_bytes) - int(update.alias_size_in_bytes)) if second > first else 0
    weights, others_own = bytes_of(params), bytes_of(others)
    return StepBytes(weights, bytes_of(state), others_own, kept, weights, max(first, second) - kept, copies)


def residual_bytes(loss: Callable[..., Any], params: Any, *others: Any) -> int:
    """The bytes that the backward pass of `loss(params, *others)` reads of the forward one, without its operands."""

    def kept(params: Any, *others: Any) -> Any:
        return jax.tree.leaves(jax.vjp(lambda p: loss(p, *others), params)[1])

    made = jax.make_jaxpr(kept)(params, *others).jaxpr
    given = {id(variable) for variable in (*made.invars, *made.constvars)}
    found = {id(v): v for v in made.outvars if id(v) not in given and not isinstance(v, Literal)}
    return sum(_bytes(v.aval) for v in found.values())


def bytes_of(tree: Any) -> int:
    """The bytes of all arrays of a tree, or of what stands for them with a shape and a dtype."""
    return sum(_bytes(leaf) for leaf in jax.tree.leaves(tree))


def _bytes(leaf: Any) -> int:
    if not hasattr(leaf, "dtype"):
        return 0
    size: int = math.prod(np.shape(leaf)) * leaf.dtype.itemsize
    return size


def shapes(tree: Any) -> Any:
    """A tree of arrays, or of what stands for them, as shapes and dtypes alone."""
    return jax.tree.map(_shape, tree)


def _shape(leaf: Any) -> Any:
    if not hasattr(leaf, "dtype") or isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    return shape_of(np.shape(leaf), jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True))


def shape_of(shape: tuple[int, ...], dtype: Any) -> Any:
    """What stands for an array of this shape."""
    return jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]
