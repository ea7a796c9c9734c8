"""The text: the sources of Python's standard library, which every installation has, byte by byte."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

Array = np.ndarray[tuple[int, ...], np.dtype[np.int64]]

#: The tokens: every byte is one.
VOCABULARY = 256

#: Folders of the standard library that installations have or leave out.
_OPTIONAL = {"site-packages", "dist-packages", "test", "tests", "idlelib", "turtledemo", "__pycache__", "ensurepip"}


def corpus() -> bytes:
    """All modules of the standard library, in the order of their paths."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(path for path in root.rglob("*.py") if not _OPTIONAL.intersection(path.relative_to(root).parts))
    return b"\n".join(path.read_bytes() for path in paths)


def batches(text: bytes, sequences: int, length: int, seed: int) -> Iterator[tuple[Array, Array]]:
    """Endless pairs of tokens and the tokens that follow them, each of shape [sequences, length].

    The same seed gives the same batches.
    """
    tokens = np.frombuffer(text, np.uint8)
    draws = np.random.default_rng(seed)
    while True:
        first = draws.integers(len(tokens) - length, size=(sequences, 1))
        both = tokens[first + np.arange(length + 1)].astype(np.int64)
        yield both[:, :-1], both[:, 1:]
