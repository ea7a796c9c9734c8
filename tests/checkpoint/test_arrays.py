"""`rulec.array.save` and `load`: plain arrays go on from torch, and torch from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import rulec
import rulec.array
import rulec.torch
from rulec.checkpoint import read
from rulec.errors import RulecError, StateMismatch
from tests.checkpoint.runs import STEPS, TorchRun, difference, first_parameters, gradients, precision


def run_of(rule: str, dtype: Any = np.float64, **keywords: Any) -> tuple[rulec.array.Optimizer, dict[str, Any]]:
    params = {name: array.astype(dtype) for name, array in first_parameters().items()}
    return rulec.array.Optimizer(rule, params, **keywords), params


def steps(optimizer: rulec.array.Optimizer, params: dict[str, Any], numbers: range) -> None:
    for number in numbers:
        optimizer.step({name: grad.astype(params[name].dtype) for name, grad in gradients(number).items()})


CASES = [
    pytest.param(rule, marks=[] if rule == "prodigy" else [pytest.mark.slow])
    for rule in ("adamw", "prodigy", "nadam", "schedule_free_adamw", "adafactor", "apollo")
]


@pytest.mark.parametrize("rule", CASES)
def test_a_run_goes_to_arrays_and_back(rule: str, tmp_path: Path) -> None:
    there, back = tmp_path / "there.safetensors", tmp_path / "back.safetensors"
    kind = rulec.torch.optimizer(rulec.load(rule))
    with precision("float64"):
        TorchRun(kind, "float64", lr=0.01).steps(range(STEPS)).save(there)
        ours, params = run_of(rule, lr=0.01)
        rulec.array.load(ours, there, parameters=True)
        steps(ours, params, range(STEPS, 2 * STEPS))
        straight = TorchRun(kind, "float64", lr=0.01).steps(range(2 * STEPS))
        assert difference(params, straight.now()) <= 1e-14
        rulec.array.save(ours, back, parameters=True)
        again = TorchRun(kind, "float64", lr=0.01).load(back).steps(range(2 * STEPS, 3 * STEPS))
        assert difference(again.now(), straight.steps(range(2 * STEPS, 3 * STEPS)).now()) <= 1e-14


def test_bits_of_bfloat16_stay(tmp_path: Path) -> None:
    file = tmp_path / "run.safetensors"
    ours, params = run_of("adamw", ml_dtypes.bfloat16, state_dtype={"v": "float32"})
    steps(ours, params, range(2))
    rulec.array.save(ours, file, parameters=True)
    other, copies = run_of("adamw", ml_dtypes.bfloat16, state_dtype={"v": "float32"})
    rulec.array.load(other, file, parameters=True)
    for name in params:
        assert params[name].tobytes() == copies[name].tobytes()
        assert all(value.tobytes() == other.state(name)[key].tobytes() for key, value in ours.state(name).items())
    run = TorchRun(rulec.torch.AdamW, "bfloat16", state_dtype={"exp_avg_sq": torch.float32}).load(file)
    theirs = run.optimizer.state[run.params["bias"]]["exp_avg"]
    assert theirs.view(torch.uint16).numpy().tobytes() == ours.state("bias")["m"].tobytes()


def test_lists_and_single_arrays_have_places_for_names(tmp_path: Path) -> None:
    file = tmp_path / "run.safetensors"
    rulec.array.save(rulec.array.Optimizer("sgd", np.ones(2)), file, parameters=True)
    rulec.torch.load(rulec.torch.SGD([p := torch.nn.Parameter(torch.zeros(2))]), file, parameters=True)
    assert (p == 1).all()
    rulec.array.save(rulec.array.Optimizer("sgd", [np.ones(2), np.ones(3)]), file)
    assert [p.name for p in read(file).parameters] == ["0", "1"]


def test_axes_may_be_in_another_order(tmp_path: Path) -> None:
    file = tmp_path / "run.safetensors"
    ours, params = run_of("adamw")
    steps(ours, params, range(2))
    rulec.array.save(ours, file, parameters=True)
    turned = {"bias": np.zeros(5), "kernel": np.zeros((6, 4))}
    other = rulec.array.Optimizer("adamw", turned)
    rulec.array.load(other, file, axes={"kernel": (1, 0)}, parameters=True)
    assert np.array_equal(turned["kernel"], params["kernel"].T)
    assert np.array_equal(other.state("kernel")["v"], ours.state("kernel")["v"].T)


def test_what_does_not_belong_is_refused_and_nothing_changed(tmp_path: Path) -> None:
    file = tmp_path / "run.safetensors"
    ours, params = run_of("schedule_free_adamw")
    steps(ours, params, range(2))
    rulec.array.save(ours, file)
    before = {name: array.copy() for name, array in params.items()}
    with pytest.raises(StateMismatch, match="has no value of bias: it was saved without parameters=True"):
        rulec.array.load(ours, file, parameters=True)
    with pytest.raises(StateMismatch, match=r"^bias was updated by ScheduleFreeAdamW when .* and AdamW computes"):
        rulec.array.load(run_of("adamw")[0], file)
    with pytest.raises(StateMismatch, match="has kernel, which is no parameter here"):
        rulec.array.load(rulec.array.Optimizer("schedule_free_adamw", {"bias": np.ones(5)}), file)
    assert difference(params, before) == 0
    ours.eval()
    for act in (rulec.array.save, rulec.array.load):
        with pytest.raises(RulecError, match="where ScheduleFreeAdamW is evaluated: call train"):
            act(ours, file)
    nothing: Any = None
    with pytest.raises(RulecError, match=r"save takes an optimizer of rulec\.array, not a NoneType"):
        rulec.array.save(nothing, file)


def test_the_steps_of_a_group_come_back(tmp_path: Path) -> None:
    (before, params), (after, _) = run_of("schedule_free_adamw"), run_of("schedule_free_adamw")
    steps(before, params, range(3))
    rulec.array.save(before, tmp_path / "run.safetensors")
    rulec.array.load(after, tmp_path / "run.safetensors")
    assert float(after.state_dict()["counts"]["group"][0]) == 3
