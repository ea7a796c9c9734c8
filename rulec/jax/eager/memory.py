"""The memory of a step, from shapes alone: bytes by kind, by XLA's own analysis of the compiled step."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

from rulec.jax.compiled import call, machine, numbered
from rulec.jax.recipe import Given, Rules, recipe
from rulec.jax.transform import options


@dataclass(frozen=True)
class StepBytes:
    """Bytes that live at the peak of a step.

    `weights`, `state` and `batch` are the operands of a step, and `copies` are results outside of the memory of old
    values. XLA's allocation for the step has three kinds: `activations` are kept from the forward pass for the backward
    one, `gradients` may have to live together, both by their shapes, and `temporaries` are the rest.
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
        """XLA's allocation for the step: activations, gradients and temporaries."""
        return self.activations + self.gradients + self.temporaries

    @property
    def peak(self) -> int:
        """The sum of all kinds."""
        return self.weights + self.state + self.batch + self.working + self.copies

    def as_dict(self) -> dict[str, int]:
        """Kind -> bytes, and the sum as `peak`."""
        return {**asdict(self), "peak": self.peak}

    def __str__(self) -> str:
        return "\n".join(f"{name:12}{number:>18,}" for name, number in self.as_dict().items())


def shared_out(
    operands: tuple[int, int, int], working: int, activations: int, gradients: int, copies: int
) -> StepBytes:
    """The bytes of a step with a temporary buffer of `working` bytes: activations, gradients, then temporaries.

    `activations` and `gradients` are upper bounds; `operands` are the bytes of weights, state and batch.
    """
    kept = min(activations, working)
    alive = min(gradients, working - kept)
    return StepBytes(*operands, kept, alive, working - kept - alive, copies)


def deferred_bytes(
    loss: Callable[..., Any], rule: Rules, params: Any, *others: Any, state_dtype: Any = None,
    weights: str = "", tags: Mapping[str, Collection[str]] | None = None, **hyper: Given,
) -> StepBytes:  # fmt: skip
    """The bytes of a step in two calls: all gradients by `jax.grad` of `loss(params, *others)`, then `rulec.jax.step`.

    `params` and `others` are arrays, or `jax.ShapeDtypeStruct`s that need no memory.
    """
    params, others = shapes(params), shapes(others)
    backward: Any = jax.jit(jax.value_and_grad(loss)).lower(params, *others).compile().memory_analysis()
    current, numbers = numbered(recipe(rule, hyper, tags))
    functions = machine(current, options(state_dtype, False, 0, weights))
    state = call(lambda: jax.eval_shape(functions.init, params, numbers))
    update = call(lambda: functions.step.lower(params, params, state, numbers, {}).compile()).memory_analysis()
    # Gradients are results of the one and operands of the other.
    first, second = int(backward.temp_size_in_bytes), int(update.temp_size_in_bytes)
    kept = min(residual_bytes(loss, params, *others), first) if first >= second else 0
    copies = max(0, int(update.output_size_in_bytes) - int(update.alias_size_in_bytes)) if second > first else 0
    of_params, batch = bytes_of(params), bytes_of(others)
    return StepBytes(of_params, bytes_of(state), batch, kept, of_params, max(first, second) - kept, copies)


def residual_bytes(loss: Callable[..., Any], params: Any, *others: Any) -> int:
    """The bytes that the forward pass of `loss(params, *others)` keeps for the backward one, beside its operands."""

    def kept(params: Any, *others: Any) -> Any:
        return jax.tree.leaves(jax.vjp(lambda p: loss(p, *others), params)[1])

    jaxpr = jax.make_jaxpr(kept)(params, *others).jaxpr
    operands = {id(variable) for variable in (*jaxpr.invars, *jaxpr.constvars)}
    residuals = {id(v): v for v in jaxpr.outvars if id(v) not in operands and not isinstance(v, Literal)}
    return sum(_bytes(v.aval) for v in residuals.values())


def bytes_of(tree: Any) -> int:
    """The bytes of all leaves of a tree: arrays, or anything with a shape and a dtype."""
    return sum(_bytes(leaf) for leaf in jax.tree.leaves(tree))


def _bytes(leaf: Any) -> int:
    if not hasattr(leaf, "dtype"):
        return 0
    size: int = math.prod(np.shape(leaf)) * leaf.dtype.itemsize
    return size


def shapes(tree: Any) -> Any:
    """A tree of arrays as `jax.ShapeDtypeStruct`s."""
    return jax.tree.map(_shape, tree)


def _shape(leaf: Any) -> Any:
    if not hasattr(leaf, "dtype") or isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    return shape_of(np.shape(leaf), jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True))


def shape_of(shape: tuple[int, ...], dtype: Any) -> Any:
    """A `jax.ShapeDtypeStruct`."""
    return jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]
