"""States that stream through the device: bits, bytes and memory of `offload="states"`.

The links of these tests end copies as late as they may, and leave NaN where nothing may be read: see `links`.
"""

from __future__ import annotations

import io
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import rulec
import rulec.torch
from rulec.backend import registry
from rulec.errors import HyperError, TensorError
from rulec.torch.offload.offload import warn_of_matrix_functions
from tests.runtime.elsewhere import Elsewhere
from tests.torch.offload.links import LateLink, late_links
from tests.torch.offload.runs import BUFFER, SHAPES, assert_same_bits, parameters, take_steps

#: Rules of one stage, of several, over groups and the model, with histories, and with matrix functions.
RULES = (
    "AdamW",
    "Lion",
    "SGD",
    "LAMB",
    "Adafactor",
    "Prodigy",
    "SOAP",
    "Shampoo",
    "RAdam",
    "CAME",
    "SM3",
    "AdaShift",
    "DoG",
)

#: Shapes without empty tensors, of which matrix functions take none.
MATRICES = ((64, 48), (48, 64), (64, 48), (200, 30), (20, 48))

#: A rule with a state that it writes and never reads.
KEPT = "name: Kept\nhyper: {lr: 0.1}\nstate: {last: 0}\nstep: |\n  last = g\n  p = p - lr*g\n"

#: A rule with a state that values between stages are read from before and after a reduction over the model.
LINES = """
name: Lines
hyper: {lr: 0.1}
state: {r: {init: 1, per: row}, m: 0}
step: |
  d = sum(r, per="model")
  m = 0.9*m + g
  r = r + norm(g, per="row")
  p = p - lr*m*r/d
"""

ELEMENTS = sum(torch.Size(shape).numel() for shape in SHAPES)

Made = Callable[..., Any]

#: The keywords of a run without offload, and of one with it.
PLAIN: dict[str, Any] = {}
STREAMED: dict[str, Any] = {"offload": "states", "offload_buffer": BUFFER}


def buffer_bytes(optimizer: Any) -> int:
    return sum(buffer.numel() for buffer in optimizer._machine.offload.buffers)


@pytest.fixture(autouse=True)
def links() -> Iterator[list[LateLink]]:
    with late_links() as links:
        yield links


@pytest.fixture
def elsewhere() -> Iterator[None]:
    """The backend `elsewhere`, whose kernels are a device's."""
    plain = registry.get
    with mock.patch.object(registry, "get", lambda name: Elsewhere() if name == "elsewhere" else plain(name)):
        yield


def assert_same_run(
    made: Made, shapes: Sequence[Sequence[int]] = SHAPES, dtype: torch.dtype = torch.float32, **keywords: Any
) -> Any:
    """Asserts that four steps have the bits of those without offload; returns the optimizer with it."""
    plain, moved = parameters(dtype, shapes), parameters(dtype, shapes)
    one, other = made(plain, **keywords), offloaded(made, moved, **keywords)
    take_steps(one, plain, 4)
    take_steps(other, moved, 4)
    assert_same_bits(moved, plain)
    assert_same_bits(other.state_dict()["state"], one.state_dict()["state"])
    return other


def offloaded(made: Made, params: Sequence[Tensor], **keywords: Any) -> Any:
    return made(params, **STREAMED, **keywords)


def class_of(rule: str) -> Made:
    made: Made = getattr(rulec.torch, rule)
    return made


# Bits


@pytest.mark.parametrize("rule", RULES)
def test_bits_are_those_of_the_step_without_offload(rule: str) -> None:
    assert_same_run(class_of(rule))


@pytest.mark.parametrize("rule", ["AdamW", "LAMB", "Adafactor", "Prodigy", "SOAP", "SM3", "StableSPAM", "DoG"])
def test_bits_of_a_device_s_kernels_are_the_same(rule: str, elsewhere: None) -> None:
    assert_same_run(class_of(rule), shapes=SHAPES[:-1], backend="elsewhere")


@pytest.mark.parametrize("rule", ["Muon", "NorMuon", "Dion", "GaLore", "Apollo"])
@pytest.mark.parametrize("backend", [None, "elsewhere"])
def test_bits_of_matrix_functions_are_the_same(rule: str, backend: str | None, elsewhere: None) -> None:
    assert_same_run(class_of(rule), shapes=MATRICES, backend=backend)


@pytest.mark.parametrize("storage", ["int8", "float8_e4m3", "dynamic4", "bfloat16", "bfloat16_sr"])
@pytest.mark.parametrize("rule", ["AdamW", "LAMB"])
def test_bits_are_the_same_in_every_storage_of_states(rule: str, storage: str) -> None:
    assert_same_run(class_of(rule), state_dtype=storage)


