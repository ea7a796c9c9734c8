"""Tensors of every kind that people train: either right, or one clear error before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import rulec.torch
from rulec.errors import BackendUnsupported, TensorError
from rulec.torch.tensors import tensors
from rulec.torch.tensors.tensors import guard_for, never
from tests.calls import profiled
from tests.test_layering import ROOT
from tests.torch.twins import Twins, difference, give_gradients, parameters


def run_both(make: Callable[[], list[Tensor]], steps: int = 4) -> tuple[list[Tensor], list[Tensor]]:
    """The parameters that `make` gives, trained by ours and by torch's."""
    found = []
    for library in (rulec.torch, torch.optim):
        params = make()
        optimizer = library.AdamW(params, lr=0.1, foreach=False)
        for number in range(steps):
            give_gradients(params, number)
            optimizer.step()
        found.append(params)
    return found[0], found[1]


def test_a_step_is_in_place() -> None:
    params = parameters()
    optimizer = rulec.torch.AdamW(params)
    give_gradients(params, 0)
    kept = [p.grad.clone() for p in params]  # type: ignore[union-attr]
    addresses = [(p.data_ptr(), p.grad.data_ptr()) for p in params]  # type: ignore[union-attr]
    for _ in range(2):
        optimizer.step()
    state = optimizer.state[params[0]]["exp_avg"].data_ptr()
    optimizer.step()
    assert [(p.data_ptr(), p.grad.data_ptr()) for p in params] == addresses  # type: ignore[union-attr]
    assert optimizer.state[params[0]]["exp_avg"].data_ptr() == state
    assert all(torch.equal(p.grad, k) for p, k in zip(params, kept, strict=True))  # type: ignore[arg-type]


def test_sizes_of_every_kind() -> None:
    ours, theirs = run_both(lambda: parameters(shapes=[(), (0,), (1,), (0, 3), (40000,), (1, 1), (3, 1, 5)]))
    assert difference([p for p in ours if p.numel()], [p for p in theirs if p.numel()]) <= 4
    nothing = torch.nn.Parameter(torch.zeros(0))
    nothing.grad = torch.zeros(0)
    rulec.torch.AdamW([nothing]).step()


def test_dtypes_may_be_mixed() -> None:
    def make() -> list[Tensor]:
        return [*parameters(torch.float32)[:2], *parameters(torch.float64)[2:]]

    ours, theirs = run_both(make)
    assert difference(ours, theirs) <= 8
    params = [*parameters(torch.bfloat16)[:2], *parameters(torch.float32)[2:]]
    optimizer = rulec.torch.AdamW(params, lr=0.1)
    for number in range(2):
        give_gradients(params, number)
        optimizer.step()
    assert [optimizer.state[p]["exp_avg"].dtype for p in params] == [p.dtype for p in params]


@pytest.mark.parametrize("gradient", ["same order", "other order"])
def test_channels_last_is_walked_as_it_lies(gradient: str) -> None:
    found = []
    for library in (rulec.torch, torch.optim):
        torch.manual_seed(0)
        model = torch.nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        optimizer = library.AdamW(model.parameters(), lr=0.1, foreach=False)
        for _ in range(3):
            grad = torch.randn(6, 4, 3, 3)
            if gradient == "same order":
                grad = grad.to(memory_format=torch.channels_last)
            model.weight.grad, model.bias.grad = grad, torch.ones(6)
            optimizer.step()
        found.append(model)
        assert model.weight.stride() == (36, 1, 12, 4)
        assert optimizer.state[model.weight]["exp_avg"].stride() == (36, 1, 12, 4)
    assert difference(list(found[0].parameters()), list(found[1].parameters())) <= 4


def test_a_transposed_parameter_is_dense() -> None:
    ours, theirs = run_both(lambda: [torch.nn.Parameter(torch.arange(12.0).reshape(3, 4).t())])
    assert ours[0].stride() == (1, 4)
    assert difference(ours, theirs) <= 4


def test_a_gradient_of_any_layout_is_read_rightly() -> None:
    param = torch.nn.Parameter(torch.zeros(3, 4))
    optimizer = rulec.torch.SGD([param], lr=1.0)
    for grad in (torch.ones(1, 1).expand(3, 4), torch.ones(4, 3).t(), torch.ones(3, 8)[:, ::2]):
        param.grad = grad
        optimizer.step()
    assert torch.equal(param.detach(), torch.full((3, 4), -3.0))
    single = torch.nn.Parameter(torch.zeros(1))
    single.grad = torch.tensor([2j]).conj().imag
    assert single.grad.is_neg()
    rulec.torch.SGD([single], lr=1.0).step()
    assert single.item() == 2.0


