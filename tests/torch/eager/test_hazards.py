"""Where the usual hook is wrong without a word, an eager optimizer is exact or says so in one sentence."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rulec.errors import PartialUpdate, RulecError
from rulec.torch import EagerUpdate
from tests.torch.eager.recipe import LR, Passes, Recipe, adamw, by_recipe, deferred, eager, same, scope

WIDTH = 6


class Net(nn.Module):
    """Layers of one width between words and words."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(9, WIDTH)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 9, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.upper(self.lower(words))

    def lower(self, words: Tensor) -> Tensor:
        return torch.tanh(self.first(self.embed(words)))

    def upper(self, hidden: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(hidden)))


def tied() -> Net:
    return Net(tied=True)


def batch(step: int, part: int = 0) -> Tensor:
    return torch.randint(9, (4,), generator=torch.Generator().manual_seed(10 * step + part))


def loss_of(found: Tensor, words: Tensor) -> Tensor:
    return nn.functional.cross_entropy(found, words.flip(0))


def whole(model: Any, step: int, scope: Any) -> None:
    """An ordinary step."""
    with scope():
        loss_of(model(batch(step)), batch(step)).backward()


# Gradients that arrive in several parts


def micro_batches(model: Any, step: int, scope: Any) -> None:
    """Three micro-batches of one step."""
    for part in range(3):
        with scope(part == 2):
            (loss_of(model(batch(step, part)), batch(step, part)) / 3).backward()


def in_segments(model: Any, step: int, scope: Any) -> None:
    """The upper half is differentiated first, then the lower; both use the table of a tied model."""
    with scope():
        low = model.lower(batch(step))
        cut = low.detach().requires_grad_()
        loss_of(model.upper(cut), batch(step)).backward()
        low.backward(cut.grad)


def two_losses(model: Any, step: int, scope: Any) -> None:
    """The same layers in two backward passes of one step."""
    with scope():
        for part in range(2):
            loss_of(model(batch(step, part)), batch(step, part)).backward()


def recomputed(model: Any, step: int, scope: Any, reentrant: bool = True) -> None:
    """Every layer is run again inside the backward pass, and one of them is used twice."""
    with scope():
        hidden = checkpoint(model.lower, batch(step), use_reentrant=False)
        for layer in (model.second, model.first, model.second):
            hidden = torch.tanh(checkpoint(layer, hidden, use_reentrant=reentrant))
        loss_of(model.head(hidden), batch(step)).backward()


def recomputed_without_reentering(model: Any, step: int, scope: Any) -> None:
    """The same as torch recommends it."""
    recomputed(model, step, scope, reentrant=False)


@pytest.mark.parametrize(
    ("make", "passes"),
    [(Net, micro_batches), (tied, in_segments), (Net, two_losses), (tied, recomputed)],
    ids=["micro-batches", "segments with tied weights", "two losses", "reentrant checkpoints of a layer used twice"],
)
def test_several_gradients_of_a_parameter_are_one_step(make: Callable[[], Net], passes: Passes) -> None:
    expected = deferred(make(), passes)
    found, opt = eager(make(), passes)
    assert same(found, expected)
    assert opt.report().fired == len(found), "and every gradient was freed inside the backward pass"
    assert not same(by_recipe(make(), passes), expected), "the recipe takes a step from each"


@pytest.mark.parametrize("passes", [whole, recomputed_without_reentering])
def test_tied_weights_and_layers_used_twice_fire_once(passes: Passes) -> None:
    """Within one backward pass torch itself sums what they get."""
    found, opt = eager(tied(), passes)
    assert same(found, deferred(tied(), passes))
    assert opt.report().fired == len(found)


def test_fewer_parts_than_before_are_deferred() -> None:
    model, twin = Net(), Net()
    opt, plain = EagerUpdate(model, "adamw", lr=LR), adamw(twin.parameters())
    for passes in (two_losses, two_losses, whole, two_losses):
        passes(model, 3, opt.backward)
        opt.step()
        plain.zero_grad()
        passes(twin, 3, scope)
        plain.step()
    assert same(model.parameters(), twin.parameters())


