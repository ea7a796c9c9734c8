"""The jax backend: jnp code that XLA fuses, one jitted function for a bucket, its parameters and states donated.

Scalars arrive as an array, so neither a new step count nor a new learning rate traces anything again; a new number or
shape of tensors does. Arithmetic is XLA's: reassociation is its own affair, and on the CPU subnormal numbers are zero.
Reductions are made in float64, which JAX is allowed for that alone where it is otherwise kept to 32 bits.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rulec.backend.layout import Layout, is_viewed
from rulec.backend.protocol import Rows, Scratch, Written
from rulec.compiler.ir import Program
from rulec.compiler.view import MatrixView
from rulec.errors import BackendUnavailable, BackendUnsupported, InternalError

from ..array_print import print_file
from ..printed import run_source
from .print import DIALECT, JaxFunction

#: New values by buffer, and reductions by name.
Done = tuple[dict[str, Any], dict[str, Any]]


class JaxBackend:
    """Functions of JAX arrays under jit."""

    name = "jax"

    def unavailable_reason(self) -> str | None:
        """None: where JAX is not installed, the one line that says so."""
        return None if importlib.util.find_spec("jax") else "jax is not installed: pip install jax"

    def emit(self, program: Program, layout: Layout) -> str:
        """A function for each stage, `step` or `stage_0` and so on, that gives one tensor's new values."""
        return print_file(DIALECT, program, layout, [f.text() for f in _functions(program, layout)])

    def build(self, program: Program, layout: Layout, source: str) -> JaxKernel:
        """The kernel of a source text. BackendUnavailable for float64 where JAX is kept to 32 bits."""
        import jax

        if layout.compute == "float64" and not jax.config.read("jax_enable_x64"):  # type: ignore[no-untyped-call]
            raise BackendUnavailable(
                f"{program.name} on float64 needs 64-bit JAX: jax.config.update('jax_enable_x64', True) before the "
                "arrays are made, or use float32"
            )
        return _kernel(program, layout, source)


def _functions(program: Program, layout: Layout) -> list[JaxFunction]:
    return [JaxFunction(program, layout, index) for index in range(len(program.stages))]


@functools.lru_cache(maxsize=1024)
def _kernel(program: Program, layout: Layout, source: str) -> JaxKernel:
    """Kept, so that kernels made again for the same program trace nothing again."""
    return JaxKernel(program, layout, source)


class JaxKernel:
    """The functions of one program and layout."""

    def __init__(self, program: Program, layout: Layout, source: str) -> None:
        self.program, self.layout = program, layout
        self.functions = _functions(program, layout)
        printed = run_source("jax", program.name, source)
        self._steps: list[Callable[..., Any]] = [printed[f.name] for f in self.functions]
        self._viewed = is_viewed(program)
        self._jitted: dict[Any, Callable[..., Any]] = {}

    def columns(self, stage: int) -> list[int]:
        """The columns of the scalar table that a stage reads, in order."""
        return self.functions[stage].columns()

    def stage(
        self, index: int, arrays: Mapping[str, Any], scalars: Sequence[Any], view: MatrixView | None = None
    ) -> Done:
        """A stage of one tensor, under whatever traces it, with JAX allowed 64 bits.

        `arrays` are its buffers, scratch and inputs in its shape (or their own), and vectors, by name; `scalars` are
        0-d, of the compute dtype, for `columns(index)`. New values are of the dtypes and shapes that the buffers have.
        """
        function = self.functions[index]
        viewed = function.sees_matrices
        if viewed and view is None:
            raise InternalError("a stage that sees tensors as matrices was given no view")
        taken = [self._seen(arrays[b], view, viewed) for b in function.buffers]
        taken += [self._vector(name, arrays[name], arrays["p"], view, viewed) for name in function.vectors]
        found = self._steps[index](*taken, *scalars)
        new, reduced = found if isinstance(found, tuple) else (found, {})
        return {b: self._stored(b, value, arrays, view, viewed) for b, value in new.items()}, reduced

    @staticmethod
    def _seen(array: Any, view: MatrixView | None, viewed: bool) -> Any:
        return view.matrices(array) if viewed and view is not None else array

    def _vector(self, name: str, array: Any, like: Any, view: MatrixView | None, viewed: bool) -> Any:
        axes = self.program.result(name).axes
        if axes.elementwise:
            return self._seen(array.reshape(like.shape), view, viewed)
        assert view is not None  # only what sees matrices reads vectors of rows and columns
        sizes = {"b": view.batch, "i": view.rows, "j": view.cols}
        return array.reshape(tuple(sizes[c] if c in axes.letters else 1 for c in "bij"))

    def _stored(self, buffer: str, value: Any, arrays: Mapping[str, Any], view: MatrixView | None, viewed: bool) -> Any:
        import jax.numpy as jnp

        shape = arrays["p"].shape
        if viewed and view is not None:
            sides = (view.batch, view.rows, view.cols)
            value = view.tensor(jnp.broadcast_to(value, sides))  # type: ignore[arg-type]
        dtype = getattr(jnp, self.layout.dtype(buffer))
        return jnp.broadcast_to(jnp.asarray(value).astype(dtype), shape)

    def bind(
        self, params: Sequence[Any], states: Sequence[dict[str, Any]], views: Sequence[MatrixView] = ()
    ) -> JaxCall:
        """A call over these arrays. They are donated when it runs: afterwards only what it returns can be used."""
        if any(hasattr(p, "data_ptr") for p in params):
            raise BackendUnsupported("jax", "an update of PyTorch's tensors", self.program.name)
        return JaxCall(self, params, states, views)

    def bucket(self, index: int, views: tuple[MatrixView | None, ...], donated: bool) -> Callable[..., Any]:
        """The jitted stage of a list of tensors: (stored, given, rows) -> new stored arrays, scratch and reductions."""
        import jax

        key = index, views, donated
        if key not in self._jitted:

            def bucket(stored: Any, given: Any, rows: Any) -> Any:
                made = []
                for own, other, row, view in zip(stored, given, rows, views, strict=True):
                    new, reduced = self.stage(index, {**own, **other}, [row[i] for i in range(row.shape[0])], view)
                    kept = {b: new.get(b, old) for b, old in own.items()}
                    made.append((kept, {b: x for b, x in new.items() if b not in own}, reduced))
                return made

            self._jitted[key] = jax.jit(bucket, donate_argnums=(0,) if donated else ())
        return self._jitted[key]


