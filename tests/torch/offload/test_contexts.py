"""Steps on the host in the caller's own modes, the memory they hold on to, and buffers that cannot be had."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import rulec.torch
from rulec.errors import TensorError
from rulec.torch.offload import host_step
from rulec.torch.offload.link import CudaLink, HostLink, _in_order_of
from tests.torch.offload.runs import BUFFER, assert_same_bits, parameters, take_steps
from tests.torch.offload.scripted import Device, ScriptedCuda

#: The modes of a caller, by name.
MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rule", ["AdamW", "LAMB", "SOAP", "ScheduleFreeAdamW"])
def test_steps_in_a_mode_have_the_bits_of_steps_outside(rule: str, mode: str) -> None:
    kind: Any = getattr(rulec.torch, rule)
    plain, moved = parameters(torch.bfloat16), parameters(torch.bfloat16)
    one, other = kind(plain, weights="master"), kind(moved, offload="step", offload_buffer=BUFFER)
    take_steps(one, plain, 1)
    for param, like in zip(moved, plain, strict=True):
        param.grad = None if like.grad is None else like.grad.clone()
    with MODES[mode]():
        other.step()
        for change in ("eval", "train") if rule.startswith("ScheduleFree") else ():
            getattr(other, change)()
            getattr(one, change)()
    take_steps(one, plain, 2, 1)
    take_steps(other, moved, 2, 1)
    assert_same_bits(moved, plain)


def test_no_gradient_is_held_after_a_step() -> None:
    """Gradients of groups are free, and so is a gradient that moved in pieces."""
    params = parameters()
    optimizer: Any = rulec.torch.AdamW(params, offload="step", offload_buffer=BUFFER)  # type: ignore[attr-defined]
    take_steps(optimizer, params, 2)
    held = [weakref.ref(param.grad.untyped_storage()) for param in params if param.grad is not None]
    assert len(held) == len(params)
    optimizer.zero_grad()
    assert [ref() for ref in held if ref() is not None] == []


@pytest.mark.skipif(
    not hasattr(Tensor, "grad_dtype"), reason="this torch has gradients of their parameter's dtype only"
)
def test_buffers_that_cannot_be_had_change_nothing() -> None:
    """A gradient of a wider dtype needs larger ones."""
    params = parameters(torch.bfloat16, [(64, 16), (16,)])
    optimizer: Any = rulec.torch.AdamW(params, offload="step")  # type: ignore[attr-defined]
    take_steps(optimizer, params, 1)
    before = [param.detach().clone() for param in params]
    grads = [param.grad for param in params]
    for param in params:
        param.grad = None
        param.grad_dtype = torch.float32
        param.grad = torch.ones_like(param, dtype=torch.float32)
    with mock.patch.object(HostLink, "host_memory", side_effect=TensorError("no memory: nothing was changed")):
        for _ in range(2):
            with pytest.raises(TensorError, match="no memory"):
                optimizer.step()
    assert_same_bits([*params], before)
    for param, grad in zip(params, grads, strict=True):
        param.grad = None
        param.grad_dtype = torch.bfloat16
        param.grad = grad
    optimizer.step()


@contextmanager
def scripted_links() -> Iterator[Device]:
    """A block in which links are those of a scripted device with the streams and events of CUDA."""
    cuda = ScriptedCuda(Device())
    with cuda.planted(), mock.patch.object(host_step, "link_of", CudaLink):
        yield cuda.script


@pytest.mark.skipif(torch.cuda.is_available(), reason="pinned memory can be had")
def test_pinned_memory_that_cannot_be_had_is_said_and_pageable_memory_does() -> None:
    """torch has no pinned memory on a machine without a device."""
    params, others = parameters(torch.bfloat16, [(64, 16), (16,)]), parameters(torch.bfloat16, [(64, 16), (16,)])
    with scripted_links():
        optimizer: Any = rulec.torch.AdamW(params, offload="step")
        with pytest.raises(TensorError) as error:
            take_steps(optimizer, params, 1)
    assert str(error.value).startswith("2 KiB of pinned host memory cannot be had for cpu (")
    assert "nothing was changed; raise the limit of locked memory (ulimit -l)" in str(error.value)
    assert_same_bits([*params], [*others])
    with scripted_links() as device:
        take_steps(rulec.torch.AdamW(params, offload="step", offload_pinned=False), params, 1)
        device.drain()
    take_steps(rulec.torch.AdamW(others, weights="master"), others, 1)
    assert_same_bits([*params], [*others])


def test_a_tensor_of_the_device_is_put_in_the_order_of_host_memory_first() -> None:
    """torch would copy it by way of memory that is not pinned."""
    tensor = torch.arange(24.0).reshape(2, 3, 4)
    into = torch.empty(4, 3, 2).permute(2, 1, 0)
    ordered: Tensor = _in_order_of(into, tensor)
    assert ordered.stride() == into.stride()
    assert torch.equal(ordered, tensor)
    assert _in_order_of(torch.empty(2, 3, 4), into) is into
    assert _in_order_of(into, ordered) is ordered
