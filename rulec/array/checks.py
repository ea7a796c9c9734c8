"""What an optimizer of plain arrays is given beside arrays, checked."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from rulec.errors import HyperError, StateMismatch, TensorError
from rulec.language.hyper import Hyper
from rulec.language.source import did_you_mean


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


def check_states(own: Mapping[str, Any], saved: Mapping[str, Any], name: str) -> None:
    """StateMismatch where saved states are not those of an array, or of other shapes."""
    if own.keys() != saved.keys():
        raise StateMismatch(f"the saved state of {name} has {sorted(saved)}, where the rule has {sorted(own)}")
    for key, value in saved.items():
        if np.shape(value) != own[key].shape:
            raise StateMismatch(f"{key} of {name} was saved with shape {np.shape(value)}, not {own[key].shape}")
