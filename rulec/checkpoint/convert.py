"""Conversions of a checkpoint's arrays: quantized states as codes and scales, and weights to a leaf's kind.

An array of codes names its format, and the array of its scales is beside it. The residual or master weight beside a
parameter is converted to the kind that the leaf has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from rulec.checkpoint.content import Leaf, Parameter
from rulec.checkpoint.tensors import Stored
from rulec.compiler.layout import scale_name
from rulec.compiler.weights import KINDS, converted, float_of, is_part, part_of, rounded
from rulec.errors import HyperError
from rulec.formats import UNBIASED, decode, of_key


def faults(parameter: Parameter) -> Iterable[str]:
    """Faults of the states of a parameter in codes, each as a clause."""
    scaled = {scale_name(name) for name, state in parameter.states.items() if state.format not in ("", UNBIASED)}
    if any(name.endswith(scale_name("")) and name not in scaled for name in parameter.states):
        yield f"scales of {parameter.name} without a format"
    for name, state in parameter.states.items():
        if not state.format:
            continue
        if state.format == UNBIASED:
            if state.dtype != "bfloat16":
                yield f"{name} of {parameter.name} in {UNBIASED} is of {state.dtype}"
            continue
        try:
            form = of_key(state.format)
        except HyperError:
            yield f"{name} of {parameter.name} in the unknown format {state.format!r:.80}"
            continue
        scales, blocks = parameter.states.get(scale_name(name)), (form.scales(math.prod(parameter.shape)),)
        fits = (state.dtype, state.shape) == (form.code_dtype, form.codes_shape(parameter.shape))
        if not fits or scales is None or (scales.dtype, scales.shape) != ("float32", blocks):
            yield f"{name} of {parameter.name} has other codes or scales than {form.text} has"


def in_dtypes(parameter: Parameter) -> Parameter:
    """The parameter with bfloat16 states that do not say how they were rounded: whoever loads them decides it."""
    states = {k: replace(v, format="") if v.format == UNBIASED else v for k, v in parameter.states.items()}
    return replace(parameter, states=states)


def decoded(parameter: Parameter) -> Parameter:
    """The parameter with states in float32 in place of those in codes."""
    states = dict(parameter.states)
    for name, codes in parameter.states.items():
        if codes.format:
            scales = states.pop(scale_name(name))
            values = decode(of_key(codes.format), codes.values, scales.values, parameter.shape)
            states[name] = Stored.of(values)
    return replace(parameter, states=states)


def settled(parameters: Sequence[Parameter]) -> tuple[list[Parameter], Mapping[str, str]]:
    """The parameters with one format for each state's name, and these formats' keys; others are decoded."""
    keys: dict[str, str] = {}
    for parameter in parameters:
        for name, state in parameter.states.items():
            if state.format:
                keys.setdefault(name, state.format)
    alike = [
        all(not s.format or keys[name] == s.format for name, s in parameter.states.items()) for parameter in parameters
    ]
    return [p if same else decoded(p) for p, same in zip(parameters, alike, strict=True)], keys


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
