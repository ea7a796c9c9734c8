"""The roles of axes by the classes of layers: torch's layers with the kernels as rules see them give Keras' results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import torch
from keras import layers
from torch import Tensor, nn
from torch.nn import functional as F

from rulec.errors import TensorError
from rulec.functional.axes import Orientation
from rulec.keras import keras_axes, keras_tags
from rulec.keras.axes import entry_of
from rulec.keras.trained import Trained


def model_of(layer: Any, *shape: int) -> Any:
    keras.utils.set_random_seed(2)
    return keras.Sequential([keras.Input(shape), layer])


def seen(model: Any, name: str) -> list[Tensor]:
    """The kernel of this name as rules see it, as torch's tensors."""
    variable = next(v for v in model.trainable_variables if v.name == name)
    orientation = Orientation(tuple(variable.shape), keras_axes(model)[variable.path])
    trained = Trained(variable, orientation, frozenset(), 0)
    return [torch.tensor(keras.ops.convert_to_numpy(each)) for each in trained.seen(variable.value)]


def moved(x: Tensor) -> Tensor:
    """Channels first, as torch has them."""
    return x.movedim(-1, 1)


def back(x: Tensor) -> Tensor:
    return x.movedim(1, -1)


Torch = Callable[[Any, Tensor], Tensor]


def _conv(function: Any, **options: Any) -> Torch:
    return lambda model, x: back(function(moved(x), seen(model, "kernel")[0], **options))


def _depthwise(model: Any, x: Tensor) -> Tensor:
    # torch's kernels of depthwise convolutions have an axis of one input.
    return back(F.conv2d(moved(x), seen(model, "kernel")[0][:, None], groups=x.shape[-1]))


def _transposed(model: Any, x: Tensor) -> Tensor:
    # torch's transposed convolutions have their inputs first.
    return back(F.conv_transpose2d(moved(x), seen(model, "kernel")[0].transpose(0, 1)))


def _heads(model: Any, x: Tensor) -> Tensor:
    return _dense(model, x).reshape(-1, 6, 2, 3)


def _of_heads(model: Any, x: Tensor) -> Tensor:
    return _dense(model, x.flatten(2))


def _separable(model: Any, x: Tensor) -> Tensor:
    deep = F.conv2d(moved(x), seen(model, "depthwise_kernel")[0][:, None], groups=x.shape[-1])
    return back(F.conv2d(deep, seen(model, "pointwise_kernel")[0]))


def _recurrent(kind: Any) -> Torch:
    def run(model: Any, x: Tensor) -> Tensor:
        (of_inputs,), (of_states,) = seen(model, "kernel"), seen(model, "recurrent_kernel")
        cell = kind(of_inputs.shape[1], of_states.shape[1], bias=False, batch_first=True)
        cell.weight_ih_l0.data, cell.weight_hh_l0.data = of_inputs, of_states
        return cell(x)[0][:, -1]  # type: ignore[no-any-return]

    return run


def _dense(model: Any, x: Tensor) -> Tensor:
    return F.linear(x, seen(model, "kernel")[0])


def _experts(model: Any, x: Tensor) -> Tensor:
    return torch.stack([F.linear(x[:, e], each) for e, each in enumerate(seen(model, "kernel"))], dim=1)


