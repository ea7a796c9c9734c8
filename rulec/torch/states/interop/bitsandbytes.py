"""The layout of bitsandbytes: `state1` and `state2`, as codes with `qmap1` and `absmax1` or in float32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rulec.errors import StateMismatch
from rulec.formats import Format, table
from rulec.torch.groups.entries import GroupRule
from rulec.torch.states.interop.layouts import Numbers
from rulec.torch.states.interop.state import HeldState

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

#: Hyper-parameter of AdEMAMix -> its key there; None is 0.
WARMUPS = {"alpha_warmup": "t_alpha", "beta3_warmup": "t_beta3"}

#: Hyper-parameters that bitsandbytes has no place for, or takes and does not heed.
_UNHEEDED = ("dampening", "lr_decay", "initial")


class BitsAndBytes:
    """States are numbered; where one is in codes, all of the parameter are, in blocks of 256."""

    rules = tuple(NUMBERED)

    def group(self, rule: str, group_rule: GroupRule, numbers: Numbers) -> dict[str, Any]:
        """The keys of a group there. StateMismatch where the library cannot compute the same with these numbers."""
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
    """A number of steps as it is there, an integer where it is one."""
    return None if not number else int(number) if float(number).is_integer() else number


def _floor(state: HeldState) -> bool:
    return state.form is not None and state.form.floor


def _stacked(tensors: Any) -> Tensor:
    """The one tensor, or several along a new first axis."""
    return tensors[0] if len(tensors) == 1 else torch.stack([*tensors])
