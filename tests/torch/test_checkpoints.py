"""Checkpoints are torch's, both ways; states keep their dtypes; copies and pickles go on where they were."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import rulec
import rulec.torch
from rulec.errors import StateMismatch
from tests.torch.test_agreement import CASES, IDS, wide_scalars
from tests.torch.twins import QUICK, difference, give_gradients, parameters


def stepped(kind: Any, steps: range, dtype: torch.dtype = torch.float32, **keywords: Any) -> Any:
    """An optimizer that has taken these steps, and its parameters."""
    params = parameters(dtype)
    optimizer = kind(params, **keywords)
    advance(optimizer, params, steps)
    return optimizer, params


def advance(optimizer: torch.optim.Optimizer, params: list[Tensor], steps: range) -> None:
    for number in steps:
        give_gradients(params, number)
        optimizer.step()


def saved_and_loaded(state: dict[str, Any]) -> dict[str, Any]:
    """What `torch.save` and `torch.load(weights_only=True)` make of it."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)  # type: ignore[no-any-return]


def quick(name: str) -> Any:
    """Our class of the name, on the backend whose kernels are made soonest."""
    return functools.partial(getattr(rulec.torch, name), backend=QUICK)


@pytest.mark.parametrize("ours_first", [True, False], ids=["ours to torch", "torch to ours"])
@pytest.mark.parametrize(("name", "keywords"), CASES, ids=IDS)
def test_a_checkpoint_goes_on_on_the_other_side(name: str, keywords: dict[str, Any], ours_first: bool) -> None:
    ours, theirs = quick(name), getattr(torch.optim, name)
    first, second = (ours, theirs) if ours_first else (theirs, ours)
    with wide_scalars():
        optimizer, params = stepped(first, range(4), torch.float64, **keywords)
        state = saved_and_loaded(optimizer.state_dict())
        other = [torch.nn.Parameter(p.detach().clone()) for p in params]
        loaded = second(other)
        loaded.load_state_dict(state)
        advance(loaded, other, range(4, 8))
        _, straight = stepped(theirs, range(8), torch.float64, **keywords)
    assert difference(other, straight) * torch.finfo(torch.float64).eps < 1e-12
    assert loaded.param_groups[0]["lr"] == keywords["lr"]


@pytest.mark.parametrize(("name", "keywords"), CASES, ids=IDS)
def test_the_layout_is_that_of_torch(name: str, keywords: dict[str, Any]) -> None:
    ours, _ = stepped(quick(name), range(2), **keywords)
    theirs, _ = stepped(getattr(torch.optim, name), range(2), **keywords)
    a, b = ours.state_dict(), theirs.state_dict()
    assert a.keys() == b.keys()
    assert a["state"].keys() == b["state"].keys()
    for index, values in b["state"].items():
        assert type(a["state"][index]) is dict
        assert a["state"][index].keys() == values.keys()
        for key, value in values.items():
            if value is not None:
                assert a["state"][index][key].shape == value.shape
    for mine, its in zip(a["param_groups"], b["param_groups"], strict=True):
        assert mine.keys() == its.keys()
        assert mine["params"] == its["params"]
    if "step" in b["state"].get(0, {}):
        step = a["state"][0]["step"]
        assert (step.dtype, step.dim(), step.item()) == (torch.float32, 0, 2.0)


@pytest.mark.parametrize("name", ["Adagrad", "AdamW"])
def test_before_the_first_step_a_state_is_there_where_torch_has_one(name: str) -> None:
    ours, theirs = getattr(rulec.torch, name)(parameters()), getattr(torch.optim, name)(parameters())
    assert ours.state_dict()["state"].keys() == theirs.state_dict()["state"].keys()
    again, params = getattr(torch.optim, name)(parameters()), parameters()
    again.load_state_dict(ours.state_dict())
    advance(again, again.param_groups[0]["params"], range(1))
    give_gradients(params, 0)
    other = getattr(torch.optim, name)(params)
    other.step()
    assert difference(again.param_groups[0]["params"], params) <= 1


