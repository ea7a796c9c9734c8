"""What MLX's own tests hold of its optimizers, of the classes of rulec.mlx in their place."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")

import mlx.optimizers as optim  # noqa: E402
from mlx.utils import tree_flatten, tree_map  # noqa: E402

import rulec.mlx  # noqa: E402
from rulec.mlx.entries import CLASSES as NAMES  # noqa: E402
from rulec.mlx.entries import FORMS  # noqa: E402

CLASSES = sorted([*NAMES, *FORMS])

#: Without a momentum ours has no state, where MLX has one of zeros.
MORE = {"SGD": {"momentum": 0.9}}


def params(dtype: Any = mx.float32) -> dict[str, Any]:
    return {"first": [mx.zeros((10,), dtype), mx.zeros((1,), dtype)], "second": (mx.zeros((2, 3), dtype),)}


def ones(tree: Any) -> Any:
    return tree_map(mx.ones_like, tree)


def shapes(tree: Any) -> list[tuple[str, tuple[int, ...], Any]]:
    return [(path, array.shape, array.dtype) for path, array in tree_flatten(tree)]


def test_there_is_a_class_for_each_of_mlx_and_all_else_is_its_own() -> None:
    theirs = {n: x for n, x in vars(optim).items() if str(getattr(x, "__module__", "")).startswith("mlx.optimizers")}
    kinds = {name for name, kind in theirs.items() if isinstance(kind, type) and issubclass(kind, optim.Optimizer)}
    assert kinds - {"Optimizer", "MultiOptimizer"} == {*CLASSES}
    assert all(getattr(rulec.mlx, name) is theirs[name] for name in theirs.keys() - {*CLASSES})


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_updates_and_states_have_shapes_and_dtypes_of_parameters(name: str, dtype: str) -> None:
    before = params(getattr(mx, dtype))
    optimizer, theirs = (getattr(package, name)(0.1, **MORE.get(name, {})) for package in (rulec.mlx, optim))
    after = optimizer.apply_gradients(ones(before), before)
    theirs.apply_gradients(ones(before), before)
    assert shapes(after) == shapes(before)
    assert type(after["second"]) is tuple
    assert sorted(map(repr, shapes(optimizer.state))) == sorted(map(repr, shapes(theirs.state)))


@pytest.mark.parametrize("name", CLASSES)
def test_states_begin_as_mlx_begins_them(name: str) -> None:
    ours, theirs = (getattr(package, name)(0.1, **MORE.get(name, {})) for package in (rulec.mlx, optim))
    ours.init(params())
    theirs.init(params())
    found, wanted = dict(tree_flatten(ours.state)), dict(tree_flatten(theirs.state))
    assert found.keys() == wanted.keys()
    for path, array in wanted.items():
        assert np.array_equal(found[path], array), path


def test_parameters_without_gradients_are_left_out() -> None:
    before = params()
    gradients = {"first": ones(before["first"])}
    assert shapes(rulec.mlx.Adam(0.1).apply_gradients(gradients, before)) == shapes(gradients)
    assert rulec.mlx.Adam(0.1).apply_gradients({"first": []}, before) == {"first": []}


def test_a_rate_that_changes_between_compiled_calls() -> None:
    optimizer = rulec.mlx.SGD(1.0)
    weights = {"w": mx.ones((5, 5))}
    optimizer.init(weights)

    @partial(mx.compile, inputs=optimizer.state)
    def update(gradients: Any) -> Any:
        return optimizer.apply_gradients(gradients, weights)

    assert np.array_equal(update(ones(weights))["w"], np.zeros((5, 5)))
    optimizer.learning_rate = 2.0
    assert np.array_equal(update(ones(weights))["w"], np.full((5, 5), -1.0))


@pytest.mark.parametrize("name", CLASSES)
def test_a_schedule_in_a_compiled_step(name: str) -> None:
    optimizer = getattr(rulec.mlx, name)(optim.exponential_decay(0.1, 0.5))
    weights = {"w": mx.ones((3,))}
    optimizer.init(weights)

    @partial(mx.compile, inputs=optimizer.state, outputs=optimizer.state)
    def update(gradients: Any) -> Any:
        return optimizer.apply_gradients(gradients, weights)

    for step in range(4):
        update(ones(weights))
        assert optimizer.learning_rate.item() == pytest.approx(0.1 * 0.5**step, rel=1e-6)
    assert optimizer.step.item() == 4


def test_classes_are_known_by_their_names_and_signatures() -> None:
    for name in CLASSES:
        assert repr(getattr(rulec.mlx, name)) == f"<class 'rulec.mlx.{name}'>"
        assert inspect.signature(getattr(rulec.mlx, name)) == inspect.signature(getattr(optim, name))
    assert repr(rulec.mlx.LAMB) == "<class 'rulec.mlx.LAMB'>"
    assert {*CLASSES, "LAMB"} <= {*dir(rulec.mlx)}


def test_no_parameters() -> None:
    optimizer = rulec.mlx.Adam(0.1)
    optimizer.init({})
    assert optimizer.apply_gradients({}, {}) == {}
    assert optimizer.step.item() == 1


def test_clipped_gradients() -> None:
    clipped, norm = optim.clip_grad_norm({"w": mx.array([3.0, 4.0])}, 1.0)
    after = rulec.mlx.SGD(1.0).apply_gradients(clipped, {"w": mx.zeros(2)})
    assert norm.item() == 5
    np.testing.assert_allclose(after["w"], [-0.6, -0.8], rtol=1e-6)
