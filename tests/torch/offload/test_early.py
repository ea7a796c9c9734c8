"""Stages that run on the host while other gradients are still to come: their order, and where they may not be used."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import rulec
import rulec.torch
from rulec.errors import PartialUpdate, RulecError
from rulec.runtime.buckets.launch import Launch
from rulec.torch import EagerUpdate
from rulec.torch.eager import on_host
from rulec.torch.offload import host_step
from rulec.torch.offload.link import Event, Pairs
from tests.torch.offload.runs import assert_same_bits
from tests.torch.offload.scripted import Device, ScriptedLink

CLIPPED = "clip_by_global_norm >> adamw"

#: Rules with a state that a step without early stages writes before its first value of the whole model.
WRITING = ["nsgdm", "prodigy", "clip_by_global_norm >> prodigy"]

#: A rule with a branch that is decided before the step, and other reductions over the model on each arm.
BRANCHED = """
name: Branched
hyper: {lr: 0.01}
state: {m: 0}
step: |
  if t > 3:
    h = g/(1 + norm(g, per="model"))
  else:
    h = g/(3 + norm(2*g, per="model"))
  m = 0.9*m + h
  p = p - lr*m
"""

RULES = [
    CLIPPED, "clip_by_global_norm >> lamb", "dog", "dadapt_adam", "skip_large >> adamw", "avagrad", *WRITING, BRANCHED,
]  # fmt: skip

BF16, F32 = torch.bfloat16, torch.float32


def title_of(rule: Any) -> str:
    """The first line of a rule's text, or its name."""
    return str(rule).strip().split("\n")[0]


def layers(dtype: torch.dtype, bias: bool) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        return nn.Sequential(*[nn.Linear(16, 16, bias=bias) for _ in range(5)]).to(dtype)


def loss(net: nn.Module, number: int) -> Tensor:
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(number))
    value: Tensor = net(x.to(next(net.parameters()).dtype)).float().square().mean()
    return value


