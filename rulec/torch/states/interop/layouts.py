"""The layouts of state dicts of other libraries: their rules, groups and states, for torch, bitsandbytes and torchao.

A state of one parameter is saved as floats, or as codes of a format with their scales. bitsandbytes has `state1` and
`state2`, as codes with `qmap1` and `absmax1` or in float32. torchao has torch's names, and a tensor of codes with
scales for each state.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from rulec.errors import RulecError, StateMismatch
from rulec.formats import Format, decode, encode, table
from rulec.torch.groups.entries import GroupRule


class Numbers(NamedTuple):
    """A group's hyper-parameters by the rule's names, and `weight_decay`, which may be of a transform."""

    hyper: Mapping[str, float]
    weight_decay: float


class Layout(Protocol):
    """A library's layout. `rules` are the keys of the rules that it computes."""

    @property
    def rules(self) -> tuple[str, ...]: ...

    def group(self, rule: str, group_rule: GroupRule, numbers: Numbers) -> dict[str, Any]:
        """The library's keys of a group. StateMismatch where the library cannot compute the same with these numbers."""

    def formats(self, rule: str, states: Mapping[str, HeldState]) -> dict[str, Format]:
        """The library's formats of a parameter's states, by the rule's names; the others are floats."""

    def state(
        self, rule: str, states: Mapping[str, HeldState], formats: Mapping[str, Format], names: Mapping[str, str],
        steps: int, param: Tensor,
    ) -> dict[str, Any]:  # fmt: skip
        """The library's state of a parameter, in these formats. `names` are torch's names of the states."""


@dataclass(frozen=True)
class HeldState:
    """What the optimizer holds: floats in `shape`, or where there is a `form` codes and `scales`.

    All tensors that it gives are copies, on the device of the values.
    """

    values: Tensor
    scales: Tensor | None
    form: Format | None
    shape: tuple[int, ...]

    @cached_property
    def floats(self) -> Tensor:
        """The values in float32, in C order."""
        if self.form is None or self.scales is None:
            return self.values.detach().to(torch.float32, memory_format=torch.contiguous_format, copy=True)
        codes, scales = (tensor.detach().cpu().numpy() for tensor in (self.values, self.scales))
        return torch.from_numpy(decode(self.form, codes, scales, self.shape)).to(self.values.device)

    def coded(self, form: Format) -> tuple[Tensor, Tensor]:
        """Codes and float32 scales in a format: unchanged where rulec's format has the same meaning."""
        if self.scales is not None and self.has(form):
            return self.values.detach().clone(), self.scales.detach().clone()
        codes, scales = (torch.from_numpy(array) for array in encode(form, self.floats.cpu().numpy()))
        return codes.to(self.values.device), scales.to(self.values.device)

    def has(self, form: Format) -> bool:
        """Whether rulec's codes mean the same in this format. A floor is of how values are quantized, not of codes."""
        here = self.form
        return here is not None and (here.text, here.signed) == (form.text, form.signed)


#: Rule -> the states of each number. `state1` has codes with a sign and `state2` codes without.
NUMBERED: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "adam": (("m",), ("v",)), "adamw": (("m",), ("v",)), "ademamix": (("m1", "m2"), ("v",)), "lion": (("m",),),
    "momentum": (("m",),), "rmsprop": (("v",),), "adagrad": (("s",),),
}  # fmt: skip

#: Rule -> the hyper-parameters in `betas`; None is 0.
BETAS: Mapping[str, tuple[str | None, ...]] = {
    "adam": ("beta1", "beta2"), "adamw": ("beta1", "beta2"), "ademamix": ("beta1", "beta2", "beta3"),
    "lion": ("beta1", "beta2"), "momentum": ("momentum", "dampening"), "rmsprop": ("alpha", None),
    "adagrad": (None, None),
}  # fmt: skip

#: Hyper-parameter of AdEMAMix -> its key in the library; None is 0.
WARMUPS = {"alpha_warmup": "t_alpha", "beta3_warmup": "t_beta3"}

#: Hyper-parameters that bitsandbytes has no place for, or takes and does not heed.
_UNHEEDED = ("dampening", "lr_decay", "initial")


