"""Weights of linear layers that are updated tile by tile: the bits of the deferred step, and no gradient as a whole."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import rulec
import rulec.torch
from rulec.errors import HyperError, PartialUpdate, RulecError
from rulec.torch import EagerUpdate
from rulec.torch.eager import epilogue_tiles
from rulec.torch.eager.epilogue_tiles import tile_spans
from tests.torch.eager import test_hazards as hazards
from tests.torch.eager.layers import WIDE, Layers, numbers, same
from tests.torch.eager.recipe import LR, Passes, adamw, deferred, eager

pytestmark = pytest.mark.usefixtures("small_tiles")

#: Each compiles kernels of its own.
SLOW = pytest.mark.slow


def passes_of(*shape: int, dtype: torch.dtype = torch.float32, autocast: bool = False) -> Passes:
    """An ordinary step of inputs of this shape."""

    def passes(model: nn.Module, step: int, scope: Any) -> None:
        with scope():
            inputs = numbers(step, *shape).to(dtype).requires_grad_()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(inputs).float().square().mean()
            loss.backward()

    return passes


plain = passes_of(5, 7)


def trained(make: Callable[[], nn.Module], passes: Passes, rule: Any, steps: int = 4, **keywords: Any) -> list[Tensor]:
    """Parameters and states after some steps, deferred, or eager where there is an epilogue."""
    model = make()
    given = {k: v for k, v in keywords.items() if k != "epilogue"}
    if "epilogue" in keywords:
        opt: Any = EagerUpdate(model, rule, lr=LR, **keywords)
    else:
        opt = rulec.torch.optimizer(rule)(model.parameters(), lr=LR, **given)
    for step in range(steps):
        opt.zero_grad()
        passes(model, step, getattr(opt, "backward", hazards.scope))
        opt.step()
    states = [torch.as_tensor(x) for p in model.parameters() for x in opt.state[p].values() if x is not None]
    return [*(p.detach() for p in model.parameters()), *states]


# The same bits


class Large(nn.Module):
    """A layer whose tiles begin at blocks of codes in every eighth row, or in each, and whose last block is short."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(WIDE, 103, bias=False), nn.Linear(103, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


@pytest.mark.parametrize(
    ("words", "tiles"),
    [
        ({"state_dtype": "int8/16"}, 4 + 2),
        ({"state_dtype": "dynamic4/32", "backend": "c"}, 4 + 2),
        pytest.param({"state_dtype": "dynamic8"}, 4 + 1, marks=SLOW),
        pytest.param({"state_dtype": "softsign8/64", "backend": "c"}, 4 + 1, marks=SLOW),
        pytest.param({"state_dtype": {"exp_avg": "dynamic4/8", "exp_avg_sq": "int8/16"}}, 4 + 2, marks=SLOW),
    ],
)
def test_tiles_begin_at_blocks_of_codes(
    words: Any, tiles: int, updated: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, filled = [], epilogue_tiles._Tiles.filled
    monkeypatch.setattr(epilogue_tiles._Tiles, "filled", lambda self, span: made.append(span) or filled(self, span))
    assert same(trained(Large, plain, "adamw", epilogue="tiles", **words), trained(Large, plain, "adamw", **words))
    assert updated == [(64, 103), (103, WIDE)] * 3
    assert len(made) == 3 * tiles


def test_the_rows_of_tiles_with_steps() -> None:
    assert tile_spans(103, 48, 4, 1) == [slice(0, 25), slice(25, 51), slice(51, 77), slice(77, 103)]
    assert tile_spans(103, 48, 4, 1, 16) == [slice(0, 16), slice(16, 48), slice(48, 80), slice(80, 103)]
    assert tile_spans(97, 48, 4, 1, 32) == [slice(0, 32), slice(32, 64), slice(64, 97)]
    assert tile_spans(40, 48, 4, 1, 256) == [slice(0, 40)]
    assert tile_spans(0, 48, 4, 1, 16) == []


@pytest.mark.parametrize(
    "rule", ["adamw", *(pytest.param(n, marks=SLOW) for n in ("lion", "sgd", "madgrad", "adan", "adagrad", "nadam"))]
)
def test_the_bits_are_those_of_the_deferred_step(rule: str, updated: list[Any]) -> None:
    """A tile's product has the bits of the whole one's: its rows are summed in the same order."""
    assert same(trained(Layers, plain, rule, epilogue=True), trained(Layers, plain, rule))
    assert updated == [(37, WIDE), (WIDE, 70), (70, WIDE)] * 3, "from the second step on, the last layer first"


@SLOW
def test_several_threads_make_the_same_bits(updated: list[Any]) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    found = [trained(Layers, plain, "adamw", **keywords) for keywords in ({"epilogue": True}, {})]
    torch.set_num_threads(threads)
    assert same(*found)
    assert len(updated) == 9


@pytest.mark.parametrize("shape", [(9,), (2, 3, 4)])
def test_inputs_of_any_number_of_dimensions(shape: tuple[int, ...], updated: list[Any]) -> None:
    passes = passes_of(*shape)
    assert same(trained(Layers, passes, "adamw", epilogue=True), trained(Layers, passes, "adamw"))
    assert len(updated) == 9


@pytest.mark.parametrize("shape", [(6,), (2, 3), (0,)])
def test_gradients_of_outputs_that_are_all_one_number(shape: tuple[int, ...], updated: list[Any]) -> None:
    """A sum's gradient is one number in memory, and that of nothing none."""

    def passes(model: nn.Module, step: int, scope: Any) -> None:
        with scope():
            model(numbers(step, *shape).transpose(0, -2)).sum().backward()

    assert same(trained(Layers, passes, "adamw", epilogue=True), trained(Layers, passes, "adamw"))
    assert len(updated) == 9


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=SLOW)])
def test_half_width_layers(dtype: torch.dtype, updated: list[Any]) -> None:
    passes = passes_of(6, dtype=dtype)
    ours = trained(lambda: Layers().to(dtype), passes, "adamw", epilogue=True, state_dtype=torch.float32)
    assert same(ours, trained(lambda: Layers().to(dtype), passes, "adamw", state_dtype=torch.float32))
    assert len(updated) == 9


