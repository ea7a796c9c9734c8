"""One step as a pure JAX function, traced as a whole, so that XLA sees every stage of every bucket at once.

On a mesh of explicit axes parameters and states stay sharded as they are. For matrix functions of equal matrices on a
mesh, each device works on whole matrices: their stack is sharded along its batch. This takes two all-to-alls along each
axis of the mesh, one before the work and one after it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from rulec.functional.apart import ApartGaps, ApartStep, Computed, run_apart
from rulec.functional.plan import Bucket, Guard, StepPlan
from rulec.functional.step import run_buckets
from rulec.functional.step_values import Statistics, StepValues
from rulec.functional.values import Hypers, Values
from rulec.jax import cpu
from rulec.jax.apart import apart
from rulec.jax.first import EVERYWHERE
from rulec.jax.library import LIBRARY, automatic, specs_of
from rulec.jax.packing import Pieces, unpiece, unpiece_all
from rulec.language.expr.node import Node, Op
from rulec.runtime.buckets.reductions import Waits
from rulec.runtime.stages.evaluate import STACKED, shapes_of


def where_wanted(wanted: Any, function: Callable[..., Any], operands: Sequence[Any]) -> Any:
    """The function's result where `wanted` is true; else zeros of the same shape, which nobody reads."""
    arrays = [x for x in operands if isinstance(x, jax.Array)]

    def compute(traced: Sequence[Any]) -> Any:
        rest = iter(traced)
        return function(*(next(rest) if isinstance(x, jax.Array) else x for x in operands))

    shape = jax.eval_shape(compute, arrays)
    return jax.lax.cond(wanted, compute, lambda _: jnp.zeros(shape.shape, shape.dtype), arrays)


class GuardedGaps(ApartGaps):
    """Computes matrix functions matrix by matrix, or where that is less work with whole matrices on each device.

    XLA would shard all matrices of a stack alike. A matrix function with a guard is computed only where the guard's
    condition holds: for a stack where it holds for any of its matrices.
    """

    def _kind(self, value: Node, arguments: Sequence[Any]) -> Any:
        mesh = self._mesh(arguments)
        return None if mesh is None else (mesh, *shapes_of(arguments))

    def _mesh(self, arguments: Sequence[Any]) -> Any:
        """The mesh of a matrix, or of the leaves that it comes from: a result of conditional code has none."""
        source: Any = self.source
        return mesh_of(arguments[0]) or mesh_of(source.step.grads[source.bucket.places[0]])

    def _stacked(self, value: Node, function: Callable[..., Any], operands: Sequence[list[Any]]) -> Sequence[Any]:
        mesh = self._shared_by(value, operands)
        if mesh is None:
            return [self.rounded(value, function(*each)) for each in operands]
        return super()._stacked(value, by_whole_matrices(function, mesh), operands)

    def _shared_by(self, value: Node, operands: Sequence[list[Any]]) -> Any:
        """The mesh whose devices share equal matrices of a matrix function; None where each works on all."""
        matrices = operands[0][0]
        mesh = self._mesh(operands[0])
        if mesh is None or value.op not in STACKED or len(matrices) > 1:
            return None
        return mesh if pays(value.op, len(operands), matrices.shape[1:], mesh.size) else None

    def _matrix(self, value: Node) -> Generator[Waits, Any, Any]:
        """A matrix function of all tensors. A quantile, which may be a number of each tensor, has no guard."""
        guard = None if value.op is Op.QUANTILE else self.source.bucket.guards.get(value)  # type: ignore[attr-defined]
        if guard is None or guard.condition not in self.values or not self.is_number(guard.condition):
            return (yield from super()._matrix(value))
        operands = [self.operands(value, i) for i in range(self.count)]
        results: dict[int, Any] = {}
        for places in self._alike(value, operands):
            wanted = [self._wanted(guard, i) for i in places]
            results |= zip(places, self._guarded(value, wanted, [operands[i] for i in places]), strict=True)
        return [results[i] for i in range(self.count)]

    def _wanted(self, guard: Guard, i: int) -> Any:
        """Whether a guarded value of tensor i is read."""
        holds = jnp.asarray(self.library.at(self.values[guard.condition], i)) != 0
        return holds == guard.truth

    def _guarded(self, value: Node, wanted: Sequence[Any], operands: Sequence[list[Any]]) -> Sequence[Any]:
        """A matrix function of equal matrices, where they are wanted."""
        function, mesh = self._matrix_function(value), self._shared_by(value, operands)
        if mesh is None:
            pairs = zip(wanted, operands, strict=True)
            return [self.rounded(value, where_wanted(holds, function, each)) for holds, each in pairs]
        whole, any_wanted = by_whole_matrices(function, mesh), jnp.stack(wanted).any()
        return super()._stacked(value, lambda *stack: where_wanted(any_wanted, whole, stack), operands)


