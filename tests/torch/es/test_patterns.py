"""Several perturbations of one model by patterns of names, and strategies that share a process."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import rulec.torch
from rulec.errors import HyperError, StateMismatch
from rulec.es import Perturbation
from rulec.es.dense import estimate, noise
from rulec.es.fitness import weights
from rulec.torch import perturb


class _Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv1, self.conv2 = nn.Conv1d(2, 4, 3), nn.Conv1d(4, 4, 1)
        self.body = nn.Sequential(nn.Linear(16, 8), nn.Tanh())
        self.head = nn.Linear(8, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.body(self.conv2(self.conv1(x)).flatten(1)))
        return found


def _mixed(**other: Any) -> dict[str, Perturbation]:
    return {
        "conv*": Perturbation("signflip", 4, 0.2, seed=5, values="rademacher"),
        "body": Perturbation("dropout", 4),
        "head": Perturbation("lowrank", 4, 0.05, rank=2),
        **other,
    }


def _batch() -> Tensor:
    return torch.randn(2, 2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def _pattern(name: str) -> str:
    return "conv*" if name.startswith("conv") else name.split(".")[0]


def _noise(es: Any, name: str, number: int, direction: int) -> Tensor:
    p, param = es.perturbation[_pattern(name)], es.parameters[name].detach()
    eps = torch.from_numpy(noise(p, tuple(param.shape), number, es.step_count, direction))
    return param * eps if p.family == "dropout" else p.sigma * eps


def test_layers_of_a_pattern_have_its_family_and_its_sigma() -> None:
    es = perturb(_Network(), _mixed())
    assert [*es.parameters] == ["conv1.weight", "conv1.bias", "conv2.weight", "conv2.bias", "body.0.weight",
                                "head.weight", "head.bias"]  # fmt: skip
    found = es(es.member_batch(_batch())).view(2, -1, 4, 3)
    alone = es.evaluate(lambda: es.model(_batch()).sum()).view(2, 4)
    for direction in range(4):
        for sign in range(2):
            model = copy.deepcopy(es.model)
            with torch.no_grad():
                for number, name in enumerate(es.parameters):
                    model.get_parameter(name).add_(_noise(es, name, number, direction), alpha=-1 if sign else 1)
                expected = model(_batch())
            torch.testing.assert_close(found[sign, :, direction], expected, rtol=0, atol=1e-6)
            assert abs(float(alone[sign, direction] - expected.sum())) < 1e-6


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_are_of_each_layers_own_perturbation(fused: bool) -> None:
    es, before = perturb(_Network(), _mixed()), _Network()
    opt = rulec.torch.SGD(es.parameters.values(), lr=1.0)
    es(es.member_batch(_batch()))
    fitness = np.linspace(-1, 2, 8) ** 2
    if fused:
        es.step(fitness, opt)
    else:
        es.update(fitness)
        opt.step()
    for number, name in enumerate(es.parameters):
        p = es.perturbation[_pattern(name)]
        start = before.get_parameter(name).detach().numpy()
        expected = estimate(p, start, number, 0, weights(fitness.reshape(2, 4), p).values)
        change = start - es.parameters[name].detach().numpy()
        np.testing.assert_allclose(change, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_sigma_by_pattern() -> None:
    es = perturb(_Network(), _mixed())
    es.set_sigma({"head": 0.5})
    assert {pattern: p.sigma for pattern, p in es.perturbation.items()} == {"conv*": 0.2, "body": 0.01, "head": 0.5}
    es.set_sigma(0.3)
    assert {pattern: p.sigma for pattern, p in es.perturbation.items()} == {"conv*": 0.3, "body": 0.01, "head": 0.3}
    with pytest.raises(HyperError, match="'haed' is no pattern of the perturbations; did you mean 'head'"):
        es.set_sigma({"haed": 0.5})
    again = pickle.loads(pickle.dumps(es))  # noqa: S301
    assert dict(again.perturbation) == dict(es.perturbation)
    fresh = perturb(_Network(), _mixed())
    assert fresh.perturbation["head"].seed != es.perturbation["head"].seed
    fresh.load_state_dict(es.state_dict())
    assert dict(fresh.perturbation) == dict(es.perturbation)
    with pytest.raises(StateMismatch, match="patterns 'conv\\*', 'body', 'head', where these are of 'head'"):
        perturb(_Network(), {"head": Perturbation("lowrank", 4)}).load_state_dict(es.state_dict())
    with pytest.raises(StateMismatch, match="has no perturbation"):
        perturb(_Network(), Perturbation("lowrank", 4)).load_state_dict(es.state_dict())


def test_patterns_that_perturb_nothing_are_refused() -> None:
    one = Perturbation("lowrank", 4)
    wrong = {
        "'haed' matches no parameter": {"head": one, "haed": one},
        "'head' matches no parameter that the patterns before it leave": {"*": one, "head": one},
        "nothing that the pattern 'body' matches can be perturbed .*no halves": {
            "head": one, "body": Perturbation("dropout", 3), "*": one
        },
        "'head' has directions=3 and '\\*' has directions=4": {"*": one, "head": Perturbation("lowrank", 3)},
        "'head' has antithetic=False": {"*": one, "head": Perturbation("lowrank", 4, antithetic=False)},
        "must be a pattern of names": {"head": "lowrank"},
        "or a dict of them": {},
    }  # fmt: skip
    for message, given in wrong.items():
        model = _Network()
        model.body = nn.Sequential(nn.Linear(15, 8))
        if "no halves" in message:
            given = {**given, "head": Perturbation("lowrank", 3), "*": Perturbation("lowrank", 3)}
        with pytest.raises(HyperError, match=message):
            perturb(model, given)


def test_layers_that_no_pattern_is_for_are_told() -> None:
    es = perturb(_Network(), {"conv1": Perturbation("lowrank", 4), "head.w*": Perturbation("sparse", 4, sparsity=2)})
    assert [*es.parameters] == ["conv1.weight", "conv1.bias", "head.weight"]
    assert set(es.left_alone.values()) == {"no pattern matches it"}
    assert es.left_alone.keys() == {"conv2.weight", "conv2.bias", "body.0.weight", "body.0.bias", "head.bias"}


# Strategies beside each other


def _outputs(es: Any) -> Tensor:
    found: Tensor = es(es.member_batch(torch.ones(1, 6)))
    return found


def _layers() -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(0)
    layer = nn.Linear(6, 4)
    return layer, copy.deepcopy(layer)


def test_strategies_without_a_seed_have_noise_of_their_own() -> None:
    one = Perturbation("independent", 4, 0.1)
    a, b = (perturb(layer, one) for layer in _layers())
    assert a.perturbation.seed != b.perturbation.seed
    assert not torch.equal(_outputs(a), _outputs(b))
    same = Perturbation("independent", 4, 0.1, seed=7)
    c, d = (perturb(layer, same) for layer in _layers())
    assert torch.equal(_outputs(c), _outputs(d))


def test_the_same_calls_in_the_same_order_have_the_same_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    for _ in range(2):
        monkeypatch.setattr("rulec.es.perturbations._used", set())
        runs.append([_outputs(perturb(layer, Perturbation("independent", 4, 0.1))) for layer in _layers()])
    assert torch.equal(runs[0][0], runs[1][0])
    assert torch.equal(runs[0][1], runs[1][1])


def test_a_checkpoint_has_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Perturbation("independent", 4, 0.1)
    a, b = (perturb(layer, one) for layer in _layers())
    expected, saved = _outputs(b), b.state_dict()
    monkeypatch.setattr("rulec.es.perturbations._used", set())  # another process, in which the second one is made first
    again = perturb(_layers()[1], one)
    assert again.perturbation.seed == a.perturbation.seed
    again.load_state_dict(saved)
    assert torch.equal(_outputs(again), expected)
    others = [perturb(_layers()[0], one) for _ in range(3)]
    assert b.perturbation.seed not in [other.perturbation.seed for other in others]
    given = perturb(_layers()[1], Perturbation("independent", 4, 0.1, seed=7))
    with pytest.raises(StateMismatch, match="where this one has 7"):
        given.load_state_dict(saved)
