"""Several rules in one torch optimizer, by patterns of names, beside optimizers of torch's own."""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import rulec
import rulec.torch
from rulec.backend import registry
from rulec.errors import HyperError, PartialUpdate, RuleError, StateMismatch, TensorError
from tests.runtime.elsewhere import Elsewhere

BOTH: dict[str, Any] = {
    "**/bias": rulec.part("momentum", momentum=0.9, lr=0.1),
    "0/weight": None,
    "...": rulec.part("adamw", weight_decay=0.1, beta1=0.8),
}


def model() -> Any:
    """Two layers: parameters 0.weight, 0.bias, 2.weight and 2.bias."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def ours(made: nn.Module, entries: Mapping[str, Any] = BOTH, **keywords: Any) -> rulec.torch.Partitioned:
    return rulec.torch.Partitioned(rulec.partition(entries), made.named_parameters(), **keywords)


def theirs(made: nn.Module) -> list[torch.optim.Optimizer]:
    """What BOTH means with `lr=0.01, beta2=0.99`, by two optimizers."""
    named = dict(made.named_parameters())
    return [
        torch.optim.SGD([named["0.bias"], named["2.bias"]], lr=0.1, momentum=0.9),
        torch.optim.AdamW([named["2.weight"]], lr=0.01, betas=(0.8, 0.99), weight_decay=0.1),
    ]


def train(made: nn.Module, optimizers: Sequence[torch.optim.Optimizer], steps: int = 1, start: int = 0) -> None:
    for number in range(start, start + steps):
        x = torch.randn(7, 3, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
        for optimizer in optimizers:
            optimizer.zero_grad()
        made(x).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()


def assert_equal(first: nn.Module, second: nn.Module, bound: float = 1e-12) -> None:
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=bound, atol=bound)


def test_agrees_with_two_optimizers_and_their_schedules() -> None:
    mine, other = model(), model()
    optimizer, others = ours(mine, lr=0.01, beta2=0.99), theirs(other)
    schedules = [lr_scheduler.ExponentialLR(each, 0.9) for each in [optimizer, *others]]
    frozen = mine[0].weight.detach().clone()
    for number in range(20):
        train(mine, [optimizer], start=number)
        train(other, others, start=number)
        for schedule in schedules:
            schedule.step()
    with torch.no_grad():
        other[0].weight.copy_(frozen)
    assert_equal(mine, other)
    assert torch.equal(mine[0].weight, frozen)
    assert [group["param_names"] for group in optimizer.param_groups] == [["0.bias", "2.bias"], ["2.weight"]]
    assert [group["lr"] for group in optimizer.param_groups] == [each.param_groups[0]["lr"] for each in others]


def test_groups_of_one_rule_are_what_torch_takes() -> None:
    """The same groups make our optimizer and torch's; weights decay and biases do not."""
    entries = {"**/bias": ("adamw", {"weight_decay": 0.0}), "...": ("adamw", {"weight_decay": 0.3, "beta1": 0.8})}
    made = [model() for _ in range(3)]
    groups = [rulec.torch.partitioned_groups(rulec.partition(entries), m.named_parameters()) for m in made[:2]]
    optimizers = [
        torch.optim.AdamW(groups[0], lr=0.02),
        rulec.torch.AdamW(groups[1], lr=0.02),
        ours(made[2], entries, lr=0.02),
    ]
    for each, optimizer in zip(made, optimizers, strict=True):
        train(each, [optimizer], 20)
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.3]
        assert [group["betas"] for group in optimizer.param_groups] == [(0.9, 0.999), (0.8, 0.999)]
    assert_equal(made[0], made[1])
    assert_equal(made[0], made[2])


