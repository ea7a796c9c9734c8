"""States of torch's classes in bfloat16 that are rounded at random: names, checkpoints, bytes, and steps in parts."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

import rulec.torch
import rulec.torch.checkpoint as files
from rulec.errors import HyperError, StateMismatch, TensorError
from rulec.torch.eager import EagerUpdate
from rulec.torch.eager.epilogue_tiles import TILE
from tests.torch.narrow import BRAIN, gradients, take


def model() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 40), nn.Tanh(), nn.Linear(40, 8))


def adamw(net: nn.Module, state_dtype: Any = "bfloat16_sr", **words: Any) -> Any:
    return rulec.torch.AdamW(net.named_parameters(), lr=1e-2, state_dtype=state_dtype, **words)


def same(net: nn.Module, optimizer: Any, other: nn.Module, twin: Any) -> bool:
    """Whether parameters and states agree, bit for bit."""
    pairs = [*zip(net.parameters(), other.parameters(), strict=True)]
    states = [(optimizer.state[p][k], twin.state[q][k]) for p, q in pairs for k in optimizer.state[p]]
    return all(torch.equal(a, b) for a, b in [*pairs, *states])


def test_storage_and_groups_name_it() -> None:
    net = model()
    optimizer = adamw(net, {"exp_avg_sq": "bfloat16_sr"})
    take(net, optimizer, gradients(net, 1))
    assert optimizer.storage()["0.weight"] == {"exp_avg": "float32", "exp_avg_sq": "bfloat16_sr"}
    assert optimizer.state_dict()["param_groups"][0]["formats"] == {"exp_avg_sq": "bfloat16_sr"}
    assert optimizer.state[net[0].weight]["exp_avg_sq"].dtype is BRAIN


@pytest.mark.parametrize("duplicate", ["file", "copy"])
def test_a_run_goes_on_with_the_same_bits(duplicate: str) -> None:
    net = model()
    optimizer = adamw(net, seed=5)
    steps = gradients(net, 8)
    take(net, optimizer, steps[:4])
    if duplicate == "copy":
        other, twin = copy.deepcopy((net, optimizer))
    else:
        file = io.BytesIO()
        torch.save((net.state_dict(), optimizer.state_dict()), file)
        file.seek(0)
        weights, states = torch.load(file)
        other = model()
        other.load_state_dict(weights)
        twin = adamw(other, seed=5)
        twin.load_state_dict(states)
    take(net, optimizer, steps[4:])
    take(other, twin, steps[4:])
    assert same(net, optimizer, other, twin)


def test_another_seed_has_other_bits() -> None:
    states = []
    for seed in (0, 1, 1):
        net = model()
        optimizer = adamw(net, seed=seed)
        take(net, optimizer, gradients(net, 1))
        states.append(optimizer.state[net[0].weight]["exp_avg_sq"])
    assert not torch.equal(states[0], states[1])
    assert torch.equal(states[1], states[2])


@pytest.mark.parametrize("storage", ["float32", "bfloat16", torch.float16])
@pytest.mark.filterwarnings("ignore:v of AdamW moves")
def test_loading_changes_the_storage_and_keeps_the_values(storage: Any) -> None:
    net = model()
    optimizer = adamw(net)
    take(net, optimizer, gradients(net, 2))
    plain, back = adamw(net, {"exp_avg": storage, "exp_avg_sq": "float32"}), adamw(net)
    plain.load_state_dict(optimizer.state_dict())
    p = net[0].weight
    assert torch.equal(plain.state[p]["exp_avg_sq"], optimizer.state[p]["exp_avg_sq"].float())
    assert "formats" not in plain.state_dict()["param_groups"][0]
    back.load_state_dict(plain.state_dict())
    assert torch.equal(back.state[p]["exp_avg_sq"], optimizer.state[p]["exp_avg_sq"])
    assert back.storage()["0.weight"] == {"exp_avg": "bfloat16_sr", "exp_avg_sq": "bfloat16_sr"}


def test_torchs_own_states_are_taken() -> None:
    net = model()
    theirs = torch.optim.AdamW(net.parameters(), lr=1e-2)
    take(net, theirs, gradients(net, 2))
    ours = adamw(net)
    ours.load_state_dict(theirs.state_dict())
    p = net[0].weight
    assert torch.equal(ours.state[p]["exp_avg_sq"], theirs.state[p]["exp_avg_sq"].bfloat16())


@pytest.mark.parametrize("words", [{"state_dtype": "bfloat16_sr"}, {"weights": "stochastic", "state_dtype": "float32"}])
def test_a_safetensors_file_has_the_seed(words: dict[str, Any], tmp_path: Any) -> None:
    net, file = model().bfloat16(), tmp_path / "run.safetensors"
    optimizer = adamw(net, seed=70000, **words)
    take(net, optimizer, gradients(net, 2))
    files.save(optimizer, file)
    with pytest.raises(StateMismatch, match="was saved with seed=70000, and the seed is 3 here: give the same"):
        files.load(adamw(net, seed=3, **words), file)
    twin = adamw(net, seed=70000, **words)
    files.load(twin, file)
    assert same(net, optimizer, net, twin)
    files.load(adamw(net, "float32"), file)  # draws nothing


def test_a_plain_file_begins_a_run_that_rounds_at_random(tmp_path: Any) -> None:
    net, file = model(), tmp_path / "run.safetensors"
    plain = adamw(net, "float32")
    take(net, plain, gradients(net, 2))
    files.save(plain, file)
    turned = rulec.torch.AdamW([*net.named_parameters()][::-1], lr=1e-2, state_dtype="bfloat16_sr", seed=4)
    files.load(turned, file)  # in another order too: nothing was drawn before
    p = net[0].weight
    assert torch.equal(turned.state[p]["exp_avg"], plain.state[p]["exp_avg"].bfloat16())


@pytest.mark.parametrize("epilogue", [False, "tiles"])
def test_eager_updates_have_the_bits_of_steps(epilogue: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TILE, "cpu", 1)
    torch.manual_seed(0)
    twin = nn.Sequential(nn.Linear(8, 700, bias=False))
    net = copy.deepcopy(twin)
    whole = adamw(twin, seed=7)
    eager = EagerUpdate(net, "adamw", lr=1e-2, state_dtype="bfloat16_sr", seed=7, epilogue=epilogue)
    for step in range(2):
        inputs = torch.randn(5, 8, generator=torch.Generator().manual_seed(step))
        twin(inputs).square().sum().backward()
        whole.step()
        whole.zero_grad()
        with eager.backward():
            net(inputs).square().sum().backward()
        eager.step()
    states = eager.state[net[0].weight], whole.state[twin[0].weight]
    assert all(torch.equal(states[0][k], states[1][k]) for k in ("exp_avg", "exp_avg_sq"))


@pytest.mark.parametrize("storage", ["bfloat16_sr", "dynamic8"])
def test_gradients_of_several_backward_passes_fold_into_states(storage: str) -> None:
    """The first states come within a backward pass, and with them the groups' formats."""
    means = []
    for state_dtype in (storage, "float32"):
        net = nn.Sequential(nn.Linear(64, 80, bias=False))
        words = {"state_dtype": state_dtype, "accumulate": "fold"}
        eager = EagerUpdate(net, "momentum", lr=1e-4, **words)
        for _ in range(2):
            for last in (False, True):
                with eager.backward(last_microbatch=last):
                    net(torch.full((1, 64), 1 + 2.0**-10)).sum().backward()
            eager.step()
        eager.close()
        floats = EagerUpdate(net, "momentum", lr=1e-4, state_dtype="float32", accumulate="fold")
        floats.load_state_dict(eager.state_dict())
        (state,) = [x for x in floats.state[net[0].weight].values() if x.numel() > 1]
        means.append(float(state.mean()))
    # Each element is rounded four times, by up to 2**-6: their mean is within four sigma of the exact one.
    assert abs(means[0] - means[1]) < (0.02 * means[1] if storage == "dynamic8" else 4 * 4 * 2.0**-6 / 5120**0.5)


