"""The cpu kernel as a custom call of XLA, through XLA's C interface for foreign functions.

A call runs one stage of a program, and updates all tensors of a bucket in place, without Python. Machine code reads the
addresses from XLA's call frame, and shares the work with XLA's own pool of threads: there is no second set of threads.
A late thread finds no work left, and no thread waits for another that has not begun. So no pool is too small, and none
is ever stuck.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rulec.array_api.reductions import REDUCTIONS
from rulec.compiler.ir import Program
from rulec.compiler.layout import Layout, kernel_buffers
from rulec.compiler.view import MatrixView
from rulec.kernel.multi_tensor.call import Planner
from rulec.kernel.multi_tensor.slots import LineSlots
from rulec.language.expr.node import Op, walk

from ..common import threads as cpu_threads
from ..common.threads import ACTIVE, CHUNK_TABLE, POINTERS, ROW_INDEX, ROWS, SPAN_TABLE, SPANS, STAGE, TENSORS
from .machine import ObjectCode
from .print import kernel_source

#: Positions in a job after those of all kernels: the number of threads still in it, and arguments of calls into XLA.
_LEFT, _ARGUMENTS, _JOB_WORDS = 24, 32, 40

#: Positions in the head of a plan. After the head come its spans, its chunks, the places of its arrays, the rows of its
#: tensors, and for each reduction to one number per tensor its code and the bits of its first value.
_THREADS, _STAGE_NUMBER, _SPANS, _CHUNKS, _CHUNK_WORDS, _TENSORS, _LINES, _TOTALS, _HEAD = range(9)

#: The codes of reductions in plans.
_SUM, _MIN = (REDUCTIONS[op].code for op in (Op.SUM, Op.MIN))

#: The version of the interface. XLA checks that it still understands it.
MAJOR, MINOR = 0, 3

#: Positions in the structures of `xla/ffi/api/c_api.h`, in 64-bit words.
_EXTENSION, _API, _CONTEXT, _STAGE, _OPERANDS, _RESULTS = 1, 2, 3, 4, 9, 14  # of a call frame
_METADATA, _VERSION, _EXECUTE, _DATA = 3, 3, 3, 3
_DESTROY, _SCHEDULE, _POOL_SIZE = 8, 17, 18  # of the table of functions

_SOURCE = f'''

@compiled
def leave(job):
    """Ends a thread's part in a job; the last one frees it."""
    if fetch_add(job + {8 * _LEFT}, -1) == 1:
        release(job)


@compiled
def asked(frame, at, function, size):
    """Calls a function of XLA with the arguments at an address: whether it worked."""
    put(at, 0, size)
    put(at, 1, 0)
    put(at, 2, word(frame, {_CONTEXT}))
    error = invoke(word(word(frame, {_API}), function), at)
    if error != 0:
        put(at, 0, 24)
        put(at, 2, error)
        invoke(word(word(frame, {_API}), {_DESTROY}), at)
    return error == 0


@compiled
def pool_size(frame, at):
    """How many threads XLA has, 1 where it does not say."""
    put(at, 4, 1)
    put(at, 3, at + 32)
    return word(at, 4) if asked(frame, at, {_POOL_SIZE}, 32) else 1


@compiled
def call_helpers(frame, job, task, count):
    """Asks so many of XLA's threads to take part in a job."""
    at = job + {8 * _ARGUMENTS}
    for _ in range(count):
        fetch_add(job + {8 * _LEFT}, 1)
        put(at, 3, task)
        put(at, 4, job)
        if not asked(frame, at, {_SCHEDULE}, 40):
            fetch_add(job + {8 * _LEFT}, -1)


@compiled
def operand(frame, index):
    """Where an operand of the call lies; of an index below 0 the result -1 - index."""
    if index < 0:
        return word(word(word(frame, {_RESULTS}), -1 - index), {_DATA})
    return word(word(word(frame, {_OPERANDS}), index), {_DATA})