def test_a_closure_is_called_once_and_hooks_too() -> None:
    made = model()
    optimizer = ours(made)
    called = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))

    def closure() -> Any:
        called.append("closure")
        optimizer.zero_grad()
        loss = made(torch.ones(2, 3, dtype=torch.float64)).square().mean()
        loss.backward()
        return loss

    before = [p.detach().clone() for p in made.parameters()]
    loss = optimizer.step(closure)
    assert called == ["before", "closure", "after"]
    assert loss.requires_grad
    moved = [not torch.equal(a, b) for a, b in zip(before, made.parameters(), strict=True)]
    assert moved == [False, True, True, True]


def saved(optimizer: torch.optim.Optimizer) -> Any:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_a_checkpoint_is_one_and_goes_on() -> None:
    made = model()
    optimizer = ours(made, lr=0.01)
    train(made, [optimizer], 3)
    optimizer.param_groups[0]["lr"] = 0.25
    state = saved(optimizer)
    assert [group["params"] for group in state["param_groups"]] == [[0, 1], [2]]
    assert sorted(state["state"][2]) == ["exp_avg", "exp_avg_sq", "step"]
    again = copy.deepcopy(made)
    other = ours(again, lr=0.5)
    other.load_state_dict(state)
    assert [group["lr"] for group in other.param_groups] == [0.25, 0.01]
    train(made, [optimizer], 3, start=3)
    train(again, [other], 3, start=3)
    assert_equal(made, again, 0.0)


def test_torchs_states_load_into_the_optimizers_of_a_partition() -> None:
    """Each of the optimizers is what its class is elsewhere. What is loaded is what schedulers see."""
    mine, other = model(), model()
    entries = {**BOTH, "**/bias": ("sgd", {"momentum": 0.9})}
    optimizer, others = ours(mine, entries, lr=0.5), theirs(other)
    train(other, others, 3)
    mine.load_state_dict(other.state_dict())
    for each, their in zip(optimizer.optimizers, others, strict=True):
        each.load_state_dict(their.state_dict())
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.01]
    train(mine, [optimizer], 3, start=3)
    train(other, others, 3, start=3)
    assert_equal(nn.ModuleList([mine[2]]), nn.ModuleList([other[2]]))


def damaged(state: dict[str, Any]) -> dict[str, Any]:
    del state["state"][2]["exp_avg_sq"]
    return state


def of_other_patterns(state: dict[str, Any]) -> dict[str, Any]:
    state["param_groups"].pop()
    return state


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (damaged, "exp_avg_sq"),
        (
            of_other_patterns,
            "the saved groups have 2 parameters, where the partition's have 2, 1: make it",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_changes_nothing(damage: Callable[[Any], Any], sentence: str) -> None:
    made = model()
    optimizer = ours(made)
    train(made, [optimizer], 2)
    twin, twins = copy.deepcopy((made, optimizer))
    state = saved(optimizer)
    state["param_groups"][0]["lr"] = 7.0
    state["state"][0]["momentum_buffer"] += 1.0
    with pytest.raises(StateMismatch, match=sentence):
        optimizer.load_state_dict(damage(state))
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.001]
    train(made, [optimizer], 2, start=2)
    train(twin, [twins], 2, start=2)
    assert_equal(made, twin, 0.0)


def test_is_pickled_with_its_partition() -> None:
    made = model()
    optimizer = ours(made, lr=0.01)
    train(made, [optimizer], 2)
    again, other = pickle.loads(pickle.dumps((made, optimizer)))  # noqa: S301
    train(made, [optimizer], 2, start=2)
    train(again, [other], 2, start=2)
    assert_equal(made, again, 0.0)
    assert other.partition.patterns == optimizer.partition.patterns


def test_the_states_are_those_of_its_optimizers() -> None:
    made = model()
    optimizer = ours(made)
    assert len(optimizer.state) == 0
    assert optimizer.state[made[2].weight] == {}
    train(made, [optimizer])
    assert {id(p) for p in optimizer.state} == {id(made[0].bias), id(made[2].bias), id(made[2].weight)}
    assert optimizer.state[made[2].weight] is optimizer.optimizers[1].state[made[2].weight]
    with pytest.raises(KeyError):
        optimizer.state[made[0].weight]