def test_more_parts_than_ever_before_are_refused() -> None:
    """A parameter was updated with what seemed the last of its gradients, and there is another."""

    def parts(model: Any, step: int, scope: Any) -> None:
        losses = [model.embed(batch(step, part)).square().sum() for part in range(1 + step // 2)]
        with scope():
            for loss in losses:
                loss.backward()

    found, opt = eager(model := Net(), parts, steps=2)
    assert opt.report().fired == 1
    with pytest.raises(PartialUpdate, match=r"embed.weight arrived 2 times in this .* where 1 were expected") as error:
        parts(model, 2, opt.backward)
    assert error.value.updated == ["embed.weight"]
    with pytest.raises(PartialUpdate):
        opt.step()
    opt.accept_partial()
    parts(model, 2, opt.backward)
    opt.step()
    assert found[0].isfinite().all()


def test_a_module_that_reads_what_was_updated_is_refused() -> None:
    _, opt = eager(model := Net(), whole, steps=2)
    with pytest.raises(RulecError, match=r"Embedding runs during the backward pass and reads embed.weight"):
        two_losses(model, 2, opt.backward)


# What is around the optimizer


def test_schedules_reach_the_update() -> None:
    def scheduled(model: Net, opt: Any, shown: Any, around: Any) -> list[Tensor]:
        schedule = torch.optim.lr_scheduler.ExponentialLR(shown, gamma=0.1)
        for step in range(4):
            whole(model, step, around)
            opt.step()
            opt.zero_grad()
            schedule.step()
        return [*model.parameters()]

    models = Net(), Net(), Net()
    plain, opt = adamw(models[0].parameters()), EagerUpdate(models[1], "adamw", lr=LR)
    expected = scheduled(models[0], plain, plain, scope)
    assert same(scheduled(models[1], opt, opt, opt.backward), expected)
    # The recipe has no optimizer for a schedule. One that is there for it to hold changes nothing.
    Recipe(models[2].parameters(), adamw)
    held = adamw(models[2].parameters())
    assert not same(scheduled(models[2], held, held, scope), expected)


def test_a_rate_changed_between_the_backward_pass_and_the_step_is_noticed() -> None:
    model = Net()
    _, opt = eager(model, whole, steps=2)
    whole(model, 2, opt.backward)
    opt.param_groups[0]["lr"] = 0.0
    with pytest.raises(RulecError, match="'lr' of a parameter group was changed between the backward pass"):
        opt.step()
    opt.param_groups[0]["lr"] = LR
    opt.step()
    assert same(model.parameters(), deferred(Net(), whole, steps=3))


def clipped(model: Net, opt: Any, steps: int = 4) -> list[float]:
    """Norms that clipping saw."""
    seen = []
    for step in range(steps):
        opt.zero_grad()
        whole(model, step, scope)
        seen.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        opt.step()
    return seen


def test_clipping_that_would_do_nothing_raises_and_two_passes_are_exact() -> None:
    models = Net(), Net(), Net()
    norms = clipped(models[0], adamw(models[0].parameters()))
    Recipe(models[2].parameters(), adamw)
    assert clipped(models[2], adamw([nn.Parameter(torch.zeros(1))])) == [0.0] * 4, "the recipe left nothing to clip"
    assert not same(models[2].parameters(), models[0].parameters())

    opt = EagerUpdate(models[1], "adamw", lr=LR, max_grad_norm=0.1)
    for step in range(4):
        loss = loss_of(models[1](batch(step)), batch(step))
        with opt.measure() as seen:
            loss.backward(retain_graph=True)
        assert float(seen.norm) == norms[step] > 0.1
        with opt.backward():
            loss.backward()
        opt.step()
    assert same(models[1].parameters(), models[0].parameters())

    _, opt = eager(model := Net(), whole)
    whole(model, 4, opt.backward)
    with pytest.raises(RulecError, match=r"was used inside the backward pass and freed: .*max_grad_norm="):
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    opt.step()
    assert same(model.parameters(), deferred(Net(), whole, steps=5))


class Fails(torch.autograd.Function):
    """Passes its input on, and fails going back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise ZeroDivisionError("in the middle")


def fails_in_the_middle(model: Any, step: int, scope: Any) -> None:
    with scope():
        loss_of(model.upper(Fails.apply(model.lower(batch(step)))), batch(step)).backward()


def test_a_failure_in_the_middle_never_passes_for_a_step() -> None:
    before = deferred(Net(), whole, steps=2)
    by_hooks = Net()
    by_recipe(by_hooks, whole, steps=2)
    with pytest.raises(ZeroDivisionError):
        fails_in_the_middle(by_hooks, 2, scope)
    moved = {torch.equal(p, q) for p, q in zip(by_hooks.parameters(), before, strict=True)}
    assert moved == {False, True}, "the recipe has updated one half, and nobody hears of it"

    found, opt = eager(model := Net(), whole, steps=2, journal=True)
    with pytest.raises(ZeroDivisionError):
        fails_in_the_middle(model, 2, opt.backward)
    names = [name for name, _ in model.named_parameters()]
    upper = [name for name in names if name.startswith(("second", "head"))]
    for call in (opt.step, opt.state_dict, lambda: whole(model, 2, opt.backward), opt.close, opt.zero_grad):
        with pytest.raises(PartialUpdate, match="rollback") as error:
            call()
        assert sorted(error.value.updated) == sorted(upper)
        assert sorted(error.value.updated + error.value.pending) == sorted(names)
    opt.rollback()
    assert same(found, before)
    for step in (2, 3):
        whole(model, step, opt.backward)
        opt.step()
    assert same(found, deferred(Net(), whole, steps=4))


def test_a_failure_can_be_accepted() -> None:
    found, opt = eager(model := Net(), whole, steps=2)
    with pytest.raises(ZeroDivisionError):
        fails_in_the_middle(model, 2, opt.backward)
    with pytest.raises(RulecError, match="journal=True"):
        opt.rollback()
    opt.accept_partial()
    counts = {name: int(opt.state[p]["step"]) for name, p in model.named_parameters()}
    assert set(counts.values()) == {2, 3}
    whole(model, 3, opt.backward)
    opt.step()
    assert all(p.grad is None for p in found)


def test_a_checkpoint_has_the_state_and_goes_both_ways() -> None:
    straight = deferred(Net(), whole, steps=6)

    by_hooks = Net()
    by_recipe(by_hooks, whole, steps=3)
    saved = torch.optim.AdamW(by_hooks.parameters(), lr=LR).state_dict()  # of the one there is to save
    assert saved["state"] == {}

    for first, second in (("eager", "plain"), ("plain", "eager"), ("eager", "eager")):
        model = Net()
        kinds = {"eager": lambda m: EagerUpdate(m, "adamw", lr=LR), "plain": lambda m: adamw(m.parameters())}
        opt = kinds[first](model)
        for step in range(3):
            whole(model, step, getattr(opt, "backward", scope))
            opt.step()
            opt.zero_grad()
        later = Net()
        later.load_state_dict(model.state_dict())
        resumed = kinds[second](later)
        resumed.load_state_dict(opt.state_dict())
        for step in range(3, 6):
            whole(later, step, getattr(resumed, "backward", scope))
            resumed.step()
            resumed.zero_grad()
        assert same(later.parameters(), straight), (first, second)


def scaled(model: Net, opt: Any, step: int, scaler: Any, two_passes: bool) -> None:
    """A step whose loss is scaled, and infinite in step 1."""
    loss = scaler.scale(loss_of(model(batch(step)), batch(step)) * (float("inf") if step == 1 else 1.0))
    if two_passes:
        with opt.measure(scaler):
            loss.backward(retain_graph=True)
        with opt.backward():
            loss.backward()
        opt.step()
    else:
        opt.zero_grad()
        loss.backward()
        scaler.step(opt)
    scaler.update()


def test_an_infinite_gradient_under_a_scaler_is_skipped() -> None:
    models, scalers = [Net() for _ in range(3)], [torch.amp.GradScaler("cpu", init_scale=16.0) for _ in range(3)]
    plain, opt = adamw(models[0].parameters()), EagerUpdate(models[1], "adamw", lr=LR)
    for step in range(4):
        scaled(models[0], plain, step, scalers[0], two_passes=False)
        scaled(models[1], opt, step, scalers[1], two_passes=True)
    assert same(models[1].parameters(), models[0].parameters())
    assert scalers[0].get_scale() == scalers[1].get_scale() == 8.0
    by_hooks = Recipe(models[2].parameters(), adamw)
    for step in range(2):
        scalers[2].scale(loss_of(models[2](batch(step)), batch(step)) * (float("inf") if step else 1.0)).backward()
    assert not all(p.isfinite().all() for p in by_hooks.each), "the recipe took the step"


def test_a_scaler_with_one_pass_is_refused() -> None:
    model, scaler = Net(), torch.amp.GradScaler("cpu", init_scale=16.0)
    _, opt = eager(model, whole, steps=2)
    before = [p.clone() for p in model.parameters()]
    loss = scaler.scale(loss_of(model(batch(2)), batch(2)))
    with pytest.raises(RulecError, match="measure"):
        _scaled_in_one_pass(opt, scaler, loss)
    del before


def _scaled_in_one_pass(opt: EagerUpdate, scaler: Any, loss: Tensor) -> None:
    with opt.backward():
        loss.backward()
    scaler.step(opt)


@pytest.mark.parametrize("keyword", ["create_graph", "retain_graph"])
def test_graphs_that_are_kept_are_refused(keyword: str) -> None:
    model = Net()
    found, opt = eager(model, whole, steps=2)
    before = [p.detach().clone() for p in found]
    with pytest.raises(RulecError, match=f"{keyword}=True keeps the backward pass"), opt.backward():
        loss_of(model(batch(2)), batch(2)).backward(**{keyword: True})
    assert same(found, before)
    opt.zero_grad()
    whole(model, 2, opt.backward)
    opt.step()
    assert same(found, deferred(Net(), whole, steps=3))


def test_a_kept_graph_run_twice_shows_the_recipe_wrong() -> None:
    """The second run differentiates a model that is not there any more, from what the first has saved of it."""

    def twice(model: Any, step: int, scope: Any) -> None:
        loss = loss_of(model.head(model.embed(batch(step))), batch(step))
        with scope():
            loss.backward(retain_graph=True)
            loss.backward()

    expected = deferred(Net(), twice, steps=1)
    assert expected
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        by_recipe(Net(), twice, steps=1)


# Parameters that come, go, or are not used


class Experts(nn.Module):
    """A layer of which one part is used at a time, and a part that never is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.parts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.never = nn.Parameter(torch.ones(WIDTH))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, part: int) -> Tensor:
        return self.head(torch.tanh(self.parts[part](x)))


def numbers(step: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))