class Scripted:
    """A training inside the backward pass over links of a scripted device, and the same without offload.

    Each matrix is a transfer group. `rule` is a name or the text of a rule. `log` has the events in their order:
    gradients that arrive, stages of kernels, and requests of copies up, each with the number of its layer. `bytes`
    counts the bytes over the link, by direction.
    """

    def __init__(self, rule: str, dtype: torch.dtype, bias: bool = False, **keywords: Any) -> None:
        made = rulec.parse(rule) if "\n" in rule else rulec.load(rule)
        self.device, self.log, self.bytes = Device(), list[tuple[str, int]](), {"down": 0, "up": 0}
        self.net, self.twin = layers(dtype, bias), layers(dtype, bias)
        buffer = 256 * dtype.itemsize
        for number, layer in enumerate(self.net):
            hook: Any = layer.weight.register_post_accumulate_grad_hook  # type: ignore[union-attr]
            hook(lambda param, number=number: self.log.append(("gradient", number)))
        with self.linked():
            params = [*self.net.named_parameters()]
            self.opt: Any = EagerUpdate(params, made, offload="step", offload_buffer=buffer, **keywords)
        weights = "master" if dtype == BF16 else None
        watched = {key: keywords[key] for key in ("watch", "watch_every") if key in keywords}
        self.other: Any = rulec.torch.optimizer(made)(self.twin.named_parameters(), weights=weights, **watched)
        #: The numbers of copies up that had not ended at each last stage.
        self.copying: list[int] = []

    @contextmanager
    def linked(self) -> Iterator[None]:
        """A block in which links are those of the device, and the log is written."""
        made, kernel = self, Launch.kernel

        class Logged(ScriptedLink):
            def down(self, pairs: Pairs) -> Event:
                made.bytes["down"] += sum(into.nbytes for into, _ in pairs)
                return super().down(pairs)

            def up(self, pairs: Pairs, after: object = None) -> Event:
                made.log += [("up", made.layer_of(into)) for into, _ in pairs]
                made.bytes["up"] += sum(into.nbytes for into, _ in pairs)
                return super().up(pairs, after)

        def logged(launch: Launch, stage: int, *arguments: Any) -> Any:
            self.log += [(f"stage {stage}", int(tensor.name[0])) for tensor in launch.part.tensors]
            if stage == len(launch.version.program.stages) - 1:
                self.copying.append(sum("(up)" in work for work in self.device.in_flight))
            return kernel(launch, stage, *arguments)

        def link_of(device: torch.device, pinned: bool = True) -> ScriptedLink:
            return Logged(self.device)

        with (
            mock.patch.object(on_host, "link_of", link_of), mock.patch.object(host_step, "link_of", link_of),
            mock.patch.object(Launch, "kernel", logged),
        ):  # fmt: skip
            yield

    def layer_of(self, tensor: Tensor) -> int:
        """The number of the layer of a parameter."""
        pointers = {param.data_ptr(): int(name[0]) for name, param in self.net.named_parameters()}
        return pointers[tensor.data_ptr()]

    def backward(self, number: int, segments: int = 1, last: bool = True) -> None:
        """Runs a backward pass; the device has all weights before it."""
        with self.linked():
            self.device.wait(self.device.computing.content)
            with self.opt.backward(last_microbatch=last):
                for k in range(segments):
                    loss(self.net, number + k).backward()

    def step(self) -> None:
        """Ends the step."""
        with self.linked():
            self.opt.step()

    def steps(self, count: int, first: int = 0) -> None:
        """Takes steps."""
        for number in range(first, first + count):
            self.backward(number)
            self.step()

    def check(self, numbers: list[list[int]]) -> None:
        """Asserts that steps of these micro-batches have the bits of those without offload."""
        self.device.drain()
        for batches in numbers:
            self.other.zero_grad()
            params = [param for param in self.twin.parameters() if param.requires_grad]
            sums = [torch.zeros(param.shape) for param in params]
            for number in batches:
                self.twin.zero_grad()
                loss(self.twin, number).backward()
                for total, param in zip(sums, params, strict=True):
                    total += param.grad  # type: ignore[arg-type]
            for total, param in zip(sums, params, strict=True):
                param.grad = total.to(param.dtype)
            self.other.step()
        assert_same_bits([*self.net.parameters()], [*self.twin.parameters()])
        assert_same_bits(self.opt.state_dict()["state"], self.other.state_dict()["state"])

    def train(self, layer: int, trained: bool) -> None:
        """Freezes a layer, or trains it again."""
        for net in (self.net, self.twin):
            net[layer].requires_grad_(trained)


def test_norms_are_taken_as_gradients_arrive_and_copies_up_overlap_updates() -> None:
    run = Scripted(CLIPPED, BF16, contributions=1)
    run.steps(2)
    run.log, run.copying = [], []
    run.backward(2)
    arriving = [("gradient", 4), *(each for k in (3, 2, 1, 0) for each in (("gradient", k), ("stage 0", k + 1)))]
    assert run.log == [*arriving, ("stage 0", 0)]
    run.log = []
    run.step()
    assert run.log == [each for k in (4, 3, 2, 1, 0) for each in (("stage 1", k), ("up", k))]
    assert run.copying[0] == 0
    assert all(run.copying[1:]), "the copy up of a group was over before the update of the next"
    run.check([[0], [1], [2]])


@pytest.mark.parametrize("rule", RULES, ids=title_of)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_random_orders_have_the_bits_of_steps_without_offload(rule: str, dtype: torch.dtype) -> None:
    for seed in range(2):
        run = Scripted(rule, dtype, contributions=1)
        run.device.choose = random.Random(seed).randrange
        run.steps(5)
        run.check([[0], [1], [2], [3], [4]])


def early(run: Scripted) -> list[int]:
    """The layers whose first stage has run so far."""
    return [layer for what, layer in run.log if what == "stage 0"]


