"""States in codes in torch's optimizers: storage, loading between formats, checkpoints, refusals."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

import rulec.torch as rt
from rulec.compiler.weights import float_of
from rulec.errors import HyperError, StateMismatch, TensorError
from rulec.formats import decode, of_key
from tests.formats.write_peers import FILE as PEERS

Make = Callable[[nn.Module], torch.optim.Optimizer]
INT8 = {"exp_avg": "int8", "exp_avg_sq": "dynamic8"}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 64), nn.Tanh(), nn.Linear(64, 96))


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        x = torch.randn(32, 96, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        (net(x) - x).square().mean().backward()
        optimizer.step()


def adamw(net: nn.Module, **keywords: Any) -> Any:
    return rt.AdamW(net.named_parameters(), lr=1e-2, **keywords)


def values_of(optimizer: Any, param: Tensor, state: str) -> Tensor:
    """A state as floats, whatever its storage."""
    held = optimizer.state[param]
    if f"{state}::scale" not in held:
        return held[state].clone()
    key = optimizer.param_groups[0]["formats"][state]
    codes, scales = held[f"{state}::codes"].numpy(), held[f"{state}::scale"].numpy()
    return torch.from_numpy(decode(of_key(key), codes, scales, tuple(param.shape)))


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_large_tensors_have_codes_and_small_ones_floats() -> None:
    net = model()
    optimizer = adamw(net, state_dtype=INT8)
    assert optimizer.storage() == {f"{place}.{name}": {} for place in (0, 2) for name in ("weight", "bias")}
    train(net, optimizer, range(1))
    weight, bias = {"exp_avg": "int8/32", "exp_avg_sq": "dynamic8/256"}, dict.fromkeys(INT8, "float32")
    assert optimizer.storage() == {"0.weight": weight, "0.bias": bias, "2.weight": weight, "2.bias": bias}
    held = optimizer.state[net[0].weight]
    assert held["exp_avg::codes"].dtype is torch.int8
    assert held["exp_avg::codes"].shape == net[0].weight.shape
    assert held["exp_avg_sq::scale"].shape == (96 * 64 // 256,)
    assert optimizer.param_groups[0]["formats"] == {
        "exp_avg": "int8/32-signed", "exp_avg_sq": "dynamic8/256-unsigned-floor",
    }  # fmt: skip


@pytest.mark.parametrize("backend", ["cpu", "c"])
def test_a_run_that_is_saved_and_loaded_in_its_middle_has_the_same_bits(backend: str) -> None:
    straight, broken = model(), model()
    optimizer = adamw(straight, state_dtype=INT8, backend=backend)
    train(straight, optimizer, range(6))
    first = adamw(broken, state_dtype=INT8, backend=backend)
    train(broken, first, range(3))
    second = adamw(broken, state_dtype=INT8, backend=backend)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    train(broken, second, range(3, 6))
    assert same(straight, broken)


@pytest.mark.parametrize("after", [None, "softsign8", "dynamic4", "bfloat16"])
@pytest.mark.parametrize("before", [None, "dynamic8", "int8/64"])
def test_loading_changes_the_storage_and_keeps_the_values(before: str | None, after: str | None) -> None:
    net = model()
    saved = adamw(net, state_dtype=before)
    train(net, saved, range(3))
    loaded = adamw(net, state_dtype=after)
    loaded.load_state_dict(saved.state_dict())
    weight = net[0].weight
    for state, tolerance in (("exp_avg", 0.2), ("exp_avg_sq", 0.2)):
        wanted, got = values_of(saved, weight, state), values_of(loaded, weight, state).float()
        assert (wanted - got).abs().max() <= tolerance * wanted.abs().max()
    assert ("formats" in loaded.param_groups[0]) is (after in ("softsign8", "dynamic4"))
    assert any("::" in name for name in loaded.state[weight]) is (after in ("softsign8", "dynamic4"))
    train(net, loaded, range(3, 5))
    assert all(torch.isfinite(p).all() for p in net.parameters())


def test_torchs_own_states_load_into_codes_and_go_back() -> None:
    net = model()
    theirs = torch.optim.AdamW(net.parameters(), lr=1e-2)
    train(net, theirs, range(3))
    ours = rt.AdamW(net.parameters(), lr=1e-2, state_dtype="dynamic8")
    ours.load_state_dict(theirs.state_dict())
    plain = rt.AdamW(net.parameters(), lr=1e-2)
    plain.load_state_dict(ours.state_dict())
    back = torch.optim.AdamW(net.parameters(), lr=1e-2)
    back.load_state_dict(plain.state_dict())
    for p in net.parameters():
        wanted, got = theirs.state[p]["exp_avg"], back.state[p]["exp_avg"]
        assert (wanted - got).abs().max() <= 0.01 * wanted.abs().max()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])  # noqa: S301
def test_copies_go_on_alike(copied: Callable[[Any], Any]) -> None:
    net = model()
    optimizer = adamw(net, state_dtype="dynamic8")
    train(net, optimizer, range(2))
    other_net, other = copied((net, optimizer))
    train(net, optimizer, range(2, 4))
    train(other_net, other, range(2, 4))
    assert same(net, other_net)


def test_a_checkpoint_for_every_framework_keeps_codes_and_loads_elsewhere(tmp_path: Path) -> None:
    net = model()
    optimizer = adamw(net, state_dtype=INT8)
    train(net, optimizer, range(3))
    rt.save(optimizer, tmp_path / "run.safetensors", parameters=True)
    again = model()
    resumed = adamw(again, state_dtype=INT8)
    rt.load(resumed, tmp_path / "run.safetensors", parameters=True)
    for p, q in zip(net.parameters(), again.parameters(), strict=True):
        assert all(torch.equal(optimizer.state[p][k], resumed.state[q][k]) for k in optimizer.state[p])
    floats = adamw(model(), state_dtype=None)
    rt.load(floats, tmp_path / "run.safetensors")
    param = floats.param_groups[0]["params"][0]
    assert torch.equal(floats.state[param]["exp_avg"], values_of(optimizer, net[0].weight, "exp_avg"))


def test_updates_in_the_backward_pass_have_the_same_bits() -> None:
    late, early = model(), model()
    plain = rt.Lion(late.parameters(), lr=1e-2, state_dtype="dynamic8")
    eager = rt.EagerUpdate(early, "lion", lr=1e-2, state_dtype="dynamic8")
    for step in range(3):
        x = torch.randn(8, 96, generator=torch.Generator().manual_seed(step))
        plain.zero_grad()
        (late(x) - x).square().mean().backward()
        plain.step()
        with eager.backward():
            (early(x) - x).square().mean().backward()
        eager.step()
    assert same(late, early)


def test_complex_and_channels_last_parameters_stay_right() -> None:
    weight = nn.Parameter(torch.randn(64, 64, dtype=torch.complex64, generator=torch.Generator().manual_seed(1)))
    image = nn.Parameter(torch.randn(16, 16, 8, 8).to(memory_format=torch.channels_last))
    optimizer = rt.AdamW([weight, image], lr=1e-2, state_dtype="dynamic8")
    exact = [weight.detach().clone().requires_grad_(), image.detach().clone().requires_grad_()]
    plain = rt.AdamW(exact, lr=1e-2)
    for _ in range(3):
        for p in (weight, image, *exact):
            p.grad = p.detach() * 0.5
        optimizer.step()
        plain.step()
    assert (weight - exact[0]).abs().max() < 0.01
    assert torch.equal(image, exact[1])
    assert optimizer.storage()["parameter 1"] == {"exp_avg": "float32", "exp_avg_sq": "float32"}


@pytest.mark.parametrize(
    ("asked", "kind", "words"),
    [
        ("int7", TensorError, "int7"),
        ({"exp_avg": "int8/3"}, HyperError, "power of two"),
        ({"exp_av": "int8"}, TensorError, "exp_avg"),
    ],
)
def test_mistakes_are_named_when_the_optimizer_is_made(asked: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        rt.AdamW(model().parameters(), state_dtype=asked)


def test_a_state_that_must_be_exact_is_refused_by_name() -> None:
    with pytest.raises(HyperError, match="x0"):
        rt.Prodigy(model().parameters(), state_dtype={"x0": "int8"})


def test_codes_without_a_known_format_are_refused_and_nothing_changes() -> None:
    net = model()
    optimizer = adamw(net, state_dtype=INT8)
    train(net, optimizer, range(2))
    saved = optimizer.state_dict()
    del saved["param_groups"][0]["formats"]
    fresh = adamw(net)
    with pytest.raises(StateMismatch, match="in which format"):
        fresh.load_state_dict(saved)
    assert not fresh.state


def test_torchs_own_optimizer_does_not_take_codes_for_values() -> None:
    net = model()
    optimizer = adamw(net, state_dtype="dynamic8")
    train(net, optimizer, range(1))
    saved = optimizer.state_dict()
    weight, bias = saved["state"][0].keys(), saved["state"][1].keys()
    assert weight == {"step", "exp_avg::codes", "exp_avg::scale", "exp_avg_sq::codes", "exp_avg_sq::scale"}
    assert bias == {"step", "exp_avg", "exp_avg_sq"}
    theirs = torch.optim.AdamW(net.parameters(), lr=1e-2)
    theirs.load_state_dict(saved)
    with pytest.raises(KeyError, match="exp_avg"):
        train(net, theirs, range(1, 2))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_file_of_codes_never_fills_states_in_floats(tmp_path: Path) -> None:
    """torch.distributed.checkpoint fills tensors by their names, and looks at no dtype."""
    net = model()
    optimizer, floats = adamw(net, state_dtype=INT8), adamw(net)
    for each in (floats, optimizer):
        train(net, each, range(1))
        dcp.save(each.state_dict(), checkpoint_id=tmp_path / str(each is floats), no_dist=True)
    for each, folder in ((floats, "False"), (optimizer, "True")):
        with pytest.raises(CheckpointException, match="Missing key in checkpoint state_dict"):
            dcp.load(each.state_dict(), checkpoint_id=tmp_path / folder, no_dist=True)


def test_codes_under_the_names_of_their_states_load() -> None:
    """What `optimizer.state` of earlier versions has, in no shape that only files know."""
    net = model()
    optimizer = adamw(net, state_dtype="dynamic4/32")
    train(net, optimizer, range(2))
    saved = optimizer.state_dict()
    weight = net[0].weight
    assert saved["state"][0]["exp_avg::codes"].shape == (64, 48)
    assert saved["state"][0]["exp_avg::scale"].shape == (64, 24)
    assert optimizer.state[weight]["exp_avg::codes"].shape == (64 * 48,)
    states = [dict(optimizer.state[p]) for p in net.parameters()]
    plain = [{name.replace("::codes", ""): value for name, value in state.items()} for state in states]
    for kept in (saved, *({**saved, "state": dict(enumerate(each))} for each in (states, plain))):
        other = adamw(net, state_dtype="dynamic4/32")
        other.load_state_dict(kept)
        assert all(torch.equal(optimizer.state[weight][k], x) for k, x in other.state[weight].items())


def test_codes_of_another_shape_are_refused() -> None:
    net = model()
    optimizer = adamw(net, state_dtype=INT8)
    train(net, optimizer, range(1))
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["exp_avg::scale"] = saved["state"][0]["exp_avg::scale"][:-1]
    for target in (adamw(net), adamw(net, state_dtype=INT8)):
        with pytest.raises(StateMismatch, match="exp_avg"):
            target.load_state_dict(saved)


# States of other libraries. `tests.formats.write_peers` has written what they keep for known values.


class Subclass:
    """What torchao's tensor subclasses have: codes, scales, and the floats that they stand for."""

    def __init__(self, codes: Tensor, scale: Tensor, floats: Tensor) -> None:
        self.codes, self.scale, self._floats = codes, scale, floats

    def dequantize(self) -> Tensor:
        return self._floats


