"""Steps that look at memory alone notice every change, and give the bits of steps that ask each tensor."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import rulec.torch
from rulec.errors import HyperError, PartialUpdate, TensorError
from rulec.torch.fastpath import torch_abi
from rulec.torch.optimizer import RuleOptimizer
from rulec.torch.step import plan
from rulec_backends.common import threads
from tests.backends.triton_process import in_a_process
from tests.torch.twins import SHAPES, difference, give_gradients, parameters

STEPS = 6


def trained(change: Callable[[list[Tensor], Any], Any], make: Any = rulec.torch.AdamW) -> tuple[list[Tensor], Any]:
    """Parameters after steps with equal gradients, with a change between two of them."""
    params = parameters(shapes=SHAPES * 5)
    optimizer = make(params, lr=0.1, foreach=False)
    for number in range(STEPS):
        give_gradients(params, number)
        optimizer.step()
    give_gradients(params, STEPS)
    if isinstance(optimizer, RuleOptimizer) and plan.survey_of is not _none:
        assert optimizer._machine is not None
        assert optimizer._machine.repeat is not None, "no step was repeated"
    params = change(params, optimizer) or params
    for number in range(STEPS + 1, STEPS + 5):
        optimizer.step()
        give_gradients(params, number)
    return params, optimizer


def _none(*_: Any) -> None:
    """In the place of `survey_of`: every step asks each tensor."""


class Renamed(torch.nn.Parameter):
    pass


def _takes(gradient: Callable[[Tensor], Tensor], place: int = 1) -> Callable[[list[Tensor], Any], Any]:
    def change(params: list[Tensor], _: Any) -> None:
        grad = params[place].grad
        assert grad is not None
        params[place].grad = gradient(grad)

    return change


def _replace(params: list[Tensor], optimizer: Any) -> list[Tensor]:
    """Another parameter in the place of one, with its gradient; single elements that are equal, too."""
    for place in (0, 2):
        new = torch.nn.Parameter(params[place].detach().clone())
        new.grad = params[place].grad
        optimizer.state.pop(params[place])
        optimizer.param_groups[0]["params"][place] = params[place] = new
    return params


def _swap(params: list[Tensor], _: Any) -> None:
    torch.utils.swap_tensors(params[1], params[5])


def _swap_alias(params: list[Tensor], _: Any) -> None:
    """Another implementation in the same memory; the one before is freed."""
    alias = params[1].detach().requires_grad_()
    alias.grad = params[1].grad
    torch.utils.swap_tensors(params[1], alias)


def _data(new: Callable[[Tensor], Tensor]) -> Callable[[list[Tensor], Any], Any]:
    def change(params: list[Tensor], _: Any) -> None:
        params[1].data = new(params[1].data)

    return change


def _leave_out(params: list[Tensor], _: Any) -> None:
    params[3].grad = None


def _sets(**values: Any) -> Callable[[list[Tensor], Any], Any]:
    return lambda _, optimizer: optimizer.param_groups[0].update(values)


def _edit_state(params: list[Tensor], optimizer: Any) -> None:
    optimizer.state[params[1]]["exp_avg"] = torch.ones(3, 4)
    optimizer.state[params[2]]["exp_avg_sq"].mul_(0.5)


def _edit_count(params: list[Tensor], optimizer: Any) -> None:
    optimizer.state[params[4]]["step"].fill_(2.0)


def _join(params: list[Tensor], optimizer: Any) -> list[Tensor]:
    new = torch.nn.Parameter(torch.ones(3))
    new.grad = torch.ones(3)
    optimizer.add_param_group({"params": [new], "lr": 0.2})
    return [*params, new]


def _reload(_: list[Tensor], optimizer: Any) -> None:
    saved = optimizer.state_dict()
    saved["param_groups"][0]["lr"] = 0.05
    optimizer.load_state_dict(saved)


def _freeze(params: list[Tensor], _: Any) -> None:
    params[1].requires_grad_(False)


def _write_gradient(params: list[Tensor], _: Any) -> None:
    grad = params[1].grad
    assert grad is not None
    grad.data = torch.ones(3, 4)
    with torch.no_grad():
        params[2].grad.set_(torch.full((), 2.0))  # type: ignore[union-attr, call-overload]


CHANGES: dict[str, Callable[[list[Tensor], Any], Any]] = {
    "nothing": lambda *_: None,
    "no gradient": _leave_out,
    "a gradient in another order": _takes(lambda grad: grad.t().contiguous().t()),
    "a gradient that repeats memory": _takes(lambda grad: torch.ones(1, 1).expand(3, 4)),
    "a gradient with gaps": _takes(lambda grad: torch.ones(3, 8)[:, ::2]),
    "a negated gradient": _takes(lambda grad: torch._neg_view(grad), 2),
    "a part of a larger gradient": _takes(lambda grad: torch.ones(20)[3:15].view(3, 4)),
    "a gradient in other memory": _write_gradient,
    "a gradient that is a parameter": _takes(lambda grad: torch.nn.Parameter(grad)),
    "other parameters": _replace,
    "parameters in each other's place": _swap,
    "another tensor in the same memory": _swap_alias,
    "memory": _data(lambda data: data.clone()),
    "memory order": _data(lambda data: data.t().contiguous().t()),
    "frozen": _freeze,
    "a learning rate": _sets(lr=0.02),
    "a learning rate in a tensor": _sets(lr=torch.tensor(0.02)),
    "an equal learning rate in a tensor": _sets(lr=torch.tensor(0.1, dtype=torch.float64)),
    "coefficients": _sets(betas=(0.5, 0.9)),
    "a flag": _sets(maximize=True),
    "a word of the user's": _sets(note=[]),
    "states": _edit_state,
    "a step count": _edit_count,
    "a group": _join,
    "a checkpoint": _reload,
}


def settled() -> tuple[list[torch.nn.Parameter], rulec.torch.AdamW]:
    """Parameters and an optimizer whose steps repeat each other."""
    params = parameters(shapes=SHAPES * 5)
    optimizer = rulec.torch.AdamW(params, lr=0.1)
    for number in range(STEPS):
        give_gradients(params, number)
        optimizer.step()
    return params, optimizer


@pytest.mark.parametrize("name", CHANGES)
def test_every_change_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, optimizer = trained(CHANGES[name])
    assert [p._version for p in ours if type(p) is torch.nn.Parameter]
    theirs, _ = trained(CHANGES[name], torch.optim.AdamW)
    assert difference(ours, theirs) <= 8
    monkeypatch.setattr(plan, "survey_of", _none)
    asked, _ = trained(CHANGES[name])
    assert difference(ours, asked) == 0
    assert [p._version for p in ours] == [p._version for p in asked]
    assert optimizer.skipped_steps == 0


SCHEDULES: dict[str, Callable[[dict[str, Any], int], Any]] = {
    "rate": lambda group, t: group.update(lr=0.1 / (1 + t)),
    "rate from the fifth step on": lambda group, t: group.update(lr=0.1 / max(t, 5)),
    "coefficients": lambda group, t: group.update(betas=(0.85 + 0.01 * (t % 3), 0.95)),
    "all": lambda group, t: group.update(
        lr=0.1 / (1 + t), betas=(0.8, 0.9 + 0.001 * t), eps=1e-8 * t, weight_decay=0.01 * t
    ),
    "without decay": lambda group, t: group.update(weight_decay=0.0 if t % 4 == 0 else 0.01),
    "without any decay": lambda group, t: group.update(weight_decay=0.0 if t > 6 else 0.01),
    "a flag": lambda group, t: group.update(maximize=t % 3 == 0),
    "a word and a rate": lambda group, t: group.update(lr=0.1 / (1 + t), **{f"note {t // 5}": t}),
    "equal rates": lambda group, t: group.update(lr=float(f"{0.1 if t < 9 else 0.05}")),
    "numbers of NumPy": lambda group, t: group.update(lr=np.float64(0.1 / (1 + t)), eps=np.float32(2.0**-30)),
    "a rate and the decay": lambda group, t: group.update(lr=0.1 / (1 + t), weight_decay=0.01 * t),
    "a rate of one group": lambda group, t: group.update(lr=0.1 / (1 + t) if "lr" in group and t % 2 else group["lr"]),
    "numbers and a tensor": lambda group, t: group.update(lr=torch.tensor(0.1 / (1 + t)) if t == 8 else 0.1 / (1 + t)),
}


def scheduled(change: Callable[[dict[str, Any], int], Any], make: Any, second: bool) -> tuple[list[Tensor], Any, int]:
    """Parameters of two groups after steps before which numbers change, and how many steps repeated another.

    The numbers of the second group change too, or only those of the first.
    """
    params = parameters(shapes=SHAPES * 5)
    groups = [{"params": params[:7]}, {"params": params[7:], "lr": 0.03}]
    optimizer = make(groups, lr=0.1, foreach=False)
    repeated = 0
    for t in range(1, 18):
        give_gradients(params, t)
        for group in optimizer.param_groups[: 1 + second]:
            change(group, t)
        machine = getattr(optimizer, "_machine", None)
        before = machine and machine.repeat
        optimizer.step()
        repeated += before is not None and optimizer._machine.repeat is before
    return params, optimizer, repeated


@pytest.mark.parametrize("second", [False, True], ids=["one group", "both groups"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_steps_between_which_numbers_change_repeat_each_other(
    name: str, second: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, optimizer, repeated = scheduled(SCHEDULES[name], rulec.torch.AdamW, second)
    others = {
        "without decay": 1,
        "without any decay": 1,
        "a flag": 0,
        "a word and a rate": 8,
        "numbers and a tensor": 6,
    }
    assert repeated >= others.get(name, 13)
    theirs, _, _ = scheduled(SCHEDULES[name], torch.optim.AdamW, second)
    assert difference(ours, theirs) <= 8
    monkeypatch.setattr(plan, "survey_of", _none)
    asked, other, none = scheduled(SCHEDULES[name], rulec.torch.AdamW, second)
    assert (difference(ours, asked), none) == (0, 0)
    assert [p._version for p in ours] == [p._version for p in asked]
    assert [int(s["step"]) for s in optimizer.state.values()] == [int(s["step"]) for s in other.state.values()]


def test_steps_of_tensors_with_rows_of_their_own_are_not_repeated() -> None:
    """Weights that are rounded at random have numbers of their own, and a tensor that joins late has its own `t`."""
    for weights, late in (("stochastic", False), (None, True)):
        params = parameters(torch.bfloat16 if weights else torch.float32, SHAPES)
        optimizer = rulec.torch.AdamW(params, weights=weights)
        for number in range(STEPS):
            give_gradients(params, number)
            if late and number < 2:
                params[1].grad = None
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + number)
            optimizer.step()
        assert optimizer._machine is not None
        assert optimizer._machine.repeat is None
        assert all(p.isfinite().all() for p in params)


def test_a_plain_step_takes_numbers_back_that_a_repeated_step_had_changed() -> None:
    """The learning rate is what it was at the last plain step, and another one came in between."""
    ends = []
    for make in (rulec.torch.AdamW, torch.optim.AdamW):
        params = parameters(shapes=SHAPES * 5)
        optimizer = make(params, lr=0.1)
        for number, rate in enumerate([0.1, 0.1, 0.1, 0.1, 0.05, 0.1, 0.1]):
            give_gradients(params, number)
            optimizer.param_groups[0]["lr"] = rate
            watch = optimizer.register_step_post_hook(lambda *_: None) if number == 5 else None
            optimizer.step()
            if watch is not None:
                watch.remove()
        ends.append(params)
    assert difference(*ends) <= 8


def test_a_number_out_of_its_range_is_refused_in_a_repeated_step() -> None:
    params, optimizer = settled()
    before = [p.detach().clone() for p in params]
    versions = [p._version for p in params]
    for _ in range(2):
        optimizer.param_groups[0]["lr"] = -1.0
        with pytest.raises(HyperError, match="lr=-1"):
            optimizer.step()
        assert [p._version for p in params] == versions
        assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))
        assert {int(s["step"]) for s in optimizer.state.values()} == {STEPS}
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.step()
    assert {int(s["step"]) for s in optimizer.state.values()} == {STEPS + 1}
    again, other = settled()
    other.step()
    assert difference(params, again) == 0


def test_a_gradient_that_no_kernel_reads_is_refused_before_anything_is_written() -> None:
    params, optimizer = settled()
    before = [p.detach().clone() for p in params]
    params[1].grad = torch.ones(3, 4).to_sparse()
    versions = [p._version for p in params]
    with pytest.raises(TensorError, match="is sparse"):
        optimizer.step()
    assert [p._version for p in params] == versions
    assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))
    assert {int(s["step"]) for s in optimizer.state.values()} == {STEPS}


def test_memory_that_is_shared_until_written_is_not_written() -> None:
    params, optimizer = settled()
    lazy = torch._lazy_clone(params[1].detach())  # type: ignore[attr-defined]
    before = lazy.clone()
    optimizer.step()
    assert torch.equal(lazy, before)
    assert not torch.equal(params[1], before)


@pytest.mark.parametrize("surveys", [True, False])
def test_a_parameter_with_another_order_at_the_same_address_is_noticed(
    surveys: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not surveys:
        monkeypatch.setattr(plan, "survey_of", _none)
    ends = []
    for make in (rulec.torch.AdamW, torch.optim.AdamW):
        params = parameters(shapes=[(3, 3)] * 20)
        optimizer = make(params, lr=0.1, foreach=False)
        for number in range(2 * STEPS):
            give_gradients(params, number)
            if number == STEPS:
                params[1].data = params[1].data.t()
            optimizer.step()
        ends.append(params)
    assert difference(*ends) <= 8


class Wrapped(Tensor):
    @classmethod
    def __torch_dispatch__(cls, function: Any, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(function)


def test_torch_is_asked_of_a_gradient_only_where_its_words_are_others() -> None:
    params = parameters(shapes=SHAPES * 5)
    optimizer = rulec.torch.AdamW(params, lr=0.1)
    give_gradients(params, 0)
    for _ in range(STEPS):  # with the same gradients: words of others may differ in bits that mean nothing
        optimizer.step()
    assert optimizer._machine is not None
    survey = optimizer._machine.plans.survey
    assert survey is not None
    asked: list[int] = []
    kind = ctypes.PYFUNCTYPE(ctypes.c_int32, ctypes.c_size_t, ctypes.c_size_t)
    place = torch_abi.NAMES.index("dim")
    right = int(survey.functions[place])
    dim = kind(right)

    def counted(handle: int, at: int) -> int:
        asked.append(handle)
        return int(dim(handle, at))

    function = kind(counted)
    survey.functions[place] = ctypes.cast(function, ctypes.c_void_p).value
    try:
        assert survey.look(survey.lists)
        assert not asked
        room = torch.zeros(params[1].numel() + 1)[1:].view_as(params[1])  # as before, but for its offset
        params[1].grad = room
        assert survey.look(survey.lists)
        assert len(asked) == 1
        assert survey.grads.addresses[1] == room.data_ptr()
    finally:
        survey.functions[place] = right
        survey.release()


@pytest.mark.parametrize("steps", [0, 1, STEPS])
def test_a_gradient_without_memory_is_refused(steps: int) -> None:
    params = parameters(shapes=SHAPES * 5)
    optimizer = rulec.torch.AdamW(params, lr=0.1)
    for number in range(steps):
        give_gradients(params, number)
        optimizer.step()
    give_gradients(params, steps)
    params[1].grad = torch.Tensor._make_wrapper_subclass(Wrapped, (3, 4))  # type: ignore[attr-defined]
    with pytest.raises(TensorError, match="the gradient of parameter 1 is a Wrapped without memory"):
        optimizer.step()


@pytest.mark.parametrize("repeats", [True, False])
def test_gradients_live_until_kernels_have_read_them(repeats: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run without the global lock: another thread may drop gradients meanwhile."""

    def end(run: Callable[..., Any]) -> tuple[list[Tensor], list[weakref.ref[Any]], Any]:
        params = parameters(shapes=SHAPES * 5)
        optimizer = rulec.torch.AdamW(params, lr=0.1)
        for number in range(STEPS):
            give_gradients(params, number)
            optimizer.step()
        assert optimizer._machine is not None
        assert optimizer._machine.repeat is not None
        optimizer.param_groups[0]["lr"] = 0.1 if repeats else 0.2
        give_gradients(params, STEPS)
        seen = [weakref.ref(p.grad) for p in params]
        with monkeypatch.context() as patch:
            patch.setattr(threads, "run", lambda *arguments: run(params, seen, arguments))
            optimizer.step()
        return params, seen, optimizer

    def drop(params: list[Tensor], seen: list[weakref.ref[Any]], arguments: Any) -> None:
        for param in params:
            param.grad = None
        assert all(ref() is not None for ref in seen)
        kept = [torch.full_like(p, float("nan")) for p in params for _ in range(4)]
        plainly(*arguments)
        assert kept

    plainly = threads.run
    dropped, seen, optimizer = end(drop)
    assert optimizer.skipped_steps == 0  # the optimizer lives
    assert [ref() for ref in seen] == [None] * len(seen), "a gradient is held after its step"
    kept, *_ = end(lambda params, seen, arguments: plainly(*arguments))
    assert difference(dropped, kept) == 0


