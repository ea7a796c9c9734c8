"""The comparison of descriptions by messages, where their digests differ.

The description of the first process goes to all, and each finds how its own differs. Then all raise the same error. Or
the order of tensors alone differs: then all take over the order of the first process.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch

from rulec.errors import RulecError
from rulec.language.expr.node import Op
from rulec.torch.distributed.differences import Said, difference

#: Numbers reduced over all processes, in a message of their own.
Reduce = Callable[[Op, Any], Any]


class Compared(Protocol):
    """The description of an optimizer in this process: see `rulec.torch.distributed.description`."""

    @property
    def sums(self) -> tuple[float, ...]: ...
    @property
    def digest(self) -> float: ...
    @property
    def described(self) -> Said: ...
    def places(self, names: Any, other: Said) -> tuple[int, ...]: ...


class OtherOrder(Exception):
    """Not an error: a step that is to begin again, as some processes have their tensors in another order.

    `order` are the places of the tensors here in the order of all; empty where they are in it.
    """

    def __init__(self, order: tuple[int, ...]) -> None:
        super().__init__("the step begins again in the order of the first process")
        self.order = order


def settle(alike: Compared, reduce: Reduce) -> None:
    """Compares descriptions. RulecError where one differs from that of the first process, in all; else OtherOrder where
    the order of one does, in all; else nothing.
    """
    said, rank = alike.described, torch.distributed.get_rank()
    first = int(reduce(Op.MIN, np.array([float(rank)]))[0])
    theirs: Said = json.loads(tell(json.dumps(said) if rank == first else "", reduce))
    mine = difference(said, theirs, rank, first)
    kind = 2 if mine.text else 1 if mine.order else 0
    worst = reduce(Op.MAX, np.array([float(kind)]))[0]
    if worst == 2:
        speaker = reduce(Op.MIN, np.array([rank if mine.text else np.inf]))[0]
        raise RulecError(tell(mine.text if rank == speaker else "", reduce))
    if worst == 1:
        raise OtherOrder(alike.places(mine.order, theirs) if mine.order else ())


def tell(text: str, reduce: Reduce) -> str:
    """The text of the one process that has one, in all."""
    sent = text.encode()
    length = int(reduce(Op.MAX, np.array([float(len(sent))]))[0])
    words = np.frombuffer(sent.ljust(length, b"\0"), np.uint8).astype(np.float64)
    return bytes(reduce(Op.MAX, words).astype(np.uint8)).decode()