@pytest.mark.parametrize("rule", ["SGD", "AdamW", "Adagrad", "RMSprop", "Rprop", "NAdam"])
@pytest.mark.parametrize("shape", [(3, 4), (), (2,)])
def test_complex_parameters_are_pairs_of_reals_as_in_torch(rule: str, shape: tuple[int, ...]) -> None:
    def make() -> list[Tensor]:
        made = torch.Generator().manual_seed(3)
        return [torch.nn.Parameter(torch.randn(shape, generator=made, dtype=torch.complex64)), *parameters()]

    found = []
    for library in (rulec.torch, torch.optim):
        params = make()
        optimizer = getattr(library, rule)(params, lr=0.1, foreach=False)
        for number in range(4):
            give_gradients(params[1:], number)
            made = torch.Generator().manual_seed(number)
            grad = torch.randn(shape, generator=made, dtype=torch.complex64)
            if number == 2:  # torch's own do not read what is conjugated lazily
                grad = grad.conj() if library is rulec.torch else grad.conj().resolve_conj()
            params[0].grad = grad
            optimizer.step()
        found.append((params, optimizer.state_dict()["state"][0] if rule != "SGD" else {}))
    (ours, a), (theirs, b) = found
    assert (ours[0] - theirs[0]).abs().max() < 1e-5
    assert difference(ours[1:], theirs[1:]) <= 8
    assert {k: (v.dtype, v.shape) for k, v in a.items() if k != "mu_product"} == {
        k: (v.dtype, v.shape) for k, v in b.items() if k != "mu_product"
    }


def test_complex_checkpoints_go_on() -> None:
    param = torch.nn.Parameter(torch.randn(3, dtype=torch.complex64))
    param.grad = torch.randn(3, dtype=torch.complex64)
    first = rulec.torch.AdamW([param])
    first.step()
    second = rulec.torch.AdamW([param])
    second.load_state_dict(first.state_dict())
    assert torch.equal(second.state[param]["exp_avg"], first.state[param]["exp_avg"])


def strided() -> list[Tensor]:
    """Parameters with gaps between their elements, of which two lie between each other's elements."""
    made = torch.Generator().manual_seed(7)
    whole, pair = torch.randn(10, 5, 2, generator=made), torch.randn(4, 6, generator=made)
    columns = [pair[:, ::2], pair[:, 1::2].t(), whole[..., 0], whole[::3, :, 1]]
    return [torch.nn.Parameter(column) for column in columns]


@pytest.mark.parametrize(("rule", "keywords"), [("AdamW", {}), ("SGD", {"momentum": 0.9}), ("Adafactor", {})])
def test_parameters_with_gaps_in_memory_are_trained_where_they_lie(rule: str, keywords: dict[str, Any]) -> None:
    found = []
    for library in (rulec.torch, torch.optim):
        params = strided()
        places = [(p.data_ptr(), p.stride()) for p in params]
        optimizer = getattr(library, rule)(params, lr=0.1, foreach=False, **keywords)
        for number in range(3):
            give_gradients(params, number)
            for param in params:
                assert param.grad is not None
                param.grad = torch.stack([param.grad, param.grad], -1)[..., 0]  # with gaps, too
            optimizer.step()
            if number == 1:
                optimizer.load_state_dict(optimizer.state_dict())
        assert [(p.data_ptr(), p.stride()) for p in params] == places
        found.append(params)
    assert difference(*found) <= 16


def test_a_parameter_with_gaps_leaves_what_is_between_alone_and_keeps_one_copy() -> None:
    pair = torch.zeros(4, 6)
    param = torch.nn.Parameter(pair[:, ::2])
    optimizer = rulec.torch.AdamW([param], lr=0.1)
    param.grad = torch.ones(4, 3)
    version = param._version
    optimizer.step()
    assert param._version > version
    assert (param.detach() < 0).all()
    assert not pair[:, 1::2].any()
    assert optimizer._machine is not None
    assert [copy.nbytes for copy in optimizer._machine.copies.values()] == [48]
    param.data = torch.zeros(4, 3)  # moved, and without gaps now
    optimizer.step()
    assert not optimizer._machine.copies
    assert optimizer.state[param]["step"] == 2


