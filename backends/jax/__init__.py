"""The jax backend: jnp code that XLA fuses under jit, parameters and states donated.

Scalars arrive as an array, so neither a new step count nor a new learning rate traces anything again; a new number or
shape of tensors does. Arithmetic is XLA's: reassociation is its own affair, but for sums with numbers, and on the CPU
subnormal numbers are zero.
Reductions are made in float64, which JAX is allowed for that alone where it is otherwise kept to 32 bits.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rulec.backend.protocol import Rows, Scratch, Written
from rulec.compiler.ir import Program
from rulec.compiler.layout import Layout
from rulec.compiler.view import MatrixView
from rulec.errors import BackendUnavailable, BackendUnsupported, InternalError
from rulec.kernel.bucket.slots import of_all

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
        #: Under jit, so that a stage is traced once for all tensors of one shape.
        self._stages = [self._traced_once(index) for index in range(len(self.functions))]
        self._jitted: dict[Any, Callable[..., Any]] = {}

    def columns(self, stage: int) -> list[int]:
        """The columns of the scalar table that a stage reads, in order."""
        return self.functions[stage].columns()

    def stage(
        self, index: int, arrays: Mapping[str, Any], scalars: Sequence[Any], view: MatrixView | None = None
    ) -> Done:
        """A stage of one tensor, under whatever traces it, with JAX allowed 64 bits.

        `arrays` are by name its buffers, scratch and inputs, each in the tensor's shape, and vectors, which are in that
        shape or `(batch, rows, cols)`. `scalars` are 0-d, of the compute dtype, for `columns(index)`. New values are of
        the dtypes and shapes that the buffers have; reductions are numbers or `(batch, rows, cols)`.
        """
        function = self.functions[index]
        if function.sees_matrices and view is None:
            raise InternalError("a stage that sees tensors as matrices was given no view")
        taken = {name: arrays[name] for name in (*function.buffers, *function.vectors)}
        return self._stages[index](taken, list(scalars), arrays["p"].shape, view)  # type: ignore[no-any-return]

    def _traced_once(self, index: int) -> Callable[..., Any]:
        import jax

        function = self.functions[index]

        def stage(arrays: Mapping[str, Any], scalars: Sequence[Any], shape: Any, view: MatrixView | None) -> Done:
            taken = [arrays[b] for b in function.buffers]
            taken += [self._vector(name, arrays[name], shape, view) for name in function.vectors]
            axes = view.axes if view is not None and function.takes_axes else ()
            new, reduced = self._evaluated(index, axes, [*taken, *scalars])
            stored = {b: self._stored(b, value, shape) for b, value in new.items()}
            return stored, {name: self._reduced(name, value, view) for name, value in reduced.items()}

        return jax.jit(stage, static_argnums=(2, 3))

    def _evaluated(self, index: int, axes: Sequence[Any], operands: Sequence[Any]) -> Done:
        """What the printed function returns; a reduction of what another reduces too is worked out apart from it."""
        new, reduced = self._once(index, axes, _apart(operands) if index else operands)
        for names in self.functions[index].repeated:
            again = self._once(index, axes, _apart(operands))[1]
            reduced = {**reduced, **{name: again[name] for name in names}}
        return new, reduced

    def _once(self, index: int, axes: Sequence[Any], operands: Sequence[Any]) -> Done:
        found = self._steps[index](*axes, *operands)
        return found if isinstance(found, tuple) else (found, {})

    def _vector(self, name: str, array: Any, shape: tuple[int, ...], view: MatrixView | None) -> Any:
        axes = self.program.result(name).axes
        if axes.elementwise:
            return array.reshape(shape)
        assert view is not None  # only what sees matrices reads vectors of rows and columns
        rows, cols = view.axes
        gone = ({*rows} if axes.rows is None else set()) | ({*cols} if axes.cols is None else set())
        return array.reshape(tuple(1 if axis in gone else size for axis, size in enumerate(shape)))

    def _reduced(self, name: str, value: Any, view: MatrixView | None) -> Any:
        axes = self.program.result(name).axes
        if view is None or not {"b", "i", "j"} & set(axes.letters):
            return value
        return value.reshape(view.batch, 1 if axes.rows is None else view.rows, 1 if axes.cols is None else view.cols)

    def _stored(self, buffer: str, value: Any, shape: tuple[int, ...]) -> Any:
        import jax.numpy as jnp

        value = jnp.asarray(value, self.layout.dtype(buffer))
        return value if value.shape == shape else jnp.broadcast_to(value, shape)

    def bind(
        self, params: Sequence[Any], states: Sequence[dict[str, Any]], views: Sequence[MatrixView] = ()
    ) -> JaxCall:
        """A call over these arrays. They are donated when it runs: afterwards only what it returns can be used."""
        if any(hasattr(p, "data_ptr") for p in params):
            raise BackendUnsupported("jax", "an update of PyTorch's tensors", self.program.name)
        return JaxCall(self, params, states, views)

    def jitted(self, index: int, view: MatrixView | None) -> Callable[..., Any]:
        """A stage of one tensor under jit: (stored, given, row) -> new values by buffer, and reductions.

        `stored` are donated. A row has what `columns(index)` have, in the compute dtype.
        """
        import jax

        if (index, view) not in self._jitted:

            def stage(stored: Any, given: Any, row: Any) -> Any:
                new, reduced = self.stage(index, {**stored, **given}, [row[i] for i in range(row.shape[0])], view)
                return {**stored, **new}, reduced

            self._jitted[index, view] = jax.jit(stage, donate_argnums=(0,))
        return self._jitted[index, view]


def _apart(operands: Sequence[Any]) -> Sequence[Any]:
    """The same, such that XLA does not see that they are.

    What is worked out of them twice it would otherwise work out once, and keep: an array as large as the parameter, in
    float64 where it is reduced, or on the CPU a number spread out as far.
    """
    import jax

    return jax.lax.optimization_barrier(list(operands))  # type: ignore[no-untyped-call, no-any-return]


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
        reduced = []
        with jax.enable_x64(True):
            for place, (i, g, row) in enumerate(zip(fired, moving, table, strict=True)):
                stored = {"p": self._params[i], **self._own(i, stage)}
                given = {"g": g, **{b: arrays[place] for b, arrays in (scratch or {}).items()}}
                new, found = kernel.jitted(stage, self._views[i])(stored, given, row)
                self._params[i] = new.pop("p")
                reduced.append(found)
                for buffer, value in new.items():
                    if buffer in self._states[i]:
                        self._states[i][buffer] = value
                    else:
                        scratch[buffer][place] = value  # type: ignore[index]
        arrays = [{name: np.asarray(value) for name, value in each.items()} for each in reduced]
        totals = of_all(kernel.functions[stage].stage, arrays)
        return Written(list(self._params), [dict(s) for s in self._states], totals)

    def _own(self, i: int, stage: int) -> dict[str, Any]:
        """The states of a tensor that a stage takes."""
        return {b: x for b, x in self._states[i].items() if b in self._kernel.functions[stage].buffers}
