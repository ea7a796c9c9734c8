"""The shape of a transformer, from a `config.json` of Hugging Face's, and of weights, from safetensors headers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rulec.errors import RulecError

#: Family -> member of `Shape` -> key of the configuration, for the members that both families have.
_KEYS = {
    "llama": {
        "vocabulary": "vocab_size", "width": "hidden_size", "layers": "num_hidden_layers",
        "heads": "num_attention_heads", "positions": "max_position_embeddings",
    },
    "gpt2": {
        "vocabulary": "vocab_size", "width": "n_embd", "layers": "n_layer", "heads": "n_head",
        "positions": "n_positions",
    },
}  # fmt: skip

#: Families whose weights have the shapes of Llama's.
_FAMILIES = {"llama": "llama", "mistral": "llama", "qwen2": "llama", "qwen3": "llama", "gpt2": "gpt2"}


@dataclass(frozen=True)
class Shape:
    """A transformer of a family.

    `inner` is the width inside its feed-forward layers, `groups` the number of heads of keys and values, and `head` the
    width of a head. With `biased` queries, keys and values have biases, with `normed` queries and keys are normalised,
    and with `tied` the embedding is the last layer's weight.
    """

    family: Literal["llama", "gpt2"]
    vocabulary: int
    width: int
    inner: int
    layers: int
    heads: int
    groups: int
    head: int
    positions: int
    tied: bool
    biased: bool = False
    normed: bool = False


def read_shape(path: Path) -> Shape:
    """The shape in a configuration file; RulecError for another kind of file or an unknown family."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RulecError(f"{path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise RulecError(f"{path} is no JSON: {error}") from None
    if not isinstance(config, dict):
        raise RulecError(f"{path} is no model's configuration: it must be an object, as in config.json")
    return shape_of(config, str(path))


def shape_of(config: Mapping[str, Any], where: str) -> Shape:
    """The shape of a configuration; `where` names it in errors."""
    kind = config.get("model_type")
    family = _FAMILIES.get(str(kind))
    if family is None:
        known = ", ".join(sorted(_FAMILIES))
        raise RulecError(f"{where} has model_type {kind!r}, and known are {known}: give its .safetensors file instead")
    sizes: dict[str, Any] = {name: _whole(config, key, where) for name, key in _KEYS[family].items()}
    if sizes["width"] % sizes["heads"] and "head_dim" not in config:
        raise RulecError(f"{where} has {sizes['heads']} heads, which do not divide its width of {sizes['width']}")
    head = _whole(config, "head_dim", where, sizes["width"] // sizes["heads"])
    if family == "gpt2":
        inner = _whole(config, "n_inner", where, 4 * sizes["width"])
        tied = bool(config.get("tie_word_embeddings", True))
        return Shape("gpt2", inner=inner, groups=sizes["heads"], head=head, tied=tied, **sizes)
    groups = _whole(config, "num_key_value_heads", where, sizes["heads"])
    if sizes["heads"] % groups:
        raise RulecError(f"{where} has {groups} heads of keys, which do not divide its {sizes['heads']} heads")
    biased = bool(config.get("attention_bias", kind == "qwen2"))
    return Shape(
        "llama", inner=_whole(config, "intermediate_size", where), groups=groups, head=head,
        tied=bool(config.get("tie_word_embeddings", False)), biased=biased, normed=kind == "qwen3", **sizes,
    )  # fmt: skip


def _whole(config: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
    """A whole number above 0; the default where it is missing or null. RulecError for anything else."""
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise RulecError(f"{where} has no {key}, which the shape of {config.get('model_type')} needs")
    if type(value) is not int or value < 1:
        raise RulecError(f"{where} has {key} {value!r}, which must be a whole number above 0")
    return value


#: Llama's layers of 7B, and so many of them that a vocabulary of 32,000 makes 7.5 billion parameters.
LLAMA = Shape("llama", 32_000, 4096, 11_008, 36, 32, 32, 128, 2048, tied=False)

#: A small transformer whose embedding is its last layer's weight too.
SMALL = Shape("gpt2", 4096, 256, 1024, 4, 8, 8, 32, 256, tied=True)


#: The dtypes of weights that are trained, as the format calls them; others are tables and masks.
_TRAINED = frozenset({"F64", "F32", "F16", "BF16"})

#: The longest header that is read: it is a few hundred bytes for each weight.
_LONGEST = 100 << 20

Shapes = dict[str, tuple[int, ...]]


def read_shapes(files: Iterable[Path]) -> Shapes:
    """The shapes of all weights in some files, by name; RulecError for another kind of file, or without weights."""
    shapes: Shapes = {}
    names = []
    for file in files:
        names.append(str(file))
        shapes.update(_shapes(file))
    if not shapes:
        raise RulecError(f"{', '.join(names)} has no weights of {', '.join(sorted(_TRAINED))}: nothing can be trained")
    return shapes


def _shapes(file: Path) -> Shapes:
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            text = opened.read(length) if length <= _LONGEST else b""
        header = json.loads(text)
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        return {name: _shape(entry) for name, entry in entries.items() if entry["dtype"] in _TRAINED}
    except OSError as error:
        raise RulecError(f"{file} cannot be read: {error.strerror or error}") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise RulecError(f"{file} is no safetensors file: it does not begin with a header in JSON") from None


def _shape(entry: Any) -> tuple[int, ...]:
    shape = tuple(entry["shape"])
    if not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(shape)
    return shape
