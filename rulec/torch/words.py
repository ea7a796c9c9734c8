"""The words in which torch's classes refuse a value: our messages have them too, for people who search for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

#: What torch says of a keyword's value; `{index}` and `{number}` are its place in a tuple, from 0 and from 1.
_USUAL: Mapping[str, str] = {
    "lr": "Invalid learning rate: {value}",
    "eps": "Invalid epsilon value: {value}",
    "betas": "Invalid beta parameter at index {index}: {value}",
    "etas": "Invalid eta values: {whole[0]}, {whole[1]}",
}

_ADAFACTOR = {
    "lr": "Learning rate should be >= 0 but is: {value}",
    "beta2_decay": "beta2_decay should be <= 0 but is: {value}",
    "eps": "epsilon{number} should be >= 0 but is: {value}",
    "d": "Clipping threshold d should be >= 1 but is: {value}",
    "weight_decay": "weight_decay should be >= 0 but is: {value}",
}

_MUON = {
    "lr": "Learning rate should be >= 0 but is: {value}",
    "momentum": "momentum should be >= 0 but is: {value}",
    "weight_decay": "weight decay should be >= 0 but is: {value}",
    "adjust_lr_fn": "Adjust learning rate function {value} is not supported",
    "params": "Muon only supports 2D parameters",
}

_OF_CLASS: Mapping[str, Mapping[str, str]] = {"Adafactor": _ADAFACTOR, "Muon": _MUON}


def torch_words(class_name: str, keyword: str, whole: Any = None, index: int | None = None) -> str:
    """torch's words for this value of a keyword, in brackets; empty for a class unknown to torch.

    `index` is the place of the value in `whole`, where that is a tuple.
    """
    if not hasattr(torch.optim, class_name):
        return ""
    text = {**_USUAL, **_OF_CLASS.get(class_name, {})}.get(keyword, f"Invalid {keyword} value: {{value}}")
    value = whole if index is None else whole[index]
    return f" ({text.format(value=value, whole=whole, index=index, number=(index or 0) + 1)})"
