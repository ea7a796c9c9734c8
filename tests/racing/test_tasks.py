"""The tasks: their gradients against finite differences, and what a user's own task must be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rulec.errors import RulecError
from rulec.racing.task import Task, stacked
from rulec.racing.tasks import task_of
from rulec.racing.tasks.char import CLASSES, Characters, text
from rulec.racing.tasks.digits import HandwrittenDigits
from rulec.racing.tasks.surfaces import Rosenbrock, Valley
from rulec.racing.tasks.user import UserTask

SEEDS = (0, 3)


@pytest.mark.parametrize(
    "make", [lambda: HandwrittenDigits((64, 6, 5, 10)), lambda: Characters(8), Rosenbrock, Valley],
    ids=["digits", "char", "rosenbrock", "valley"],
)  # fmt: skip
def test_gradients_are_those_of_the_losses(make: Callable[[], Task]) -> None:
    task, rng = make(), np.random.default_rng(0)
    params = {name: a.astype(np.float64) for name, a in stacked(task, 2, SEEDS).items()}
    for array in params.values():
        array += 0.05 * rng.normal(size=array.shape)
    grads = task.gradients(params, 7, SEEDS)[1]
    assert grads.keys() == params.keys()
    for name, grad in grads.items():
        assert grad.shape == params[name].shape
        direction, step = rng.normal(size=grad.shape), 1e-6
        ends = []
        for side in (step, -step):
            moved = {**params, name: params[name] + side * direction}
            ends.append(task.gradients(moved, 7, SEEDS)[0])
        slope = (grad * direction).reshape(2, len(SEEDS), -1).sum(axis=-1)
        np.testing.assert_allclose(slope, (ends[0] - ends[1]) / (2 * step), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("name", ["digits", "char"])
def test_seeds_choose_weights_and_data_and_steps_choose_data(name: str) -> None:
    task = task_of(name)
    params = stacked(task, 1, (0,))
    same = task.gradients(params, 1, (0,))[0]
    np.testing.assert_array_equal(same, task.gradients(params, 1, (0,))[0])
    assert same != task.gradients(params, 2, (0,))[0]
    assert same != task.gradients(params, 1, (1,))[0]
    assert any((a != b).any() for a, b in zip(task.initial(0).values(), task.initial(1).values(), strict=True))


def test_digits_are_drawn_once_an_epoch_and_never_from_the_test() -> None:
    task = HandwrittenDigits()
    epoch = np.concatenate([task._rows(0, step) for step in range(21)])
    assert len({*epoch.tolist()}) == 21 * 64
    assert epoch.max() < 1797 - 449


def test_characters_are_those_of_the_sources() -> None:
    codes = text()
    assert len(codes) > 200_000
    assert 0 <= codes.min() <= codes.max() == CLASSES - 1
    assert "class ArgumentParser" in "".join(chr(code + 32) for code in codes[:200_000])


def bowl(seed: int) -> tuple[dict[str, np.ndarray[Any, Any]], Callable[..., Any], Callable[..., float]]:
    def loss_and_grad(params: Any, step: int, seed: int) -> Any:
        return 0.5 * float((params["x"] ** 2).sum()) + step + 100 * seed, {"x": params["x"]}

    return {"x": np.array([1.0, 2.0]) + seed}, loss_and_grad, lambda params: float(params["x"][0])


def test_a_users_task_runs_for_each_run() -> None:
    task = UserTask(bowl, "bowl")
    params = stacked(task, 2, (0, 1))
    losses, grads = task.gradients(params, 3, (0, 1))
    np.testing.assert_array_equal(losses, [[5.5, 109.5]] * 2)
    np.testing.assert_array_equal(grads["x"], params["x"])
    np.testing.assert_array_equal(task.measures(params, (0, 1))["held out"], [[1, 2]] * 2)


X = {"x": np.ones(2)}


@pytest.mark.parametrize(
    ("result", "sentence"),
    [
        (X, "must return (params, loss_and_grad)"),
        (({"x": np.ones(2, int)}, len), "the parameter x of the task t must be a NumPy array in float32 or float64"),
        ((X, lambda *_: 1.0), "loss_and_grad of t must return (loss, grads), not a float"),
        ((X, lambda *_: (None, X)), "loss_and_grad of t must give a number, not a NoneType"),
        ((X, lambda *_: (1.0, {"y": 1})), "must give gradients of x, not y"),
        ((X, lambda *_: (1.0, {"x": np.ones(3)})), "the gradient of x of t has shape (3,), its parameter (2,)"),
    ],
)
def test_a_users_mistake_is_one_sentence(result: Any, sentence: str) -> None:
    task = UserTask(lambda: result, "t")
    with pytest.raises(RulecError) as raised:
        task.gradients(stacked(task, 1, (0,)), 0, (0,))
    assert sentence in str(raised.value)
