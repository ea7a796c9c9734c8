"""bfloat16 parameters with `weights=`, against torch's own training in float32; checkpoints go on bit for bit."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rulec.torch
from rulec.compiler.weights import DTYPES, PARTS
from rulec.errors import HyperError, StateMismatch
from rulec.torch.eager import EagerUpdate
from rulec.torch.eager.epilogue_tiles import TILE
from tests.torch import narrow
from tests.torch.narrow import BRAIN, take


def model(dtype: torch.dtype = BRAIN) -> nn.Module:
    """A small net with weights of one, two and four dimensions."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Conv2d(3, 8, 3)).to(dtype)


def gradients(net: nn.Module, count: int, seed: int = 1) -> list[list[Tensor]]:
    return narrow.gradients(net, count, seed, BRAIN)


def adamw(net: nn.Module, **words: Any) -> Any:
    return rulec.torch.AdamW(net.named_parameters(), lr=1e-4, **words)


def exact(p: Tensor, low: Tensor) -> Tensor:
    """The float32 weight of a split one."""
    return (p.detach().float().view(torch.int32) + low.int()).view(torch.float32)


def test_split_weights_are_torchs_master_copy() -> None:
    """torch's AdamW in float32 on a copy, as mixed precision has it: the same but for its kernel's rounding."""
    net, master = model(), model().float()
    optimizer, oracle = adamw(net, weights="split"), torch.optim.AdamW(master.parameters(), lr=1e-4)
    take(net, optimizer, gradients(net, 50))
    take(master, oracle, gradients(master, 50))
    for p, m in zip(net.parameters(), master.parameters(), strict=True):
        weight = exact(p, optimizer.state[p]["param::low"])
        assert torch.allclose(weight, m, rtol=1e-5, atol=2e-7)
        assert ((p.float() - weight).abs() <= weight.abs() * 2.0**-8).all()
    assert optimizer.state[p]["exp_avg"].dtype == torch.float32


@pytest.mark.parametrize("kind", DTYPES)
def test_a_run_goes_on_from_a_file_bit_for_bit(kind: str) -> None:
    net, twin = model(), model()
    whole = adamw(net, weights=kind, seed=3 if kind == "stochastic" else 0)
    take(net, whole, gradients(net, 12))
    first = adamw(twin, weights=kind, seed=3 if kind == "stochastic" else 0)
    steps = [*gradients(twin, 12)]
    take(twin, first, steps[:5])
    file = io.BytesIO()
    torch.save((twin.state_dict(), first.state_dict()), file)
    file.seek(0)
    weights, states = torch.load(file)
    other = model()
    other.load_state_dict(weights)
    second = adamw(other, weights=kind, seed=3 if kind == "stochastic" else 0)
    second.load_state_dict(states)
    take(other, second, steps[5:])
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])  # noqa: S301
def test_a_copy_goes_its_own_way_with_its_parts(duplicate: Any) -> None:
    net = model()
    optimizer = adamw(net, weights="split", state_dtype="dynamic8")
    steps = [*gradients(net, 8)]
    take(net, optimizer, steps[:4])
    twin, second = duplicate((net, optimizer))
    take(net, optimizer, steps[4:])
    take(twin, second, steps[4:])
    for a, b in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(exact(a, optimizer.state[a]["param::low"]), exact(b, second.state[b]["param::low"]))


def test_a_plain_run_becomes_a_split_one_by_loading() -> None:
    net = model()
    plain = adamw(net, state_dtype=torch.float32)
    take(net, plain, gradients(net, 3))
    split = adamw(net, weights="split")
    split.load_state_dict(plain.state_dict())
    p = net[0].weight
    assert torch.equal(split.state[p]["exp_avg"], plain.state[p]["exp_avg"])
    assert not split.state[p]["param::low"].any()
    back = adamw(net, state_dtype=torch.float32)
    take(net, split, gradients(net, 3))
    back.load_state_dict(split.state_dict())
    assert "param::low" not in back.state[p]


