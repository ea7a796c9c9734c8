"""States whose memory others move between steps: a step uses them where they are, or says why it cannot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.multiprocessing as multiprocessing
from torch import Tensor

import rulec.torch
from rulec.errors import StateMismatch, TensorError
from rulec.torch.fastpath import addresses, torch_abi
from rulec.torch.step import plan
from tests.calls import profiled
from tests.torch.moving import CLASSES, EAGER, MOVES, SHAPES, Run, differences, moved, unrefused
from tests.torch.twins import difference

#: Cheap kinds, of which the others are combinations.
EVERYDAY = ("AdamW", "AdamW, int8")


@pytest.mark.parametrize("move", MOVES)
def test_states_are_used_where_they_were_moved(move: str) -> None:
    assert differences(EVERYDAY, [move]) == []


@pytest.mark.parametrize("move", ["share_memory_", "set_"])
def test_updates_in_the_backward_pass_use_states_where_they_were_moved(move: str) -> None:
    assert differences(["AdamW"], [move], eager=True) == []


@pytest.mark.parametrize("move", ["share_memory_", "swap_tensors"])
def test_torch_is_asked_where_words_cannot_be_compared(move: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "look_of", lambda _: None)
    monkeypatch.setattr(plan, "survey_of", lambda *_: None)
    assert differences(["AdamW"], [move]) == []


@pytest.mark.parametrize("move", ["share_memory_", "data"])
def test_the_end_is_that_of_torch(move: str) -> None:
    kinds = rulec.torch.AdamW, torch.optim.AdamW
    ours, theirs = (moved("AdamW", move, make=lambda params, kind=kind: kind(params, lr=0.01)) for kind in kinds)
    assert difference(ours[: len(SHAPES)], theirs[: len(SHAPES)]) <= 8


def test_states_that_no_step_can_use_are_refused() -> None:
    assert unrefused(["AdamW"]) == []


def test_a_state_in_shared_memory_is_updated_there() -> None:
    run = Run("AdamW")
    for number in range(4):
        run.step(number)
    state = run.optimizer.state[run.params[0]]["exp_avg"].share_memory_()
    before, address = state.clone(), state.data_ptr()
    run.step(4)
    assert run.optimizer.state[run.params[0]]["exp_avg"] is state
    assert state.is_shared()
    assert state.data_ptr() == address
    assert not torch.equal(state, before)


def test_states_that_share_memory_are_refused() -> None:
    run = Run("AdamW")
    for number in range(4):
        run.step(number)
    state = run.optimizer.state[run.params[0]]
    state["exp_avg"].data = state["exp_avg_sq"].data
    with pytest.raises(TensorError, match=r"exp_avg\w* of parameter 0 and exp_avg\w* of parameter 0 share memory"):
        run.step(4)


def test_a_state_without_memory_is_named() -> None:
    run = Run("AdamW")
    run.step(0)
    run.optimizer.state[run.params[0]]["exp_avg"].untyped_storage().resize_(8)
    message = r"exp_avg of parameter 0 has shape \(64, 80\) and memory of 8 bytes, where it needs 20480"
    with pytest.raises(StateMismatch, match=message):
        run.step(1)


def test_a_steady_step_looks_at_states_without_a_call_of_torch() -> None:
    """A look compares words: it calls one function, for any number of states."""
    run = Run("AdamW")
    for number in range(8):
        run.step(number)
    seen = []
    same = []
    profiled(
        lambda: same.append(run.optimizer._machine.buffers.addresses.same()),
        lambda _, event, function: seen.append(function) if event == "c_call" else None,
    )
    assert same == [True]
    assert not [function for function in seen if getattr(function, "__name__", "") == "data_ptr"]


def test_words_of_tensors_are_not_compared_where_they_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(torch_abi, "_layout_of", lambda _: None)
        assert torch_abi.layout.__wrapped__() is None
    with monkeypatch.context() as patch:
        patch.setattr(torch_abi, "_IMPL_WORDS", 6)  # too few for sizes
        assert torch_abi.layout.__wrapped__() is None
    assert torch_abi.layout() is not None


@pytest.mark.parametrize("change", ["transpose_", "unsqueeze_", "neg", "dtype"])
def test_words_tell_every_difference_of_a_tensor(change: str) -> None:
    where, tensor = torch_abi.layout(), torch.zeros(3, 3)
    assert where is not None
    before = torch_abi.words_of(where, tensor)
    assert torch_abi.words_of(where, tensor) == before
    if change == "neg":
        torch.utils.swap_tensors(tensor, torch._neg_view(tensor.detach()))
    elif change == "dtype":
        tensor.data = tensor.data.view(torch.int32)
    else:
        getattr(tensor, change)(0, *([1] if change == "transpose_" else []))
    after = torch_abi.words_of(where, tensor)
    assert (after != before) is (change != "transpose_" or tensor.stride() != (3, 1))


def _step(optimizer: Any, params: Sequence[Tensor]) -> None:
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()


@pytest.mark.slow
def test_a_process_that_is_given_the_optimizer_leaves_it_as_it_is() -> None:
    """torch moves all tensors of what it sends to another process into shared memory."""
    ends = []
    for sends in (False, True):
        params = [torch.nn.Parameter(torch.ones(200, 100)) for _ in range(4)]
        optimizer = rulec.torch.AdamW(params, lr=0.1)
        for _ in range(4):
            _step(optimizer, params)
        if sends:
            process = multiprocessing.get_context("spawn").Process(target=_train, args=(optimizer, params))
            process.start()
            process.join()
            assert process.exitcode == 0
            assert params[0].is_shared()
        _step(optimizer, params)
        ends.append([p.detach().clone() for p in params])
    assert all(map(torch.equal, *ends))


def _train(optimizer: Any, params: Sequence[Tensor]) -> None:
    states = [value for param in params for value in optimizer.state[param].values()]
    assert all(bool(torch.isfinite(state).all()) for state in states)


def _of_a_process(asked: dict[str, Any], survey: bool) -> list[str]:
    environment = {**os.environ, "RULEC_SURVEY": "1" if survey else "0"}
    command = [sys.executable, "-m", "tests.torch.moving", json.dumps(asked)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    answer: list[str] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.mark.slow
@pytest.mark.parametrize("survey", [True, False])
@pytest.mark.parametrize("kind", CLASSES)
def test_every_kind_of_state_is_used_where_it_was_moved(kind: str, survey: bool) -> None:
    assert _of_a_process({"kinds": [kind], "moves": [*MOVES]}, survey) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", EAGER)
def test_every_kind_of_state_may_be_moved_between_updates_in_the_backward_pass(kind: str) -> None:
    assert _of_a_process({"kinds": [kind], "moves": [*MOVES], "eager": True}, True) == []


@pytest.mark.slow
def test_every_kind_of_state_without_memory_is_refused() -> None:
    kinds = ["AdamW", "AdamW, int8", "AdamW, complex", "LAMB", "LAMB, sections", "SOAP"]
    assert _of_a_process({"kinds": kinds}, True) == []
