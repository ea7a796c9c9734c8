"""Steps on the host during the backward pass: the bits, the bytes, and what goes wrong."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from queue import Queue
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rulec
import rulec.torch
from rulec.errors import HyperError, PartialUpdate, RulecError, RuleError
from rulec.runtime.buckets.launch import Launch
from rulec.torch import EagerUpdate, GradStore
from rulec.torch.eager import on_host
from rulec.torch.offload import gradient_copies
from rulec.torch.offload.host_step import HostStep
from rulec.torch.offload.worker import ThreadWorker
from tests.torch.eager.training import loss_of, model
from tests.torch.offload.late import LateLink
from tests.torch.offload.runs import assert_same_bits, parameters

#: The bytes of a transfer buffer: many batches, and gradients that are larger.
BUFFER = 1024

#: A rule that needs the norm of all gradients before its first update.
CLIPPED = rulec.load("clip_by_global_norm") >> rulec.load("adamw")

RULES = [
    "adamw", "lion", "adafactor", "lamb", "muon", "soap", pytest.param(CLIPPED, id="clipped"), "prodigy",
    pytest.param(rulec.partition({"**/weight": "lion", "...": "adamw"}), id="partition"),
    pytest.param(rulec.partition({"**/weight": CLIPPED, "...": "adamw"}), id="partition of a clip"),
]  # fmt: skip


class Tied(nn.Module):
    """A small transformer whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.table = nn.Embedding(11, 16)
            self.block = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True)

    def forward(self, words: Tensor) -> Tensor:
        return self.block(self.table(words)) @ self.table.weight.T


def tied_loss(net: nn.Module, number: int) -> Tensor:
    words = torch.randint(11, (2, 6), generator=torch.Generator().manual_seed(number))
    return nn.functional.cross_entropy(net(words).float().flatten(0, 1), words.flatten())


def plain(rule: Any, net: nn.Module, **keywords: Any) -> Any:
    """The optimizer without eager updates."""
    if isinstance(rule, rulec.Partition):
        return rulec.torch.Partitioned(rule, net.named_parameters(), **keywords)
    return rulec.torch.optimizer(rule)(rulec.torch.tagged_groups(net), **keywords)


def eager(rule: Any, net: nn.Module, **keywords: Any) -> EagerUpdate:
    keywords = {"offload": "step", "offload_buffer": BUFFER, **keywords}
    return EagerUpdate(net if isinstance(rule, rulec.Partition) else rulec.torch.tagged_groups(net), rule, **keywords)


def step(opt: EagerUpdate, net: nn.Module, number: int, loss: Callable[..., Tensor] = loss_of) -> None:
    with opt.backward():
        loss(net, number).backward()
    opt.step()


def plain_step(opt: Any, net: nn.Module, number: int, loss: Callable[..., Tensor] = loss_of) -> None:
    opt.zero_grad()
    loss(net, number).backward()
    opt.step()


def assert_alike(ours: nn.Module, theirs: nn.Module, one: Any, other: Any) -> None:
    assert_same_bits([*ours.parameters()], [*theirs.parameters()])
    assert_same_bits(one.state_dict()["state"], other.state_dict()["state"])


# Bits