def value(p: Tensor, states: Any) -> Tensor:
    """The weight in float32, of a parameter and what lies beside it."""
    if "param::low" in states:
        return exact(p, states["param::low"])
    if "param::low8" in states:
        return exact(p, 256 * states["param::low8"].int())
    return states["param::master"] if "param::master" in states else p.detach().float() + states["param::lost"].float()


#: For each kind, how far the nearest weight of the kind may be from a float32: in ulps, and of its size. Half an ulp of
#: bfloat16 above the parameter is one count more than fits into a part, and what is lost has 8 bits.
NEAREST = {"split": (1, 0.0), "master": (0, 0.0), "split24": (256, 0.0), "kahan": (0, 2.0**-17)}


@pytest.mark.parametrize("after", PARTS)
@pytest.mark.parametrize("before", PARTS)
def test_a_weight_of_another_kind_keeps_its_value_in_float32(before: str, after: str) -> None:
    net = model()
    saved = adamw(net, weights=before)
    take(net, saved, gradients(net, 5))
    weights = [p.detach().clone() for p in net.parameters()]
    loaded = adamw(net, weights=after)
    loaded.load_state_dict(saved.state_dict())
    ulps, size = NEAREST[after]
    for p, kept in zip(net.parameters(), weights, strict=True):
        assert torch.equal(p, kept)
        assert PARTS[after].name in loaded.state[p]
        assert sum("param::" in key for key in loaded.state[p]) == 1
        ours, theirs = value(p, loaded.state[p]), value(p, saved.state[p])
        apart = (ours.view(torch.int32) - theirs.view(torch.int32)).abs()
        assert (apart <= ulps).logical_or((ours - theirs).abs() <= size * theirs.abs()).all()
        if after.startswith("split"):
            assert (apart <= ulps // 2).float().mean() > 0.9
        assert not torch.equal(ours, p.float()), "the part says more than the parameter"
    take(net, loaded, gradients(net, 2))


def test_a_run_that_changes_its_kind_has_the_bits_of_one_that_does_not() -> None:
    """Both kinds hold a float32: the parameters are roundings of it, halves to even or away from zero."""
    twin, net = model(), model()
    whole, first = adamw(twin, weights="split"), adamw(net, weights="split")
    steps = [*gradients(net, 9)]
    take(twin, whole, steps)
    take(net, first, steps[:3])
    second, third = adamw(net, weights="master"), adamw(net, weights="split")
    second.load_state_dict(first.state_dict())
    take(net, second, steps[3:6])
    third.load_state_dict(second.state_dict())
    take(net, third, steps[6:])
    for p, q in zip(twin.parameters(), net.parameters(), strict=True):
        assert torch.equal(value(p, whole.state[p]), value(q, third.state[q]))


def test_a_master_copy_converts_before_its_parameter_is_loaded() -> None:
    net, other = model(), model()
    for p in other.parameters():
        p.data.mul_(3)
    master, split = adamw(net, weights="master"), adamw(other, weights="split")
    take(net, master, gradients(net, 3))
    split.load_state_dict(master.state_dict())
    other.load_state_dict(net.state_dict())
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(value(p, master.state[p]), value(q, split.state[q]))


def test_halves_stay_beside_their_parameters() -> None:
    """A split weight in the middle of two parameters is one below the parameter, and a copy is rounded to even."""
    net = model()
    split, master, again = (adamw(net, weights=kind) for kind in ("split", "master", "split"))
    take(net, split, gradients(net, 1))
    saved = split.state_dict()
    for states in saved["state"].values():
        states["param::low"] = torch.full_like(states["param::low"], -(1 << 15))
    master.load_state_dict(saved)
    again.load_state_dict(master.state_dict())
    for place, p in enumerate(net.parameters()):
        assert torch.equal(master.state[p]["param::master"], exact(p, saved["state"][place]["param::low"]))
        assert torch.equal(again.state[p]["param::low"], saved["state"][place]["param::low"])


def test_a_part_of_another_shape_is_refused() -> None:
    net = model()
    split, master = adamw(net, weights="split"), adamw(net, weights="master")
    take(net, split, gradients(net, 1))
    saved = split.state_dict()
    saved["state"][0]["param::low"] = saved["state"][0]["param::low"][1:]
    with pytest.raises(StateMismatch, match=r"param::low of 0.weight was saved with shape \(\d+,\), where"):
        master.load_state_dict(saved)


def test_float32_parameters_beside_bfloat16_ones_stay_plain() -> None:
    net = model()
    net[2].float()
    optimizer = adamw(net, weights="split")
    take(net, optimizer, gradients(net, 2))
    kept = {name: set(states) for name, states in optimizer.storage().items()}
    assert "param::low" in kept["0.weight"]
    assert "param::low" not in kept["2.weight"]


def test_eager_updates_have_the_bits_of_steps() -> None:
    twin, net = model()[:2], model()[:2]
    whole = adamw(twin, weights="split")
    eager = EagerUpdate(net, "adamw", lr=1e-4, weights="split")
    inputs = torch.randn(5, 64).to(BRAIN)
    for _ in range(3):
        twin(inputs).square().sum().backward()
        whole.step()
        whole.zero_grad()
        with eager.backward():
            net(inputs).square().sum().backward()
        eager.step()
    assert torch.equal(net[0].weight, twin[0].weight)
    assert torch.equal(eager.state[net[0].weight]["param::low"], whole.state[twin[0].weight]["param::low"])


def test_an_update_by_rows_of_a_gradient_has_the_random_bits_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of a tile are not told where in the tensor they lie: the tensor is updated as a whole."""
    monkeypatch.setitem(TILE, "cpu", 1)
    torch.manual_seed(0)
    twin = nn.Sequential(nn.Linear(8, 700, bias=False)).to(BRAIN)
    net = copy.deepcopy(twin)
    whole = adamw(twin, weights="stochastic", seed=7)
    eager = EagerUpdate(net, "adamw", lr=1e-4, weights="stochastic", seed=7, epilogue="tiles")
    for step in range(3):
        inputs = torch.randn(5, 8, generator=torch.Generator().manual_seed(step)).to(BRAIN)
        twin(inputs).square().sum().backward()
        whole.step()
        whole.zero_grad()
        with eager.backward():
            net(inputs).square().sum().backward()
        eager.step()
    assert torch.equal(net[0].weight, twin[0].weight)


def test_bytes_of_a_parameter_are_those_counted() -> None:
    """bfloat16, its second half, and two states in codes: 6.03 bytes where a master copy with float32 states has 14."""
    p = nn.Parameter(torch.zeros(1 << 16, dtype=BRAIN))
    optimizer = rulec.torch.AdamW([p], weights="split", state_dtype={"exp_avg": "int8/256", "exp_avg_sq": "dynamic8"})
    p.grad = torch.ones_like(p)
    optimizer.step()
    states = [x for x in optimizer.state[p].values() if x.numel() > 1]
    assert sum(x.nbytes for x in [p, *states]) / p.numel() == 2 + 2 + 2 * (1 + 4 / 256)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"weights": "splt"}, "none of split, .*did you mean 'split'"),
        ({"weights": "split"}, "is for parameters of bfloat16, and these are of float32"),
        ({"seed": 3}, "AdamW draws no random numbers for seed=3"),
        ({"weights": "split", "seed": 3}, "AdamW draws no random numbers for seed=3"),
    ],
)
def test_a_mistake_is_one_sentence(words: dict[str, Any], message: str) -> None:
    with pytest.raises(HyperError, match=message):
        adamw(model(torch.float32), **words)


def test_weights_that_stand_still_are_told_once() -> None:
    net = model()
    optimizer = rulec.torch.AdamW(net.named_parameters(), lr=1e-6)
    with pytest.warns(RuntimeWarning, match=r"AdamW left \d+% of the elements of 0.weight .* weights='split'") as told:
        take(net, optimizer, gradients(net, 120))
    assert len(told) == 1


@pytest.mark.parametrize("words", [{"weights": "split"}, {"lr": 1e-1}])
def test_weights_that_move_or_are_kept_whole_are_no_warning(words: dict[str, Any]) -> None:
    net = model()
    optimizer = rulec.torch.AdamW(net.named_parameters(), **{"lr": 1e-6, **words})
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        take(net, optimizer, gradients(net, 12))
    assert warned == []