def one_step(
    plan: StepPlan, params: Sequence[Any], grads: Sequence[Any], values: Values, hyper: Hypers,
    inputs: Mapping[str, Any], numbers: Sequence[Any] | None = None,
) -> tuple[list[Any], Values, Statistics]:  # fmt: skip
    """New parameters, or with `Options.update` their changes, in order; the new state; and the statistics.

    The arguments are those of `rulec.functional.step_values.StepValues`, except for its library.
    """
    if any(isinstance(arrays, Pieces) for arrays in values.arrays.values()):
        return _run(plan, params, grads, values, hyper, inputs, numbers)

    def stepped(params: Any, grads: Any, old: Any, hyper: Any, inputs: Any, numbers: Any) -> Any:
        results, new, statistics = _run(plan, params, grads, Values(*old), hyper, inputs, numbers)
        return results, tuple(new), statistics

    operands = [*params], [*grads], tuple(values), hyper, inputs, numbers
    measured: dict[str, dict[int, PartitionSpec]] = {}
    for name, place, _ in plan.measured():
        measured.setdefault(name, {})[place] = EVERYWHERE
    specs = specs_of([*params]), specs_of(tuple(values)), measured
    results, new, statistics = automatic(stepped, operands, specs)
    return results, Values(*new), statistics


def _run(plan: StepPlan, *operands: Any) -> tuple[list[Any], Values, Statistics]:
    """The step itself. Kernels measure in their own pass.

    Of XLA's code the statistics are a computation of their own, of the same operands: the code of the step stays as it
    is without them, and so do its bits.
    """
    operands = (*operands, LIBRARY)
    step = StepValues(plan, *operands)
    runs = [JaxBucketStep(step, bucket) for bucket in plan.buckets]
    if not plan.options.watch or all(run.cpu_kernel is not None for run in runs):
        return *run_buckets(step, runs), step.statistics
    return run_apart(plan, operands, StepValues, JaxBucketStep, apart)


class JaxBucketStep(ApartStep):
    """One bucket's share of a step, by XLA's own code or by a kernel of the cpu backend; states may be packed."""

    gaps = GuardedGaps

    def __init__(self, step: StepValues, bucket: Bucket, computed: Computed | None = None) -> None:
        super().__init__(step, bucket, computed)
        self.cpu_kernel = None if computed else cpu.kernel_for(self, step.plan.options.backend)
        if self.cpu_kernel is None:
            unpiece_all(self.states.values(), bucket.places)

    def stored(self, buffer: str, i: int) -> Any:
        """A buffer of leaf i, by itself where its state is packed."""
        return unpiece(super().stored(buffer, i))

    def _decode(self) -> None:
        for state in self.bucket.formats:
            unpiece_all([self.states[state]], self.bucket.places)
        super()._decode()

    def _unless(self, skip_mask: Sequence[Any] | None, i: int, old: Any, new: Any) -> Any:
        return super()._unless(skip_mask, i, unpiece(old), new)

    def stage(self, index: int, skip_mask: Sequence[Any] | None) -> None:
        """One stage of every leaf; by the kernel of the cpu backend, where there is one."""
        if self.cpu_kernel is None:
            super().stage(index, skip_mask)
            return
        done = cpu.stage(self.cpu_kernel, self, index)
        for i, new in enumerate(done.arrays):
            for buffer, value in new.items():
                self.keep(buffer, i, value, None)
        self.between.reduced.update(done.reduced)


def mesh_of(matrices: Any) -> Any:
    """The mesh of a stack of matrices; None on one device, and inside of `shard_map`."""
    mesh: Any = jax.typeof(matrices).sharding.mesh
    return mesh if mesh.size > 1 and mesh.are_all_axes_auto else None


def pays(op: Op, count: int, sides: Sequence[int], devices: int) -> bool:
    """Whether the busiest device multiplies no more with whole matrices than with its part of every matrix.

    Of an iteration of Newton-Schulz XLA divides the two products with the matrix itself, and repeats the square of its
    Gram matrix on every device. It repeats all of a decomposition.
    """
    short, long = sorted(sides)
    divided, repeated = (2 * long, short) if op is Op.NEWTON_SCHULZ else (0, 1)
    busiest = -(-count // devices)
    return count > 1 and busiest * (divided + repeated) <= count * (divided / devices + repeated)


def by_whole_matrices(function: Callable[..., Any], mesh: Any) -> Callable[..., Any]:
    """The same function of stacks `(batch, rows, cols)` on a mesh, with every matrix whole on one device."""
    axes = [name for name, size in mesh.shape.items() if size > 1]

    def of_stacks(*operands: Any) -> Any:
        count = len(operands[0])
        moved = [_moved(x, mesh, axes) if getattr(x, "ndim", 0) else x for x in operands]
        result = function(*moved)
        # Back along the same ways.
        for taken in range(len(axes), -1, -1):
            result = _cut(result, mesh, axes, taken)
        return result[:count]

    return of_stacks


def _moved(stack: Any, mesh: Any, axes: Sequence[str]) -> Any:
    """A stack cut along its batch over all axes of a mesh; zeros fill it up."""
    missing = -len(stack) % mesh.size
    stack = jnp.pad(stack, ((0, missing), (0, 0), (0, 0))) if missing else stack
    for taken in range(len(axes) + 1):
        stack = _cut(stack, mesh, axes, taken)
    return stack


def _cut(stack: Any, mesh: Any, axes: Sequence[str], taken: int) -> Any:
    """A stack whose batch is cut over the last axes of a mesh; XLA chooses how rows and columns lie on the others.

    One axis at a time, the innermost first: XLA gathers the whole stack where it has to move several at once.
    """
    others = PartitionSpec.UNCONSTRAINED if taken < len(axes) else None
    batch = tuple(axes[::-1][:taken]) or None
    spec = PartitionSpec(batch, others, others)  # type: ignore[no-untyped-call]
    return jax.lax.with_sharding_constraint(stack, NamedSharding(mesh, spec))  # type: ignore[no-untyped-call]
