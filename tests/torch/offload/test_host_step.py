"""Steps on the host have the bits of steps where the parameters are."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

import rulec
import rulec.torch
from rulec.errors import HyperError, TensorError
from rulec.torch.offload.link import Event, HostLink, Pairs
from rulec.torch.offload.ring import bytes_of
from tests.torch.offload.runs import BUFFER, assert_same_bits, parameters, take_steps

#: Rules of one stage, of several, over groups and the model, with matrix functions, and with branches.
RULES = ("AdamW", "Lion", "SGD", "LAMB", "Adafactor", "Prodigy", "SOAP", "RAdam", "LARS", "CAME", "Adan")

BRAIN, HALF = torch.bfloat16, torch.float16


def clipped() -> Any:
    return rulec.torch.optimizer(rulec.load("clip_by_global_norm") >> rulec.load("adamw"))


class Twins:
    """The same parameters twice, with an optimizer where they are and one on the host."""

    def __init__(self, made: Any, dtype: torch.dtype = torch.float32, **keywords: Any) -> None:
        words = dict(keywords)
        if dtype in (BRAIN, HALF):
            words.setdefault("weights", "master")
        self.plain, self.moved = parameters(dtype), parameters(dtype)
        self.one = made(self.plain, **words)
        self.other = made(self.moved, **keywords, offload="step", offload_buffer=BUFFER)
        self.count = 0

    @property
    def sides(self) -> list[tuple[list[Tensor], Any]]:
        return [(self.plain, self.one), (self.moved, self.other)]

    def step(self, count: int = 1) -> None:
        for params, optimizer in self.sides:
            take_steps(optimizer, params, count, self.count)
        self.count += count

    def change(self, change: Callable[[list[Tensor], Any], Any]) -> None:
        for params, optimizer in self.sides:
            change(params, optimizer)

    def check(self) -> None:
        assert_same_bits(self.moved, self.plain)
        assert_same_bits(self.other.state_dict(), self.one.state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, BRAIN, HALF, torch.float64])
@pytest.mark.parametrize("rule", RULES)
def test_bits_are_those_of_the_step_without_offload(rule: str, dtype: torch.dtype) -> None:
    twins = Twins(getattr(rulec.torch, rule), dtype)
    twins.step(4)
    twins.check()


@pytest.mark.parametrize("dtype", [torch.float32, BRAIN])
def test_a_norm_of_the_whole_model_comes_before_the_update(dtype: torch.dtype) -> None:
    twins = Twins(clipped(), dtype, max_norm=0.5)
    twins.step(3)
    twins.check()


@pytest.mark.parametrize("weights", ["master", "split", "split24", "kahan", "stochastic", ""])
@pytest.mark.parametrize("state", ["int8", "float8_e4m3", "bfloat16_sr", BRAIN, None])
def test_every_storage_has_the_same_bits(state: Any, weights: str) -> None:
    twins = Twins(rulec.torch.AdamW, BRAIN, weights=weights, state_dtype=state, betas=(0.9, 0.95))
    twins.step(3)
    twins.check()


def test_weights_of_16_bits_have_a_master_copy_unless_another_kind_is_asked_for() -> None:
    def states(**words: Any) -> set[str]:
        params = parameters(BRAIN)
        optimizer = rulec.torch.AdamW(params, offload="step", **words)
        take_steps(optimizer, params, 1)
        return {*optimizer.state[params[0]]}

    adam = {"step", "exp_avg", "exp_avg_sq"}
    assert states() == {*adam, "param::master"}
    assert states(weights="split") == {*adam, "param::low"}
    assert states(weights="") == adam


@pytest.mark.parametrize("weights", ["master", "split", "kahan"])
def test_the_point_of_evaluation_is_reached_group_by_group(weights: str) -> None:
    twins = Twins(rulec.torch.ScheduleFreeAdamW, BRAIN, weights=weights)
    for _ in range(3):
        twins.step(2)
        twins.change(lambda params, optimizer: optimizer.eval())
        assert_same_bits(twins.moved, twins.plain)
        twins.change(lambda params, optimizer: optimizer.train())
        twins.check()


@pytest.mark.parametrize("dtype", [torch.float32, BRAIN])
@pytest.mark.parametrize("rule", ["AdamW", "LAMB", "Adafactor", "SOAP", "Prodigy"])
def test_checkpoints_go_both_ways_in_the_middle_of_a_run(rule: str, dtype: torch.dtype) -> None:
    twins = Twins(getattr(rulec.torch, rule), dtype)
    twins.step(3)
    one, other = copy.deepcopy(twins.one.state_dict()), copy.deepcopy(twins.other.state_dict())
    twins.one.load_state_dict(other)
    twins.other.load_state_dict(one)
    twins.step(2)
    twins.check()
    twins.moved, twins.other = pickle.loads(pickle.dumps((twins.moved, twins.other)))  # noqa: S301
    twins.plain, twins.one = pickle.loads(pickle.dumps((twins.plain, twins.one)))  # noqa: S301
    twins.step()
    twins.check()


def test_states_are_on_the_host_and_are_not_copied_where_they_are_saved() -> None:
    params = parameters(BRAIN)
    optimizer = rulec.torch.AdamW(params, offload="step")
    take_steps(optimizer, params, 1)
    saved = optimizer.state_dict()["state"]
    for place, param in enumerate(params):
        for name, value in saved[place].items():
            assert value.device.type == "cpu"
            assert value.data_ptr() == optimizer.state[param][name].data_ptr()


def test_groups_schedules_missing_gradients_and_new_memory_are_followed() -> None:
    twins = Twins(rulec.torch.AdamW, BRAIN)
    twins.step(2)

    def add(params: list[Tensor], optimizer: Any) -> None:
        extra = torch.linspace(-1, 1, 4900).reshape(70, 70).to(BRAIN).requires_grad_()
        optimizer.add_param_group({"params": [extra], "lr": 0.1, "weight_decay": 0.0})
        params.append(extra)

    def some(params: list[Tensor], optimizer: Any) -> None:
        optimizer.param_groups[0]["lr"] *= 0.3
        for number, param in enumerate(params):
            param.grad = torch.ones_like(param) if number % 2 else None
        optimizer.step()

    def move(params: list[Tensor], optimizer: Any) -> None:
        params[1].data = params[1].data.clone()

    for change in (add, some, move):
        twins.change(change)
        twins.step()
        twins.check()


def test_what_others_write_into_a_weight_is_taken_over() -> None:
    twins = Twins(rulec.torch.AdamW, BRAIN)
    twins.step(2)

    @torch.no_grad()
    def edit(params: list[Tensor], optimizer: Any) -> None:
        params[0].mul_(1.5)
        params[3][7].fill_(2)

    twins.change(edit)
    twins.step(2)
    twins.check()


def test_gradients_of_other_dtypes_and_memory_orders() -> None:
    twins = Twins(rulec.torch.AdamW, BRAIN)

    def wide(params: list[Tensor], optimizer: Any) -> None:
        generator = torch.Generator().manual_seed(5)
        for param in params:
            param.grad = None
            grad = torch.randn(param.shape, generator=generator)
            param.grad_dtype = torch.float32
            param.grad = grad.t().contiguous().t() if grad.dim() == 2 else grad
        optimizer.step()

    twins.change(wide)
    twins.change(wide)
    twins.check()


def test_parameters_in_other_memory_orders() -> None:
    for rule in ("AdamW", "Adafactor", "LAMB"):
        made = getattr(rulec.torch, rule)
        plain, moved = ([torch.randn(90, 70, generator=torch.Generator().manual_seed(1)).t()] for _ in range(2))
        pairs = [(plain, made(plain)), (moved, made(moved, offload="step", offload_buffer=BUFFER))]
        for params, optimizer in pairs:
            params[0].requires_grad_()
            take_steps(optimizer, params, 3)
        assert_same_bits(moved, plain)


def test_complex_parameters_and_sections() -> None:
    def made(offload: str | None) -> tuple[list[Tensor], Any]:
        generator = torch.Generator().manual_seed(2)
        params = [
            torch.randn(6, 5, generator=generator, dtype=torch.complex64).requires_grad_(),
            torch.randn(24, 8, generator=generator).requires_grad_(),
        ]
        groups: list[Any] = [{"params": params[:1]}, {"params": params[1:], "split": 3}]
        return params, rulec.torch.AdamW(groups, offload=offload)

    (plain, one), (moved, other) = made(None), made("step")
    take_steps(one, plain, 3)
    take_steps(other, moved, 3)
    assert_same_bits([torch.view_as_real(moved[0]), moved[1]], [torch.view_as_real(plain[0]), plain[1]])


def test_statistics_partitions_scalers_and_clipping() -> None:
    twins = Twins(rulec.torch.AdamW, BRAIN, watch="norms")
    twins.step(2)
    mine, wanted = twins.other.statistics().numbers(), twins.one.statistics().numbers()
    assert mine == pytest.approx(wanted, rel=1e-6, nan_ok=True)
    results = []
    for words in ({}, {"offload": "step", "offload_buffer": BUFFER}):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 9))
        rule = rulec.partition({"**/bias": rulec.part("lion", lr=1e-3), "...": rulec.part("adamw", lr=1e-2)})
        optimizer: Any = rulec.torch.Partitioned(rule, model.named_parameters(), **words)
        scaler = GradScaler("cpu", init_scale=1024.0)
        for _ in range(3):
            loss = model(torch.randn(8, 40, generator=torch.Generator().manual_seed(4))).square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        results.append([*model.parameters()])
    assert_same_bits(results[1], results[0])


def test_a_skipped_tensor_keeps_its_weight() -> None:
    rule = rulec.parse(
        "name: Cautious\nsummary: SGD that leaves out tensors with large gradients.\nhyper: {lr: 0.1}\n"
        "skip: norm(g) > 40\nstep: |\n  direction = g\n"
    )
    for weights in ("master", "split", ""):
        twins = Twins(rulec.torch.optimizer(rule), BRAIN, weights=weights)
        with pytest.warns(RuntimeWarning, match="skipped the step"):
            twins.step(2)
        twins.check()
        assert twins.other.skipped_steps == twins.one.skipped_steps == 2


def wrong_words() -> Sequence[tuple[dict[str, Any], str]]:
    return [
        ({"offload": "steps"}, "offload='steps' of AdamW is none of step, states; did you mean 'step'?"),
        ({"offload": "step", "offload_buffer": 0}, "offload_buffer=0 of AdamW must be a whole number of bytes from 1"),
        (
            {"offload_buffer": 1024},
            "offload_buffer=1024 of AdamW is for an offload: give offload='states' or 'step', or leave it out",
        ),
        ({"offload": "step", "capturable": True}, "offload='step' of AdamW works by the host, and a group has"),
        ({"offload": "step", "fused": True}, "capturable=True or fused=True, for steps without it: leave one out"),
    ]


@pytest.mark.parametrize(("words", "message"), wrong_words())
def test_wrong_words_are_refused(words: dict[str, Any], message: str) -> None:
    with pytest.raises(HyperError) as error:
        rulec.torch.AdamW(parameters(), **words)
    assert message in str(error.value)


def test_rules_that_need_more_than_gradients_are_refused_when_they_are_made() -> None:
    with pytest.raises(
        HyperError, match="SAMSGD evaluates the model again in a step, which offload='step' does not move"
    ):
        rulec.torch.optimizer("sam(sgd)")(parameters(), lr=0.1, offload="step")
    with pytest.raises(HyperError, match="takes the input 'hessian' for each parameter"):
        rulec.torch.optimizer("sophia")(parameters(), lr=0.1, offload="step")


def test_sparse_gradients_are_refused_and_nothing_is_written() -> None:
    layer = nn.Embedding(9, 4, sparse=True)
    before = layer.weight.detach().clone()
    optimizer = rulec.torch.SGD(layer.parameters(), lr=0.1, offload="step")
    layer(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(TensorError, match="sparse"):
        optimizer.step()
    assert torch.equal(layer.weight, before)


def test_a_wrong_gradient_changes_nothing() -> None:
    twins = Twins(rulec.torch.AdamW, BRAIN)
    twins.step()
    before = copy.deepcopy((twins.moved, twins.other.state_dict()["state"]))
    for param in twins.moved:
        param.grad = torch.ones_like(param)
    twins.moved[-2].grad = torch.ones(1, 1, dtype=BRAIN).expand(1, 1).reshape(1).requires_grad_(False)
    twins.moved[0].grad = None
    twins.moved[0].grad = torch.ones_like(twins.moved[0])
    grad = twins.moved[0].grad
    assert grad is not None
    grad.untyped_storage().resize_(0)
    with pytest.raises(TensorError, match="memory"):
        twins.other.step()
    assert_same_bits((twins.moved, twins.other.state_dict()["state"]), before)


class CountingLink(HostLink):
    """A link that counts the bytes of its copies."""

    moved: ClassVar[dict[str, int]] = {"down": 0, "up": 0}

    def down(self, pairs: Pairs) -> Event:
        self.moved["down"] += sum(bytes_of(tensor) for _, tensor in pairs)
        return super().down(pairs)

    def up(self, pairs: Pairs, after: Event | None = None) -> Event:
        self.moved["up"] += sum(bytes_of(tensor) for _, tensor in pairs)
        return super().up(pairs, after)


#: Class, kind of weights -> the bytes of each weight that travel down and up in a step.
TRAVEL = [
    ("AdamW", "master", 2, 2),
    ("Lion", "master", 2, 2),
    ("Adafactor", "master", 2, 2),
    ("LAMB", "master", 2, 2),
    ("AdamW", "split", 4, 2),
    ("AdamW", "", 4, 2),
]


@pytest.mark.parametrize(("rule", "weights", "down", "up"), TRAVEL)
def test_bytes_over_the_link(monkeypatch: pytest.MonkeyPatch, rule: str, weights: str, down: int, up: int) -> None:
    monkeypatch.setattr("rulec.torch.offload.host_step.link_of", CountingLink)
    params = parameters(BRAIN)
    optimizer = getattr(rulec.torch, rule)(params, weights=weights, offload="step", offload_buffer=BUFFER)
    take_steps(optimizer, params, 1)
    count = sum(param.numel() for param in params)
    CountingLink.moved.update(down=0, up=0)
    take_steps(optimizer, params, 2, 1)
    assert CountingLink.moved == {"down": 2 * down * count, "up": 2 * up * count}


def test_a_norm_of_the_model_needs_its_gradients_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rulec.torch.offload.host_step.link_of", CountingLink)
    params = parameters(BRAIN)
    optimizer = clipped()(params, max_norm=0.5, offload="step", offload_buffer=BUFFER)
    take_steps(optimizer, params, 1)
    CountingLink.moved.update(down=0, up=0)
    take_steps(optimizer, params, 1, 1)
    count = sum(param.numel() for param in params)
    assert CountingLink.moved == {"down": 4 * count, "up": 2 * count}


@pytest.mark.parametrize("rule", ["AdamW", "LAMB"])
@pytest.mark.parametrize("taking", [{0, 2}, {0, 3}, {1, 3, 5}, {0, 1, 4, 5}])
def test_groups_without_gradients_between_others(rule: str, taking: set[int]) -> None:
    """Groups that follow each other in a step may have one buffer: neither comes while the other is computed."""
    made: Any = getattr(rulec.torch, rule)
    shapes = [(30, 30)] * 6
    plain, moved = parameters(shapes=shapes), parameters(shapes=shapes)
    one, other = made(plain), made(moved, offload="step", offload_buffer=4096)
    for optimizer, params in ((one, plain), (other, moved)):
        for number in range(2):
            generator = torch.Generator().manual_seed(number)
            for place, param in enumerate(params):
                gradient = torch.randn(30, 30, generator=generator)
                param.grad = gradient if place in taking else None
            optimizer.step()
    assert_same_bits(moved, plain)


def test_a_gradient_larger_than_a_buffer_is_free_after_the_step() -> None:
    param = nn.Parameter(torch.ones(300, 200))
    optimizer: Any = rulec.torch.AdamW([param], offload="step", offload_buffer=4096)
    for _ in range(2):
        param.grad = torch.ones(300, 200)
        gradient = weakref.ref(param.grad.untyped_storage())
        optimizer.step()
        param.grad = None
        assert gradient() is None
