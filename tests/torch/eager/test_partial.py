"""A backward pass that ends in its middle: what is known, and the two ways on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rulec
from rulec.errors import PartialUpdate, RulecError
from rulec.torch import EagerUpdate
from tests.torch.eager.training import cloned, equal, gone, loss_of, model, plain


class Broken(RuntimeError):
    """What goes wrong in these tests."""


@contextmanager
def failing(layer: nn.Module) -> Iterator[None]:
    """The backward pass fails at this layer."""

    def fail(module: Any, grad_input: Any, grad_output: Any) -> None:
        raise Broken

    handle = layer.register_full_backward_hook(fail)
    yield
    handle.remove()


def backward(opt: EagerUpdate, net: nn.Module, number: int = 0, **keywords: Any) -> None:
    with opt.backward(**keywords):
        loss_of(net, number).backward()


def broken(opt: EagerUpdate, net: Any, number: int = 0, **keywords: Any) -> None:
    """A pass that fails when the upper layers are done."""
    with failing(net[3]), pytest.raises(Broken):
        backward(opt, net, number, **keywords)


@pytest.mark.parametrize("journal", [False, True])
def test_a_failure_poisons_until_it_is_dealt_with(journal: bool) -> None:
    net = model()
    opt = EagerUpdate(net, "adamw", contributions=1, journal=journal)
    broken(opt, net)
    remedy = r"call rollback\(\)" if journal else r"call accept_partial\(\)"
    for act in (opt.step, opt.state_dict, opt.zero_grad, opt.close, lambda: backward(opt, net)):
        with pytest.raises(PartialUpdate, match=remedy) as caught:
            act()  # type: ignore[operator]
        # Layers above and none below.
        assert {"4.weight", "6.weight"} <= {*caught.value.updated}
        assert {"0.weight", "1.weight", "3.weight"} <= {*caught.value.pending}
        assert sorted([*caught.value.updated, *caught.value.pending]) == sorted(n for n, _ in net.named_parameters())
    opt.accept_partial()
    assert gone(net)
    backward(opt, net)
    opt.step()


RULES = [
    "adamw", "nadam", "sgd", "momentum", "lamb", "apollo",
    pytest.param(rulec.partition({"**/weight": "lion", "...": "adamw"}), id="partition"),
    pytest.param((torch.optim.AdamW, {"scope": "elementwise", "lr": 1e-3}), id="torch"),
]  # fmt: skip


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("rule", RULES)
def test_rollback_is_as_if_nothing_had_happened(rule: Any, steps: int) -> None:
    rule, more = rule if isinstance(rule, tuple) else (rule, {})
    nets = [model(), model()]
    ours, theirs = (
        EagerUpdate(net, rule, contributions=1, journal=j, **more) for net, j in zip(nets, (True, False), strict=True)
    )
    for number in range(steps):
        for opt, net in ((ours, nets[0]), (theirs, nets[1])):
            backward(opt, net, number)
            opt.step()
    before = cloned(nets[0].parameters())
    broken(ours, nets[0], steps)
    assert not all(torch.equal(a, b) for a, b in zip(before, nets[0].parameters(), strict=True))
    ours.rollback()
    assert all(torch.equal(a, b) for a, b in zip(before, nets[0].parameters(), strict=True))
    assert gone(nets[0])
    for number in range(steps, steps + 3):
        for opt, net in ((ours, nets[0]), (theirs, nets[1])):
            backward(opt, net, number)
            opt.step()
    assert all(torch.equal(a, b) for a, b in zip(*(net.parameters() for net in nets), strict=True))
    assert equal(ours.state_dict(), theirs.state_dict())


def test_rollback_of_what_was_folded() -> None:
    net = model()
    opt = EagerUpdate(net, "signum", contributions=1, accumulate="fold", journal=True)
    backward(opt, net)
    opt.step()
    before, state = cloned(net.parameters()), {k: dict(v) for k, v in opt.state_dict()["state"].items()}
    state = {k: {name: x.clone() for name, x in v.items()} for k, v in state.items()}
    backward(opt, net, 1, last_microbatch=False)
    broken(opt, net, 2)
    opt.rollback()
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    assert equal(state, opt.state_dict()["state"])


def test_a_failure_before_any_update_leaves_no_trace() -> None:
    nets = [model(), model()]
    opt, twin = EagerUpdate(nets[0], "adamw"), plain(nets[1], "adamw")
    broken(opt, nets[0])  # the first step is watched: nothing was updated
    assert gone(nets[0])
    for number in range(3):
        backward(opt, nets[0], number)
        opt.step()
        twin.zero_grad()
        loss_of(nets[1], number).backward()
        twin.step()
    assert all(torch.equal(a, b) for a, b in zip(*(net.parameters() for net in nets), strict=True))


def test_a_failure_among_micro_batches_has_the_step_begun_again() -> None:
    net = model()
    opt = EagerUpdate(net, "adamw", contributions=1)
    backward(opt, net, last_microbatch=False)
    broken(opt, net, 1, last_microbatch=False)
    for act in (opt.step, lambda: backward(opt, net, 2)):
        with pytest.raises(RulecError, match=r"micro-batches are not complete: call zero_grad\(\)"):
            act()
    opt.zero_grad()
    assert gone(net)
    backward(opt, net)
    opt.step()
    assert opt.report().fired == 9


def test_a_failure_in_the_step_itself_is_partial_too() -> None:
    net = model()
    opt = EagerUpdate(net, "adamw", contributions=1, only="4.*")
    backward(opt, net)
    net[1].bias.grad = torch.ones(20).to_sparse()
    with pytest.raises(RulecError, match="sparse"):
        opt.step()
    with pytest.raises(PartialUpdate) as caught:
        opt.step()
    assert caught.value.updated == ["4.weight", "4.bias"]


def test_rollback_without_a_journal_and_without_a_failure() -> None:
    net = model()
    opt = EagerUpdate(net, "adamw", contributions=1)
    for act in (opt.rollback, opt.accept_partial):
        with pytest.raises(RulecError, match="is for a step that ended in its middle, and none did"):
            act()
    broken(opt, net)
    with pytest.raises(RulecError, match="kept with journal=True"):
        opt.rollback()


def both(opt: EagerUpdate, losses: Sequence[Tensor]) -> None:
    """Two passes in one scope."""
    with opt.backward():
        for loss in losses:
            loss.backward()


@pytest.mark.parametrize("reads", [False, True])
def test_a_second_arrival_after_the_update_is_partial(reads: bool) -> None:
    """Where the second pass reads what was updated, autograd notices by itself."""
    net = model()
    opt = EagerUpdate(net, "adamw", contributions=1, journal=True)
    before = cloned(net.parameters())
    losses = [loss_of(net, i) if reads else sum(p.sum() for p in net.parameters()) for i in range(2)]
    message = "modified by an inplace" if reads else "arrived 2 times in this backward pass, where 1 were expected"
    with pytest.raises(RuntimeError, match=message):
        both(opt, losses)  # type: ignore[arg-type]
    with pytest.raises(PartialUpdate):
        opt.step()
    opt.rollback()
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))


def test_an_interruption_leaves_nobody_in_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may come when a kernel has run and nobody has noted so."""
    net = model()
    opt = EagerUpdate(net, "adamw", contributions=1, journal=True)
    before, fire = cloned(net.parameters()), opt._inner.fire

    def interrupted(places: tuple[int, ...], grads: Sequence[Tensor]) -> None:
        fire(places, grads)
        raise KeyboardInterrupt

    monkeypatch.setattr(opt._inner, "fire", interrupted)
    with pytest.raises(KeyboardInterrupt):
        backward(opt, net)
    with pytest.raises(PartialUpdate) as caught:
        opt.step()
    assert caught.value.updated == ["6.weight"]
    opt.rollback()
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))


def test_a_journal_is_counted_and_gone_after_the_step() -> None:
    net = model()
    opt = EagerUpdate(net, "adamw", contributions=1, journal=True)
    for _ in range(2):
        backward(opt, net)
        opt.step()
    params = sum(p.nbytes for p in net.parameters())
    assert opt.report().journal_bytes == 3 * params + 4 * 9  # the parameters, two states, and the counts
    assert opt._passes.step is None
