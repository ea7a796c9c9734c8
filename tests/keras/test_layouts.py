"""A network in the layout of torch and in Keras' own layers: every matrix rule takes the same steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import rulec
from rulec.compiler.routing import Router
from rulec.keras import keras_axes, optimizer
from tests.layouts import SHAPES, arrays, as_torch, largest_difference, of_layouts, wide, with_heads

#: The rules that an optimizer of Keras takes. The others are evaluated elsewhere than they are trained.
RULES = [name for name in of_layouts() if not any(rule.evaluate for rule in Router(rulec.load(name)).rules)]

OTHERS = [name for name in RULES if name not in ("muon", "soap")]

#: Parameter -> the layer of Keras and its variable.
PATHS = {
    "conv": "conv/kernel", "dense_b": "dense/bias", "dense_w": "dense/kernel", "out": "out/kernel",
    "query": "query/kernel", "stack": "stack/kernel",
}  # fmt: skip


def model() -> Any:
    """Keras' layers with these parameters in float64."""
    x = keras.Input((2, 2, 3)), keras.Input((5,)), keras.Input((7, 2, 3)), keras.Input((7, 5)), keras.Input((3, 4))
    kinds = (
        layers.Conv2D(4, (2, 2), use_bias=False, name="conv", dtype="float64"),
        layers.Dense(8, name="dense", dtype="float64"),
        layers.EinsumDense("abcd,cde->abe", (None, 5), name="out", dtype="float64"),
        layers.EinsumDense("abc,cde->abde", (None, 2, 3), name="query", dtype="float64"),
        layers.EinsumDense("bei,eio->beo", (3, 6), name="stack", dtype="float64"),
    )
    return keras.Model(x, [layer(each) for layer, each in zip(kinds, x, strict=True)])


def in_float64() -> Any:
    """A context in which Keras' backend has float64."""
    if keras.backend.backend() != "jax":
        return nullcontext()
    import jax

    return jax.enable_x64(True)


def stepped(rule: Any, variables: Mapping[str, Any], axes: Any, grads: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The variables after steps with these gradients, all by name."""
    trainer = optimizer(rule, 0.01, axes=axes, tags={})
    for each in grads:
        tensors = [keras.ops.convert_to_tensor(each[name], "float64") for name in variables]
        trainer.apply(tensors, [*variables.values()])
    return {name: keras.ops.convert_to_numpy(variable) for name, variable in variables.items()}


def in_torch_s(rule: Any) -> dict[str, Any]:
    """The parameters after steps in the layout of torch; the layers of the stack are variables of their own."""

    def flat(seed: int) -> dict[str, Any]:
        tree = as_torch(arrays(seed))
        layers_of_stack = tree.pop("stack")
        return tree | {f"stack{i}": x for i, x in layers_of_stack.items()}

    variables = {name: keras.Variable(x, name=name, dtype="float64") for name, x in flat(0).items()}
    axes = {name: ("outputs", "inputs", "window", "window")[: x.ndim] for name, x in flat(0).items()}
    after = stepped(rule, variables, axes, [flat(1), flat(2), flat(3)])
    whole = np.stack([after.pop(f"stack{i}") for i in range(SHAPES["stack"][0])])
    return after | {"stack": whole}


def in_keras(rule: Any, axes: Any = None) -> dict[str, Any]:
    """The parameters after steps of Keras' layers, with their roles unless there are `axes`."""
    network = model()
    of_model = {variable.path: variable for variable in network.trainable_variables}
    variables = {name: of_model[path] for name, path in PATHS.items()}
    for name, x in with_heads(arrays(0)).items():
        variables[name].assign(x)
    grads = [with_heads(arrays(seed)) for seed in (1, 2, 3)]
    return stepped(rule, variables, axes or keras_axes(network), grads)


@pytest.mark.parametrize("name", ["muon", "soap", *(pytest.param(n, marks=pytest.mark.another) for n in OTHERS)])
def test_every_rule_takes_the_same_steps_in_both_layouts(name: str) -> None:
    with in_float64():
        assert largest_difference(in_torch_s(wide(name)), in_keras(wide(name))) <= 1e-12


def test_with_other_roles_the_layouts_differ() -> None:
    """The fault that the roles of layers mend, so that the test above can fail."""
    with in_float64():
        axes = {**keras_axes(model()), "dense/kernel": ("outputs", "inputs")}
        assert largest_difference(in_torch_s(wide("muon")), in_keras(wide("muon"), axes)) > 1e-3


def test_lora_that_is_enabled_after_a_step_asks_for_a_new_optimizer() -> None:
    network = keras.Sequential([keras.Input((6,)), layers.Dense(8), layers.Dense(3)])

    def stepped_by(trainer: Any) -> None:
        trainer.apply([keras.ops.ones_like(v.value) for v in network.trainable_variables], network.trainable_variables)

    first = optimizer("muon", 0.1, model=network)
    stepped_by(first)
    network.layers[0].enable_lora(2)
    with pytest.raises(ValueError, match=r"(?s)lora_kernel_a.*you should recreate a new optimizer"):
        stepped_by(first)
    before = [keras.ops.convert_to_numpy(v) + 0 for v in network.trainable_variables]
    stepped_by(optimizer("muon", 0.1, model=network))
    assert all(
        np.any(keras.ops.convert_to_numpy(v) != x) for v, x in zip(network.trainable_variables, before, strict=True)
    )
