"""The layers of parameters, by their tags and names: `depth` and `depths` of rules.

| parameter | depth |
|---|---|
| with the tag `depth=N` | `N` |
| with the tag `embedding` | -1: before the layers |
| with the tag `head` | `depths`: behind the layers |
| with an embedding's word in its name, before a number | -1 |
| with the number of a layer in its name | the number |
| any other, such as the last norm | `depths` |

The number of a layer is a part of the name by itself, as in `h.11.attn` and `blocks[2]`, or follows a word for a layer,
as in `layers_3`, `layer1`, `Dense_0` and `encoderblock_11`; the first in the name counts. `depths` is one more than the
largest number, or `N` of a tag `depths=N`, for parameters that are not a whole model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence

from rulec.errors import HyperError, TensorError
from rulec.language.rule_data import RuleData, reads_layers
from rulec.runtime.roles import is_embedding, is_output

#: The number of a parameter's layer, and the count of layers.
Layer = tuple[int, int]

#: The number of parameters before the first layer.
BEFORE = -1

#: Between the parts of a name, in all frameworks.
_BETWEEN = re.compile(r"[./\[\]'\"\s]+")

#: A part of a name with the number of a layer.
_NUMBERED = re.compile(
    r"()(\d+)|(\w*(?:layer|block|stage)s?|h)_?(\d+)(?:_\D\w*)?"
    r"|(conv|conv\dd|dense|densegeneral|linear|lin|fc|l|\w+_l)_?(\d+)",
    re.IGNORECASE,
)

#: Parts of names of what is before the first layer, and not called an embedding.
_FIRST = re.compile(r"(.*_)?stem|(.*_)?tokens?|pos(ition|itional)?_.*", re.IGNORECASE)

_TAG = re.compile(r"(depths?)=(.*)", re.DOTALL)


def layers_of(names: Sequence[str], tags: Sequence[Collection[str]]) -> list[Layer | None]:
    """The layer of each parameter; None where neither tags nor names tell it.

    A parameter without a name has the name "". HyperError for tags that are no whole numbers, or contradict each other.
    """
    by_tags = [_numbers_in(name, words) for name, words in zip(names, tags, strict=True)]
    counts = {entry["depths"] for entry in by_tags if "depths" in entry}
    if len(counts) > 1:
        raise HyperError(f"tags say depths={min(counts)} and depths={max(counts)}: a model has one count of layers")
    numbers = [
        entry["depth"] if "depth" in entry else _number(name, words)
        for name, words, entry in zip(names, tags, by_tags, strict=True)
    ]
    count = max(counts, default=1 + max((number for number in numbers if number is not None), default=BEFORE))
    if count < 1:
        return [None] * len(names)
    layers: list[Layer | None] = []
    for name, words, number, entry in zip(names, tags, numbers, by_tags, strict=True):
        if number is not None and number >= count + ("depth" in entry):
            raise HyperError(f"{name or 'a parameter'} is in layer {number}, and tags say depths={count}: give more")
        is_known = number is not None or bool(name) or "head" in words
        layers.append((count if number is None else number, count) if is_known else None)
    return layers


def with_count(words: Sequence[str], tags: Mapping[str, Collection[str]]) -> tuple[str, ...]:
    """The tags of each parameter by its name, with the count of layers of the model added."""
    layer = next((layer for layer in layers_of([*tags], [*tags.values()]) if layer is not None), None)
    if layer is None:
        return tuple(words)
    return (*(word for word in words if not word.startswith("depths=")), f"depths={layer[1]}")


def layer_for(rule: RuleData, name: str, layer: Layer | None) -> tuple[float, float]:
    """The layer of a parameter of this rule, NaN where nothing tells it; TensorError where the rule reads it then."""
    if layer is None and reads_layers(rule):
        raise TensorError(
            f"{rule.name} reads depth, and no name tells the layer of {name}: name the parameters, as "
            f"named_parameters() does (layers.3.weight), or give it the tag 'depth=3'"
        )
    return layer or (math.nan, math.nan)


def _numbers_in(name: str, words: Collection[str]) -> dict[str, int]:
    """What the tags of a parameter say, by `depth` and `depths`."""
    by_tags: dict[str, int] = {}
    for word, match in ((word, _TAG.fullmatch(word)) for word in words):
        if match is None:
            continue
        key, least = match[1], BEFORE if match[1] == "depth" else 1
        if not re.fullmatch(r"-?\d{1,9}", match[2]) or int(match[2]) < least:
            raise HyperError(
                f"the tag {word!r} of {name or 'a parameter'} must be {key}=N, a whole number from {least}"
            )
        if key in by_tags and by_tags[key] != int(match[2]):
            raise HyperError(f"the tags of {name or 'a parameter'} say two numbers for {key}: leave one")
        by_tags[key] = int(match[2])
    return by_tags


def _number(name: str, words: Collection[str]) -> int | None:
    """The number of a layer by the tags of roles and the name; None behind the layers."""
    if "embedding" in words or "head" in words:
        return BEFORE if "embedding" in words else None
    for part in filter(None, _BETWEEN.split(name)):
        if is_embedding(part) or _FIRST.fullmatch(part):
            return BEFORE
        if is_output(part):
            return None
        if match := _NUMBERED.fullmatch(part):
            return int(match[match.lastindex or 0])
    return None
