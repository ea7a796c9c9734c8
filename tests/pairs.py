"""Products of parameters of which a pairing runs every day: each choice has its turn. The others are `another`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest


def paired(*axes: Sequence[Any]) -> list[Any]:
    """All combinations of some choices, which may be `pytest.param`; `another` beyond the pairing.

    Turn i of the pairing takes choice i of every axis, and begins an axis anew at its end.
    """
    turns = max(map(len, axes))
    everyday = {tuple(turn % len(axis) for axis in axes) for turn in range(turns)}
    return [
        _combination([axis[i] for axis, i in zip(axes, places, strict=True)], another=places not in everyday)
        for places in product(*(range(len(axis)) for axis in axes))
    ]


def _combination(choices: Sequence[Any], another: bool) -> Any:
    # A parameter is no public class of pytest's: it is known by its three fields.
    parts = [choice if hasattr(choice, "marks") else pytest.param(choice) for choice in choices]
    marks = [mark for part in parts for mark in part.marks]
    ids = [part.id or "-".join(map(_id, part.values)) for part in parts]
    values = [value for part in parts for value in part.values]
    return pytest.param(*values, marks=[*marks, *([pytest.mark.another] if another else [])], id="-".join(ids))


def _id(value: Any) -> str:
    return str(getattr(value, "__name__", value))