CASES: dict[str, tuple[Any, tuple[int, ...], Torch]] = {
    "dense": (lambda: layers.Dense(5, use_bias=False), (4,), _dense),
    "heads": (lambda: layers.EinsumDense("abc,cde->abde", (None, 2, 3)), (6, 4), _heads),
    "of_heads": (lambda: layers.EinsumDense("abcd,cde->abe", (None, 5)), (6, 2, 3), _of_heads),
    "experts": (lambda: layers.EinsumDense("bei,eio->beo", (3, 5)), (3, 4), _experts),
    "conv1d": (lambda: layers.Conv1D(5, 3, use_bias=False), (7, 4), _conv(F.conv1d)),
    "conv2d": (lambda: layers.Conv2D(5, (3, 2), use_bias=False), (7, 6, 4), _conv(F.conv2d)),
    "conv3d": (lambda: layers.Conv3D(5, (3, 2, 1), use_bias=False), (5, 4, 3, 2), _conv(F.conv3d)),
    "grouped": (lambda: layers.Conv2D(6, (3, 2), groups=2, use_bias=False), (7, 6, 4), _conv(F.conv2d, groups=2)),
    "depthwise": (
        lambda: layers.DepthwiseConv2D((3, 2), depth_multiplier=2, use_bias=False), (7, 6, 4),
        _depthwise,
    ),
    "transposed": (lambda: layers.Conv2DTranspose(5, (3, 2), use_bias=False), (7, 6, 4), _transposed),
    "separable": (lambda: layers.SeparableConv2D(5, (3, 2), depth_multiplier=2, use_bias=False), (7, 6, 4), _separable),
    "lstm": (lambda: layers.LSTM(5, use_bias=False, unit_forget_bias=False), (6, 4), _recurrent(nn.LSTM)),
    "rnn": (lambda: layers.SimpleRNN(5, use_bias=False), (6, 4), _recurrent(nn.RNN)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_kernels_are_seen_as_torch_has_them(name: str) -> None:
    make, shape, theirs = CASES[name]
    model = model_of(make(), *shape)
    x = np.random.default_rng(0).normal(size=(2, *shape)).astype(np.float32)
    ours = torch.tensor(keras.ops.convert_to_numpy(model(x)))
    torch.testing.assert_close(theirs(model, torch.tensor(x)), ours, rtol=1e-4, atol=1e-5)


def test_gates_of_gru_are_rows_and_its_two_biases_are_vectors() -> None:
    model = model_of(layers.GRU(5), 6, 4)
    assert [tuple(part.shape) for part in seen(model, "kernel")] == [(15, 4)]
    assert [tuple(part.shape) for part in seen(model, "bias")] == [(15,), (15,)]


def test_attention_has_its_heads_joined() -> None:
    x = keras.Input((6, 8))
    model = keras.Model(x, layers.MultiHeadAttention(2, 3, name="mha")(x, x))
    roles = {path.split("mha/")[1]: found for path, found in keras_axes(model).items()}
    assert roles["query/kernel"] == ("inputs", "outputs", "outputs")
    assert roles["attention_output/kernel"] == ("inputs", "inputs", "outputs")
    assert roles["key/bias"] == ("outputs", "outputs")


def test_embeddings_are_as_in_torch() -> None:
    model = model_of(layers.Embedding(7, 3), 5)
    assert [tuple(part.shape) for part in seen(model, "embeddings")] == [(7, 3)]


@pytest.mark.parametrize("roles", [("inputs", "outputs"), ("batch", "outputs"), ("outputs", "inputs", "window")])
def test_arrays_come_back_as_they_were(roles: tuple[str, ...]) -> None:
    array = np.arange(24.0).reshape((4, 6) if len(roles) == 2 else (2, 3, 4))
    trained = Trained(keras.Variable(array), Orientation(array.shape, roles), frozenset(), 0)
    assert np.array_equal(keras.ops.convert_to_numpy(trained.back(trained.seen(array))), array)


class Own(layers.Layer):  # type: ignore[misc]
    """A layer that is none of Keras' own."""

    def build(self, shape: Any) -> None:
        self.table = self.add_weight(shape=(shape[-1], 2), name="table")

    def call(self, x: Any) -> Any:
        return keras.ops.matmul(x, self.table)


def test_layers_of_others_are_not_guessed() -> None:
    assert keras_axes(model_of(Own(), 4)) == {}


def test_tags_name_embeddings_kernels_and_the_output() -> None:
    inputs = keras.Input((6,))
    x = layers.Embedding(9, 4, name="words")(inputs)
    x = layers.LayerNormalization(name="norm")(layers.Conv1D(4, 3, name="conv")(x))
    x = layers.Dense(3, name="last")(layers.Dense(4, name="first")(layers.Flatten()(x)))
    tags = keras_tags(keras.Model(inputs, x))
    of = {path: words for path, words in tags.items() if path.endswith(("kernel", "embeddings"))}
    assert of == {"words/embeddings": ("embedding",), "conv/kernel": ("kernel",), "last/kernel": ("head",)}
    assert tags["norm/gamma"] == ("norm",)


def test_models_without_variables_are_refused() -> None:
    with pytest.raises(TensorError, match="has no variables yet: call it on data"):
        keras_axes(keras.Sequential([layers.Dense(3)]))


def test_paths_patterns_and_places_name_variables() -> None:
    table = {"model/dense/kernel": ("inputs",), "*/bias": ("outputs",)}
    assert entry_of(table, "model/dense/kernel", 0) == ("inputs",)
    assert entry_of(table, "dense/kernel", 0) == ("inputs",)  # of a loaded model
    assert entry_of(table, "model/dense/bias", 1) == ("outputs",)
    assert entry_of(table, "other_dense/kernel", 0) is None
    assert entry_of({"a/k": ("x",), "b/k": ("y",)}, "k", 0) is None
    assert entry_of([("x",), ("y",)], "any", 1) == ("y",)
