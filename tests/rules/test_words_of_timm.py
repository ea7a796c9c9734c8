"""Keywords of timm's classes. What they mean is written again in torch, for timm is not among the tests' packages."""

from __future__ import annotations

from typing import Any

import pytest
import pytorch_optimizer
import torch
from torch.optim._muon import _zeropower_via_newtonschulz

import rulec.torch
from rulec.errors import HyperError, TensorError

pytestmark = pytest.mark.peer

#: Classes with timm's corrected weight decay, and the keywords that decouple it.
CORRECTED: dict[str, dict[str, Any]] = {
    "ADOPT": {"decoupled": True},
    "AdamW": {"caution": True},
    "Lion": {"caution": True},
    "NAdamW": {},
    "LaProp": {},
    "RMSpropTF": {"decoupled_decay": True},
    "SGDW": {"nesterov": True, "caution": True},
}


@pytest.mark.parametrize("name", CORRECTED)
def test_a_corrected_decay_falls_with_the_square_of_the_rate(name: str) -> None:
    def second(decay: float) -> tuple[torch.Tensor, torch.Tensor]:
        numbers = torch.Generator().manual_seed(0)
        param = torch.nn.Parameter(torch.randn(5, 3, dtype=torch.float64, generator=numbers))
        keywords = {"weight_decay": 0.0, "corrected_weight_decay": True, **CORRECTED[name]}
        optimizer = getattr(rulec.torch, name)([param], lr=0.5, **keywords)
        for rate, part in ((0.5, 0.0), (0.2, decay)):
            before = param.detach().clone()
            optimizer.param_groups[0].update(lr=rate, weight_decay=part)
            param.grad = torch.randn(5, 3, dtype=torch.float64, generator=numbers)
            optimizer.step()
        return before, param.detach()

    before, without = second(0.0)
    _, after = second(0.1)
    assert torch.allclose(without - after, 0.2**2 / 0.5 * 0.1 * before, rtol=1e-9)


def test_adamw_with_a_corrected_decay_is_adamc() -> None:
    params = [torch.nn.Parameter(torch.full((5, 3), 2.0, dtype=torch.float64)) for _ in range(2)]
    pair = (
        rulec.torch.AdamW([params[0]], lr=0.1, weight_decay=0.1, corrected_weight_decay=True),
        pytorch_optimizer.AdamC([{"params": params[1:], "normalized": True}], lr=0.1, weight_decay=0.1),
    )
    for step in range(5):
        for param, optimizer in zip(params, pair, strict=True):
            param.grad = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
            optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
            optimizer.step()
    assert torch.allclose(*params, rtol=1e-6)  # theirs adds eps before the correction of the bias


@pytest.mark.parametrize("flag", ["", "trust_clip", "caution", "corrected_weight_decay"])
def test_lamb_with_a_decoupled_decay_measures_what_it_has_decayed(flag: str) -> None:
    """timm's: the parameter decays first, and the ratio is of that one's norm and of the update without decay.

    The learning rate has fallen to a half of the one at the start, and a corrected decay to a quarter.
    """
    numbers = torch.Generator().manual_seed(0)
    start, grad = (torch.randn(5, 3, dtype=torch.float64, generator=numbers) for _ in range(2))
    param = torch.nn.Parameter(start.clone())
    param.grad = grad
    chosen = {flag: True} if flag else {}
    optimizer = rulec.torch.LAMB([param], lr=0.2, eps=0.5, weight_decay=0.2, decoupled_decay=True, **chosen)
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.step()
    update = grad / (grad.abs() + 0.5)  # all elements of the first update agree with the gradient
    bare = (1 - (0.05 if flag == "corrected_weight_decay" else 0.1) * 0.2) * start
    ratio = bare.norm() / update.norm()
    ratio = ratio.clamp(max=1) if flag == "trust_clip" else ratio
    assert torch.allclose(param.detach(), bare - 0.1 * ratio * update, rtol=1e-9)


@pytest.mark.parametrize("name", ["RMSpropTF", "SGDW"])
def test_caution_leaves_out_the_elements_that_disagree(name: str) -> None:
    """The elements that move are those of the same class without caution whose step agrees with the gradient."""
    keywords = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.0} | ({"nesterov": True} if name == "SGDW" else {})
    moves, grad = [], torch.ones(0)
    for caution in (False, True):
        numbers = torch.Generator().manual_seed(1)
        param = torch.nn.Parameter(torch.zeros(50, dtype=torch.float64))
        optimizer = getattr(rulec.torch, name)([param], caution=caution, **keywords)
        for _ in range(3):
            before = param.detach().clone()
            grad = torch.randn(50, dtype=torch.float64, generator=numbers)
            param.grad = grad
            optimizer.step()
        moves.append(before - param.detach())
    keep = moves[0] * grad > 0
    assert 0 < int(keep.sum()) < 50
    assert torch.allclose(moves[1], torch.where(keep, moves[0], 0) / keep.double().mean(), rtol=1e-9)


