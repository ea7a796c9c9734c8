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

Without groups of tags, a class with `auto=True` tags each parameter by itself: by the names of `named_parameters()`, as
above, or by the shapes of all parameters where names tell no embedding, or no output layer. The extent of a hidden layer is also that of the next
one; so a matrix or kernel is an embedding, or an input or output layer, where no other has one of its first two extents,
or only one has it, first too or in the same shape, and one of the two is the last of all.
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
from rulec.runtime.roles import TAGS, guessed_roles, head_places, is_vector, named_roles, no_head


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


def tag_each(groups: Sequence[dict[str, Any]]) -> None:
    """Gives every parameter tags of its own, in `param_tags`, where a group asks for that by `auto` and has no tags.

    Names tell, where all parameters have one, and shapes what they do not. The tags stay with the group, and are saved
    with it.
    """
    asking = [group for group in groups if group.get("auto") and _is_untagged(group)]
    if not asking:
        return
    shapes = [tuple(param.shape) for group in groups for param in group["params"]]
    names = [name for group in groups for name in group.get("param_names") or [""] * len(group["params"])]
    named = len(names) == len(shapes) and all(names)
    roles = guessed_roles(shapes)
    if named:
        roles = _first_by_names(named_roles([tuple(name.split(".")) for name in names], shapes), roles)
    waiting = iter(zip(shapes, roles, strict=True))
    for group in groups:
        each = [next(waiting) for _ in group["params"]]
        if any(group is one for one in asking):
            group["tags"] = ()
            group["param_tags"] = tuple(
                tuple(tag for tag in (*TAGS, "kernel") if tag in tags or (tag == "kernel" and len(shape) > 2))
                for shape, tags in each
            )


def _first_by_names(named: Sequence[set[str]], guessed: Sequence[set[str]]) -> list[set[str]]:
    """The tags by names, and by shapes embeddings, or output layers, where no name tells one."""
    missing = {"embedding", "head"}.difference(*named)
    return [tags | (guess & missing) for tags, guess in zip(named, guessed, strict=True)]


def _is_untagged(group: Mapping[str, Any]) -> bool:
    """Whether a group has no tags, or tags of other parameters than are in it now."""
    if "param_tags" in group:
        return len(group["param_tags"]) != len(group["params"])
    return group.get("tags") is None
