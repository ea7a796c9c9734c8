"""What an optimizer of plain arrays is given beside arrays, checked."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from rulec.errors import HyperError, StateMismatch, TensorError
from rulec.language.hyper import Hyper
from rulec.language.source import did_you_mean
from rulec.runtime.counts import is_count


def checked_hyper(owner: str, known: Mapping[str, Hyper], given: Any) -> dict[str, float]:
    """`opt.hyper` as numbers in their ranges; HyperError where one is missing, unknown or no number."""
    if not isinstance(given, Mapping):
        raise HyperError(f"opt.hyper is a {type(given).__name__}: it must be a dict of the numbers {', '.join(known)}")
    for name in given:
        if name not in known:
            raise HyperError(f"opt.hyper has {name!r}, which {owner} has not{did_you_mean(str(name), known)}")
    for name in known:
        if name not in given:
            raise HyperError(f"opt.hyper has no {name!r}, which {owner} needs: give it a number")
    return {name: hyper.check(name, given[name], owner) for name, hyper in known.items()}


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
    for level, found in saved.get("counts", {}).items():
        if not all(map(is_count, np.ravel(found))):
            raise StateMismatch(f"the count of updates of the {level} was saved as {found}, which is none")


def _check_part(part: str, found: Any) -> None:
    if not isinstance(found, Mapping):
        raise StateMismatch(f"the saved state has no dict of its {part}: give all that state_dict() returned")


def check_states(own: Mapping[str, Any], saved: Mapping[str, Any], name: str) -> None:
    """StateMismatch where saved states are not those of an array, or of other shapes."""
    if own.keys() != saved.keys():
        raise StateMismatch(f"the saved state of {name} has {sorted(saved)}, where the rule has {sorted(own)}")
    for key, value in saved.items():
        if np.shape(value) != own[key].shape:
            raise StateMismatch(f"{key} of {name} was saved with shape {np.shape(value)}, not {own[key].shape}")
        dtype = getattr(value, "dtype", None) or np.asarray(value).dtype
        if getattr(dtype, "kind", "f") not in "biuf" and dtype.name != "bfloat16":
            found = f"an array of {dtype}" if np.ndim(value) else f"{value!r:.80}"
            raise StateMismatch(f"{key} of {name} was saved as {found}, which is no number")
        if key == "step" and not is_count(value):
            raise StateMismatch(f"{key} of {name} was saved as {value}, which is no count of updates")
