"""Backward passes that leave weights without a gradient, and hooks of others: a product is kept only for the update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rulec.errors import RulecError
from rulec.torch import EagerUpdate
from tests.torch.eager.layers import WIDE, Layers, numbers, same
from tests.torch.eager.recipe import Passes, deferred, eager

pytestmark = pytest.mark.usefixtures("small_tiles")

#: The weights in the order of a backward pass.
ALL = [(37, WIDE), (WIDE, 70), (70, WIDE)]
OTHERS = ALL[:2]


def loss_of(model: Any, inputs: Tensor) -> Tensor:
    return model(inputs).square().mean()


def ordinary(model: Any, step: int, scope: Any) -> None:
    with scope():
        loss_of(model, numbers(step, 6)).backward()


def fails(x: Tensor) -> Tensor:
    """The same numbers, of which the backward pass fails."""

    def fail(grad: Tensor) -> None:
        raise ZeroDivisionError

    found = x.clone()
    found.register_hook(fail)
    return found


# Passes that are no part of the step's gradient, or give it to some parameters only


def adversarial(model: Any, step: int, scope: Any) -> None:
    """Inputs are moved along their gradient, which goes by all weights."""
    with scope():
        x = numbers(step, 6).requires_grad_()
        (grad,) = torch.autograd.grad(loss_of(model, x), x)
        loss_of(model, (x + 30 * grad).detach()).backward()


def adversarial_outside(model: Any, step: int, scope: Any) -> None:
    """The same before the scope."""
    x = numbers(step, 6).requires_grad_()
    (grad,) = torch.autograd.grad(loss_of(model, x), x)
    with scope():
        loss_of(model, (x + 30 * grad).detach()).backward()


def to_inputs(model: Any, step: int, scope: Any) -> None:
    """The inputs alone are given a gradient, in `.grad`."""
    with scope():
        x = numbers(step, 6).requires_grad_()
        loss_of(model, x).backward(inputs=[x])
        assert x.grad is not None
        loss_of(model, (x + 30 * x.grad).detach()).backward()


def to_parts(model: Any, step: int, scope: Any) -> None:
    """Two losses, each of which trains its own layers."""
    first = [*model.first.parameters()]
    rest = [p for name, p in model.named_parameters() if not name.startswith("first")]
    with scope():
        losses = loss_of(model, numbers(step, 6)), loss_of(model, numbers(step + 100, 6))
        losses[0].backward(inputs=first)
        losses[1].backward(inputs=rest)


def to_one_of_two(model: Any, step: int, scope: Any) -> None:
    """Two losses, of which the first trains the biases alone, and the second everything."""
    with scope():
        loss_of(model, numbers(step, 6)).backward(inputs=[model.first.bias, model.last.bias])
        loss_of(model, numbers(step + 100, 6)).backward()


def penalty(model: Any, step: int, scope: Any) -> None:
    """The inputs' gradient is part of the loss."""
    with scope():
        x = numbers(step, 6).requires_grad_()
        loss = loss_of(model, x)
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + 100 * grad.square().sum()).backward()


def penalty_of_weights(model: Any, step: int, scope: Any) -> None:
    """A weight's gradient is part of the loss."""
    with scope():
        loss = loss_of(model, numbers(step, 6))
        (grad,) = torch.autograd.grad(loss, model.first.weight, create_graph=True)
        (loss + 10 * grad.square().sum()).backward()


def asked_for(model: Any, step: int, scope: Any) -> None:
    """A weight's gradient is a factor of the loss."""
    with scope():
        asked = [model.first.weight, model.last.bias]
        norm = sum(g.square().sum() for g in torch.autograd.grad(loss_of(model, numbers(step, 6)), asked))
        (loss_of(model, numbers(step + 100, 6)) * norm).backward()


def batched(model: Any, step: int, scope: Any) -> None:
    """Several gradients at once, of inputs and of a weight."""
    with scope():
        x = numbers(step, 6).requires_grad_()
        found = model(x)
        ways = torch.stack([torch.ones_like(found), found.detach()])
        grads = torch.autograd.grad(found, [x, model.second.weight], ways, is_grads_batched=True)
        (loss_of(model, numbers(step + 100, 6)) * sum(g.square().mean() for g in grads)).backward()


