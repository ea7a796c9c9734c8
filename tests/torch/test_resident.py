"""Counts and learning rates on the device, as `capturable=True` asks: with torch's CPU in the place of a device.

The backend is the cpu backend behind the contract of those that work on a device, so that torch itself is the oracle.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import rulec
import rulec.torch
from rulec.backend import registry
from rulec.compiler.reference import ReferenceOptimizer
from rulec.errors import RulecError, TensorError
from rulec.torch.groups.capture import CaptureMode
from rulec.torch.tensors import tensors
from tests.runtime.elsewhere import Elsewhere


@pytest.fixture(autouse=True)
def elsewhere() -> Iterator[None]:
    """The backend `elsewhere`."""
    plain = registry.get
    with mock.patch.object(registry, "get", lambda name: Elsewhere() if name == "elsewhere" else plain(name)):
        yield


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def ours(kind: str, of: nn.Module, **keywords: Any) -> Any:
    return getattr(rulec.torch, kind)(of.parameters(), backend="elsewhere", capturable=True, **keywords)


def loss_of(of: nn.Module, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(32, 8, dtype=torch.float64, generator=generator)
    return of(x).square().mean()


def train(
    of: nn.Module, optimizer: torch.optim.Optimizer, steps: range, each: Callable[[int], object] | None = None
) -> None:
    for step in steps:
        if each:
            each(step)
        optimizer.zero_grad()
        loss_of(of, step).backward()
        optimizer.step()


def assert_close(a: nn.Module, b: nn.Module, rtol: float = 1e-10) -> None:
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=rtol, atol=1e-2 * rtol)


#: Of these torch keeps a number in float32.
SINGLE = {"NAdam": 1e-6, "ASGD": 1e-6}


@pytest.mark.parametrize("kind", ["AdamW", "Adam", "NAdam", "RAdam", "Adamax", "ASGD", "Rprop", "RMSprop"])
def test_steps_are_torch_s_while_the_learning_rate_changes_in_its_tensor(kind: str) -> None:
    first, second = model(), model()
    rate = torch.tensor(1e-2, dtype=torch.float64)
    mine, theirs = ours(kind, first, lr=rate), getattr(torch.optim, kind)(second.parameters(), lr=1e-2)

    def change(step: int) -> None:
        theirs.param_groups[0]["lr"] = 1e-2 / (1 + step)

    train(first, mine, range(20), lambda step: rate.fill_(1e-2 / (1 + step)))
    train(second, theirs, range(20), change)
    assert_close(first, second, SINGLE.get(kind, 1e-10))


def test_a_step_looks_at_the_learning_rate_on_the_device_alone() -> None:
    of = model()
    rate = torch.tensor(1e-2, dtype=torch.float64)
    optimizer = ours("AdamW", of, lr=rate)
    train(of, optimizer, range(2))
    with mock.patch.object(Tensor, "__float__", side_effect=AssertionError("this waits for the device")):
        train(of, optimizer, range(2, 4))
    assert float(optimizer.state[next(of.parameters())]["step"]) == 4


def test_a_number_in_the_place_of_the_tensor_is_noticed() -> None:
    first, second = model(), model()
    mine = ours("AdamW", first, lr=torch.tensor(1e-2, dtype=torch.float64))
    theirs = torch.optim.AdamW(second.parameters(), lr=1e-2)
    train(first, mine, range(3))
    train(second, theirs, range(3))
    mine.param_groups[0]["lr"] = theirs.param_groups[0]["lr"] = 3e-3
    train(first, mine, range(3, 6))
    train(second, theirs, range(3, 6))
    assert_close(first, second)


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


REPLACED = [
    ("lr", number(1e-2), number(1e-2)),
    ("lr", 1e-2, number(1e-2)),
    ("betas", (0.9, 0.99), (number(0.9), 0.99)),
    ("betas", (number(0.9), 0.99), (number(0.9), 0.99)),
    ("betas", (number(0.9), 0.99), (0.9, 0.99)),
]


@pytest.mark.parametrize(
    ("keyword", "before", "after"), REPLACED, ids=["rate", "to a rate", "to a beta", "beta", "away"]
)
def test_a_value_in_the_place_of_an_equal_one_is_noticed_and_compared_once(
    keyword: str, before: Any, after: Any
) -> None:
    first, second = model(), model()
    mine, theirs = ours("AdamW", first, **{keyword: before}), rulec.torch.AdamW(second.parameters(), **{keyword: after})
    for optimizer in (mine, theirs):
        train(first if optimizer is mine else second, optimizer, range(1))
        optimizer.param_groups[0][keyword] = after
        train(first if optimizer is mine else second, optimizer, range(1, 2))
    failing = AssertionError("this waits for the device")
    with mock.patch.multiple(Tensor, __float__=mock.Mock(side_effect=failing), __bool__=mock.Mock(side_effect=failing)):
        train(first, mine, range(2, 4))
    train(second, theirs, range(2, 4))
    live = [x for x in (after if isinstance(after, tuple) else (after,)) if isinstance(x, Tensor)]
    for value in live:
        value.mul_(0.5)
    train(first, mine, range(4, 6))
    train(second, theirs, range(4, 6))
    for value in live:
        value.mul_(2.0)
    assert_close(first, second)


def scaled(of: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any, steps: range, broken: int) -> list[float]:
    scales = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(of, step) * (float("inf") if step == broken else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def unscaling(scaler: Any) -> Callable[[torch.optim.Optimizer], Any]:
    """Its step with `unscale_` before it, as who clips gradients calls it."""
    step = scaler.step

    def unscaled(optimizer: torch.optim.Optimizer) -> Any:
        scaler.unscale_(optimizer)
        return step(optimizer)

    return unscaled


@pytest.mark.parametrize("clip", [False, True], ids=["left to the step", "unscaled before"])
def test_gradscaler_leaves_unscaling_and_skipping_to_the_step(clip: bool) -> None:
    first, second = model(), model()
    mine, theirs = ours("AdamW", first, lr=1e-2), torch.optim.AdamW(second.parameters(), lr=1e-2, fused=True)
    runs = [(first, mine), (second, theirs)]
    scales = []
    for of, optimizer in runs:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
        if clip:
            scaler.step = unscaling(scaler)
        scales.append(scaled(of, optimizer, scaler, range(10), broken=3))
    assert scales[0] == scales[1]
    assert_close(first, second)
    steps = [float(o.state[next(of.parameters())]["step"]) for of, o in runs]
    assert steps == [9.0, 9.0]


STORED: list[dict[str, Any]] = [
    {"weights": "split"}, {"weights": "stochastic", "seed": 3}, {"weights": "master", "state_dtype": "bfloat16_sr"},
]  # fmt: skip


@pytest.mark.parametrize("stored", STORED, ids=lambda words: "-".join(map(str, words.values())))
def test_gradscaler_and_counts_on_the_device_are_for_every_storage(stored: dict[str, Any]) -> None:
    """With scales that are powers of two, the bits of steps without a scale, and a skipped step changes none."""
    runs = []
    for keywords in ({"backend": "elsewhere", "capturable": True}, {"backend": "c"}):
        of = model().bfloat16()
        optimizer = rulec.torch.AdamW(of.parameters(), lr=1e-2, **stored, **keywords)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
        for step in range(6):
            x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step)).bfloat16()
            optimizer.zero_grad()
            loss = of(x).float().square().mean() * (torch.inf if step == 3 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        runs.append((of, optimizer))
    (first, mine), (second, theirs) = runs
    for p, q in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(p, q)
        a, b = mine.state[p], theirs.state[q]
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name].to(b[name].dtype), b[name]) for name in b), [*b]


def test_without_capturable_gradscaler_does_it_itself() -> None:
    of = model()
    optimizer = rulec.torch.AdamW(of.parameters(), lr=1e-2)
    assert not optimizer._step_supports_amp_scaling
    scaled(of, optimizer, torch.amp.GradScaler("cpu", init_scale=1024.0), range(5), broken=2)
    assert float(optimizer.state[next(of.parameters())]["step"]) == 4


def test_a_checkpoint_goes_from_torch_to_the_device_and_back() -> None:
    first, second = model(), model()
    theirs = torch.optim.AdamW(second.parameters(), lr=1e-2)
    train(second, theirs, range(5))
    first.load_state_dict(second.state_dict())
    mine = ours("AdamW", first, lr=1e-2)
    mine.load_state_dict(theirs.state_dict())
    train(first, mine, range(5, 10))
    train(second, theirs, range(5, 10))
    assert_close(first, second)
    again = torch.optim.AdamW(first.parameters(), lr=1e-2)
    again.load_state_dict(mine.state_dict())
    train(first, again, range(10, 15))
    train(second, theirs, range(10, 15))
    assert_close(first, second)


def test_what_groups_remember_is_shown_as_tensors_and_taken_over_where_it_is_changed() -> None:
    first, second = model(), model()
    mine, host = ours("Prodigy", first), rulec.torch.Prodigy(second.parameters())
    train(first, mine, range(4))
    train(second, host, range(4))
    shown = mine.param_groups[0]["d"]
    assert isinstance(shown, Tensor)
    assert float(shown) == pytest.approx(host.param_groups[0]["d"], rel=1e-9)
    mine.param_groups[0]["d"] = host.param_groups[0]["d"] = 0.25
    train(first, mine, range(4, 8))
    train(second, host, range(4, 8))
    assert float(mine.param_groups[0]["d"]) == pytest.approx(host.param_groups[0]["d"], rel=1e-9)
    assert_close(first, second)


def test_autograd_hears_of_every_write() -> None:
    of = model()
    optimizer = ours("AdamW", of)
    versions = [p._version for p in of.parameters()]
    train(of, optimizer, range(1))
    assert [p._version for p in of.parameters()] == [v + 1 for v in versions]


CAPTURES = [
    (CaptureMode(False, True, True, frozenset({"cuda"})), "", "capturable=False cannot be captured"),
    (CaptureMode(True, True, False, frozenset({"cuda", "cpu"})), "", "parameters on the CPU cannot be captured"),
    (
        CaptureMode(True, True, True, frozenset({"cuda"})),
        "of these",
        "the first step of these cannot .* before the capture",
    ),
]


@pytest.mark.parametrize(("residence", "first", "message"), CAPTURES)
def test_captures_that_would_not_do_what_steps_do_are_refused(residence: CaptureMode, first: str, message: str) -> None:
    with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False):
        residence.check_capture(first)
    with (
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True),
        pytest.raises(RulecError, match=message),
    ):
        residence.check_capture(first)


def with_another_rate(of: nn.Module, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] = 0.5


def with_another_distance(of: nn.Module, optimizer: Any) -> None:
    optimizer.param_groups[0]["d"] = 0.5


def with_other_memory(of: nn.Module, optimizer: Any) -> None:
    for p in of.parameters():
        p.data = p.data.clone()


def with_fewer_gradients(of: nn.Module, optimizer: Any) -> None:
    next(of.parameters()).grad = None


def with_a_scale(of: nn.Module, optimizer: Any) -> None:
    optimizer.found_inf, optimizer.grad_scale = torch.tensor(0.0), torch.tensor(2.0)


FIRSTS = [
    (with_another_rate, "after a number in param_groups changed"),
    (with_another_distance, "after a number in param_groups changed"),
    (with_other_memory, "with these parameters and gradients"),
    (with_fewer_gradients, "with these parameters and gradients"),
    (with_a_scale, "with gradients scaled in this way"),
]


@pytest.mark.parametrize(("change", "message"), FIRSTS, ids=[change.__name__ for change, _ in FIRSTS])
def test_a_step_that_does_more_than_those_after_it_is_not_captured(
    change: Callable[[nn.Module, Any], None], message: str
) -> None:
    of = model()
    optimizer = ours("Prodigy", of, lr=1.0)
    train(of, optimizer, range(2))
    loss_of(of, 2).backward()
    capturing = mock.patch.object(CaptureMode, "capturing", new_callable=mock.PropertyMock, return_value=True)
    with capturing:
        optimizer.step()
    change(of, optimizer)
    before = [p.clone() for p in of.parameters()]
    with capturing, pytest.raises(RulecError, match=f"the first step {message}"):
        optimizer.step()
    assert all(map(torch.equal, of.parameters(), before))
    optimizer.step()
    with capturing:
        optimizer.step()


def test_the_way_to_where_a_model_is_evaluated_is_not_captured() -> None:
    of = model()
    optimizer = ours("ScheduleFreeAdamW", of, lr=1e-2)
    train(of, optimizer, range(2))
    before = [p.clone() for p in of.parameters()]
    capturing = mock.patch.object(CaptureMode, "capturing", new_callable=mock.PropertyMock, return_value=True)
    with capturing, pytest.raises(RulecError, match=r"eval\(\) and train\(\) cannot be captured"):
        optimizer.eval()
    assert all(map(torch.equal, of.parameters(), before))
    optimizer.eval()
    assert not all(map(torch.equal, of.parameters(), before))


def test_a_device_without_memory_for_states_is_named_and_nothing_changes() -> None:
    of = model()
    optimizer = ours("AdamW", of)
    before = [p.clone() for p in of.parameters()]
    loss_of(of, 0).backward()
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    with (
        mock.patch.object(tensors, "_initial", side_effect=full),
        pytest.raises(TensorError, match=r"cpu has no memory for the states of 4 tensors \(0 MiB\)"),
    ):
        optimizer.step()
    assert not any(optimizer.state[p] for p in of.parameters())
    for p, q in zip(of.parameters(), before, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=0)
    optimizer.step()
    assert float(optimizer.state[next(of.parameters())]["step"]) == 1


def test_steps_in_inference_mode_leave_nothing_that_later_steps_cannot_write() -> None:
    first, second = model(), model()
    mine, theirs = ours("AdamW", first, lr=1e-2), torch.optim.AdamW(second.parameters(), lr=1e-2)
    for step in range(3):
        for of, optimizer in ((first, mine), (second, theirs)):
            optimizer.zero_grad()
            loss_of(of, step).backward()
        theirs.step()
        with torch.inference_mode(step == 0):
            mine.step()
        mine.param_groups[0]["lr"] = theirs.param_groups[0]["lr"] = 1e-2 / (2 + step)
    assert_close(first, second)


def test_a_checkpoint_loaded_in_inference_mode_is_gone_on_from() -> None:
    first, second = model(), model()
    mine, theirs = ours("Prodigy", first), rulec.torch.Prodigy(second.parameters())
    train(first, mine, range(3))
    train(second, theirs, range(3))
    again = ours("Prodigy", first)
    with torch.inference_mode():
        again.load_state_dict(mine.state_dict())
    train(first, again, range(3, 6))
    train(second, theirs, range(3, 6))
    assert_close(first, second)


@pytest.mark.parametrize("backend", ["elsewhere", "cpu"])
@pytest.mark.parametrize("kind", ["Shampoo", "SOAP", "Muon"])
def test_autocast_leaves_the_matrices_of_a_rule_in_their_dtype(kind: str, backend: str) -> None:
    steps = []
    for casting in (False, True):
        param = nn.Parameter(torch.ones(6, 4))
        optimizer = getattr(rulec.torch, kind)([param], backend=backend, lr=0.1)
        for seed in range(3):
            param.grad = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))
            with torch.autocast("cpu", torch.bfloat16, enabled=casting):
                optimizer.step()
        steps.append(param.detach())
    assert torch.equal(*steps)


@pytest.mark.parametrize("backend", ["elsewhere", "cpu"])
@pytest.mark.parametrize("kind", ["AdamW", "NAdam", "Prodigy", "LAMB", "Muon", "Shampoo", "ScheduleFreeAdamW", "DoG"])
def test_torchs_default_device_does_not_matter(kind: str, backend: str) -> None:
    """Nothing of an optimizer's own is made there."""
    steps = []
    for default in ("cpu", "meta"):
        params = [nn.Parameter(torch.ones(6, 4)), nn.Parameter(torch.ones(3, 5))]
        with torch.device(default):
            optimizer = getattr(rulec.torch, kind)(params, backend=backend, capturable=True)
        for seed in range(4):
            for p in params:
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed))
            if seed % 2:
                params[0].grad = None
            with torch.device(default):
                optimizer.step()
                optimizer.load_state_dict(optimizer.state_dict())
        steps.append(torch.cat([p.detach().reshape(-1) for p in params]))
    assert torch.equal(*steps)


