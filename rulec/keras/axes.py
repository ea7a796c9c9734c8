"""The roles of the axes of a Keras model's variables, and their tags, by the classes of the layers.

A kernel of Keras lies with its inputs first. Rules see rows of outputs and columns of inputs, as torch has them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

import keras
from keras import layers

from rulec.errors import TensorError
from rulec.runtime.roles import named_roles

#: The role of each axis of a variable, as `rulec.functional.axes` has them.
Roles = tuple[str, ...]

#: Words for the variables of a model: by paths, patterns of paths or ends of paths, or in the order of the variables.
Table = Mapping[str, Collection[str]] | Sequence[Collection[str]]


_CONVOLUTIONS = (layers.Conv1D, layers.Conv2D, layers.Conv3D)
_TRANSPOSED = (layers.Conv1DTranspose, layers.Conv2DTranspose, layers.Conv3DTranspose)
_DEPTHWISE = (layers.DepthwiseConv1D, layers.DepthwiseConv2D)
_SEPARABLE = (layers.SeparableConv1D, layers.SeparableConv2D)
_CELLS = (layers.LSTMCell, layers.GRUCell, layers.SimpleRNNCell)
_DENSE = (layers.Dense, layers.EinsumDense)


def keras_axes(model: keras.Model) -> dict[str, Roles]:
    """Path of a variable -> the roles of its axes, for the variables of a built model with two axes or more.

    A variable of a layer that is none of Keras' own is not named, and has to be added. TensorError for a model that is
    not built yet.
    """
    pairs = ((v.path, _roles(layer, v)) for layer, v in _variables(model) if len(v.shape) > 1)
    return {path: roles for path, roles in pairs if roles is not None}


def keras_tags(model: keras.Model) -> dict[str, tuple[str, ...]]:
    """Path of a variable -> its tags (`embedding`, `head`, `norm`, `bias`, `vector`, `kernel`), where it has any.

    The output layer is known by its name, or else it is the last `Dense` or `EinsumDense` of the model. TensorError for
    a model that is not built yet.
    """
    pairs = [*_variables(model)]
    paths, kinds = [tuple(v.path.split("/")) for _, v in pairs], [type(layer).__name__ for layer, _ in pairs]
    named = named_roles(paths, [tuple(v.shape) for _, v in pairs], kinds, by_place=False)
    heads = [layer for (layer, _), tags in zip(pairs, named, strict=True) if "head" in tags]
    last = [layer for layer, _ in pairs if isinstance(layer, _DENSE)][-1:]
    tagged = {}
    for (layer, variable), tags in zip(pairs, named, strict=True):
        words = {*tags, *(["head"] if not heads and layer in last else []), *_kinds(layer, variable)}
        if words:
            tagged[variable.path] = tuple(sorted(words))
    return tagged


def _variables(model: keras.Model) -> Iterator[tuple[Any, Any]]:
    """Each layer with each variable of its own, once."""
    if not model.built:
        raise TensorError(f"the model {model.name} has no variables yet: call it on data, or build it, before this")
    seen = set()
    for layer in model._flatten_layers():
        for variable in layer._trainable_variables:
            if id(variable) not in seen:
                seen.add(id(variable))
                yield layer, variable


def _kinds(layer: Any, variable: Any) -> Iterator[str]:
    """The tags that a layer's class tells."""
    if isinstance(layer, layers.Embedding):
        yield "embedding"
    if isinstance(layer, (*_CONVOLUTIONS, *_TRANSPOSED, *_DEPTHWISE, *_SEPARABLE)) and len(variable.shape) > 2:
        yield "kernel"


def _roles(layer: Any, variable: Any) -> Roles | None:
    name, count = variable.name, len(variable.shape)
    window = ("window",) * (count - 2)
    if isinstance(layer, layers.EinsumDense) and not name.startswith("lora"):
        return _of_equation(layer.equation, name, count)
    if isinstance(layer, layers.Embedding):
        # A second table turns features into the vocabulary, as a dense layer does.
        return ("inputs", "outputs") if name.startswith("reverse") else ("outputs", "inputs")
    if isinstance(layer, _DEPTHWISE) or (isinstance(layer, _SEPARABLE) and name.startswith("depthwise")):
        return (*window, "outputs", "outputs")
    if isinstance(layer, _TRANSPOSED):
        return (*window, "outputs", "inputs")
    if isinstance(layer, (*_CONVOLUTIONS, *_SEPARABLE)) or "ConvLSTM" in type(layer).__name__:
        return (*window, "inputs", "outputs")
    if isinstance(layer, _CELLS) and name == "bias":
        return ("batch", "outputs")  # one bias of the input, one of the state
    if isinstance(layer, (layers.Dense, layers.EinsumDense, *_CELLS)):
        return (*("outputs" if name == "bias" else "inputs",) * (count - 1), "outputs")
    if isinstance(layer, layers.PReLU) or "Normalization" in type(layer).__name__:
        return ("outputs",) * count
    return None


def _of_equation(equation: str, name: str, count: int) -> Roles:
    """The roles of a kernel by the letters of its equation: an axis of inputs and results alike is one of a batch."""
    operands, result = equation.replace(" ", "").split("->")
    inputs, kernel = operands.split(",")
    if name == "bias":
        return ("outputs",) * count

    def role(letter: str) -> str:
        if letter not in result:
            return "inputs"
        return "batch" if letter in inputs else "outputs"

    return tuple(map(role, kernel))


def entry_of(table: Table | None, path: str, place: int) -> Any:
    """The words for a variable by its path, or by its place; None where there are none, or different ones."""
    if table is None:
        return None
    if not isinstance(table, Mapping):
        return table[place] if place < len(table) else None
    if path in table:
        return table[path]
    # A loaded model has shorter paths, without the name of the model itself.
    entries = [
        table[key]
        for key in table
        if fnmatchcase(path, key) or f"/{path}".endswith(f"/{key}") or f"/{key}".endswith(f"/{path}")
    ]
    return entries[0] if entries and all(words == entries[0] for words in entries) else None


def untracked(table: Any) -> Any:
    """A table without dicts and lists, into which Keras' classes look for variables."""
    if table is None or not isinstance(table, Mapping):
        return None if table is None else tuple(map(tuple, table))
    return MappingProxyType({path: tuple(words) for path, words in table.items()})


def plain(table: Table) -> Any:
    """A table as a file has it."""
    if isinstance(table, Mapping):
        return {path: [*words] for path, words in table.items()}
    return [[*words] for words in table]
