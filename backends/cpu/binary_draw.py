"""The sources of the kernels that draw packed bits, and that add them up with weights."""

from __future__ import annotations

from rulec.compiler.random import rounds

from .threads import ACTIVE, NEXT_SPAN, POINTERS, SPANS

#: The tables that their jobs point to: addresses, then sizes, and of a draw the words that its counters begin with.
DRAW_TABLE = (
    "thresholds", "results", "row_count", "count", "words", "directions", "seed", "layer", "purpose", "step",
)  # fmt: skip
SUM_TABLE = ("inputs", "weights", "sums", "members", "total", "part")

#: Thresholds of no element before the first and behind the last, so that whole blocks may be read.
MARGIN = 4


def draw_source() -> str:
    """The source of the kernel that draws."""
    words = ("\n" + 8 * " ").join(_philox())
    bits = ("\n" + 8 * " ").join(
        f"at = 4 * block - before + {i}\n{8 * ' '}"
        f"below = (w{i} ^ flip) < load_bits_float32(own, at, 0)\n{8 * ' '}"
        f"found |= where((at >= 0) & (at < inside) & below, 1 << (at & 63), 0)"
        for i in range(4)
    )
    return _text(_DRAW.replace("<words>", words).replace("<bits>", bits), DRAW_TABLE)


def sum_source() -> str:
    """The source of the kernel that adds up."""
    return _text(_SUM, SUM_TABLE)


class _Word(str):
    """The text of a word of 32 bits, in an integer of 64."""

    def __xor__(self, other: _Word) -> _Word:
        return _Word(f"({self} ^ {other})")


def _philox() -> list[str]:
    """The statements that make four words w0 to w3 of the counter c0 to c3."""
    lines: list[str] = []

    def named(text: str) -> _Word:
        lines.append(f"x{len(lines)} = {text}")
        return _Word(f"x{len(lines) - 1}")

    def multiply(word: _Word, factor: int) -> tuple[_Word, _Word]:
        product = named(f"{word} * {factor}")
        return _Word(f"(({product} >> 32) & mask)"), _Word(f"({product} & mask)")

    def add(word: _Word, term: int) -> _Word:
        return named(f"({word} + {term}) & mask")

    made = rounds([_Word(f"c{i}") for i in range(4)], [_Word("seed"), _Word("layer")], multiply, add)
    return [*lines, *(f"w{i} = {word}" for i, word in enumerate(made))]


def _text(body: str, table: tuple[str, ...]) -> str:
    named = "\n    ".join(f"{name} = word(table, {index})" for index, name in enumerate(table))
    return (body + _KERNEL).replace("<names>", named)


_DRAW = f'''"""Bits drawn from thresholds. Printed by rulec."""

from rulec_backends.cpu.words import compiled, fetch_add, load_bits_float32, store_bits_float64, where, word


@compiled
def drawn(own, first, inside, flip, seed, layer, purpose, direction, step):
    """A word of at most 64 bits: those of elements `first` and on."""
    mask = 0xFFFFFFFF
    before, found = first % 4, 0
    for block in range((before + inside + 3) // 4):
        number = first // 4 + block
        c0, c1, c2, c3 = number & mask, (number >> 32) | (purpose << 16), direction, step
        <words>
        <bits>
    return found


@compiled
def run(table, span):
    """A row of bits of one member."""
    <names>
    member, row = span // row_count, span % row_count
    direction = member % directions
    flip = 0xFFFFFFFF if member >= directions else 0
    line = results + 8 * words * span
    for number in range(words):
        first = count * row + 64 * number
        own, inside = thresholds + 4 * (first + {MARGIN}), min(64, count - 64 * number)
        bits = drawn(own, first, inside, flip, seed, layer, purpose, direction, step)
        store_bits_float64(line, number, 1, bits)
'''

_SUM = '''"""Weighted sums of bits. Printed by rulec."""

from rulec_backends.cpu.words import compiled, fetch_add, load_float64, number, store_float64, where, word


@compiled
def add(line, bits, weight):
    """64 sums take in a word of bits."""
    for j in range(64):
        store_float64(line, j, 0, load_float64(line, j, 0) + where((bits >> j) & 1 != 0, weight, 0.0))


@compiled
def run(table, span):
    """Sums of some words, over all members in order."""
    <names>
    begin, end = part * span, min(total, part * (span + 1))
    for member in range(members):
        weight = number(weights, member)
        for at in range(begin, end):
            add(sums + 512 * at, word(inputs, total * member + at), weight)
'''

_KERNEL = f'''

@compiled
def kernel(job):
    """Takes spans from the job until none is left; any number of threads may run it on one job."""
    fetch_add(job + {8 * ACTIVE}, 1)
    while True:
        span = fetch_add(job + {8 * NEXT_SPAN}, 1)
        if span >= word(job, {SPANS}):
            break
        run(word(job, {POINTERS}), span)
    fetch_add(job + {8 * ACTIVE}, -1)
'''