def test_complex_and_eager_parameters_with_gaps() -> None:
    found = []
    for library in (rulec.torch, torch.optim):
        made = torch.Generator().manual_seed(7)
        param = torch.nn.Parameter(torch.randn(3, 8, dtype=torch.complex64, generator=made)[:, ::2])
        param.grad = torch.randn(3, 4, dtype=torch.complex64, generator=made)
        library.AdamW([param], lr=0.1, foreach=False).step()
        found.append(param)
    torch.testing.assert_close(*found)
    layers = []
    for eager in (False, True):
        layer = torch.nn.Linear(3, 4)
        with torch.no_grad():
            layer.weight = torch.nn.Parameter(torch.linspace(-1, 1, 24).reshape(4, 6)[:, ::2])
            layer.bias.zero_()
        opt = rulec.torch.EagerUpdate(layer, "adamw") if eager else rulec.torch.AdamW(layer.parameters())
        for _ in range(3):
            with opt.backward() if eager else nullcontext():
                layer(torch.ones(2, 3)).square().sum().backward()
            opt.step()
            opt.zero_grad()
        layers.append(layer)
    assert torch.equal(layers[0].weight, layers[1].weight)


def expanded() -> Tensor:
    return torch.nn.Parameter(torch.zeros(1, 3).expand(4, 3))


def lazy() -> Tensor:
    return torch.nn.LazyLinear(3).weight


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: [expanded()], "parameter 0 is a view with stride (0, 1) that repeats memory"),
        (lambda: [torch.zeros(9).as_strided((3, 3), (2, 1))], "parameter 0 is a view with stride (2, 1) that repeats"),
        (lambda: [torch.nn.Parameter(torch.zeros(3, dtype=torch.int32), False)], "torch.int32 cannot be optimized"),
        (lambda: [torch.nn.Parameter(torch.zeros(3, device="meta"))], "on 'meta' cannot be optimized"),
        (lambda: [torch.zeros(3).to_sparse()], "parameter 0 is sparse"),
        (lambda: [lazy()], "parameter 0 has no shape yet"),
        (lambda: [torch.zeros(3, dtype=torch.complex64).conj()], "conjugate or negative view"),
    ],
)
def test_parameters_that_cannot_be_updated_in_place(make: Callable[[], list[Tensor]], message: str) -> None:
    with pytest.raises(TensorError) as caught:
        rulec.torch.SGD(make(), lr=0.1)
    assert message in str(caught.value)


def test_a_parameter_given_twice_or_sharing_memory_is_refused() -> None:
    whole = torch.zeros(10)
    first, second = torch.nn.Parameter(whole[:6]), torch.nn.Parameter(whole[5:])
    with pytest.raises(TensorError, match="parameter 0 and parameter 1 share memory: give each tensor once"):
        rulec.torch.SGD([first, second], lr=0.1)
    with (
        pytest.raises(TensorError, match="weight and weight share memory"),
        pytest.warns(UserWarning, match="duplicate"),
    ):
        rulec.torch.SGD([("weight", first), ("weight", first)], lr=0.1)
    rulec.torch.SGD([torch.nn.Parameter(whole[:5]), torch.nn.Parameter(whole[5:])], lr=0.1)
    even, every_third = torch.nn.Parameter(whole[::2]), torch.nn.Parameter(whole[1::3])
    with pytest.raises(TensorError, match="parameter 0 and parameter 1 share memory"):
        rulec.torch.SGD([even, every_third], lr=0.1)
    rulec.torch.SGD([even, torch.nn.Parameter(whole[1::2])], lr=0.1)


def test_inference_tensors_are_refused_and_inference_mode_is_not() -> None:
    with torch.inference_mode():
        param = torch.zeros(3)
    with pytest.raises(TensorError, match="made in inference mode"):
        rulec.torch.SGD([param], lr=0.1)
    usual = torch.nn.Parameter(torch.ones(3))
    usual.grad = torch.ones(3)
    optimizer = rulec.torch.AdamW([usual], lr=0.1)
    with torch.inference_mode():
        optimizer.step()
    optimizer.step()
    assert not optimizer.state[usual]["exp_avg"].is_inference()