def test_a_look_before_an_error_holds_nothing() -> None:
    params, optimizer = settled()
    seen = weakref.ref(params[1].grad)  # type: ignore[arg-type]
    optimizer.param_groups[0]["lr"] = -1.0
    with pytest.raises(HyperError):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.found_inf = torch.zeros(1)  # type: ignore[attr-defined]
    with pytest.raises(TensorError):
        optimizer.step()
    optimizer.state_dict()
    params[1].grad = None
    assert seen() is None


@pytest.mark.parametrize("count", [1, 20])
def test_steps_without_gradients_do_nothing(count: int) -> None:
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(count)]
    optimizer = rulec.torch.AdamW(params)
    for _ in range(5):
        optimizer.step()
    assert all(torch.equal(p, torch.ones(3)) for p in params)
    give_gradients(params, 0)
    optimizer.step()
    assert [float(optimizer.state[p]["step"]) for p in params] == [1.0] * count


@pytest.mark.parametrize("count", [1, 3])
def test_steps_of_few_tensors_are_repeated(count: int) -> None:
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(count)]
    optimizer = rulec.torch.AdamW(params)
    for number in range(4):
        give_gradients(params, number)
        optimizer.step()
    assert optimizer._machine is not None
    assert optimizer._machine.repeat is not None