class BitsAndBytes:
    """States are numbered; where one is quantized, all of the parameter are, in blocks of 256."""

    rules = tuple(NUMBERED)

    def group(self, rule: str, group_rule: GroupRule, numbers: Numbers) -> dict[str, Any]:
        """The library's keys of a group. StateMismatch where the library cannot compute the same with these numbers."""
        hyper, name = numbers.hyper, group_rule.entry.owner
        for key in _UNHEEDED:
            if hyper.get(key):
                raise StateMismatch(
                    f"bitsandbytes' {name} does not compute with {key}={hyper[key]:g}: it takes 0 alone"
                )
        if rule == "adam" and group_rule.decay == "l2" and numbers.weight_decay:
            raise StateMismatch(
                f"bitsandbytes' Adam decays weights as AdamW does, and this {name} adds weight_decay="
                f"{numbers.weight_decay:g} times the parameter to its gradient: bitsandbytes does not compute that"
            )
        betas = tuple(hyper[key] if key else 0.0 for key in BETAS[rule])
        keys = {"lr": hyper["lr"], "betas": betas, "eps": hyper.get("eps", 0.0), "weight_decay": numbers.weight_decay}
        if len(NUMBERED[rule]) == 1:
            return keys
        warmups = {key: _steps(hyper.get(name, 0.0)) for name, key in WARMUPS.items()}
        return {**keys, "alpha": hyper.get("alpha", 0.0), **warmups}

    def formats(self, rule: str, states: Mapping[str, HeldState]) -> dict[str, Format]:
        """Those of all states, or of none: bitsandbytes asks the first of a parameter for all."""
        if all(state.form is None for state in states.values()):
            return {}
        return {
            name: Format("dynamic8", 256, signed=place == 0, floor=_floor(states[name]))
            for place, names in enumerate(NUMBERED[rule])
            for name in names
        }

    def state(
        self, rule: str, states: Mapping[str, HeldState], formats: Mapping[str, Format], names: Mapping[str, str],
        steps: int, param: Tensor,
    ) -> dict[str, Any]:  # fmt: skip
        """`step`, and for each number `state1` or `state1`, `qmap1` and `absmax1`."""
        there: dict[str, Any] = {"step": steps}
        for number, members in enumerate(NUMBERED[rule], 1):
            if not formats:
                there[f"state{number}"] = _stacked([states[name].floats for name in members])
                continue
            codes, scales = zip(*(states[name].coded(formats[name]) for name in members), strict=True)
            numbers = torch.from_numpy(table(formats[members[0]]).copy()).to(param.device)
            there |= {f"state{number}": _stacked(codes), f"qmap{number}": numbers, f"absmax{number}": _stacked(scales)}
        return there


def _steps(number: float) -> float | None:
    """A number of steps as the library has it, an integer where it is one."""
    return None if not number else int(number) if float(number).is_integer() else number


def _floor(state: HeldState) -> bool:
    return state.form is not None and state.form.floor


def _stacked(tensors: Any) -> Tensor:
    """The one tensor, or several along a new first axis."""
    return tensors[0] if len(tensors) == 1 else torch.stack([*tensors])


#: Format -> the module and class of torchao's tensors.
_CLASSES: Mapping[str, tuple[str, str]] = {
    "dynamic8": ("torchao.optim.subclass_8bit", "OptimState8bit"),
    "dynamic4": ("torchao.optim.subclass_4bit", "OptimState4bit"),
    "float8_e4m3": ("torchao.optim.subclass_fp8", "OptimStateFp8"),
}


class TorchAO:
    """Any state may be quantized, in blocks of any length that the number of elements is a multiple of."""

    #: Its AMSGrad fails at the first step, of 0.18 at least.
    rules = ("adam", "adamw")

    def group(self, rule: str, group_rule: GroupRule, numbers: Numbers) -> dict[str, Any]:
        """The library's keys of a group, with the learning rate as a tensor."""
        hyper = numbers.hyper
        return {
            "lr": torch.tensor(hyper["lr"], dtype=torch.float32), "betas": (hyper["beta1"], hyper["beta2"]),
            "eps": hyper["eps"], "weight_decay": numbers.weight_decay, "amsgrad": False,
        }  # fmt: skip

    def formats(self, rule: str, states: Mapping[str, HeldState]) -> dict[str, Format]:
        """The formats of torchao as they are; dynamic8 for the others. If blocks do not fit, states are floats."""
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
        """`step`, and the states under torch's names: torchao's tensors where they are quantized."""
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
