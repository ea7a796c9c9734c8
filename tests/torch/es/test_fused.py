"""Steps whose gradients are made inside the update, beside steps with the same gradients in `.grad`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import rulec.torch
from rulec.backend import registry
from rulec.backend.capabilities import Noise, Product
from rulec.errors import BackendUnsupported, PartialUpdate
from rulec.es.streams import short_weights
from rulec.runtime.buckets.launch import Launch
from rulec.torch.es.noise.base import Source
from rulec.torch.es.update import fused_step
from rulec.torch.tensors.tensors import DTYPES
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


def muon(params: list[Tensor]) -> Any:
    """Of matrices, and AdamW of all else."""
    return rulec.torch.optimizer("muon")([{"params": params, "tags": []}])


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


def gradient(made: Source, like: Tensor) -> Tensor:
    """The gradient that stands for what makes it."""
    if isinstance(made, Rows):
        return made.whole.to(like.dtype)
    if isinstance(made, Product):
        return (made.outputs.t() @ made.inputs).view(like.shape).to(like.dtype)
    assert isinstance(made, Noise)
    found = torch.empty_like(like)
    fill_noise(found, made)
    return found


def check_same_bits(
    make: Make, given: Callable[[int], dict[int, Source]], dtype: str = "float32", steps: int = 3,
    by_gradient: Collection[int] = (),
) -> None:  # fmt: skip
    """That both ways have the same bits: parameters, states and counts. The last parameter never has a gradient but in
    the second step, the third an ordinary one where none is made. Those `by_gradient` cannot make theirs."""
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
        found = stepped(one, {fused[place]: source for place, source in made.items()})
        other.step()
        assert found == {fused[place] for place in made if place not in by_gradient}
        assert all((fused[i].grad is None) == (i not in by_gradient) for i in made)
        assert all(fused[i]._version > versions[i] for i in made)
    check_same(one, fused, other, plain)


def stepped(opt: Any, given: dict[Tensor, Source]) -> set[Tensor]:
    """What of these was updated without a gradient."""
    return fused_step(opt, given, lambda param: gradient(given[param], param))


def check_same(one: Any, fused: list[Tensor], other: Any, plain: list[Tensor]) -> None:
    """That parameters and states have the same bits."""
    for a, b in zip(fused, plain, strict=True):
        assert torch.equal(a, b)
        assert one.state[a].keys() == other.state[b].keys()
        assert all(torch.equal(one.state[a][k], other.state[b][k]) for k in one.state[a])


def by_noise(values: str) -> Callable[[int], dict[int, Source]]:
    """Noise for other parameters in each step."""
    return lambda step: {place: noise(place, step, values) for place in ((0, 1, 3), (3, 0), (0, 1, 2, 3, 4))[step % 3]}


@pytest.mark.parametrize("values", ["normal", "popcount"])
def test_noise_stands_for_gradients(values: str) -> None:
    check_same_bits(adamw, by_noise(values))


def test_gradients_may_point_uphill_and_be_narrow() -> None:
    check_same_bits(lambda params: adamw(params, maximize=True), by_noise("popcount"), "bfloat16")


def test_products_and_rows_stand_for_gradients() -> None:
    torch.manual_seed(1)
    outputs, inputs, whole = torch.randn(20, 33), torch.randn(20, 70), torch.randn(5, 3, 3, 3, dtype=torch.float64)
    made: dict[int, Source] = {0: Product(outputs, inputs), 1: noise(1, 0), 2: Rows(whole)}
    check_same_bits(adamw, lambda step: made)


def test_what_remembers_a_group_or_counts_for_itself_goes_on() -> None:
    check_same_bits(lambda params: rulec.torch.NAdam(params, lr=1e-2), by_noise("popcount"))


def test_a_gradient_that_is_not_read_is_none_to_be_made_in_the_update() -> None:
    still = rulec.parse("name: Still\nstep: p = 0.5*p\n")
    check_same_bits(lambda params: rulec.torch.optimizer(still)(params), by_noise("popcount"), by_gradient=range(5))


def test_hooks_and_schedulers_see_a_step() -> None:
    params, seen = params_of(), []
    opt = adamw(params)
    opt.register_step_pre_hook(lambda *_: seen.append(params[0].detach().clone()))
    opt.register_step_post_hook(lambda *_: seen.append(params[0].detach().clone()))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
    assert stepped(opt, {params[0]: noise(0, 0)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's, where no step was taken
        scheduler.step()
    assert len(seen) == 2
    assert not torch.equal(seen[0], seen[1])


def test_a_hook_may_change_numbers_first() -> None:
    fused, plain = params_of(), params_of()
    one, other = adamw(fused), adamw(plain)
    one.register_step_pre_hook(lambda opt, *_: opt.param_groups[0].update(lr=0.25))
    other.param_groups[0]["lr"] = 0.25
    plain[0].grad = gradient(noise(0, 0), plain[0])
    assert stepped(one, {fused[0]: noise(0, 0)})
    other.step()
    assert torch.equal(fused[0], plain[0])


def check_refused(make: Make, params: list[Tensor], places: Collection[int] = (0,)) -> None:
    """That the parameters at these places are updated by gradients, and all others without, in one step each time."""
    twins = [param.detach().clone().requires_grad_() for param in params]
    one, other = make(params), make(twins)
    for step in range(2):
        for param in (*params, *twins):
            param.grad = None
        grads = {p: torch.full_like(p, 0.5 + step) for p in params}
        given: dict[Tensor, Source] = {p: noise(i, step) for i, p in enumerate(params)}
        found = fused_step(one, given, grads.__getitem__)
        for place, (param, twin) in enumerate(zip(params, twins, strict=True)):
            twin.grad = grads[param] if place in places else gradient(given[param], twin)
        other.step()
        assert found == {param for place, param in enumerate(params) if place not in places}
    check_same(one, params, other, twins)


def test_what_cannot_be_made_so_has_gradients() -> None:
    weight = torch.randn(8, 6).requires_grad_()
    check_refused(lambda params: torch.optim.SGD(params, lr=0.1), [weight])
    check_refused(rulec.torch.optimizer("lamb"), [weight])
    turned = torch.randn(6, 8).t().requires_grad_()
    complex_numbers = torch.randn(4, dtype=torch.complex64).requires_grad_()
    check_refused(rulec.torch.AdamW, [turned, weight, complex_numbers], (0, 2))


def test_matrices_of_muon_have_gradients_and_the_others_none() -> None:
    check_same_bits(muon, by_noise("popcount"), by_gradient=(0, 4))
    made: dict[int, Source] = {
        0: Product(torch.ones(2, 33), torch.ones(2, 70)),
        2: Product(torch.ones(1, 5), torch.ones(1, 27)),
    }
    check_same_bits(muon, lambda step: made, by_gradient=(0,))


def test_a_bucket_without_a_kernel_has_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    kind: Any = type(registry.get("cpu"))
    emit = kind.emit_estimate

    def narrow(backend: Any, program: Any, layout: Any, values: Any) -> Any:
        if layout.dtype("p") == "float32":
            raise BackendUnsupported("cpu", "noise in float32", program.name)
        return emit(backend, program, layout, values)

    monkeypatch.setattr(kind, "emit_estimate", narrow)
    params = [torch.randn(40).to(dtype).requires_grad_() for dtype in (torch.float32, torch.bfloat16)]
    check_refused(rulec.torch.AdamW, params)


def test_hooks_see_the_gradients_that_there_are() -> None:
    params = params_of()
    opt = muon(params)
    seen: list[set[int]] = []
    opt.register_step_pre_hook(lambda *_: seen.append({i for i, p in enumerate(params) if p.grad is not None}))
    assert stepped(opt, {p: noise(i, 0) for i, p in enumerate(params)}) == {*params[1:4]}
    assert seen == [{0, 4}]


@pytest.mark.parametrize("others", [0, 1])
def test_a_hook_may_leave_no_way_but_a_gradient(others: int) -> None:
    """The memory order of a weight is another when its update comes."""
    params, twins = ([torch.ones(4, 6).requires_grad_() for _ in range(1 + others)] for _ in "ab")
    one, other = rulec.torch.AdamW(params), rulec.torch.AdamW(twins)

    def turn(*_: Any) -> None:
        params[0].data = params[0].data.t().contiguous().t()

    one.register_step_pre_hook(turn)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(one, 0.5)
    given = {p: noise(i, 0) for i, p in enumerate(params)}
    found = fused_step(one, given, lambda param: gradient(given[param], twins[0]))
    for param, twin in zip(params, twins, strict=True):
        twin.grad = gradient(given[param], twin)
    other.step()
    assert found == {*params[1:]}
    check_same(one, params, other, twins)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's, where no step was taken
        scheduler.step()


def test_a_gradient_that_cannot_be_made_writes_nothing() -> None:
    params = params_of()
    before = [p.detach().clone() for p in params]
    opt = muon(params)

    def broken(param: Tensor) -> Tensor:
        raise MemoryError("no room")

    with pytest.raises(MemoryError, match="no room"):
        fused_step(opt, {p: noise(i, 0) for i, p in enumerate(params)}, broken)
    assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))
    assert not any(torch.any(value) for p in params for value in opt.state.get(p, {}).values())


def test_a_kernel_that_fails_after_gradients_says_what_was_updated(monkeypatch: pytest.MonkeyPatch) -> None:
    params = params_of()
    before = [p.detach().clone() for p in params]
    opt = muon(params)
    kernel = Launch.kernel

    def broken(launch: Launch, stage: int, rows: Any, fired: Any, grads: Any, scratch: Any) -> Any:
        if isinstance(grads[0], Noise):
            raise RuntimeError("no device")
        return kernel(launch, stage, rows, fired, grads, scratch)

    monkeypatch.setattr(Launch, "kernel", broken)
    with pytest.raises(PartialUpdate, match=r"failed after parameter 0, parameter 4 and others .*: no device"):
        stepped(opt, {p: noise(i, 0) for i, p in enumerate(params)})
    assert [torch.equal(a, b) for a, b in zip(params, before, strict=True)] == [False, True, True, True, False]
    assert not any(torch.any(value) for p in params[1:4] for value in opt.state.get(p, {}).values())
