"""`rulec list`: the rules of the library."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rulec.cli.arguments import JsonFlag
from rulec.cli.console import print_json, print_table

if TYPE_CHECKING:
    from rulec.language.rule import Rule

#: Bytes of one float32, in which states are counted.
_ITEM = 4


def list_rules(json: JsonFlag = False) -> None:
    """List the rules and transforms of the library.

    With the year of the paper, the states, and bytes of state for each float32 parameter.
    """
    import rulec

    entries = [_entry(name, rulec.load(name)) for name in rulec.rules()]
    if json:
        print_json(entries)
        return
    columns = ("rule", "year", "states", "bytes/parameter", "summary")
    rows = [
        [e["name"], str(e["year"] or ""), ", ".join(e["states"]), str(e["state_bytes_per_parameter"]), e["summary"]]
        for e in sorted(entries, key=lambda e: e["kind"])
    ]
    print_table(columns, rows, right=("year", "bytes/parameter"))


def _entry(name: str, rule: Rule) -> dict[str, Any]:
    elementwise = [state for state in rule.state.values() if state.per == "element" and state.shape is None]
    return {
        "name": name,
        "kind": "transform" if name.startswith("transforms/") else "rule",
        "summary": rule.summary,
        "year": rule.paper.get("year"),
        "paper": rule.paper.get("title"),
        "url": rule.paper.get("url"),
        "hyper": {key: h.default if isinstance(h.default, float) else None for key, h in rule.hyper.items()},
        "states": {key: state.per for key, state in rule.state.items()},
        "state_bytes_per_parameter": _ITEM * len(elementwise),
    }
