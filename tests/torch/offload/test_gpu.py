"""Steps on the host of parameters on a GPU: bits, bytes, and the order of streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import rulec.torch
from rulec.torch.offload.link import CudaLink
from rulec.torch.step.optimizer_step import OptimizerStep
from tests.gpu.training import DEVICE
from tests.torch.offload.runs import BUFFER, SHAPES, assert_same_bits, parameters, take_steps
from tests.torch.offload.test_host_step import RULES

pytestmark = pytest.mark.gpu

#: Cycles of a kernel that does nothing: some tenths of a second.
LONG = 1_000_000_000


def sleep(cycles: int) -> None:
    """Has the current stream do nothing for so many cycles."""
    cuda: Any = torch.cuda
    cuda._sleep(cycles)


def on_device(dtype: torch.dtype, shapes: Sequence[Sequence[int]] = SHAPES) -> list[Tensor]:
    """The parameters of `parameters` on the device."""
    return [param.detach().to(DEVICE).requires_grad_() for param in parameters(dtype, shapes)]


def here(tensors: Any) -> Any:
    """A tree of tensors in host memory."""
    if isinstance(tensors, Tensor):
        return tensors.detach().cpu()
    if isinstance(tensors, dict):
        return {key: here(value) for key, value in tensors.items()}
    return [here(value) for value in tensors] if isinstance(tensors, list | tuple) else tensors


def offloaded(rule: str, params: Sequence[Tensor], **words: Any) -> Any:
    """An optimizer whose states and steps lie on the host."""
    kind: Any = getattr(rulec.torch, rule)
    return kind(params, offload="step", **{"offload_buffer": BUFFER, **words})


def without_offload(rule: str, params: Sequence[Tensor]) -> Any:
    """The same optimizer of parameters on the CPU."""
    kind: Any = getattr(rulec.torch, rule)
    narrow = params[0].dtype in (torch.bfloat16, torch.float16)
    return kind(params, weights="master" if narrow else None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_bits_are_those_of_parameters_on_the_cpu(rule: str, dtype: torch.dtype) -> None:
    plain, moved = parameters(dtype), on_device(dtype)
    one, other = without_offload(rule, plain), offloaded(rule, moved)
    take_steps(one, plain, 4)
    take_steps(other, moved, 4)
    assert_same_bits(here(moved), here(plain))
    assert_same_bits(here(other.state_dict()["state"]), here(one.state_dict()["state"]))


def test_bits_of_pageable_memory() -> None:
    plain, moved = parameters(), on_device(torch.float32)
    take_steps(without_offload("AdamW", plain), plain, 3)
    take_steps(offloaded("AdamW", moved, offload_pinned=False), moved, 3)
    assert_same_bits(here(moved), here(plain))


@pytest.mark.parametrize("own_stream", [False, True])
def test_the_host_waits_for_gradients_and_the_device_for_weights(own_stream: bool) -> None:
    """Gradients follow from weights on a device that is always behind, and their memory is used again."""
    plain, moved = parameters(), on_device(torch.float32)
    one, other = without_offload("AdamW", plain), offloaded("AdamW", moved)
    # Sums and products in one order: a gradient is half of its weight, plus a number of the step.
    for number in range(6):
        for param in plain:
            param.grad = param.detach() * 0.5 + number
        one.step()
    streams: Any = torch.cuda
    stream = streams.Stream() if own_stream else streams.current_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for number in range(6):
            sleep(LONG // 50)
            for param in moved:
                param.grad = param.detach() * 0.5 + number
            other.step()
            other.zero_grad()
    torch.cuda.synchronize()
    assert_same_bits(here(moved), here(plain))


def test_gradients_in_another_memory_order() -> None:
    shape = (8, 6, 5, 4)
    plain, moved = parameters(shapes=[shape]), on_device(torch.float32, [shape])
    for params in (plain, moved):
        params[0] = params[0].detach().contiguous(memory_format=torch.channels_last).requires_grad_()
    one, other = without_offload("AdamW", plain), offloaded("AdamW", moved)
    for number in range(3):
        grad = torch.randn(shape, generator=torch.Generator().manual_seed(number))
        plain[0].grad, moved[0].grad = grad, grad.to(DEVICE)
        one.step()
        other.step()
    assert moved[0].is_contiguous(memory_format=torch.channels_last)
    assert_same_bits(here(moved), here(plain))


def blocks(tensors: Sequence[Tensor]) -> int:
    """The bytes that torch's allocator counts for tensors: multiples of 512."""
    return sum(-(-t.numel() * t.element_size() // 512) * 512 for t in tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_device_has_weights_and_gradients_and_nothing_else(dtype: torch.dtype) -> None:
    shapes = [(512, 300), (300,), (2000, 64), (64, 64)]
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocated_bytes.all.current"]
    params = on_device(dtype, shapes)
    optimizer = offloaded("AdamW", params, offload_buffer=1 << 16)
    take_steps(optimizer, params, 2)
    for number in range(2):
        for param in params:
            param.grad = torch.full_like(param, number)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        optimizer.step()
        stats = torch.cuda.memory_stats()
        grads = [param.grad for param in params if param.grad is not None]
        assert stats["allocated_bytes.all.current"] - before == blocks([*params, *grads])
        assert stats["allocated_bytes.all.peak"] == stats["allocated_bytes.all.current"]
    del grads
    optimizer.zero_grad()
    assert torch.cuda.memory_stats()["allocated_bytes.all.current"] - before == blocks(params)


@pytest.mark.parametrize("pinned", [True, False])
def test_buffers_are_pinned_and_states_lie_on_the_host(pinned: bool) -> None:
    params = on_device(torch.bfloat16)
    optimizer = offloaded("AdamW", params, offload_pinned=pinned)
    take_steps(optimizer, params, 1)
    machine: OptimizerStep = optimizer._machine
    assert machine.offload is not None
    (rings,) = machine.offload._rings.values()
    buffers = [*rings.gradients.buffers, *rings.weights.buffers]
    assert [buffer.memory.is_pinned() for buffer in buffers] == [pinned] * len(buffers)
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    assert {value.device.type for value in states} == {"cpu"}


def test_copies_of_both_directions_and_computing_go_on_beside_each_other() -> None:
    """Events alone say so: a copy up ends while the device computes, and while a copy down waits for that."""
    link = CudaLink(torch.device(DEVICE, torch.cuda.current_device()))
    host, device = link.host_memory(1 << 20), link.device_memory(1 << 20)
    other = torch.zeros(1 << 20, dtype=torch.uint8, device=DEVICE)
    host.fill_(7)
    torch.cuda.synchronize()
    sleep(LONG)
    computed: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    computed.record()
    down: Any = link.down([(link.host_memory(1 << 20), other)])
    link.up([(device, host)]).wait()
    assert not computed.query()
    assert not down._event.query()
    down.wait()
    assert computed.query()
    assert bool((device == 7).all())


def test_the_device_waits_for_a_copy_up() -> None:
    link = CudaLink(torch.device(DEVICE, torch.cuda.current_device()))
    host, device = link.host_memory(1 << 20), link.device_memory(1 << 20)
    host.fill_(7)
    device.zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(link._up):
        sleep(LONG)
    event: Any = link.up([(device, host)])
    link.hold(event)
    copy = device.clone()
    assert not event._event.query()
    assert bool((copy == 7).all())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_bits_on_two_devices() -> None:
    plain = parameters()
    moved = [param.detach().to(f"{DEVICE}:{number % 2}").requires_grad_() for number, param in enumerate(parameters())]
    take_steps(without_offload("AdamW", plain), plain, 3)
    take_steps(offloaded("AdamW", moved), moved, 3)
    assert_same_bits(here(moved), here(plain))
