"""The arguments of kernels and the values that they follow from, for some tensors of a launch of several stages.

Here they lie in main memory; `rulec.runtime.stages.device_arguments` is for a device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np

from rulec.array_api.slices import Pieces, Runs, Stacks
from rulec.compiler.ir import Axes, Result
from rulec.compiler.layout import ITEM_SIZE
from rulec.language.expr.node import Op
from rulec.language.inputs import per_tensor
from rulec.runtime.buckets.flat import Flats, Remembered
from rulec.runtime.buckets.launch import Launch, Portion
from rulec.runtime.buckets.plan import VIEWS
from rulec.runtime.distributed.process_group import RankGroup
from rulec.runtime.distributed.shards import ShardLayout
from rulec.runtime.stages.kept_stacks import KEPT, KeptStacks, StackShape
from rulec.runtime.stages.portion_numbers import PortionNumbers
from rulec.runtime.stages.sources import Tiled
from rulec.runtime.stages.tiles import room_for

Array = np.ndarray[Any, Any]


class KernelArguments(PortionNumbers):
    """The value source of one portion, and the arguments of its kernels: `rows`, `grads` and `scratch`.

    Values come from its numbers, and from the buffers of its tensors: parameters, states, gradients and inputs.
    """

    def __init__(self, launch: Launch, portion: Portion) -> None:
        super().__init__(launch, portion)
        self.compute, self.seed, self.owner = self.layout.compute, launch.common.seed, launch.common.processes
        self.fill_noise = portion.bucket.capabilities.fill_noise
        self.grads = portion.pick(launch.grads)
        self.scratch: dict[str, Any] = {}
        self.remembered: Remembered | None = portion.remembered if self.library.flattens else None
        self._vectors: dict[str, Pieces] | None = None
        if launch.inputs or launch.version.plan.scratch:
            self._allot()

    @property
    def flats(self) -> Flats | None:
        """The cuts of vectors in flat arrays."""
        return None if self.remembered is None else self.remembered.flats

    def _allot(self) -> None:
        """Scratch buffers and inputs."""
        common, positions = self.launch.common, self.portion.positions
        # Launches that wait for each other run at the same time, so each needs its own scratch.
        owner = self.portion.bucket.device, id(self.launch.version) if self.launch.version.waits else None
        for name in self.launch.version.plan.scratch:
            dtype = self.layout.dtype(name)
            params = [self.portion.bucket.params[i] for i in positions]
            self.scratch[name] = common.scratches((name, owner), params, dtype)
        for name, value in self.launch.inputs.items():
            if per_tensor(self.program.rule.inputs[name]):
                self.scratch[name] = self.portion.pick(value)

    def parted(self, axes: frozenset[str]) -> list[tuple[tuple[RankGroup, ...], Array]]:
        """The indices of sharded tensors, by the rank groups to complete a reduction without these axes."""
        return self.portion.parted(axes)

    def shard_layout(self, i: int) -> ShardLayout:
        """The shard layout of tensor i and of its states."""
        shard_layout = self.portion.tensors[i].shard_layout
        assert shard_layout is not None
        return shard_layout

    def part(self, buffer: str, i: int) -> Any:
        """The local shard of a state of tensor i with a shape of its own."""
        return self.library.cast(self._read(buffer, self._stored(buffer, i)), self.compute)

    @property
    def scaled(self) -> bool:
        """Whether gradients are scaled as they are read."""
        return self.rows.scale is not None

    def lines(self, i: int) -> tuple[Runs, Runs] | None:
        """The rows and columns of the global matrices of tensor i that are local; None where all are."""
        return self.portion.tensors[i].lines

    def places(self, i: int) -> Mapping[str, Runs] | None:
        """The local matrices of the global tensor i, and their rows and columns; None where all are."""
        return self.portion.tensors[i].places

    def matrices(self, buffer: str, i: int) -> Any:
        """A buffer of a tensor as `(batch, rows, cols)`: vectors in float64, matrices in the compute dtype.

        Narrow scratch is as it is stored: its readers round to its dtype.
        """
        elements, letters = (
            self._as_matrices(buffer, self._stored(buffer, i), i),
            self.program.buffer(buffer).axes.letters,
        )
        if self._is_narrow(buffer):
            return elements
        return self.library.cast(elements, self.compute if {"i", "j"} <= set(letters) else "float64")

    @property
    def small(self) -> int:
        """The most elements of a tensor that is in one set with others; 0 in main memory."""
        most = self.library.most_in_set
        return min(most, self.library.small) if self.launch.version.plan.orthogonalizes else most

    @cached_property
    def sets(self) -> Sequence[Sequence[int]]:
        """The tensors of each set: in main memory a set has one."""
        return self.portion.sets(self.small)

    def stacks_of(self, buffer: str, dtype: str | None = None) -> KeptStacks | None:
        """A buffer of all sets of several tensors, in the compute dtype or another, read in one call.

        None where the stacks are too large to be kept, or reading is more than a copy: then each set is read alone.
        """
        changed = buffer == "g" and (self.layout.maximize or self.scaled)
        if self.remembered is None or changed or self._is_narrow(buffer):
            return None
        axes = self.program.buffer(buffer).axes
        dtype = dtype or (self.compute if {"i", "j"} <= set(axes.letters) else "float64")
        several = {k: places for k, places in enumerate(self.sets) if len(places) > 1}
        key = buffer, dtype, self.small
        if key not in self.remembered.stacks:
            shapes = {k: self._stack_shape(buffer, axes, places) for k, places in several.items()}
            fits = sum(shape.size for shape in shapes.values()) <= KEPT
            self.remembered.stacks[key] = KeptStacks(shapes, dtype, self.library) if fits else None
        kept: KeptStacks | None = self.remembered.stacks[key]
        arrays = [self._stored(buffer, i) for places in several.values() for i in places]
        return None if kept is None else kept.read(arrays)

    def _stack_shape(self, buffer: str, axes: Axes, places: Sequence[int]) -> StackShape:
        stored, view = tuple(self._stored(buffer, places[0]).shape), self.portion.tensors[places[0]].view
        if axes.elementwise:
            return StackShape(len(places), stored, view.rows, view.cols, view.transposed)
        _, rows, cols = view.kept_extents(stored, axes.letters)
        return StackShape(len(places), stored, rows, cols, False)

    def stacked(self, buffer: str, places: Sequence[int]) -> Any:
        """A buffer of the tensors of a set as one stack, in new memory. Narrow scratch may be a stack already."""
        if self._is_narrow(buffer):
            return self.library.stack([self.matrices(buffer, i) for i in places])
        arrays = [self._stored(buffer, i) for i in places]
        axes, view = self.program.buffer(buffer).axes, self.portion.tensors[places[0]].view
        batch, rows, cols = (
            (view.batch, view.rows, view.cols)
            if axes.elementwise
            else view.kept_extents(tuple(arrays[0].shape), axes.letters)
        )
        elements, count = self._read(buffer, self.library.in_one(arrays)), len(places) * batch
        turned = axes.elementwise and view.transposed
        shape = (count, cols, rows) if turned else (count, rows, cols)
        stack = elements if tuple(elements.shape) == shape else elements.reshape(shape)
        stack = stack.swapaxes(1, 2) if turned else stack
        return self.library.cast(stack, self.compute if {"i", "j"} <= set(axes.letters) else "float64")

    def write_stack(self, buffer: str, places: Sequence[int], stack: Any) -> None:
        """Writes the new values of a state of the tensors of a set, but of skipped tensors."""
        self.writes()
        self.library.copy_all(*self.parts_of_stack(buffer, places, stack, self.rows.stays))

    def parts_of_stack(
        self, buffer: str, places: Sequence[int], stack: Any, skip_mask: Any
    ) -> tuple[list[Any], list[Any]]:
        """The states of the tensors of a set and their new values: where `skip_mask` is true, the old ones."""
        views = [self._view_to_write(buffer, i) for i in places]
        if skip_mask is not None:
            truth = self.library.take(skip_mask, np.array(places, np.int64)).reshape(-1, 1, 1, 1)
            whole = stack.reshape(len(places), -1, *stack.shape[1:])
            stack = self.library.arithmetic[Op.WHERE](truth, self.stacked(buffer, places).reshape(whole.shape), whole)
            stack = stack.reshape(-1, *stack.shape[2:])
        return views, [*self.library.split(stack, len(places))]

    def flats_of(self, extents: Sequence[tuple[int, int, int]]) -> Flats:
        """The cuts of matrices of these extents, kept for the next step."""
        assert self.remembered is not None
        return self.remembered.flats_of(extents)

    def lies_in_order(self, buffers: Sequence[str], places: Sequence[int]) -> bool:
        """Whether the elements of these states lie in memory in their order."""
        return all(self._line(buffer, i) is not None for buffer in buffers for i in places)

    def joined(self, buffer: str, places: Sequence[int]) -> Any:
        """A state of some tensors as one new vector in the compute dtype."""
        joined = self.library.join([self._line(buffer, i) for i in places], 0)
        return self.library.cast(self._read(buffer, joined), self.compute)

    def write_joined(self, buffer: str, places: Sequence[int], flat: Any, flats: Flats) -> None:
        """Writes the new values of a state of some tensors, one after the other, but where the tensor stays."""
        self.writes()
        skip_mask = self.rows.stays
        if skip_mask is not None:
            truth = flats.spread(self.library.take(skip_mask, np.array(places, np.int64)), "", "bij")
            flat = self.library.arithmetic[Op.WHERE](truth, self.joined(buffer, places), flat)
        parts = self.library.cut(flat, flats.cuts("bij").sizes.tolist())
        self.library.copy_all([self._line(buffer, i) for i in places], parts)

    def _line(self, buffer: str, i: int) -> Any:
        """A state as a vector in its own memory, None where its elements do not lie there in their order.

        For the same memory it is the view of the last step.
        """
        array, views = self._stored(buffer, i), {} if self.remembered is None else self.remembered.views
        known = views.get((buffer + " line", i))
        if known is not None and known[0] is array and known[1] == self.library.address(array):
            return known[2]
        line = array.reshape(-1) if array.is_contiguous() else None
        views[buffer + " line", i] = array, self.library.address(array), line
        return line

    def _view_to_write(self, buffer: str, i: int) -> Any:
        """A state as `(batch, rows, cols)` in its own memory: for the same memory the view of the last step."""
        array, views = self._stored(buffer, i), {} if self.remembered is None else self.remembered.views
        known = views.get((buffer + " written", i))
        if known is not None and known[0] is array and known[1] == self.library.address(array):
            return known[2]
        axes, view = self.program.buffer(buffer).axes, self.portion.tensors[i].view
        matrices = view.matrices(array) if axes.elementwise else view.kept(array, axes.letters)
        views[buffer + " written", i] = array, self.library.address(array), matrices
        return matrices

    def _is_narrow(self, buffer: str) -> bool:
        """Whether a buffer is scratch of a narrower dtype than arithmetic's."""
        return buffer in self.launch.version.plan.scratch and self.layout.dtype(buffer) != self.compute

    def _as_matrices(self, buffer: str, array: Any, i: int) -> Any:
        """A stored array as `(batch, rows, cols)`: for the same memory the view of the last step."""
        views = {} if self.remembered is None else self.remembered.views
        known = views.get((buffer, i))
        if known is not None and known[0] is array and known[1] == self.library.address(array):
            return known[2]
        axes, view = self.program.buffer(buffer).axes, self.portion.tensors[i].view
        elements = array if self._is_narrow(buffer) else self._read(buffer, array)
        matrices = view.matrices(elements) if axes.elementwise else view.kept(elements, axes.letters)
        if elements is array and buffer not in ("p", "g", *self.launch.inputs):
            views[buffer, i] = array, self.library.address(array), matrices
        return matrices

    def vectors_of(self, buffer: str) -> Pieces | None:
        """A state in a flat array, None where each tensor's is read on its own.

        The first call reads all states that gaps read, in one pass.
        """
        plan = self.launch.version.plan
        if self.remembered is None or buffer not in plan.vectors_read:
            return None
        if self._vectors is None:
            if self.launch.transfers is not None:
                self.launch.transfers.bring(self.launch, buffers=plan.vectors_read)
            states = self.remembered.states(self.portion.states, plan.vector_states)
            self._vectors = states.read([name for name in plan.vectors_read if name in states.names])
        return self._vectors.get(buffer)

    def _read(self, buffer: str, array: Any) -> Any:
        """The elements of a buffer, or of a part of it; gradients without their scale."""
        elements, scale = self.library.read(array), self.rows.scale
        if buffer == "g" and self.layout.maximize:
            elements = -elements
        if buffer == "g" and scale is not None:
            elements = elements * (1 / self.library.numbers(scale).reshape(()))
        return elements

    def extents(self, i: int) -> tuple[int, int, int]:
        """The local matrices of tensor i, and their rows and columns."""
        view = self.portion.tensors[i].view
        return view.batch, view.rows, view.cols

    def tiled(self, buffer: str, i: int) -> Tiled:
        """A buffer's matrices for reading and writing by tiles. The state of a skipped tensor keeps its value."""
        stored, view = self._stored(buffer, i), self.portion.tensors[i].view
        if self.program.buffer(buffer).axes.elementwise:
            whole = view.matrices(stored)
        else:
            whole = view.kept(stored, self.program.buffer(buffer).axes.letters)
        skip_mask = None if self.rows.stays is None else self.library.at(self.rows.stays, i)
        if self._copies(buffer):
            return Tiled(whole, self.library, self.compute, partial(self._read, buffer), skip_mask)
        return Tiled(self.library.read(whole), self.library, self.compute, None, skip_mask)

    def _copies(self, buffer: str) -> bool:
        """Whether reading a buffer copies it."""
        changed = buffer == "g" and (self.layout.maximize or self.rows.scale is not None)
        return changed or self.layout.dtype(buffer) != self.compute

    def writes(self) -> None:
        """Notes that states may be written from now on."""
        self.launch.wrote = True

    def room(self, i: int) -> int:
        """The bytes that tiles of tensor i may take."""
        numel = self.portion.tensors[i].numel
        return room_for(numel * ITEM_SIZE[self.layout.dtype("g")], self.launch.common.largest)

    def _stored(self, buffer: str, i: int) -> Any:
        if self.launch.transfers is not None:
            self.launch.transfers.bring(self.launch, buffers=(buffer,))
        if buffer == "g":
            return self.grads[i]
        if buffer == "p":
            return self.portion.tensors[i].array
        return self.scratch[buffer][i] if buffer in self.scratch else self._states(i)[buffer]

    def _states(self, i: int) -> dict[str, Any]:
        return self.portion.bucket.states[self.portion.positions[i]]

    def vectors(self, result: Result, arrays: Sequence[Any]) -> Sequence[Any]:
        """A result as arrays that kernels can read: contiguous, in its dtype, in the order of memory."""
        letters = self.launch.version.plan.in_flat[result.value]
        if isinstance(arrays, Pieces) and self.flats is not None and letters:
            # Kernels read a vector of each matrix of a tensor.
            after = letters if "b" in letters else "b" + letters
            flat = self.flats.spread(arrays.flat, letters, after)
            return Pieces(self.library.handed(flat, self.layout.result(result.name), False), self.flats.cuts(after))
        if isinstance(arrays, Stacks) and result.axes.elementwise:
            return self._stacks(arrays, self.layout.result(result.name))
        # A view of memory that the kernel writes must be copied first.
        copied = result.value.op in VIEWS
        vectors = []
        for array, tensor in zip(arrays, self.portion.tensors, strict=True):
            view = tensor.view
            rows = 1 if result.axes.rows is None else view.rows
            cols = 1 if result.axes.cols is None else view.cols
            if tuple(array.shape) != (shape := (view.batch, rows, cols)):
                array = self.library.spread(array, shape)
            if result.axes.elementwise:
                array = view.tensor(array)
            vectors.append(self.library.handed(array, self.layout.result(result.name), copied))
        return vectors

    def _stacks(self, arrays: Stacks, dtype: str) -> Stacks:
        """Matrices like the parameters in stacks of this dtype, in the order of memory."""
        views = [tensor.view for tensor in self.portion.tensors]
        stacks = []
        for stack, places in zip(arrays.stacks, arrays.places, strict=True):
            view = views[places[0]]
            whole = self.library.spread(stack, (len(places) * view.batch, view.rows, view.cols))
            stacks.append(self.library.handed(whole.swapaxes(1, 2) if view.transposed else whole, dtype, False))
        return Stacks(stacks, arrays.places, self.library.split, [view.shape for view in views])