def test_memory_in_another_order_is_taken() -> None:
    """As images' weights in channels_last: the bits are those of the order of the shape."""
    states = []
    for form in (torch.contiguous_format, torch.channels_last):
        p = nn.Parameter(torch.ones(8, 6, 3, 3).to(memory_format=form))
        p.grad = torch.arange(432.0).reshape(8, 6, 3, 3).to(memory_format=form)
        optimizer = rulec.torch.AdamW([p], state_dtype="bfloat16_sr")
        optimizer.step()
        states.append(optimizer.state[p]["exp_avg_sq"].contiguous())
    assert torch.equal(*states)


def test_bytes_of_a_parameter_are_those_counted() -> None:
    """Two bytes for each state, at any size."""
    p = nn.Parameter(torch.zeros(100))
    optimizer = rulec.torch.AdamW([p], state_dtype="bfloat16_sr")
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert sum(x.nbytes for x in optimizer.state[p].values() if x.numel() > 1) == 2 * 2 * 100


@pytest.mark.parametrize(
    ("kind", "words", "error", "message"),
    [
        ("AdamW", {"state_dtype": "bfloat16_s"}, TensorError, "none of float32, .*, bfloat16_sr, int8"),
        ("AdamW", {"state_dtype": "bfloat16", "seed": 3}, HyperError, "draws no random numbers for seed=3"),
        (
            "Prodigy",
            {"state_dtype": {"x0": "bfloat16_sr"}},
            HyperError,
            "Prodigy cannot be bfloat16_sr: x0 is a c",
        ),
    ],
)
def test_a_mistake_is_one_sentence(kind: str, words: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        getattr(rulec.torch, kind)(model().parameters(), **words)


@pytest.mark.parametrize("storage", ["bfloat16_sr", "bfloat16"])
def test_a_complex_parameter_is_refused(storage: str) -> None:
    p = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    optimizer = rulec.torch.AdamW([p], state_dtype=storage)
    p.grad = torch.ones_like(p)
    with pytest.raises(TensorError, match=f"is complex, and a state of it cannot be {storage}: give state_dtype='fl"):
        optimizer.step()
    assert torch.equal(p.detach(), torch.ones(3, dtype=torch.complex64))


def test_a_slow_mean_in_bfloat16_is_told() -> None:
    net = model()
    optimizer = adamw(net, {"exp_avg_sq": torch.bfloat16})
    with pytest.warns(RuntimeWarning, match=r"v of AdamW moves by 0.001 of the way .*\{'v': 'bfloat16_sr'\}"):
        take(net, optimizer, gradients(net, 1))
