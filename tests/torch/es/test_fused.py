"""Steps whose gradients are made inside the update, beside steps with the same gradients in `.grad`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import rulec.torch
from rulec.backend.noise import Noise
from rulec.backend.product import Product
from rulec.es.streams import short_weights
from rulec.torch.es.fused import Made, fused_step
from rulec.torch.tensors import DTYPES
from rulec_backends.cpu.noise import fill_noise

SHAPES = ((33, 70), (70,), (5, 3, 3, 3), (1000,), (4, 6))

Make = Callable[[list[Tensor]], Any]


def params_of(dtype: str = "float32") -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape).to(DTYPES[dtype]).requires_grad_() for shape in SHAPES]


def adamw(params: list[Tensor], **keywords: Any) -> Any:
    """Two groups of other numbers, so that tensors of one bucket have rows of their own."""
    groups = [{"params": params[:2], "lr": 1e-2, **keywords}, {"params": params[2:], "weight_decay": 0.3}]
    return rulec.torch.AdamW(groups, lr=1e-3)


def noise(layer: int, step: int, values: Any = "popcount") -> Noise:
    return Noise(values, 5, layer, step, short_weights([0.5, 0.0, -1.25], values))


@dataclass(frozen=True)
class Rows:
    """Rows of a gradient that there is, of another dtype than the parameter's."""

    whole: Tensor
    dtype: torch.dtype = torch.float64

    def rows(self, span: slice, out: Tensor) -> None:
        assert out.is_contiguous()
        out.copy_(self.whole.flatten(1)[span])


def gradient(made: Made, like: Tensor) -> Tensor:
    """The gradient that stands for what makes it."""
    if isinstance(made, Rows):
        return made.whole.to(like.dtype)
    if isinstance(made, Product):
        return (made.outputs.t() @ made.inputs).view(like.shape).to(like.dtype)
    assert isinstance(made, Noise)
    found = torch.empty_like(like)
    fill_noise(found, made)
    return found


def compare(make: Make, given: Callable[[int], dict[int, Made]], dtype: str = "float32", steps: int = 3) -> None:
    """That both ways have the same bits: parameters, states and counts. The last parameter never has a gradient but in
    the second step, the third an ordinary one where none is made."""
    fused, plain = params_of(dtype), params_of(dtype)
    one, other = make(fused), make(plain)
    for step in range(steps):
        made = given(step)
        for params in (fused, plain):
            torch.manual_seed(step)
            for place, param in enumerate(params):
                there = place not in made and (place < 4 or step == 1)
                param.grad = torch.randn(param.shape).to(param.dtype) if there else None
        for place, source in made.items():
            plain[place].grad = gradient(source, plain[place])
        versions = [p._version for p in fused]
        assert fused_step(one, {fused[place]: source for place, source in made.items()})
        other.step()
        assert all(fused[i].grad is None for i in made)
        assert all(fused[i]._version > versions[i] for i in made)
    for a, b in zip(fused, plain, strict=True):
        assert torch.equal(a, b)
        assert one.state[a].keys() == other.state[b].keys()
        assert all(torch.equal(one.state[a][k], other.state[b][k]) for k in one.state[a])


def by_noise(values: str) -> Callable[[int], dict[int, Made]]:
    """Noise for other parameters in each step."""
    return lambda step: {place: noise(place, step, values) for place in ((0, 1, 3), (3, 0), (0, 1, 2, 3, 4))[step % 3]}


@pytest.mark.parametrize("values", ["normal", "popcount"])
def test_noise_stands_for_gradients(values: str) -> None:
    compare(adamw, by_noise(values))


def test_gradients_may_point_uphill_and_be_narrow() -> None:
    compare(lambda params: adamw(params, maximize=True), by_noise("popcount"), "bfloat16")


def test_products_and_rows_stand_for_gradients() -> None:
    torch.manual_seed(1)
    outputs, inputs, whole = torch.randn(20, 33), torch.randn(20, 70), torch.randn(5, 3, 3, 3, dtype=torch.float64)
    made: dict[int, Made] = {0: Product(outputs, inputs), 1: noise(1, 0), 2: Rows(whole)}
    compare(adamw, lambda step: made)


def test_what_remembers_a_group_or_counts_for_itself_goes_on() -> None:
    compare(lambda params: rulec.torch.NAdam(params, lr=1e-2), by_noise("popcount"))


def test_hooks_and_schedulers_see_a_step() -> None:
    params, seen = params_of(), []
    opt = adamw(params)
    opt.register_step_pre_hook(lambda *_: seen.append(params[0].detach().clone()))
    opt.register_step_post_hook(lambda *_: seen.append(params[0].detach().clone()))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
    assert fused_step(opt, {params[0]: noise(0, 0)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's, where no step was taken
        scheduler.step()
    assert len(seen) == 2
    assert not torch.equal(seen[0], seen[1])
    assert not fused_step(opt, {torch.zeros(3): noise(0, 0)})
    assert len(seen) == 2


def test_a_hook_may_change_numbers_first() -> None:
    fused, plain = params_of(), params_of()
    one, other = adamw(fused), adamw(plain)
    one.register_step_pre_hook(lambda opt, *_: opt.param_groups[0].update(lr=0.25))
    other.param_groups[0]["lr"] = 0.25
    plain[0].grad = gradient(noise(0, 0), plain[0])
    assert fused_step(one, {fused[0]: noise(0, 0)})
    other.step()
    assert torch.equal(fused[0], plain[0])


def refused(opt: Any, param: Tensor) -> None:
    before = param.detach().clone()
    assert not fused_step(opt, {param: noise(0, 0)})
    assert torch.equal(param, before)
    assert not any(torch.is_tensor(v) and v.ndim and v.any() for v in opt.state.get(param, {}).values())


def test_what_cannot_be_made_so_is_left_alone() -> None:
    weight = torch.randn(8, 6).requires_grad_()
    refused(torch.optim.SGD([weight], lr=0.1), weight)
    refused(rulec.torch.optimizer("lamb")([weight]), weight)
    turned = torch.randn(6, 8).t().requires_grad_()
    refused(rulec.torch.AdamW([turned]), turned)
    complex_numbers = torch.randn(4, dtype=torch.complex64).requires_grad_()
    refused(rulec.torch.AdamW([complex_numbers]), complex_numbers)