def test_parameters_are_added_by_their_names() -> None:
    """To the group's rule, in a group of its own at the end, with hyper-parameters of its own."""
    made = model()
    optimizer = ours(made, {"**/bias": "momentum", "...": ("adamw", {"weight_decay": 0.5})}, lr=0.01)
    train(made, [optimizer])
    bias, gain = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [("late.bias", bias)], "lr": 0.5})
    optimizer.add_param_group({"params": [("late.gain", gain)], "beta1": 0.5})
    assert [each.interface.name for each in optimizer.optimizers] == ["Momentum", "AdamW"]
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.01, 0.5, 0.01]
    assert optimizer.param_groups[3]["betas"] == (0.5, 0.999)
    assert optimizer.param_groups[3]["weight_decay"] == 0.5
    bias.grad, gain.grad = torch.ones(2), torch.ones(3)
    optimizer.step()
    assert torch.equal(bias.detach(), torch.full((2,), 0.5))
    again = ours(made, {"**/bias": "momentum", "...": "adamw"})
    with pytest.raises(StateMismatch, match="the saved groups have 2, 2, 1, 1 parameters"):
        again.load_state_dict(optimizer.state_dict())
    with pytest.raises(TensorError, match="a parameter of the new group is in another group already"):
        optimizer.add_param_group({"params": [("again.bias", bias)]})
    with pytest.raises(HyperError, match="a new group must be of parameters that one pattern takes"):
        optimizer.add_param_group({"params": [("x.bias", nn.Parameter(torch.ones(1))), ("x", gain)]})


def test_a_rule_may_be_added_late() -> None:
    made = model()
    partition = rulec.partition({"late/*": "sgd", "...": "adamw"}, allow_unused=True)
    optimizer = rulec.torch.Partitioned(partition, made.named_parameters(), lr=0.25)
    late = nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [("late.x", late)]})
    late.grad = torch.ones(2)
    optimizer.step()
    assert torch.equal(late.detach(), torch.full((2,), 0.75))


def test_what_is_of_the_model_is_of_one_rules_parameters() -> None:
    """Two rules with a norm of the model, each beside an optimizer over its parameters alone."""
    mine, other = model(), model()
    rule = rulec.load("clip_by_global_norm >> sgd").bind(max_norm=0.01)
    entries = {"**/bias": "prodigy", "...": rule}
    optimizer = ours(mine, entries)
    named = dict(other.named_parameters())
    clipped = rulec.torch.optimizer(rule)
    others = [
        rulec.torch.Prodigy([named["0.bias"], named["2.bias"]]),
        clipped([named["0.weight"], named["2.weight"]]),
    ]
    train(mine, [optimizer], 5)
    train(other, others, 5)
    assert_equal(mine, other, 0.0)
    assert optimizer.param_groups[0]["d"] == others[0].param_groups[0]["d"]


def test_tags_and_routing() -> None:
    """Muon's class refuses what torch's refuses; a partition is ours, and says where its parameters go."""
    made = nn.ModuleDict({"table": nn.Embedding(5, 4), "dense": nn.Linear(4, 4)})
    entries = {"table/*": rulec.part("muon", tags=["embedding"]), "**/bias": "sgd", "...": "muon"}
    optimizer = ours(made, entries, lr=0.1, adamw_lr=0.01)
    found = [(route.name, route.rule.name, route.group) for route in optimizer.routing()]
    assert found == [("table.weight", "AdamW", 0), ("dense.bias", "SGD", 1), ("dense.weight", "Muon", 2)]
    assert str(optimizer.routing()).splitlines()[0].split() == ["table.weight", "(5,", "4)", "AdamW"]


LOSSY = """
name: Lossy
inputs: {loss: scalar, scale: like p}
hyper: {lr: 0.5}
step: |
  direction = g*loss*scale
"""


