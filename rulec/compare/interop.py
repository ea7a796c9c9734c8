"""Another library's names for the same rule: its keywords for our hyper-parameters, its keys for our states.

A rule's interop section (rules/README.md) is followed where there is one. Else keywords are matched by name as far as
possible, and the hyper-parameters left over are listed.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rulec.language.rule import Rule


@dataclass(frozen=True)
class Translation:
    """Keywords to construct theirs, state of ours -> their key, and our hyper-parameters without a keyword."""

    keywords: Mapping[str, Any]
    states: Mapping[str, str]
    left_out: tuple[str, ...] = ()


def entries(rule: Rule, package: str) -> list[Mapping[str, Any]]:
    """The entries of a rule's interop section for a library, `torch` or `optax`."""
    section = rule.interop.get(package, [])
    return list(section) if isinstance(section, list) else [section]


def entry_for(rule: Rule, package: str, called: str) -> Mapping[str, Any]:
    """The entry for their class or function of that name; empty where the rule has none."""
    matches = (e for e in entries(rule, package) if called in _names_of(e.get("class", e.get("function"))))
    return next(matches, {})


def _names_of(called: str | list[str]) -> list[str]:
    return [called] if isinstance(called, str) else called


def translate(
    hyper: Mapping[str, float], target: Any, entry: Mapping[str, Any], overrides: Mapping[str, Any]
) -> Translation:
    """The construction of `target`, their class or function, for these values of our hyper-parameters.

    `entry` is the rule's interop entry for it, or empty; `overrides` are keywords of theirs that take precedence.
    """
    parameters = inspect.signature(target).parameters
    keywords = {k: v for k, v in entry.get("when", {}).items() if v not in ("nonzero", "given")}
    used: set[str] = set()
    for keyword, ours in _names(parameters, hyper, entry).items():
        names = ours if isinstance(ours, list) else [ours]
        if keyword not in keywords and all(name in hyper for name in names):
            values = tuple(hyper[n] for n in names)
            keywords[keyword] = values if isinstance(ours, list) else _as_theirs(values[0], parameters.get(keyword))
            used.update(names)
    left_out = tuple(name for name in hyper if name not in used)
    return Translation({**keywords, **overrides}, entry.get("state", {}), left_out)


def _as_theirs(value: float, parameter: inspect.Parameter | None) -> float | int:
    """A whole number as an int where theirs is one, such as a number of iterations."""
    whole = parameter is not None and type(parameter.default) is int and float(value).is_integer()
    return int(value) if whole else value


def _names(
    parameters: Mapping[str, inspect.Parameter], hyper: Iterable[str], entry: Mapping[str, Any]
) -> dict[str, Any]:
    """Keyword of theirs -> hyper-parameter of ours, or a list of them where the keyword is a tuple."""
    told = dict(entry.get("args", {}))
    taken = {name for value in told.values() for name in (value if isinstance(value, list) else [value])}
    places: dict[str, Any] = {}
    betas = [name for name in hyper if re.fullmatch(r"beta\d*", name)]
    for keyword, parameter in parameters.items():
        numbered = re.fullmatch(r"b(\d)", keyword)
        if keyword in hyper:
            places[keyword] = keyword
        elif keyword == "learning_rate":
            places[keyword] = "lr"
        elif keyword == "betas":
            wanted = len(parameter.default) if isinstance(parameter.default, tuple) else len(betas)
            # Some of theirs cannot be told: without all of them, theirs keeps its own.
            places |= {keyword: betas[:wanted]} if len(betas) >= wanted else {}
        elif numbered:
            places[keyword] = f"beta{numbered[1]}"
    return {k: v for k, v in places.items() if not isinstance(v, str) or v not in taken} | told
