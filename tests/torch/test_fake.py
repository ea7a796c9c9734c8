"""Optimizers of fake tensors: the states of real ones, without their memory."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from operator import rshift
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import rulec
from rulec.errors import TensorError
from rulec.torch import AdamW, optimizer

SHAPES = ((6, 8), (8, 6), (5,), (6, 8))

RULES = ["adamw", "apollo", "clip_by_global_norm >> adamw", "muon", "nadam", "novograd", "prodigy", "sm3", "soap"]


def parameters(shapes: Iterable[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.bfloat16) -> list[Any]:
    """Parameters with gradients."""
    made = [torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in shapes]
    for param in made:
        param.grad = torch.ones_like(param)
    return made


def described(made: Any, params: list[Any]) -> list[dict[str, Any]]:
    """Every state's shape, dtype and order in memory."""
    return [{k: (v.shape, v.dtype, v.stride()) for k, v in made.state[p].items() if k != "step"} for p in params]


@pytest.mark.parametrize("rule", RULES)
def test_states_are_those_of_real_tensors(rule: str) -> None:
    made = optimizer(reduce(rshift, map(rulec.load, rule.split(" >> "))))
    real = parameters()
    expected = made(real)
    expected.step()
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = parameters()
        given = made(fake)
        given.step()
        given.step()
    assert described(given, fake) == described(expected, real)
    assert [given.state[p]["step"].item() for p in fake if "step" in given.state[p]] == [2] * len(fake)
    large = [v for p in fake for v in given.state[p].values() if v.dim()]
    assert all(isinstance(v, FakeTensor) for v in large)


@pytest.mark.parametrize("rule", ["adamw", "apollo"])
def test_tensors_may_come_one_by_one_and_later(rule: str) -> None:
    """As those do that are updated as soon as their gradients are there."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        params = parameters()
        grads = [p.grad for p in params]
        made = optimizer(rule)(params)
        for _ in range(2):
            for chosen in range(len(params)):
                for i, p in enumerate(params):
                    p.grad = grads[i] if i == chosen else None
                made.step()
        made.add_param_group({"params": parameters([(6, 6)])})
        made.step()
    assert [made.state[p]["step"].item() for p in params] == [2, 2, 2, 3]


def test_without_the_mode_states_are_fake_too() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        params = parameters()
    made = optimizer("apollo")(params)
    made.step()
    assert isinstance(made.state[params[0]]["m"], FakeTensor)


def test_the_memory_of_fake_tensors_is_never_asked_for(recwarn: pytest.WarningsRecorder) -> None:
    with FakeTensorMode():
        AdamW(parameters(dtype=torch.float32)).step()
    assert [str(w.message) for w in recwarn if "data pointer" in str(w.message)] == []


def test_some_fake_parameters_are_refused() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = parameters()
    with pytest.raises(TensorError, match="some parameters are fake tensors and others are not"):
        AdamW([*fake, *parameters()]).step()
