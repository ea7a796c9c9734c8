"""States that a rule reads and never changes, at every level."""

from __future__ import annotations

import numpy as np
import pytest

import rulec
from rulec.array import Optimizer


@pytest.mark.parametrize(
    ("level", "backend"),
    [
        ("element", "cpu"), ("row", "cpu"), ("col", "numpy"), ("matrix", "numpy"), ("tensor", "cpu"),
        ("group", "numpy"), ("model", "numpy"),
    ],
)  # fmt: skip
def test_a_state_that_is_never_changed_keeps_its_first_value(level: str, backend: str) -> None:
    text = f"name: Scaled\nhyper: {{lr: 0.5}}\nstate: {{w: {{init: 3, per: {level}}}}}\nstep: |\n  direction = g*w\n"
    params = [np.zeros((2, 3)), np.zeros((3, 2))]
    opt = Optimizer(rulec.parse(text), params, backend)
    opt.step([np.ones((2, 3)), None])
    opt.step([np.ones((2, 3)), np.ones((3, 2))])
    np.testing.assert_array_equal(params[0], -3.0)
    np.testing.assert_array_equal(params[1], -1.5)
