"""Statistics of torch optimizers: the values, the same bits of parameters and states with them, and their schedule."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import rulec.torch
from rulec import RuleError
from rulec.errors import HyperError, RulecError
from rulec.torch.step import statistics
from rulec.torch.tensors.library import numbers_on_host
from tests.calls import profiled
from tests.weights import KINDS, RATES, check_unchanged, first_weights, gradient, options, weights

CLASSES = ["AdamW", "SGD", "LAMB", "Adafactor", "Muon", "ScheduleFreeAdamW", "Prodigy", "NAdam"]


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def trained(kind: str, steps: int = 3, **keywords: Any) -> tuple[nn.Module, Any, list[list[torch.Tensor]]]:
    """A model after some steps, its optimizer, and the parameters and gradients before the last step."""
    model = layers()
    params = [*model.named_parameters()]
    if kind == "Muon":
        params = [(name, p) for name, p in params if p.ndim == 2]
    optimizer = getattr(rulec.torch, kind)(params, **({"lr": 0.01} if kind == "SGD" else {}), **keywords)
    before: list[list[torch.Tensor]] = []
    for t in range(steps):
        torch.manual_seed(t)
        optimizer.zero_grad()
        model(torch.randn(8, 5)).square().mean().backward()
        before = [[p.detach().double().clone(), p.grad.double()] for _, p in params]  # type: ignore[union-attr]
        optimizer.step()
    return model, optimizer, before


def calls_of(function: Callable[[], Any]) -> int:
    """The calls of functions, Python's and C's, in a call."""
    count = 0

    def note(_: Any, event: str, __: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    profiled(function, note)
    return count


def states_of(optimizer: Any) -> list[torch.Tensor]:
    states = optimizer.state_dict()["state"]
    return [value for each in states.values() for value in each.values() if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize("kind", CLASSES)
def test_norms_are_those_that_torch_computes_after_the_step(kind: str) -> None:
    _, optimizer, before = trained(kind, watch="norms")
    statistics = optimizer.statistics()
    params = [p for group in optimizer.param_groups for p in group["params"]]
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    assert statistics.step == 3
    for name, param, (old, grad) in zip(names, params, before, strict=True):
        update = param.detach().double() - old
        wanted = {
            "grad_norm": grad.norm(), "param_norm": old.norm(), "update_norm": update.norm(),
            "update_ratio": update.norm() / old.norm(), "grad_ratio": grad.norm() / old.norm(),
            "cosine": (update * grad).sum() / update.norm() / grad.norm(),
            "unchanged": (param.detach().double() == old).sum().double(), "nonfinite": torch.tensor(0.0).double(),
        }  # fmt: skip
        assert [*statistics] == [
            "grad_norm", "update_norm", "param_norm", "update_ratio", "grad_ratio", "cosine", "nonfinite", "unchanged",
        ]  # fmt: skip
        for key, value in wanted.items():
            torch.testing.assert_close(statistics[key][name], value, rtol=3e-4, atol=1e-9)


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("every", [1, 2])
def test_parameters_and_states_have_the_same_bits_with_statistics(kind: str, every: int) -> None:
    model, optimizer, _ = trained(kind, steps=4, watch="norms", watch_every=every)
    plain, other, _ = trained(kind, steps=4)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    assert all(torch.equal(s, t) for s, t in zip(states_of(optimizer), states_of(other), strict=True))
    assert optimizer.state_dict()["param_groups"] == other.state_dict()["param_groups"]


def test_means_are_over_the_elements_of_each_tensor() -> None:
    watch = {
        "mean": "mean(abs(g))", "rms": "rms(update)/cols", "rows": 'mean(g*g, per="row")', "elements": "numel*lr",
        "spread": "rms(update - mean(update))", "above": "mean(where(abs(g) > 1/numel, 1, 0))",
        "all": 'mean(abs(update), per="model")',
    }  # fmt: skip
    model, optimizer, before = trained("AdamW", watch=watch)
    statistics, updates = optimizer.statistics(), []
    for (name, param), (old, grad) in zip(model.named_parameters(), before, strict=True):
        updates.append(param.detach().double() - old)
        count, cols = param.numel(), param.shape[-1]
        wanted = {
            "mean": grad.abs().mean(), "rms": updates[-1].square().mean().sqrt() / cols,
            "rows": grad.reshape(-1, cols, 1).square().mean(1),
            "elements": torch.tensor(count * 1e-3).double(), "spread": updates[-1].std(correction=0),
            "above": (grad.abs() > 1 / count).double().mean(),
        }  # fmt: skip
        for key, value in wanted.items():
            torch.testing.assert_close(statistics[key][name], value, rtol=3e-4, atol=1e-9)
    total = torch.cat([update.flatten() for update in updates]).abs().mean()
    torch.testing.assert_close(statistics["all"]["model"], total, rtol=3e-4, atol=1e-9)


def test_a_schedule_measures_the_first_of_so_many_steps() -> None:
    model = layers()
    optimizer = rulec.torch.AdamW(model.parameters(), watch="norms", watch_every=3)
    assert optimizer.statistics().step == 0
    assert optimizer.statistics().numbers() == {}
    seen = []
    for _ in range(7):
        model(torch.randn(8, 5)).square().mean().backward()
        optimizer.step()
        seen.append(optimizer.statistics().step)
    assert seen == [1, 1, 1, 4, 4, 4, 7]


def test_a_number_of_hyper_parameters_and_the_count_is_measured_alone() -> None:
    _, optimizer, _ = trained("AdamW", watch={"correction": "1 - beta1**t"})
    wanted = pytest.approx(1 - 0.9**3, rel=1e-6)
    assert [*optimizer.statistics().numbers().values()] == [wanted] * 4


def test_numbers_have_flat_names_in_the_order_of_the_parameters() -> None:
    _, optimizer, _ = trained("AdamW", watch={"tot": 'norm(update, per="model")', "top": "max(v)", "rate": "2*lr"})
    numbers = optimizer.statistics().numbers()
    names = ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert [*numbers] == ["tot", *(f"top/{name}" for name in names), "rate/group 0"]
    assert all(type(value) is float for value in numbers.values())
    assert numbers["rate/group 0"] == 0.002
    lines = optimizer.statistics().table().splitlines()
    assert lines[0].split() == ["tot", "top", "rate"]
    assert lines[1].split()[0] == "0.weight"


@pytest.mark.parametrize("kind", ["AdamW", "Adafactor"])
def test_numbers_of_all_dtypes_and_rules_come_in_one_transfer(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes, dtypes = [(6, 4), (3, 5), (7,)], [torch.float32, torch.bfloat16, torch.float64]
    params = [torch.ones(shape, dtype=dtype, requires_grad=True) for dtype in dtypes for shape in shapes]
    optimizer = getattr(rulec.torch, kind)(
        params, watch={"size": "numel*norm(g)/norm(g)", "all": 'sum(g, per="model")'}
    )
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    copied: list[int] = []

    def counted(values: Any) -> Any:
        copied.append(len(values))
        return numbers_on_host(values)

    monkeypatch.setattr(statistics, "numbers_on_host", counted)
    numbers = optimizer.statistics().numbers()
    assert [value for name, value in numbers.items() if name != "all"] == pytest.approx(
        [float(p.numel()) for p in params]
    )
    assert numbers["all"] == sum(p.numel() for p in params)
    assert len(copied) == 1


def test_a_statistic_for_each_row_has_the_shape_of_such_a_state() -> None:
    model, optimizer, before = trained("AdamW", watch={"rows": 'max(abs(update), per="row")'})
    rows = optimizer.statistics()["rows"]
    assert rows["0.weight"].shape == (7, 1)
    update = (model[0].weight.detach().double() - before[0][0]).abs().amax(1, keepdim=True)  # type: ignore[index,union-attr]
    torch.testing.assert_close(rows["0.weight"], update, rtol=1e-3, atol=1e-8)
    assert optimizer.statistics().numbers() == {}


def test_only_parameters_with_a_gradient_have_statistics() -> None:
    model = layers()
    optimizer = rulec.torch.AdamW(model.named_parameters(), watch="norms")
    model[0](torch.randn(8, 5)).square().mean().backward()  # type: ignore[operator]
    optimizer.step()
    assert [*optimizer.statistics()["grad_norm"]] == ["0.weight", "0.bias"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_unchanged_weights_are_those_that_their_memory_keeps(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    param = torch.randn(4000, dtype=dtype).requires_grad_()
    optimizer = rulec.torch.AdamW([param], lr=1e-3, weight_decay=0, watch="norms")
    old, param.grad = param.detach().clone(), torch.randn(4000, dtype=dtype)
    optimizer.step()
    (unchanged,) = optimizer.statistics()["unchanged"].values()
    assert unchanged == (param.detach() == old).sum()
    assert (unchanged > 100) == (dtype is torch.bfloat16)


@pytest.mark.parametrize("rule", RATES)
@pytest.mark.parametrize("kind", KINDS)
def test_unchanged_weights_are_those_of_the_memory_beside_them_too(kind: str, rule: str) -> None:
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    param = torch.tensor(first_weights()).to(dtype).requires_grad_()
    words: dict[str, Any] = {"lr": RATES[rule], "weight_decay": 0, "watch": "norms", **options(kind)}
    optimizer = rulec.torch.optimizer(rule)([param], **words)
    measured, seen = [], [weights("", param.detach().float(), None)]
    for step in range(3):
        param.grad = torch.tensor(gradient(step)).to(dtype)
        optimizer.step()
        (number,) = optimizer.statistics()["unchanged"].values()
        (part,) = [x.float() for name, x in optimizer.state[param].items() if name.startswith("param::")] or [None]
        measured.append(number)
        seen.append(weights(kind, param.detach().float(), part))
    check_unchanged(measured, seen)


def test_copies_and_pickles_go_on_measuring() -> None:
    _, optimizer, _ = trained("AdamW", watch="norms")
    for other in (pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)):  # noqa: S301
        for group in other.param_groups:
            for param in group["params"]:
                param.grad = torch.ones_like(param)
        other.step()
        assert other.statistics()["grad_norm"]["0.bias"] == 7**0.5


@pytest.mark.parametrize(
    ("keywords", "kind", "message"),
    [
        ({"watch": "normz"}, RuleError, "AdamW has no statistic 'normz'; did you mean 'norms'?"),
        ({"watch": {"x": "m*g"}}, RuleError, "differs from element to element"),
        ({"watch": 3}, HyperError, "watch of AdamW is a name such as 'norms'"),
        ({"watch": "norms", "watch_every": 0}, HyperError, "watch_every of AdamW is a whole number of steps from 1"),
    ],
)
def test_a_mistake_is_named_when_the_optimizer_is_made(keywords: Any, kind: Any, message: str) -> None:
    with pytest.raises(kind, match=message.replace("(", r"\(").replace("?", r"\?")):
        rulec.torch.AdamW(layers().parameters(), **keywords)


def test_an_optimizer_that_measures_nothing_says_so() -> None:
    with pytest.raises(RulecError, match="AdamW measures no statistics: make it with watch='norms'"):
        rulec.torch.AdamW(layers().parameters()).statistics()


def eager(rule: str, **keywords: Any) -> Any:
    """An eager optimizer after three steps of the model."""
    model = layers()
    optimizer = rulec.torch.EagerUpdate(model, rule, **keywords)
    for t in range(3):
        torch.manual_seed(t)
        with optimizer.backward():
            model(torch.randn(8, 5)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


@pytest.mark.parametrize(
    "keywords", [{}, {"contributions": 1}, {"contributions": 1, "epilogue": True}, {"only": "0.*", "contributions": 1}]
)
@pytest.mark.parametrize(("rule", "kind"), [("adamw", "AdamW"), ("lamb", "LAMB")])
def test_eager_updates_measure_as_a_step_does(rule: str, kind: str, keywords: Any) -> None:
    if rule == "lamb" and "epilogue" in keywords:
        return
    _, optimizer, _ = trained(kind, watch="norms")
    assert eager(rule, watch="norms", **keywords).statistics().numbers() == optimizer.statistics().numbers()


def test_a_partition_measures_with_all_its_rules() -> None:
    model = layers()
    partition = rulec.partition({"*/weight": "lamb", "...": "adamw"})
    optimizer = rulec.torch.Partitioned(partition, model.named_parameters(), watch={"norm": "norm(update)", "e": "eps"})
    model(torch.randn(8, 5)).square().mean().backward()
    optimizer.step()
    statistics = optimizer.statistics()
    assert sorted(statistics["norm"]) == sorted(name for name, _ in model.named_parameters())
    assert [*statistics] == ["norm", "e"]
    with pytest.raises(RuleError, match="has no statistic 'normz'"):
        rulec.torch.Partitioned(partition, model.named_parameters(), watch="normz")
    plain = rulec.torch.Partitioned(partition, model.named_parameters())
    with pytest.raises(RulecError, match="Partitioned measures no statistics"):
        plain.statistics()


@pytest.mark.parametrize("weights", ["split", "split24", "master", "kahan", "stochastic"])
def test_weights_of_16_bits_are_measured_as_what_they_train(weights: str) -> None:
    torch.manual_seed(0)
    param = torch.randn(4000, dtype=torch.bfloat16).requires_grad_()
    optimizer = rulec.torch.AdamW([param], lr=1e-3, weight_decay=0, weights=weights, watch="norms")
    for _ in range(3):
        param.grad = torch.randn_like(param)
        optimizer.step()
    numbers = {name.partition("/")[0]: value for name, value in optimizer.statistics().numbers().items()}
    assert 0.01 < numbers["update_norm"] < 0.1


def test_states_in_codes_and_complex_parameters_are_measured() -> None:
    torch.manual_seed(0)
    param = torch.randn(8192).requires_grad_()
    complex_one = torch.randn(50, dtype=torch.complex64).requires_grad_()
    for each, keywords in ((param, {"state_dtype": "int8"}), (complex_one, {})):
        each.grad = torch.randn_like(each)
        old = each.detach().clone()
        optimizer = rulec.torch.AdamW([each], watch="norms", **keywords)
        optimizer.step()
        statistics = optimizer.statistics()
        (update,), (grad,) = statistics["update_norm"].values(), statistics["grad_norm"].values()
        torch.testing.assert_close(update.float(), (each.detach() - old).norm(), rtol=1e-3, atol=0)
        torch.testing.assert_close(grad.float(), each.grad.norm(), rtol=1e-5, atol=0)


#: Statistics that nobody reads, with the schedules of them.
UNREAD: Sequence[dict[str, Any]] = (
    {"watch": "norms"}, {"watch": {"agree": "mean(where(update*g > 0, 1, 0))", "size": "rms(update)/numel"}},
    {"watch": "norms", "watch_every": 1000},
)  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "shapes"),
    [
        ("AdamW", [(50,)] * 60), ("LAMB", [(8, 6), (6,)] * 20), ("LARS", [(8, 6), (6,)] * 20), ("Prodigy", [(50,)] * 9),
        ("Muon", [(8, 6)] * 9), ("Adafactor", [(8, 6)] * 9), ("ScheduleFreeAdamW", [(50,)] * 9),
    ],
)  # fmt: skip
def test_steps_whose_statistics_nobody_reads_take_few_calls_more(kind: str, shapes: list[tuple[int, ...]]) -> None:
    counts = []
    for keywords in ({}, *UNREAD):
        params = [torch.randn(shape).requires_grad_() for shape in shapes]
        for param in params:
            param.grad = torch.randn_like(param)
        optimizer = getattr(rulec.torch, kind)(params, **keywords)
        for _ in range(6):
            optimizer.step()
        counts.append(calls_of(optimizer.step))
    assert max(counts[1:]) <= counts[0] + 5, counts


def test_a_step_keeps_no_gradient_for_its_statistics() -> None:
    _, optimizer, _ = trained("LAMB", watch="norms")
    gradients = [weakref.ref(p.grad) for group in optimizer.param_groups for p in group["params"]]
    optimizer.zero_grad()
    gc.collect()
    assert [reference() for reference in gradients] == [None] * 4
    assert len(optimizer.statistics().numbers()) == 32


def test_eager_updates_refuse_statistics_of_the_model() -> None:
    with pytest.raises(RulecError, match="the statistic all is of a group or of the model, and a backward pass that"):
        eager("adamw", watch={"all": 'norm(update, per="model")'})


def test_a_tensor_that_skips_a_step_has_nan() -> None:
    kind = rulec.torch.optimizer(rulec.load("transforms/skip_not_finite") >> rulec.load("adamw"))
    params = [torch.ones(3).requires_grad_(), torch.ones(2).requires_grad_()]
    optimizer = kind(params, watch={"top": "max(abs(g))"})
    for number in (1.0, float("nan")):
        for param in params:
            param.grad = torch.full_like(param, number)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.step()
        values = [*optimizer.statistics().numbers().values()]
        assert all(value == number or (value != value and number != number) for value in values)


@pytest.mark.parametrize("steps", [1, 5])
def test_a_step_without_gradients_has_no_values_and_a_failed_one_leaves_the_last(steps: int) -> None:
    """The first steps are asked for everything; after some, one call looks at all."""
    _, optimizer, _ = trained("AdamW", steps, watch="norms")
    before = optimizer.statistics().numbers()
    rate, optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"], -1.0
    with pytest.raises(HyperError):
        optimizer.step()
    assert (optimizer.statistics().step, optimizer.statistics().numbers()) == (steps, before)
    optimizer.param_groups[0]["lr"] = rate
    optimizer.zero_grad()
    optimizer.step()
    assert (optimizer.statistics().step, optimizer.statistics().numbers()) == (steps + 1, {})


@pytest.mark.parametrize("every", [1, 2, 3])
def test_histories_have_the_same_bits_between_steps_that_measure(every: int) -> None:
    models = []
    for keywords in ({}, {"watch": "norms", "watch_every": every}):
        model = layers()
        optimizer = rulec.torch.optimizer("adashift")(model.parameters(), **keywords)  # type: ignore[arg-type]
        for t in range(25):
            torch.manual_seed(t)
            optimizer.zero_grad()
            model(torch.randn(8, 5)).square().mean().backward()
            optimizer.step()
        models.append(model)
        assert not torch.equal(model[0].weight, layers()[0].weight)  # type: ignore[index]
    assert all(torch.equal(p, q) for p, q in zip(*(each.parameters() for each in models), strict=True))


def test_parameters_with_sparse_gradients_have_no_values() -> None:
    rows, dense = torch.ones(5, 2).requires_grad_(), torch.ones(2).requires_grad_()
    optimizer = rulec.torch.SGD([rows, dense], lr=0.1, watch={"norm": "norm(update)"})
    rows.grad = torch.sparse_coo_tensor([[1]], torch.ones(1, 2), (5, 2))
    dense.grad = torch.ones(2)
    optimizer.step()
    assert [*optimizer.statistics()["norm"]] == ["parameter 1"]


def test_gradients_folded_into_states_are_not_measured() -> None:
    with pytest.raises(HyperError, match="accumulate='fold' takes a step in parts"):
        rulec.torch.EagerUpdate(layers(), "signum", watch="norms", accumulate="fold")


@pytest.mark.parametrize("every", [1, 2])
def test_branches_known_before_a_step_are_measured_on_each_arm(every: int) -> None:
    rule = rulec.parse(
        "name: Warm\nhyper: {lr: 0.1}\nstate: {m: 0}\nstep: |\n  if t < 3:\n    m = g\n  else:\n    m = 0.5*m + g\n"
        "  direction = m\n"
    )
    param = torch.ones(4).requires_grad_()
    optimizer = rulec.torch.optimizer(rule)([param], watch={"norm": "norm(update)"}, watch_every=every)
    for step in range(1, 6):
        param.grad, old = torch.full((4,), float(step)), param.detach().clone()
        optimizer.step()
        if optimizer.statistics().step == step:
            (norm,) = optimizer.statistics()["norm"].values()
            torch.testing.assert_close(norm.float(), (param.detach() - old).norm(), rtol=1e-5, atol=0)
