"""The source of the kernel that multiplies packed bits: of all members of a population, in one job."""

from __future__ import annotations

from .binary_plan import TABLE
from .threads import ACTIVE, NEXT_SPAN, POINTERS, SPANS, STAGE

#: The stages of a product: weights are arranged by lines of equal places, then multiplied.
ARRANGE, MULTIPLY = range(2)

#: Lines that are taken in one pass over the results.
TOGETHER = 4


def source() -> str:
    """The source of the kernel."""
    named = "\n    ".join(f"{name} = word(table, {index})" for index, name in enumerate(TABLE))
    return _TEXT.replace("<names>", named).replace("<group>", _group(TOGETHER)).replace("<one>", _group(1))


def _group(count: int) -> str:
    """The statements that take so many places, from `place` on, into a row of results."""
    lines = [f"x{i} = word(own, word(kind, 2 + place + {i}))" for i in range(count)]
    lines += [f"w{i} = of + 8 * outputs * word(kind, 2 + places + place + {i})" for i in range(count)]
    differing = " + ".join(f"popcount(x{i} ^ load_bits_float64(w{i}, j, 0))" for i in range(count))
    lines += [
        "for j in range(left, right):",
        f"    store_bits_float32(row, j, 1, load_bits_float32(row, j, 1) - 2 * ({differing}))",
        f"place += {count}",
    ]
    return ("\n" + 12 * " ").join(lines)


_TEXT = f'''"""The product of packed bits. Printed by rulec."""

from rulec_backends.cpu.binary_words import popcount
from rulec_backends.cpu.words import (
    compiled, fetch_add, load_bits_float32, load_bits_float64, store_bits_float32, store_bits_float64, word,
)


@compiled
def arrange(table, span):
    """One line: the words at one place of a member's weights, of all outputs."""
    <names>
    member, place = span // places, span % places
    line = lines + 8 * outputs * span
    of = weights + 8 * outputs * places * member
    for j in range(outputs):
        store_bits_float64(line, j, 0, load_bits_float64(of, j * places + place, 1))


@compiled
def multiply(table, span):
    """A part of a member's rows, for a block of its outputs."""
    <names>
    block_number, rest = span % blocks, span // blocks
    part_number, member = rest % parts, rest // parts
    left, right = block * block_number, min(outputs, block * (block_number + 1))
    begin, end = part * part_number, min(samples * positions, part * (part_number + 1))
    of = lines + 8 * outputs * places * member
    for number in range(begin, end):
        sample, position = number // positions, number % positions
        kind = kinds + 8 * (2 + 2 * places) * word(kind_of, position)
        own = inputs + 8 * (input_words * (samples * member + sample) + word(first, position))
        row = results + 4 * outputs * (samples * positions * member + number)
        inside, place = word(kind, 0), 0
        for j in range(left, right):
            store_bits_float32(row, j, 1, word(kind, 1))
        while place + {TOGETHER} <= inside:
            <group>
        while place < inside:
            <one>


@compiled
def kernel(job):
    """Takes spans from the job until none is left; any number of threads may run it on one job."""
    fetch_add(job + {8 * ACTIVE}, 1)
    table, stage = word(job, {POINTERS}), word(job, {STAGE})
    while True:
        span = fetch_add(job + {8 * NEXT_SPAN}, 1)
        if span >= word(job, {SPANS}):
            break
        if stage == {ARRANGE}:
            arrange(table, span)
        else:
            multiply(table, span)
    fetch_add(job + {8 * ACTIVE}, -1)
'''
