"""The jax backend: jnp code that XLA fuses under jit, parameters and states donated.

Scalars arrive as an array: a new step count or learning rate traces nothing again, a new number or shape of tensors
does. Arithmetic is XLA's: it may reassociate, except in sums with numbers, and on the CPU subnormal numbers are zero.
Reductions are in float64, also in a process that keeps JAX to 32 bits for all else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from rulec.compiler.ir import Program
from rulec.compiler.layout import Layout
from rulec.compiler.view import MatrixView

from ..common.functional import Done, PureBackend, PureKernel
from .print import JaxFunction


class JaxKernel(PureKernel):
    """The functions of one program and layout."""

    function = JaxFunction
    functions: Sequence[JaxFunction]

    def __init__(self, program: Program, layout: Layout, source: str) -> None:
        import jax

        super().__init__(program, layout, source)
        #: A stage under jit, so that it is traced once for all tensors of one shape.
        self.applied = jax.jit(self.applied, static_argnums=(0, 3, 4))  # type: ignore[method-assign]
        self._jitted: dict[Any, Callable[..., Any]] = {}

    def evaluated(self, index: int, axes: Sequence[Any], operands: Sequence[Any]) -> Done:
        """The results of the printed function. Two reductions of the same operand are computed separately."""
        new, reduced = super().evaluated(index, axes, _apart(operands) if index else operands)
        for names in self.functions[index].repeated:
            again = super().evaluated(index, axes, _apart(operands))[1]
            reduced = {**reduced, **{name: again[name] for name in names}}
        return new, reduced

    def stored(self, buffer: str, value: Any, shape: tuple[int, ...]) -> Any:
        """A value in the dtype of its buffer and the shape of its tensor."""
        import jax.numpy as jnp

        value = jnp.asarray(value, self.layout.dtype(buffer))
        return value if value.shape == shape else jnp.broadcast_to(value, shape)

    def run(self, index: int, stored: Any, call_arrays: Any, row: Any, view: MatrixView | None) -> Done:
        """A stage of one tensor, `stored` donated, with JAX allowed 64 bits."""
        import jax

        with jax.enable_x64(True):
            return self.jitted(index, view)(stored, call_arrays, row)  # type: ignore[no-any-return]

    def jitted(self, index: int, view: MatrixView | None) -> Callable[..., Any]:
        """A stage of one tensor under jit: (stored, call_arrays, row) -> new values by buffer, and reductions.

        `stored` are donated. A row has the numbers of `columns(index)`, in the compute dtype.
        """
        import jax

        if (index, view) not in self._jitted:

            def stage(stored: Any, call_arrays: Any, row: Any) -> Any:
                new, reduced = self.stage(index, {**stored, **call_arrays}, [row[i] for i in range(row.shape[0])], view)
                return {**stored, **new}, reduced

            self._jitted[index, view] = jax.jit(stage, donate_argnums=(0,))
        return self._jitted[index, view]


#: From a program, layout and source to the kernel, cached: a second build for the same program traces nothing again.
_kernel = functools.lru_cache(maxsize=1024)(JaxKernel)


class JaxBackend(PureBackend):
    """Functions of JAX arrays under jit."""

    name = "jax"
    kernel = JaxKernel
    cached = staticmethod(_kernel)
    float64 = "64-bit JAX: jax.config.update('jax_enable_x64', True) before the arrays are made"

    def has_float64(self) -> bool:
        """Whether JAX is allowed 64 bits."""
        import jax

        return bool(jax.config.read("jax_enable_x64"))  # type: ignore[no-untyped-call]


def _apart(operands: Sequence[Any]) -> Sequence[Any]:
    """The same arrays, hidden from XLA's search for common expressions.

    XLA would compute a common expression once and keep it: an array as large as the parameter, in float64 for a
    reduction, or, on the CPU, a number spread over such an array.
    """
    import jax

    return jax.lax.optimization_barrier(list(operands))  # type: ignore[no-untyped-call, no-any-return]
