"""The scale of noise: it changes between steps alone, and what an estimate is divided by is what members were given."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from rulec.errors import HyperError, RulecError, StateMismatch
from rulec.es import Perturbation
from rulec.torch import perturb
from tests.torch.es.oracle import member_outputs


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def _batch() -> torch.Tensor:
    return torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def _gradients(es: Any) -> list[torch.Tensor]:
    es.update(loss=es(es.member_batch(_batch())).square().sum(1))
    return [param.grad.clone() for param in es.parameters.values()]


def _perturbed(sigma: float, **settings: Any) -> Any:
    return perturb(_model(), Perturbation("lowrank", 4, sigma, seed=3, **settings))


def test_nothing_of_a_strategy_can_be_assigned() -> None:
    es = _perturbed(0.1)
    es(es.member_batch(_batch()))
    for name, other in (("perturbation", Perturbation("lowrank", 4, 0.05, seed=3)), ("model", _model())):
        with pytest.raises(AttributeError):
            setattr(es, name, other)
    assert es.perturbation.sigma == 0.1


def test_a_new_sigma_takes_effect_at_the_next_forward() -> None:
    es = _perturbed(0.1)
    _gradients(es)
    es.set_sigma(0.025)
    assert es.perturbation.sigma == 0.025
    expected = member_outputs(es, _batch(), step=1)
    torch.testing.assert_close(es(es.member_batch(_batch())), expected, rtol=0, atol=1e-12)
    other = _perturbed(0.025)
    other.load_state_dict({**other.state_dict(), "step": 1})
    for mine, its in zip(_gradients(es), _gradients(other), strict=True):
        torch.testing.assert_close(mine, its, rtol=0, atol=0)


@pytest.mark.parametrize("way", ["batch", "closure", "inside"])
def test_sigma_stays_between_a_forward_and_its_update(way: str) -> None:
    es = _perturbed(0.1)
    if way == "batch":
        es(es.member_batch(_batch()))
    elif way == "closure":
        es.evaluate(lambda: es.model(_batch()).sum())
    with pytest.raises(RulecError, match=r"step 0 has had a forward.* call update before set_sigma"):
        es.evaluate(lambda: es.set_sigma(0.2)) if way == "inside" else es.set_sigma(0.2)
    assert es.perturbation.sigma == 0.1
    if way != "inside":
        es.update(torch.arange(8.0))
    es.set_sigma(0.2)
    assert es.perturbation.sigma == 0.2


def test_what_is_no_sigma_is_refused() -> None:
    es = _perturbed(0.1)
    for bad in (0.0, float("nan"), "small"):
        with pytest.raises(HyperError, match=r"sigma=.* must be a finite number above 0"):
            es.set_sigma(bad)
    with pytest.raises(HyperError, match="sigma means nothing to dropout"):
        perturb(_model(), Perturbation("dropout", 4)).set_sigma(0.1)
    with pytest.warns(RuntimeWarning, match="too small for float64") as said:
        es.set_sigma(1e-20)
    assert said[0].filename == __file__


def test_sigma_is_in_checkpoints() -> None:
    es = _perturbed(0.1)
    es.set_sigma(0.03)
    saved = copy.deepcopy(es.state_dict())
    for again in (_perturbed(0.1), pickle.loads(pickle.dumps(es))):  # noqa: S301
        again.load_state_dict(saved)
        assert again.perturbation == es.perturbation
    saved["perturbation"]["sigma"] = -1.0
    again = _perturbed(0.1)
    with pytest.raises(StateMismatch, match=r"damaged: sigma=-1\.0"):
        again.load_state_dict(saved)
    assert again.perturbation.sigma == 0.1
