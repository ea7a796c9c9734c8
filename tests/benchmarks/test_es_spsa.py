"""Training by two forwards: the published way is what its paper says, and what is written is counted."""

from __future__ import annotations

import pytest
import torch

from benchmarks.es.mezo import MeZO
from benchmarks.es.writes import counted
from rulec.backend import registry
from rulec_backends.cpu import noise


def test_mezo_is_the_step_of_its_paper() -> None:
    """In float64, where adding and taking away again leaves what was there within rounding."""
    torch.manual_seed(1)
    params = [torch.randn(5, 4, dtype=torch.float64), torch.randn(3, dtype=torch.float64)]
    before = [p.clone() for p in params]
    lr, epsilon = 0.1, 1e-2

    def loss(of: list[torch.Tensor]) -> torch.Tensor:
        return sum((p.square().sum() for p in of), start=torch.zeros((), dtype=torch.float64))

    optimizer = MeZO(params, lr, epsilon)
    for number in range(2):
        generator = torch.Generator().manual_seed(number)
        noise = [torch.empty_like(p).normal_(generator=generator) for p in before]
        above, below = (loss([p + s * epsilon * z for p, z in zip(before, noise, strict=True)]) for s in (1, -1))
        slope = (above - below) / (2 * epsilon)
        before = [p - lr * slope * z for p, z in zip(before, noise, strict=True)]
        optimizer.step(lambda: loss(params))
    for ours, expected in zip(params, before, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


def test_mezo_writes_its_parameters_four_times() -> None:
    params = [torch.ones(50, 40), torch.ones(7)]
    size = sum(p.nbytes for p in params)
    optimizer = MeZO(params)
    with counted(params) as found:
        optimizer.step(lambda: torch.zeros(()))
    assert found.watched == 4 * size
    assert size * 8 <= found.all <= size * 8 + 64  # the noise as well, and the losses


def test_what_operations_write_is_counted() -> None:
    watched, other = torch.ones(10), torch.ones(10)
    with counted([watched]) as found:
        watched[:5].mul_(2)
        torch.add(watched, 1, out=other)
        watched.view(2, 5).t()
        torch.empty(1000)
    assert (found.watched, found.all) == (20, 20 + 40)


def test_noise_that_the_backend_writes_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    param = torch.ones(10)
    monkeypatch.setattr(noise, "fill_noise", lambda out, *_: out.numpy().fill(2.0))
    with counted([param]) as found:
        registry.usable("cpu").fill_noise(param, None)  # type: ignore[attr-defined]
    assert (found.watched, found.all) == (40, 40)
    assert param.tolist() == [2.0] * 10


def test_what_an_optimizer_of_ours_writes_is_counted() -> None:
    import rulec.torch

    param = torch.ones(1000, requires_grad=True)
    opt = rulec.torch.AdamW([param])
    param.grad = torch.ones(1000)
    opt.step()
    with counted([param]) as found:
        opt.step()
    assert found.watched == 4000
    assert found.all >= 3 * 4000