def peer(name: str, *words: str) -> list[Tensor]:
    with np.load(PEERS) as arrays:
        return [torch.from_numpy(arrays[f"{name}.{word}"]) for word in words]


@pytest.mark.parametrize("nested", [True, False])
def test_a_state_dict_of_bitsandbytes_goes_on(nested: bool) -> None:
    param = nn.Parameter(torch.zeros(32, 64))
    state: dict[str, Any] = {}
    for number, sign in ((1, "signed"), (2, "unsigned")):
        codes, table, scales = peer(f"bitsandbytes.dynamic8-{sign}", "codes", "table", "scales")
        state |= {f"state{number}": codes.reshape(32, 64), f"qmap{number}": table, f"absmax{number}": scales}
    state = {"step": 7, **({"__bnb_optimizer_quant_state__": state} if nested else state)}
    group = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "alpha": 0.0, "params": [0]}
    optimizer = rt.AdamW([param])
    optimizer.load_state_dict({"state": {0: state}, "param_groups": [group]})
    held = optimizer.state[param]
    assert held.keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert held["step"] == 7
    for name, sign in (("exp_avg", "signed"), ("exp_avg_sq", "unsigned")):
        (decoded,) = peer(f"bitsandbytes.dynamic8-{sign}", "decoded")
        assert torch.equal(held[name].reshape(-1), decoded)
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.99)


