"""States in codes in a checkpoint: an array of codes that names its format, and beside it the array of its scales."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from rulec.checkpoint.content import Parameter
from rulec.checkpoint.tensors import Stored
from rulec.compiler.layout import scale_name
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
