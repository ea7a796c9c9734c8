"""How large gradients may be in float32: a second moment overflows where it is itself too large, and not before.

float32 does not hold the square of 2e19, and does hold a thousandth of it. The oracle is the same rule in float64.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import rulec
import rulec.torch
from rulec.array import Optimizer
from rulec.language.expr.node import Op, const, names_in, walk
from tests.torch.twins import difference

LARGE = 2e19

#: Rules whose second moment is a mean of squares, of an element's or of a tensor's.
MEANS = (
    "adabelief", "adadelta", "adam", "adam_mini", "adamc", "adamw", "adan", "adapnm", "ademamix", "amsgrad",
    "cautious_adamw", "diffgrad", "grams", "lamb", "laprop", "madgrad", "nadam", "optimistic_adam", "prodigy", "qhadam",
    "radam", "rmsprop", "rmsprop_centered", "rmsprop_centered_momentum", "rmsprop_momentum", "schedule_free_adamw",
    "simplified_ademamix", "stable_adamw", "yogi",
)  # fmt: skip


def moved(name: str, dtype: str) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """How far three steps with large gradients move a matrix."""
    start = np.linspace(1, 2, 6).reshape(2, 3)
    params = [start.astype(dtype)]
    optimizer = Optimizer(rulec.load(name), params, backend="numpy")
    for step in range(3):
        optimizer.step([(LARGE * (1 - 0.2 * start + 0.1 * step)).astype(dtype)])
    return params[0] - start.astype(dtype).astype(np.float64)


@pytest.mark.parametrize("name", MEANS)
def test_large_gradients_move_float32_as_float64(name: str) -> None:
    with np.errstate(over="ignore"):
        narrow, wide = moved(name, "float32"), moved(name, "float64")
    assert np.abs(wide).max() > 1e-7
    np.testing.assert_allclose(narrow, wide, rtol=0, atol=4 * 2.0**-23 * max(1.0, float(np.abs(wide).max())))


@pytest.mark.parametrize("name", rulec.rules(wrappers=False))
def test_no_square_is_formed_before_a_number_that_multiplies_it(name: str) -> None:
    rule = rulec.load(name).standalone()
    numbers = {"t", *rule.all_hyper}
    for value in walk(rule.expressions):
        if value.op is Op.MUL and value.args[1].op is Op.POW and value.args[1].args[1] is const(2):
            factor, square = value.args
            assert not {*names_in([factor])} <= numbers or {*names_in([square])} <= numbers, value


@pytest.mark.peer
@pytest.mark.parametrize("kind", ["Adam", "AdamW", "RMSprop", "Adadelta"])
def test_large_gradients_move_as_in_torch(kind: str) -> None:
    found = []
    for library in (rulec.torch, torch.optim):
        params = [torch.nn.Parameter(torch.linspace(1, 2, 20))]
        optimizer = getattr(library, kind)(params)
        for step in range(3):
            params[0].grad = LARGE * torch.linspace(-1, 1, 20) * (1 + 0.1 * step)
            optimizer.step()
        found.append(params)
    assert difference(*found) <= 4
    assert not torch.equal(found[0][0], torch.linspace(1, 2, 20))