@pytest.mark.parametrize("failing", [0, 1])
def test_a_repeated_step_that_fails_is_counted_for_what_it_updated(failing: int) -> None:
    params = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(5, dtype=torch.float64))]
    optimizer = rulec.torch.AdamW(params)
    for number in range(4):
        give_gradients(params, number)
        optimizer.step()
    assert optimizer._machine is not None
    repeat = optimizer._machine.repeat
    assert repeat is not None

    def broken() -> None:
        raise MemoryError("no memory for a table")

    repeat._runs[failing] = broken
    before = [p.detach().clone() for p in params]
    with pytest.raises(PartialUpdate if failing else MemoryError, match="no memory for a table"):
        optimizer.step()
    updated = [not torch.equal(p, old) for p, old in zip(params, before, strict=True)]
    assert sum(updated) == failing
    assert [float(optimizer.state[p]["step"]) for p in params] == [4.0 + new for new in updated]
    optimizer._machine.repeat = None
    optimizer.step()
    assert [float(optimizer.state[p]["step"]) for p in params] == [5.0 + new for new in updated]


def test_hooks_and_scaling_are_seen_on_the_way() -> None:
    params = parameters(shapes=SHAPES * 5)
    optimizer = rulec.torch.AdamW(params, lr=0.1)
    give_gradients(params, 0)
    for _ in range(STEPS):
        optimizer.step()
    called = []
    hook = optimizer.register_step_pre_hook(lambda *_: called.append(1))
    optimizer.step()
    hook.remove()
    optimizer.step()
    assert called == [1]
    optimizer.found_inf = torch.zeros(1)
    with pytest.raises(TensorError, match="cannot take scaled gradients"):
        optimizer.step()
    del optimizer.found_inf


