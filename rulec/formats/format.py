"""A format by name, block and traits; its text for users, and its key for files."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rulec.errors import HyperError
from rulec.language.source import did_you_mean


@dataclass(frozen=True, kw_only=True)
class FormatSpec:
    """The record of a format. A pair is for states with a sign, and for states without.

    - `blocks`: elements of a block by default.
    - `coding`: how a value becomes a code. "number" rounds it, "root" rounds 255 times its root, "softsign" rounds 127
      times `2y/(1 + abs(y))`, "thresholds" counts the thresholds below it, "float8" rounds its bits.
    - `bits`: the bits of a code, 8 or 4. `signed_codes`: codes of states with a sign are signed numbers.
    - `largest`: the number that stands for a value as large as the scale.
    - `spacing`: the largest spacing of values with a sign, in parts of the block's maximum, or of the value itself.
    """

    blocks: tuple[int, int]
    coding: tuple[str, str]
    spacing: float
    bits: int = 8
    signed_codes: bool = False
    largest: tuple[float, float] = (1.0, 1.0)


_THRESHOLDS, _FLOAT8 = ("thresholds", "thresholds"), ("float8", "float8")

#: The record of each format.
SPECS: Mapping[str, FormatSpec] = {
    "int8": FormatSpec(
        blocks=(32, 256), coding=("number", "root"), spacing=1 / 127, signed_codes=True, largest=(127.0, 1.0)
    ),
    "softsign8": FormatSpec(blocks=(32, 32), coding=("softsign", "root"), spacing=2 / 127, signed_codes=True),
    "dynamic8": FormatSpec(blocks=(256, 256), coding=_THRESHOLDS, spacing=0.9 / 64),
    "float8_e4m3": FormatSpec(blocks=(256, 256), coding=_FLOAT8, spacing=2.0**-3, largest=(448.0, 448.0)),
    "float8_e5m2": FormatSpec(blocks=(256, 256), coding=_FLOAT8, spacing=2.0**-2, largest=(57344.0, 57344.0)),
    "dynamic4": FormatSpec(blocks=(128, 128), coding=_THRESHOLDS, spacing=0.9 / 4, bits=4),
}

#: The formats there are.
NAMES = tuple(SPECS)

#: The storage of a state in bfloat16 that is rounded up or down at random: no format of codes.
UNBIASED = "bfloat16_sr"

#: Elements of a block. In smaller blocks the scales alone take half a byte or more for each element.
SMALLEST_BLOCK, LARGEST_BLOCK = 8, 4096


@dataclass(frozen=True)
class Format:
    """How a state is stored: `block` elements in C order share a float32 scale.

    `signed` is False for a state that is proved to be at least zero. With `floor`, no value above zero gets the code of
    zero. `default_block` says that nobody named the block; it counts for nothing in comparisons. HyperError for an
    unknown name or block.
    """

    name: str
    block: int
    signed: bool = True
    floor: bool = False
    default_block: bool = field(default=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        _check(self.name, str(self.block), self.name)

    @property
    def text(self) -> str:
        """The format as users write it, `dynamic8/256`."""
        return f"{self.name}/{self.block}"

    @property
    def key(self) -> str:
        """The format with its traits, `dynamic8/256-unsigned-floor`; `of_key` reads it."""
        return f"{self.text}-{'signed' if self.signed else 'unsigned'}{'-floor' if self.floor else ''}"

    @property
    def bits(self) -> int:
        """The bits of a code, 8 or 4."""
        return SPECS[self.name].bits

    @property
    def coding(self) -> str:
        """How a value becomes a code, as in `FormatSpec`."""
        return SPECS[self.name].coding[not self.signed]

    @property
    def code_dtype(self) -> str:
        """`int8` where codes are signed numbers, else `uint8`."""
        return "int8" if self.signed and SPECS[self.name].signed_codes else "uint8"

    @property
    def largest(self) -> float:
        """The number that stands for a value as large as the scale."""
        return SPECS[self.name].largest[not self.signed]

    @property
    def smallest_scale(self) -> float:
        """The scale of an empty block: the power of two at or above `largest`, times 2**-126."""
        return math.ldexp(1.0, math.ceil(math.log2(self.largest)) - 126)

    def codes_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the codes of a tensor: its shape, or where a byte has two codes the number of bytes."""
        return tuple(shape) if self.bits == 8 else (-(-math.prod(shape) // 2),)

    def scales(self, numel: int) -> int:
        """The number of blocks, and so of scales, of `numel` elements; the last block may be short."""
        return -(-numel // self.block)

    def nbytes(self, numel: int) -> int:
        """The bytes of codes and scales of `numel` elements."""
        return -(-numel * self.bits // 8) + 4 * self.scales(numel)

    def for_state(self, *, signed: bool, floor: bool) -> Format:
        """The format with the traits proved of a state, and the default block for them unless one is named."""
        block = SPECS[self.name].blocks[not signed] if self.default_block else self.block
        return replace(self, block=block, signed=signed, floor=floor)


def parse(text: str) -> Format:
    """The signed format that a user names: `int8`, or `int8/64` with its block. HyperError for any other text."""
    if not isinstance(text, str):
        raise HyperError(f"{text!r} is no format: a format is a text like 'int8' or 'int8/64'")
    name, slash, block = text.partition("/")
    _check(name, block if slash else "8", text)
    return Format(name, int(block)) if slash else Format(name, SPECS[name].blocks[0], default_block=True)


def of_key(key: str) -> Format:
    """The format with this `key`. HyperError for any other text."""
    text, *traits = key.split("-")
    if "/" not in text or traits not in (["signed"], ["unsigned"], ["signed", "floor"], ["unsigned", "floor"]):
        raise HyperError(f"{key!r} is no key of a format: a key is a text like 'int8/256-unsigned-floor'")
    return replace(parse(text), signed=traits[0] == "signed", floor="floor" in traits)


def _check(name: str, block: str, text: str) -> None:
    """HyperError unless there is the format, with blocks of this many elements."""
    if name not in SPECS:
        raise HyperError(
            f"there is no format {_shown(text)}{did_you_mean(name, NAMES)}: formats are {', '.join(NAMES)}"
        )
    if re.fullmatch("[1-9][0-9]{0,3}", block):
        count = int(block)
        if SMALLEST_BLOCK <= count <= LARGEST_BLOCK and count & (count - 1) == 0:
            return
    raise HyperError(
        f"the block {_shown(block)} of format {name} is no power of two from {SMALLEST_BLOCK} to {LARGEST_BLOCK}: "
        f"write '{name}/{SPECS[name].blocks[0]}', for example"
    )


def _shown(text: str) -> str:
    """A text in quotes, its first forty characters where it is longer."""
    return repr(text if len(text) <= 40 else f"{text[:40]}...")