def test_codes_of_bitsandbytes_without_their_table_are_refused() -> None:
    param = nn.Parameter(torch.zeros(32, 64))
    state = {"step": 1, "state1": torch.zeros(32, 64, dtype=torch.uint8), "absmax1": torch.ones(8)}
    state["state2"] = state["state1"]
    saved = {"state": {0: state}, "param_groups": [{"params": [0]}]}
    with pytest.raises(StateMismatch, match="qmap1"):
        rt.AdamW([param]).load_state_dict(saved)


def test_tensors_of_torchao_go_on_into_codes_of_ours() -> None:
    param = nn.Parameter(torch.zeros(96, 64))
    values = torch.randn(96, 64, generator=torch.Generator().manual_seed(3))
    codes, scale = torch.zeros(96, 64, dtype=torch.uint8), torch.ones(24)
    state = {
        "step": torch.tensor(2.0), "exp_avg": Subclass(codes, scale, values),
        "exp_avg_sq": Subclass(codes, scale, values.square()),
    }  # fmt: skip
    optimizer = rt.AdamW([param], state_dtype="dynamic8")
    optimizer.load_state_dict({"state": {0: state}, "param_groups": [{"params": [0]}]})
    assert optimizer.storage()["parameter 0"]["exp_avg"] == "dynamic8/256"
    assert torch.allclose(values_of(optimizer, param, "exp_avg"), values, atol=0.02 * float(values.abs().max()))