@pytest.mark.parametrize("as_list", [True, False])
def test_inputs_reach_the_rules_that_name_them(as_list: bool) -> None:
    first, second, third = (nn.Parameter(torch.ones(2)) for _ in range(3))
    named = [("a", first), ("b", second), ("c", third)]
    entries = rulec.partition({"b": "sgd", "...": rulec.parse(LOSSY)})
    optimizer = rulec.torch.Partitioned(entries, named, lr=0.5)
    for param in (first, second, third):
        param.grad = torch.ones(2)
    scales = [torch.full((2,), 9.0), torch.full((2,), 0.25), torch.full((2,), 0.125)]  # of b, a and c: groups' order
    by_param = dict(zip([second, first, third], scales, strict=True))
    optimizer.step(lambda: 2.0, inputs={"scale": scales if as_list else by_param})
    assert [p[0].item() for p in (first, second, third)] == [0.75, 0.5, 0.875]
    with pytest.raises(HyperError, match=r"no rule of the partition takes an input 'scales'; did you mean 'scale'\?"):
        optimizer.step(inputs={"scales": scales})
    with pytest.raises(TensorError, match=r"the input 'scale' must be a dict by parameter, .* the 3 parameters"):
        optimizer.step(lambda: 2.0, inputs={"scale": scales[:2]})


