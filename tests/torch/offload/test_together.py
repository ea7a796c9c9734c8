"""Offload together with what else an optimizer does: the weights have the bits of the same without offload."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import rulec
import rulec.torch
from rulec.errors import HyperError, PartialUpdate
from rulec.es.perturbation import Perturbation
from rulec.runtime.buckets.launch import Launch
from tests.torch.offload.runs import assert_same_bits, parameters, take_steps

Run = Callable[[nn.Module, dict[str, Any]], nn.Module]

X = torch.randn(8, 40, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)

PARTITION = {"**/bias": rulec.part("lion", lr=1e-3), "...": rulec.part("adamw", lr=1e-2)}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 9)).to(torch.bfloat16)


def loss(made: nn.Module) -> Tensor:
    value: Tensor = made(X).float().square().mean()
    return value


def gradients_of_segments(made: nn.Module, words: dict[str, Any]) -> nn.Module:
    optimizer = rulec.torch.AdamW(made.parameters(), **words)
    for _ in range(3):
        grads = rulec.torch.GradStore()
        grads.backward(loss(made), made.parameters())
        grads.step(optimizer, [*made.parameters()][:2])
        grads.step(optimizer)
    return made


def copied(copy_of: Callable[[Any], Any], rule: str) -> Run:
    """Steps, of which those from the third on are of a copy."""

    def run(made: nn.Module, words: dict[str, Any]) -> nn.Module:
        optimizer: Any = rulec.torch.optimizer(rule)(made.parameters(), **words)
        for step in range(4):
            optimizer.zero_grad()
            loss(made).backward()
            optimizer.step()
            if step == 1:
                made, optimizer = copy_of((made, optimizer))
        return made

    return run


def another_buffer(made: nn.Module, words: dict[str, Any]) -> nn.Module:
    """Each step is of another optimizer, of which those with an offload have other buffers."""
    kind: Any = rulec.torch.optimizer("clip_by_global_norm >> adamw")
    before = None
    for buffer in (4096, 600, 64, 1 << 20):
        more = {**words, "offload_buffer": buffer} if "offload" in words else words
        optimizer = kind(made.parameters(), max_norm=0.1, **more)
        if before is not None:
            optimizer.load_state_dict(before.state_dict())
        loss(made).backward()
        optimizer.step()
        optimizer.zero_grad()
        before = optimizer
    return made


def groups_that_come_later(rule: str, inside: bool) -> Run:
    """Steps of a part of the model, and then of all of it."""

    def run(made: nn.Module, words: dict[str, Any]) -> nn.Module:
        first, last = [*made[0].parameters()], [*made[2].parameters()]  # type: ignore[index]
        inside_here = inside and words.get("offload") == "step"
        kind: Any = rulec.torch.optimizer(rule)
        optimizer = rulec.torch.EagerUpdate(first, rule, **words) if inside_here else kind(first, **words)
        for step in range(5):
            if step == 2:
                optimizer.add_param_group({"params": last, "lr": 0.01})
            made.zero_grad()
            if inside_here:
                with optimizer.backward():
                    loss(made).backward()
            else:
                loss(made).backward()
            optimizer.step()
        return made

    return run


def compiled_steps(made: nn.Module, words: dict[str, Any]) -> nn.Module:
    optimizer = rulec.torch.AdamW(made.parameters(), **words)
    step = torch.compile(lambda: optimizer.step(), backend="eager")
    for _ in range(3):
        optimizer.zero_grad()
        loss(made).backward()
        step()
    return made


def closures(made: nn.Module, words: dict[str, Any]) -> nn.Module:
    optimizer = rulec.torch.AdamW(made.parameters(), **words)

    def closure() -> Any:
        optimizer.zero_grad()
        value = loss(made)
        value.backward()
        return value

    for _ in range(3):
        optimizer.step(closure)
    return made


def tagged(made: nn.Module, words: dict[str, Any]) -> nn.Module:
    optimizer = rulec.torch.Muon(rulec.torch.tagged_groups(made), lr=0.02, **words)
    for _ in range(3):
        optimizer.zero_grad()
        loss(made).backward()
        optimizer.step()
    return made


def loaded_weights(made: nn.Module, words: dict[str, Any]) -> nn.Module:
    optimizer = rulec.torch.AdamW(made.parameters(), **words)
    for _ in range(2):
        optimizer.zero_grad()
        loss(made).backward()
        optimizer.step()
        made.load_state_dict({name: value * 0.5 for name, value in made.state_dict().items()})
    return made


def eager(rule: Any, **more: Any) -> Run:
    def run(made: nn.Module, words: dict[str, Any]) -> nn.Module:
        optimizer = rulec.torch.EagerUpdate(made, rule, **more, **words)
        for _ in range(3):
            if "max_grad_norm" in more:
                with optimizer.measure():
                    loss(made).backward()
            with optimizer.backward():
                loss(made).backward()
            optimizer.step()
        return made

    return run


def evolution(fused: bool) -> Run:
    def run(made: nn.Module, words: dict[str, Any]) -> nn.Module:
        strategy = rulec.torch.perturb(made, Perturbation("lowrank", directions=8, sigma=0.1, seed=3))
        optimizer = rulec.torch.AdamW(strategy.parameters.values(), **words)
        for _ in range(3):
            values = strategy(strategy.member_batch(X)).float().square().mean(-1)
            if fused:
                strategy.step(None, optimizer, loss=values)
            else:
                strategy.update(loss=values)
                optimizer.step()
        return made

    return run


RUNS: dict[str, Run] = {
    "gradients of segments": gradients_of_segments,
    "copies": copied(copy.deepcopy, "adamw"),
    "copies of a clip": copied(copy.deepcopy, "clip_by_global_norm >> adamw"),
    "pickles": copied(lambda pair: pickle.loads(pickle.dumps(pair)), "prodigy"),  # noqa: S301 - of this test
    "another buffer in each step": another_buffer,
    "groups that come later": groups_that_come_later("lamb", inside=False),
    "groups that come later in the backward pass": groups_that_come_later("clip_by_global_norm >> adamw", inside=True),
    "compiled steps": compiled_steps,
    "closures": closures,
    "tags": tagged,
    "loaded weights": loaded_weights,
    "a partition in the backward pass": eager(rulec.partition(PARTITION)),
    "a clip of two passes": eager("adamw", lr=1e-2, max_grad_norm=0.01),
    "an evolution strategy": evolution(fused=False),
    "an evolution strategy without gradients": evolution(fused=True),
    "statistics in the backward pass": eager("adamw", lr=1e-2, watch="norms"),
}


@pytest.mark.parametrize("offload", ["step", "states"])
@pytest.mark.parametrize("name", RUNS)
def test_bits_are_those_without_offload(name: str, offload: str) -> None:
    plain = RUNS[name](model(), {"weights": "master"})
    moved = RUNS[name](model(), {"weights": "master", "offload": offload, "offload_buffer": 4096})
    assert_same_bits([*moved.parameters()], [*plain.parameters()])


@pytest.mark.parametrize("offload", ["step", "states"])
def test_a_capturable_group_that_comes_later_is_refused(offload: str) -> None:
    made, later = model(), model()
    optimizer = rulec.torch.AdamW(made.parameters(), offload=offload)
    with pytest.raises(HyperError, match="a group has capturable=True or fused=True"):
        optimizer.add_param_group({"params": [*later.parameters()], "capturable": True})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [*later.parameters()]})
    others = model(), model()
    plain = rulec.torch.AdamW(others[0].parameters(), weights="master")
    plain.add_param_group({"params": [*others[1].parameters()]})
    for nets, opt in (((made, later), optimizer), (others, plain)):
        (loss(nets[0]) + 2 * loss(nets[1])).backward()
        opt.step()
    for mine, other in zip((made, later), others, strict=True):
        assert_same_bits([*mine.parameters()], [*other.parameters()])


WATCHES: list[Any] = [
    "norms",
    {"whole": 'norm(g, per="model")', "mine": 'norm(g, per="group")'},
    {"rows": 'norm(g, per="row")'},
]


@pytest.mark.parametrize("offload", ["step", "states"])
@pytest.mark.parametrize("watch", WATCHES, ids=["tensors", "groups", "rows"])
@pytest.mark.parametrize("every", [1, 2, 3])
def test_statistics_are_those_without_offload(offload: str, watch: Any, every: int) -> None:
    for rule in ("adamw", "clip_by_global_norm >> adamw", "lamb"):
        runs = []
        for words in ({}, {"offload": offload, "offload_buffer": 4096}):
            params = parameters(shapes=[(64, 48), (200, 30), (5, 6)])
            optimizer = rulec.torch.optimizer(rule)(params, watch=watch, watch_every=every, **words)
            measured = []
            for number in range(4):
                take_steps(optimizer, params, 1, number)
                known = optimizer.statistics()
                measured.append((known.step, known.numbers()))
            runs.append((measured, params))
        assert_same_bits(runs[1], runs[0])


@pytest.mark.parametrize("rule", ["soap_axes", "shampoo_axes"])
@pytest.mark.parametrize("offload", ["step", "states"])
def test_states_of_each_axis(rule: str, offload: str) -> None:
    runs = []
    for words in ({}, {"offload": offload, "offload_buffer": 64}):
        params = parameters(torch.bfloat16, [(6, 5), (4, 3, 5), (8,)])
        optimizer = rulec.torch.optimizer(rule)(params, weights="master", **words)
        take_steps(optimizer, params, 3)
        runs.append((params, optimizer.state_dict()["state"]))
    assert_same_bits(runs[1], runs[0])


@pytest.mark.parametrize("offload", ["step", "states"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_an_interrupt_of_any_kernel(offload: str, after: bool) -> None:
    """The interrupt comes before the kernel, or after it. What was written is said, and steps go on."""
    for rule in ("clip_by_global_norm >> adamw", "adafactor"):
        for number in range(100):
            params, others = parameters(), parameters()
            optimizer, other = (
                rulec.torch.optimizer(rule)(params, offload=offload, offload_buffer=2048),
                rulec.torch.optimizer(rule)(others),
            )
            take_steps(optimizer, params, 2)
            take_steps(other, others, 2)
            saved = copy.deepcopy(optimizer.state_dict())
            with mock.patch.object(Launch, "kernel", Interrupting(number, after)) as kernel:
                try:
                    take_steps(optimizer, params, 1, 2)
                except KeyboardInterrupt:
                    pass
                else:
                    break
            assert kernel.count == number + 1
            check_after_an_interrupt(optimizer, params, others, saved)
            take_steps(optimizer, params, 2, 2)
            take_steps(other, others, 2, 2)
            assert_same_bits(params, others)
            assert_same_bits(optimizer.state_dict()["state"], other.state_dict()["state"])
        assert number > 3


class Interrupting:
    """A kernel call that KeyboardInterrupt ends, once: the call of a number, before or after the kernel."""

    def __init__(self, number: int, after: bool) -> None:
        self.number, self.after, self.count, self._kernel = number, after, 0, Launch.kernel

    def __get__(self, launch: Any, kind: Any = None) -> Any:
        if launch is None:
            return self

        def kernel(*arguments: Any) -> Any:
            self.count += 1
            ends = self.count == self.number + 1
            if ends and not self.after:
                raise KeyboardInterrupt
            written = self._kernel(launch, *arguments)
            if ends:
                raise KeyboardInterrupt
            return written

        return kernel


def check_after_an_interrupt(optimizer: Any, params: list[Tensor], before: list[Tensor], saved: dict[str, Any]) -> None:
    """Asserts that parameters are as before or an error names the change, and brings the old values back."""
    if optimizer._machine.writer.unfinished:
        with pytest.raises(PartialUpdate, match="interrupted"):
            optimizer.state_dict()
        with torch.no_grad():
            for param, old in zip(params, before, strict=True):
                param.copy_(old)
        optimizer.load_state_dict(saved)
    else:
        assert_same_bits(params, before)
        assert_same_bits(optimizer.state_dict()["state"], saved["state"])
