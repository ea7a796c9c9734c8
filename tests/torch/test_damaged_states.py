"""State dicts that were damaged by hand: each is refused in one sentence before anything is written."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rulec.torch as rt
from rulec.errors import RulecError, StateMismatch

BRAIN = torch.bfloat16

#: Optimizers by the kinds of their states: the class, the dtype of weights, and keywords.
KINDS: Mapping[str, tuple[str, torch.dtype, Mapping[str, Any]]] = {
    "floats": ("AdamW", torch.float32, {}), "codes": ("AdamW", torch.float32, {"state_dtype": "dynamic8"}),
    "parts": ("AdamW", BRAIN, {"weights": "split", "state_dtype": "int8"}),
    "kahan": ("AdamW", BRAIN, {"weights": "kahan"}), "factors": ("Adafactor", torch.float32, {}),
    "numbers": ("Prodigy", torch.float32, {}),
}  # fmt: skip


def tensor(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(float(value))


#: What stands in the place of a state.
VALUES: Mapping[str, Callable[[Any], Any]] = {
    "text": lambda x: "3", "bytes": lambda x: b"3", "list": lambda x: [1], "nothing": lambda x: {},
    "dict": lambda x: {"a": 1}, "object": lambda x: object(), "no memory": lambda x: tensor(x).to("meta"),
    "sparse": lambda x: tensor(x).float().to_sparse(), "complex": lambda x: tensor(x).to(torch.complex64),
    "quantized": lambda x: torch.quantize_per_tensor(tensor(x).float(), 0.1, 0, torch.qint8),
    "another shape": lambda x: torch.ones(3, 5),
}  # fmt: skip


@cache
def kept(kind: str) -> dict[str, Any]:
    """The state dict of a run of this kind."""
    saved: dict[str, Any] = trained(kind).state_dict()
    return saved


def trained(kind: str) -> Any:
    name, dtype, keywords = KINDS[kind]
    torch.manual_seed(0)
    net = nn.Linear(96, 64).to(dtype)
    optimizer = getattr(rt, name)(net.named_parameters(), lr=1e-3, **keywords)
    net(torch.ones(2, 96, dtype=dtype)).square().sum().backward()
    optimizer.step()
    return optimizer


class Target:
    """An optimizer that takes none of several damaged state dicts."""

    def __init__(self, kind: str) -> None:
        self.kind, self.optimizer = kind, trained(kind)
        self._before = copy.deepcopy(self.optimizer.state_dict())

    def check_refuses(self, change: Callable[[dict[str, Any]], Any], words: str = "", error: Any = RulecError) -> None:
        saved = copy.deepcopy(kept(self.kind))
        change(saved)
        with pytest.raises(error, match=words) as caught:
            self.optimizer.load_state_dict(saved)
        assert "\n" not in str(caught.value)
        after = self.optimizer.state_dict()
        assert after["param_groups"] == self._before["param_groups"]
        for place, states in self._before["state"].items():
            assert states.keys() == after["state"][place].keys()
            assert all(torch.equal(tensor(x), tensor(after["state"][place][key])) for key, x in states.items())


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == "codes" else pytest.mark.slow) for kind in KINDS]
)
def test_values_that_are_no_states_are_refused(kind: str) -> None:
    target = Target(kind)
    for name, value in kept(kind)["state"][0].items():
        state = name.partition("::")[0]
        for make in VALUES.values():
            target.check_refuses(lambda saved, n=name, m=make, v=value: saved["state"][0].update({n: m(v)}), state)
        if not name.startswith("param::"):
            target.check_refuses(lambda saved, n=name: saved["state"][0].pop(n), state)
            target.check_refuses(lambda saved, n=name: saved["state"][0].update({n: None}), state)
    for broken in ([1], "x", tensor(1), 3, None):
        target.check_refuses(lambda saved, b=broken: saved["state"].update({0: b}), "saved state of")
        target.check_refuses(lambda saved, b=broken: saved.update({"state": b}), "state")
        target.check_refuses(lambda saved, b=broken: saved.update({"param_groups": b}), "param_groups")


@pytest.mark.parametrize("kind", ["kahan", "parts"])
def test_parts_of_weights_under_another_name_are_refused(kind: str) -> None:
    target = Target(kind)
    (part,) = [name for name in kept(kind)["state"][0] if name.startswith("param::")]
    for name in (f"{part}s", "param::zzz", part.replace("::", "_")):
        target.check_refuses(
            lambda s, n=name: s["state"][0].update({n: s["state"][0].pop(part)}), "is no part of a weight"
        )


@pytest.mark.parametrize("formats", ["int8", 3, ["a"], {"exp_avg": 5}, {"exp_avg": "int8"}, {"exp_avg": "x/3-signed"}])
@pytest.mark.parametrize("kind", ["floats", "codes"])
def test_formats_of_another_type_are_refused(kind: str, formats: Any) -> None:
    Target(kind).check_refuses(lambda saved: saved["param_groups"][0].update(formats=formats), "format")


@pytest.mark.parametrize("key", ["params", "param_names"])
def test_groups_that_list_nothing_are_refused(key: str) -> None:
    for broken in (None, 3, tensor(1), object()):
        Target("floats").check_refuses(
            lambda saved, b=broken: saved["param_groups"][0].update({key: b}), f"{key}=.* a list"
        )


@pytest.mark.parametrize("key", ["amsgrad", "maximize", "fused", "lr", "weight_decay"])
def test_numbers_of_groups_that_are_many_are_refused(key: str) -> None:
    for value in (torch.ones(3), torch.ones(1).to_sparse()):
        Target("floats").check_refuses(lambda saved, v=value: saved["param_groups"][0].update({key: v}), key)


CODES: Mapping[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "codes without scales": (lambda s: s.pop("exp_avg::scale"), "exp_avg::codes of .* without exp_avg::scale"),
    "scales without codes": (lambda s: s.pop("exp_avg::codes"), "exp_avg::scale of .* without exp_avg::codes"),
    "codes as floats": (lambda s: s.update({"exp_avg::codes": s["exp_avg::codes"].float()}), "codes in torch.float32"),
    "scales as integers": (lambda s: s.update({"exp_avg::scale": s["exp_avg::scale"].int()}), "scales in torch.int32"),
    "codes as values": (
        lambda s: s.update({"exp_avg": s.pop("exp_avg::codes"), "a": s.pop("exp_avg::scale")}),
        "exp_avg of .* in torch.uint8 without exp_avg::scale, and codes are no values",
    ),
    "half of the scales": (
        lambda s: s.update({"exp_avg::scale": s["exp_avg::scale"].reshape(-1)[::2]}),
        "exp_avg of .* 6144 codes with 768 scales",
    ),
}


@pytest.mark.parametrize("damage", CODES)
def test_codes_that_mean_nothing_are_refused(damage: str) -> None:
    change, words = CODES[damage]
    target = Target("codes")
    target.check_refuses(lambda saved: change(saved["state"][0]), words, StateMismatch)
    floats = Target("floats")
    floats.kind = "codes"
    floats.check_refuses(lambda saved: change(saved["state"][0]), words, StateMismatch)