def by_turns(model: Any, step: int, scope: Any) -> None:
    """Two micro-batches, each through a part of its own."""
    for part in range(2):
        with scope(part == 1):
            model(numbers(2 * step + part), (step + part) % 3).square().mean().backward()


def test_parts_that_are_used_in_some_steps_only() -> None:
    found, opt = eager(Experts(), by_turns, steps=7)
    assert same(found, deferred(Experts(), by_turns, steps=7))
    assert not same(by_recipe(Experts(), by_turns, steps=7), found)
    assert opt.report().untouched == 3
    assert opt.state[found[0]] == {}, "what never has a gradient has no state"


def frozen_and_not(model: Net, opt: Any, around: Any) -> list[Tensor]:
    """Six steps: a layer is frozen at first, and another at last; one is added in between."""
    layer = nn.Linear(9, 9)
    with torch.no_grad():
        layer.weight.fill_(0.1), layer.bias.fill_(0.2)
    for step in range(6):
        model.second.requires_grad_(step >= 2)
        model.first.weight.requires_grad_(step < 4)
        if step == 3 and opt is not None:
            opt.add_param_group({"params": [*layer.parameters()], "lr": 0.1})
        logits = model(batch(step))
        loss = loss_of(layer(logits) if step >= 3 else logits, batch(step))
        with around():
            loss.backward()
        if opt is not None:
            opt.step()
            opt.zero_grad()
    return [*model.parameters(), *layer.parameters()]


