"""Files of named arrays in the safetensors format: eight bytes, a JSON header, and the arrays one after the other.

The library of that name needs a framework for bfloat16, or the whole file in memory twice; the format itself is small.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rulec.errors import RulecError, StateMismatch
from rulec.files import written_whole

#: Our names of dtypes with those of the format, and NumPy's: of bfloat16, which it does not have, its bits.
_CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
}
_NAMES = {code: name for name, code in _CODES.items()}
_NUMPY = {name: np.dtype("<u2" if name == "bfloat16" else name).newbyteorder("<") for name in _CODES}

#: No header is longer: the library's own limit.
_LONGEST = 100_000_000

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, eq=False)
class Stored:
    """An array as it lies in a file: our name of its dtype, its shape, and its bytes in C order, little-endian.

    Codes of a state have the key of their `format`; a state that is rounded at random has `bfloat16_sr`.
    """

    dtype: str
    shape: tuple[int, ...]
    data: Bytes
    format: str = ""

    @staticmethod
    def of(array: Any, dtype: str = "", format: str = "") -> Stored:
        """A NumPy array, without copying it where it is contiguous; for bfloat16 `array` may have the bits in uint16.

        `dtype` is that of the array, unless another is given.
        """
        bits = np.ascontiguousarray(array).reshape(-1)
        return Stored(dtype or bits.dtype.name, np.shape(array), bits.view(np.uint8), format)

    @property
    def bits(self) -> np.ndarray[Any, Any]:
        """The array; of bfloat16 its bits in uint16."""
        return self.data.view(_NUMPY[self.dtype]).reshape(self.shape)

    def turned(self, order: Sequence[int]) -> Stored:
        """The array with its axes in another order."""
        return Stored.of(self.bits.transpose(order), self.dtype)

    @property
    def number(self) -> float:
        """The value of one number; StateMismatch where it is an array."""
        if math.prod(self.shape) != 1:
            raise StateMismatch(f"a value of shape {self.shape} stands where a single number belongs")
        return float(self.wide.reshape(()))

    @property
    def values(self) -> np.ndarray[Any, Any]:
        """The array; of bfloat16, which NumPy does not have, the values in float32."""
        return (self.bits.astype(np.uint32) << 16).view(np.float32) if self.dtype == "bfloat16" else self.bits

    @property
    def wide(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """The values in float64."""
        return self.values.astype(np.float64)


# Writing


def write_file(file: Path, tensors: Mapping[str, Stored], metadata: Mapping[str, str]) -> None:
    """Writes a file in one go: it is there as a whole, or what was there before is.

    A link is followed. RulecError for what is no file, OSError where it cannot be written.
    """
    # The widest first: then each begins at a multiple of its item size.
    order = sorted(tensors, key=lambda name: (-_NUMPY[tensors[name].dtype].itemsize, name))
    header: dict[str, Any] = {"__metadata__": {**metadata, "checksum": checksum(tensors, metadata)}}
    end = 0
    for name in order:
        array = tensors[name]
        header[name] = {
            "dtype": _CODES[array.dtype], "shape": list(array.shape), "data_offsets": [end, end + array.data.size],
        }  # fmt: skip
        end += array.data.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with written_whole(_target(file)) as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            opened.write(tensors[name].data.data)


def checksum(tensors: Mapping[str, Stored], metadata: Mapping[str, str]) -> str:
    """A CRC-32 of everything in a file, whatever the order it is written in."""
    crc = zlib.crc32(json.dumps(sorted((k, v) for k, v in metadata.items() if k != "checksum")).encode())
    for name, array in sorted(tensors.items()):
        # JSON may have halves of characters, which a name then has too.
        crc = zlib.crc32(f"{name} {array.dtype} {list(array.shape)}".encode(errors="surrogatepass"), crc)
        crc = zlib.crc32(array.data.data, crc)
    return f"{crc:08x}"


def _target(file: Path) -> Path:
    """The file that a path leads to, through links. RulecError for what is there and is no file, such as a device."""
    target = Path(os.path.realpath(file))
    if os.path.lexists(target) and not os.path.isfile(target):
        raise RulecError(f"{file} is no file that could be written anew, but {_kind(target)}: give the path of a file")
    return target


def _kind(path: Path) -> str:
    kinds: dict[str, Callable[[], bool]] = {
        "a folder": path.is_dir,
        "a device": lambda: path.is_char_device() or path.is_block_device(),
    }
    kinds |= {"a pipe": path.is_fifo, "a socket": path.is_socket, "a link to itself": path.is_symlink}
    return next((kind for kind, is_one in kinds.items() if is_one()), "something else")


# Reading


def read_file(file: Path) -> tuple[dict[str, Stored], dict[str, str]]:
    """The arrays of a file, mapped into memory and private to the caller, and its metadata.

    StateMismatch where it is not in the format, or shorter or longer than its header says.
    """
    if os.path.exists(file) and not os.path.isfile(file):
        raise StateMismatch(f"{file} is no file, but {_kind(file)}: give one that was saved")
    with open(file, "rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 or length > min(size - 8, _LONGEST):
            raise StateMismatch(f"{file} is no safetensors file, or only the beginning of one")
        header = _header(file, opened.read(length))
        start = 8 + length
        data = np.memmap(opened, np.uint8, "c", start) if size > start else np.empty(0, np.uint8)
    metadata = header.pop("__metadata__", {})
    tensors = {name: _stored(file, name, entry, data) for name, entry in header.items()}
    _check_filled(file, header, data.size)
    return tensors, metadata


def _header(file: Path, text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        header = None
    metadata = header.get("__metadata__", {}) if isinstance(header, dict) else None
    if not isinstance(header, dict) or not isinstance(metadata, dict):
        raise StateMismatch(f"{file} is no safetensors file: it does not begin with a header in JSON")
    if not all(isinstance(text, str) for text in metadata.values()):
        raise StateMismatch(f"the metadata of {file} is damaged: every value must be a text")
    return header


def _stored(file: Path, name: str, entry: Any, data: Bytes) -> Stored:
    try:
        shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
        dtype = _NAMES.get(entry["dtype"])
        whole = all(type(x) is int and 0 <= x < 1 << 63 for x in (*shape, begin, end)) and end >= begin
    except (TypeError, ValueError, KeyError):
        whole = False
    if not whole:
        raise StateMismatch(f"the header of {file} is damaged where it describes {name!r}")
    if dtype is None:
        raise StateMismatch(f"{name!r} of {file} is of {entry['dtype']}, which is none of {', '.join(_CODES.values())}")
    if end - begin != math.prod(shape) * _NUMPY[dtype].itemsize:
        raise StateMismatch(f"{name!r} of {file} is damaged: it has {end - begin} bytes for shape {shape} of {dtype}")
    if end > data.size:
        raise StateMismatch(f"{file} is cut short: {name!r} ends {end - data.size} bytes after the end of the file")
    stored = Stored(dtype, shape, data[begin:end])
    try:
        stored.bits  # noqa: B018 - of no elements, or in many dimensions, a shape may still be none
    except ValueError:
        raise StateMismatch(f"the header of {file} is damaged where it describes {name!r}") from None
    return stored


def _check_filled(file: Path, header: Mapping[str, Any], size: int) -> None:
    """StateMismatch where arrays overlap, or bytes belong to none."""
    end = 0
    for begin, after in sorted(entry["data_offsets"] for entry in header.values()):
        if begin != end:
            raise StateMismatch(f"the header of {file} is damaged: its arrays overlap, or leave bytes out")
        end = after
    if end != size:
        raise StateMismatch(f"{file} has {size - end} bytes more than its header describes: it is damaged")
