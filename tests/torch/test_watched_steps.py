"""Statistics beside what else an optimizer does: norms of float64 from the parameters before and after each step."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import rulec
import rulec.torch
from rulec.backend import registry
from rulec.errors import RulecError
from rulec.es import Perturbation
from rulec.torch.groups.capture import CaptureMode
from tests.runtime.elsewhere import Elsewhere
from tests.runtime.graph import Graph
from tests.torch.eager.processes import check_in_processes
from tests.torch.test_statistics import calls_of

WATCH = {"length": "norm(update)", "gradient": "norm(grad)", "mean": "mean(abs(g))", "ratio": "norm(update)/norm(p)"}


@pytest.fixture(autouse=True)
def elsewhere() -> Iterator[None]:
    """The backend `elsewhere`."""
    plain = registry.get
    with mock.patch.object(registry, "get", lambda name: Elsewhere() if name == "elsewhere" else plain(name)):
        yield


def layers() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 4))


class Before:
    """The parameters and gradients before a step; these are divided by `scale`."""

    def __init__(self, model: nn.Module, scale: float = 1.0) -> None:
        self.model = model
        self.params = {name: param.detach().double().clone() for name, param in model.named_parameters()}
        self.grads = {n: p.grad.double() / scale for n, p in model.named_parameters() if p.grad is not None}

    def updates(self) -> dict[str, Tensor]:
        """The change of each parameter since."""
        return {name: param.detach().double() - self.params[name] for name, param in self.model.named_parameters()}

    def numbers(self) -> dict[str, float]:
        """The numbers of `WATCH` after the step."""
        wanted: dict[str, Tensor] = {}
        for name, grad in self.grads.items():
            old, update = self.params[name], self.updates()[name]
            wanted |= {f"length/{name}": update.norm(), f"gradient/{name}": grad.norm()}
            wanted |= {f"mean/{name}": grad.abs().mean(), f"ratio/{name}": update.norm() / old.norm()}
        return {name: float(number) for name, number in wanted.items()}

    def check(self, optimizer: Any) -> None:
        """The optimizer has these numbers, and no others."""
        assert near(optimizer.statistics().numbers(), self.numbers())


def near(numbers: dict[str, float], wanted: dict[str, float]) -> bool:
    assert numbers.keys() == wanted.keys()
    return numbers == pytest.approx(wanted, rel=5e-4, abs=1e-9)


def backward(model: nn.Module, seed: int, factor: float = 1.0) -> None:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed)).to(next(model.parameters()).dtype)
    (model(x).square().mean() * factor).backward()


def new_group(model: Any, optimizer: Any, t: int) -> None:
    if t == 2:
        model.append(nn.Linear(4, 2))
        optimizer.add_param_group({"params": [(f"3.{n}", p) for n, p in model[3].named_parameters()], "lr": 0.1})


def loaded_state(model: Any, optimizer: Any, t: int) -> None:
    if t == 2:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def moved_memory(model: Any, optimizer: Any, t: int) -> None:
    for param in model.parameters() if t % 2 else ():
        param.data = param.data.clone()


def other_dtype(model: Any, optimizer: Any, t: int) -> None:
    if t in (2, 4):
        model.to(torch.float64 if t == 2 else torch.float32)


def fewer_gradients(model: Any, optimizer: Any, t: int) -> None:
    for param in {1: [model[0].weight], 3: [model[0].weight, model[2].bias], 6: [model[0].bias]}.get(t, ()):
        param.requires_grad_(not param.requires_grad)


def scheduled_rate(model: Any, optimizer: Any, t: int) -> None:
    optimizer.param_groups[0]["lr"] = 0.01 / (1 + t)


def nothing(model: Any, optimizer: Any, t: int) -> None:
    pass


CHANGES = [nothing, new_group, loaded_state, moved_memory, other_dtype, fewer_gradients, scheduled_rate]


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("kind", ["AdamW", "LAMB"])
def test_what_changes_between_steps_loses_no_statistics(kind: str, change: Callable[..., None], every: int) -> None:
    model = layers()
    optimizer = getattr(rulec.torch, kind)(model.named_parameters(), watch=WATCH, watch_every=every)
    numbers: dict[str, float] = {}
    for t in range(8):
        change(model, optimizer, t)
        assert optimizer.statistics().numbers() == numbers
        optimizer.zero_grad()
        backward(model, t)
        before = Before(model)
        optimizer.step()
        if t % every == 0:
            before.check(optimizer)
            numbers = optimizer.statistics().numbers()
        assert optimizer.statistics().step == 1 + t - t % every
        assert optimizer.statistics().numbers() == numbers


@pytest.mark.parametrize("foreach", [False, True])
def test_clipped_gradients_are_those_that_the_step_gets(foreach: bool) -> None:
    model = layers()
    optimizer = rulec.torch.AdamW(model.named_parameters(), foreach=foreach, watch=WATCH)
    for t in range(4):
        optimizer.zero_grad()
        backward(model, t)
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3, foreach=foreach)
        before = Before(model)
        optimizer.step()
        before.check(optimizer)
        lengths = [optimizer.statistics()["gradient"][name] for name in before.params]
        assert float(torch.stack(lengths).norm()) == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("every", [1, 2])
def test_copies_have_no_statistics_before_they_step(every: int) -> None:
    model = layers()
    optimizer = rulec.torch.AdamW(model.named_parameters(), watch=WATCH, watch_every=every)
    for t in range(2):
        optimizer.zero_grad()
        backward(model, t)
        optimizer.step()
    numbers, step = optimizer.statistics().numbers(), optimizer.statistics().step
    for other, twin in (copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))):  # noqa: S301
        assert (twin.statistics().step, twin.statistics().numbers()) == (0, {})
        twin.zero_grad()
        backward(other, 5)
        before = Before(other)
        twin.step()
        assert twin.statistics().step == 3
        before.check(twin)
    assert (optimizer.statistics().step, optimizer.statistics().numbers()) == (step, numbers)


@pytest.mark.parametrize("every", [1, 2])
def test_a_rule_with_passes_measures_the_step_by_the_gradients_of_its_last_point(every: int) -> None:
    model, grads = layers(), list[dict[str, Tensor]]()
    kind = rulec.torch.optimizer("sam(sgd)")
    optimizer = kind(model.named_parameters(), lr=0.1, rho=0.3, watch=WATCH, watch_every=every)
    for t in range(4):

        def closure(t: int = t) -> None:
            optimizer.zero_grad()
            backward(model, t)
            grads.append(Before(model).grads)

        before = Before(model)
        optimizer.step(closure)  # type: ignore[arg-type]
        before.grads = grads[-1]
        if t % every == 0:
            before.check(optimizer)
        assert optimizer.statistics().step == 1 + t - t % every
        assert not torch.allclose(grads[-1]["0.weight"], grads[-2]["0.weight"])


def test_a_step_that_the_scaler_leaves_out_on_the_host_is_none() -> None:
    model, taken = layers(), 0
    optimizer = rulec.torch.AdamW(model.named_parameters(), watch=WATCH)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for t in range(6):
        optimizer.zero_grad()
        backward(model, t, scaler.get_scale() * (math.inf if t == 3 else 1))
        scaler.scale(torch.ones(()))
        before, numbers = Before(model, scaler.get_scale()), optimizer.statistics().numbers()
        scaler.step(optimizer)
        scaler.update()
        taken += t != 3
        assert optimizer.statistics().step == taken
        if t == 3:
            assert optimizer.statistics().numbers() == numbers
        else:
            before.check(optimizer)


ROWS = {**WATCH, "rows": 'max(abs(update), per="row")', "all": 'norm(update, per="model")', "rate": "1*lr"}


def check_there(optimizer: Any, before: Before, rate: float, left_out: bool) -> None:
    """The numbers and vectors of `ROWS`, all of them NaN where the device left the step out."""
    statistics, updates = optimizer.statistics(), before.updates()
    total = torch.cat([update.flatten() for update in updates.values()]).norm()
    wanted = {**before.numbers(), "all": float(total), "rate/group 0": rate}
    if left_out:
        assert float(total) == 0
        assert statistics.numbers().keys() == wanted.keys()
        assert all(math.isnan(number) for number in statistics.numbers().values())
        assert all(rows.isnan().all() for rows in statistics["rows"].values())
        return
    assert near(statistics.numbers(), wanted)
    for name, rows in statistics["rows"].items():
        cols = updates[name].shape[-1]
        torch.testing.assert_close(rows.flatten(), updates[name].reshape(-1, cols).abs().amax(1), rtol=1e-3, atol=1e-9)


@pytest.mark.parametrize("kind", ["AdamW", "LAMB"])
def test_a_step_that_the_device_leaves_out_is_marked(kind: str) -> None:
    model = layers()
    optimizer = getattr(rulec.torch, kind)(
        model.named_parameters(), lr=0.01, watch=ROWS, backend="elsewhere", capturable=True
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for t in range(6):
        optimizer.zero_grad()
        backward(model, t, scaler.get_scale())
        if t == 3:
            model[0].bias.grad[0] = math.inf
        scaler.scale(torch.ones(()))
        before = Before(model, scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
        assert optimizer.statistics().step == 1 + t
        check_there(optimizer, before, 0.01, left_out=t == 3)


def capturing() -> Any:
    return mock.patch.object(CaptureMode, "capturing", new_callable=mock.PropertyMock, return_value=True)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("kind", ["AdamW", "LAMB", "NAdam"])
def test_statistics_of_a_captured_step_are_those_of_its_replays(kind: str, scaled: bool) -> None:
    model, rate, scale = layers(), torch.tensor(0.01, dtype=torch.float64), 4.0 if scaled else 1.0
    optimizer = getattr(rulec.torch, kind)(
        model.named_parameters(), lr=rate, watch=ROWS, backend="elsewhere", capturable=True
    )
    for param in model.parameters():
        param.grad = torch.empty_like(param)

    def give(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for param in model.parameters():
            param.grad.copy_(torch.randn(param.shape, generator=generator) * scale)

    if scaled:
        optimizer.found_inf, optimizer.grad_scale = torch.tensor(0.0), torch.tensor(scale)
    for t in range(2):
        give(t)
        optimizer.step()
    graph = Graph()
    give(2)
    with capturing(), graph.recording():
        optimizer.step()
    for t in range(3, 7):
        give(t)
        rate.fill_(0.01 / t)
        left_out = scaled and t == 5
        if scaled:
            optimizer.found_inf.fill_(float(left_out))
        before = Before(model, scale)
        graph.replay()
        check_there(optimizer, before, 0.01 / t, left_out)


def test_a_step_that_measures_in_turns_is_not_captured() -> None:
    model = layers()
    optimizer = rulec.torch.AdamW(
        model.named_parameters(), watch=WATCH, watch_every=2, backend="elsewhere", capturable=True
    )
    backward(model, 0)
    optimizer.step()
    before = Before(model)
    with capturing(), pytest.raises(RulecError, match=r"watch_every=2 cannot be captured .*: give watch_every=1"):
        optimizer.step()
    assert all(not update.any() for update in before.updates().values())


FAMILIES = ["independent", "lowrank", "spsa"]


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("form", ["update", "step", "step with a hook"])
@pytest.mark.parametrize("family", ["signflip", *(pytest.param(n, marks=pytest.mark.another) for n in FAMILIES)])
def test_steps_of_evolution_strategies_measure_their_estimates(family: str, form: str, every: int) -> None:
    """A plain twin has the gradients."""
    models = layers(), layers()
    strategies = [rulec.torch.perturb(m, Perturbation(family, directions=4, sigma=0.1, seed=0)) for m in models]
    optimizer = rulec.torch.AdamW(models[0].named_parameters(), watch=WATCH, watch_every=every)
    other = rulec.torch.AdamW(models[1].named_parameters())
    if form == "step with a hook":
        optimizer.register_step_post_hook(lambda *_: None)
    fused = []
    for t in range(5):
        fitness = [fitness_of(family, es, model, t) for es, model in zip(strategies, models, strict=True)]
        strategies[1].update(fitness[1])
        before = Before(models[0])
        before.grads = Before(models[1]).grads
        other.step()
        if form == "update":
            strategies[0].update(fitness[0])
            optimizer.step()
        else:
            fused.append(bool(strategies[0].step(fitness[0], optimizer).fused))
        if t % every == 0:
            before.check(optimizer)
        assert optimizer.statistics().step == 1 + t - t % every
        assert all(torch.equal(p, q) for p, q in zip(*(model.parameters() for model in models), strict=True))
    assert fused == ([] if form == "update" else [t % every > 0 for t in range(5)])


def fitness_of(family: str, es: Any, model: nn.Module, seed: int) -> Any:
    x = torch.randn(2, 6, generator=torch.Generator().manual_seed(seed))
    if family == "spsa":
        return es.evaluate(lambda: float(model(x).square().sum()))
    return es(es.member_batch(x)).square().sum(1).detach()


@pytest.mark.parametrize("keywords", [{}, {"contributions": 1}, {"contributions": 2}, {"epilogue": True}])
@pytest.mark.parametrize("every", [1, 2])
def test_eager_updates_measure_the_sum_of_the_gradients_of_parts(every: int, keywords: Any) -> None:
    model, twin = layers(), layers()
    optimizer = rulec.torch.EagerUpdate(model, "adamw", watch=WATCH, watch_every=every, **keywords)
    for t in range(4):
        twin.load_state_dict(model.state_dict())
        twin.zero_grad()
        before = Before(model)
        for part in range(2):
            backward(twin, 2 * t + part)
            with optimizer.backward(last_microbatch=part == 1):
                backward(model, 2 * t + part)
        before.grads = Before(twin).grads
        optimizer.step()
        optimizer.zero_grad()
        if t % every == 0:
            before.check(optimizer)
        assert optimizer.statistics().step == 1 + t - t % every


@pytest.mark.parametrize("every", [1, 2])
def test_partitions_measure_all_rules_in_the_same_steps(every: int) -> None:
    """Also a rule whose first parameters come later, and in a step in which a rule has no gradient."""
    model = layers()
    partition = rulec.partition({"*/weight": "lamb", "late/*": "lion", "...": "adamw"}, allow_unused=True)
    optimizer = rulec.torch.Partitioned(partition, model.named_parameters(), watch=WATCH, watch_every=every)
    for t in range(6):
        if t == 3:
            model.add_module("late", nn.Linear(4, 2, bias=False))
            optimizer.add_param_group({"params": [("late.bias", model.late.weight)]})
        optimizer.zero_grad()
        backward(model, t)
        if t == 2:
            model[0].weight.grad = model[2].weight.grad = None
        before = Before(model)
        optimizer.step()
        if t % every == 0:
            statistics = optimizer.statistics().renamed({"late.bias": "late.weight"})
            assert near(statistics.numbers(), before.numbers())
        assert optimizer.statistics().step == 1 + t - t % every
    assert [each.interface.name for each in optimizer.optimizers] == ["LAMB", "AdamW", "Lion"]


@pytest.mark.slow
def test_a_compiled_step_of_training_measures() -> None:
    model = layers()
    optimizer = rulec.torch.AdamW(model.named_parameters(), watch=WATCH)
    torch.compiler.reset()

    @torch.compile(backend="eager")
    def train(x: Tensor) -> None:
        optimizer.zero_grad(set_to_none=False)
        model(x).square().mean().backward()
        optimizer.step()

    for t in range(4):
        before = Before(model)
        train(torch.randn(8, 6, generator=torch.Generator().manual_seed(t)))
        before.grads = Before(model).grads
        before.check(optimizer)
        assert optimizer.statistics().step == 1 + t


def _check_together(rank: int) -> None:
    """Each process has half of a model, which is clipped as a whole."""
    model = layers()
    kind, total = rulec.torch.optimizer("clip_by_global_norm >> adamw"), {"all": 'norm(update, per="model")'}
    mine = [*model.named_parameters()][2 * rank : 2 * rank + 2]
    optimizer = kind(mine, watch={**WATCH, **total}, reduce_over=dist.group.WORLD)
    backward(model, 0)
    before = Before(model)
    optimizer.step()
    squares = torch.stack([update.square().sum() for update in before.updates().values()]).sum()
    dist.all_reduce(squares)
    names = [name for name, _ in mine]
    clipped = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    factor = min(1.0, 1.0 / float(clipped))
    wanted = {k: v for k, v in before.numbers().items() if k.split("/")[1] in names}
    wanted |= {k: v * factor for k, v in wanted.items() if k.startswith("mean")}
    assert near(optimizer.statistics().numbers(), {**wanted, "all": float(squares.sqrt())})
    for watches in ((total, None), (total, WATCH), (total, {"all": 'norm(p, per="model")'})):
        keywords = {} if watches[rank] is None else {"watch": watches[rank]}
        other = kind(mine, reduce_over=dist.group.WORLD, **keywords)
        now = Before(model)
        with pytest.raises(RulecError, match="has other statistics of groups or of the model than process 0"):
            other.step()
        assert all(not update.any() for update in now.updates().values())


@pytest.mark.slow
def test_processes_measure_their_model_together_and_refuse_other_statistics() -> None:
    check_in_processes(_check_together, 2)


NUMBERS = {
    "rate": "lr", "decay": "lr*weight_decay", "size": "numel*lr", "t": "t", "part": "lr*norm(g)",
    "all": 'sum(lr*t, per="model")',
}  # fmt: skip


@pytest.mark.parametrize("every", [1, 3])
def test_numbers_of_hyper_parameters_are_those_of_the_last_measured_step(every: int) -> None:
    """More steps than rows of the scalar table are known ahead, with new rates, and a step of other tensors."""
    params = [torch.ones(3, 4).requires_grad_(), torch.ones(5).requires_grad_()]
    groups: list[dict[str, Any]] = [{"params": params[:1]}, {"params": params[1:], "lr": 0.5}]
    optimizer = rulec.torch.AdamW(groups, lr=0.25, watch=NUMBERS, watch_every=every)
    wanted: dict[str, float] = {}
    counts = [0, 0]
    for t in range(90):
        for i, param in enumerate(params):
            param.grad = None if (t, i) == (50, 1) else torch.full_like(param, t + 1.0)
            counts[i] += param.grad is not None
        if t % 20 in (6, 7):
            optimizer.param_groups[0]["lr"] = 0.25 / (t + 1)
        optimizer.step()
        if t % every == 0:
            rates = [group["lr"] for group in optimizer.param_groups]
            wanted = {}
            for i, (param, rate) in enumerate(zip(params, rates, strict=True)):
                if param.grad is None:
                    continue
                name, place = f"parameter {i}", f"group {i}"
                wanted |= {f"rate/{place}": rate, f"decay/{place}": rate * 0.01, f"size/{name}": param.numel() * rate}
                wanted |= {f"t/{name}": counts[i], f"part/{name}": rate * float(param.grad.norm())}
            there = [i for i, param in enumerate(params) if param.grad is not None]
            wanted["all"] = sum(rates[i] * counts[i] for i in there)
        if t % 7 == 0 or t > 80:
            assert optimizer.statistics().numbers() == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("text", [*NUMBERS.values(), "1 - beta1**t", "3"])
def test_numbers_of_hyper_parameters_leave_steps_to_be_repeated(text: str) -> None:
    def calls(watch: Any) -> int:
        params = [torch.ones(7).requires_grad_() for _ in range(9)]
        optimizer = rulec.torch.AdamW(params, watch=watch)
        for _ in range(6):
            for param in params:
                param.grad = torch.ones_like(param)
            counted = calls_of(optimizer.step)
        return counted

    assert calls({"x": text}) == calls({"x": "norm(update)"})


def test_an_interrupted_step_that_ends_has_its_own_numbers() -> None:
    param = torch.ones(7).requires_grad_()
    optimizer = rulec.torch.AdamW([param], watch={"t": "t"})
    for _ in range(40):
        param.grad = torch.ones_like(param)
        optimizer.step()
    repeat = optimizer._machine.repeat  # type: ignore[union-attr]
    assert repeat is not None
    runs, interrupted = repeat._runs, mock.Mock(side_effect=KeyboardInterrupt)
    repeat._runs = [interrupted]
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    interrupted.assert_called_once()
    assert optimizer.statistics().numbers() == {"t/parameter 0": 41}
    repeat._runs = runs
    optimizer.step()
    assert optimizer.statistics().numbers() == {"t/parameter 0": 42}


def test_a_step_that_is_refused_leaves_the_numbers_of_the_last_one() -> None:
    """Also where the numbers of the next steps were computed before it was refused."""
    param = torch.ones(7).requires_grad_()
    optimizer = rulec.torch.AdamW([param], lr=0.25, watch={"t": "t", "rate": "lr"})
    for _ in range(40):
        param.grad = torch.ones_like(param)
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.5
    param.grad = torch.ones(7).to_sparse()
    with pytest.raises(RulecError):
        optimizer.step()
    assert optimizer.statistics().numbers() == {"t/parameter 0": 40, "rate/group 0": 0.25}
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert optimizer.statistics().numbers() == {"t/parameter 0": 41, "rate/group 0": 0.5}
