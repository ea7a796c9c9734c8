"""Reductions of tensors of which every process has a part: the parts' results, reduced once more over processes.

The processes of a mesh cut a tensor along its dimensions. A reduction that removes an axis is complete once the results
of the processes along it are reduced. What several launches wait for travels together: one message for each operation
and each dimension of the mesh.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from rulec.array_api.library import Library
from rulec.array_api.slices import Piece
from rulec.language.expr.node import Op
from rulec.runtime.distributed.all_to_all import Spread
from rulec.runtime.distributed.process_group import Meeting, Peers

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Whole:
    """The tensor that an array is a part of: its shape, and for each cut the dimension and the processes along it.

    `piece` says where the elements of the part lie in the whole, and `indices` do so along each dimension. `spread`
    says where those of all parts lie; None where a part is no rectangle.
    """

    shape: tuple[int, ...]
    cuts: tuple[tuple[int, Peers], ...]
    piece: Piece
    indices: tuple[Sequence[int], ...]
    spread: Spread | None = None


@dataclass(frozen=True)
class Partial:
    """Results over the parts here, an array in float64, and the processes to reduce them over, one after the other."""

    op: Op
    values: Any
    peers: tuple[Peers, ...]


@dataclass(frozen=True)
class Partials:
    """What a launch waits for; it is sent the completed values of each."""

    parts: Sequence[Partial]
    library: Library


def completed(waiting: Sequence[Partials], meeting: Meeting) -> list[list[Any]]:
    """The completed values of everything that is waited for.

    Every process has the same tensors in the same order, so all send the same messages in the same order. Where this
    one fails, it sends them without a meaning, and the meeting knows of it.
    """
    parts = [part for partials in waiting for part in partials.parts]
    libraries = [partials.library for partials in waiting for _ in partials.parts]
    values = [part.values for part in parts]
    attempt = meeting.failure.attempt
    ways = dict.fromkeys((part.op, peers) for part in parts for peers in part.peers)
    meeting.check()
    for op, peers in ways:
        places = [i for i, part in enumerate(parts) if part.op is op and peers in part.peers]
        message = attempt(partial(_joined, places, values, libraries[places[0]]))
        if message is None:
            message = np.zeros(sum(math.prod(values[i].shape) for i in places))
        whole = meeting.reduce(op, peers, message)
        attempt(partial(_put_back, places, values, libraries, whole))
    meeting.close()
    results = iter(values)
    return [[next(results) for _ in partials.parts] for partials in waiting]


def _joined(places: Sequence[int], values: Sequence[Any], library: Library) -> Any:
    flat = [library.numbers(values[i]).reshape(-1) for i in places]
    return library.join(flat, 0) if len(flat) > 1 else flat[0]


def _put_back(places: Sequence[int], values: list[Any], libraries: Sequence[Library], whole: Any) -> None:
    begin = 0
    for i in places:
        shape = tuple(values[i].shape)
        values[i] = libraries[i].numbers(whole[begin : (begin := begin + math.prod(shape))]).reshape(shape)