def test_autocast_rounds_products_as_torch_does(updated: list[Any]) -> None:
    passes = passes_of(6, autocast=True)
    ours = trained(Layers, passes, "adamw", epilogue=True)
    assert same(ours, trained(Layers, passes, "adamw"))
    assert not same(ours, trained(Layers, passes_of(6), "adamw"))
    assert len(updated) == 9


@SLOW
def test_ascent_and_decay_are_the_rules_own(updated: list[Any]) -> None:
    keywords = {"maximize": True, "weight_decay": 0.1, "amsgrad": True}
    assert same(trained(Layers, plain, "adamw", epilogue=True, **keywords), trained(Layers, plain, "adamw", **keywords))
    assert updated


def test_groups_have_their_own_numbers(updated: list[Any]) -> None:
    def groups(model: Any) -> list[dict[str, Any]]:
        return [{"params": [*model.first.parameters()], "lr": 0.1}, {"params": [*model.second.parameters()], "lr": 0.2}]

    model, twin = Layers(), Layers()
    ours, theirs = EagerUpdate(groups(model), "adamw", epilogue=model), rulec.torch.AdamW(groups(twin))
    for step in range(3):
        plain(model, step, ours.backward)
        ours.step()
        twin.zero_grad()
        plain(twin, step, hazards.scope)
        theirs.step()
    assert same(model.parameters(), twin.parameters())
    assert updated == [(WIDE, 70), (70, WIDE)] * 2


def test_autograd_hears_of_every_update(updated: list[Any]) -> None:
    _, opt = eager(model := Layers(), plain, epilogue=True)
    before = model.first.weight._version
    plain(model, 4, opt.backward)
    assert model.first.weight._version == before + 1


def test_a_weight_whose_memory_moved_is_updated_where_it_is() -> None:
    def passes(model: Any, step: int, scope: Any) -> None:
        with scope():
            loss = model(numbers(step, 4)).square().mean()
            model.first.weight.data = model.first.weight.data.clone()
            loss.backward()

    assert same(trained(Layers, passes, "adamw", epilogue=True), trained(Layers, passes, "adamw"))


def test_a_partition_has_each_weight_updated_by_its_own_rule(updated: list[Any]) -> None:
    rules = rulec.partition({"first/*": "lion", "...": "adamw"})
    model, twin = Layers(), Layers()
    ours = EagerUpdate(model, rules, epilogue=True)
    theirs = rulec.torch.Partitioned(rules, twin.named_parameters())
    for step in range(3):
        plain(model, step, ours.backward)
        ours.step()
        theirs.zero_grad()
        plain(twin, step, hazards.scope)
        theirs.step()
    assert same(model.parameters(), twin.parameters())
    assert len(updated) == 6