def test_steps_of_other_ways_in_between_are_followed() -> None:
    """Evaluation elsewhere, and counts read and advanced by others."""
    found = []
    for survey in (True, False):
        params = parameters(shapes=SHAPES * 5)
        optimizer = rulec.torch.AdamW(params, lr=0.1)
        for number in range(80):  # more than the rows that are evaluated ahead
            give_gradients(params, 0 if survey and number % 3 else number - number % 3)
            if number % 3:
                give_gradients(params, number - number % 3)
            optimizer.step()
        assert {int(s["step"]) for s in optimizer.state.values()} == {80}
        found.append(params)
    assert difference(*found) == 0


def test_objects_that_follow_in_the_place_of_others_are_noticed() -> None:
    """CPython gives the memory of a number that nobody needs any more to the next one."""
    params = parameters(shapes=SHAPES * 5)
    optimizer = rulec.torch.SGD(params, lr=float("0.5"))
    group = optimizer.param_groups[0]
    for _ in range(4):
        for number in range(STEPS):
            give_gradients(params, number)
            before = params[1].detach().clone()
            optimizer.step()
            torch.testing.assert_close(params[1], before - group["lr"] * params[1].grad, rtol=1e-6, atol=1e-6)
        assert optimizer._machine is not None
        assert optimizer._machine.repeat is not None
        group["lr"] = group["lr"] * 0.5
        group["lr"] = group["lr"] * 0.5


