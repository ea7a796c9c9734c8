"""`rulec.torch.save` and `load`: names, groups, counts, and what is refused, in one sentence and nothing changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import rulec
import rulec.torch
from rulec.checkpoint import meaning, read
from rulec.errors import RulecError, StateMismatch, TensorError


def model(transposed: bool = False) -> Any:
    """Two layers; `transposed` has a parameter whose axes are the other way round."""
    torch.manual_seed(0)
    made = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    if transposed:
        made[0].weight = torch.nn.Parameter(made[0].weight.detach().T.clone())
    return made


def train(net: Any, optimizer: torch.optim.Optimizer, steps: range, only: str = "") -> None:
    """Steps by gradients that follow from the step and the parameter's name alone."""
    for step in steps:
        for name, p in net.named_parameters():
            made = torch.Generator().manual_seed(hash_of(name, step))
            grad = torch.randn(p.numel(), generator=made)
            p.grad = grad.reshape(p.shape) if name.startswith(only) else None
        optimizer.step()


def hash_of(name: str, step: int) -> int:
    return sum(map(ord, name)) + 1000 * step


def trained(kind: Any = rulec.torch.AdamW, steps: int = 3, **keywords: Any) -> tuple[Any, Any]:
    net = model()
    optimizer = kind(net.named_parameters(), **keywords)
    train(net, optimizer, range(steps))
    return net, optimizer


KINDS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("AdamW", {"weight_decay": 0.1, "amsgrad": True}), ("Prodigy", {}), ("SGD", {"momentum": 0.9}), ("NAdam", {}),
    ("ScheduleFreeAdamW", {}), ("Apollo", {"seed": 5, "rank": 2}), ("Muon", {}),
)  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "keywords"),
    [pytest.param(*row, marks=[pytest.mark.slow] if i > 1 else [], id=row[0]) for i, row in enumerate(KINDS)],
)
def test_a_run_goes_on_bit_by_bit(kind: str, keywords: dict[str, Any], tmp_path: Path) -> None:
    made: Callable[..., Any] = getattr(rulec.torch, kind)
    file = tmp_path / "run.safetensors"
    with_tags = lambda net: [{"params": [*net.named_parameters()], "tags": []}]  # noqa: E731
    net, again = model(), model()
    optimizer = made(with_tags(net), lr=0.01, **keywords)
    train(net, optimizer, range(3))
    rulec.torch.save(optimizer, file, parameters=True)
    train(net, optimizer, range(3, 6))
    other = made(with_tags(again), lr=0.01, **keywords)
    rulec.torch.load(other, file, parameters=True)
    train(again, other, range(3, 6))
    for p, q in zip(net.parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q)
        assert all(torch.equal(x, other.state[q][key]) for key, x in optimizer.state[p].items())
    rulec.torch.save(optimizer, tmp_path / "one.safetensors")
    rulec.torch.save(other, tmp_path / "other.safetensors")
    assert (tmp_path / "one.safetensors").read_bytes() == (tmp_path / "other.safetensors").read_bytes()


def test_names_are_paths_and_else_places(tmp_path: Path) -> None:
    named, plain = tmp_path / "named.safetensors", tmp_path / "plain.safetensors"
    net, optimizer = trained()
    rulec.torch.save(optimizer, named, parameters=True)
    assert [p.name for p in read(named).parameters] == ["0/weight", "0/bias", "1/weight", "1/bias"]
    found = load_file(named)
    assert torch.equal(found["parameter/1/bias"], net[1].bias.detach())
    assert torch.equal(found["state/0/weight/v"], optimizer.state[net[0].weight]["exp_avg_sq"])
    assert found["step"].tolist() == [3, 3, 3, 3]
    rulec.torch.save(rulec.torch.AdamW(net.parameters()), plain)
    assert [p.name for p in read(plain).parameters] == ["0", "1", "2", "3"]


