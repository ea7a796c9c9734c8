"""What the manual says of the factors of a convolution's kernel is so, here and in pytorch_optimizer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import pytorch_optimizer
import torch

import rulec
from rulec.language.expr.text import expression_text
from tests.docs.rule_tables import FACTORED, factors

SHAPE = tuple(FACTORED["shape"])
RULES = [name for name in rulec.rules() if rulec.load(name).view.get("flatten") and not rulec.load(name).inputs]


def sides_here(name: str) -> list[int]:
    """The sides of the square states that a rule keeps first for the kernel, each once."""
    optimizer = rulec.array.Optimizer(name, [np.ones(SHAPE)], backend="numpy")
    optimizer.step([np.random.default_rng(0).standard_normal(SHAPE)])
    shapes = (x.shape for x in optimizer.state("0").values() if getattr(x, "ndim", 0) == 2)
    return list(dict.fromkeys(rows for rows, cols in shapes if rows == cols and rows > 1))


def sides_there(name: str) -> list[int]:
    """The sides of the square tensors that a class of pytorch_optimizer keeps for the kernel."""
    last = {"start_preconditioning_step": 1, "preconditioning_compute_steps": 1, "shape_interpretation": False}
    param = torch.nn.Parameter(torch.ones(SHAPE))
    optimizer = getattr(pytorch_optimizer, name)([param], **(last if name == "ScalableShampoo" else {}))
    for _ in range(2):
        param.grad = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
        optimizer.step()
    found = list(_squares(optimizer.state[param]))
    return found[: len(SHAPE)] if name != "Shampoo" else found[::2]


def _squares(state: Any) -> Any:
    """The sides of square matrices in a state, through its lists and objects."""
    if torch.is_tensor(state):
        if state.ndim >= 2 and len(set(state.shape[-2:])) == 1 and state.numel() == state.shape[-1] ** 2:
            yield state.shape[-1]
        return
    parts = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ()
    for part in (*parts, *([vars(state)] if hasattr(state, "statistics") else [])):
        yield from _squares(part)


@pytest.mark.parametrize("name", factors())
def test_factors_are_those_that_the_manual_names(name: str) -> None:
    row = factors()[name]
    assert sides_here(row.get("written", name)) == row["here"]
    assert ("theirs" in row) is not ("refuses" in row)
    if "class" in row:
        assert sides_there(row["class"]) == row["theirs"] != row["here"]


def test_dash_has_the_factors_of_the_rule() -> None:
    """pytorch_optimizer's, which joins all dimensions after the first."""
    assert FACTORED["as_here"] == ["dash"]
    assert sides_there("DASH")[:2] == sides_here("dash")


@pytest.mark.parametrize("name", FACTORED["shorter"])
def test_factor_of_the_shorter_side_is_that_of_the_first_dimension(name: str) -> None:
    assert sides_here(name) == [SHAPE[0]]


def test_every_rule_with_factors_of_a_flattened_kernel_is_named() -> None:
    """A rule has them where a state is square with as many rows as the flattened kernel has columns."""
    named = {*factors(), *FACTORED["as_here"], *FACTORED["shorter"]}
    found = set()
    for name in RULES:
        shapes = [state.shape for state in rulec.load(name).state.values() if state.shape]
        if any(expression_text(rows) == expression_text(cols) == "cols" for rows, cols in shapes):
            found.add(name)
    assert found == named
