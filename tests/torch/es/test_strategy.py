"""What a strategy keeps, saves, skips and refuses."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rulec.torch
from rulec.errors import HyperError, RulecError, StateMismatch, TensorError
from rulec.es import Perturbation
from rulec.es.fitness import Report
from rulec.torch import perturb


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 4))


def _perturbed(family: str = "signflip", model: nn.Module | None = None, **settings: Any) -> Any:
    given = {"directions": 4, "sigma": 0.1, "seed": 0, **settings}
    return perturb(model or _model(), Perturbation(family, **given))  # type: ignore[arg-type]


def _batch(es: Any, rows: int = 2) -> Tensor:
    return es.member_batch(torch.randn(rows, 6, generator=torch.Generator().manual_seed(7)))


def test_the_model_stays_as_it_is() -> None:
    model = _model()
    x, before = torch.randn(3, 6), dict(model.__dict__)
    plain = model(x)
    es = _perturbed(model=model)
    es(_batch(es))
    assert torch.equal(model(x), plain)
    assert {**model.__dict__} == before
    assert all("forward" not in module.__dict__ for module in model.modules())
    assert torch.equal(pickle.loads(pickle.dumps(copy.deepcopy(model)))(x), plain)  # noqa: S301
    es.free_memory()
    assert torch.equal(model(x), plain)
    with pytest.raises(RuntimeError, match="shape"):
        es(torch.randn(8, 5))
    assert torch.equal(model(x), plain)


@pytest.mark.parametrize("family", ["independent", "spsa", "lowrank", "signflip"])
def test_noise_that_is_kept(family: str) -> None:
    model = _model()
    es = _perturbed(family, model)
    assert es.noise_bytes() == 0
    if family == "spsa":
        es.evaluate(lambda: float(model(torch.ones(1, 6)).sum()))
    else:
        out = es(_batch(es))
    kept = {"independent": 0, "spsa": 0, "lowrank": 4 * 4 * ((6 + 8) + (8 + 4) + 8 + 4)}
    if family in kept:
        assert es.noise_bytes() == kept[family]
    es.free_memory()
    assert es.noise_bytes() == 0
    if family != "spsa":
        assert torch.equal(es(_batch(es)), out)
    es.update(torch.arange(8.0))
    assert es.noise_bytes() == 0


def _train(es: Any, opt: Any, steps: int) -> None:
    for _ in range(steps):
        es.update(loss=es(_batch(es)).square().sum(1))
        opt.step()


def test_a_resumed_run_goes_on_with_the_same_stream() -> None:
    whole = _model()
    es, opt = _perturbed(model=whole), rulec.torch.Adam(whole.parameters(), lr=0.01)
    _train(es, opt, 10)
    first = _model()
    es, opt = _perturbed(model=first), rulec.torch.Adam(first.parameters(), lr=0.01)
    _train(es, opt, 5)
    saved = copy.deepcopy((first.state_dict(), opt.state_dict(), es.state_dict()))
    second = _model()
    es, opt = _perturbed(model=second), rulec.torch.Adam(second.parameters(), lr=0.01)
    second.load_state_dict(saved[0])
    opt.load_state_dict(saved[1])
    es.load_state_dict(saved[2])
    assert es.step_count == 5
    _train(es, opt, 5)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), second.parameters(), strict=True))


def test_states_of_others_are_refused() -> None:
    saved = _perturbed().state_dict()
    with pytest.raises(StateMismatch, match="seed=0, where this one has 2"):
        _perturbed(seed=2).load_state_dict(saved)
    with pytest.raises(StateMismatch, match="other parameters"):
        _perturbed(model=nn.Linear(6, 4)).load_state_dict(saved)
    with pytest.raises(StateMismatch, match="no state of an evolution strategy"):
        _perturbed().load_state_dict({})


def test_members_without_finite_fitness_are_dropped() -> None:
    model = _model()
    es = _perturbed(model=model, seed=3)
    es(_batch(es))
    fitness = torch.randn(8)
    fitness[1] = torch.nan
    report = es.update(fitness)
    assert (report.dropped, report.directions, report.skipped) == (1, 3, False)
    grads = [p.grad.clone() for p in es.parameters.values()]
    twin = _perturbed(model=model, seed=3)
    twin(_batch(twin))
    fitness[5] = -torch.inf
    twin.update(fitness)
    assert all(torch.equal(p.grad, g) for p, g in zip(twin.parameters.values(), grads, strict=True))


@pytest.mark.parametrize("fused", [True, False])
def test_a_step_without_finite_fitness_is_skipped(fused: bool) -> None:
    model = _model()
    es, opt = _perturbed(model=model), rulec.torch.Adam(model.parameters(), lr=0.1)
    _train(es, opt, 1)
    before = copy.deepcopy((model.state_dict(), opt.state_dict()["state"]))
    es(_batch(es))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if fused:
            report = es.step(torch.full((8,), torch.inf), opt)
        else:
            report = es.update(torch.full((8,), torch.nan))
            opt.step()
    assert [str(w.message)[:43] for w in said] == ["step 1 is skipped: 8 of 8 members have no fi"[:43]]
    assert said[0].filename == __file__
    assert report == Report(1, 0, 8, skipped=True)
    assert es.step_count == 2
    after = (model.state_dict(), opt.state_dict()["state"])
    for old, new in zip(before, after, strict=True):
        torch.testing.assert_close(old, new, rtol=0, atol=0)


class _Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.layer.weight


class _MeanOverRows(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


def _attention(batch_first: bool) -> nn.Module:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 6)
            self.attention = nn.MultiheadAttention(6, 2, batch_first=batch_first)

        def forward(self, x: Tensor) -> Tensor:
            hidden: Tensor = self.first(x)
            return self.attention(hidden, hidden, hidden, need_weights=False)[0]

    return Attention()


def _run() -> Any:
    """A strategy that is ready for an update."""
    es = _perturbed()
    es(torch.randn(8, 6))
    return es


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "rows": (lambda: _perturbed()(torch.randn(9, 6)), TensorError, "9 rows cannot be dealt to 8 members"),
    "batch norm": (
        lambda: _perturbed(model=nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)))(torch.randn(8, 6)),
        RulecError, "BatchNorm1d '1' in training mode mixes members",
    ),
    "instance norm": (
        lambda: _perturbed(model=nn.Sequential(nn.Conv1d(6, 4, 1), nn.InstanceNorm1d(4, track_running_stats=True)))(
            torch.randn(8, 6, 5)
        ),
        RulecError, "InstanceNorm1d '1' in training mode keeps statistics over all members",
    ),
    "attention": (
        lambda: _perturbed(model=_attention(False))(torch.randn(8, 3, 6)), RulecError, "mixes members of a batch of 8",
    ),
    "turned": (
        lambda: _perturbed(model=nn.Sequential(nn.Flatten(0, 1), nn.Linear(6, 4)))(torch.randn(8, 3, 6)),
        TensorError, "layer '1' sees 24 rows of a batch of 8",
    ),
    "read": (lambda: _perturbed(model=_Product())(torch.randn(8, 6)), RulecError, "'layer.weight' is read by"),
    "nothing": (lambda: _perturbed(model=nn.LayerNorm(6)), HyperError, "nothing of LayerNorm can be perturbed"),
    "no module": (lambda: perturb("model", Perturbation("spsa", 1)), HyperError, "a torch.nn.Module, not str"),
    "no perturbation": (lambda: perturb(_model(), "spsa"), HyperError, "must be a rulec.es.Perturbation"),
    "spsa": (lambda: _perturbed("spsa")(torch.randn(8, 6)), RulecError, "members of spsa are evaluated one by one"),
    "no forward": (lambda: _perturbed().update(torch.randn(8)), RulecError, "step 0 has had no forward"),
    "neither": (lambda: _run().update(), HyperError, "either fitness= or loss="),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input(name: str) -> None:
    run, kind, message = REFUSED[name]
    with pytest.raises(kind, match=message) as caught:
        run()
    assert "\n" not in str(caught.value)


def test_fitness_of_another_length_and_two_updates() -> None:
    es = _perturbed()
    es(_batch(es))
    with pytest.raises(TensorError, match="8 members"):
        es.update(torch.randn(7))
    es.update(torch.randn(8))
    with pytest.raises(RulecError, match="step 1 has had no forward"):
        es.update(torch.randn(8))


def test_a_changed_model() -> None:
    changes = {
        "is new": lambda m: m.append(nn.Linear(4, 4)),
        "is gone": lambda m: m.pop(3),
        "'0.weight' is another one": lambda m: setattr(m[0], "weight", nn.Parameter(torch.randn(8, 6))),
        "'3.bias' is another one": lambda m: m[3].double(),
        "'0.bias' is another one": lambda m: m[0].bias.requires_grad_(False),
    }
    for message, change in changes.items():
        model = _model()
        es = _perturbed(model=model)
        change(model)
        with pytest.raises(TensorError, match=message if "3.bias" not in message else "is another one"):
            es(_batch(es))


def test_what_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Embedding(3, 4, max_norm=1.0), nn.Linear(8, 5))
    model[0].bias.requires_grad_(False)
    model.append(_attention(True))
    es = _perturbed(model=model)
    assert es.left_alone["0.bias"] == "it needs no gradient"
    assert "LayerNorm is none of Linear" in es.left_alone["1.weight"]
    assert "max_norm=" in es.left_alone["2.weight"]
    assert "MultiheadAttention reads it without calling" in es.left_alone["4.attention.out_proj.weight"]
    assert [*es.parameters] == ["0.weight", "3.weight", "3.bias", "4.first.weight", "4.first.bias"]
    assert es.replaced == ("0", "3", "4.first")


def test_layers_that_are_left_alone_are_named() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 5), nn.BatchNorm1d(5, affine=False))
    model.append(_attention(True)).extend([nn.GroupNorm(1, 5) for _ in range(8)])
    model[2].requires_grad_(False)
    with pytest.warns(RuntimeWarning, match="layers with parameters that are left alone") as said:
        perturb(model, Perturbation("dropout", 4))
    assert said[0].filename == __file__
    text = str(said[0].message)
    assert "1 (LayerNorm is none of Linear, Conv1d, Conv2d and Embedding)" in text
    assert "5, 6, 7, 8, 9, 10 and 2 more (GroupNorm is none of" in text
    assert "4.attention (MultiheadAttention is none of" in text
    assert "; 0" not in text
    assert "2 (" not in text.replace("10 and 2 more (", "")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _perturbed("spsa", model)
        _perturbed(model=nn.Sequential(nn.Linear(6, 8), nn.ReLU()))


def test_attention_within_a_member_is_fine() -> None:
    model = _attention(True)
    es = _perturbed(model=model)
    x = torch.randn(1, 3, 6)
    out = es(es.member_batch(x))
    assert out.shape == (8, 3, 6)
    assert not torch.equal(out[0], out[1])
    es.check(es.member_batch(x))


def test_mixing_is_found() -> None:
    es = _perturbed(model=nn.Sequential(nn.Linear(6, 4), _MeanOverRows()))
    with pytest.raises(RulecError, match="members are mixed: what _MeanOverRows '1' gives"):
        es.check(torch.randn(8, 6))
    fine = _perturbed()
    fine.check(torch.randn(8, 6))
    words = _perturbed(model=nn.Sequential(nn.Embedding(9, 4), _MeanOverRows()))
    with pytest.raises(RulecError, match="members are mixed: what the model gives"):
        words.check(torch.arange(8))


def test_dropped_activations_are_no_mixing() -> None:
    es = _perturbed(model=nn.Sequential(nn.Linear(6, 8), nn.Dropout(), nn.Linear(8, 4)))
    before = torch.get_rng_state()
    es.check(torch.randn(8, 6, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.get_rng_state(), before)


def test_noise_lost_in_rounding() -> None:
    with pytest.warns(RuntimeWarning, match=r"sigma=1e-06 is too small for bfloat16: \d+% of weights") as said:
        perturb(_model().bfloat16(), Perturbation("signflip", 4, 1e-6))
    assert said[0].filename == __file__
    model = nn.Linear(6, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        perturb(model, Perturbation("spsa", 1, 1e-6))
        perturb(_model().to("meta").bfloat16(), Perturbation("spsa", 1, 1e-6))
    with torch.no_grad():
        model.weight.add_(1e3)
    with pytest.warns(RuntimeWarning, match=r"sigma=1e-06 is too small for float32: .* when noise is added; give"):
        perturb(model, Perturbation("spsa", 1, 1e-6))


def test_a_layer_that_is_not_used_has_no_gradient() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(6, 4), nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)  # type: ignore[no-any-return]

    model = Half()
    es = _perturbed(model=model)
    es(_batch(es))
    assert es.update(torch.randn(8)).unused == ("idle.weight", "idle.bias")
    assert model.idle.weight.grad is None