@pytest.mark.parametrize("watch", [None, "norms"])
@pytest.mark.parametrize("rule", [CLIPPED, *WRITING, "adagc", BRANCHED], ids=title_of)
def test_all_but_the_last_stages_run_in_the_backward_pass(rule: str, watch: str | None) -> None:
    run = Scripted(rule, BF16, contributions=1, watch=watch)
    everything = 5 * 256 * BF16.itemsize
    for number in range(5):
        run.log, run.bytes = [], {"down": 0, "up": 0}
        run.backward(number)
        assert early(run) == ([4, 3, 2, 1, 0] if number else [])
        assert run.bytes == {"down": everything, "up": 0}
        run.log = []
        run.step()
        assert early(run) == ([] if number else [4, 3, 2, 1, 0])
        assert run.bytes == {"down": everything, "up": everything}
        run.check([[number]])
        if watch is not None:
            assert run.opt.statistics().numbers() == pytest.approx(run.other.statistics().numbers(), rel=1e-6)


def test_statistics_of_every_second_step() -> None:
    run = Scripted(CLIPPED, F32, contributions=1, watch="norms", watch_every=2)
    for number in range(5):
        run.log = []
        run.backward(number)
        assert early(run) == ([4, 3, 2, 1, 0] if number else [])
        run.step()
        run.check([[number]])
        one, other = run.opt.statistics(), run.other.statistics()
        assert one.step == other.step == number // 2 * 2 + 1
        assert one.numbers() == pytest.approx(other.numbers(), rel=1e-6)


@pytest.mark.parametrize("event", ["none", "missing", "written"])
def test_a_branch_that_goes_two_ways_in_one_step(event: str) -> None:
    """A layer is a step behind the others.

    If its expected gradient is `missing`, the early work of all layers is dropped; if its weight is written, its own.
    """
    run = Scripted(BRANCHED, F32, contributions=1, watch="norms")
    for number in range(6):
        missing = number == 1 or (number == 3 and event == "missing")
        run.train(2, not missing)
        run.log = []
        run.backward(number)
        begun = early(run)
        assert begun == ([layer for layer in (4, 3, 2, 1, 0) if layer != 2 or not missing] if number else [])
        if number == 3 and event == "written":
            with torch.no_grad():
                run.net[2].weight.mul_(1)
        run.log = []
        run.step()
        again = {"none": [], "missing": begun, "written": [2]}[event] if number == 3 else []
        assert early(run) == (again if number else [4, 3, 2, 1, 0])
        run.check([[number]])
        assert run.opt.statistics().numbers() == pytest.approx(run.other.statistics().numbers(), rel=1e-6)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_norms_of_micro_batches_are_taken_in_the_last(dtype: torch.dtype) -> None:
    run = Scripted(CLIPPED, dtype)
    run.steps(2)
    for first in (2, 5):
        run.log = []
        run.backward(first, last=False)
        run.backward(first + 1, last=False)
        assert early(run) == []
        run.backward(first + 2)
        assert early(run) == [4, 3, 2, 1, 0]
        run.step()
        assert len(early(run)) == 5
    run.check([[0], [1], [2, 3, 4], [5, 6, 7]])


def test_a_gradient_that_arrives_again_is_measured_at_the_end() -> None:
    run = Scripted(CLIPPED, F32)
    run.steps(2)
    run.log = []
    run.backward(2, segments=2)
    assert early(run) == [4, 3, 2, 1, 0]
    run.step()
    assert len(early(run)) == 10
    run.log = []
    run.backward(4, segments=2)
    assert early(run) == [4, 3, 2, 1, 0]
    run.step()
    assert len(early(run)) == 5
    run.check([[0], [1], [2, 3], [4, 5]])


def test_a_sum_that_was_rounded_takes_no_more() -> None:
    run = Scripted(CLIPPED, BF16)
    run.steps(2)
    run.backward(2, last=False)
    with pytest.raises(RulecError, match=r"the gradient of 4.weight arrived more often than expected"):
        run.backward(3, segments=2)
    run.opt.relearn()
    with run.linked():
        run.opt.zero_grad()
    run.backward(2, last=False)
    run.backward(3, segments=2)
    run.step()
    run.check([[0], [1], [2, 3, 4]])


@pytest.mark.parametrize("rule", [CLIPPED, "dog"])
def test_weights_that_are_written_before_the_end_are_read_again(rule: str) -> None:
    run = Scripted(rule, F32, contributions=1)
    run.steps(2)
    run.check([[0], [1]])
    run.log = []
    run.backward(2)
    run.other.zero_grad()
    loss(run.twin, 2).backward()
    with torch.no_grad():
        for net in (run.net, run.twin):
            net[1].weight.mul_(0.5)  # type: ignore[operator]
    run.step()
    run.other.step()
    assert early(run) == [4, 3, 2, 1, 0, 1]
    run.check([])