@pytest.mark.parametrize("contributions", [None, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", RULES)
def test_bits_are_those_of_the_optimizer_without_offload(
    rule: Any, dtype: torch.dtype, contributions: int | None, way: str
) -> None:
    ours, theirs = model(dtype), model(dtype)
    one = eager(rule, ours, contributions=contributions)
    other = plain(rule, theirs, weights="master" if dtype == torch.bfloat16 else None)
    for number in range(3):
        step(one, ours, number)
        plain_step(other, theirs, number)
    assert_alike(ours, theirs, one, other)


@pytest.mark.filterwarnings("ignore:tagged_groups")
@pytest.mark.parametrize(
    ("rule", "buffer"), [("adamw", BUFFER), ("adamw", 256), ("lamb", BUFFER), pytest.param(CLIPPED, 256, id="clipped")]
)
def test_a_transformer_with_tied_weights(rule: Any, buffer: int, way: str) -> None:
    """The tied weight is larger than the smaller buffers, and moves in pieces where the rule is elementwise."""
    ours, theirs = Tied().bfloat16(), Tied().bfloat16()
    one, other = eager(rule, ours, offload_buffer=buffer), plain(rule, theirs, offload="step")
    for number in range(3):
        step(one, ours, number, tied_loss)
        plain_step(other, theirs, number, tied_loss)
    assert_alike(ours, theirs, one, other)
    joined = rule is CLIPPED
    assert (one.report().fired, one.report().deferred) == ((0, 13) if joined else (13, 0))


@pytest.mark.parametrize("rule", ["adamw", pytest.param(CLIPPED, id="clipped")])
@pytest.mark.parametrize("order", ["forwards", "backwards", "any"])
def test_gradients_in_any_order_and_none(order: str, rule: Any, way: str) -> None:
    ours, theirs = model(), model()
    one, other = eager(rule, ours, contributions=1), plain(rule, theirs)
    chosen = random.Random(4)

    def loss(net: nn.Module, number: int) -> Tensor:
        params = [p for i, p in enumerate(net.parameters()) if (i + number) % 4]
        if order != "forwards":  # the engine goes from the last to the first
            chosen.seed(number)
            params = params[::-1] if order == "backwards" else chosen.sample(params, len(params))
        terms = [p.square().mean() * (i + 1) for i, p in enumerate(params)]
        return torch.stack(terms).sum()

    for number in range(5):
        step(one, ours, number, loss)
        plain_step(other, theirs, number, loss)
    assert_alike(ours, theirs, one, other)
    assert one.report().untouched == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", ["adamw", "lamb", pytest.param(CLIPPED, id="clipped")])
def test_micro_batches_are_summed_in_float32(rule: Any, dtype: torch.dtype, way: str) -> None:
    ours, theirs = model(dtype), model(dtype)
    one, other = eager(rule, ours), plain(rule, theirs, offload="step")
    for number in range(2):
        sums = [torch.zeros(p.shape) for p in theirs.parameters()]
        for part in range(3):
            with one.backward(last_microbatch=part == 2):
                loss_of(ours, 3 * number + part).backward()
            theirs.zero_grad()
            loss_of(theirs, 3 * number + part).backward()
            for total, param in zip(sums, theirs.parameters(), strict=True):
                assert param.grad is not None
                total += param.grad
            if part < 2:
                assert all(param.grad is None for param in ours.parameters()), "they are on the host"
        one.step()
        for total, param in zip(sums, theirs.parameters(), strict=True):
            param.grad = total.to(dtype)
        other.step()
    assert_alike(ours, theirs, one, other)


def test_a_gradient_of_an_earlier_micro_batch_alone(way: str) -> None:
    ours, theirs = model(), model()
    one, other = eager("adamw", ours), plain("adamw", theirs)
    for net, scope in ((ours, one.backward), (theirs, lambda last_microbatch=True: torch.enable_grad())):
        with scope(last_microbatch=False):
            loss_of(net, 0).backward()
        with scope():
            net[1](torch.ones(1, 12)).sum().backward()
    one.step()
    other.step()
    assert_alike(ours, theirs, one, other)


def test_sums_of_groups_around_some_that_move_in_pieces(way: str) -> None:
    shapes = ((8, 16), *[(64, 16)] * 4, (8, 8), (8, 8))
    ours, theirs = parameters(shapes=shapes), parameters(shapes=shapes)
    one = EagerUpdate(ours, "adamw", offload="step", offload_buffer=512)
    other = rulec.torch.AdamW(theirs)
    with one.backward(last_microbatch=False):
        torch.stack([p.square().sum() for p in ours]).sum().backward()
    torch.stack([p.square().sum() for p in theirs]).sum().backward()
    one.step()
    other.step()
    assert_same_bits(ours, theirs)
    assert one.report().deferred == 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clipping_in_two_passes(dtype: torch.dtype, way: str) -> None:
    nets = [model(dtype), model(dtype)]
    keywords = {"contributions": 1, "max_grad_norm": 0.1}
    one = eager("adamw", nets[0], **keywords)
    weights = "master" if dtype == torch.bfloat16 else None
    other = eager("adamw", nets[1], offload=None, weights=weights, offload_buffer=64 << 20, **keywords)
    for opt, net in zip((one, other), nets, strict=True):
        for number in range(3):
            loss = loss_of(net, number)
            with opt.measure():
                loss.backward(retain_graph=True)
            with opt.backward():
                loss.backward()
            opt.step()
    assert_alike(nets[0], nets[1], one, other)
    assert one.report().fired == 9


def test_statistics_are_those_of_the_optimizer_without_offload(way: str) -> None:
    ours, theirs = model(), model()
    one, other = eager("lamb", ours, watch="norms", contributions=1), plain("lamb", theirs, watch="norms")
    for number in range(2):
        step(one, ours, number)
        plain_step(other, theirs, number)
    assert sorted(one.statistics().numbers().values()) == sorted(other.statistics().numbers().values())


def test_a_store_of_gradients(way: str) -> None:
    ours, theirs = model(), model()
    one, other = eager("adamw", ours), plain("adamw", theirs)
    for opt, net in ((one, ours), (other, theirs)):
        grads = GradStore()
        grads.backward(loss_of(net, 0), net.parameters())
        grads.step(opt, [*net.parameters()][4:])
        grads.step(opt)
    assert_alike(ours, theirs, one, other)


@pytest.mark.parametrize("rule", ["adamw", pytest.param(CLIPPED, id="clipped")])
def test_checkpoints_go_both_ways(rule: Any, way: str) -> None:
    ours, theirs = model(torch.bfloat16), model(torch.bfloat16)
    one, other = eager(rule, ours), plain(rule, theirs, weights="master")
    step(one, ours, 0)
    step(one, ours, 1)
    plain_step(other, theirs, 7)
    theirs.load_state_dict(ours.state_dict())
    other.load_state_dict(one.state_dict())
    step(one, ours, 2)
    plain_step(other, theirs, 2)
    assert_alike(ours, theirs, one, other)
    again = model(torch.bfloat16)
    third = eager(rule, again, contributions=1)
    again.load_state_dict(theirs.state_dict())
    third.load_state_dict(other.state_dict())
    step(third, again, 3)
    plain_step(other, theirs, 3)
    assert_alike(again, theirs, third, other)


def test_a_closed_optimizer_takes_steps_after_the_backward_pass(way: str) -> None:
    ours, theirs = model(), model()
    one, other = eager(CLIPPED, ours), plain(CLIPPED, theirs)
    step(one, ours, 0)
    one.close()
    loss_of(ours, 1).backward()
    one.step()
    for number in range(2):
        plain_step(other, theirs, number)
    assert_same_bits([*ours.parameters()], [*theirs.parameters()])


def test_a_step_that_is_given_up_leaves_no_trace(way: str) -> None:
    """The statistics are those of the step before, and the optimizer inside takes whole steps again."""
    ours, theirs = model(), model()
    one, other = eager("prodigy", ours, contributions=1, watch="norms"), plain("prodigy", theirs)
    step(one, ours, 0)
    numbers = one.statistics().numbers()
    with one.backward():
        loss_of(ours, 7).backward()
    one.zero_grad()
    assert one.statistics().numbers() == numbers
    one.close()
    plain_step(other, theirs, 0)
    for number in range(1, 4):
        plain_step(one.inner, ours, number)
        plain_step(other, theirs, number)
    assert_alike(ours, theirs, one, other)


# Bytes


def layers(count: int = 12, width: int = 32) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        return nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(count)]).bfloat16()


