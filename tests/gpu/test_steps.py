"""Steps of an optimizer on the device: beside torch's, from unaligned and new gradients, streams, devices, memory."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import rulec.torch
from rulec.errors import RulecError
from rulec.torch.fastpath import survey
from tests.gpu.training import DEVICE, SHAPES, assert_near, bits, check_no_waiting, give, gradients, parameters

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("maximize", [False, True])
def test_adamw_is_torchs_fused_one_for_twenty_steps(amsgrad: bool, maximize: bool) -> None:
    ours, theirs = parameters(), parameters()
    mine = rulec.torch.AdamW(ours, lr=1e-2, amsgrad=amsgrad, maximize=maximize)
    other = torch.optim.AdamW(theirs, lr=1e-2, amsgrad=amsgrad, maximize=maximize, fused=True)
    for step in range(20):
        for params in (ours, theirs):
            give(params, gradients(params, step))
        mine.step()
        other.step()
    # Each step rounds a parameter once, here and there: a unit in the last place apart for each.
    assert_near(ours, theirs, 20 * 2.0**-23)
    for name in ("exp_avg", "exp_avg_sq"):
        # Averages of gradients of about 1, which may cancel.
        states = [[each.state[p][name] for p in params] for each, params in ((mine, ours), (other, theirs))]
        assert_near(*states, 20 * 2.0**-23, least=1.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_width_parameters_with_wide_states(dtype: torch.dtype) -> None:
    """One step from the same numbers, held against the same step in float64 rounded once."""
    ours = parameters(dtype=dtype)
    wide = [p.detach().double().requires_grad_() for p in ours]
    grads = gradients(ours, 0)
    give(ours, grads)
    give(wide, [g.double() for g in grads])
    rulec.torch.AdamW(ours, lr=1e-2, state_dtype=torch.float32).step()
    torch.optim.AdamW(wide, lr=1e-2, foreach=True).step()
    assert_near(ours, [w.detach().to(dtype) for w in wide], torch.finfo(dtype).eps)


def test_a_step_has_the_same_bits_every_time_and_beside_other_tensors() -> None:
    found = []
    for shapes in (SHAPES, SHAPES, SHAPES[-1:]):
        params = parameters()[-len(shapes) :]
        optimizer = rulec.torch.optimizer("lamb")(params)
        for step in range(3):
            give(params, gradients(parameters(), step)[-len(shapes) :])
            optimizer.step()
        found.append(bits(params)[-1])
    assert found[0] == found[1] == found[2]


def test_unaligned_gradients_and_parameters_give_the_same_bits() -> None:
    def shifted(tensor: Tensor) -> Tensor:
        memory = torch.empty(tensor.numel() + 1, device=DEVICE)
        return memory[1:].view(tensor.shape).copy_(tensor.detach())

    ours, plain = [shifted(p).requires_grad_() for p in parameters()], parameters()
    mixed = parameters()
    optimizers = [rulec.torch.AdamW(params) for params in (ours, plain, mixed)]
    for step in range(4):
        give(ours, [shifted(g) for g in gradients(ours, step)])
        give(plain, gradients(plain, step))
        give(mixed, [shifted(g) if i % 2 == step % 2 else g for i, g in enumerate(gradients(mixed, step))])
        for optimizer in optimizers:
            optimizer.step()
    assert bits(ours) == bits(plain) == bits(mixed)


def test_gradients_that_are_missing_leave_their_parameters_alone() -> None:
    ours, theirs = parameters(), parameters()
    mine, other = rulec.torch.AdamW(ours), torch.optim.AdamW(theirs, fused=True)
    for step in range(4):
        for params in (ours, theirs):
            give(params, gradients(params, step))
            for param in params[step % 3 :: 3]:
                param.grad = None
        mine.step()
        other.step()
    assert_near(ours, theirs, 2.0**-21)


def test_a_step_runs_on_the_current_stream() -> None:
    """Gradients arrive late on a side stream: a step on any other stream would read them too early."""
    ours, plain = parameters(), parameters()
    mine, other = rulec.torch.AdamW(ours), rulec.torch.AdamW(plain)
    give(ours, [torch.zeros_like(p) for p in ours])
    give(plain, gradients(plain, 0))
    side = torch.cuda.Stream()
    late = gradients(ours, 0)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        for param, grad in zip(ours, late, strict=True):
            assert param.grad is not None
            param.grad.copy_(grad)
        mine.step()
    side.synchronize()
    other.step()
    assert bits(ours) == bits(plain)


@pytest.mark.parametrize("name", ["adamw", "lamb", "adafactor", "muon", "prodigy"])
def test_a_step_does_not_wait_for_the_device(name: str) -> None:
    params = parameters([(64, 48), (1000,)] if name != "muon" else [(64, 48), (48, 32)])
    optimizer = rulec.torch.optimizer(name)(params)
    for step in range(3):
        give(params, gradients(params, step))
        if step:
            with check_no_waiting():
                optimizer.step()
        else:
            optimizer.step()


@pytest.mark.parametrize("name", ["sgd", "adamw", "nadam"])
def test_a_thousand_tensors_are_one_launch(name: str) -> None:
    params = parameters([(100,)] * 1000)
    optimizer = rulec.torch.optimizer(name)(params)
    for step in range(2):
        give(params, gradients(params, step))
        optimizer.step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        optimizer.step()
        torch.cuda.synchronize()
    device = torch.autograd.DeviceType.CUDA
    # Without what torch writes there about the step itself.
    work = [e.name for e in seen.events() if e.device_type == device and "Optimizer.step" not in e.name]
    assert [name for name in work if not name.startswith("Memcpy")] == ["stage_0"]
    assert len(work) <= 2


def test_parameters_on_both_devices_in_one_optimizer() -> None:
    pytest.importorskip("numba")
    there, here = parameters(), [p.detach().cpu().requires_grad_() for p in parameters()]
    mixed = [p for pair in zip(parameters(), here, strict=True) for p in pair]
    both, alone = rulec.torch.AdamW(mixed), rulec.torch.AdamW(there)
    for step in range(3):
        grads = gradients(there, step)
        give(there, grads)
        give(mixed, [g for grad in grads for g in (grad.clone(), grad.cpu())])
        both.step()
        alone.step()
    assert bits(mixed[::2]) == bits(there)
    assert_near([p.to(DEVICE) for p in mixed[1::2]], there, 2.0**-21)


def test_versions_count_up_with_every_step() -> None:
    params = parameters()
    optimizer = rulec.torch.AdamW(params)
    give(params, gradients(params, 0))
    optimizer.step()
    before = [p._version for p in params]
    optimizer.step()
    assert all(p._version > version for p, version in zip(params, before, strict=True))


def test_what_autograd_saved_is_known_to_have_changed() -> None:
    param = parameters([(8, 8)])[0]
    x = torch.randn(8, 8, device=DEVICE, requires_grad=True)
    loss = (x @ param).square().sum()
    param.grad = torch.ones_like(param)
    rulec.torch.AdamW([param]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_too_little_memory_for_state_changes_nothing() -> None:
    shapes = [(1000,), (2**26,)]
    params = parameters(shapes)
    before = bits(params)
    give(params, gradients(params, 0))
    optimizer = rulec.torch.AdamW(params)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**27) / total)
    try:
        with pytest.raises(RulecError, match="memory"):
            optimizer.step()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert bits(params) == before
    assert not any(optimizer.state.get(p) for p in params)
    optimizer.step()
    fresh = parameters(shapes)
    give(fresh, gradients(fresh, 0))
    rulec.torch.AdamW(fresh).step()
    assert bits(params) == bits(fresh)


def test_tensors_in_main_memory_are_refused_by_name() -> None:
    param = torch.ones(3, requires_grad=True)
    param.grad = torch.ones(3)
    optimizer = rulec.torch.AdamW([param], backend="triton")
    with pytest.raises(RulecError, match="triton"):
        optimizer.step()
    assert torch.equal(param.detach(), torch.ones(3))


def test_a_checkpoint_goes_on_where_it_was() -> None:
    params = parameters()
    optimizer = rulec.torch.AdamW(params)
    for step in range(3):
        give(params, gradients(params, step))
        optimizer.step()
    saved, others = copy.deepcopy(optimizer.state_dict()), [p.detach().clone().requires_grad_() for p in params]
    other = rulec.torch.AdamW(others)
    other.load_state_dict(saved)
    for tensors, one in ((params, optimizer), (others, other)):
        give(tensors, gradients(tensors, 3))
        one.step()
    assert bits(params) == bits(others)


@pytest.mark.parametrize("moves", ["gradient", "parameter"])
def test_surveyed_steps_are_those_that_ask_each_tensor(moves: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty tensors, gradients at new addresses in every step, and once a parameter in other memory."""
    shapes = [(7,), (33, 5)] * 10

    def stepped(surveyed: bool) -> list[bytes]:
        params = [torch.nn.Parameter(p) for p in _seeded(shapes, 0)]
        optimizer = rulec.torch.AdamW(params)
        for step in range(8):
            give(params, _seeded(shapes, 1 + step))
            if moves == "parameter" and step == 5:
                params[3].data = params[3].data.clone()
            optimizer.step()
        assert optimizer._machine is not None
        assert (optimizer._machine.plans.survey is not None) == surveyed
        assert (optimizer._machine.repeat is not None) == surveyed
        return bits(params)

    wanted = stepped(surveyed=True)
    monkeypatch.setattr(survey, "exports", lambda: None)
    assert stepped(surveyed=False) == wanted


def _seeded(shapes: list[tuple[int, ...]], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(DEVICE) for shape in shapes]