def test_states_keep_their_dtypes() -> None:
    optimizer, params = stepped(rulec.torch.AdamW, range(3), torch.bfloat16, state_dtype="float32")
    assert optimizer.state[params[0]]["exp_avg"].dtype is torch.float32
    other = rulec.torch.AdamW(parameters(torch.bfloat16), state_dtype={"exp_avg_sq": torch.float32})
    other.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    first = other.state[other.param_groups[0]["params"][0]]
    assert (first["exp_avg"].dtype, first["exp_avg_sq"].dtype) == (torch.bfloat16, torch.float32)
    same = rulec.torch.AdamW(params, state_dtype=torch.float32)
    same.load_state_dict(optimizer.state_dict())
    assert torch.equal(same.state[params[1]]["exp_avg_sq"], optimizer.state[params[1]]["exp_avg_sq"])


def test_loading_copies() -> None:
    optimizer, params = stepped(rulec.torch.AdamW, range(2))
    state = copy.deepcopy(optimizer.state_dict())
    kept = state["state"][0]["exp_avg"].clone()
    other = rulec.torch.AdamW(params)
    other.load_state_dict(state)
    advance(other, params, range(2, 4))
    assert torch.equal(state["state"][0]["exp_avg"], kept)
    assert not torch.equal(other.state[params[0]]["exp_avg"], kept)


def test_each_state_has_memory_of_its_own() -> None:
    """Saving one small state must not write a whole arena."""
    optimizer, params = stepped(rulec.torch.AdamW, range(1))
    state = optimizer.state[params[0]]
    assert state["exp_avg"].untyped_storage().nbytes() == state["exp_avg"].nbytes
    assert state["exp_avg"].data_ptr() % 64 == 0


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
@pytest.mark.parametrize("name", ["AdamW", "NAdam", "SGD", "Lion", "own rule"])
def test_copies_go_on_alike_and_apart(name: str, way: str) -> None:
    rule = rulec.parse("name: Own\nhyper: {beta: 0.9}\nstate: {m: 0}\nstep: |\n  m = beta*m + g\n  direction = m")
    kind = rulec.torch.optimizer(rule) if name == "own rule" else getattr(rulec.torch, name)
    extra = {"momentum": 0.9} if name == "SGD" else {}
    optimizer, params = stepped(kind, range(3), lr=0.1, **extra)
    both = (optimizer, params)
    other, others = copy.deepcopy(both) if way == "deepcopy" else pickle.loads(pickle.dumps(both))  # noqa: S301
    assert type(other) is kind
    assert other.param_groups[0]["params"][0] is others[0]
    advance(optimizer, params, range(3, 6))
    assert difference(others, params) > 1
    advance(other, others, range(3, 6))
    assert difference(others, params) == 0


def test_a_whole_optimizer_may_be_saved(tmp_path: Path) -> None:
    optimizer, _ = stepped(rulec.torch.Lion, range(2))
    torch.save(optimizer, tmp_path / "optimizer.pt")
    again = torch.load(tmp_path / "optimizer.pt", weights_only=False)
    assert isinstance(again, rulec.torch.Lion)