#: A value of a group, or of the model, changes in every second step that is not skipped; `t` of it counts them all.
LATE = """
name: Late
hyper: {lr: 0.1}
state: {a: {init: 0, per: LEVEL}, m: 0}
skip: count_nonzero(not isfinite(g), per="model") > 0
step: |
  m = m/2 + g
  squares = sum(m*m, per="LEVEL")
  if t % 2 == 0:
    a = where(t == 2, squares, a + t)
  direction = m/(a + 1)
"""

#: The host alone, a device that the rule's skip keeps counts on, and one that is asked to.
PLACES: list[dict[str, Any]] = [
    {"backend": "cpu"},
    {"backend": "elsewhere"},
    {"backend": "elsewhere", "capturable": True},
]


@pytest.mark.parametrize("words", PLACES, ids=str)
@pytest.mark.parametrize("level", ["group", "model"])
def test_skipped_steps_are_not_counted_for_groups_and_the_model(level: str, words: dict[str, Any]) -> None:
    """The numbers of the reference interpreter, where steps are skipped before and in a branch."""
    random = np.random.default_rng(0)
    rule = rulec.parse(LATE.replace("LEVEL", level))
    start = [random.normal(size=shape) for shape in ((3, 2), (4,), (5,))]
    reference = ReferenceOptimizer(rule, start, [{}, {}], groups=[0, 0, 1])
    params = [nn.Parameter(torch.from_numpy(p.copy())) for p in start]
    optimizer = rulec.torch.optimizer(rule)([{"params": params[:2]}, {"params": params[2:]}], **words)
    for skipping in ([0], [], [1], [], [1, 2], [2], [], [], [0], []):
        gradients = [random.normal(size=p.shape) for p in start]
        for i in skipping:
            gradients[i].flat[1] = np.nan
        reference.step(gradients)
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = torch.from_numpy(gradient)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.step()
        for param, wanted in zip(params, reference.params, strict=True):
            np.testing.assert_allclose(param.detach().numpy(), wanted, rtol=1e-12)
    assert all(np.isfinite(p).all() for p in reference.params)