@pytest.mark.parametrize("steps", [0, 1, 6])
@pytest.mark.parametrize("name", ["AdamW", "LAMB", "Adafactor"])
def test_gradients_whose_memory_was_freed_are_refused_before_anything_is_written(name: str, steps: int) -> None:
    params = [torch.nn.Parameter(torch.ones(3, 4)), torch.nn.Parameter(torch.ones(4, 3).t().detach())]
    optimizer = getattr(rulec.torch, name)(params, lr=0.1)
    for number in range(steps):
        give_gradients(params, number)
        optimizer.step()
    for place, param in enumerate(params):
        give_gradients(params, steps)
        before = [p.detach().clone() for p in params]
        assert param.grad is not None
        param.grad.untyped_storage().resize_(0)
        with pytest.raises(TensorError, match=rf"the gradient of parameter {place} has .*memory of 0 bytes"):
            optimizer.step()
        assert all(map(torch.equal, params, before))


def test_sparse_gradients_are_refused_before_anything_is_written() -> None:
    table = torch.nn.Embedding(5, 3, sparse=True)
    other = torch.nn.Parameter(torch.ones(2))
    optimizer = rulec.torch.Adam([other, table.weight], lr=0.1)
    (table(torch.tensor([1])).sum() + other.sum()).backward()
    with pytest.raises(TensorError, match="the gradient of parameter 1 is sparse"):
        optimizer.step()
    assert torch.equal(other.detach(), torch.ones(2))
    table.weight.grad = table.weight.grad.to_dense()  # type: ignore[union-attr]
    optimizer.step()
    assert not torch.equal(other.detach(), torch.ones(2))


def test_moved_parameters_are_followed() -> None:
    kinds = [rulec.torch.AdamW, torch.optim.AdamW]
    twins = Twins(kinds, lambda kind, params: kind(params, lr=0.1, foreach=False))
    for number in range(6):
        if number in (2, 4):
            for params in twins.params:
                params[1].data = params[1].data.clone()
                params[2].data = params[2].data * 2
        twins.step(number)
    assert twins.ulps() <= 8


def test_another_memory_order_is_followed() -> None:
    found = []
    for library in (rulec.torch, torch.optim):
        torch.manual_seed(0)
        model = torch.nn.Conv2d(3, 4, 3)
        optimizer = library.AdamW(model.parameters(), lr=0.1, foreach=False)
        for number in range(4):
            if number == 2:
                model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            give_gradients(list(model.parameters()), number)
            optimizer.step()
        found.append(list(model.parameters()))
        if library is rulec.torch:
            assert optimizer.state[model.weight]["exp_avg"].is_contiguous(memory_format=torch.channels_last)
    assert difference(*found) <= 4


@pytest.mark.parametrize("name", ["Adafactor", "SOAP", "NorMuon", "LAMB"])
def test_rules_of_rows_and_columns_take_channels_last(name: str) -> None:
    """The numbers are those of contiguous parameters, whose sums are made in the same order."""
    found = []
    for order in (torch.contiguous_format, torch.channels_last):
        params = parameters(shapes=[(4, 3, 2, 2), (6, 4)])
        params[0].data = params[0].data.contiguous(memory_format=order)
        optimizer = getattr(rulec.torch, name)(params, lr=0.1)
        kept = params[0].data_ptr()
        for number in range(4):
            give_gradients(params, number)
            optimizer.step()
            if number == 1:
                params[0].data = params[0].data.clone()
                kept = params[0].data_ptr()
        assert params[0].data_ptr() == kept
        assert params[0].is_contiguous(memory_format=order)
        found.append(params)
    assert difference(*found) <= (4 if name == "LAMB" else 0)


def test_another_dtype_is_followed_by_the_states() -> None:
    params = parameters()
    optimizer = rulec.torch.AdamW(params, lr=0.1)
    exact = parameters(torch.float64)
    wide = torch.optim.AdamW(exact, lr=0.1, foreach=False)
    for number in range(6):
        if number == 3:
            for p in params:
                p.grad = None
                p.data = p.data.double()
        for q, o in ((params, optimizer), (exact, wide)):
            give_gradients(q, number)
            o.step()
    state = optimizer.state[params[0]]
    assert (state["exp_avg"].dtype, state["step"].item()) == (torch.float64, 6)
    assert max((p - q).abs().max().item() for p, q in zip(params, exact, strict=True)) < 1e-5


def test_a_parameter_of_another_shape_needs_a_state_of_that_shape() -> None:
    params = parameters()
    optimizer = rulec.torch.AdamW(params, lr=0.1)
    give_gradients(params, 0)
    optimizer.step()
    kept = params[0].detach().clone()
    params[3].grad = None
    params[3].data = torch.zeros(7)
    params[3].grad = torch.ones(7)
    with pytest.raises(
        rulec.RulecError, match=r"exp_avg of parameter 3 was saved with shape \(2, 3, 2\), where it has \(7,\)"
    ):
        optimizer.step()
    assert torch.equal(params[0].detach(), kept)
    optimizer.state[params[3]].clear()
    optimizer.step()
    assert optimizer.state[params[3]]["step"] == 1
    assert optimizer.state[params[0]]["step"] == 2