@compiled
def chunk_table(plan):
    """Where the chunks of a plan are."""
    return plan + 8 * ({_HEAD} + 2 * word(plan, {_SPANS}))


@compiled
def place_table(plan):
    """Where the places of its arrays are."""
    return chunk_table(plan) + 8 * word(plan, {_CHUNKS}) * word(plan, {_CHUNK_WORDS})


@compiled
def begin(frame):
    """A job for a call. The first operand is the plan, the second the scalar table; the first result is scratch."""
    plan, pointers = operand(frame, 0), operand(frame, -1)
    spans, tensors = word(plan, {_SPANS}), word(plan, {_TENSORS})
    addresses = word(plan, {_LINES}) * tensors
    places = place_table(plan)
    for i in range(addresses):
        put(pointers, i, operand(frame, word(places, 2 * i)) + word(places, 2 * i + 1))
    job = allocate({8 * _JOB_WORDS})
    for i in range({_JOB_WORDS}):
        put(job, i, 0)
    put(job, {SPANS}, spans)
    put(job, {SPAN_TABLE}, plan + {8 * _HEAD})
    put(job, {CHUNK_TABLE}, chunk_table(plan))
    put(job, {POINTERS}, pointers)
    put(job, {TENSORS}, tensors)
    put(job, {ROW_INDEX}, places + 16 * addresses)
    put(job, {ROWS}, operand(frame, 1))
    put(job, {STAGE}, word(plan, {_STAGE_NUMBER}))
    put(job, {_LEFT}, 1)
    return job


@compiled
def taken_in(op, so_far, x):
    """One number more in a reduction, NaN where either is."""
    if op == {_SUM}:
        return so_far + x
    better = x < so_far if op == {_MIN} else x > so_far
    return x if better or x != x else so_far


@compiled
def finish(frame):
    """Reduces what the chunks of each tensor have left in scratch, in their order, to the second result."""
    plan, totals = operand(frame, 0), operand(frame, -2)
    chunks, tensors, lines = word(plan, {_CHUNKS}), word(plan, {_TENSORS}), word(plan, {_LINES})
    table, columns = chunk_table(plan), word(plan, {_CHUNK_WORDS})
    slots = operand(frame, -1) + 8 * lines * tensors
    reductions = place_table(plan) + 8 * tensors * (2 * lines + 1)
    for i in range(word(plan, {_TOTALS})):
        for tensor in range(tensors):
            put(totals, i * tensors + tensor, word(reductions, 2 * i + 1))
        for chunk in range(chunks):
            at = i * tensors + word(table, columns * chunk)
            put(totals, at, taken_in(word(reductions, 2 * i), real(totals, at), real(slots, i * chunks + chunk)))


@compiled
def update(frame, task):
    """A call: everything is updated when it returns."""
    job, plan = begin(frame), operand(frame, 0)
    spans, most = word(plan, {_SPANS}), word(plan, {_THREADS})
    if spans > 1:
        if most == 0:
            most = pool_size(frame, job + {8 * _ARGUMENTS})
        call_helpers(frame, job, task, min(spans, most) - 1)
    kernel(job)
    # Every span is taken; a helper may still be at its last one.
    while fetch_add(job + {8 * ACTIVE}, 0) != 0:
        pause(job)
    leave(job)
    finish(frame)


@compiled
def enter(frame, job, task):
    """What XLA calls: with a frame, or where that is 0 with a job that another thread has begun."""
    if frame == 0:
        kernel(job)
        leave(job)
    elif word(frame, {_EXTENSION}) != 0:
        put(word(word(frame, {_EXTENSION}), {_METADATA}), {_VERSION}, {MAJOR | MINOR << 32})
    elif word(frame, {_STAGE}) & {2**32 - 1} == {_EXECUTE}:
        update(frame, task)
