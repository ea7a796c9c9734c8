"""Histories without copies: entries change their arrays, and every name has the value that it would have by copies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rulec
from rulec.compiler.memory import ringed
from rulec.compiler.reference import ReferenceOptimizer
from rulec.errors import TensorError

TEXT = """
name: TwoHistories
hyper: {lr: 0.1}
state: {s: {history: 3}, d: {history: 2}, m: 0}
step: |
  m = 0.5*m + s[2] + 0.1*d[1]
  s = g
  d = s[0] - s[1]
  direction = m + s[0]
"""

REDUCING = TEXT.replace("direction = m + s[0]", "direction = m/(1 + norm(s[1])) + s[0]")


def gradients(shapes: list[tuple[int, ...]], steps: int) -> list[list[np.ndarray[Any, Any]]]:
    rng = np.random.default_rng(0)
    return [[rng.normal(size=shape) for shape in shapes] for _ in range(steps)]


def test_moves_are_left_out() -> None:
    program, rings = ringed(rulec.compile(rulec.parse(TEXT)))
    assert rings == (("d_0", "d_1"), ("s_0", "s_1", "s_2"))
    assert [store.buffer for store in program.stages[-1].stores] == ["s_2", "d_1", "m", "p"]
    plain = rulec.compile(rulec.load("adam"))
    assert ringed(plain) == (plain, ())


@pytest.mark.parametrize("text", [TEXT, REDUCING], ids=["elementwise", "reducing"])
@pytest.mark.parametrize("backend", ["numpy", "cpu"])
def test_every_entry_is_the_reference_s(text: str, backend: str) -> None:
    shapes: list[tuple[int, ...]] = [(3,), (2, 2)]
    params = [np.ones(shape) for shape in shapes]
    rule = rulec.parse(text)
    optimizer, reference = rulec.array.Optimizer(rule, params, backend), ReferenceOptimizer(rule, params)
    for step, grads in enumerate(gradients(shapes, 14)):
        some: list[Any] = [grads[0], None if step in (3, 4, 9) else grads[1]]  # their histories turn apart
        optimizer.step(some)
        reference.step(some)
        for i, name in enumerate(optimizer.names):
            for key, value in reference.state(i).items():
                np.testing.assert_allclose(optimizer.state(name)[key], np.reshape(value, shapes[i]), rtol=1e-13)
        np.testing.assert_allclose(params[1], reference.params[1], rtol=1e-13)


def test_arrays_are_kept_and_no_entry_is_copied() -> None:
    params = [np.ones(4)]
    optimizer = rulec.array.Optimizer(rulec.parse(TEXT), params, "numpy")
    optimizer.step([np.ones(4)])
    (name,) = optimizer.names
    before = {key: optimizer.state(name)[key] for key in ("s_0", "s_1", "s_2")}
    optimizer.step([np.ones(4)])
    after = optimizer.state(name)
    assert after["s_1"] is before["s_0"]
    assert after["s_2"] is before["s_1"]
    assert after["s_0"] is before["s_2"]


def test_a_run_goes_on_from_its_states(tmp_path: Any) -> None:
    ends = []
    for middle in (0, 4, 5):
        params = [np.ones(3)]
        optimizer = rulec.array.Optimizer(rulec.parse(TEXT), params, "numpy")
        for step, grads in enumerate(gradients([(3,)], 9)):
            if step == middle and middle:
                saved = optimizer.state_dict()
                optimizer = rulec.array.Optimizer(rulec.parse(TEXT), params, "numpy")
                optimizer.load_state_dict(saved)
            optimizer.step(grads)
        ends.append(params[0])
    assert np.array_equal(ends[0], ends[1])
    assert np.array_equal(ends[0], ends[2])


@pytest.mark.parametrize("storage", ["bfloat16", "int8"])
def test_small_states_turn_with_their_scales(storage: str) -> None:
    params, plain = [np.ones(8192, np.float32)], [np.ones(8192, np.float32)]
    rule = rulec.parse("name: R\nstate: {s: {history: 3}}\nstep: |\n  old = s[2]\n  s = g\n  direction = old\n")
    optimizer = rulec.array.Optimizer(rule, params, "cpu", state_dtype=storage)
    exact = rulec.array.Optimizer(rule, plain, "cpu")
    for grads in gradients([(8192,)], 5):
        optimizer.step([g.astype(np.float32) for g in grads])
        exact.step([g.astype(np.float32) for g in grads])
    assert np.abs(params[0] - plain[0]).max() < 1e-3 * 0.1


def test_partial_steps_roll_back_by_name() -> None:
    params = {"a": np.ones(2), "b": np.ones(2)}
    optimizer = rulec.array.Optimizer(rulec.parse(TEXT), params, "numpy")
    for _ in range(2):
        optimizer.step({"a": np.ones(2), "b": np.ones(2)})
    before = {key: np.copy(value) for key, value in optimizer.state("a").items()}
    with pytest.raises(TensorError), optimizer.partial(journal=True):
        optimizer.update("a", np.full(2, 5.0)), optimizer.update("b", np.ones(3))
    optimizer.rollback()
    assert all(np.array_equal(before[key], value) for key, value in optimizer.state("a").items())
