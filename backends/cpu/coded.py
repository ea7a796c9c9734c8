"""Prints states in codes: functions that decode and encode a part of a state, and the loop over parts of a chunk."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rulec.compiler.layout import ITEM_SIZE, scale_name
from rulec.formats import Format
from rulec.kernel.coded import CodedBuffer, coded_buffers, coded_lines, part_length

from .format_words import traits
from .source import loop
from .stage import StageWriter

_DECODE = '''\
@compiled
def decode_<name>(codes, scales, count, values):
    """The values of count elements, of whole blocks and perhaps a short last one."""
    for block in range((count + <most>) // <block>):
        unit = unit_<traits>(scales, block)
        for i in range(block * <block>, min((block + 1) * <block>, count)):
            decode_<traits>(values, i, codes, unit)
'''

_ENCODE = '''\
@compiled
def encode_<name>(codes, scales, count, values):
    """The codes and scales of count elements, of whole blocks and perhaps a short last one."""
    for block in range((count + <most>) // <block>):
        first, last = block * <block>, min((block + 1) * <block>, count)
        positive = negative = int32(0)
        for i in range(first, last):
            positive, negative = above(positive, values, i), below(negative, values, i)
        factor = scale_<traits>(scales, block, positive, negative)
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


def format_functions(formats: Iterable[Format]) -> list[str]:
    """The functions that decode and encode parts of states in these formats, each once."""
    return [_filled(text, form) for form in dict.fromkeys(formats) for text in (_DECODE, _ENCODE)]


def _filled(text: str, form: Format) -> str:
    text = text.replace("<loop>", _PAIRS if form.bits == 4 else _CODES)
    parts = {"name": _function_name(form), "traits": traits(form), "block": str(form.block)}
    for name, part in {**parts, "most": str(form.block - 1)}.items():
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
            return loop("i", "start", "stop", body)
        length = part_length(self.write.layout)
        return loop("part", "start", f"stop, {length}", [
            f"count = min(stop - part, {length})",
            *(self._shifted(name) for name in self._arrays()),
            *(self._moved("decode", b) for b in self.buffers if b.loaded),
            *loop("i", "0", "count", body),
            *(self._moved("encode", b) for b in self.buffers if b.stored),
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

    def _moved(self, way: str, buffer: CodedBuffer) -> str:
        """The call that decodes or encodes a part of a state."""
        name, form = buffer.name, buffer.format
        codes = f"{self.write.codes[name]} + part" + " // 2" * (form.bits == 4)
        scales = f"{self.write.scales[name]} + part // {form.block} * 4"
        return f"{way}_{_function_name(form)}({codes}, {scales}, count, {self.write.at[name]})"