'''


def ffi_source(program: Program, layout: Layout) -> str:
    """The source of a program's kernel with its entry for XLA."""
    text = kernel_source(program, layout)
    names = "from rulec_backends.cpu.ffi_words import allocate, invoke, pause, put, real, release\n"
    return text.replace("\n\n\n@compiled", f"\n{names}\n\n@compiled", 1).rstrip("\n") + "\n" + _SOURCE


#: The place of an array: the index of an operand, or -1 - i for result i, and the distance in bytes from its beginning.
Place = tuple[int, int]

#: The place of an unused array.
_NOWHERE = (0, 0)


class FfiKernel:
    """Machine code for one program and layout, as a handler for XLA, stage by stage.

    `address` is the address of an XLA_FFI_Handler, valid as long as this object lives. `target` is a name unique to the
    kernel on all machines.
    """

    def __init__(self, program: Program, layout: Layout, source: str, machine: ObjectCode) -> None:
        self.program, self.layout = program, layout
        self._machine = machine
        self.address = machine.address
        self.target = f"rulec_{hashlib.sha256(source.encode()).hexdigest()[:32]}"

    def stage(self, index: int, sizes: Sequence[int], views: Sequence[MatrixView] = ()) -> FfiStage:
        """A stage over tensors of these sizes in elements, with `views` where the program sees matrices."""
        return FfiStage(self, index, sizes, views)


class FfiStage:
    """The operands and results of one stage over some tensors, beside the plan, the scalar table and scratch.

    `arrays` are the buffers and vectors read or stored, for each tensor; `stored` the buffers stored. `totals` are the
    reductions to one number per tensor: the second result, float64, has a line for each. `slots` are the other
    reductions: a float64 result for each tensor, described by `LineSlots`.
    """

    def __init__(self, kernel: FfiKernel, index: int, sizes: Sequence[int], views: Sequence[MatrixView]) -> None:
        program, layout = kernel.program, kernel.layout
        planner, stage = Planner("cpu", program, layout, sizes, views, cpu_threads.POLICY), program.stages[index]
        self._index, self._tensors, self._lines = index, len(sizes), planner.lines
        self._work = planner.work(stage)
        loaded = {str(n.arg) for n in walk(stage.roots) if n.op is Op.LOAD}
        self.stored = [s.buffer for s in stage.stores]
        buffers = [b.name for b in kernel_buffers(program) if b.name in {*loaded, *self.stored}]
        self.arrays = [*buffers, *stage.reads]
        self.slots = {name: slots for name, slots in self._work.slots.items() if isinstance(slots, LineSlots)}
        self._ops = {r.name: r.value.op for r in stage.reduces if r.name not in self.slots}
        self.totals = [*self._ops]

    @property
    def scratch(self) -> int:
        """The words of the first result: addresses, and the slots of whole tensors."""
        return self._addresses + len(self.totals) * self._chunks

    @property
    def _addresses(self) -> int:
        return len(self._lines) * self._tensors

    @property
    def _chunks(self) -> int:
        return len(self._work.chunks.table)

    def plan(self, places: Mapping[str, Sequence[Place]], rows: Sequence[int]) -> np.ndarray[Any, Any]:
        """The plan of a call, as one vector of int64.

        `places` has the place of each tensor's array by name, for `arrays` and `slots`; `rows` is each tensor's row of
        the scalar table.
        """
        work, tensors = self._work, self._tensors
        total_places = {
            name: [(-1, 8 * (self._addresses + i * self._chunks))] * tensors for i, name in enumerate(self.totals)
        }
        lines = [{**places, **total_places}.get(name, [_NOWHERE] * tensors) for name in self._lines]
        head = [
            cpu_threads.asked_for(), self._index, len(work.spans), *work.chunks.table.shape, tensors, len(lines),
            len(self.totals),
        ]  # fmt: skip
        # Every other stage goes backwards: it begins with the elements that the stage before it left in the cache.
        spans = work.spans[:: -1 if self._index % 2 else 1]
        ops = [(REDUCTIONS[op].code, np.float64(REDUCTIONS[op].nothing).view(np.int64)) for op in self._ops.values()]
        parts = [head, spans, work.chunks.table, lines, rows, ops]
        return np.concatenate([np.asarray(part, np.int64).reshape(-1) for part in parts])
