"""Prints states in codes: functions that decode and encode a part of a state, and the loop over parts of a chunk."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rulec.compiler.layout import ITEM_SIZE, scale_name
from rulec.formats import Format
from rulec.kernel.quantized import CodedBuffer, coded_buffers, coded_lines, part_length

from .format_words import one_size, traits
from .source import loop
from .stage import StageWriter

_DECODE = '''\
@inlined
def decode_<name>(codes, scales, count, values):
    """The values of count elements: of some of a block, or of whole blocks and perhaps a short last one."""
    for block in range((count + <most>) // <block>):
        unit = unit_<traits>(scales, block)
        first, last = block * <block>, min((block + 1) * <block>, count)
<loop>
'''

_VALUES = """\
        for i in range(first, last):
            decode_<traits>(values, i, codes, unit)"""

_VALUES_OF_PAIRS = """\
        for i in range(first // 2, last // 2):
            decode_<traits>(values, i, codes, unit)
        if last % 2:
            decode_last_<traits>(values, last // 2, codes, unit)"""

_ENCODE = '''\
@inlined
def encode_<name>(codes, scales, count, values):
    """The codes and scales of count elements, of whole blocks and perhaps a short last one; scales come first."""
    for block in range((count + <most>) // <block>):
        first, last = block * <block>, min((block + 1) * <block>, count)
        positive = negative = int32(0)
        for i in range(first, last):
            <largest>
        scale_<traits>(scales, block, positive, negative)
    for block in range((count + <most>) // <block>):
        first, last = block * <block>, min((block + 1) * <block>, count)
        factor = factor_<traits>(scales, block)
        if factor != factor:
            for i in range(<bytes>):
                clear(codes, i)
            continue
<loop>
'''

_CODES = """\
        for i in range(first, last):
            encode_<traits>(codes, i, values, factor)"""

_PAIRS = """\
        for i in range(first // 2, last // 2):
            encode_<traits>(codes, i, values, factor)
        if last % 2:
            encode_last_<traits>(codes, last // 2, values, factor)"""

#: The elements that are decoded, updated and, where blocks are no longer, encoded before the next ones: few enough for
#: a processor to begin with the next ones while the divisions of these wait for one another.
PIECE = 128


def format_functions(formats: Iterable[Format]) -> list[str]:
    """The functions for parts of states in these formats, each once: one decodes, and one encodes."""
    return [_filled(text, form) for form in dict.fromkeys(formats) for text in (_DECODE, _ENCODE)]


def _filled(text: str, form: Format) -> str:
    pairs = form.bits == 4
    loops = (_VALUES_OF_PAIRS, _PAIRS) if pairs else (_VALUES, _CODES)
    sides = "positive, negative = above(positive, values, i), below(negative, values, i)"
    parts = {
        "loop": loops[text is _ENCODE], "name": _function_name(form), "traits": traits(form),
        "largest": "positive = size(positive, values, i)" if one_size(form) else sides,
        "bytes": "first // 2, (last + 1) // 2" if pairs else "first, last",
        "block": str(form.block), "most": str(form.block - 1),
    }  # fmt: skip
    for name, part in parts.items():
        text = text.replace(f"<{name}>", part)
    return text.rstrip("\n")


def _function_name(form: Format) -> str:
    """The name of a format, with its block, in the names of functions; no word has it."""
    return f"{form.name}_{form.block}{traits(form).removeprefix(form.name)}"


class CodedParts:
    """The parts of a chunk in one stage: the addresses before the loops, and the loop over elements.

    A stage without states in codes has no parts: its lines are as those of all stages.
    """

    def __init__(self, write: StageWriter) -> None:
        self.write = write
        self.buffers = coded_buffers(write.layout, write.printer.loads(), write.nest.stored)
        self._lines = coded_lines(write.program, write.layout)

    def address_lines(self) -> list[str]:
        """The addresses before all loops: of arrays without elements, of codes and scales, of memory for values."""
        if not self.buffers:
            return self.write.address_lines()
        write, length = self.write, part_length(self.write.layout)
        lines = write.addresses({r.name for r in write.stage.reduces})
        for b in self.buffers:
            lines += [f"{write.codes[b.name]} = {write.address(b.name)}", f"{write.scales[b.name]} = {self._scale(b)}"]
        return [*lines, *(f"{write.at[b.name]} = floats({length})" for b in self.buffers)]

    def _scale(self, buffer: CodedBuffer) -> str:
        return f"word(pointers, {self._lines.index(scale_name(buffer.name))} * tensors + tensor)"

    def loop(self, body: Sequence[str]) -> list[str]:
        """The loop over elements `start` to `stop`."""
        if not self.buffers:
            return self.write.partial.loop("start", "stop", body)
        length = part_length(self.write.layout)
        # A sum over a loop has an order of its own, that of whole parts.
        piece = length if self.write.stage.reduces else PIECE
        stored = [b for b in self.buffers if b.stored]
        inner = [
            f"last, place = min(first + {piece}, count), part + first",
            *(self._moved("decode", b, "first", "last - first") for b in self.buffers if b.loaded),
            *(line for name in self._arrays() for line in self._prefetched(name)),
            *self.write.partial.loop("first", "last", body),
            *(self._moved("encode", b, "first", "last - first") for b in stored if b.format.block <= piece),
        ]
        return loop("part", "start", f"stop, {length}", [
            f"count = min(stop - part, {length})",
            *(self._shifted(name) for name in self._arrays()),
            *loop("first", "0", f"count, {piece}", inner),
            *(self._moved("encode", b, "0", "count") for b in stored if b.format.block > piece),
        ])  # fmt: skip

    def _arrays(self) -> list[str]:
        """The arrays with an element for each of the parameter's, without states in codes."""
        write = self.write
        names = {*write.nest.buffers, *write.stage.reads} - {b.name for b in self.buffers}
        return [name for name in write.lines if name in names]

    def _shifted(self, name: str) -> str:
        """The address of an array's first element of a part."""
        write = self.write
        return f"{write.at[name]} = {write.address(name)} + {ITEM_SIZE[write.storage(name)]} * part"

    def _prefetched(self, name: str) -> list[str]:
        """The loop that asks for memory of an array in advance: arrays stand still while states are encoded."""
        size = ITEM_SIZE[self.write.storage(name)]
        return loop("i", f"{size} * first", f"{size} * last, 64", [f"prefetch({self.write.at[name]}, i)"])

    def _moved(self, way: str, buffer: CodedBuffer, first: str, count: str) -> str:
        """The call that decodes or encodes `count` elements from `first` of a part of a state."""
        name, form = buffer.name, buffer.format
        at = "part" if first == "0" else "place"
        codes = f"{self.write.codes[name]} + {at}" + " // 2" * (form.bits == 4)
        scales = f"{self.write.scales[name]} + {at} // {form.block} * 4"
        values = self.write.at[name] + f" + 4 * {first}" * (first != "0")
        return f"{way}_{_function_name(form)}({codes}, {scales}, {count}, {values})"
