"""`Muon` is that of torch: the same signature, states, checkpoints and numbers."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import rulec.torch
from rulec.errors import HyperError
from rulec.language.expr.node import Op
from rulec.torch.tensors import matrix
from rulec.torch.tensors.matrix import TORCH_MATRIX
from tests.torch.test_rules import advance, through_a_file
from tests.torch.twins import difference, parameters

pytestmark = [
    pytest.mark.peer,
    pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon"),
]

SHAPES = ((6, 8), (12, 6), (16, 16), (40, 3), (1, 5))
KEYWORDS: list[dict[str, Any]] = [
    {},
    {"lr": 0.05, "momentum": 0.8, "weight_decay": 0.3, "ns_steps": 3, "adjust_lr_fn": "original"},
]


def both(dtype: torch.dtype, keywords: dict[str, Any]) -> list[tuple[Any, list[Tensor]]]:
    """Ours and torch's, with two groups."""
    found = []
    for library in (rulec.torch, torch.optim):
        params = parameters(dtype, SHAPES)
        found.append((library.Muon([{"params": params[:2]}, {"params": params[2:], "lr": 0.01}], **keywords), params))
    return found


def test_the_signature_has_theirs_within_it() -> None:
    ours = inspect.signature(rulec.torch.Muon).parameters
    theirs = inspect.signature(torch.optim.Muon).parameters
    assert [*ours][: len(theirs)] == [*theirs]
    own = {"capturable", "state_dtype", "weights", "backend", "seed", "auto", "watch", "watch_every"}
    own |= {"offload", "offload_buffer", "offload_pinned"}
    assert set(ours) - set(theirs) == own | {"adamw_lr", "betas", "adamw_eps", "adamw_wd", "lr_at_start", "ns_form"}
    assert all(ours[k].default == theirs[k].default and ours[k].kind == theirs[k].kind for k in theirs)


@pytest.mark.parametrize("keywords", KEYWORDS, ids=["defaults", "others"])
def test_float64(keywords: dict[str, Any]) -> None:
    (ours, params), (theirs, others) = both(torch.float64, keywords)
    advance(ours, params, range(20))
    advance(theirs, others, range(20))
    assert difference(params, others) * torch.finfo(torch.float64).eps < 1e-12


@pytest.mark.parametrize("keywords", KEYWORDS, ids=["defaults", "others"])
def test_one_step_of_float32_and_bfloat16(keywords: dict[str, Any]) -> None:
    """Later steps part where a momentum that differs in its last bit rounds to another bfloat16."""
    for dtype in (torch.float32, torch.bfloat16):
        (ours, params), (theirs, others) = both(dtype, keywords)
        advance(ours, params, range(1))
        advance(theirs, others, range(1))
        assert difference(params, others) <= 4


def iterated(matrix: Tensor) -> Tensor:
    """Five steps of Muon's iteration in the dtype of the matrix, as Jordan wrote it."""
    y = matrix / matrix.norm()
    for _ in range(5):
        gram = y @ y.T
        y = 3.4445 * y + (-4.7750 * gram + 2.0315 * gram @ gram) @ y
    return y


