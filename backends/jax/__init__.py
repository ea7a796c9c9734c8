"""The jax backend: jnp code that XLA fuses, one jitted function for a bucket, its parameters and states donated.

Scalars arrive as an array, so neither a new step count nor a new learning rate traces anything again; a new number or
shape of tensors does. Arithmetic is XLA's: reassociation is its own affair, and on the CPU subnormal numbers are zero.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rulec.backend.layout import Layout
from rulec.backend.printer import elementwise_buffers
from rulec.backend.protocol import Rows, Written
from rulec.compiler.ir import Program
from rulec.compiler.view import MatrixView
from rulec.errors import BackendUnavailable, BackendUnsupported

from ..array_print import Dialect, StageFunction, print_file
from ..printed import run_source

_DIALECT = Dialect(
    backend="jax",
    module="jnp",
    parameters=(),
    imports=("import jax.numpy as jnp",),
    functions={
        "cbrt": "from rulec_backends.jax.words import cbrt",
        "erf": "from jax.scipy.special import erf",
        "power": "from jax.numpy import power",
        "sigmoid": "from jax.nn import sigmoid",
    },
    cast="{}.astype(jnp.{})",
    number="jnp.{1}({0})",
    copy="{}",
)


class JaxBackend:
    """Functions of JAX arrays under jit."""

    name = "jax"

    def unavailable_reason(self) -> str | None:
        """None: where JAX is not installed, the one line that says so."""
        return None if importlib.util.find_spec("jax") else "jax is not installed: pip install jax"

    def emit(self, program: Program, layout: Layout) -> str:
        """A function `step` that gives one tensor's new values. BackendUnsupported for what is not elementwise."""
        printer = _printer(program, layout)

        def returns(values: Mapping[str, str]) -> list[str]:
            return [f"return {{{', '.join(f'{b!r}: {text}' for b, text in values.items())}}}"]

        summary = f"New values of one tensor's buffers, in {layout.compute}. Arrays are of one shape, scalars 0-d."
        return print_file(_DIALECT, program, layout, [printer.source(summary, returns)])

    def build(self, program: Program, layout: Layout, source: str) -> JaxKernel:
        """The kernel of a source text. BackendUnavailable for float64 where JAX is kept to 32 bits."""
        import jax

        if layout.compute == "float64" and not jax.config.read("jax_enable_x64"):  # type: ignore[no-untyped-call]
            raise BackendUnavailable(
                f"{program.name} on float64 needs 64-bit JAX: jax.config.update('jax_enable_x64', True) before the "
                "arrays are made, or use float32"
            )
        printer = _printer(program, layout)
        return JaxKernel(
            program.name, layout.compute, printer.columns(), _bucket_step(program.name, source, tuple(printer.buffers))
        )


def _printer(program: Program, layout: Layout) -> StageFunction:
    elementwise_buffers(_DIALECT.backend, program)
    return StageFunction(_DIALECT, program, layout)


@functools.lru_cache(maxsize=1024)
def _bucket_step(name: str, source: str, buffers: tuple[str, ...]) -> Callable[..., Any]:
    """The jitted update of a list of tensors: (parameters, states, gradients, rows) -> new parameters and states.

    Kept by source, so that kernels made again for the same program trace nothing again.
    """
    import jax
    import jax.numpy as jnp

    step = run_source("jax", name, source)["step"]

    def update(param: Any, state: dict[str, Any], grad: Any, row: Any) -> tuple[Any, dict[str, Any]]:
        arrays = {**state, "p": param, "g": grad}
        values = step(*(arrays[b] for b in buffers), *(row[i] for i in range(row.shape[0])))
        for buffer, value in values.items():
            old = arrays[buffer]
            arrays[buffer] = jnp.broadcast_to(jnp.asarray(value).astype(old.dtype), old.shape)
        return arrays["p"], {b: arrays[b] for b in state}

    def bucket(params: Any, states: Any, grads: Any, rows: Any) -> tuple[list[Any], list[dict[str, Any]]]:
        updated = [update(*each) for each in zip(params, states, grads, rows, strict=True)]
        return [p for p, _ in updated], [s for _, s in updated]

    return jax.jit(bucket, donate_argnums=(0, 1))


class JaxKernel:
    """The jitted function of one program and layout."""

    def __init__(self, name: str, compute: str, columns: list[int], step: Callable[..., Any]) -> None:
        self.name, self.compute, self.columns, self.step = name, compute, columns, step

    def bind(
        self, params: Sequence[Any], states: Sequence[dict[str, Any]], views: Sequence[MatrixView] = ()
    ) -> JaxCall:
        """A call over these arrays. They are donated when it runs: afterwards only what it returns can be used."""
        if any(hasattr(p, "data_ptr") for p in params):
            raise BackendUnsupported("jax", "an update of PyTorch's tensors", self.name)
        return JaxCall(self, params, states)


class JaxCall:
    """A kernel bound to the parameters and states of one bucket, and after each call to their new values."""

    def __init__(self, kernel: JaxKernel, params: Sequence[Any], states: Sequence[dict[str, Any]]) -> None:
        self._kernel = kernel
        self._params, self._states = list(params), [dict(s) for s in states]

    def __call__(
        self, stage: int, moving: Sequence[Any], rows: Rows, scratch: Any = None, *,
        tensors: Sequence[int] | None = None, stream: Any = None,
    ) -> Written:  # fmt: skip
        """New (params, states) of the whole bucket, of which all tensors, or `tensors` alone, are updated."""
        fired = list(range(len(self._params)) if tensors is None else tensors)
        table = rows.table[rows.index[fired]][:, self._kernel.columns].astype(self._kernel.compute)
        params, states = [self._params[i] for i in fired], [self._states[i] for i in fired]
        new_params, new_states = self._kernel.step(params, states, list(moving), table)
        for i, param, state in zip(fired, new_params, new_states, strict=True):
            self._params[i], self._states[i] = param, state
        return Written(list(self._params), [dict(s) for s in self._states])