def test_parameters_that_are_frozen_let_go_or_added_later() -> None:
    models = Net(), Net(), Net()
    expected = frozen_and_not(models[0], adamw(models[0].parameters()), scope)
    opt = EagerUpdate(models[1], "adamw", lr=LR)
    assert same(frozen_and_not(models[1], opt, opt.backward), expected)
    for model in models[2:]:
        model.second.requires_grad_(False)
        Recipe([p for p in model.parameters() if p.requires_grad], adamw)
        found = frozen_and_not(model, None, scope)
        assert torch.equal(found[3], Net().second.weight), "the recipe never trains what it had no hook on"


def test_parameters_that_share_memory_are_refused() -> None:
    """The recipe updates the memory once for each: AdamW's first steps are of the size of lr, whatever the gradient."""

    def twice(make: Callable[[list[Tensor]], Any]) -> Tensor:
        memory = torch.zeros(4)
        params = [nn.Parameter(memory[:3]), nn.Parameter(memory[1:])]
        made = make(params)
        (params[0].sum() + params[1].sum()).backward()
        assert made is not None
        return memory

    found = twice(lambda params: Recipe(params, lambda own: torch.optim.AdamW(own, lr=LR, weight_decay=0.0)))
    torch.testing.assert_close(found, torch.tensor([-LR, -2 * LR, -2 * LR, -LR]))
    with pytest.raises(RulecError, match="parameter 0 and parameter 1 share memory: give each tensor once"):
        twice(lambda params: EagerUpdate(params, "adamw"))


# Reads after the update


class Detached(Net):
    """Reads a layer's weights, without a gradient, below the layer."""

    def lower(self, words: Tensor) -> Tensor:
        return super().lower(words) @ self.second.weight.detach()


class ByData(Net):
    """The same by `.data`, of which autograd does not know that it is a weight."""

    def lower(self, words: Tensor) -> Tensor:
        return super().lower(words) @ self.second.weight.data


