"""The shapes of weights, from the headers of safetensors files: the beginnings of the files are enough."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rulec.errors import RulecError

#: The dtypes of weights that are trained, as the format calls them; others are tables and masks.
_TRAINED = frozenset({"F64", "F32", "F16", "BF16"})

#: The longest header that is read: it is a few hundred bytes for each weight.
_LONGEST = 100 << 20

Shapes = dict[str, tuple[int, ...]]


def read_shapes(files: Iterable[Path]) -> Shapes:
    """The shapes of all weights in some files, by name; RulecError for another kind of file, or without weights."""
    shapes: Shapes = {}
    names = []
    for file in files:
        names.append(str(file))
        shapes.update(_shapes(file))
    if not shapes:
        raise RulecError(f"{', '.join(names)} has no weights of {', '.join(sorted(_TRAINED))}: nothing can be trained")
    return shapes


def _shapes(file: Path) -> Shapes:
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            text = opened.read(length) if length <= _LONGEST else b""
        header = json.loads(text)
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        return {name: _shape(entry) for name, entry in entries.items() if entry["dtype"] in _TRAINED}
    except OSError as error:
        raise RulecError(f"{file} cannot be read: {error.strerror or error}") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise RulecError(f"{file} is no safetensors file: it does not begin with a header in JSON") from None


def _shape(entry: Any) -> tuple[int, ...]:
    shape = tuple(entry["shape"])
    if not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(shape)
    return shape