class JaxCall:
    """A kernel bound to the parameters and states of one bucket, and after each call to their new values."""

    def __init__(
        self, kernel: JaxKernel, params: Sequence[Any], states: Sequence[dict[str, Any]], views: Sequence[MatrixView]
    ) -> None:
        self._kernel = kernel
        self._params, self._states = list(params), [dict(s) for s in states]
        self._views: list[MatrixView | None] = [*views] or [None] * len(params)

    def __call__(
        self, stage: int, moving: Sequence[Any], rows: Rows, scratch: Scratch | None = None, *,
        tensors: Sequence[int] | None = None, stream: Any = None,
    ) -> Written:  # fmt: skip
        """New (params, states) of the whole bucket, of which all tensors, or `tensors` alone, are updated.

        Scratch buffers that the stage stores are replaced in `scratch`.
        """
        import jax

        kernel = self._kernel
        fired = list(range(len(self._params)) if tensors is None else tensors)
        table = rows.table[rows.index[fired]][:, kernel.columns(stage)].astype(kernel.layout.compute)
        stored = [{"p": self._params[i], **self._own(i, stage)} for i in fired]
        given = [{"g": g, **{b: x[k] for b, x in (scratch or {}).items()}} for k, g in enumerate(moving)]
        with jax.enable_x64(True):
            made = kernel.bucket(stage, tuple(self._views[i] for i in fired), True)(stored, given, table)
        for place, (i, (kept, new, _)) in enumerate(zip(fired, made, strict=True)):
            self._params[i] = kept.pop("p")
            self._states[i].update(kept)
            for buffer, value in new.items():
                scratch[buffer][place] = value  # type: ignore[index]
        reduced = _reduced(kernel.functions[stage], [found for _, _, found in made])
        return Written(list(self._params), [dict(s) for s in self._states], reduced)

    def _own(self, i: int, stage: int) -> dict[str, Any]:
        """The states of a tensor that a stage takes."""
        return {b: x for b, x in self._states[i].items() if b in self._kernel.functions[stage].buffers}


def _reduced(function: JaxFunction, found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The reductions of a stage: numbers per tensor in one array, rows and columns as they are."""
    made: dict[str, Any] = {}
    for reduction in function.stage.reduces:
        values = [np.asarray(each[reduction.name]) for each in found]
        per_tensor = set(reduction.axes.letters) <= {"k", "n"}
        made[reduction.name] = np.array([float(v) for v in values], np.float64) if per_tensor else values
    return made
