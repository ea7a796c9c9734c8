"""The number that an expression is, where everything it is made of is known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from rulec.language.arithmetic import NUMPY
from rulec.language.node import Node, Op, walk

_NAMED = (Op.FACT, Op.HYPER, Op.NAME)


def number_known(value: Node, known: Mapping[str, float]) -> float | None:
    """An expression in float64, from the values of names, hyper-parameters and shape facts; None where it has more."""
    values: dict[Node, Any] = {}
    with np.errstate(all="ignore"):
        for part in walk([value]):
            if part.op is Op.CONST:
                values[part] = np.float64(cast(float, part.arg))
            elif part.op in _NAMED and part.arg in known:
                values[part] = np.float64(known[str(part.arg)])
            elif part.op in NUMPY and all(a in values for a in part.args):
                values[part] = NUMPY[part.op](*(values[a] for a in part.args))
    return float(values[value]) if value in values else None
