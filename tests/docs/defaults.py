"""The defaults of every rule beside those of its authors, kept in docs/data/defaults.json.

A rule has one source there: the authors' code or paper, or another implementation that `whose` names, with its values
by our names; a `peer`, an installed package whose signature is read; the `parts` of the library that it is composed of;
or `nothing`, and why. What differs from the source is explained: `like` names the rule or the peer that has our value,
and `why` says it in words.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from numbers import Real
from typing import Any

import rulec
from rulec.language.expr.node import Node
from rulec.language.expr.text import expression_text
from rulec.language.hyper import AT_START
from tests.docs.markdown import ROOT
from tests.docs.table import table

FILE = ROOT / "docs" / "data" / "defaults.json"

#: A default as it is compared: a number, or the text of an expression of other hyper-parameters.
Value = float | str

#: Whose values a source with an address has, where not another implementation's.
AUTHORS, PAPER = "authors", "paper"


@cache
def read() -> Mapping[str, Mapping[str, Any]]:
    """The entry of every rule that has hyper-parameters."""
    entries: Mapping[str, Mapping[str, Any]] = json.loads(FILE.read_text())
    return entries


def defaults(rule: str) -> dict[str, Value]:
    """The defaults of a rule, but for those that another rule must supply."""
    values = {n: h.default for n, h in rulec.load(rule).hyper.items() if h.default is not None and n != AT_START}
    return {n: expression_text(v) if isinstance(v, Node) else float(v) for n, v in values.items()}


@cache
def signature(peer: str) -> Mapping[str, object]:
    """The defaults of an installed class or function, and of the sequences among them: `betas` and `betas.0`."""
    module, *path = peer.split(".")
    target: Any = import_module(module)
    for part in path:
        target = getattr(target, part, None) or import_module(f"{target.__name__}.{part}")
    values: dict[str, object] = {}
    for name, parameter in inspect.signature(target).parameters.items():
        if parameter.default is not inspect.Parameter.empty:
            values[name] = parameter.default
            if isinstance(parameter.default, tuple | list):
                values |= {f"{name}.{i}": value for i, value in enumerate(parameter.default)}
    return values


def of_peer(rule: str, peer: str, names: Mapping[str, str | None] | None = None) -> dict[str, Value]:
    """A peer's defaults by our names, those given or the usual ones; what it has no number for is left out."""
    theirs = signature(peer)
    values: dict[str, Value] = {}
    for name in defaults(rule):
        number = name.removeprefix("beta")
        usual = [name, *([f"betas.{int(number) - 1}", f"b{number}"] if number.isdigit() else [])]
        usual += ["learning_rate"] if name == "lr" else []
        for key in [(names or {})[name]] if name in (names or {}) else usual:
            value = theirs.get(key) if key else None
            if isinstance(value, Real) and not isinstance(value, bool):
                values[name] = float(value)
                break
    return values


@dataclass(frozen=True)
class Compared:
    """A rule's defaults beside those of its source.

    `whose` is said in the tables; `differing` are pairs of ours and theirs, and `unset` our hyper-parameters for which
    the source has no default.
    """

    whose: str
    differing: Mapping[str, tuple[Value, Value]]
    unset: tuple[str, ...]


def compared(rule: str) -> Compared:
    """The comparison that the entry of a rule asks for."""
    ours, theirs = defaults(rule), source(rule)
    differing = {n: (v, theirs[n]) for n, v in ours.items() if n in theirs and theirs[n] != v}
    return Compared(_whose(rule), differing, tuple(n for n in ours if n not in theirs))


def source(rule: str) -> dict[str, Value]:
    """The defaults that a rule's entry holds ours against."""
    entry = read()[rule]
    if "peer" in entry:
        return of_peer(rule, entry["peer"], entry.get("names"))
    if "parts" in entry:
        return {name: value for part in reversed(entry["parts"]) for name, value in defaults(part).items()}
    return {n: v if isinstance(v, str) else float(v) for n, v in entry.get("defaults", {}).items()}


def alike(rule: str, name: str, other: str) -> Value | None:
    """What another rule, or a peer, has as its default of the same name."""
    if "." in other:
        return of_peer(rule, other).get(name)
    return defaults(other).get(name)


def _whose(rule: str) -> str:
    entry = read()[rule]
    if "peer" in entry:
        return f"`{entry['peer']}`"
    if "parts" in entry:
        return " and ".join(f"`{part.removeprefix('transforms/')}`" for part in entry["parts"])
    if "nothing" in entry:
        return ""
    names = {AUTHORS: "authors", PAPER: "authors' paper"}
    return f"[{names.get(entry['whose'], entry['whose'])}]({entry['url']})"


def cell(rule: str) -> str:
    """What the page of a rule says of its defaults; no text where nothing is recorded of them."""
    if not defaults(rule):
        return "has none"
    if rule not in read():
        return ""
    if "nothing" in read()[rule]:
        return "not compared"
    found = compared(rule)
    by_authors = read()[rule].get("whose") in (AUTHORS, PAPER)
    text = f"[authors' defaults]({read()[rule]['url']})" if by_authors else f"defaults of {found.whose}"
    if found.differing:
        text += f", except {_names(found.differing)}"
    return f"{text}; none for {_names(found.unset)}" if found.unset else text


def _names(names: Mapping[str, object] | tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def differences() -> str:
    """Every default that is not its source's, with the reason; differences of meaning; and rules without a source."""
    rows = [row for rule in rulec.rules() if rule in read() for row in _rows(rule)]
    without = [f"- {link(rule)}: {entry['nothing']}" for rule, entry in sorted(read().items()) if "nothing" in entry]
    head = ["rule", "hyper-parameter", "here", "there", "whose", "reason"]
    return f"{table(head, rows)}\n\nNot compared are:\n\n" + "\n".join(without)


def _rows(rule: str) -> Iterator[list[str]]:
    entry, found = read()[rule], compared(rule)
    for name, (ours, theirs) in found.differing.items():
        yield [link(rule), f"`{name}`", shown(ours), shown(theirs), found.whose, reason(entry, name)]
    if "remark" in entry:
        yield [link(rule), "", "", "", found.whose, entry["remark"]]


def reason(entry: Mapping[str, Any], name: str) -> str:
    """Why a default is not its source's: as another has it, or in words."""
    like = entry.get("like", {})
    if name in like:
        return f"as `{like[name].removeprefix('transforms/')}` has it"
    return str(entry.get("why", {}).get(name, "not explained"))


def shown(value: Value) -> str:
    """A default as the tables show it."""
    return f"`{value}`" if isinstance(value, str) else f"{value:.6g}"


def link(rule: str) -> str:
    """A rule's name, with a link to its file."""
    return f"[`{rule}`](rule-files.md#{rule.replace('/', '-').replace('_', '-')})"