def test_names_may_be_given(tmp_path: Path) -> None:
    file = tmp_path / "run.safetensors"
    net, optimizer = trained()
    rulec.torch.save(optimizer, file)
    plain = rulec.torch.AdamW(model().parameters())
    with pytest.raises(StateMismatch) as found:
        rulec.torch.load(plain, file)
    assert str(found.value) == (
        f"{file} has 0/weight where there is 0 here: the shapes agree in their order, so if names alone differ give "
        f"names=, a mapping or a function from the file's names to these"
    )
    order = ["0/weight", "0/bias", "1/weight", "1/bias"]
    for names in ({name: str(i) for i, name in enumerate(order)}, lambda name: str(order.index(name))):
        plain = rulec.torch.AdamW(model().parameters())
        rulec.torch.load(plain, file, names=names)
        mine = plain.state[plain.param_groups[0]["params"][3]]
        assert torch.equal(mine["exp_avg"], optimizer.state[net[1].bias]["exp_avg"])
    dotted = rulec.torch.AdamW([("a.b", model()[0].weight)])
    one = rulec.torch.AdamW([model()[0].weight])
    rulec.torch.save(one, file)
    rulec.torch.load(dotted, file, names={"0": "a.b"})


def test_axes_may_be_in_another_order(tmp_path: Path) -> None:
    file = tmp_path / "run.safetensors"
    net, optimizer = trained()
    rulec.torch.save(optimizer, file, parameters=True)
    other = model(transposed=True)
    turned = rulec.torch.AdamW(other.named_parameters())
    with pytest.raises(StateMismatch, match=r"0/weight has shape \(3, 4\) here, and \(4, 3\) in .*: give axes= if"):
        rulec.torch.load(turned, file)
    rulec.torch.load(turned, file, axes={"0.weight": (1, 0)}, parameters=True)
    assert torch.equal(other[0].weight, net[0].weight.T)
    ours, theirs = turned.state[other[0].weight], optimizer.state[net[0].weight]
    assert torch.equal(ours["exp_avg"], theirs["exp_avg"].T)
    assert torch.equal(ours["step"], theirs["step"])


def test_hyper_parameters_are_this_optimizers_and_those_of_the_file_are_for_information(tmp_path: Path) -> None:
    file = tmp_path / "run.safetensors"
    _, optimizer = trained(lr=0.5, betas=(0.8, 0.9))
    rulec.torch.save(optimizer, file)
    assert read(file).hyper[0] == {"lr": 0.5, "beta1": 0.8, "beta2": 0.9, "eps": 1e-8, "weight_decay": 0.01}
    other = rulec.torch.AdamW(model().named_parameters(), lr=0.25)
    rulec.torch.load(other, file)
    assert (other.param_groups[0]["lr"], other.param_groups[0]["betas"]) == (0.25, (0.9, 0.999))


def test_a_count_that_torch_does_not_keep_goes_over(tmp_path: Path) -> None:
    first, second = tmp_path / "first.safetensors", tmp_path / "second.safetensors"
    _, optimizer = trained(rulec.torch.SGD, momentum=0.9)
    rulec.torch.save(optimizer, first)
    other = rulec.torch.SGD(model().named_parameters(), momentum=0.9)
    rulec.torch.load(other, first)
    rulec.torch.save(other, second)
    assert [p.steps for p in read(second).parameters] == [3, 3, 3, 3]


def test_a_default_that_follows_from_the_dtype_makes_no_other_rule(tmp_path: Path) -> None:
    """Torch's Adafactor leaves eps to each parameter's dtype; elsewhere that is a default like any other."""
    file = tmp_path / "run.safetensors"
    _, optimizer = trained(rulec.torch.Adafactor, steps=0, weight_decay=0.1)
    rulec.torch.save(optimizer, file)
    assert {p.meaning for p in read(file).parameters} == {meaning(rulec.load("adafactor"))}


def test_parameters_that_were_never_updated_have_no_state(tmp_path: Path) -> None:
    file = tmp_path / "run.safetensors"
    net, optimizer = trained(steps=0)
    train(net, optimizer, range(2), only="0")
    rulec.torch.save(optimizer, file)
    assert [(p.steps, sorted(p.states)) for p in read(file).parameters] == [(2, ["m", "v"])] * 2 + [(0, [])] * 2
    again = model()
    other = rulec.torch.AdamW(again.named_parameters())
    rulec.torch.load(other, file)
    assert not other.state.get(again[1].weight)
    assert other.state[again[0].weight]["step"] == 2


