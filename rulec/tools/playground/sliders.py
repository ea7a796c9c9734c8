"""The values that a hyper-parameter takes on its slider."""

from __future__ import annotations

import math
from typing import Any

from rulec.language.hyper import Hyper
from rulec.language.rule import Rule
from rulec.tools.display.path import RATES

#: Whole numbers of a slider, at most.
WHOLE = 20


def sliders(rule: Rule) -> list[dict[str, Any]]:
    """A slider for each hyper-parameter with a number as its default: name, values, and the default's place."""
    rows = []
    for name, hyper in rule.settings.items():
        if isinstance(hyper.default, int | float) and math.isfinite(hyper.default) and not hyper.decides:
            values = stops(name, hyper, float(hyper.default))
            rows.append({"name": name, "values": values, "at": values.index(float(hyper.default))})
    return rows


def stops(name: str, hyper: Hyper, default: float) -> list[float]:
    """Ascending values in the range of a hyper-parameter, its default among them."""
    if hyper.whole:
        first = math.ceil(hyper.min) if math.isfinite(hyper.min) else min(0, int(default))
        values = [float(first + i) for i in range(WHOLE)]
    elif name == "lr" or name.endswith("_lr"):
        values = [*_decades(-5, 1), *RATES]
    elif _is_part(hyper) and default >= 0.5:
        values = [0.0, *(1 - value for value in _decades(-4, -1)), 0.8, 0.7, 0.6, 0.5, 0.25]
    elif math.isfinite(_low(hyper)) and math.isfinite(_high(hyper)):
        values = [_low(hyper) + (_high(hyper) - _low(hyper)) * i / 40 for i in range(41)]
    elif default:
        power = math.log10(abs(default))
        values = [math.copysign(value, default) for value in _decades(round(power) - 3, round(power) + 3)]
        values += [0.0]
    else:
        values = [0.0, *_decades(-5, 0)]
    rounded = {float(f"{value:.12g}") for value in values}
    return sorted({value for value in rounded if _fits(hyper, value)} | {default})


def _decades(first: int, last: int) -> list[float]:
    """Numbers from one power of ten to another, nine in each."""
    return [float(f"{digit}e{power}") for power in range(first, last) for digit in range(1, 10)] + [10.0**last]


def _is_part(hyper: Hyper) -> bool:
    """Whether the range is that of an average's coefficient: at least 0 and below 1."""
    return hyper.min == 0 and hyper.below == 1


def _low(hyper: Hyper) -> float:
    return max(hyper.min, hyper.above)


def _high(hyper: Hyper) -> float:
    return min(hyper.max, hyper.below)


def _fits(hyper: Hyper, value: float) -> bool:
    return hyper.min <= value <= hyper.max and hyper.above < value < hyper.below