def flash_state() -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What FlashAdamW saves of a parameter of 64 by 64, and its floats."""
    state: dict[str, Any] = {"step": torch.tensor(3)}
    floats = {}
    for name, sign in (("exp_avg", "signed"), ("exp_avg_sq", "unsigned")):
        codes, scales, decoded = (
            x.repeat(2) for x in peer(f"flashoptim.softsign8-{sign}", "codes", "scales", "decoded")
        )
        state |= {f"{name}::quantized": codes.reshape(64, 64), f"{name}::scales": scales}
        floats[name] = decoded.reshape(64, 64)
    return state, floats


@pytest.mark.parametrize("word", [None, "softsign8"])
def test_a_compressed_state_of_flashoptim_goes_on(word: str | None) -> None:
    param = nn.Parameter(torch.zeros(64, 64))
    state, floats = flash_state()
    optimizer = rt.AdamW([param], state_dtype=word)
    optimizer.load_state_dict({"state": {0: copy.copy(state)}, "param_groups": [{"params": [0]}]})
    held = optimizer.state[param]
    for name, wanted in floats.items():
        assert torch.allclose(values_of(optimizer, param, name), wanted, rtol=2**-20, atol=0)
        if word:
            assert torch.equal(held[f"{name}::codes"], state[f"{name}::quantized"])
    kept = [f"{name}{part}" for name in floats for part in (("::codes", "::scale") if word else ("",))]
    assert held.keys() == {"step", *kept}


@pytest.mark.parametrize("saved_as", ["bits", "state_dict"])
@pytest.mark.parametrize(("bits", "width"), [(8, 3), (16, 4)])
def test_weights_of_flashoptim_go_on_in_every_kind(bits: int, width: int, saved_as: str) -> None:
    bytes_of, error, weight = peer(f"flashoptim.weights{bits}", "parameter", "error", "weight")
    param = nn.Parameter(bytes_of.view(torch.bfloat16))
    if saved_as == "state_dict":  # flashoptim saves them so
        error = error.to(torch.bfloat16) if bits == 8 else error.view(torch.bfloat16)
    state = {
        "step": torch.tensor(3),
        "exp_avg": torch.zeros(2048),
        "exp_avg_sq": torch.zeros(2048),
        "error_bits": error,
    }
    saved = {"state": {0: state}, "param_groups": [{"params": [0], "master_bytewidth": width}]}
    master, split = (rt.AdamW([param], weights=kind) for kind in ("master", "split"))
    for optimizer in (master, split):
        optimizer.load_state_dict(copy.deepcopy(saved))
        assert "error_bits" not in optimizer.state[param]
    assert torch.equal(master.state[param]["param::master"], weight)
    low = split.state[param]["param::low"].float().numpy()
    back = torch.from_numpy(float_of("split", param.detach().float().numpy(), low))
    # Parts are drawn at random: some weights are rounded otherwise, or to a zero of the other sign.
    beside = (weight.bfloat16() == param) & (weight.signbit() == param.signbit())
    assert beside.float().mean() > 0.5
    ulps = (back.view(torch.int32) - weight.view(torch.int32)).abs()[beside]
    assert ulps.max() <= 1  # of a weight in the middle between two parameters
    assert (ulps == 0).float().mean() > 0.99
    plain = rt.AdamW([param])
    plain.load_state_dict(copy.deepcopy(saved))
    assert plain.state[param].keys() == {"step", "exp_avg", "exp_avg_sq"}


def test_parts_of_weights_of_an_unknown_size_are_refused() -> None:
    param = nn.Parameter(torch.zeros(64, 64, dtype=torch.bfloat16))
    state = {**flash_state()[0], "error_bits": torch.ones(64, 64).bfloat16()}
    with pytest.raises(StateMismatch, match="master_bytewidth=None"):
        rt.AdamW([param], weights="split").load_state_dict({"state": {0: state}, "param_groups": [{"params": [0]}]})


def test_codes_of_flashoptim_without_scales_are_refused() -> None:
    state, _ = flash_state()
    state["exp_avg::scales"] = state["exp_avg::scales"][:-1]
    with pytest.raises(StateMismatch, match=r"exp_avg of .* 4096 codes of flashoptim"):
        rt.AdamW([nn.Parameter(torch.zeros(64, 64))]).load_state_dict(
            {"state": {0: state}, "param_groups": [{"params": [0]}]}
        )
