"""What is worked out between the stages of a step that JAX traces: every function gives new arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from rulec.compiler import random
from rulec.compiler.reductions import REDUCTIONS
from rulec.errors import InternalError
from rulec.jax.arrays import ARITHMETIC, MATRIX
from rulec.language.node import Op

Places = np.ndarray[Any, Any]


class JaxLibrary:
    """jnp on arrays and on what stands for them under a trace, with JAX allowed 64 bits."""

    arithmetic: Mapping[Op, Callable[..., Any]] = ARITHMETIC
    matrix: Mapping[Op, Callable[..., Any]] = MATRIX

    _REDUCE: Mapping[Op, Callable[..., Any]] = {Op.SUM: jnp.sum, Op.MIN: jnp.min, Op.MAX: jnp.max}

    def constant(self, value: float) -> Any:
        """A float64 number."""
        return jnp.float64(value)

    def numbers(self, values: Any) -> Any:
        """An array of the same numbers."""
        return jnp.asarray(values)

    def read(self, array: Any) -> Any:
        """The array, or in float32 one of 16 bits."""
        return array if array.dtype in (jnp.float32, jnp.float64) else array.astype(jnp.float32)

    def write(self, array: Any, values: Any) -> None:
        """JAX's arrays are never written."""
        raise InternalError("arrays of JAX cannot be written")

    def handed(self, values: Any, dtype: str, own: bool) -> Any:
        """The values in that dtype."""
        return values.astype(dtype)

    def cast(self, values: Any, dtype: str) -> Any:
        """Values in another dtype."""
        return jnp.asarray(values).astype(dtype)

    def copy(self, values: Any) -> Any:
        """The same: what is never written need not be copied."""
        return values

    def spread(self, values: Any, shape: tuple[int, ...]) -> Any:
        """Values broadcast to a shape."""
        return jnp.broadcast_to(values, shape)

    def at(self, values: Any, i: int) -> Any:
        """A 0-d array; arithmetic gives it the dtype of what it meets."""
        return values[i] if jnp.ndim(values) else values

    def take(self, values: Any, places: Places) -> Any:
        """The numbers at these places."""
        return values[np.asarray(places)]

    def put(self, into: Any, places: Places | slice, values: Any) -> None:
        """JAX's arrays are never written."""
        raise InternalError("arrays of JAX cannot be written")

    def together(self, numbers: Sequence[Any]) -> Any:
        """One array of all."""
        return jnp.stack([jnp.asarray(x, jnp.float64).reshape(()) for x in numbers])

    def stack(self, matrices: Sequence[Any]) -> Any:
        """One after the other."""
        return jnp.concatenate([*matrices])

    def split(self, matrices: Any, count: int) -> Sequence[Any]:
        """The parts."""
        return jnp.split(matrices, count)

    def reduce(self, op: Op, values: Any, axes: tuple[int, ...] | None = None) -> Any:
        """In float64."""
        wide = jnp.asarray(values).astype(jnp.float64)
        return self._REDUCE[op](wide, axis=axes, keepdims=axes is not None, initial=REDUCTIONS[op].nothing)

    def random(self, op: Op, count: int, position: Mapping[str, Any], block: int = 0) -> Any:
        """The language's words in integers of 64 bits, and what is made of them in float64."""
        normal = op is Op.NORMAL
        words = self._words(count + count % 2 if normal else count, block, **position)
        uniform = ((words >> 9).astype(jnp.float64) + 0.5) * 2.0**-23
        if not normal:
            return uniform
        u = uniform.reshape(-1, 2)
        radius, angle = jnp.sqrt(-2.0 * jnp.log(u[:, 0])), 2.0 * math.pi * u[:, 1]
        return jnp.stack([radius * jnp.cos(angle), radius * jnp.sin(angle)], axis=-1).reshape(-1)[:count]

    def _words(self, count: int, first: int, *, seed: int, tensor: int, draw: int, step: Any) -> Any:
        block = first + jnp.arange((count + 3) // 4, dtype=jnp.int64)
        at = jnp.asarray(step).astype(jnp.int64)
        counter = (block & random.WORD, block >> 32, draw, at & random.WORD)
        made = random.rounds(counter, (seed & random.WORD, tensor & random.WORD))
        return jnp.stack([jnp.broadcast_to(word, block.shape) for word in made], axis=-1).reshape(-1)[:count]

    def hold(self, thing: Any) -> None:
        """JAX keeps what it needs."""
