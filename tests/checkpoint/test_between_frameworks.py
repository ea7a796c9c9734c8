"""A state saved in one framework goes on in another to the numbers of the run that was never interrupted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from safetensors.torch import load_file

import rulec
import rulec.jax
import rulec.torch
from rulec.errors import StateMismatch
from tests.checkpoint.runs import STEPS, JaxRun, TorchRun, difference, first_parameters, gradients, precision
from tests.library import single

#: In float32 the two sides round differently in every step; in float64 as well, and then this is a thousand ulps.
TOLERANCE = {"float64": 1e-12, "float32": 1e-5}


@dataclass(frozen=True)
class Case:
    """A rule with hyper-parameters as JAX takes them, and the torch class and keywords that mean the same.

    `oracle` says that torch has the class itself.
    """

    rule: str
    hyper: dict[str, Any] = field(default_factory=dict)
    kind: str = ""
    keywords: dict[str, Any] = field(default_factory=dict)
    oracle: bool = False
    everyday: bool = False

    @property
    def ours(self) -> Any:
        """The class of ours."""
        return getattr(rulec.torch, self.kind) if self.kind else rulec.torch.optimizer(in_float64(self.rule))

    def __str__(self) -> str:
        return self.rule


def in_float64(name: str) -> rulec.Rule:
    """A rule of the library; where it computes a part in bfloat16, which every library rounds otherwise, in float64."""
    rule = rulec.load(name)
    return rulec.parse(text.replace("bfloat16", "float64")) if "bfloat16" in (text := rule.to_yaml()) else rule


def both(**values: Any) -> dict[str, Any]:
    return {"hyper": values, "keywords": values}


CASES = (
    Case("adamw", {"lr": 0.01, "weight_decay": 0.1}, "AdamW", {"lr": 0.01, "weight_decay": 0.1}, True, True),
    Case("l2 >> nadam", {"lr": 0.01, "weight_decay": 0.1}, "NAdam", {"lr": 0.01, "weight_decay": 0.1}, True, True),
    Case("adafactor", {"lr": 0.01}, "Adafactor", {"lr": 0.01, "weight_decay": 0.0}, True),
    Case("prodigy", **both(lr=1.0), everyday=True),
    Case("schedule_free_adamw", **both(lr=0.01, warmup_steps=8), everyday=True),
    Case("momentum", {"lr": 0.01, "momentum": 0.8}, "SGD", {"lr": 0.01, "momentum": 0.8}, True),
    Case("sgd", {"lr": 0.01}, "SGD", {"lr": 0.01}, True),
    Case("adam", {"lr": 0.01}, "Adam", {"lr": 0.01}, True),
    Case("rprop", {"lr": 0.01}, "Rprop", {"lr": 0.01}, True),
    Case("lion", **both(lr=0.01)),
    Case("muon", **both(lr=0.01)),
    Case("novograd", **both(lr=0.01)),
    Case("soap", **both(lr=0.01)),
    Case("came", **both(lr=0.01)),
    Case("apollo", **both(lr=0.01)),
    Case("sm3", **both(lr=0.01)),
    Case("dadapt_adam", **both(lr=0.01)),
    Case("lookahead(adam)", **both(lr=0.01)),
    Case("transforms/noise >> sgd", **both(lr=0.01)),
)


def same_tensors(first: Path, second: Path) -> bool:
    """Whether two files have the same tensors, bit by bit; single numbers, which JAX keeps in float32, to its ulp."""
    one, other = load_file(first), load_file(second)
    numbers = {key for key in one if one[key].is_floating_point() and (one[key].dim() == 0 or key.startswith("group/"))}
    assert one.keys() == other.keys()
    assert all(one[key].dtype == other[key].dtype and torch.equal(one[key], other[key]) for key in one.keys() - numbers)
    return all(torch.allclose(one[key].double(), other[key].double(), rtol=2.0**-24, atol=0) for key in numbers)


def parameters(dtype: str) -> Iterator[object]:
    for case in CASES:
        marks = [] if case.everyday and dtype == "float64" else [pytest.mark.another]
        yield pytest.param(case, dtype, id=f"{case} {dtype}", marks=marks)


def straight(case: Case, dtype: str, steps: int) -> TorchRun:
    """The run that is never interrupted: by torch itself where it has the rule, else by ours."""
    kind = getattr(torch.optim, case.kind) if case.oracle else case.ours
    return TorchRun(kind, dtype, **case.keywords).steps(range(steps))


@pytest.mark.parametrize(("case", "dtype"), [*parameters("float64"), *parameters("float32")])
def test_a_run_goes_to_jax_and_back(case: Case, dtype: str, tmp_path: Path) -> None:
    there, back = tmp_path / "there.safetensors", tmp_path / "back.safetensors"
    with precision(dtype):
        TorchRun(case.ours, dtype, **case.keywords).steps(range(STEPS)).save(there)
        run = JaxRun(in_float64(case.rule), dtype, **case.hyper).load(there)
        run.steps(range(STEPS, 2 * STEPS)).save(back)
        assert difference(run.now(), straight(case, dtype, 2 * STEPS).now()) <= TOLERANCE[dtype]
        again = TorchRun(case.ours, dtype, **case.keywords).load(back).steps(range(2 * STEPS, 3 * STEPS))
        assert difference(again.now(), straight(case, dtype, 3 * STEPS).now()) <= TOLERANCE[dtype]


@pytest.mark.slow
def test_a_run_of_optax_goes_to_torch(tmp_path: Path) -> None:
    """The oracle is optax, which is never interrupted."""
    file, tx = tmp_path / "adamw.safetensors", optax.adamw(0.01, weight_decay=0.1)
    with precision("float64"):
        params: Any = {name: jnp.array(array) for name, array in first_parameters().items()}
        state = tx.init(params)
        for step in range(2 * STEPS):
            updates, state = tx.update(gradients(step), state, params)
            params = optax.apply_updates(params, updates)
        JaxRun("adamw", "float64", lr=0.01, weight_decay=0.1).steps(range(STEPS)).save(file)
        run = TorchRun(rulec.torch.AdamW, "float64", lr=0.01, weight_decay=0.1).load(file)
        run.steps(range(STEPS, 2 * STEPS))
    assert difference(run.now(), {name: np.asarray(p) for name, p in params.items()}) <= 1e-12


def test_every_bit_of_a_state_in_bfloat16_goes_over_and_back(tmp_path: Path) -> None:
    first, second = tmp_path / "first.safetensors", tmp_path / "second.safetensors"
    run = TorchRun(rulec.torch.AdamW, "bfloat16", lr=0.01, state_dtype={"exp_avg_sq": torch.float32}).steps(range(3))
    run.save(first)
    params = rulec.jax.load_params(first, {n: jnp.zeros(p.shape, jnp.bfloat16) for n, p in run.params.items()})
    state = rulec.jax.load(first, "adamw", params, state_dtype={"v": "float32"})
    for name, p in run.params.items():
        theirs = run.optimizer.state[p]
        for here, there in ((params[name], p.detach()), (state.m[name], theirs["exp_avg"])):
            assert here.dtype == jnp.bfloat16
            assert np.array_equal(np.asarray(here).view(np.uint16), there.view(torch.uint16).numpy())
        assert state.v[name].dtype == jnp.float32
        assert np.array_equal(np.asarray(state.v[name]), theirs["exp_avg_sq"].numpy())
    rulec.jax.save(second, "adamw", params, state, parameters=True)
    assert same_tensors(first, second)


@pytest.mark.slow
def test_a_state_takes_the_dtype_of_the_one_it_is_loaded_into(tmp_path: Path) -> None:
    file = tmp_path / "adamw.safetensors"
    run = TorchRun(rulec.torch.AdamW, "float32", lr=0.01).steps(range(3))
    run.save(file)
    narrow = TorchRun(rulec.torch.AdamW, "bfloat16", lr=0.01, state_dtype={"exp_avg": "float16"}).load(file)
    params = {n: jnp.zeros(p.shape, jnp.bfloat16) for n, p in run.params.items()}
    state = rulec.jax.load(file, "adamw", params, state_dtype={"m": "float16"})
    for name, p in run.params.items():
        theirs, ours = narrow.optimizer.state[narrow.params[name]], run.optimizer.state[p]
        assert (theirs["exp_avg"].dtype, theirs["exp_avg_sq"].dtype) == (torch.float16, torch.bfloat16)
        assert torch.equal(theirs["exp_avg"], ours["exp_avg"].half())
        assert (state.m[name].dtype, state.v[name].dtype) == (jnp.float16, jnp.bfloat16)
        assert np.array_equal(np.asarray(state.m[name]), ours["exp_avg"].half().numpy())


#: Decay that torch's classes add by a flag is a rule of its own in JAX.
FLAGS = (
    ("Adam", {"weight_decay": 0.1}, "l2 >> adam"),
    ("Adam", {"weight_decay": 0.1, "decoupled_weight_decay": True}, "adam + decay"),
    ("Adam", {"amsgrad": True}, "amsgrad"),
    ("SGD", {"momentum": 0.9, "nesterov": True}, "nesterov"),
    ("RMSprop", {"centered": True, "momentum": 0.9}, "rmsprop_centered_momentum"),
)


@pytest.mark.parametrize(
    ("kind", "flags", "rule"),
    [pytest.param(*row, marks=[pytest.mark.slow] if i != 1 else [], id=row[2]) for i, row in enumerate(FLAGS)],
)
def test_flags_of_torch_name_the_rule(kind: str, flags: dict[str, Any], rule: str, tmp_path: Path) -> None:
    file = tmp_path / "flags.safetensors"
    run = TorchRun(getattr(rulec.torch, kind), "float32", lr=0.01, **flags).steps(range(2))
    run.save(file)
    params = {n: jnp.asarray(p.detach().numpy()) for n, p in run.params.items()}
    state = rulec.jax.load(file, rule, params, tags={})
    assert int(state.count) == 2
    others = {other for _, _, other in FLAGS if other != rule} | {"adamw" if rule != "adam + decay" else "adam"}
    for other in sorted(others):
        with pytest.raises(StateMismatch, match=f"was updated by .*{kind} when .* computes something else"):
            rulec.jax.load(file, other, params)


@pytest.mark.another
@pytest.mark.parametrize("name", single())
def test_every_rule_of_the_library_goes_over_and_back(name: str, tmp_path: Path) -> None:
    """Every tensor that torch saves comes back from JAX as it was, bit by bit."""
    rule = rulec.load(name)
    rule = rule(*[rulec.load("adam")] * len(rule.wraps)) if rule.wraps else rule
    if rule.inputs:
        return  # it is given more than gradients
    first, second = tmp_path / "first.safetensors", tmp_path / "second.safetensors"
    run = TorchRun(rulec.torch.optimizer(rule), "float32").steps(range(2))
    run.save(first)
    params = {n: jax.numpy.asarray(p.detach().numpy()) for n, p in run.params.items()}
    state = rulec.jax.load(first, rule, params, tags={})
    rulec.jax.save(second, rule, params, state, parameters=True, tags={})
    assert same_tensors(first, second)
