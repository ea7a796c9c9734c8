"""Runs that go from bitsandbytes and torchao to us and back: from a file of `write_peers`, and live where they are."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import json
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import rulec.torch as rt
from rulec.errors import RulecError, StateMismatch
from rulec.language.library.load import parse
from rulec.torch.states.interop.save import LAYOUTS
from tests.torch.write_peers import CASES, FILE, KEPT, SHAPE, run, uncompiled, weights

with np.load(FILE, allow_pickle=False) as file:
    ARRAYS = dict(file)

LIVE = [
    pytest.param(
        name, marks=pytest.mark.skipif(importlib.util.find_spec(case.library) is None, reason=f"no {case.library}")
    )
    for name, case in CASES.items()
]


class Stand:
    """What a tensor of torchao has, for machines without it: `signed`, `shape` and `dtype` are as they are given."""

    def __init__(self, codes: Tensor, scale: Tensor, *rest: Any, dtype: Any = None) -> None:
        self.codes, self.scale, self.rest, self.dtype = codes, scale, rest, dtype
        if rest:
            self.qmap = rest[0]

    def dequantize(self) -> Tensor:
        if not self.rest:
            numbers = self.codes.float()
        elif self.codes.dim() == 1:
            numbers = self.qmap[torch.stack([self.codes >> 4, self.codes & 15], dim=-1).int()]
        else:
            numbers = self.qmap[self.codes.int()]
        return (numbers.view(self.scale.shape[0], -1) * self.scale.view(-1, 1)).view(SHAPE)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    for word, name in (("8bit", "OptimState8bit"), ("4bit", "OptimState4bit"), ("fp8", "OptimStateFp8")):
        monkeypatch.setitem(sys.modules, f"torchao.optim.subclass_{word}", SimpleNamespace(**{name: Stand}))


def words_of(name: str) -> dict[str, Tensor]:
    start = f"{name}."
    return {
        key.removeprefix(start): torch.from_numpy(value)
        for key, value in ARRAYS.items()
        if key.startswith(start) and not key.endswith((".group", ".updated"))
    }


def saved_by(name: str) -> dict[str, Any]:
    """The peer's state dict after its third step."""
    words = words_of(name)
    if CASES[name].library == "torchao":
        state: dict[str, Any] = {"step": words["step"]}
        for key in ("exp_avg", "exp_avg_sq"):
            codes = words[f"{key}.codes"]
            rest = [words[f"{key}.qmap"]] if f"{key}.qmap" in words else []
            codes = codes if rest else codes.view(torch.float8_e4m3fn)
            state[key] = Stand(codes, words[f"{key}.scale"], *rest)
    else:
        step = int(words.pop("step"))
        state = {"step": step, "__bnb_optimizer_quant_state__": words}
    return {"state": {0: state}, "param_groups": [json.loads(str(ARRAYS[f"{name}.group"]))]}


def ours(name: str, param: nn.Parameter, **keywords: Any) -> Any:
    case = CASES[name]
    return getattr(rt, case.ours)([param], **{**case.own, "state_dtype": case.format, **keywords})


def check_within_the_format(name: str, updated: Tensor, wanted: Tensor) -> None:
    """One step from the same codes: what differs is rounding alone, of weights up to 4 and of the step."""
    moved = (wanted - weights().detach().reshape(-1)[: wanted.numel()]).abs()
    assert moved.max() > 1e-4
    assert (updated - wanted).abs().max() <= 2e-5 * moved.max() + 5e-7


@pytest.mark.parametrize("name", CASES)
def test_a_run_of_a_peer_goes_on_here_as_it_does_there(name: str) -> None:
    param = weights()
    optimizer = ours(name, param, state_dtype=None)
    optimizer.load_state_dict(saved_by(name))
    run(optimizer, param, range(3, 4))
    check_within_the_format(name, param.detach().reshape(-1)[:KEPT], torch.from_numpy(ARRAYS[f"{name}.updated"]))