class RunAgain(Net):
    """The same in a function that is run again inside the backward pass."""

    def lower(self, words: Tensor) -> Tensor:
        function = lambda hidden: torch.tanh(hidden @ self.second.weight.detach()) * hidden  # noqa: E731
        return checkpoint(function, super().lower(words), use_reentrant=False)  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", [Detached, ByData, RunAgain])
def test_weights_that_are_read_below_wait_for_the_end_of_the_pass(make: Callable[[], Net]) -> None:
    found, opt = eager(make(), whole)
    expected = deferred(make(), whole)
    assert same(found, expected)
    assert (opt.report().fired, opt.report().deferred) == (len(found) - 1, 1)
    if make is Detached:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            by_recipe(make(), whole)
    else:
        assert not same(by_recipe(make(), whole), expected), "the recipe reads new weights for old"


def test_autograd_catches_a_stale_read_that_was_not_watched() -> None:
    """What comes to be read later than in the step that was watched: versions say so, and the step is not whole."""
    _, opt = eager(model := Net(), whole, steps=2)
    loss = loss_of(model(batch(2)), batch(2))
    late = (numbers(2).requires_grad_() @ model.second.weight.detach()).sum()

    def both() -> None:
        with opt.backward():
            loss.backward()
            late.backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        both()
    with pytest.raises(PartialUpdate):
        opt.step()


def test_a_second_update_by_hand_is_refused() -> None:
    found, opt = eager(model := Net(), whole, steps=2)
    whole(model, 2, opt.backward)
    model.first.weight.grad = torch.ones(WIDTH, WIDTH)
    with pytest.raises(RulecError, match=r"first.weight was updated in this step already, and its gradient came"):
        opt.step()
    model.first.weight.grad = None
    opt.step()
    assert same(found, deferred(Net(), whole, steps=3))


def test_a_failure_that_is_caught_inside_is_one_all_the_same() -> None:
    _, opt = eager(model := Net(), whole, steps=2)

    def caught() -> None:
        with opt.backward(), contextlib.suppress(ZeroDivisionError):
            fails_in_the_middle(model, 2, scope)

    with pytest.raises(RulecError, match=r"a backward pass failed inside of opt.backward"):
        caught()
    with pytest.raises(PartialUpdate):
        opt.step()


def test_parameters_that_move_or_change_between_steps() -> None:
    def moving(model: Net, opt: Any, around: Any) -> list[Tensor]:
        for step in range(6):
            if step == 2:
                model.first.weight.data = model.first.weight.data.clone() * 2
            if step == 4:
                model.double()
            loss = loss_of(model(batch(step)), batch(step))
            if step == 3:
                model.second.weight.data = model.second.weight.data.clone()
            with around():
                loss.backward()
            opt.step()
            opt.zero_grad()
        return [*model.parameters()]

    models = Net(), Net()
    opt = EagerUpdate(models[1], "adamw", lr=LR)
    assert same(moving(models[1], opt, opt.backward), moving(models[0], adamw(models[0].parameters()), scope))


def test_a_state_changed_inside_the_pass_is_noticed() -> None:
    _, opt = eager(model := Net(), whole, steps=2)
    weight = model.first.weight
    model.second.weight.register_hook(lambda grad: opt.state[weight].update(exp_avg=torch.zeros(WIDTH, WIDTH)))
    with pytest.raises(RulecError, match="state was changed in the middle of a step"):
        whole(model, 2, opt.backward)


# Hooks of the user's


def test_hooks_of_the_user_run_first_and_what_they_leave_is_used() -> None:
    def make() -> Net:
        model = Net()
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad * 2 + 1))
            param.register_hook(lambda grad: grad * 0.5)
        model.first.bias.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        model.second.register_full_backward_hook(
            lambda module, into, out: tuple(None if g is None else g * 3 for g in into)
        )
        return model

    found, _ = eager(make(), whole)
    assert same(found, deferred(make(), whole))
    assert torch.equal(found[2], Net().first.bias), "a hook has dropped its gradient"


# A whole model


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x + self.mlp(x)  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """Tied embeddings, and blocks that are run again inside the backward pass."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.reentrant = reentrant

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x @ self.embed.weight.T  # type: ignore[no-any-return]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_transformer_with_checkpoints(reentrant: bool) -> None:
    def passes(model: Any, step: int, scope: Any) -> None:
        for part in range(2):
            words = torch.randint(11, (2, 5), generator=torch.Generator().manual_seed(2 * step + part))
            with scope(part == 1):
                nn.functional.cross_entropy(model(words).flatten(0, 1), words.roll(1, 1).flatten()).backward()

    found, opt = eager(Transformer(reentrant), passes)
    assert same(found, deferred(Transformer(reentrant), passes))
    assert opt.report().fired == len(found)
