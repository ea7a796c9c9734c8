"""`rulec list`: the rules of the library."""

from __future__ import annotations

import os
from collections.abc import Iterator
from fnmatch import fnmatchcase
from glob import escape
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rulec.cli.arguments import JsonFlag
from rulec.cli.console import fail, print_json, print_table
from rulec.errors import RulecError, RuleError

if TYPE_CHECKING:
    from rulec.language.rule import Rule

#: Bytes of one float32, in which states are counted.
_ITEM = 4


def list_rules(
    pattern: Annotated[
        str, typer.Argument(metavar="PATTERN", help="A word, or a pattern with * and ?, of names and summaries.")
    ] = "",
    json: JsonFlag = False,
) -> None:
    """List rules and transforms, of the library and installed packages.

    Shows the year of the paper, the states, and bytes of state for each float32 parameter. With --json each rule has
    name, kind (rule or transform), summary, year, paper, url and scope: elementwise, or the widest of tensor, group
    and model that a step takes values over. It also has inputs, hyper (the defaults; null for an expression), states
    (each with its level), state_bytes_per_parameter, and file (null for a rule of an installed package).
    """
    entries = [entry for entry in _entries() if _matches(pattern, entry["name"], entry["summary"])]
    if json:
        print_json(entries)
        return
    if not entries:
        raise RulecError(f"no rule has {pattern!r} in its name or summary (`rulec list` names them all)")
    columns = ("rule", "year", "bytes", "summary")
    rows = [
        [e["name"], str(e["year"] or ""), str(e["state_bytes_per_parameter"]), e["summary"]]
        for e in sorted(entries, key=lambda e: e["kind"])
    ]
    print_table(columns, rows, right=("year", "bytes"), one_line=True)


def _entries() -> Iterator[dict[str, Any]]:
    """An entry for each rule; a rule of a package that cannot be loaded is said on stderr."""
    import rulec

    for name in rulec.rules():
        try:
            yield _entry(name, rulec.load(name))
        except RuleError as error:
            fail(str(error))


def _matches(pattern: str, *texts: str) -> bool:
    """Whether one of these texts has a word, or is of a pattern with * and ?; small and capital letters are alike."""
    whole = pattern.lower() if "*" in pattern or "?" in pattern else f"*{escape(pattern.lower())}*"
    return any(fnmatchcase(text.lower(), whole) for text in texts)


def _entry(name: str, rule: Rule) -> dict[str, Any]:
    from rulec.language.library.folder import library_folder

    file = library_folder() / f"{name}.yaml"
    elementwise = [state for state in rule.state.values() if state.per == "element" and state.shape is None]
    return {
        "name": name,
        "kind": "transform" if name.startswith("transforms/") else "rule",
        "summary": rule.summary,
        "year": rule.paper.get("year"),
        "paper": rule.paper.get("title"),
        "url": rule.paper.get("url"),
        "scope": _scope(rule),
        "inputs": [*rule.inputs],
        "hyper": {key: h.default if isinstance(h.default, float) else None for key, h in rule.hyper.items()},
        "states": {key: state.per for key, state in rule.state.items()},
        "state_bytes_per_parameter": _ITEM * len(elementwise),
        "file": str(file) if os.path.isfile(file) else None,
    }


def _scope(rule: Rule) -> str:
    """The widest level over which a step takes values, as it is written; `elementwise` where there is none."""
    from rulec.language.expr.node import Kind, walk

    nodes = [*walk(rule.expressions)]
    levels = {str(node.arg) for node in nodes if node.op.kind is Kind.REDUCE}
    wide = levels or any(node.op.kind in (Kind.MATRIX, Kind.SHAPE, Kind.RANDOM) for node in nodes)
    return next((level for level in ("model", "group") if level in levels), "tensor" if wide else "elementwise")