#: The codes of a peer that are none of ours: it gives a sign to states that have none, or its scale is of the code 1.
OTHERWISE = ("bitsandbytes.rmsprop", "bitsandbytes.adagrad", "torchao.adamw_fp8")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("stand_ins")
def test_codes_of_a_peer_stay_on_their_way_here_and_back(name: str) -> None:
    case, theirs = CASES[name], saved_by(name)
    optimizer = ours(name, weights())
    optimizer.load_state_dict(copy.deepcopy(theirs))
    assert optimizer.storage()["parameter 0"].keys()
    assert all(word.startswith(case.format) for word in optimizer.storage()["parameter 0"].values())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if name in OTHERWISE else "error")
        back = optimizer.state_dict(layout=case.library)
    state, wanted = back["state"][0], words_of(name)
    for key, value in wanted.items():
        word, _, part = key.partition(".")
        held = getattr(state[word], part) if part else state[word]
        held = torch.as_tensor(held.view(torch.uint8) if getattr(held, "dtype", 0) is torch.float8_e4m3fn else held)
        if name not in OTHERWISE or key.endswith("qmap") or key in ("step", "qmap1"):
            assert torch.equal(held, value), key
        elif name == "torchao.adamw_fp8" and part == "codes":
            assert (held == value).float().mean() > 0.999
        elif name == "torchao.adamw_fp8":
            assert torch.allclose(held, value, rtol=2**-22, atol=0)
    group = back["param_groups"][0]
    for key, value in json.loads(str(ARRAYS[f"{name}.group"])).items():
        got = group[key]
        assert (pytest.approx(value) if value is not None else None) == (list(got) if isinstance(got, tuple) else got)


@pytest.mark.parametrize("name", LIVE)
def test_a_run_from_here_goes_on_in_the_library(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, param, twin = CASES[name], weights(), weights()
    if case.library == "torchao":
        monkeypatch.setattr(torch, "compile", torch.compile)
        uncompiled()
    optimizer = ours(name, param)
    run(optimizer, param, range(3))
    theirs = case.make([twin])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if name in OTHERWISE else "error")
        theirs.load_state_dict(optimizer.state_dict(layout=case.library))
    again = ours(name, weights())
    again.load_state_dict(theirs.state_dict())
    for key, value in optimizer.state[param].items():
        if name not in OTHERWISE and key != "step":
            assert torch.equal(again.state[again.param_groups[0]["params"][0]][key], value)
    start = weights()
    reference = ours(name, start, state_dtype=None)
    reference.load_state_dict(theirs.state_dict())
    run(reference, start, range(3, 4))
    run(theirs, twin, range(3, 4))
    check_within_the_format(name, start.detach().reshape(-1), twin.detach().reshape(-1))
    with torch.no_grad():
        param.copy_(weights())
    run(optimizer, param, range(3, 4))
    assert (param - twin).abs().mean() <= 0.1 * (twin - weights()).abs().mean()


def trained(kind: str = "AdamW", shape: tuple[int, ...] = SHAPE, dtype: Any = torch.float32, **keywords: Any) -> Any:
    param = nn.Parameter(torch.ones(shape, dtype=dtype))
    optimizer = getattr(rt, kind)([param], **keywords)
    param.grad = (torch.arange(param.numel()) % 97 - 40).reshape(shape).to(dtype)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("kind", "keywords", "layout", "words"),
    [
        ("AdamW", {}, "bitsandbyte", "bitsandbytes"),
        ("AdamW", {"amsgrad": True}, "bitsandbytes", "AMSGrad"),
        ("Lion", {}, "torchao", "computes Lion"),
        ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}, "bitsandbytes", "Nesterov"),
        ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}, "bitsandbytes", "dampening=0.5"),
        ("Adagrad", {"lr_decay": 0.1}, "bitsandbytes", "lr_decay=0.1"),
        ("Adam", {"weight_decay": 0.1}, "bitsandbytes", "weight_decay=0.1"),
        ("AdamW", {"maximize": True}, "torchao", "maximize"),
        ("AdamW", {"weights": "split", "dtype": torch.bfloat16}, "bitsandbytes", "param::low"),
        ("AdamW", {"dtype": torch.complex64}, "bitsandbytes", "complex"),
    ],
)
def test_what_a_library_does_not_compute_is_refused_by_name(
    kind: str, keywords: dict[str, Any], layout: str, words: str
) -> None:
    with pytest.raises(RulecError, match=words):
        trained(kind, **keywords).state_dict(layout=layout)


def test_a_rule_of_the_name_alone_is_refused() -> None:
    smooth = parse(
        "name: Lion\nhyper: {lr: 1e-4, beta1: 0.9, beta2: 0.99, weight_decay: 0}\nstate: {m: 0}\nstep: |\n"
        "  direction = tanh(beta1*m + (1 - beta1)*g) + weight_decay*p\n  m = beta2*m + (1 - beta2)*g\n"
    )
    with pytest.raises(StateMismatch, match="computes Lion"):
        rt.optimizer(smooth)([weights()]).state_dict(layout="bitsandbytes")


def test_a_library_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.optim.subclass_8bit", None)
    with pytest.raises(RulecError, match="install torchao"):
        trained(state_dtype="dynamic8").state_dict(layout="torchao")


