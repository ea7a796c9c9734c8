"""Weights of a checkpoint for the leaves of a run: the part beside a parameter, in the kind that the leaf has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from rulec.checkpoint.content import Leaf, Parameter
from rulec.checkpoint.tensors import Stored
from rulec.compiler.reweigh import KINDS, converted, float_of, part_of, rounded
from rulec.compiler.weights import is_part


def reweighed(saved: Parameter, leaf: Leaf, memory: Callable[[], Stored], parameters: bool) -> Parameter:
    """A saved parameter with the part of a leaf's kind of weight, made of the saved part or of a float32 parameter.

    `parameters` says that the leaf gets the saved parameter too. Else its parameter is in `memory`, read only for
    another kind. A leaf in float32 gets the whole weight. What one of the two kinds does not hold is left out.
    """
    held = next((name for name in saved.states if is_part(name)), "")
    if held == leaf.part or not saved.begun:
        return saved
    value = saved.value if parameters else None
    part = _floats(saved.states[held]) if held else None
    states = {name: state for name, state in saved.states.items() if name != held}
    if part is not None and leaf.part:
        p = _floats(memory() if value is None else value)
        states[leaf.part] = _stored(leaf.part, converted(KINDS[held], KINDS[leaf.part], p, part))
    elif part is not None and value is not None and leaf.dtype in ("float32", "float64"):
        value = Stored.of(float_of(KINDS[held], _floats(value), part))
    elif leaf.part and value is not None and value.dtype == "float32":
        states[leaf.part] = _stored(leaf.part, part_of(KINDS[leaf.part], _floats(value)))
    return replace(saved, states=states, value=saved.value if value is None else value)


def _floats(stored: Stored) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.asarray(stored.values, np.float32)


def _stored(name: str, part: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Stored:
    if KINDS[name] != "kahan":
        return Stored.of(part)
    return Stored.of((rounded(part).view(np.uint32) >> 16).astype(np.uint16), "bfloat16")