def test_groups_may_be_others_where_what_they_remember_agrees(tmp_path: Path) -> None:
    file = tmp_path / "run.safetensors"
    kind = rulec.torch.ScheduleFreeAdamW
    _, optimizer = trained(kind)
    rulec.torch.save(optimizer, file)
    net = model()
    halves = [{"params": [*net[i].named_parameters(prefix=str(i))]} for i in range(2)]
    other = kind(halves)
    rulec.torch.load(other, file)
    sums = [group["weight_sum"] for group in (*other.param_groups, *optimizer.param_groups)]
    assert sums[0] == sums[1] == sums[2] > 0
    assert [group["updates"] for group in other.param_groups] == [3, 3]
    other.param_groups[1]["lr"] = 0.5
    train(net, other, range(3, 5))
    rulec.torch.save(other, file)
    with pytest.raises(StateMismatch, match=r"lr_max is .* and 0\.5 in groups of .* that are one group here: give the"):
        rulec.torch.load(optimizer, file)


OF_MATRICES = """
name: Counting
applies_to: ndim >= 2
otherwise: adamw
hyper: {lr: 1e-3, gain: 2.0}
state: {total: {init: 0, per: group}}
step: |
  total = total + gain
  direction = g*total
"""


@pytest.mark.parametrize("shapes", [[(3,)], [(3, 4)], [(3,), (3, 4)]])
def test_numbers_of_groups_are_asked_of_rules_that_a_tensor_goes_to(
    shapes: list[tuple[int, ...]], tmp_path: Path
) -> None:
    """A vector goes to another rule than the class's, and that rule keeps no number of its group."""
    kind, file = rulec.torch.optimizer(rulec.parse(OF_MATRICES)), tmp_path / "run.safetensors"
    params = [(f"w{len(shape)}", torch.nn.Parameter(torch.ones(shape))) for shape in shapes]
    first, by_file, by_dict = (kind([{"params": params, "tags": []}]) for _ in range(3))
    for _, p in params:
        p.grad = torch.ones_like(p)
    first.step()
    rulec.torch.save(first, file)
    rulec.torch.load(by_file, file)
    by_dict.load_state_dict(first.state_dict())
    for other in (by_file, by_dict):
        assert other.param_groups[0].get("total") == first.param_groups[0].get("total")
        assert [*other.state_dict()["state"]] == [*range(len(shapes))]


# What is refused


def check_refused(
    optimizer: Any, file: Path, message: str, error: type[Exception] = StateMismatch, **keywords: Any
) -> None:
    """One sentence, and nothing is changed."""
    before = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
    state = {key: dict(value) for key, value in optimizer.state.items()}
    with pytest.raises(error, match=message) as found:
        rulec.torch.load(optimizer, file, **keywords)
    assert "\n" not in str(found.value)
    after = [p for group in optimizer.param_groups for p in group["params"]]
    assert all(torch.equal(p, q) for p, q in zip(before, after, strict=True))
    assert {key: dict(value) for key, value in optimizer.state.items()}.keys() == state.keys()


def test_another_rule_is_refused_unless_allowed(tmp_path: Path) -> None:
    file = tmp_path / "run.safetensors"
    net, optimizer = trained(rulec.torch.Adam)
    rulec.torch.save(optimizer, file)
    other = rulec.torch.AdamW(model().named_parameters())
    check_refused(
        other, file, "^0/weight was updated by Adam when .* was saved, and AdamW computes something else: go on with"
    )
    rulec.torch.load(other, file, rule_may_differ=True)
    mine = other.state[other.param_groups[0]["params"][0]]
    assert torch.equal(mine["exp_avg_sq"], optimizer.state[net[0].weight]["exp_avg_sq"])
    lion = rulec.torch.Lion(model().named_parameters())
    rulec.torch.load(lion, file, rule_may_differ=True)
    more = rulec.torch.AdamW(model().named_parameters(), amsgrad=True)
    check_refused(more, file, r"has no v_max of 0/weight \(it has m, v\): it is of another", rule_may_differ=True)