def test_hooks_of_checkpoints_run_once_and_may_change_them() -> None:
    optimizer, params = stepped(rulec.torch.AdamW, range(2))
    seen: list[str] = []
    optimizer.register_state_dict_pre_hook(lambda o: seen.append("save"))
    optimizer.register_state_dict_post_hook(lambda o, s: {**s, "version": 1})
    optimizer.register_load_state_dict_pre_hook(lambda o, s: seen.append(f"load {s['version']}"))
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append("loaded"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["save", "load 1", "loaded"]
    assert optimizer.state[params[0]]["step"] == 2


def test_a_state_of_another_rule_or_shape_is_refused_and_nothing_changed() -> None:
    optimizer, params = stepped(rulec.torch.AdamW, range(2), lr=0.2)
    before = copy.deepcopy(optimizer.state_dict())
    lion, _ = stepped(rulec.torch.Lion, range(1))
    wrong_shape = copy.deepcopy(before)
    wrong_shape["state"][1]["exp_avg"] = torch.zeros(4, 3)
    wrong_rate = copy.deepcopy(before)
    wrong_rate["param_groups"][0]["lr"] = -1.0
    with pytest.raises(StateMismatch, match="parameter 0 has no exp_avg "):
        optimizer.load_state_dict(lion.state_dict())
    with pytest.raises(StateMismatch, match=r"exp_avg of parameter 1 was saved with shape \(4, 3\), where it has"):
        optimizer.load_state_dict(wrong_shape)
    with pytest.raises(rulec.RulecError, match=r"lr=-1\.0 of AdamW must be at least 0"):
        optimizer.load_state_dict(wrong_rate)
    with pytest.raises(StateMismatch, match="max_exp_avg_sq"):
        rulec.torch.AdamW(parameters(), amsgrad=True).load_state_dict(
            {**before, "param_groups": [{**before["param_groups"][0], "amsgrad": True}]}
        )
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert torch.equal(after["state"][0]["exp_avg"], before["state"][0]["exp_avg"])
    advance(optimizer, params, range(2, 3))


NONE = [-5, 2.5, float("nan"), float("inf"), "five", torch.tensor(-1.0), torch.tensor(0.5)]


@pytest.mark.parametrize("count", NONE, ids=str)
def test_a_count_that_is_none_is_refused_and_nothing_changed(count: Any) -> None:
    optimizer, params = stepped(rulec.torch.Adam, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    before = copy.deepcopy(saved)
    saved["state"][1]["step"] = count
    says = "step of parameter 1 was saved as .*, which is no count of updates"
    with pytest.raises(StateMismatch, match=says):
        optimizer.load_state_dict(saved)
    assert [float(s["step"]) for s in optimizer.state.values()] == [2.0] * len(params)
    for place, states in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, before["state"][place][key]) for key, value in states.items())


@pytest.mark.parametrize(
    "saved", [{}, {"state": {}}, {"state": [], "param_groups": []}, {"state": {}, "param_groups": [1]}, [1]], ids=str
)
def test_what_is_no_state_dict_is_refused(saved: Any) -> None:
    says = "lacks its state or param_groups: give all" if isinstance(saved, dict) else "is a list: give the dict"
    with pytest.raises(StateMismatch, match=f"^the saved state {says}"):
        rulec.torch.Adam(parameters(torch.float32)).load_state_dict(saved)


def test_a_checkpoint_of_an_older_torch_loads() -> None:
    """Step counts were numbers, momentum buffers None, and groups had fewer entries."""
    optimizer, _ = stepped(torch.optim.AdamW, range(3))
    state = optimizer.state_dict()
    for values in state["state"].values():
        values["step"] = int(values["step"])
    state["param_groups"] = [{k: v for k, v in g.items() if k != "maximize"} for g in state["param_groups"]]
    ours, params = rulec.torch.AdamW(parameters()), None
    ours.load_state_dict(state)
    params = ours.param_groups[0]["params"]
    assert ours.state[params[0]]["step"].item() == 3
    assert ours.param_groups[0]["maximize"] is False
    sgd = rulec.torch.SGD(parameters(), lr=0.1, momentum=0.9)
    old = sgd.state_dict()
    old["state"] = {0: {"momentum_buffer": None}}
    sgd.load_state_dict(old)
    advance(sgd, sgd.param_groups[0]["params"], range(2))
    _, straight = stepped(torch.optim.SGD, range(2), lr=0.1, momentum=0.9)
    assert difference(sgd.param_groups[0]["params"], straight) <= 2
