"""The words of leaves for rules that ask for them, by the paths of a tree; and where each leaf goes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import jax.numpy as jnp

from rulec.compiler.routing import Router, applies
from rulec.errors import HyperError, TensorError
from rulec.functional.values import Leaf
from rulec.jax.leaves import paths_of
from rulec.language.rule import Rule
from rulec.language.rule_data import reads_tags
from rulec.runtime.roles import TAGS, named_roles, no_head

#: What a leaf is called, by its tag.
_CALLED = {"embedding": "an embedding", "head": "the output layer", "vector": "a bias or a norm, no matrix,"}


def tags_of(params: Any, names: Mapping[str, str | Sequence[str]] | None = None) -> dict[str, set[str]]:
    """The tags of the leaves of a model, by path: what rules for hidden matrices, such as Muon, take as `tags`.

    | tag | leaves |
    |---|---|
    | `embedding` | leaves of a module of class `Embed` or `Embedding`; `embed` in a leaf's or its module's name, or `emb`, `wte`, `wpe` or `shared` as such |
    | `head` | the output layer: modules called `head`, `lm_head` and the like; at the top of the model `out`, `decoder` and the like; else the last of numbered layers, as `Dense_2` |
    | `norm` | leaves of modules with `Norm` in their class, or `norm`, `ln` or `bn` in their name |
    | `bias` | leaves with `bias` in their name, and `b` beside `w` |
    | `vector` | leaves of two dimensions or more, but no matrices: with one extent above 1, or biases and norms, as in Flax's attention |

    `params` may be parameters of Flax, Equinox or Haiku, or any tree of arrays or shapes. `names` has tag -> patterns
    of paths, beside the tags from the tree: `{"embedding": "*/codebook"}`. With `{"head": []}` no layer is the output
    layer. A warning says where no output layer is known, unless `names` has `head`. HyperError for patterns of another
    type.
    """  # noqa: E501
    patterns = {tag: [p] if isinstance(p, str) else p for tag, p in (names or {}).items()}
    for tag, wanted in patterns.items():
        if not isinstance(wanted, Sequence) or not all(isinstance(pattern, str) for pattern in wanted):
            raise HyperError(f"names has {wanted!r} for {tag!r}: give a pattern of paths, or a list of them")
    paths, leaves, _ = paths_of(params)
    shapes = [jnp.shape(leaf) for leaf in leaves]
    kinds = [_kind(params, keys) for keys, _ in paths]
    roles = named_roles([tuple(name.split("/")) for _, name in paths], shapes, kinds)
    by_path = {name: tags for (_, name), tags in zip(paths, roles, strict=True)}
    headless = "head" in patterns and not patterns["head"]
    for name, tags in by_path.items():
        tags.difference_update({"head"} if headless else ())
        tags.update(tag for tag, wanted in patterns.items() if any(fnmatchcase(name, pattern) for pattern in wanted))
    if "head" not in patterns and not any("head" in tags for tags in by_path.values()):
        dims = [0 if tags else len(shape) for tags, shape in zip(by_path.values(), shapes, strict=True)]
        if sentence := no_head([*by_path], dims, "names"):
            warnings.warn(f"tags_of: {sentence}", stacklevel=2)
    return {name: tags for name, tags in by_path.items() if tags}


def _kind(tree: Any, keys: Sequence[Any]) -> str:
    """The name of the class of the module that has a leaf; empty where the tree has no modules."""
    node, kind = tree, ""
    for key in keys:
        if type(node).__module__ != "builtins" and not isinstance(node, Mapping):
            kind = type(node).__name__
        try:
            place = getattr(key, "key", getattr(key, "idx", None))
            node = getattr(node, key.name) if hasattr(key, "name") else node[place]
        except (AttributeError, KeyError, IndexError, TypeError):
            return ""
    return kind


def check_tags(rule: Rule, leaves: Sequence[Leaf]) -> None:
    """TensorError where a rule asks for tags, has none, and would choose for some leaves without being told."""
    rules = Router(rule).rules
    if not any(map(reads_tags, rules)):
        return
    roles = named_roles(
        [tuple(leaf.parameter.split("/")) for leaf in leaves], [leaf.shape for leaf in leaves], by_place=False
    )
    for leaf, tags in zip(leaves, roles, strict=True):
        if not applies(rules[0], leaf.shape, ()):
            what = f"{rule.name} does not apply to {leaf.name}, of shape {leaf.shape}"
            raise TensorError(f"{what}, nor to embeddings and an output layer: {_REMEDY}")
        role = next((tag for tag in TAGS if tag in tags and not applies(rules[0], leaf.shape, {tag})), None)
        if role is not None:
            what = f"{leaf.name} is {_CALLED.get(role, role)} by its name"
            raise TensorError(f"{what}, and {rule.name} is for hidden matrices: {_REMEDY}")


_REMEDY = "give tags=rulec.jax.tags_of(params) or tags of your own, or tags={} to choose by shape alone"