def test_a_shortened_view_of_the_same_memory_is_not_overrun() -> None:
    param = torch.nn.Parameter(torch.zeros(8))
    optimizer = rulec.torch.SGD([param], lr=1.0)
    param.grad = torch.ones(8)
    optimizer.step()
    memory = param.data
    param.grad = None
    param.data = memory[:3]
    param.grad = torch.ones(3)
    optimizer.step()
    assert torch.equal(memory, torch.tensor([-2.0] * 3 + [-1.0] * 5))
    param.grad = torch.ones(8)[:3]
    param.data = memory
    with pytest.raises(TensorError, match=r"the gradient of parameter 0 has shape \(3,\), its parameter \(8,\)"):
        optimizer.step()


def test_parameters_may_be_replaced_with_their_states_as_gaussian_splatting_does() -> None:
    found = []
    for library in (rulec.torch, torch.optim):
        params = parameters()
        optimizer = library.Adam([{"params": [p]} for p in params], lr=0.1, foreach=False)
        for number in range(4):
            if number == 2:
                old = params[0]
                new = torch.nn.Parameter(torch.cat([old.detach(), torch.ones(2)]))
                stored = optimizer.state.pop(old)
                for key in ("exp_avg", "exp_avg_sq"):
                    stored[key] = torch.cat([stored[key], torch.zeros(2)])
                optimizer.param_groups[0]["params"][0] = params[0] = new
                optimizer.state[new] = stored
            give_gradients(params, number)
            optimizer.step()
        found.append(params)
    assert difference(*found) <= 8


def test_a_list_of_other_parameters_is_taken_without_comparing_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """As accelerate shards a model: comparing a DTensor with the tensor before it may be a collective."""
    params = [torch.nn.Parameter(torch.ones(1))]
    optimizer = rulec.torch.SGD(params, lr=0.5)
    params[0].grad = torch.ones(1)
    optimizer.step()
    new = torch.nn.Parameter(torch.full((1,), 0.5))
    optimizer.param_groups[0]["params"] = [new]
    monkeypatch.setattr(torch.Tensor, "__eq__", _no_comparison)
    new.grad = torch.ones(1)
    optimizer.step()
    optimizer.param_groups[0]["params"] = [new]
    optimizer.step()
    assert new.item() == -0.5


def _no_comparison(*_: Any) -> bool:
    raise AssertionError("two tensors were compared")


def test_states_may_be_edited_in_any_way() -> None:
    kinds = [rulec.torch.AdamW, torch.optim.AdamW]
    twins = Twins(kinds, lambda kind, params: kind(params, lr=0.1, foreach=False))
    for number in range(10):
        for optimizer, params in zip(twins.optimizers, twins.params, strict=True):
            state = optimizer.state
            if number == 2:
                state[params[0]]["exp_avg"].mul_(0.5)
            if number == 3:
                state[params[0]]["exp_avg"] = torch.ones(5)
            if number == 4:
                state[params[0]].update(step=torch.tensor(9.0))
            if number == 5:
                state[params[1]]["step"].zero_()
            if number == 6:
                state.clear()
            if number == 8:
                state[params[2]] = {}
        twins.step(number)
    assert twins.ulps() <= 8


def test_autograd_notices_that_a_step_wrote() -> None:
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = rulec.torch.SGD([param], lr=0.1)
    loss = (param * param).sum()
    param.grad = torch.ones(3)
    version = param._version
    optimizer.step()
    assert param._version == version + 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_gradients_of_another_dtype() -> None:
    """bfloat16 parameters with float32 gradients, where torch allows that, and a change of it on the way."""
    param = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    if not hasattr(param, "grad_dtype"):
        pytest.skip("this torch has gradients of their parameter's dtype only")
    optimizer = rulec.torch.SGD([param], lr=1.0, momentum=0.5)
    param.grad_dtype = None
    for grad in (torch.full((4,), 1.0), torch.full((4,), 1.0, dtype=torch.bfloat16), torch.full((4,), 1.0)):
        param.grad = grad
        optimizer.step()
    assert torch.equal(param.detach().float(), torch.full((4,), -1.0 - 1.5 - 1.75))
    param.grad_dtype = None
    param.grad = torch.ones(4, dtype=torch.int64)
    with pytest.raises(TensorError, match=r"torch\.int64 cannot be optimized"):
        optimizer.step()