def test_a_first_gradient_that_comes_after_its_group_has_begun() -> None:
    run = Scripted(CLIPPED, F32, contributions=1, bias=True)
    for net in (run.net, run.twin):
        net[0].bias.requires_grad_(False)  # type: ignore[union-attr]
    run.steps(2)
    run.check([[0], [1]])
    for net in (run.net, run.twin):
        net[0].bias.requires_grad_(True)  # type: ignore[union-attr]
    run.log = []
    run.backward(2)
    assert sorted(early(run)) == sorted([0, *[1, 2, 3, 4] * 2])
    run.step()
    assert sorted(early(run)) == sorted([0, *[1, 2, 3, 4] * 2, *[0, 1, 2, 3, 4] * 2])
    run.check([[2]])


def test_gradients_that_are_taken_away_leave_nothing() -> None:
    run = Scripted(CLIPPED, F32, contributions=1)
    run.steps(2)
    run.backward(7)
    held = run.opt.inner._machine.offload.early
    assert held._groups
    with run.linked():
        run.opt.zero_grad()
    assert not held._groups
    run.steps(1, first=2)
    run.check([[0], [1], [2]])


@pytest.mark.parametrize("rule", [CLIPPED, "nsgdm", BRANCHED], ids=title_of)
@pytest.mark.parametrize("layer", [4, 2, 0])
def test_an_interrupt_of_an_early_stage_leaves_no_trace(rule: str, layer: int) -> None:
    run = Scripted(rule, BF16, contributions=1, watch="norms")
    run.steps(2)
    numbers, kernel = run.opt.statistics().numbers(), Launch.kernel

    def interrupted(launch: Launch, stage: int, *arguments: Any) -> Any:
        if (stage, launch.part.tensors[0].name) == (0, f"{layer}.weight"):
            raise KeyboardInterrupt
        return kernel(launch, stage, *arguments)

    with mock.patch.object(Launch, "kernel", interrupted), pytest.raises(KeyboardInterrupt):
        run.backward(2)
    assert run.opt.statistics().numbers() == numbers
    run.steps(2, first=2)
    run.check([[0], [1], [2], [3]])


@pytest.mark.parametrize("rule", [CLIPPED, "prodigy"])
@pytest.mark.parametrize("layer", [4, 2, 0])
def test_an_interrupt_of_a_step_that_has_begun_early_is_said(rule: str, layer: int) -> None:
    run = Scripted(rule, BF16, contributions=1)
    run.steps(2)
    run.device.drain()
    weights, saved = [param.detach().clone() for param in run.net.parameters()], copy.deepcopy(run.opt.state_dict())
    run.backward(2)
    kernel = Launch.kernel

    def interrupted(launch: Launch, stage: int, *arguments: Any) -> Any:
        written = kernel(launch, stage, *arguments)
        if launch.part.tensors[0].name == f"{layer}.weight":
            raise KeyboardInterrupt
        return written

    with mock.patch.object(Launch, "kernel", interrupted), pytest.raises(KeyboardInterrupt):
        run.step()
    with pytest.raises(PartialUpdate, match="call accept_partial"):
        run.backward(3)
    run.opt.accept_partial()
    run.device.drain()
    with torch.no_grad(), run.linked():
        for param, weight in zip(run.net.parameters(), weights, strict=True):
            param.copy_(weight)
        run.opt.load_state_dict(saved)
    run.steps(2, first=2)
    run.check([[0], [1], [2], [3]])


@pytest.mark.parametrize("rule", ["adamw", CLIPPED])
def test_weights_are_written_once_the_device_has_read_them(rule: str) -> None:
    run = Scripted(rule, BF16, contributions=1)
    run.steps(2)
    run.backward(2, last=False)
    read = torch.zeros(())
    params = [*run.net.parameters()]
    run.device.compute(params, [read], lambda: read.fill_(float(params[0].detach().sum())))
    run.step()
    run.check([[0], [1], [2]])
    assert bool(read.isfinite())