def masked(step: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """The elements of a step that agree with the gradient, over their share."""
    keep = (step * grad > 0).double()
    return step * keep / keep.mean()


def turned(x: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Every row at right angles to that of the parameter."""
    return x - param * (x * param).sum(1, keepdim=True) / param.square().sum(1, keepdim=True)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("name", ["AdamP", "SGDP"])
def test_caution_compares_at_right_angles_to_the_weights(name: str, right: bool, nesterov: bool) -> None:
    """The weights count as scale-invariant where the gradient is at right angles to them, and decay a tenth then."""
    numbers = torch.Generator().manual_seed(0)
    draw = lambda: torch.randn(6, 40, dtype=torch.float64, generator=numbers)  # noqa: E731
    param = torch.nn.Parameter(draw())
    adam = name == "AdamP"
    keywords = {"betas": (0.8, 0.9), "eps": 1e-8} if adam else {"momentum": 0.8, "dampening": 0.3}
    optimizer = getattr(rulec.torch, name)(
        [param], lr=0.1, weight_decay=0.2, caution=True, nesterov=nesterov, **keywords
    )
    m, v = torch.zeros(6, 40), torch.zeros(6, 40)
    for t in range(1, 4):
        before = param.detach().clone()
        grad = turned(draw(), before) if right else draw() + before
        param.grad = grad.clone()
        optimizer.step()
        m = 0.8 * m + (0.2 if adam else 0.7) * grad
        v = 0.9 * v + 0.1 * grad**2
        step = (0.8 * m + (0.2 if adam else 1) * grad) if nesterov else m
        step = step / (1 - 0.8**t) / ((v / (1 - 0.9**t)).sqrt() + 1e-8) if adam else step
        flat = turned(masked(turned(step, before), turned(grad, before)), before)
        step = flat if right else masked(step, grad)
        decay = (0.1 if right else 1) * 0.2 / (1 if adam else 1 - 0.8)
        assert torch.allclose(param.detach(), before - 0.1 * (step + decay * before), rtol=1e-9)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(
    ("algo", "adjusted"),
    [("muon", None), ("muon", "match_rms_adamw"), ("adamuon", None), ("adamuon", "match_rms_adamw")],
)
def test_muon_takes_the_word_for_an_algorithm(algo: str, adjusted: str | None, nesterov: bool) -> None:
    """Vectors and narrow matrices have AdamW, with Nesterov's momentum where matrices have it."""
    numbers = torch.Generator().manual_seed(0)
    shapes = ((6, 4), (6,), (3, 2))
    params = [torch.nn.Parameter(torch.randn(*shape, dtype=torch.float64, generator=numbers)) for shape in shapes]
    optimizer = rulec.torch.Muon(
        params, lr=0.1, weight_decay=0.2, momentum=0.8, betas=(0.7, 0.9), eps=1e-6, algo=algo, adjust_lr_fn=adjusted,
        nesterov=nesterov, fallback_lr_scale=0.5,
    )  # fmt: skip
    m, v = ([torch.zeros(shape, dtype=torch.float64) for shape in shapes] for _ in range(2))
    for t in range(1, 4):
        before = [param.detach().clone() for param in params]
        for param in params:
            param.grad = torch.randn(*param.shape, dtype=torch.float64, generator=numbers)
        optimizer.step()
        for i, (param, old) in enumerate(zip(params, before, strict=True)):
            grad, beta = param.grad, 0.7 if i else 0.8
            assert grad is not None
            m[i] = beta * m[i] + (1 - beta) * grad
            step = beta * m[i] + (1 - beta) * grad if nesterov else m[i]
            if i:
                v[i] = 0.9 * v[i] + 0.1 * grad**2
                step, rate = step / (1 - 0.7**t) / ((v[i] / (1 - 0.9**t)).sqrt() + 1e-6), 0.05
            else:
                step, rate = _zeropower_via_newtonschulz(step, (3.4445, -4.775, 2.0315), 5, 1e-7).double(), 0.1
                v[i] = 0.9 * v[i] + 0.1 * step**2
                if algo == "muon":
                    step = (0.2 * 6**0.5 if adjusted else 1.5**0.5) * step
                else:
                    step = step / (v[i].sqrt() + 1e-6)
                    step = 0.2 * 24**0.5 * step / (step.norm() + 1e-6)
            assert torch.allclose(param.detach(), old - rate * (step + 0.2 * old), rtol=1e-9)


def test_muon_without_a_word_of_timm_is_torchs() -> None:
    vector = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(TensorError, match="Muon does not apply to parameter 0"):
        rulec.torch.Muon([vector])
    with pytest.raises(HyperError, match=r"Muon has no rule for .*algo='soap'"):
        rulec.torch.Muon([vector], algo="soap")


def test_caution_of_adafactor_without_a_first_moment_changes_nothing() -> None:
    moved = []
    for keywords in ({}, {"caution": True}):
        param = torch.nn.Parameter(torch.ones(3, 2))
        param.grad = torch.tensor([[1.0, 0], [2, -3], [0, 4]])
        optimizer = rulec.torch.Adafactor([param], lr=0.1, **keywords)
        optimizer.step()
        moved.append(param.detach())
        assert "caution" not in optimizer.param_groups[0]
    assert torch.equal(*moved)