class Nested(torch.autograd.Function):
    """Runs a layer without a graph, and differentiates it in the backward pass, by inputs and weights."""

    @staticmethod
    def forward(ctx: Any, layer: nn.Linear, x: Tensor, *params: Tensor) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        return layer(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            found = ctx.layer(x)
        return None, *torch.autograd.grad(found, [x, *ctx.layer.parameters()], grad)


def nested(model: Any, step: int, scope: Any) -> None:
    """A backward pass within one, whose gradients are handed to the outer."""
    with scope():
        hidden = torch.tanh(Nested.apply(model.first, numbers(step, 6).requires_grad_(), *model.first.parameters()))
        model.last(model.second(hidden)).square().mean().backward()


def failing(model: Any, step: int, scope: Any) -> None:
    """A pass fails before any gradient is complete, and the program goes on."""
    with scope():
        x = numbers(step, 6)
        with pytest.raises(ZeroDivisionError):
            model.second(torch.tanh(model.first(fails(model.second(torch.tanh(model.first(x))))))).sum().backward()
        loss_of(model, x).backward()


def unfrozen_inside(model: Any, step: int, scope: Any) -> None:
    """A weight is trained from the middle of the scope on."""
    model.first.weight.requires_grad_(False)
    with scope():
        model.first.weight.requires_grad_(True)
        loss_of(model, numbers(step, 6)).backward()


@pytest.mark.parametrize("epilogue", [False, True])
@pytest.mark.parametrize(
    ("passes", "expected"),
    [
        (adversarial, ALL), (adversarial_outside, ALL), (to_inputs, ALL), (to_parts, ALL[2:] + OTHERS), (penalty, []),
        (penalty_of_weights, ALL[2:]), (asked_for, ALL), (batched, ALL), (nested, OTHERS), (failing, ALL),
        (unfrozen_inside, OTHERS),
    ],
)  # fmt: skip
def test_only_what_a_pass_adds_to_a_gradient_is_kept(
    passes: Passes, expected: list[Any], epilogue: bool, updated: list[Any]
) -> None:
    found, _ = eager(Layers(), passes, steps=3, epilogue=epilogue, contributions=1)
    assert same(found, deferred(Layers(), passes, steps=3))
    assert updated == (expected * 2 if epilogue else []), "from the second step on, when there are states"


@pytest.mark.parametrize("passes", [adversarial, to_one_of_two])
def test_watching_counts_no_more_than_what_a_pass_adds(passes: Passes, updated: list[Any]) -> None:
    found, _ = eager(Layers(), passes, steps=3, epilogue=True)
    assert same(found, deferred(Layers(), passes, steps=3))
    assert updated == ALL * 2


def test_a_gradient_that_is_asked_for_is_that_of_the_layer() -> None:
    """Inside of the scope, by all ways to ask."""
    model, twin = Layers(), Layers()
    opt = EagerUpdate(model, "adamw", epilogue=True, contributions=1)
    with opt.backward():
        for create_graph in (False, True):
            grads = [
                torch.autograd.grad(loss_of(one, numbers(0, 6)), [*one.parameters()], create_graph=create_graph)
                for one in (model, twin)
            ]
            assert same(*grads)
            assert grads[0][0].requires_grad == create_graph
        with pytest.raises(RuntimeError, match="not have been used in the graph"):
            torch.autograd.grad(model.last(numbers(0, 6)).sum(), model.first.weight)
        loss_of(model, numbers(0, 6)).backward()


def test_gradients_of_a_batch_of_outputs_have_the_layers_bits() -> None:
    """The backward pass is run under vmap then."""
    model, twin = Layers(), Layers()
    opt = EagerUpdate(model, "adamw", epilogue=True, contributions=1)
    found = []
    with opt.backward():
        for one in (model, twin):
            x = numbers(0, 6).requires_grad_()
            outputs = one(x)
            ways = torch.stack([torch.ones_like(outputs), outputs.detach()])
            found.append(torch.autograd.grad(outputs, [x, *one.parameters()], ways, is_grads_batched=True))
    assert same(*found)


class Shapes(TorchDispatchMode):
    """The shapes of all matrices that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        self.seen |= {tuple(made.shape) for made in tree_leaves(found) if isinstance(made, Tensor) and made.dim() == 2}
        return found


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_gradient_of_inputs_neither_makes_those_of_weights_nor_keeps_factors(create_graph: bool) -> None:
    _, opt = eager(model := Layers(), ordinary, steps=2, epilogue=True)
    with opt.backward():
        x = numbers(2, 6).requires_grad_()
        loss = loss_of(model, x)
        with Shapes() as made:
            torch.autograd.grad(loss, x, create_graph=create_graph)
        assert made.seen >= {(6, WIDE), (6, 70)}
        assert not made.seen & set(ALL)
        assert not opt._passes.epilogue._kept._products  # type: ignore[union-attr]


# Hooks of others, which are shown whole gradients


def half(param: Tensor) -> None:
    """Halves a gradient after it was accumulated."""
    assert param.grad is not None
    param.grad.mul_(0.5)


def hook(model: Any) -> Any:
    return model.first.weight.register_post_accumulate_grad_hook(half)


def hook_before(model: Any) -> Any:
    return model.first.weight.register_hook(lambda grad: grad / 2)


def hooked() -> nn.Module:
    model = Layers()
    hook(model)
    return model


def hooked_after_the_optimizer(model: Any, step: int, scope: Any) -> None:
    if step == 0:
        hook(model)
    ordinary(model, step, scope)


def hooked_between(model: Any, step: int, scope: Any) -> None:
    """The hook comes after the forward pass."""
    loss = loss_of(model, numbers(step, 6))
    if step == 0:
        hook(model)
    with scope():
        loss.backward()


def hooked_inside(model: Any, step: int, scope: Any) -> None:
    """The hook comes after the forward pass, and goes again."""
    with scope():
        loss = loss_of(model, numbers(step, 6))
        handle = hook(model)
        loss.backward()
    handle.remove()


def hooked_from_inside(model: Any, step: int, scope: Any) -> None:
    """The hook comes inside of a scope, and stays."""
    with scope():
        if step == 2:
            hook(model)
        loss_of(model, numbers(step, 6)).backward()


def hooked_between_passes(model: Any, step: int, scope: Any) -> None:
    """The hook comes inside of a scope with two passes, the first of which it does not see."""
    with scope():
        losses = [loss_of(model, numbers(step, 6)) for _ in range(2)]
        losses[0].backward(inputs=[model.first.bias])
        handle = hook(model)
        losses[1].backward(inputs=[model.first.weight])
    handle.remove()


def hooked_micro_batches(model: Any, step: int, scope: Any) -> None:
    for part in range(2):
        with scope(part == 1):
            handle = hook(model)
            loss_of(model, numbers(10 * step + part, 6)).backward()
        handle.remove()


@pytest.mark.parametrize("epilogue", [False, True])
@pytest.mark.parametrize(
    ("make", "passes", "expected"),
    [
        (hooked, ordinary, OTHERS * 2), (Layers, hooked_after_the_optimizer, OTHERS * 2),
        (Layers, hooked_between, OTHERS * 2), (Layers, hooked_inside, OTHERS * 2),
        (Layers, hooked_from_inside, ALL + OTHERS), (Layers, hooked_between_passes, []),
        (Layers, hooked_micro_batches, []),
    ],
)  # fmt: skip
def test_the_gradient_that_hooks_leave_is_the_one_that_is_used(
    make: Callable[[], nn.Module], passes: Passes, expected: list[Any], epilogue: bool, updated: list[Any]
) -> None:
    found, _ = eager(make(), passes, steps=3, epilogue=epilogue, contributions=1)
    assert same(found, deferred(make(), passes, steps=3))
    assert updated == (expected if epilogue else [])


def test_a_weight_waits_for_hooks_that_came_late_only_once() -> None:
    """In the next step they are before the update."""
    model = Layers()
    opt = EagerUpdate(model, "adamw", contributions=1)
    deferrals = []
    for step in range(1, 4):
        hooked_from_inside(model, step, opt.backward)
        opt.step()
        deferrals.append(opt.report().deferred)
    assert deferrals == [0, 1, 0]


@pytest.mark.parametrize("epilogue", [False, True])
def test_a_hook_that_is_removed_leaves_the_weight_as_before(epilogue: bool, updated: list[Any]) -> None:
    _, opt = eager(model := Layers(), ordinary, steps=1, epilogue=epilogue)
    handle = hook(model)
    ordinary(model, 1, opt.backward)
    opt.step()
    handle.remove()
    ordinary(model, 2, opt.backward)
    assert updated == (OTHERS + ALL if epilogue else [])
    assert opt.report().fired == 7


def folded(model: nn.Module) -> tuple[Any, Any]:
    opt = EagerUpdate(model, "signum", accumulate="fold", contributions=1)
    return opt, opt.backward


def measured(model: nn.Module) -> tuple[Any, Any]:
    opt = EagerUpdate(model, "adamw", max_grad_norm=1.0, contributions=1)
    return opt, opt.measure


@pytest.mark.parametrize("make", [folded, measured])
def test_a_hook_that_comes_too_late_for_its_gradient_is_refused(make: Callable[[nn.Module], Any]) -> None:
    opt, scope = make(model := Layers())
    with pytest.raises(RulecError, match=r"registered on first.weight inside of the scope, .* before the scope"):
        hooked_inside(model, 0, scope)
    opt.zero_grad() if opt.max_grad_norm else opt.accept_partial()
    hook(model)
    ordinary(model, 1, scope)


@pytest.mark.parametrize("register", [hook, hook_before])
def test_a_hook_that_comes_within_a_gradient_is_refused(register: Callable[[nn.Module], Any]) -> None:
    """Of a weight that is used twice one contribution was kept already."""
    _, opt = eager(model := Layers(), ordinary, steps=2, epilogue=True)
    hidden = model.second(model.first(numbers(2, 6)))
    hidden.register_hook(lambda grad: register(model) and None)
    loss = loss_of(model, hidden)
    with pytest.raises(RulecError, match=r"registered on first\.weight after a part of its"), opt.backward():
        loss.backward()
