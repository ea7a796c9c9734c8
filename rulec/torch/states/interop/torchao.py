"""The layout of torchao: torch's names, and a tensor of codes with scales for each state."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rulec.errors import RulecError
from rulec.formats import Format, table
from rulec.torch.groups.entries import GroupRule
from rulec.torch.states.interop.layouts import Numbers
from rulec.torch.states.interop.state import HeldState

#: Format -> the module and class of torchao's tensors.
_CLASSES: Mapping[str, tuple[str, str]] = {
    "dynamic8": ("torchao.optim.subclass_8bit", "OptimState8bit"),
    "dynamic4": ("torchao.optim.subclass_4bit", "OptimState4bit"),
    "float8_e4m3": ("torchao.optim.subclass_fp8", "OptimStateFp8"),
}


class TorchAO:
    """Any state may be in codes, in blocks of any length that the number of elements is a multiple of."""

    #: Its AMSGrad fails at the first step, of 0.18 at least.
    rules = ("adam", "adamw")

    def group(self, rule: str, group_rule: GroupRule, numbers: Numbers) -> dict[str, Any]:
        """The keys of a group there, with the learning rate as a tensor."""
        hyper = numbers.hyper
        return {
            "lr": torch.tensor(hyper["lr"], dtype=torch.float32), "betas": (hyper["beta1"], hyper["beta2"]),
            "eps": hyper["eps"], "weight_decay": numbers.weight_decay, "amsgrad": False,
        }  # fmt: skip

    def formats(self, rule: str, states: Mapping[str, HeldState]) -> dict[str, Format]:
        """The formats of torchao as they are; dynamic8 for the others. Where blocks do not fit, states are floats."""
        there = {}
        for name, state in states.items():
            if state.form is not None:
                here = state.form
                form = here if here.name in _CLASSES else Format("dynamic8", 256, here.signed, here.floor)
                if math.prod(state.shape) % form.block == 0:
                    there[name] = form
        return there

    def state(
        self, rule: str, states: Mapping[str, HeldState], formats: Mapping[str, Format], names: Mapping[str, str],
        steps: int, param: Tensor,
    ) -> dict[str, Any]:  # fmt: skip
        """`step`, and the states under torch's names: torchao's tensors where they are in codes."""
        there: dict[str, Any] = {"step": torch.tensor(float(steps))}
        for name, state in states.items():
            form = formats.get(name)
            there[names[name]] = state.floats if form is None else _tensor(state, form, param)
        return there


def _tensor(state: HeldState, form: Format, param: Tensor) -> Any:
    """A tensor of torchao with the codes of a state; the scale there is of the code 1."""
    codes, scales = state.coded(form)
    kind = _class(form.name)
    if form.name == "float8_e4m3":
        unit = float(np.float32(1) / np.float32(form.largest))
        return kind(codes.view(torch.float8_e4m3fn), scales * unit, dtype=param.dtype)
    numbers = torch.from_numpy(table(form).copy()).to(param.device)
    shape = (state.shape,) if form.bits == 4 else ()
    return kind(codes, scales, numbers, form.signed, *shape, dtype=param.dtype)


def _class(form: str) -> Any:
    """torchao's class for a format; RulecError where torchao cannot be imported."""
    module, name = _CLASSES[form]
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise RulecError(
            f"layout='torchao' needs {name} of torchao, which cannot be imported ({error}): install torchao"
        ) from None
