"""`offload="states"` on a scripted device: the orders in which copies and kernels end, and planted faults.

Kernels are work of the stream that computes: they read and write transfer buffers when the order lets them.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

import rulec.torch
from rulec.backend.protocol import Kernel, Rows, Written
from rulec.compiler.ir import Program
from rulec.compiler.layout import scale_name
from rulec.runtime.buckets import bucket
from rulec.torch.offload import states
from rulec.torch.offload.device_ring import BufferOwner, DeviceRing
from rulec.torch.offload.program_states import arrays_of_stage
from rulec.torch.offload.state_pieces import StatePieceCall
from rulec.torch.offload.states import StreamedStates
from tests.torch.offload.runs import assert_same_bits, parameters
from tests.torch.offload.scripted import Choose, Device, Race, ScriptedLink, chosen, latest, orders
from tests.torch.offload.test_faults import plant
from tests.torch.offload.training import write_gradients

CLIPPED = "clip_by_global_norm >> adamw"

F32, BF16 = torch.float32, torch.bfloat16


class ScriptedKernel:
    """A kernel whose calls are work of a scripted device; the host waits for it where a stage reduces."""

    def __init__(self, kernel: Kernel, program: Program, device: Device) -> None:
        self._kernel, self._program, self._device = kernel, program, device

    def bind(self, params: Sequence[Tensor], states: Sequence[dict[str, Tensor]], *views: Any) -> Any:
        """The call over these tensors."""
        call = self._kernel.bind(params, states, *views)

        def ask(
            stage: int, moving: Sequence[Tensor], rows: Rows, scratch: Any = None, *, tensors: Any = None,
            stream: Any = None,
        ) -> Written:  # fmt: skip
            rows = replace(rows, table=rows.table.copy(), index=rows.index.copy())
            of_stage = self._program.stages[stage]
            stored = {name for store in of_stage.stores for name in (store.buffer, scale_name(store.buffer))}
            loaded = {name for each in arrays_of_stage(self._program, stage) for name in (each, scale_name(each))}
            arrays = [
                (name, array)
                for i in (range(len(params)) if tensors is None else tensors)
                for name, array in (("p", params[i]), *states[i].items())
            ]
            reduced: dict[str, Any] = {}
            work = self._device.compute(
                [*moving, *(array for name, array in arrays if name in loaded - stored)], [],
                lambda: reduced.update(call(stage, moving, rows, scratch, tensors=tensors).reduced),
                both=[array for name, array in arrays if name in stored],
            )  # fmt: skip
            if of_stage.reduces:
                self._device.wait((work,))
            return Written(params, states, reduced)

        return ask


@dataclass(frozen=True)
class Case:
    """A rule, and one tensor for each of `sizes`, of which the states of one or a few fill a buffer.

    The tensors with the indices in `missing` have states, and no gradient.
    """

    rule: str
    sizes: Sequence[int]
    buffer: int = 128
    dtype: torch.dtype = F32
    steps: int = 1
    missing: tuple[int, ...] = ()


class Training:
    """Steps on a scripted device whose states stream through it, and the same steps here.

    A gradient follows from the number of the step and from its parameter.
    """

    def __init__(self, case: Case) -> None:
        self.device, self.steps = Device(), 0
        self.device.reads_ahead = False
        shapes = [(size,) for size in case.sizes]
        self.params, self.others = parameters(case.dtype, shapes), parameters(case.dtype, shapes)
        for param in (*self.params, *self.others):
            param.grad = torch.zeros_like(param)
        kind = rulec.torch.optimizer(case.rule)
        self._link = ScriptedLink(self.device)
        self.optimizer: Any = kind(self.params, offload="states", offload_buffer=case.buffer)
        self.other: Any = kind(self.others)
        self.run(latest, 2)
        for place in case.missing:
            self.params[place].grad = self.others[place].grad = None

    @contextmanager
    def scripted(self) -> Iterator[None]:
        """A block in which new machines have the link of the scripted device, and new kernels are its work."""
        made = bucket.kernel_of

        def kernel_of(backend: Any, program: Program, *arguments: Any) -> tuple[str, Any]:
            source, kernel = made(backend, program, *arguments)
            return source, ScriptedKernel(kernel, program, self.device)

        with (
            mock.patch.object(bucket, "kernel_of", kernel_of),
            mock.patch.object(states, "link_of", return_value=self._link),
        ):
            yield

    def run(self, choose: Choose, count: int, computed: bool = False) -> None:
        """Takes steps in an order of choice, and compares weights and states.

        The device has `computed` the gradients before a step, or is behind.
        """
        numbers = range(self.steps, self.steps + count)
        with chosen(self.device, choose), self.scripted():
            for number in numbers:
                grads = [param.grad for param in self.params if param.grad is not None]
                self.device.compute(self.params, grads, lambda number=number: write_gradients(self.params, number))  # type: ignore[misc]
                if computed:
                    self.device.drain()
                self.optimizer.step()
            measured = copy.deepcopy([*self.optimizer.state.values()])  # before all work has ended
        for number in numbers:
            write_gradients(self.others, number)
            self.other.step()
        self.steps += count
        assert_same_bits(self.params, self.others)
        assert_same_bits(measured, [*self.other.state.values()])


#: Groups of one tensor and of several, two stages, and states in pieces.
SMALL = {
    "two groups": Case("lion", (8, 8), buffer=64),
    "two pieces": Case("lion", (128,), buffer=256),
    "groups of several": Case("lion", (8,) * 4, buffer=128),
    "stages": Case(CLIPPED, (8, 8)),
}

#: More groups than buffers, states that two stages use, and pieces between groups.
LARGE = {
    "five groups": Case("lion", (8,) * 5, buffer=64),
    "two stages of five groups": Case(CLIPPED, (8,) * 5),
    "states in both stages": Case("prodigy", (8,) * 5, buffer=256),
    "five pieces": Case("lion", (320,), buffer=256),
    "pieces between groups": Case("adamw", (8, 128, 8, 128, 8), buffer=512),
    "two steps": Case("adamw", (8,) * 4, steps=2),
    "two of one buffer": Case("lion", (8,) * 4, buffer=64, missing=(1, 2)),
}


def find_orders(case: Case) -> int:
    """Runs every order of a case, each with the bits of the plain run; their number."""
    training = Training(case)
    return orders(lambda choose: training.run(choose, case.steps, computed=True))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if "two" not in name else []) for name in SMALL]
)
def test_every_order_has_the_bits_of_the_step_without_offload(name: str) -> None:
    assert find_orders(SMALL[name]) > 1000


def check_random_orders(case: Case, count: int) -> None:
    """Asserts that random orders of a case have the bits of the plain run, on a device that may be behind."""
    training = Training(case)
    for seed in range(count):
        training.run(random.Random(seed).randrange, case.steps)


@pytest.mark.parametrize("name", LARGE)
def test_random_orders_have_the_bits_of_the_step_without_offload(name: str) -> None:
    check_random_orders(LARGE[name], 20)


class Fault(NamedTuple):
    """A text of a method, the text in its place, and the case in which some order is wrong."""

    owner: type
    method: str
    old: str
    new: str
    case: str = "five groups"


FAULTS = {
    "a kernel that does not wait for the copy up": Fault(BufferOwner, "hold", "link.hold(event)", "pass"),
    "a copy up that does not wait for the copy down": Fault(BufferOwner, "fetch", "after=self.free", "after=None"),
    "an owner that does not wait for the one before": Fault(
        DeviceRing, "take", "owner.free = buffer.event", "owner.free = None"
    ),
    "a buffer that is free before its copy down": Fault(
        DeviceRing, "give_back", "self.release(turn, self.link.down(pairs))",
        "self.link.down(pairs), self.release(turn)",
    ),
    "a step that does not wait for its states": Fault(DeviceRing, "close", "self.wait()", "pass"),
    "a copy into the buffer in use": Fault(
        StreamedStates, "_fetch", "owner is None or not owner.used", "True", "two of one buffer"
    ),
    "all groups in one buffer": Fault(StreamedStates, "_view", "of(group.number)", "of(0)"),
    "states that are not copied down": Fault(
        StreamedStates, "take_back", "if launch.wrote else ()", "if False else ()"
    ),
    "a piece that does not wait for the copy up": Fault(
        StatePieceCall, "__call__", "owner.hold(self._ring.link)", "pass", "five pieces"
    ),
    "pieces that claim one buffer": Fault(
        StatePieceCall, "_fetch", "self._ring.take(self._turn + k, owner)", "self._ring.take(self._turn, owner)",
        "five pieces",
    ),
    "pieces that give back another buffer": Fault(
        StatePieceCall, "__call__", "self._ring.give_back(self._turn + k, owner",
        "self._ring.give_back(self._turn + k + 1, owner", "five pieces",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_some_order_finds_a_fault(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    *edit, case = FAULTS[name]
    plant(monkeypatch, *edit)
    with pytest.raises((Race, AssertionError)):
        check_random_orders(LARGE[case], 20)