def test_nan_and_infinity_stay_where_they_are() -> None:
    param = torch.nn.Parameter(torch.ones(4))
    param.grad = torch.tensor([1.0, torch.nan, torch.inf, -1.0])
    rulec.torch.AdamW([param], lr=0.1).step()
    assert param.isnan().tolist() == [False, True, True, False]


def test_a_step_allocates_nothing_that_grows() -> None:
    """After the first step, which allocates the states."""
    params = [torch.nn.Parameter(torch.zeros(100_000)) for _ in range(4)]
    for p in params:
        p.grad = torch.ones(100_000)
    optimizer = rulec.torch.AdamW(params)
    optimizer.step()
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.step()
    assert sum(max(event.cpu_memory_usage, 0) for event in profile.key_averages()) < 10_000


def test_python_does_as_much_for_a_thousand_tensors_as_for_fifty() -> None:
    """A steady step is few calls of our Python functions, and their number does not grow with that of tensors."""

    def calls(count: int) -> int:
        ours = str(ROOT / "rulec"), str(ROOT / "backends")
        params = [torch.nn.Parameter(torch.zeros(3)) for _ in range(count)]
        for p in params:
            p.grad = torch.ones(3)
        optimizer = rulec.torch.AdamW(params)
        for _ in range(4):
            optimizer.step()
        seen = 0

        def count_call(frame: Any, event: str, argument: Any) -> None:
            nonlocal seen
            seen += event == "call" and frame.f_code.co_filename.startswith(ours)

        profiled(optimizer.step, count_call)
        return seen

    assert calls(1000) == calls(50) <= 8
    assert calls(2) <= 44


@pytest.mark.parametrize(
    "other",
    [
        torch.ones(3, 5), torch.ones(4, 3).t(), torch.ones(3, 4).double(), torch.ones(3, 4, dtype=torch.complex64),
        torch.ones(3, 4).to_sparse(), torch._neg_view(torch.ones(3, 4)), torch.ones(3, 8)[:, ::2],
        torch.nn.Parameter(torch.ones(3, 4)), torch.ones(12), torch.ones(1, 4).expand(3, 4),
        torch.ones(3, 4, device="meta"),
    ],
)  # fmt: skip
def test_a_guard_is_true_of_nothing_that_looks_otherwise(other: Tensor) -> None:
    guard = guard_for([torch.ones(3, 4), torch.ones(2)])
    assert guard(torch.zeros(3, 4), torch.zeros(2)), "torch lost what guards are made of: steps are slower"
    assert not guard(other, torch.zeros(2))
    assert not guard(torch.zeros(2), torch.zeros(3, 4))
    assert not never(torch.zeros(3, 4), torch.zeros(2))


def test_without_guards_the_numbers_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [(3,), (2, 2)] * 4
    found = []
    for plain in (False, True):
        if plain:
            monkeypatch.setattr(tensors, "guard_for", lambda grads: never)
        params = parameters(shapes=shapes)
        optimizer = rulec.torch.AdamW(params)
        for number in range(4):
            give_gradients(params, number)
            optimizer.step()
        found.append(params)
    assert difference(*found) == 0


@pytest.fixture
def jax() -> None:
    """Imported before the test, which need not wait for it."""
    pytest.importorskip("jax")


@pytest.mark.usefixtures("jax")
def test_a_backend_that_makes_new_arrays_is_refused() -> None:
    p = torch.ones(3, requires_grad=True)
    p.grad = torch.ones(3)
    with pytest.raises(BackendUnsupported, match="'jax' cannot express an update of PyTorch's tensors"):
        rulec.torch.AdamW([p], backend="jax").step()
    assert p.detach().tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("shape", [(0,), (6, 0), (0, 6), (2, 0, 3)])
@pytest.mark.parametrize("rule", ["AdamW", "LAMB", "Shampoo"])
def test_parameters_without_elements_are_passed_over(rule: str, shape: tuple[int, ...]) -> None:
    params = [torch.nn.Parameter(torch.zeros(shape)), torch.nn.Parameter(torch.ones(3, 3))]
    optimizer = getattr(rulec.torch, rule)(params, lr=0.1)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert params[0].shape == shape
    assert (params[1] < 1).all()
