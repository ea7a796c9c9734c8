"""Parameter groups with tags, from the modules of a model and the names of its parameters.

| tag | which parameters |
|---|---|
| `embedding` | the tables of `Embedding` and `EmbeddingBag`, and parameters with `embed` in their own name |
| `head` | what belongs to a module called `head`, `lm_head`, `classifier` or `unembed`, wherever it is, or to one called `output` or `fc` at the top of the model |
| `norm` | parameters of modules with `Norm` in their type's name, such as `LayerNorm`, `BatchNorm2d` and `RMSNorm` |
| `bias` | parameters with `bias` in their own name |

A parameter may have several, or none. One that is tied, and so has several names, has the tags of all of them.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from rulec.errors import HyperError
from rulec.language.source import did_you_mean

#: The tags that follow from a model.
TAGS = ("embedding", "head", "norm", "bias")

_HEADS = {"head", "lm_head", "classifier", "unembed"}
_TOP_HEADS = {"output", "fc"}


def tagged_groups(
    model: nn.Module, names: Mapping[str, str | Sequence[str]] | None = None, **options: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Parameter groups of a model, one for each set of tags in it: the argument of an optimizer.

    `names` has tag -> patterns of names, beside the tags from the model: `{"embedding": "*.codebook"}`. Further
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
    for name, param, tags in _tagged(model, patterns):
        chosen = {key: value for tag, entries in options.items() if tag in tags for key, value in entries.items()}
        group = groups.setdefault(tags, {"params": [], "tags": tags, **chosen})
        group["params"].append((name, param))
    return [*groups.values()]


def _tagged(model: nn.Module, patterns: Mapping[str, Sequence[str]]) -> Iterable[tuple[str, Tensor, tuple[str, ...]]]:
    """Each parameter once, by its first name, with its tags."""
    known: dict[Tensor, tuple[str, set[str]]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for leaf, param in module.named_parameters(recurse=False, remove_duplicate=False):
            name = f"{path}.{leaf}" if path else leaf
            tags = known.setdefault(param, (name, set()))[1]
            tags.update(_tags_of(module, path.split("."), leaf))
            tags.update(tag for tag, wanted in patterns.items() if any(fnmatchcase(name, p) for p in wanted))
    for param, (name, tags) in known.items():
        yield name, param, tuple(dict.fromkeys(tag for tag in (*TAGS, *patterns) if tag in tags))


def _tags_of(module: nn.Module, path: Sequence[str], leaf: str) -> Iterable[str]:
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) or "embed" in leaf:
        yield "embedding"
    if _HEADS.intersection(path) or path[0] in _TOP_HEADS:
        yield "head"
    if "Norm" in type(module).__name__:
        yield "norm"
    if "bias" in leaf:
        yield "bias"
