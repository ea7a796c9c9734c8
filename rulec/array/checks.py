"""What an optimizer of plain arrays is given, checked: nested arrays by name, hyper-parameters, tags, saved states."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rulec.errors import HyperError, StateMismatch, TensorError
from rulec.language.hyper import Hyper
from rulec.language.source import did_you_mean
from rulec.runtime.buckets.scalar_table import is_count


def checked_hyper(owner: str, known: Mapping[str, Hyper], hyper: Any) -> dict[str, float]:
    """`opt.hyper` as numbers in their ranges; HyperError where one is missing, unknown or no number."""
    if not isinstance(hyper, Mapping):
        raise HyperError(f"opt.hyper is a {type(hyper).__name__}: it must be a dict of the numbers {', '.join(known)}")
    for name in hyper:
        if name not in known:
            raise HyperError(f"opt.hyper has {name!r}, which {owner} has not{did_you_mean(str(name), known)}")
    for name in known:
        if name not in hyper:
            raise HyperError(f"opt.hyper has no {name!r}, which {owner} needs: give it a number")
    return {name: setting.check(name, hyper[name], owner) for name, setting in known.items()}


def checked_tags(tags: Mapping[str, Collection[str]], names: Sequence[str]) -> dict[str, frozenset[str]]:
    """The words of each array; TensorError for one that there is not, or a text in the place of words."""
    for name, words in tags.items():
        if name not in names:
            raise TensorError(f"tags are given for {name!r}, which is no parameter{did_you_mean(name, names)}")
        if isinstance(words, str):
            raise TensorError(f"the tags of {name} are a text: give a set of words, {{{words!r}}}")
    return {name: frozenset(words) for name, words in tags.items()}


def check_saved(saved: Any, owner: str) -> None:
    """StateMismatch where this is no `state_dict()` of the rule of this name."""
    if not isinstance(saved, Mapping):
        raise StateMismatch(f"the saved state is a {type(saved).__name__}: give the dict that state_dict() returned")
    if saved.get("rule") != owner:
        raise StateMismatch(f"this state is of {saved.get('rule')}, not of {owner}")
    for part in ("hyper", "state", "shared", "counts"):
        _check_part(part, saved.get(part, {} if part in ("shared", "counts") else None))
    for name, states in saved["state"].items():
        _check_part(f"state of {name}", states)
    for level, counts in saved.get("counts", {}).items():
        if not all(map(is_count, np.ravel(counts))):
            raise StateMismatch(f"the count of updates of the {level} was saved as {counts}, which is none")


def _check_part(part: str, content: Any) -> None:
    if not isinstance(content, Mapping):
        raise StateMismatch(f"the saved state has no dict of its {part}: give all that state_dict() returned")


def check_states(buffers: Mapping[str, Any], saved: Mapping[str, Any], name: str) -> None:
    """StateMismatch where saved states are not those of an array, or of other shapes."""
    if buffers.keys() != saved.keys():
        raise StateMismatch(f"the saved state of {name} has {sorted(saved)}, where the rule has {sorted(buffers)}")
    for key, value in saved.items():
        if np.shape(value) != buffers[key].shape:
            raise StateMismatch(f"{key} of {name} was saved with shape {np.shape(value)}, not {buffers[key].shape}")
        dtype = getattr(value, "dtype", None) or np.asarray(value).dtype
        if getattr(dtype, "kind", "f") not in "biuf" and dtype.name != "bfloat16":
            title = f"an array of {dtype}" if np.ndim(value) else f"{value!r:.80}"
            raise StateMismatch(f"{key} of {name} was saved as {title}, which is no number")
        if key == "step" and not is_count(value):
            raise StateMismatch(f"{key} of {name} was saved as {value}, which is no count of updates")


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """The leaves by name: `dense1/weight`, `0/1`; a single array is named `param`.

    TensorError where two have one name, as with the keys `0` and `"0"`.
    """
    by_name: dict[str, Any] = {}
    for name, leaf in _leaves(tree, prefix):
        if name in by_name:
            raise TensorError(f"two leaves are called {name} by the keys on their paths: give each a name of its own")
        by_name[name] = leaf
    return by_name


def _leaves(tree: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _leaves(value, f"{prefix}{key}/")
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            yield from _leaves(value, f"{prefix}{index}/")
    else:
        yield prefix.rstrip("/") or "param", tree


def matching_leaves(tree: Any, names: list[str], what: str, prefix: str = "") -> dict[str, Any]:
    """The leaves of `tree` by name, except for None; TensorError where a name is not among `names`."""
    by_name = {}
    for name, leaf in flatten(tree, prefix).items():
        if leaf is None:
            continue
        if name not in names:
            raise TensorError(f"{what} has {name}, which is no parameter: give it the structure of the parameters")
        by_name[name] = leaf
    return by_name
