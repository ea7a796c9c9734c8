"""`GradStore`: segments by hand equal the whole step, bit for bit, and what would not is refused."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import rulec
from rulec.errors import RulecError, RuleError, TensorError
from rulec.torch import EagerUpdate, GradStore


class Tied(nn.Module):
    """Words in, words out, by one table; the gradients of the two uses come from different segments."""

    def __init__(self) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(3)
        self.table = nn.Parameter(torch.randn(7, 5, generator=made))
        self.weight = nn.Parameter(torch.randn(5, 5, generator=made))
        self.bias = nn.Parameter(torch.randn(5, generator=made))

    def body(self, words: Tensor) -> Tensor:
        return torch.tanh(self.table[words] @ self.weight + self.bias)

    def head(self, hidden: Tensor) -> Tensor:
        return (hidden @ self.table.T).square().mean()


def words(step: int) -> Tensor:
    return torch.randint(7, (6,), generator=torch.Generator().manual_seed(step))


def whole(model: Tied, opt: Optimizer, step: int) -> None:
    opt.zero_grad()
    model.head(model.body(words(step))).backward()
    opt.step()


def segments(model: Tied, opt: Optimizer, step: int, store: GradStore) -> None:
    hidden = model.body(words(step))
    cut = hidden.detach().requires_grad_()
    store.backward(model.head(cut), [model.table, cut])
    store.backward(hidden, [*model.parameters()], store.pop(cut))
    store.step(opt, [model.weight, model.bias])
    assert [*store] == [model.table]
    store.step(opt)
    assert len(store) == 0


def bytes_of(model: nn.Module, opt: Optimizer) -> list[bytes]:
    """Every parameter and state."""
    states = [v for p in model.parameters() for v in opt.state[p].values() if isinstance(v, Tensor)]
    return [t.detach().numpy().tobytes() for t in [*model.parameters(), *states]]


def partitioned(params: Any, **keywords: Any) -> Optimizer:
    rules = rulec.partition({"table": "adamw", "*": "lion"})
    return rulec.torch.Partitioned(rules, zip(("table", "weight", "bias"), params, strict=True), **keywords)


MAKES: dict[str, Callable[..., Optimizer]] = {
    "adamw": rulec.torch.AdamW, "nadam": rulec.torch.NAdam, "muon": lambda p, lr: rulec.torch.Muon([{"params": [*p],
    "tags": []}], lr=lr), "partition": partitioned, "torch": torch.optim.AdamW, "adagrad": torch.optim.Adagrad,
}  # fmt: skip


@pytest.mark.parametrize("name", MAKES)
def test_segments_by_hand_equal_the_whole_step(name: str) -> None:
    models = Tied(), Tied()
    one, other = (MAKES[name](model.parameters(), lr=0.01) for model in models)
    store = GradStore()
    for step in range(5):
        whole(models[0], one, step)
        segments(models[1], other, step, store)
    assert bytes_of(models[0], one) == bytes_of(models[1], other)


def test_an_eager_optimizer_takes_parts_too() -> None:
    models = Tied(), Tied()
    one, other = rulec.torch.AdamW(models[0].parameters()), EagerUpdate(models[1], "adamw")
    for step in range(3):
        whole(models[0], one, step)
        segments(models[1], other, step, GradStore())
        assert (other.report().fired, other.report().deferred) == (2, 1)
    assert bytes_of(models[0], one) == bytes_of(models[1], other.inner)


def test_what_arrived_in_an_eager_backward_is_not_updated_again() -> None:
    model = Tied()
    opt = EagerUpdate(model, "adamw", contributions=1)
    with opt.backward():
        model.head(model.body(words(0))).backward()
    assert opt.report().fired == 3
    for params in ([model.weight], None):
        with pytest.raises(RulecError, match="weight was updated in this step already"):
            GradStore({model.weight: torch.ones(5, 5)}).step(opt, params)
    opt.step()


def test_gradients_are_summed_and_never_written_to() -> None:
    a, b = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    shared = torch.tensor([1.0, 2.0, 3.0])
    store = GradStore({a: shared, b: shared})
    for _ in range(2):
        store.extend([(a, shared), (b, None)])
    assert shared.tolist() == [1.0, 2.0, 3.0]
    assert (store[a].tolist(), store[b].tolist()) == ([3.0, 6.0, 9.0], [1.0, 2.0, 3.0])
    assert (store.nbytes, store.peak_nbytes, len(store), b in store) == (24, 24, 2, True)
    shared.fill_(7.0)
    last = store.pop(b)
    assert last is not None
    assert last.tolist() == [1.0, 2.0, 3.0]
    assert store.pop(b) is None
    shared.copy_(torch.tensor([1.0, 2.0, 3.0]))
    store.extend(GradStore({a: shared}))
    assert store[a].tolist() == [4.0, 8.0, 12.0]
    assert repr(store) == "GradStore(1 gradients, 12 bytes)"


class Reusing(torch.autograd.Function):
    """A scaled tensor, whose gradients are all written into one tensor."""

    room = torch.zeros(3)

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x * scale

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return Reusing.room.copy_(grads[0] * ctx.scale), None


def by_backward(param: nn.Parameter, grads: list[Tensor], room: Tensor) -> Tensor:
    store = GradStore()
    for scale in (1.0, 10.0):
        store.backward(Reusing.apply(param, scale).sum(), param)
    return store[param]


def by_collect(param: nn.Parameter, grads: list[Tensor], room: Tensor) -> Tensor:
    """As DistributedDataParallel does: gradients are views of a bucket."""
    store = GradStore()
    for grad in grads:
        param.grad = room.copy_(grad)[:]
        store.collect([param])
    return store[param]


def by_collect_of_one_tensor(param: nn.Parameter, grads: list[Tensor], room: Tensor) -> Tensor:
    store = GradStore()
    for grad in grads:
        param.grad = room.copy_(grad)
        store.collect([param])
    return store[param]


def by_extend(param: nn.Parameter, grads: list[Tensor], room: Tensor) -> Tensor:
    store = GradStore()
    for grad in grads:
        store.extend({param: room.copy_(grad)})
    return store[param]


def by_stores(param: nn.Parameter, grads: list[Tensor], room: Tensor) -> Tensor:
    whole = GradStore()
    for grad in grads:
        store = GradStore({param: room.copy_(grad)})
        whole.extend(store)
        room.zero_()
        store[param].fill_(5.0)
    return whole[param]


@pytest.mark.parametrize("way", [by_backward, by_collect, by_collect_of_one_tensor, by_extend, by_stores])
def test_a_tensor_that_the_next_gradient_is_written_to_has_no_say(way: Callable[..., Tensor]) -> None:
    """As with `.grad` of torch, which copies what somebody else has."""
    param = nn.Parameter(torch.ones(3))
    for scale in (1.0, 10.0):
        Reusing.apply(param, scale).sum().backward()
    peer, param.grad = param.grad, None
    assert peer is not None
    assert torch.equal(way(param, [torch.ones(3), torch.full((3,), 10.0)], torch.empty(3)), peer)


def test_gradients_with_one_memory_are_apart_when_a_step_changes_them() -> None:
    a, b = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(3, 2))
    store = GradStore()
    store.backward((a.t() + b).square().sum() + (a.t() + b).sum(), [a, b])
    store[a].mul_(2)
    assert (store[a].unique().tolist(), store[b].unique().tolist()) == ([2.0], [1.0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("way", ["extend", "collect", "backward", "stores"])
def test_sums_of_16_bits_are_rounded_once(way: str, dtype: torch.dtype) -> None:
    param = nn.Parameter(torch.zeros(3, dtype=dtype))
    grads = [torch.tensor([1.0, 1.0 + seed % 3, -(2.0**-4)], dtype=dtype) for seed in range(300)]
    store = GradStore()
    for grad in grads:
        if way == "backward":
            store.backward((param * grad).sum(), param)
        elif way == "collect":
            param.grad = grad.clone()
            store.collect([param])
        else:
            store.extend(GradStore({param: grad}) if way == "stores" else {param: grad})
    exact = torch.stack(grads).double().sum(0)
    before = store[param]
    assert before.dtype == dtype
    assert torch.equal(before, exact.to(dtype))
    assert (store.nbytes, store.peak_nbytes) == (12, 12)
    both = GradStore({param: torch.ones(3, dtype=dtype)})
    both.extend(store)
    assert torch.equal(both[param], (exact + 1).to(dtype))
    store.step(rulec.torch.SGD([param], lr=1.0))
    assert torch.equal(param.detach(), -before)


def test_sums_of_sparse_gradients_of_16_bits_are_rounded_once() -> None:
    table = nn.Embedding(4, 3, sparse=True, dtype=torch.bfloat16)
    store = GradStore()
    for _ in range(300):
        store.backward(table(torch.tensor([1, 2, 1])).sum(), table.weight)
    total = store[table.weight]
    assert (total.dtype, total.is_sparse) == (torch.bfloat16, True)
    assert total.to_dense()[:, 0].tolist() == [0.0, 600.0, 300.0, 0.0]


def test_views_that_autograd_gives_to_two_tensors_stay_apart() -> None:
    a, b = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(2, 3))
    store = GradStore()
    for _ in range(3):
        store.backward((a + b).sum(), [a, b])
    store.backward(b.sum(), [b])
    assert store[a].eq(3).all()
    assert store[b].eq(4).all()


@pytest.mark.slow
def test_gradients_are_free_once_they_were_used() -> None:
    model = Tied()
    opt = rulec.torch.AdamW(model.parameters())
    store = GradStore()
    store.backward(model.head(model.body(words(0))), model.parameters())
    seen = [weakref.ref(store[p]) for p in model.parameters()]
    store.step(opt, model.weight)
    gc.collect()
    assert [ref() is None for ref in seen] == [False, True, False]
    store.step(opt)
    assert [ref() for ref in seen] == [None] * 3
    assert all(p.grad is None for p in model.parameters())


def test_what_backward_left_is_collected() -> None:
    models = Tied(), Tied()
    one, other = (rulec.torch.Lion(model.parameters()) for model in models)
    whole(models[0], one, 0)
    store = GradStore()
    models[1].head(models[1].body(words(0))).backward()
    store.collect(models[1].parameters())
    assert all(p.grad is None for p in models[1].parameters())
    store.step(other)
    assert bytes_of(models[0], one) == bytes_of(models[1], other)


def test_hyper_parameters_are_those_of_the_first_part() -> None:
    model = Tied()
    opt = rulec.torch.AdamW(model.parameters())
    store = GradStore()
    store.backward(model.head(model.body(words(0))), model.parameters())
    store.step(opt, model.weight)
    opt.param_groups[0]["lr"] = 1.0
    with pytest.raises(RulecError, match="'lr' of a parameter group was changed between"):
        store.step(opt, model.bias)
    with pytest.raises(RulecError, match="'lr' of a parameter group was changed between"):
        store.step(opt)


def test_a_gradient_after_the_update_is_refused_until_the_step_is_given_up() -> None:
    model = Tied()
    opt = rulec.torch.AdamW(model.parameters())
    GradStore({model.weight: torch.ones(5, 5)}).step(opt, model.weight)
    before = model.weight.detach().clone()
    for params in (model.weight, None):
        store = GradStore({model.weight: torch.ones(5, 5)})
        with pytest.raises(RulecError, match=r"parameter 1 was updated in this step already, and its gradient came"):
            store.step(opt, params)
        assert model.weight in store
    assert torch.equal(model.weight, before)
    GradStore.accept_partial(opt)
    store.step(opt)
    assert opt.state[model.weight]["step"] == 2
    with pytest.raises(RulecError, match="and none was"):
        GradStore.accept_partial(opt)


def test_rules_that_need_all_gradients_take_whole_steps_only() -> None:
    rule = rulec.load("clip_by_global_norm") >> rulec.load("adamw")
    models = Tied(), Tied()
    one, other = (rulec.torch.optimizer(rule)(model.parameters()) for model in models)
    whole(models[0], one, 0)
    store = GradStore()
    store.backward(models[1].head(models[1].body(words(0))), models[1].parameters())
    with pytest.raises(RuleError, match="needs a value of the whole model"):
        store.step(other, models[1].weight)
    store.step(other)
    assert bytes_of(models[0], one) == bytes_of(models[1], other)


class Unknown(torch.optim.SGD):
    """An optimizer of which nothing is known here."""


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, Unknown])
def test_optimizers_that_cannot_be_run_in_parts_are_refused(kind: Any) -> None:
    param = nn.Parameter(torch.zeros(3))
    store = GradStore({param: torch.ones(3)})
    opt = kind([param], lr=0.5)
    with pytest.raises(RulecError, match=kind.__name__):
        store.step(opt, param)
    assert param.grad is None
    if kind is Unknown:
        store.step(opt)
        assert param.tolist() == [-0.5] * 3


def test_hooks_of_the_optimizer_run_once_in_a_step_or_refuse_parts() -> None:
    model, seen = Tied(), []
    opt = rulec.torch.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(opt, 1)
    opt.register_step_post_hook(lambda *_: seen.append("after"))
    segments(model, opt, 0, GradStore())
    schedule.step()
    assert seen == ["after"]
    opt.register_step_pre_hook(lambda *_: seen.append("before"))
    store = GradStore({model.weight: torch.ones(5, 5)})
    with pytest.raises(RulecError, match="hooks that run before a step"):
        store.step(opt, model.weight)
    store.step(opt)
    assert seen == ["after", "before", "after"]


def test_what_does_not_fit_is_refused_and_nothing_is_added() -> None:
    a, b = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2))
    store = GradStore()
    for wrong, message in (
        (torch.ones(3), r"a gradient has shape \(3,\), and its tensor \(2,\)"),
        (torch.ones(2, dtype=torch.float64), "a gradient has dtype torch.float64, and its tensor torch.float32"),
        (1.0, "a store has gradients by their tensors, not a float by a Parameter"),
    ):
        with pytest.raises(TensorError, match=message):
            store.extend([(a, torch.ones(3)), (b, wrong)])
    assert len(store) == 0
    opt = torch.optim.SGD([a], lr=1.0)
    with pytest.raises(TensorError, match=r"a tensor of shape \(2,\) is no parameter of the optimizer"):
        store.step(opt, b)
    with pytest.raises(TensorError, match="gets no gradient: call requires_grad_"):
        store.backward(a.sum(), [a, torch.zeros(2)])
    a.grad = torch.ones(3)
    store.extend({a: torch.ones(3)})
    for params in (a, None):
        with pytest.raises(RulecError, match=r"has a gradient in \.grad beside the store's"):
            store.step(opt, params)
    store.collect([a])
    store.step(opt)
    assert a.tolist() == [-2.0] * 3


def test_frozen_and_unused_parameters_have_no_gradient() -> None:
    model = Tied()
    model.bias.requires_grad_(False)
    store = GradStore()
    store.backward(model.weight.sum(), model.parameters())
    assert [*store] == [model.weight]


def test_sparse_gradients_are_summed_and_go_where_they_are_taken() -> None:
    table = nn.Embedding(10, 2, sparse=True)
    store = GradStore()
    for index in (1, 1, 4):
        store.backward(table(torch.tensor([index])).sum(), table.parameters())
    assert store[table.weight].to_dense().sum(1).tolist() == [0, 4, 0, 0, 2, 0, 0, 0, 0, 0]
    assert 0 < store.nbytes < 80
    store.step(torch.optim.SparseAdam(table.parameters()))
    assert len(store) == 0