# No gradient as a whole


class Largest(TorchDispatchMode):
    """The most elements that any new tensor has, of those as wide as the weights are."""

    def __init__(self, shape: tuple[int, int]) -> None:
        super().__init__()
        self.shape, self.seen = shape, [0]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        for made in tree_leaves(found):
            if isinstance(made, Tensor) and made.dim() == 2 and made.shape[1] == self.shape[1] and not made.is_meta:
                self.seen.append(made.shape[0])
        return found


@pytest.mark.parametrize("epilogue", [False, True])
def test_no_more_than_a_tile_of_a_gradient_exists(epilogue: bool) -> None:
    model = nn.Sequential(nn.Linear(WIDE, 200, bias=False))
    opt = EagerUpdate(model, "adamw", lr=LR, epilogue=epilogue, contributions=1)
    for step in range(2):
        with opt.backward():
            loss = model(numbers(step, 3).requires_grad_()).square().mean()
            with Largest((200, WIDE)) as made:
                loss.backward()
        opt.step()
    assert max(made.seen) == (29 if epilogue else 200)
    gradient = 200 * WIDE * 4
    assert opt.report().peak_gradient_bytes == (29 * WIDE * 4 if epilogue else gradient)
    assert opt.report().bytes_freed == gradient


@pytest.mark.parametrize("shape", [(1000, 100), (10, 100), (1, 1), (33, 48), (257, 1000), (5, 0), (0, 5), (64, 10**6)])
def test_tiles_are_even_and_have_as_many_rows_as_there_is_room_for(shape: tuple[int, int]) -> None:
    height, width = shape
    spans = tile_spans(height, width, 4, 4 * 100 * 50)
    rows = [span.stop - span.start for span in spans]
    assert sum(rows) == height
    assert [span.start for span in spans] == [sum(rows[:i]) for i in range(len(rows))]
    if height:
        assert max(rows) - min(rows) <= 1
        assert max(rows) <= max(32, 4 * 100 * 50 // max(1, 4 * width))
        assert min(rows) >= min(height, 16)


# Where the gradient is made after all


def tied() -> nn.Module:
    model = Layers()
    model.last.weight = model.first.weight = nn.Parameter(torch.randn(70, WIDE))
    model.last.bias = None
    return model


def twice(model: Any, step: int, scope: Any) -> None:
    """One layer is used twice."""
    with scope():
        x = numbers(step, 4)
        model.last(model.second(model.first(model.second(model.first(x))))).square().mean().backward()


def beside(model: Any, step: int, scope: Any) -> None:
    """A weight is used by its layer, and by itself."""
    with scope():
        x = numbers(step, 4)
        (model(x).square().mean() + (x @ model.first.weight.t()).square().mean()).backward()


def in_micro_batches(model: Any, step: int, scope: Any) -> None:
    for part in range(3):
        with scope(part == 2):
            model(numbers(10 * step + part, 4)).square().mean().backward()


def in_two_passes(model: Any, step: int, scope: Any) -> None:
    with scope():
        for part in range(2):
            model(numbers(10 * step + part, 4)).square().mean().backward()


def forward_before_backward(model: Any, step: int, scope: Any) -> None:
    with scope():
        losses = [model(numbers(10 * step + part, 4)).square().mean() for part in range(2)]
        for loss in losses:
            loss.backward()


def hooked() -> nn.Module:
    model = Layers()
    model.first.weight.register_hook(lambda g: g / 2)
    return model


def hooked_later(model: Any, step: int, scope: Any) -> None:
    """A hook comes after the optimizer was made."""
    if step == 1:
        model.first.weight.register_hook(lambda g: g / 2)
    plain(model, step, scope)


def wrapped() -> nn.Module:
    model = Layers()
    parametrizations.weight_norm(model.first)
    return model


def frozen() -> nn.Module:
    model = Layers()
    model.first.weight.requires_grad_(False)
    return model


class Own(nn.Linear):
    """A layer of someone else's."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def foreign() -> nn.Module:
    model = Layers()
    model.first = Own(WIDE, 70)
    return model


OTHERS = [(37, WIDE), (WIDE, 70)]


@pytest.mark.parametrize(
    ("make", "passes", "expected"),
    [
        (tied, plain, [(WIDE, 70)] * 3), (Layers, twice, [(37, WIDE)] * 3), (Layers, beside, OTHERS * 3),
        (Layers, in_micro_batches, []), (Layers, in_two_passes, []), (Layers, forward_before_backward, []),
        (hooked, plain, OTHERS * 3), (Layers, hooked_later, OTHERS * 3), (wrapped, plain, OTHERS * 3),
        (frozen, plain, OTHERS * 3), (foreign, plain, OTHERS * 3),
    ],
    ids=[
        "tied", "used twice", "used elsewhere too", "micro-batches", "two passes", "two passes at once", "hooked",
        "hooked later", "parametrized", "frozen", "of another class",
    ],
)  # fmt: skip
def test_what_is_more_than_one_product_is_made_and_exact(
    make: Callable[[], nn.Module], passes: Passes, expected: list[Any], updated: list[Any]
) -> None:
    assert same(trained(make, passes, "adamw", epilogue=True), trained(make, passes, "adamw"))
    assert updated == expected


@SLOW
def test_rules_of_more_than_elements_and_float64_are_updated_as_ever(updated: list[Any]) -> None:
    assert same(trained(Layers, plain, "lamb", epilogue=True), trained(Layers, plain, "lamb"))
    wide = passes_of(4, dtype=torch.float64)
    twins = [trained(lambda: Layers().double(), wide, "adamw", **k) for k in ({"epilogue": True}, {})]
    assert same(*twins)
    assert updated == []


def test_what_a_layer_refuses_is_refused() -> None:
    model = Layers()
    EagerUpdate(model, "adamw", lr=LR, epilogue=True)
    with pytest.raises(RuntimeError, match="dtype"):
        model.first(numbers(0, 3).bfloat16())
    assert model.first(numbers(0)).shape == (70,)
    assert torch.func.vmap(model.first)(numbers(0, 3)).shape == (3, 70)
    with torch.no_grad():
        assert not model.first(numbers(0, 3)).requires_grad


def test_a_second_derivative_is_that_of_the_layer() -> None:
    """Outside of a step the layers are as others: also where their gradients are differentiated again."""
    model, twin = Layers(), Layers()
    opt = EagerUpdate(model, "adamw", lr=LR, epilogue=True)
    found = []
    for one in (model, twin):
        inputs = numbers(1, 3).requires_grad_()
        loss = one(inputs).square().mean()
        wanted = [inputs, one.first.weight, one.first.bias, one.second.weight]
        grads = torch.autograd.grad(loss, wanted, create_graph=True)
        found.append([*grads, *torch.autograd.grad(sum(g.square().sum() for g in grads), wanted)])
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-7) for a, b in zip(*found, strict=True))
    with pytest.raises(RulecError, match=r"outside of `with opt.backward\(\):`"):
        model(numbers(1, 3)).sum().backward()
    opt.zero_grad()


def test_a_graph_that_is_kept_is_refused(updated: list[Any]) -> None:
    _, opt = eager(model := Layers(), plain, epilogue=True)
    updated.clear()
    with pytest.raises(RulecError, match="retain_graph=True"), opt.backward():
        model(numbers(1, 3)).square().mean().backward(retain_graph=True)
    assert updated == []


def test_gradients_are_made_where_processes_share_them(updated: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    assert same(trained(Layers, plain, "adamw", epilogue=True, local=True), trained(Layers, plain, "adamw"))
    assert updated == []


# Hazards


@pytest.mark.parametrize("make", [pytest.param(hazards.Net, marks=SLOW), hazards.tied])
@pytest.mark.parametrize(
    "passes",
    [hazards.whole, hazards.micro_batches, hazards.in_segments, hazards.two_losses, hazards.recomputed,
     hazards.recomputed_without_reentering],
)  # fmt: skip
def test_hazards_of_eager_updates_are_none_more(make: Callable[[], hazards.Net], passes: Passes) -> None:
    found, _ = eager(make(), passes, epilogue=True)
    assert same(found, deferred(make(), passes))


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_layers_are_updated_by_factors(reentrant: bool, updated: list[Any]) -> None:
    def passes(model: Any, step: int, scope: Any) -> None:
        with scope():
            x = numbers(step, 4).requires_grad_()
            checkpoint(model, x, use_reentrant=reentrant).square().mean().backward()

    assert same(trained(Layers, passes, "adamw", epilogue=True), trained(Layers, passes, "adamw"))
    assert len(updated) == 9


class Fails(torch.autograd.Function):
    """Passes its input on, and fails going back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise ZeroDivisionError("in the middle")


def test_a_failure_in_the_middle_is_a_partial_update() -> None:
    before = [p.detach().clone() for p in deferred(Layers(), plain, steps=2)]
    found, opt = eager(model := Layers(), plain, steps=2, epilogue=True, journal=True)

    def fails(model: Any, step: int, scope: Any) -> None:
        with scope():
            hidden = Fails.apply(torch.tanh(model.first(numbers(step, 4))))
            model.last(model.second(hidden)).square().mean().backward()

    with pytest.raises(ZeroDivisionError):
        fails(model, 2, opt.backward)
    with pytest.raises(PartialUpdate) as error:
        opt.step()
    assert sorted(error.value.updated) == ["last.weight", "second.weight"]
    opt.rollback()
    assert same(found, before)
    for step in (2, 3):
        plain(model, step, opt.backward)
        opt.step()
    assert same(found, deferred(Layers(), plain, steps=4))


def test_a_failure_within_a_weight_is_a_partial_update_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before = [p.detach().clone() for p in deferred(Layers(), plain, steps=2)]
    found, opt = eager(model := Layers(), plain, steps=2, epilogue=True, journal=True)
    made = epilogue_tiles._Tiles.filled

    def fails(self: Any, span: slice) -> Tensor:
        if len(self._source.product.outputs.t()) == 70 and span.start:
            raise MemoryError("no room")
        return made(self, span)

    with monkeypatch.context() as patch:
        patch.setattr(epilogue_tiles._Tiles, "filled", fails)
        with pytest.raises(PartialUpdate, match=r"after the first 23 rows of a tensor of shape \(70, 48\): no room"):
            plain(model, 2, opt.backward)
    with pytest.raises(PartialUpdate) as error:
        opt.state_dict()
    assert "first.weight" in error.value.updated
    assert not same([model.first.weight], [before[0]])
    opt.rollback()
    assert same(found, before)
    for step in (2, 3):
        plain(model, step, opt.backward)
        opt.step()
    assert same(found, deferred(Layers(), plain, steps=4))


def test_a_checkpoint_goes_both_ways() -> None:
    straight = deferred(Layers(), plain, steps=5)
    found, opt = eager(model := Layers(), plain, steps=3, epilogue=True)
    other = adamw(found)
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    opt.close()
    for step in (3, 4):
        other.zero_grad()
        plain(model, step, hazards.scope)
        other.step()
    assert same(found, straight)


# What is around the layers


def test_copies_of_a_model_have_their_own_layers() -> None:
    model = Layers()
    opt = EagerUpdate(model, "adamw", lr=LR, epilogue=True)
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301 - made here
        with torch.no_grad():
            made.first.weight.zero_()
            assert not same([made(numbers(0, 2))], [model(numbers(0, 2))])
        plain(made, 0, hazards.scope)
        assert made.first.weight.grad is not None
        assert len(EagerUpdate(made, "adamw", epilogue=True)._passes.epilogue.weights) == 3  # type: ignore[union-attr]
    assert len(opt._passes.epilogue.weights) == 3  # type: ignore[union-attr]


@pytest.mark.slow
def test_the_layers_get_their_forward_back() -> None:
    model = Layers()
    opt = EagerUpdate(model, "adamw", lr=LR, epilogue=True)
    assert "forward" in model.first.__dict__
    opt.close()
    assert "forward" not in model.first.__dict__
    gone = weakref.ref(opt := EagerUpdate(model, "adamw", lr=LR, epilogue=True))
    plain(model, 0, opt.backward)
    opt.step()
    plain(model, 1, opt.backward)
    opt.step()
    del opt
    gc.collect()
    assert gone() is None
    assert "forward" not in model.first.__dict__


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: EagerUpdate(m.parameters(), "adamw", epilogue=True), "give it the model, epilogue=model"),
        (lambda m: EagerUpdate(m, "adamw", epilogue="fast"), "epilogue='fast' must be True, False, a model or one of"),
        (
            lambda m: EagerUpdate(m, torch.optim.SGD, scope="elementwise", epilogue=True),
            "needs a rule, which can be printed into a product, and SGD is none",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(make: Callable[[nn.Module], Any], message: str) -> None:
    with pytest.raises(HyperError, match=message):
        make(Layers())
