"""The tasks: their gradients against finite differences, and what a user's own task must be."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import rosen, rosen_der

from rulec.errors import RulecError
from rulec.tools.display import path
from rulec.tools.race.task import Task, stacked
from rulec.tools.race.tasks import task_of
from rulec.tools.race.tasks.char import CLASSES, Characters, text
from rulec.tools.race.tasks.digits import HandwrittenDigits
from rulec.tools.race.tasks.surfaces import narrow_valley, rastrigin, rosenbrock
from rulec.tools.race.tasks.textures import Textures, images, patches
from rulec.tools.race.tasks.user import UserTask

SEEDS = (0, 3)


#: Small models of the tasks.
SMALL: dict[str, Callable[[], Task]] = {
    "digits": lambda: HandwrittenDigits((64, 6, 5, 10)), "char": lambda: Characters(8),
    "cifar-like": lambda: Textures((3, 4), 5), "rosenbrock": rosenbrock, "rastrigin": rastrigin,
    "valley": narrow_valley,
}  # fmt: skip


@pytest.mark.parametrize("make", SMALL.values(), ids=SMALL)
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


@pytest.mark.parametrize("name", ["digits", "char", "cifar-like"])
def test_seeds_choose_weights_and_data_and_steps_choose_data(name: str) -> None:
    task = task_of(name)
    params = stacked(task, 1, (0,))
    same = task.gradients(params, 1, (0,))[0]
    np.testing.assert_array_equal(same, task.gradients(params, 1, (0,))[0])
    assert same != task.gradients(params, 2, (0,))[0]
    assert same != task.gradients(params, 1, (1,))[0]
    assert any((a != b).any() for a, b in zip(task.initial(0).values(), task.initial(1).values(), strict=True))


def test_surfaces_are_those_of_the_literature() -> None:
    """SciPy's Rosenbrock function, and Rastrigin's sum by hand; both are 0 at their minimum."""
    points = np.random.default_rng(0).uniform(-2, 2, (5, 2))
    np.testing.assert_allclose(path.ROSENBROCK.value(points), [rosen(point) for point in points], rtol=1e-13)
    np.testing.assert_allclose(path.ROSENBROCK.gradient(points), [rosen_der(point) for point in points], rtol=1e-12)
    by_hand = [20 + sum(x * x - 10 * math.cos(2 * math.pi * x) for x in point) for point in points]
    np.testing.assert_allclose(path.RASTRIGIN.value(points), by_hand, rtol=1e-12)
    for each in (path.ROSENBROCK, path.RASTRIGIN, path.VALLEY):
        assert each.value(np.array(each.minimum)) == 0


def test_a_convolution_is_that_of_torch() -> None:
    rng = np.random.default_rng(0)
    values, kernel = rng.normal(size=(2, 16, 16, 3)), rng.normal(size=(27, 5))
    theirs = torch.nn.functional.conv2d(
        torch.from_numpy(values).permute(0, 3, 1, 2), torch.from_numpy(kernel.reshape(3, 3, 3, 5)).permute(3, 2, 0, 1),
        stride=2, padding=1,
    )  # fmt: skip
    np.testing.assert_allclose(patches(values) @ kernel, theirs.permute(0, 2, 3, 1), rtol=1e-12, atol=1e-12)


def test_textures_are_balanced_and_no_pixel_tells_them_apart() -> None:
    pixels, labels = images(2000, 0)
    assert np.bincount(labels).min() > 150
    means = np.array([pixels[labels == label].mean(axis=0) for label in range(10)])
    assert np.abs(means).max() < 5 / np.sqrt(150) * pixels.std()


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
