"""The cpu kernel as a custom call of XLA, through the C interface that XLA has for foreign functions.

A call updates all tensors of a bucket where they lie. Nothing of Python runs in it: machine code reads the addresses
from the frame that XLA hands over, and asks XLA's own pool of threads to share the work, so that there is never a
second set of threads. Whoever comes late finds nothing left to do, and nobody waits for a thread that has not begun:
so no pool is too small, and none is ever stuck.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from rulec.backend.layout import Layout
from rulec.compiler.ir import Program

from ..plan import address_lines
from . import threads as cpu_threads
from .chunks import flat_chunks
from .machine import Machine
from .print import kernel_source
from .threads import ACTIVE, CHUNK_TABLE, POINTERS, ROW_INDEX, ROWS, SPAN_TABLE, SPANS, STAGE, TENSORS

#: Positions in a job behind those that kernels know: how many have not left it, and the arguments of calls into XLA.
_LEFT, _ARGUMENTS, _JOB_WORDS = 24, 32, 40

#: Positions in a plan, which goes on with its spans, its chunks, the places of its arrays, and the rows of its tensors.
_THREADS, _SPANS, _CHUNKS, _TENSORS, _LINES, _HEAD = range(6)

#: The interface as it was when this was written. XLA tells whether it still understands it.
MAJOR, MINOR = 0, 3

#: Where things lie in the structures of `xla/ffi/api/c_api.h`, in 64-bit words.
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
    """Where an operand of the call lies."""
    return word(word(word(frame, {_OPERANDS}), index), {_DATA})


@compiled
def begin(frame):
    """A job for a call. The first operand is the plan, the second the scalar table; the first result is scratch."""
    plan, pointers = operand(frame, 0), word(word(word(frame, {_RESULTS}), 0), {_DATA})
    spans, tensors = word(plan, {_SPANS}), word(plan, {_TENSORS})
    addresses = word(plan, {_LINES}) * tensors
    chunks_at = plan + 8 * ({_HEAD} + 2 * spans)
    places = chunks_at + 24 * word(plan, {_CHUNKS})
    for i in range(addresses):
        put(pointers, i, operand(frame, word(places, 2 * i)) + word(places, 2 * i + 1))
    job = allocate({8 * _JOB_WORDS})
    for i in range({_JOB_WORDS}):
        put(job, i, 0)
    put(job, {SPANS}, spans)
    put(job, {SPAN_TABLE}, plan + {8 * _HEAD})
    put(job, {CHUNK_TABLE}, chunks_at)
    put(job, {POINTERS}, pointers)
    put(job, {TENSORS}, tensors)
    put(job, {ROW_INDEX}, places + 16 * addresses)
    put(job, {ROWS}, operand(frame, 1))
    put(job, {STAGE}, 0)
    put(job, {_LEFT}, 1)
    return job


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
    """The source of a program's kernel with its door to XLA."""
    text = kernel_source(program, layout)
    names = "from rulec_backends.cpu.ffi_words import allocate, invoke, pause, put, release\n"
    return text.replace("\n\n\n@compiled", f"\n{names}\n\n@compiled", 1).rstrip("\n") + "\n" + _SOURCE


#: An array of a tensor: which operand it lies in, and how many bytes from its beginning.
Place = tuple[int, int]


def plan(sizes: Sequence[int], lines: Sequence[Sequence[Place]], rows: Sequence[int]) -> np.ndarray[Any, Any]:
    """What a call must know beside addresses and scalars, as one vector of int64.

    `sizes` are the elements of each tensor, `lines` for each line of the address table the place of each tensor's
    array, `rows` each tensor's row of scalars.
    """
    chunks = flat_chunks(sizes)
    spans = chunks.spans(range(len(sizes)))
    head = [cpu_threads.asked_for(), len(spans), len(chunks.table), len(sizes), len(lines)]
    parts = [head, spans, chunks.table, lines, rows]
    return np.concatenate([np.asarray(part, np.int64).reshape(-1) for part in parts])


class FfiKernel:
    """Machine code for one program and layout that XLA can call.

    `address` is that of an XLA_FFI_Handler, valid as long as this object lives; `target` a name that no other kernel
    has, on any machine; `lines` what it updates or reads of each tensor, in the order of the address table, and
    `stored` what it updates of that.
    """

    def __init__(self, program: Program, layout: Layout, source: str, machine: Machine) -> None:
        self._machine = machine
        self.address = machine.address
        self.lines = address_lines(program)
        self.stored = frozenset(store.buffer for store in program.stages[0].stores)
        self.target = f"rulec_{hashlib.sha256(source.encode()).hexdigest()[:32]}"
