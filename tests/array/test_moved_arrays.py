"""Arrays whose memory others would move between steps."""

from __future__ import annotations

import numpy as np
import pytest

import rulec
from rulec.errors import TensorError


def test_numpy_moves_no_parameter() -> None:
    """A reference count is no hindrance with `refcheck=False`, and the memory would be freed."""
    array = np.ones(1000)
    optimizer = rulec.array.Optimizer("sgd", {"w": array}, lr=0.5)
    optimizer.step({"w": np.ones(1000)})
    with pytest.raises(ValueError, match="cannot resize an array"):
        array.resize(2_000_000, refcheck=False)
    optimizer.step({"w": np.ones(1000)})
    assert np.array_equal(array, np.zeros(1000))


@pytest.mark.parametrize("name", ["step", "m", "v"])
def test_numpy_moves_no_state(name: str) -> None:
    optimizer = rulec.array.Optimizer("adam", {"w": np.ones(1000)}, lr=0.5)
    optimizer.step({"w": np.ones(1000)})
    with pytest.raises(ValueError, match="cannot resize this array"):
        optimizer.state("w")[name].resize(2_000_000, refcheck=False)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_parameter_with_another_shape_is_refused() -> None:
    array = np.ones((4, 6))
    optimizer = rulec.array.Optimizer("adafactor", {"w": array}, lr=0.5)
    optimizer.step({"w": np.ones((4, 6))})
    before = array.copy()
    array.shape = (6, 4)
    with pytest.raises(TensorError, match=r"parameter w has shape \(6, 4\) now, where its states have \(4, 6\)"):
        optimizer.step({"w": np.ones((6, 4))})
    assert np.array_equal(array.reshape(4, 6), before)