@pytest.mark.parametrize("weights", ["split", "master", "kahan", "split24", "stochastic"])
@pytest.mark.parametrize("rule", ["AdamW", "LAMB"])
def test_bits_are_the_same_with_every_kind_of_weights(rule: str, weights: str) -> None:
    assert_same_run(class_of(rule), dtype=torch.bfloat16, weights=weights)


@pytest.mark.parametrize("rule", [KEPT, LINES], ids=["kept", "lines"])
@pytest.mark.parametrize("backend", [None, "elsewhere"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bits_of_states_that_are_only_written_or_read_twice_are_the_same(
    rule: str, backend: str | None, dtype: torch.dtype, elsewhere: None, links: list[LateLink]
) -> None:
    shapes = [*SHAPES[:-1], *MATRICES]
    assert_same_run(rulec.torch.optimizer(rulec.parse(rule)), shapes, dtype, backend=backend)
    assert (links[0].moved["up"] == 0) == (rule is KEPT)


def test_tensors_whose_turns_have_one_buffer_follow_each_other() -> None:
    runs = []
    for keywords in (PLAIN, STREAMED):
        params = parameters(shapes=[(1000,)] * 7)
        optimizer = rulec.torch.AdamW(params, **keywords)
        take_steps(optimizer, params, 1)
        for number in range(1, 4):
            generator = torch.Generator().manual_seed(number)
            for place, param in enumerate(params):
                param.grad = torch.randn(1000, generator=generator) if place % 3 == 0 else None
            optimizer.step()
        runs.append((params, optimizer.state_dict()["state"]))
    assert_same_bits(runs[1], runs[0])


@pytest.mark.parametrize("rule", ["adamw", KEPT], ids=["adamw", "kept"])
@pytest.mark.parametrize("backend", [None, "elsewhere"])
def test_a_skipped_step_leaves_states_as_they_are(rule: str, backend: str | None, elsewhere: None) -> None:
    skipping = rulec.load("skip_not_finite") >> (rulec.parse(rule) if rule is KEPT else rulec.load(rule))
    made = rulec.torch.optimizer(skipping)
    plain, moved = parameters(), parameters()
    one, other = made(plain, backend=backend), offloaded(made, moved, backend=backend)
    for number in range(3):
        for optimizer, params in ((one, plain), (other, moved)):
            take_steps(optimizer, params, 1, number)
            params[0].grad[0, 0] = torch.inf  # type: ignore[index]
            with pytest.warns(RuntimeWarning, match="skipped") if backend is None else mock.MagicMock():
                optimizer.step()
    assert_same_bits(moved, plain)
    assert_same_bits(other.state_dict()["state"], one.state_dict()["state"])
    assert other.skipped_steps == one.skipped_steps == 3


def test_schedule_free_moves_to_its_point_of_evaluation_and_back() -> None:
    plain, moved = parameters(), parameters()
    one, other = rulec.torch.ScheduleFreeAdamW(plain), offloaded(rulec.torch.ScheduleFreeAdamW, moved)
    for number in range(3):
        take_steps(one, plain, 1, number)
        take_steps(other, moved, 1, number)
        for way in ("eval", "train"):
            getattr(one, way)()
            getattr(other, way)()
            assert_same_bits(moved, plain)
            assert_same_bits(other.state_dict()["state"], one.state_dict()["state"])


def test_statistics_are_the_same() -> None:
    plain, moved = parameters(shapes=SHAPES[:-1]), parameters(shapes=SHAPES[:-1])
    one = rulec.torch.AdamW(plain, watch="norms", watch_every=2)
    other = offloaded(rulec.torch.AdamW, moved, watch="norms", watch_every=2)
    take_steps(one, plain, 3)
    take_steps(other, moved, 3)
    assert one.statistics().numbers()
    assert other.statistics().numbers() == one.statistics().numbers()
    assert_same_bits(moved, plain)


# Bytes and memory


@pytest.mark.parametrize("rule", ["adamw", "clip_by_global_norm >> adamw", "skip_not_finite >> adamw"])
def test_each_state_travels_once_and_the_buffers_are_small(rule: str, links: list[LateLink]) -> None:
    other = assert_same_run(rulec.torch.optimizer(rule))
    (link,) = links
    assert link.moved == {"up": 4 * 8 * ELEMENTS, "down": 4 * 8 * ELEMENTS}
    assert sum(memory.numel() for memory in link.memory) == buffer_bytes(other)
    assert BUFFER < buffer_bytes(other) <= 4 * BUFFER


def test_a_state_that_is_only_read_does_not_travel_down(links: list[LateLink]) -> None:
    assert_same_run(rulec.torch.DoG)  # its state is where the parameter was at first
    assert links[0].moved == {"up": 4 * 4 * ELEMENTS, "down": 0}


def test_a_tensor_larger_than_a_buffer_has_a_larger_one_where_its_rule_sees_all_of_it(links: list[LateLink]) -> None:
    other = assert_same_run(rulec.torch.LAMB)
    assert buffer_bytes(other) < 8 * (200 * 30 + 64 * 48) + BUFFER
    assert links[0].moved == {"up": 4 * 8 * ELEMENTS, "down": 4 * 8 * ELEMENTS}


def test_kernels_are_bound_to_buffers_and_users_see_the_host(links: list[LateLink]) -> None:
    params = parameters()
    optimizer = offloaded(rulec.torch.AdamW, params)
    take_steps(optimizer, params, 1)
    (link,) = links
    for engine in optimizer._machine.engines:
        for bucket in engine.buckets.values():
            assert all(link._is_here(x) for states in bucket.moved.states for x in states.values())
            assert not any(link._is_here(x) for states in bucket.states for x in states.values())
    for saved in optimizer.state_dict()["state"].values():
        assert not any(link._is_here(x) for x in saved.values() if isinstance(x, Tensor))
    mine = optimizer.state_dict()["state"][0]["exp_avg"]
    assert mine.data_ptr() == optimizer.state[params[0]]["exp_avg"].data_ptr()


# Changes


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("rule", ["AdamW", "SOAP", "ScheduleFreeAdamW"])
def test_checkpoints_are_those_without_offload(rule: str, first: bool) -> None:
    made, params, wanted = class_of(rule), parameters(), parameters()
    one = offloaded(made, params) if first else made(params)
    take_steps(one, params, 3)
    saved = io.BytesIO()
    torch.save(one.state_dict(), saved)
    saved.seek(0)
    params = [param.detach().clone().requires_grad_() for param in params]
    other = made(params) if first else offloaded(made, params)
    other.load_state_dict(torch.load(saved))
    take_steps(other, params, 2, 3)
    plain = made(wanted)
    take_steps(plain, wanted, 5)
    assert_same_bits(params, wanted)
    assert_same_bits(other.state_dict()["state"], plain.state_dict()["state"])


@pytest.mark.parametrize("rule", ["AdamW", "Prodigy"])
def test_parameters_join_and_some_have_no_gradient(rule: str) -> None:
    runs = []
    for keywords in (PLAIN, STREAMED):
        params, more = parameters(), parameters(shapes=((30, 40), (7,), (100, 50)))
        optimizer = class_of(rule)(params[:3], **keywords)
        take_steps(optimizer, params[:3], 2)
        if rule == "AdamW":  # the whole model's states are of all groups
            optimizer.add_param_group({"params": [*params[3:], *more], "lr": 1e-2})
        for number in range(2, 6):
            take_steps_of_some(optimizer, [*params, *more], number)
        runs.append((params, more, optimizer.state_dict()["state"]))
    assert_same_bits(runs[1], runs[0])


def take_steps_of_some(optimizer: Any, params: Sequence[Tensor], number: int) -> None:
    """A step in which every third parameter has no gradient."""
    generator = torch.Generator().manual_seed(number)
    for place, param in enumerate(params):
        param.grad = torch.randn(param.shape, generator=generator) if (place + number) % 3 else None
    optimizer.step()


def test_states_that_others_move_or_replace_are_followed() -> None:
    runs = []
    for keywords in (PLAIN, STREAMED):
        params = parameters()
        optimizer = rulec.torch.AdamW(params, **keywords)
        take_steps(optimizer, params, 2)
        optimizer.state[params[0]]["exp_avg"].share_memory_()
        take_steps(optimizer, params, 1, 2)
        optimizer.state[params[3]]["exp_avg_sq"] = torch.ones(SHAPES[3])
        take_steps(optimizer, params, 1, 3)
        optimizer.state[params[1]]["exp_avg"].zero_()
        take_steps(optimizer, params, 1, 4)
        params[2].data = params[2].data.clone()
        take_steps(optimizer, params, 1, 5)
        runs.append((params, optimizer.state_dict()["state"]))
    assert_same_bits(runs[1], runs[0])


def test_gradients_of_another_dtype_have_a_step_of_their_own() -> None:
    runs = []
    for keywords in (PLAIN, STREAMED):
        params = parameters(torch.bfloat16)
        optimizer = rulec.torch.AdamW(params, weights="split", **keywords)
        take_steps(optimizer, params, 2)
        for param in params:
            param.grad_dtype = None
            param.grad = torch.ones(param.shape)
        optimizer.step()
        runs.append((params, optimizer.state_dict()["state"]))
    assert_same_bits(runs[1], runs[0])


def test_parameters_with_gaps_have_copies() -> None:
    def made(params: Sequence[Tensor], **keywords: Any) -> Any:
        whole = [p.detach().repeat_interleave(2, -1) for p in params]
        cut = [w[..., ::2].requires_grad_() for w in whole]
        optimizer = rulec.torch.LAMB(cut, **keywords)
        optimizer.cut = cut  # type: ignore[attr-defined]
        return optimizer

    plain, moved = made(parameters()), offloaded(made, parameters())
    take_steps(plain, plain.cut, 3)
    take_steps(moved, moved.cut, 3)
    assert_same_bits(moved.cut, plain.cut)


@pytest.mark.parametrize("failing", range(1, 6))
def test_after_a_copy_has_failed_states_are_whole(failing: int, links: list[LateLink]) -> None:
    params = parameters(shapes=[(1000,)] * 5)
    optimizer = offloaded(rulec.torch.AdamW, params)
    take_steps(optimizer, params, 1)
    (link,) = links
    copies, count = link.up, itertools.count(1)

    def up(pairs: Any, after: Any = None) -> Any:
        if next(count) == failing:
            raise RuntimeError("the link is down")
        return copies(pairs, after)

    link.up = up  # type: ignore[method-assign]
    with pytest.raises(Exception, match="the link is down"):
        take_steps(optimizer, params, 1, 1)
    link.up = copies  # type: ignore[method-assign]
    steps = [int(optimizer.state[param]["step"]) for param in params]
    for param, step in zip(params, steps, strict=True):
        assert step in (1, 2)
        assert all(bool(value.isfinite().all()) for value in (param, *optimizer.state[param].values()))
    optimizer.load_state_dict(optimizer.state_dict())
    take_steps(optimizer, params, 1, 2)
    assert [int(optimizer.state[param]["step"]) for param in params] == [step + 1 for step in steps]
    assert all(bool(optimizer.state[param]["exp_avg"].isfinite().all()) for param in params)


# Steps inside the backward pass


@pytest.mark.parametrize(("rule", "keywords"), [("adamw", {}), ("momentum", {"accumulate": "fold"})])
def test_updates_inside_the_backward_pass_have_the_same_bits(rule: str, keywords: dict[str, Any]) -> None:
    runs = []
    for offload in (PLAIN, STREAMED | {"offload_buffer": 2048}):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8), nn.Tanh(), nn.Linear(8, 3))
        optimizer = rulec.torch.EagerUpdate(model, rule, lr=0.1, **offload, **keywords)
        for seed in range(3):
            x = torch.randn(12, 16, generator=torch.Generator().manual_seed(seed))
            for last in (False, True):
                with optimizer.backward(last_microbatch=last):
                    model(x).square().mean().backward()
            optimizer.step()
        runs.append([*model.parameters()])
    assert_same_bits(runs[1], runs[0])


# Refusals and warnings


def test_a_step_on_the_host_warns_of_matrix_functions_of_a_device() -> None:
    def routes(rule: str, device: str) -> Any:
        return [SimpleNamespace(rule=rulec.load(rule), here=torch.empty(2, 2, device=device), name="w")]

    with pytest.warns(RuntimeWarning, match="Muon computes newton_schulz.*give offload='states', where meta"):
        warn_of_matrix_functions(routes("muon", "meta"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_matrix_functions(routes("muon", "cpu"))
        warn_of_matrix_functions(routes("adafactor", "meta"))


def test_a_captured_step_is_refused() -> None:
    params = parameters()
    with pytest.raises(HyperError, match="works by the host, and a group has capturable=True"):
        take_steps(offloaded(rulec.torch.AdamW, params, capturable=True), params, 1)


def test_sparse_gradients_are_refused() -> None:
    table = nn.Embedding(10, 4, sparse=True)
    optimizer = offloaded(rulec.torch.SparseAdam, [*table.parameters()])
    table(torch.tensor([1, 2])).sum().backward()
    before = table.weight.detach().clone()
    with pytest.raises(TensorError, match="offload moves whole gradients"):
        optimizer.step()
    assert torch.equal(table.weight, before)