def test_parameters_move_to_where_they_are_evaluated() -> None:
    made = model()
    optimizer = ours(made, {"**/bias": "schedule_free_sgd", "...": "adamw"}, lr=0.1)
    train(made, [optimizer], 3)
    before = [p.detach().clone() for p in made.parameters()]
    optimizer.eval()
    moved = [not torch.equal(a, b) for a, b in zip(before, made.parameters(), strict=True)]
    assert moved == [False, True, False, True]
    optimizer.train()
    for a, b in zip(before, made.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_a_scaler_skips_all_rules_together() -> None:
    made = model().float()
    optimizer = ours(made, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = [p.detach().clone() for p in made.parameters()]
    for scale in (float("inf"), 1.0):
        optimizer.zero_grad()
        loss = made(torch.ones(2, 3)).square().mean() * scale
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        moved = [not torch.equal(a, b) for a, b in zip(before, made.parameters(), strict=True)]
        assert moved == ([False] * 4 if scale > 1 else [False, True, True, True])
    assert not {"grad_scale", "found_inf"} & optimizer.optimizers[0].__dict__.keys()


def test_a_scaler_leaves_unscaling_and_skipping_to_all_rules() -> None:
    """Where counts and rates are on the device: torch's CPU in its place. As training without a scaler."""
    plain = registry.get
    with mock.patch.object(registry, "get", lambda name: Elsewhere() if name == "elsewhere" else plain(name)):
        mine, other = model(), model()
        keywords: dict[str, Any] = {"lr": 0.01, "backend": "elsewhere", "capturable": True}
        optimizer, unscaled = ours(mine, **keywords), ours(other, **keywords)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        assert optimizer._step_supports_amp_scaling
        for scale in (1.0, float("inf"), 1.0):
            optimizer.zero_grad()
            scaler.scale(mine(torch.ones(2, 3, dtype=torch.float64)).square().mean() * scale).backward()
            scaler.step(optimizer)
            scaler.update()
        for _ in range(2):
            unscaled.zero_grad()
            other(torch.ones(2, 3, dtype=torch.float64)).square().mean().backward()
            unscaled.step()
        assert_equal(mine, other)
        assert [float(optimizer.state[p]["step"]) for p in optimizer.state] == [2.0, 2.0, 2.0]


def test_a_step_that_fails_halfway_says_what_was_updated() -> None:
    made = model()
    optimizer = ours(made)
    train(made, [optimizer])
    made[2].weight.grad = made[2].weight.grad.to_sparse()
    with pytest.raises(PartialUpdate, match=r"a step failed after the parameters of Momentum were updated: .*sparse"):
        optimizer.step()
    made[0].bias.grad = made[0].bias.grad.to_sparse()
    with pytest.raises(TensorError, match="sparse"):
        optimizer.step()


@pytest.mark.parametrize("late", [False, True])
def test_keywords_have_the_words_of_namesakes(late: bool) -> None:
    """A word of another library, for one keyword or for the end of a tuple, of a pattern or of all."""
    words = {"galore": {"update_proj_gap": 7}, "prodigy": {"beta3": 0.5}}
    patterns = {"0/*": "galore", "...": "prodigy"}
    entries = {name: rulec.part(rule, **({} if late else words[rule])) for name, rule in patterns.items()}
    keywords = {word: value for each in words.values() for word, value in each.items()} if late else {}
    first, second = ours(model(), entries, **keywords).param_groups
    assert first["gap"] == 7
    assert second["betas"] == (0.9, 0.999, 0.5)
    assert not {"update_proj_gap", "beta3"} & {*first, *second}


def test_keywords_go_to_the_classes_that_have_them() -> None:
    made = model()
    entries = {"0/*": rulec.part("momentum", lr=0.5), "...": rulec.part("adamw", betas=(0.5, 0.6))}
    optimizer = ours(
        made, entries, lr=0.25, momentum=0.75, beta2=0.8, eps=1e-3, maximize=True,
        state_dtype={"exp_avg": torch.float32},
    )  # fmt: skip
    first, second = optimizer.param_groups
    assert (first["lr"], first["momentum"], first["maximize"]) == (0.5, 0.75, True)
    assert (second["lr"], second["betas"], second["eps"], second["maximize"]) == (0.25, (0.5, 0.6), 1e-3, True)
    train(made, [optimizer])
    state = optimizer.state[made[2].weight]
    assert (state["exp_avg"].dtype, state["exp_avg_sq"].dtype) == (torch.float32, torch.float64)
    assert "betas" not in optimizer.defaults
    assert {"lr", "maximize"} <= optimizer.defaults.keys()


@pytest.mark.parametrize(
    ("entries", "keywords", "error", "sentence"),
    [
        ({"**/bias": "sgd"}, {}, TensorError, "no pattern of the partition matches the parameter 0/weight"),
        ({"*.bias": "sgd", "...": "sgd"}, {}, RuleError, "the pattern '*.bias' matches no parameter"),
        ({"...": None}, {}, TensorError, "the partition trains no parameter: give one of them a rule"),
        ({"...": "adam"}, {"beta": 1}, HyperError, "partition has a keyword 'beta'; did you mean 'betas'?"),
        ({"...": ("adam", {"bta": 1})}, {}, HyperError, "Adam has no keyword 'bta'"),
        ({"...": ("adam", {"backend": "c"})}, {}, HyperError, "backend is of a whole optimizer, not of a pattern"),
        ({"...": ("lion", {"capturable": 1})}, {}, HyperError, "capturable is of a whole optimizer, not of a pattern"),
        ({"...": ("adam", {"beta1": 2.0})}, {}, HyperError, "beta1"),
        ({"...": "adam"}, {"state_dtype": {"exp_av": "float32"}}, TensorError, "has a state 'exp_av'; did you mean"),
    ],
)  # fmt: skip
def test_mistakes(entries: Any, keywords: Any, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=re.escape(sentence)):
        ours(model(), entries, **keywords)


def test_other_mistakes() -> None:
    partition = rulec.partition({"...": "sgd"})
    with pytest.raises(TensorError, match=r"a partition goes by names: give it model.named_parameters\(\)"):
        rulec.torch.Partitioned(partition, model().parameters())
    with pytest.raises(TensorError, match="a partition goes by names"):
        rulec.torch.Partitioned(partition, model())
    with pytest.raises(HyperError, match=r"Partitioned takes a rulec.partition\({...}\), not a dict"):
        rulec.torch.Partitioned({"...": "sgd"}, model().named_parameters())  # type: ignore[arg-type]
    with pytest.raises(RuleError, match="one optimizer has one rule, and the partition has Momentum, AdamW: use rulec"):
        rulec.torch.partitioned_groups(rulec.partition(BOTH), model().named_parameters())