@pytest.mark.parametrize("instructions", [True, False], ids=["torch's products", "products in float32"])
@pytest.mark.parametrize("shape", [(6, 8), (12, 6), (64, 16), (130, 257), (256, 256), (257, 400), (513, 300)])
def test_newton_schulz_is_theirs(shape: tuple[int, int], instructions: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit by torch's products; as near to the iteration in float64 by those of float32, in another order."""
    from torch.optim._muon import _zeropower_via_newtonschulz

    monkeypatch.setattr(matrix, "multiplies", lambda dtype: instructions)
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    theirs = _zeropower_via_newtonschulz(grad, (3.4445, -4.7750, 2.0315), 5, 1e-7).float()
    ours = TORCH_MATRIX[Op.NEWTON_SCHULZ](np.stack([grad.numpy()] * 2), 5.0, dtype="bfloat16")
    if instructions:
        assert all(np.array_equal(result, theirs.numpy()) for result in ours)
    else:
        exact = iterated(grad.double())
        error = max(float((torch.from_numpy(result) - exact).norm()) for result in ours)
        assert error <= 1.05 * float((theirs - exact).norm())
        assert np.array_equal(ours, torch.from_numpy(ours).bfloat16().float().numpy())


@pytest.mark.parametrize(("tiles", "dtype", "halves"), [
    (True, torch.bfloat16, False), (False, torch.bfloat16, True), (True, torch.float32, True),
])  # fmt: skip
def test_a_quarter_of_a_large_symmetric_product_is_copied_where_that_is_quicker(
    tiles: bool, dtype: torch.dtype, halves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles of bfloat16 multiply a matrix whole. Both ways have the same sums, up to the order of their terms."""
    y = torch.randn(300, 513, generator=torch.Generator().manual_seed(0)).to(dtype) / 16
    rows: list[int] = []
    multiply = torch.mm
    monkeypatch.setattr(matrix, "multiplies", lambda dtype: True)
    monkeypatch.setattr(matrix, "_WORTH_HALVING_WIDE", 256)
    monkeypatch.setattr(matrix, "_has_tiles", lambda: tiles)
    monkeypatch.setattr(torch, "mm", lambda a, b, out: rows.append(len(a)) or multiply(a, b, out=out))
    product = matrix.gram(y)
    assert rows == ([150, 150] if halves else [300])
    assert torch.equal(product, product.T)
    exact = y.double() @ y.double().T
    most = y.double().abs() @ y.double().abs().T
    # Sums in float32, then one rounding to the dtype.
    bound = 513 * 2**-24 * most + torch.finfo(dtype).eps / 2 * exact.abs()
    assert ((product.double() - exact).abs() <= bound * (1 + 2**-8)).all()


def updates_in_bfloat16(optimizer: Any, grads: list[Tensor], ours: bool) -> list[Tensor]:
    """What either side gives to the iteration after a step, each by its own arithmetic."""
    found = []
    for p, g in zip(optimizer.param_groups[0]["params"], grads, strict=True):
        m, share = optimizer.state[p]["momentum_buffer"], np.float32(1 - 0.95)
        mean = torch.from_numpy(share * g.numpy() + np.float32(0.95) * m.numpy()) if ours else g.lerp(m, 0.95)
        found.append(mean.bfloat16())
    return found


def test_they_part_where_an_element_rounds_to_another_bfloat16_and_are_equally_exact(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The oracle is theirs in float64, without bfloat16: what parts the two is less than what parts either from it."""
    shapes, steps = [(16, 16)] * 24 + [(12, 6)] * 8, 20
    sides = [[torch.nn.Parameter(p.detach().to(dtype)) for p in parameters(torch.float32, shapes)]
             for dtype in (torch.float32, torch.float32, torch.float64)]  # fmt: skip
    ours, theirs, exact = rulec.torch.Muon(sides[0]), torch.optim.Muon(sides[1]), torch.optim.Muon(sides[2])
    flips = np.zeros(len(shapes), int)
    for step in range(steps):
        drawn = torch.Generator().manual_seed(step)
        grads = [torch.randn(shape, generator=drawn) for shape in shapes]
        for params in sides:
            for p, g in zip(params, grads, strict=True):
                p.grad = g.to(p.dtype)
        ours.step()
        theirs.step()
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "bfloat16", lambda x: x.double().clone())
            exact.step()
        pairs = zip(updates_in_bfloat16(ours, grads, True), updates_in_bfloat16(theirs, grads, False), strict=True)
        flips += [int((a != b).sum()) for a, b in pairs]
    wide = [[p.detach().double() for p in params] for params in sides]
    apart, mine, other = (
        np.array([float((a - b).abs().max()) for a, b in zip(wide[i], wide[k], strict=True)])
        for i, k in ((0, 1), (0, 2), (1, 2))
    )
    assert 0 < flips.astype(bool).sum() < len(shapes)
    assert apart[flips == 0].max() <= steps * 2.0**-22 < apart.max() < other.max()
    np.testing.assert_allclose(mine.mean(), other.mean(), rtol=0.02)


@pytest.mark.parametrize("ours_first", [True, False], ids=["ours to torch", "torch to ours"])
def test_a_checkpoint_goes_on_on_the_other_side(ours_first: bool) -> None:
    first, second = both(torch.float64, {}) if ours_first else both(torch.float64, {})[::-1]
    advance(*first, range(4))
    saved = through_a_file(first[0].state_dict())
    second[0].load_state_dict(saved)
    with torch.no_grad():
        for p, q in zip(second[1], first[1], strict=True):
            p.copy_(q)
    assert set(saved["state"][0]) == {"momentum_buffer"}
    for optimizer, params in (first, second):
        advance(optimizer, params, range(4, 8))
    assert difference(first[1], second[1]) * torch.finfo(torch.float64).eps < 1e-12


@pytest.mark.parametrize(
    "keywords",
    [
        {"eps": 1e-3},
        {"ns_coefficients": (2.0, -1.5, 0.5)},
        {"adjust_lr_fn": "orignal"},
    ],
)
def test_what_the_rule_does_not_have_is_refused(keywords: dict[str, Any]) -> None:
    params, message = parameters(shapes=SHAPES), f"Muon .*{next(iter(keywords))}="
    with pytest.raises(HyperError, match=message):
        rulec.torch.Muon(params, **keywords)
    with pytest.raises(HyperError, match=message):
        rulec.torch.Muon([{"params": params, **keywords}])
    if keywords != {"adjust_lr_fn": "orignal"}:
        optimizer, theirs = rulec.torch.Muon(params), torch.optim.Muon(params, **keywords)
        with pytest.raises(HyperError, match=message):
            optimizer.load_state_dict(theirs.state_dict())
        assert {**optimizer.param_groups[0], **keywords} != optimizer.param_groups[0]