def test_an_environment_variable_turns_surveys_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch_abi.exports.__wrapped__() is not None, "torch exports other functions: steps are slower"
    monkeypatch.setenv("RULEC_SURVEY", "0")
    assert torch_abi.exports.__wrapped__() is None


@pytest.mark.parametrize("name", torch_abi._OF_TORCH)
def test_a_torch_without_a_function_is_asked_tensor_by_tensor(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(torch_abi._OF_TORCH, name, "not_there")
    assert torch_abi.exports.__wrapped__() is None


def test_a_function_that_does_another_thing_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(torch_abi._OF_TORCH, "load", torch_abi._OF_TORCH["is_neg"])
    assert torch_abi.exports.__wrapped__() is None


def test_the_memory_that_a_look_reads_is_found() -> None:
    functions = torch_abi.exports()
    assert functions is not None
    (param,) = params = parameters(shapes=[(3, 4)])
    give_gradients(params, 0)
    place, version, behind = torch_abi.reads_of(functions, param, param.grad)
    assert param.grad is not None
    assert torch_abi._word(place) == param.grad._cdata
    assert behind == param.grad.untyped_storage()._cdata
    before = (ctypes.c_uint8 * 24).from_address(version)[:]
    param.detach().add_(1)
    assert (ctypes.c_uint8 * 24).from_address(version)[:] != before, "another count than that of versions"


_CALLS = """
import json, sys
import torch
import rulec.torch
from rulec.kernel.multi_tensor.uploads import Ring
from rulec_backends.triton.work import StageWork

StageWork.run = lambda *_: None  # the launch itself: the interpreter's goes over all elements


def calls(count, moving):
    params = [torch.nn.Parameter(torch.randn(4)) for _ in range(count)]
    optimizer = rulec.torch.AdamW(params, backend="triton")
    numbers = []
    for step in range(6):
        for p in params:
            if moving or not step:
                p.grad = torch.randn(4)
        seen = []
        sys.setprofile(lambda frame, event, argument: seen.append(event) if event.endswith("call") else None)
        optimizer.step()
        sys.setprofile(None)
        numbers.append(len(seen))
    return numbers


copied = []
copy = Ring.copy
Ring.copy = lambda ring, target, table, *rest: (copied.append(len(table)), copy(ring, target, table, *rest))
few, many = calls(32, True), calls(96, True)
moved = len(copied)
print(json.dumps([few, many, moved, calls(32, False), len(copied) - moved]))
"""


@pytest.mark.slow
def test_a_step_of_launches_on_a_device_calls_nothing_for_each_tensor() -> None:
    """Steps that read gradients at new addresses, as after each backward pass; the first ones ask each tensor."""
    pytest.importorskip("triton")
    few, many, moved, still, copied = in_a_process(_CALLS, TRITON_INTERPRET="1")
    assert few[-1] == many[-1] < few[0] < many[0]
    assert few[-1] <= 50, "a step that repeats the last one calls more than its checks, a copy and a launch"
    assert still[-1] <= 31, "a step with gradients where they were calls more than its checks and a launch"
    # Three steps before the first that repeats another copy their rows; it copies all rows ahead, and addresses.
    assert (moved, copied) == (2 * (3 + 1 + 3), 3 + 1 + 1)


_REPEATED = """
import json
import torch
import rulec
import rulec.torch
from rulec.torch import machine


PLAIN = rulec.parse("name: Plain\\nstate: {m: 0}\\nstep: |\\n  m = 0.5*m + g\\n  p = p - 0.25*m\\n")


def trained(rule, repeats):
    torch.manual_seed(0)
    machine.repeat_of = repeat_of if repeats else lambda *_: None
    params = [torch.nn.Parameter(torch.randn(n)) for n in (3, 40, 7, 5) * 5]
    rates = [{}, {}, {}] if rule is PLAIN else [{}, {"lr": 0.05}, {"lr": 0.1}]
    groups = [{"params": params[:9], **rates[0]}, {"params": params[9:], **rates[1]}]
    optimizer = rulec.torch.optimizer(rule)(groups, **rates[2], backend="triton")
    repeated = 0
    for step in range(12):
        for p in params:
            p.grad = torch.randn(p.shape)
        if step == 7 and rule is not PLAIN:
            optimizer.param_groups[0]["lr"] = 0.3
        if step == 9:
            params[2].grad = None
        before = optimizer._machine and optimizer._machine.repeat
        optimizer.step()
        repeated += before is not None and optimizer._machine.repeat is before
    assert (repeated >= 4) == repeats, repeated
    return [x for p in params for x in (p, *optimizer.state[p].values())]


repeat_of = machine.repeat_of
same = lambda rule: all(map(torch.equal, trained(rule, True), trained(rule, False)))
print(json.dumps([str(rule) for rule in ("adamw", "lion", "momentum", PLAIN) if not same(rule)]))
"""


@pytest.mark.slow
def test_repeated_launches_have_the_bits_of_other_steps() -> None:
    """Two groups, new gradients, and between repeats another rate and a gradient that is missing; also no rate."""
    pytest.importorskip("triton")
    assert in_a_process(_REPEATED, TRITON_INTERPRET="1") == []


@pytest.mark.parametrize("name", ["adamw", "lamb", "adafactor", "muon"])
def test_states_end_with_their_optimizer_without_a_collection(name: str) -> None:
    params = parameters(shapes=[(4, 3)] * 20)
    optimizer = rulec.torch.optimizer(name)(params)
    gc.collect()
    gc.disable()
    try:
        for step in range(5):
            give_gradients(params, step)
            optimizer.step()
        states = [weakref.ref(state) for state in optimizer.state[params[0]].values()]
        del optimizer
        assert states
        assert all(state() is None for state in states)
    finally:
        gc.enable()