def square(net: nn.Module, number: int) -> Tensor:
    return net(torch.full((2, net[0].in_features), 0.1 * (number + 1)).bfloat16()).square().mean()


@pytest.mark.parametrize("rule", ["adamw", pytest.param(CLIPPED, id="clipped")])
def test_each_gradient_goes_down_once_and_each_weight_up_once(rule: Any, links: list[LateLink]) -> None:
    net = layers()
    opt = eager(rule, net, contributions=1, offload_buffer=4096)
    all_bytes = sum(p.nbytes for p in net.parameters())
    for number in range(3):
        for link in links:
            link.downs.bytes = link.ups.bytes = 0
        step(opt, net, number, square)
        assert sum(link.downs.bytes for link in links if link.takes_gradients) == all_bytes
        assert sum(link.ups.bytes for link in links) == all_bytes


class Stalled(ThreadWorker):
    """A worker that begins only when somebody waits for it."""

    def __init__(self, gate: Event) -> None:
        super().__init__(lambda: None)
        self._gate = gate

    def give(self, work: Callable[[], None]) -> None:
        super().give(lambda: (self._gate.wait(), work())[1])

    def wait(self) -> None:
        self._gate.set()
        super().wait()


@pytest.mark.parametrize("rule", ["adamw", pytest.param(CLIPPED, id="clipped")])
@pytest.mark.parametrize("last", [True, False])
def test_the_device_holds_the_gradients_of_two_buffers_and_one(
    last: bool, rule: Any, links: list[LateLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Event()

    class Buffers(Queue[Tensor]):
        def get(self, *args: Any, **keywords: Any) -> Tensor:
            if self.empty():
                gate.set()
            return super().get(*args, **keywords)

    monkeypatch.setattr(gradient_copies, "SimpleQueue", Buffers)
    monkeypatch.setattr(on_host, "worker_for", lambda devices: Stalled(gate))
    net = layers(40)
    opt = eager(rule, net, contributions=1, offload_buffer=4096)
    with opt.backward(last_microbatch=last):
        square(net, 0).backward()
    report = opt.report()
    assert report.bytes_freed == sum(p.nbytes for p in net.parameters())
    assert report.peak_gradient_bytes == 2 * 4096 + 32 * 32 * 2


def test_master_copies_are_compared_with_weights_that_others_wrote_alone(way: str) -> None:
    net = layers()
    opt = eager("adamw", net, contributions=1, offload_buffer=4096)
    masters = []
    for number in range(3):
        step(opt, net, number, square)
        masters = masters or [state["param::master"] for state in opt.state_dict()["state"].values()]
        if number == 0:
            before = [master._version for master in masters]
    assert [master._version for master in masters] == before
    with torch.no_grad():
        net[0].weight.fill_(3.0)
    step(opt, net, 3, square)
    assert [master._version - old for master, old in zip(masters, before, strict=True)] == [1] + [0] * 11
    assert float((masters[0] - 3.0).abs().max()) < 0.01


def test_one_gradient_that_is_larger_than_a_buffer_is_held(links: list[LateLink]) -> None:
    net = layers(8)
    opt = eager("adamw", net, contributions=1, offload_buffer=1024)
    step(opt, net, 0, square)
    assert opt.report().peak_gradient_bytes <= 2 * 32 * 32 * 2


# Errors


class Fails(RuntimeError):
    """What goes wrong in these tests."""


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Has the step on the host fail at the launch whose number, from 0, is in the list."""
    bring, at, count = HostStep.bring, list[int](), [0]

    def broken(self: HostStep, launch: Launch, *what: Any, **more: Any) -> None:
        count[0] += 1
        if at and count[0] > at[0]:
            raise Fails("the copy failed")
        bring(self, launch, *what, **more)

    monkeypatch.setattr(HostStep, "bring", broken)
    return at


def assert_partial(opt: EagerUpdate, net: nn.Module, before: Sequence[Tensor]) -> None:
    """Asserts that the step is known to be partial, and that its error tells what was updated."""
    with pytest.raises(PartialUpdate, match=r"call accept_partial\(\)") as caught:
        opt.step()
    pairs = zip(net.named_parameters(), before, strict=True)
    moved = {name for (name, param), old in pairs if not torch.equal(param, old)}
    assert moved == {*caught.value.updated}
    assert {*caught.value.updated, *caught.value.pending} == {name for name, _ in net.named_parameters()}


def test_an_error_on_the_host_is_raised_and_says_what_was_updated(failing: list[int], way: str) -> None:
    net = layers()
    opt = eager("adamw", net, contributions=1, offload_buffer=4096)
    before = [p.detach().clone() for p in net.parameters()]
    failing.append(3)
    with pytest.raises(Fails), opt.backward():
        square(net, 0).backward()
    assert_partial(opt, net, before)
    for act in (opt.state_dict, opt.zero_grad, opt.close, lambda: step(opt, net, 1, square)):
        with pytest.raises(PartialUpdate):
            act()
    failing.clear()
    opt.accept_partial()
    step(opt, net, 1, square)  # which is watched
    step(opt, net, 2, square)
    assert opt.report().fired == 12


def test_an_error_before_any_update_leaves_no_trace(failing: list[int], way: str) -> None:
    ours, theirs = layers(), layers()
    one, other = eager("adamw", ours, contributions=1, offload_buffer=4096), plain("adamw", theirs, offload="step")
    failing.append(0)
    with pytest.raises(Fails), one.backward():
        square(ours, 0).backward()
    failing.clear()
    step(one, ours, 1, square)
    plain_step(other, theirs, 1, square)
    assert_alike(ours, theirs, one, other)


def test_an_error_in_the_one_step_of_all(failing: list[int], way: str) -> None:
    net = layers()
    opt = eager(CLIPPED, net, offload_buffer=4096)
    with opt.backward():
        square(net, 0).backward()
    failing.append(0)
    with pytest.raises(Fails):
        opt.step()
    failing.clear()
    step(opt, net, 0, square)


def test_an_interrupt_while_the_host_works(links: list[LateLink], monkeypatch: pytest.MonkeyPatch) -> None:
    net = layers()
    opt = eager("adamw", net, contributions=1, offload_buffer=4096)
    before = [p.detach().clone() for p in net.parameters()]

    def interrupted(self: ThreadWorker) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(ThreadWorker, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt), opt.backward():
        square(net, 0).backward()
    assert_partial(opt, net, before)
    opt.accept_partial()
    step(opt, net, 1, square)


def test_a_backward_pass_that_fails_in_its_middle(way: str) -> None:
    net = layers()
    opt = eager("adamw", net, contributions=1, offload_buffer=4096)
    before = [p.detach().clone() for p in net.parameters()]

    def fail(module: Any, grad_input: Any, grad_output: Any) -> None:
        raise Fails

    handle = net[3].register_full_backward_hook(fail)
    with pytest.raises(Fails), opt.backward():
        square(net, 0).backward()
    handle.remove()
    assert_partial(opt, net, before)
    opt.accept_partial()
    twin = layers()
    other = plain("adamw", twin, offload="step")
    twin.load_state_dict(net.state_dict())
    other.load_state_dict(opt.state_dict())
    step(opt, net, 1, square)
    plain_step(other, twin, 1, square)
    assert_alike(net, twin, opt, other)


def test_micro_batches_that_fail_are_said(way: str) -> None:
    net = model()
    opt = eager("adamw", net, contributions=1)
    with opt.backward(last_microbatch=False):
        loss_of(net, 0).backward()
    with pytest.raises(Fails), opt.backward(last_microbatch=False):
        raise Fails
    with pytest.raises(RulecError, match=r"call zero_grad\(\) and begin the step again"):
        opt.step()
    opt.zero_grad()
    twin = model()
    other = plain("adamw", twin)
    step(opt, net, 1)
    plain_step(other, twin, 1)
    assert_alike(net, twin, opt, other)


def test_a_weight_that_is_about_to_be_updated_is_not_read(links: list[LateLink]) -> None:
    net = layers(1)
    opt = eager("adamw", net, contributions=1)
    kept = (net[0].weight.exp() * net[0].weight).sum()  # saves the weight
    with pytest.raises(RuntimeError, match="modified by an inplace operation"), opt.backward():
        _both(net[0].weight.sum(), kept)


def _both(*losses: Tensor) -> None:
    for loss in losses:
        loss.backward()


# Refusals


@pytest.mark.parametrize(
    ("rule", "keywords", "message"),
    [
        ("adamw", {"journal": True}, "journal=True keeps copies of weights on the device"),
        ("signum", {"accumulate": "fold"}, "accumulate='fold' adds gradients to states on their device"),
        ("adamw", {"epilogue": True}, "epilogue= updates weights on their device"),
        (torch.optim.AdamW, {"scope": "elementwise"}, "offload='step' is for rules, and AdamW is none"),
    ],
)
def test_what_does_not_go_together(rule: Any, keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(HyperError, match=message) as caught:
        EagerUpdate(model(), rule, offload="step", **keywords)
    assert "\n" not in str(caught.value)


def test_rules_of_the_whole_model_need_the_host() -> None:
    with pytest.raises(RuleError, match="needs a value of the whole model"):
        EagerUpdate(model(), CLIPPED)
    optimizer = rulec.torch.optimizer(CLIPPED)(model().parameters(), offload="step")
    params: Iterable[Tensor] = optimizer.param_groups[0]["params"]
    with pytest.raises(RuleError, match="needs a value of the whole model"):
        GradStore([(p, torch.ones_like(p)) for p in params]).step(optimizer, [*params][:1])
