"""Tables of the library: where rules come from, what they cost, who else computes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

import rulec
from gallery.compared import remark_of, subjects, unchanged
from rulec.analysis.flow import flow_of
from rulec.analysis.structure import bytes_text, cost_of, scope_of, uses_matrices
from rulec.language.library.folder import library_folder
from rulec.language.rule import Rule
from tests.docs import defaults, peers
from tests.docs.families import FAMILIES, families
from tests.docs.table import table


def _file_text(name: str) -> str:
    return (library_folder() / f"{name}.yaml").read_text()


def rules() -> str:
    """The library by families: what each rule depends on, what it remembers, and who else computes it."""
    checks = peers.read()["rows"]
    return "\n\n".join(_family(family, names, checks) for family, names in families().items())


def _family(family: str, names: Sequence[str], checks: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for name in names:
        rule = rulec.load(name)
        structure, *_, size = _wrapper(rule) if rule.wraps else _costs(rule)
        rows.append([f"[`{name}`](rule-files.md#{_anchor(name)})", structure, size, _checked(name, checks)[0]])
    shown = table(["rule", "structure", "state bytes", "checked against"], rows)
    return f"### {family}\n\n{FAMILIES[family]}\n\n{shown}"


def _costs(rule: Rule) -> list[str]:
    """Structure, stages, bytes moved, states and their bytes: derived from the rule's expressions and its program."""
    flow, cost = flow_of(rule), cost_of(rule)
    states = ", ".join(f"`{state}`" for state in rule.state)
    structure = "matrix" if uses_matrices(flow) else scope_of(flow)
    return [structure, str(cost.stages), f"{cost.read} + {cost.written}", states, f"`{bytes_text(flow.rule)}`"]


def _wrapper(rule: Rule) -> list[str]:
    """The same of a rule that is put around another, which brings the rest."""
    states = ", ".join(f"`{state}`" for state in rule.state)
    return ["wrapper", "", "", states, f"`{bytes_text(rule)}`"]


#: Most implementations that a cell names.
_MOST = 3


def _checked(name: str, checks: Sequence[Mapping[str, Any]]) -> list[str]:
    """Who a rule was compared with, the largest difference in float64, and that from theirs as its users call it."""
    mine = [row for row in checks if name in subjects(row["rule"])]
    largest = max((row["float64_relative"] for row in mine), default=None)
    others = list(dict.fromkeys(row["peer"] for row in mine))
    shown = ", ".join(others[:_MOST]) + (" and others" if len(others) > _MOST else "")
    difference = "" if largest is None else f"{largest:.1e}" if largest else "0"
    changed = [row for row in mine if "called" in row]
    parts = [of_factors(name)] if name in factors() else []
    if changed and len(changed) == len(mine):
        parts += [f"apart by {text}" for text in dict.fromkeys(map(unchanged, changed)) if text != "0"]
    return [shown, difference, "; ".join(parts)]


def of_factors(name: str) -> str:
    """Of which sides another code has square factors for the kernel of a convolution, and the rule."""
    found, shape = factors()[name], tuple(FACTORED["shape"])
    if "refuses" in found:
        has = f"has a factor for each dimension and refuses tensors of {found['refuses']} dimensions"
    else:
        has = f"has factors of {_listed(found['theirs'])} for a kernel {shape}"
    return f"{found['code']} {has}, and the rule factors of {_listed(found['here'])}"


def _listed(sides: Sequence[int]) -> str:
    return " and ".join(filter(None, (", ".join(map(str, sides[:-1])), *map(str, sides[-1:]))))


FACTORED = yaml.safe_load(Path(__file__).with_name("factors.yaml").read_text(encoding="utf-8"))


def factors() -> Mapping[str, Mapping[str, Any]]:
    """The rules whose square factors of the kernel of a convolution are of other sides than in their authors' code."""
    found: Mapping[str, Mapping[str, Any]] = FACTORED["rules"]
    return found


def _anchor(name: str) -> str:
    return name.replace("/", "-").replace("_", "-")


def rule_files() -> str:
    """Every rule under a heading of its own: its family, its costs, its comparison, its defaults, and its file."""
    checks, family = peers.read()["rows"], {name: family for family, names in families().items() for name in names}
    parts = []
    for name in rulec.rules():
        facts = "\n".join(f"- {title}: {text}" for title, text in _facts(name, family[name], checks) if text)
        parts.append(f"## {name} {{#{_anchor(name)}}}\n\n{facts}\n\n```yaml\n{_file_text(name).strip()}\n```")
    return "\n\n".join(parts)


def _facts(name: str, family: str, checks: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """The facts of a rule with their titles; those without a text are left out of the page."""
    rule = rulec.load(name)
    source = f"[{rule.paper['authors']} {rule.paper['year']}]({rule.paper['url']})" if rule.paper else ""
    structure, stages, moved, states, size = _wrapper(rule) if rule.wraps else _costs(rule)
    others, difference, called = _checked(name, checks)
    return [
        ("family", family), ("paper", source), ("structure", structure), ("stages", stages), ("bytes moved", moved),
        ("states", states), ("state bytes", size), ("checked against", others), ("difference", difference),
        ("as it is called", called), ("defaults", defaults.cell(name)),
    ]  # fmt: skip


def comparison() -> str:
    """Every rule beside implementations that are not ours, with the largest differences measured."""
    found = peers.read()
    rows = []
    for row in found["rows"]:
        wide, narrow = (_difference(row.get(key), form) for key, form in _DIFFERENCES.items())
        rows.append([f"`{row['rule']}`", row["peer"], row["backend"], wide, narrow, unchanged(row), remark_of(row)])
    versions = ", ".join(f"{package} {version}" for package, version in found["versions"].items())
    head = ["rule", "compared with", "run by", "float64: relative", "float32: ulps", "as it is called", "remark"]
    return f"{table(head, rows)}\n\nThe largest of {found['steps']} steps, with {versions}."


def _difference(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}" if value else "0"


_DIFFERENCES = {"float64_relative": ".1e", "float32_ulps": ".1f"}


def torch_classes() -> str:
    """torch's classes: which rule their flags choose, and what they mean by weight decay."""
    rows = []
    for name in rulec.rules():
        entries = rulec.load(name).interop.get("torch", [])
        for entry in entries if isinstance(entries, list) else [entries]:
            flags = ", ".join(f"`{key}` {_flag(value)}" for key, value in entry.get("when", {}).items())
            rows.append([f"`{entry['class']}`", flags, f"`{name}`", _decay(name, entry)])
    return table(["class", "where", "rule", "with `weight_decay`"], sorted(rows))


def _flag(value: object) -> str:
    return "not 0" if value == "nonzero" else str(value)


def _decay(name: str, entry: Mapping[str, Any]) -> str:
    composed = {"l2": f"`l2 >> {name}`", "decay": f"`{name} + decay`"}
    how = entry.get("weight_decay")
    if how is None:
        return "its own" if "weight_decay" in rulec.load(name).hyper else "none"
    if isinstance(how, str):
        return composed[how]
    flags = [f"{composed[v]} where `{flag}`" for flag, v in how.items() if flag != "default"]
    return ", ".join([composed[how["default"]], *flags])
