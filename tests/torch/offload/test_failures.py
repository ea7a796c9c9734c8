"""Failures of copies and kernels, and interrupts, in the middle of a step on the host."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any, TypeAlias

import pytest
import torch

from rulec.errors import PartialUpdate, RulecError, TensorError
from rulec.runtime.buckets.launch import Launch
from rulec.torch.offload.pieces import PieceCall
from tests.torch.offload.runs import assert_same_bits
from tests.torch.offload.scripted import Device, Race, latest
from tests.torch.offload.test_orders import F32, LARGE, SMALL, Case
from tests.torch.offload.training import Training

#: Groups, master copies, two rounds, launches that are evicted, pieces, and pieces between groups.
CASES = {
    "four groups": Case("adamw", F32, (8, 8, 8, 8), (0, 1, 2, 3)),
    "master copies": SMALL["master copies"],
    "two rounds": SMALL["two rounds"],
    "evicted": LARGE["evicted"],
    "three pieces": LARGE["three pieces"],
    "pieces between groups": LARGE["pieces between groups"],
}


class Saved:
    """Weights and states at one moment, to compare with and to go back to."""

    def __init__(self, training: Training) -> None:
        self.weights = [param.detach().clone() for param in training.params]
        self.states = deepcopy(training.optimizer.state_dict())

    def is_as_before(self, training: Training) -> bool:
        """Whether nothing was changed."""
        try:
            assert_same_bits([*training.params], self.weights)
            assert_same_bits(training.optimizer.state_dict()["state"], self.states["state"])
        except AssertionError:
            return False
        return True

    def restore(self, training: Training) -> None:
        """Loads weights and states."""
        with torch.no_grad():
            for param, weight in zip(training.params, self.weights, strict=True):
                param.copy_(weight)
        with training.linked():
            training.optimizer.load_state_dict(self.states)


#: A training after a step that failed, what was there before the step, and the error.
Failure: TypeAlias = tuple[Training, Saved, BaseException]


def check_free(training: Training) -> None:
    """No copy down is in flight, and nobody owns a buffer. Copies up may be, as after a whole step."""
    assert [name for name in training.device.in_flight if "down" in name] == []
    assert all(buffer.owner is None for buffer in training.buffers)


def check_after(training: Training, before: Saved, error: BaseException, earlier: bool = False) -> None:
    """Asserts that a failed step changed nothing, or that an error tells of a change.

    It may be the error of an `earlier` step. Steps go on after weights and states were loaded.
    """
    training.device.drain()
    unfinished = training.machine.writer.unfinished
    if unfinished:
        with pytest.raises(PartialUpdate, match="interrupted"):
            training.optimizer.step()
        training.device.drain()
    told = unfinished or isinstance(error, PartialUpdate) or earlier
    assert told or before.is_as_before(training)
    before.restore(training)
    training.run(latest, 2)
    training.check_states()


def failures(case: Case, fail: Callable[[Device, int], None], steps: int = 1, cuda: bool = False) -> Iterator[Failure]:
    """Steps with one failure each: of the first wait, copy or kernel, of the second, and so on."""
    training = case.training(cuda=cuda)
    for number in range(1000):
        before, device = Saved(training), training.device
        device.waits = device.copies = 0
        fail(device, number)
        try:
            training.take(steps)
        except Race:
            raise
        except BaseException as error:  # noqa: BLE001 - interrupts too
            fail(device, -1)
            yield training, before, error
        else:
            assert number
            return


def interrupt(device: Device, number: int) -> None:
    """Has KeyboardInterrupt end one wait."""
    device.interrupted_waits = range(number, number + 1)


def interrupt_all(device: Device, number: int) -> None:
    """Has KeyboardInterrupt end one wait, and all that come later."""
    device.interrupted_waits = range(number, 1000 if number >= 0 else number)


def refuse(device: Device, number: int) -> None:
    """Has a copy not begin."""
    device.refused_copy = number


def break_off(device: Device, number: int) -> None:
    """Has a copy fail after it has begun."""
    device.broken_copy = number


@pytest.mark.parametrize("name", CASES)
def test_an_interrupt_of_any_wait(name: str) -> None:
    for training, before, error in failures(CASES[name], interrupt):
        assert isinstance(error, KeyboardInterrupt)
        check_free(training)
        check_after(training, before, error)


@pytest.mark.parametrize("name", CASES)
def test_interrupts_of_the_waits_after_an_interrupt(name: str) -> None:
    """Then copies may be in flight, and the next steps wait for them."""
    for training, _, error in failures(CASES[name], interrupt_all):
        assert isinstance(error, KeyboardInterrupt)
        if training.machine.writer.unfinished:
            with pytest.raises(PartialUpdate, match="interrupted"):
                training.optimizer.step()
        training.take(2)
        training.device.drain()


@pytest.mark.parametrize("cuda", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_copy_that_cannot_be_begun(name: str, cuda: bool) -> None:
    for training, before, error in failures(CASES[name], refuse, cuda=cuda):
        assert isinstance(error, RulecError)
        assert "CUDA error: refused" in str(error)
        check_free(training)
        check_after(training, before, error)


@pytest.mark.parametrize("cuda", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_copy_that_breaks_off(name: str, cuda: bool) -> None:
    """A copy up is seen in the next step, which claims its buffer."""
    for training, before, error in failures(CASES[name], break_off, 2, cuda):
        assert isinstance(error, RulecError)
        assert re.search("copy .* failed .*CUDA error: broken.* may not agree .* load a checkpoint", str(error))
        check_free(training)
        check_after(training, before, error, earlier=True)


@pytest.mark.parametrize("later", [False, True], ids=["before it writes", "after"])
@pytest.mark.parametrize("name", CASES)
def test_a_kernel_that_fails(name: str, later: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, broken = itertools.count(), -1

    def failing(owner: type, method: str) -> None:
        real = getattr(owner, method)

        def call(*args: Any, **words: Any) -> Any:
            number = next(calls)
            if number == broken and not later:
                raise RuntimeError("a kernel failed")
            result = real(*args, **words)
            if number == broken:
                raise RuntimeError("a kernel failed")
            return result

        monkeypatch.setattr(owner, method, call)

    failing(Launch, "kernel")
    failing(PieceCall, "_update")

    def fail(device: Device, number: int) -> None:
        nonlocal calls, broken
        calls, broken = itertools.count(), number

    for training, before, error in failures(CASES[name], fail):
        assert "a kernel failed" in str(error)
        check_free(training)
        if not later:
            check_after(training, before, error)


@pytest.mark.parametrize("name", CASES)
def test_a_gradient_of_a_wrong_shape_changes_nothing(name: str) -> None:
    """Neither weights, nor states; no copy has begun, and no state is there where none was."""
    training = CASES[name].training()
    before, fresh = Saved(training), CASES[name].training(0)
    for each in (training, fresh):
        last = each.params[-1]
        assert last.grad is not None
        last.grad.data, grad = torch.zeros(3), last.grad.data
        each.device.copies = 0
        with pytest.raises(TensorError, match=r"has shape \(3,\), its parameter"):
            each.take(1)
        last.grad.data = grad
        assert each.device.copies == 0
        check_free(each)
    assert not any(fresh.optimizer.state.values())
    fresh.run(latest, 2)
    check_after(training, before, RulecError())
