"""Parameter groups with tags, from the modules of a model and the names of its parameters.

| tag | parameters |
|---|---|
| `embedding` | the tables of `Embedding` and `EmbeddingBag`, and parameters with `embed` in their own name |
| `head` | the output layer: a module called `head`, `lm_head`, `classifier` and the like, wherever it is; one at the top of the model called `output`, `fc`, `cls`, `out`, `proj_out`, `score`, `decoder` and the like; else the last layer of a `Sequential`, or of layers numbered at the top of the model |
| `norm` | parameters of modules with `Norm` in their type's name, such as `LayerNorm`, `BatchNorm2d` and `RMSNorm` |
| `bias` | parameters with `bias` in their own name |
| `vector` | parameters of two dimensions or more, but no matrices: with one extent above 1, as the magnitudes of `weight_norm` and DoRA, and biases and norms |

A parameter may have several, or none. One that is tied, and so has several names, has the tags of all of them. A shape
does not tell an output layer, for other layers may be as wide; a warning says where none is known.
"""  # noqa: E501

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from rulec.errors import HyperError
from rulec.language.source import did_you_mean
from rulec.runtime.roles import TAGS, head_places, is_vector, no_head


def tagged_groups(
    model: nn.Module, names: Mapping[str, str | Sequence[str]] | None = None, **options: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Parameter groups of a model, one for each set of tags in it: the argument of an optimizer.

    `names` has tag -> patterns of names, beside the tags from the model: `{"embedding": "*.codebook"}`. With
    `{"head": []}` no layer is the output layer. Further
    keywords are a tag's options of a group: `bias={"weight_decay": 0}`; where two tags of a parameter say different
    things, the keyword written later holds. HyperError for an unknown tag, and for options that are no mapping.
    """
    patterns = {tag: [p] if isinstance(p, str) else list(p) for tag, p in (names or {}).items()}
    known = [*TAGS, *patterns]
    for tag, entries in options.items():
        if tag not in known:
            raise HyperError(f"{tag!r} is none of the tags {', '.join(known)}{did_you_mean(tag, known)}")
        if not isinstance(entries, Mapping):
            raise HyperError(
                f"{tag}= takes options of a group, as {tag}={{'weight_decay': 0.0}}, not {type(entries).__name__}: "
                f"patterns of names go into names={{{tag!r}: [...]}}"
            )
    groups: dict[tuple[str, ...], dict[str, Any]] = {}
    tagged = [*_tagged(model, patterns)]
    if "head" not in patterns and not any("head" in tags for _, _, tags in tagged):
        _warn([name for name, _, _ in tagged], [(param, tags) for _, param, tags in tagged])
    for name, param, tags in tagged:
        chosen = {key: value for tag, entries in options.items() if tag in tags for key, value in entries.items()}
        group = groups.setdefault(tags, {"params": [], "tags": tags, **chosen})
        group["params"].append((name, param))
    return [*groups.values()]


def _warn(names: Sequence[str], params: Sequence[tuple[Tensor, tuple[str, ...]]]) -> None:
    """A warning that no output layer is known, where there are matrices without a tag."""
    dims = [0 if tags else param.dim() for param, tags in params]
    if sentence := no_head(names, dims, "names"):
        warnings.warn(f"tagged_groups: {sentence}", stacklevel=3)


def _tagged(model: nn.Module, patterns: Mapping[str, Sequence[str]]) -> Iterable[tuple[str, Tensor, tuple[str, ...]]]:
    """Each parameter once, by its first name, with its tags."""
    every = [
        (path, module, leaf, param)
        for path, module in model.named_modules(remove_duplicate=False)
        for leaf, param in module.named_parameters(recurse=False, remove_duplicate=False)
    ]
    paths = [(*(path.split(".") if path else ()), leaf) for path, _, leaf, _ in every]
    headless = "head" in patterns and not patterns["head"]
    heads = set() if headless else head_places(paths, [param.dim() for *_, param in every])
    known: dict[Tensor, tuple[str, set[str]]] = {}
    for place, (path, module, leaf, param) in enumerate(every):
        name = f"{path}.{leaf}" if path else leaf
        tags = known.setdefault(param, (name, set()))[1]
        tags.update(_tags_of(module, leaf), {"head"} if place in heads else ())
        if is_vector(param.shape, _elementwise(module, tags)):
            tags.add("vector")
        tags.update(tag for tag, wanted in patterns.items() if any(fnmatchcase(name, p) for p in wanted))
    for param, (name, tags) in known.items():
        yield name, param, tuple(dict.fromkeys(tag for tag in (*TAGS, *patterns) if tag in tags))


def _tags_of(module: nn.Module, leaf: str) -> Iterable[str]:
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) or "embed" in leaf:
        yield "embedding"
    if "Norm" in type(module).__name__:
        yield "norm"
    if "bias" in leaf:
        yield "bias"


def _elementwise(module: nn.Module, tags: set[str]) -> set[str]:
    """The tags without `norm` for modules such as a NormedLinear, whose parameters may be matrices."""
    return tags if re.search(r"Norm(\dd)?$", type(module).__name__) else tags - {"norm"}