def test_other_parameters_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.safetensors"
    net, optimizer = trained()
    rulec.torch.save(optimizer, file)
    named = [*net.named_parameters()]
    more = ("more", torch.nn.Parameter(torch.zeros(2)))
    wide = [(n, torch.nn.Parameter(torch.zeros(9)) if n == "1.bias" else p) for n, p in named]
    make = rulec.torch.AdamW
    check_refused(make([*named, more]), file, "has nothing for more: give the parameters it was saved with, or names=")
    check_refused(make(named[:2]), file, "has 1/weight and 1 more, which is no parameter here: give the parameters")
    check_refused(
        make([*named[:3], more]), file, "has 1/bias where there is more here: the shapes agree in their order"
    )
    check_refused(
        make(wide), file, r"1/bias has shape \(9,\) here, and \(2,\) in .*: give the model that it was saved from"
    )
    check_refused(make(named), file, "names= has 'bias', and .* has no such parameter", names={"bias": "0.bias"})
    check_refused(make(named), file, "names= gives two parameters of .* the same name", names=lambda name: "one")
    check_refused(make(named), file, "axes= has 'bias', which is no parameter", axes={"bias": (0,)})
    check_refused(make(named), file, r"axes= gives \(0, 0\) for 0/weight of shape \(4, 3\)", axes={"0.weight": (0, 0)})
    check_refused(make(named), file, "has no value of 0/weight: it was saved without parameters=True", parameters=True)


def test_rules_that_see_rows_and_columns_cannot_be_turned(tmp_path: Path) -> None:
    file = tmp_path / "run.safetensors"
    _, optimizer = trained(rulec.torch.Adafactor, steps=0)
    rulec.torch.save(optimizer, file)
    other = rulec.torch.Adafactor(model(transposed=True).named_parameters())
    check_refused(other, file, "axes= turns 0/weight, and Adafactor treats its rows", axes={"0.weight": (1, 0)})


def test_random_numbers_stay_what_they_are(tmp_path: Path) -> None:
    file = tmp_path / "run.safetensors"
    net, optimizer = trained(rulec.torch.Apollo, steps=0, seed=5, rank=2)
    rulec.torch.save(optimizer, file)
    named = [*net.named_parameters()]
    check_refused(
        rulec.torch.Apollo(named, rank=2), file, "was saved with seed=5, and the seed is 0 here: give the same"
    )
    turned = rulec.torch.Apollo(named[::-1], seed=5, rank=2)
    check_refused(
        turned, file, "1/weight is at another place among the parameters .* in the order that they were saved in"
    )
    rulec.torch.save(trained(rulec.torch.Apollo, steps=0, rank=2)[1], file)
    unseeded = "was saved with seed=0, and the seed is 1 here: give the same"
    check_refused(rulec.torch.Apollo(named, seed=1, rank=2), file, unseeded)


def test_where_the_parameters_are_evaluated_nothing_is_saved(tmp_path: Path) -> None:
    file = tmp_path / "run.safetensors"
    _, optimizer = trained(rulec.torch.ScheduleFreeAdamW)
    rulec.torch.save(optimizer, file)
    optimizer.eval()
    with pytest.raises(RulecError, match="where ScheduleFreeAdamW is evaluated: call train"):
        rulec.torch.save(optimizer, file)
    check_refused(optimizer, file, "where ScheduleFreeAdamW is evaluated: call train", RulecError)


def test_what_is_no_optimizer_of_ours_is_refused(tmp_path: Path) -> None:
    file: Any = tmp_path / "run.safetensors"
    theirs: Any = torch.optim.AdamW(model().parameters())
    with pytest.raises(RulecError, match=r"rulec\.torch, not torch\.optim\.adamw\.AdamW: load its state_dict"):
        rulec.torch.save(theirs, file)
    partition = rulec.partition({"**/bias": "sgd", "...": "adamw"})
    several: Any = rulec.torch.Partitioned(partition, model().named_parameters())
    with pytest.raises(RulecError, match="save each of its optimizers, in a file of its own"):
        rulec.torch.save(several, file)
    nothing: Any = None
    with pytest.raises(RulecError, match=r"load takes an optimizer of rulec\.torch, not a builtins\.NoneType$"):
        rulec.torch.load(nothing, file)
    complex_one = rulec.torch.AdamW([torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))])
    with pytest.raises(TensorError, match="0 is complex"):
        rulec.torch.save(complex_one, file)
    assert not file.exists()


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    net, optimizer = trained()
    save_file(net.state_dict(), file)
    check_refused(optimizer, file, "is a safetensors file, but no checkpoint of rulec")