def test_codes_of_other_formats_are_made_anew_with_a_warning() -> None:
    optimizer = trained(state_dtype={"exp_avg": "int8", "exp_avg_sq": "dynamic8/64"})
    with pytest.warns(UserWarning, match="exp_avg from int8/32 to dynamic8/256; exp_avg_sq from dynamic8/64"):
        state = optimizer.state_dict(layout="bitsandbytes")["state"][0]
    again = trained(state_dtype="dynamic8")
    again.load_state_dict(optimizer.state_dict())
    (param,) = again.param_groups[0]["params"]
    for number, name in ((1, "exp_avg"), (2, "exp_avg_sq")):
        assert torch.equal(state[f"state{number}"], again.state[param][f"{name}::codes"])
        assert torch.equal(state[f"absmax{number}"], again.state[param][f"{name}::scale"])


def test_a_parameter_has_all_its_states_in_codes_in_bitsandbytes_or_none() -> None:
    with pytest.warns(UserWarning, match="exp_avg from floats to dynamic8/256"):
        state = trained(state_dtype={"exp_avg_sq": "dynamic8"}).state_dict(layout="bitsandbytes")["state"][0]
    assert state["state1"].dtype is state["state2"].dtype is torch.uint8
    plain = trained(dtype=torch.bfloat16).state_dict(layout="bitsandbytes")["state"][0]
    assert plain.keys() == {"step", "state1", "state2"}
    assert plain["state1"].dtype is plain["state2"].dtype is torch.float32


@pytest.mark.parametrize("name", ["bitsandbytes.adamw", "torchao.adamw8"])
def test_codes_of_another_block_have_the_same_values_here(name: str) -> None:
    """A block of 64 has its largest value with either sign, so codes are new; the values are as near as codes are."""
    floats, coded = ours(name, weights(), state_dtype=None), ours(name, weights(), state_dtype="dynamic8/64")
    for optimizer in (floats, coded):
        optimizer.load_state_dict(saved_by(name))
    assert coded.storage()["parameter 0"] == {"exp_avg": "dynamic8/64", "exp_avg_sq": "dynamic8/64"}
    back = ours(name, weights(), state_dtype=None)
    back.load_state_dict(coded.state_dict())
    for key in ("exp_avg", "exp_avg_sq"):
        wanted, got = (each.state[each.param_groups[0]["params"][0]][key] for each in (floats, back))
        assert (wanted - got).abs().max() <= 0.008 * wanted.abs().max()


def test_values_above_zero_stay_above_it_where_codes_get_a_sign() -> None:
    """RMSprop divides by the root of its state, and bitsandbytes stores that with a sign, in larger blocks."""
    param = weights()
    optimizer = rt.RMSprop([param], state_dtype="dynamic8/64")
    param.grad = torch.where(torch.arange(param.numel()).reshape(SHAPE) % 256 < 64, 1.0, 1e-5)
    param.grad[0, 70] = 0
    optimizer.step()
    with pytest.warns(UserWarning, match="square_avg from dynamic8/64 to dynamic8/256 with a sign"):
        state = optimizer.state_dict(layout="bitsandbytes")["state"][0]
    positive = state["qmap1"].numpy()[state["state1"].numpy()] > 0
    assert np.array_equal(positive, param.grad.numpy() > 0)


@pytest.mark.usefixtures("stand_ins")
def test_blocks_that_a_tensor_does_not_fill_are_floats_in_torchao() -> None:
    optimizer = trained(shape=(4100,), state_dtype={"exp_avg": "dynamic8", "exp_avg_sq": "int8/8"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = optimizer.state_dict(layout="torchao")["state"][0]
    floats = rt.AdamW([nn.Parameter(torch.ones(4100))])
    floats.load_state_dict(optimizer.state_dict())
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(state[name], floats.state[floats.param_groups[0]["params"][0]][name])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("word", [None, "dynamic8"])
@pytest.mark.usefixtures("stand_ins")
def test_what_is_handed_over_is_a_copy(layout: str, word: str | None) -> None:
    optimizer = trained(state_dtype=word)
    before = {v.untyped_storage().data_ptr() for s in optimizer.state.values() for v in s.values()}
    state = optimizer.state_dict(layout=layout)["state"][0]
    tensors = [t for v in state.values() for t in ((v.codes, v.scale) if isinstance(v, Stand) else (v,))]
    assert not before & {t.untyped_storage().data_ptr() for t in tensors if isinstance(t, Tensor)}
    assert optimizer.state_dict(layout=layout)["param_groups"][0]["params"] == [0]
