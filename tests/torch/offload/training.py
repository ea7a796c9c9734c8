"""A training on a scripted device, beside the same one without offload."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import rulec.torch
from rulec.compiler.layout import reads_parameter
from rulec.language.rule import Rule
from rulec.torch.offload import host_step
from rulec.torch.offload.link import CudaLink, Link
from rulec.torch.offload.ring import Buffer
from rulec.torch.step.optimizer_step import OptimizerStep
from tests.torch.offload.runs import assert_same_bits, parameters
from tests.torch.offload.scripted import Choose, Device, ScriptedCuda, ScriptedLink, chosen, latest


class Training:
    """Steps of a rule on a scripted device with offload, and here without.

    A gradient follows from the number of the step and from its parameter, so a step that reads a weight too early is
    seen in the next. `grad_dtypes` are those of gradients, where they are not the parameters'; the parameters with the
    indices in `missing` have none. With `cuda` the link is `CudaLink`, on streams and events of the scripted device.
    """

    def __init__(
        self, rule: Rule | str, shapes: Sequence[Sequence[int]], dtype: torch.dtype, buffer: int, steps: int = 2,
        cuda: bool = False, grad_dtypes: Sequence[torch.dtype] = (), missing: Sequence[int] = (), **words: Any,
    ) -> None:  # fmt: skip
        self.device = Device()
        if grad_dtypes and not hasattr(Tensor, "grad_dtype"):
            pytest.skip("this torch has gradients of their parameter's dtype only")
        self.params, self.others = parameters(dtype, shapes), parameters(dtype, shapes)
        for number, (param, other) in enumerate(zip(self.params, self.others, strict=True)):
            for each in (param, other) if number not in missing else ():
                if grad_dtypes:
                    each.grad_dtype = grad_dtypes[number]
                each.grad = torch.zeros_like(each, dtype=grad_dtypes[number] if grad_dtypes else dtype)
        kind = rulec.torch.optimizer(rule)
        self._cuda = ScriptedCuda(self.device)
        with self._cuda.planted():
            here = torch.device("cpu")
            self._link: Link = CudaLink(here, pinned=False) if cuda else ScriptedLink(self.device)
        with self.linked():
            self.optimizer: Any = kind(self.params, offload="step", offload_buffer=buffer, **words)
        self.other: Any = kind(self.others, **{"weights": _weights(dtype), **words})
        self.steps = 0
        self.run(latest, steps)
        self.check_states()

    @property
    def machine(self) -> OptimizerStep:
        """The machine of the optimizer with offload."""
        machine: OptimizerStep = self.optimizer._machine
        return machine

    @property
    def buffers(self) -> list[Buffer]:
        """All transfer buffers."""
        assert self.machine.offload is not None
        of_devices = self.machine.offload._rings.values()
        return [buffer for rings in of_devices for ring in (rings.gradients, rings.weights) for buffer in ring.buffers]

    @property
    def reads(self) -> bool:
        """Whether the rule's kernels read the weights."""
        buckets = [bucket for engine in self.machine.engines for bucket in engine.buckets.values()]
        return any(reads_parameter(bucket.program) for bucket in buckets)

    def take(self, count: int) -> None:
        """Takes steps on the scripted device; the host waits for nothing between them."""
        for number in range(self.steps, self.steps + count):
            grads = [param.grad.data for param in self.params if param.grad is not None]
            self.device.compute(self.params, grads, lambda number=number: write_gradients(self.params, number))  # type: ignore[misc]
            with self.linked():
                self.optimizer.step()

    @contextmanager
    def linked(self) -> Iterator[None]:
        """A block where new machines have the link of the scripted device."""
        with self._cuda.planted(), mock.patch.object(host_step, "link_of", return_value=self._link):
            yield

    def take_other(self, count: int) -> None:
        """Takes the same steps without offload."""
        for number in range(self.steps, self.steps + count):
            write_gradients(self.others, number)
            self.other.step()
        self.steps += count

    def run(self, choose: Choose, count: int) -> None:
        """Takes steps in an order of choice, and compares the weights."""
        with chosen(self.device, choose):
            self.take(count)
        self.take_other(count)
        self.check()

    def check(self) -> None:
        """Asserts that weights have the bits of the run without offload."""
        assert_same_bits(self.params, self.others)

    def check_states(self) -> None:
        """Asserts that states have the bits of the run without offload."""
        assert_same_bits([*self.optimizer.state.values()], [*self.other.state.values()])


def _weights(dtype: torch.dtype) -> str | None:
    """The weights that an offload has where none are asked for."""
    return "master" if dtype in (torch.bfloat16, torch.float16) else None


def write_gradients(params: Sequence[Tensor], number: int) -> None:
    """Writes the gradients of a step."""
    generator = torch.Generator().manual_seed(number)
    for param in params:
        noise = torch.randn(param.shape, generator=generator)
        if param.grad is not None:
            param.grad.data.copy_(noise + 0.5 * param.detach().float())
