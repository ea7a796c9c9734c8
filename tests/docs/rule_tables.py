"""Tables of the library: where rules come from, what they cost, who else computes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import rulec
from rulec.backend.layout import ITEM_SIZE, kernel_buffers
from rulec.language.document import read_document
from rulec.language.library import library_folder
from rulec.language.node import Op, walk
from rulec.language.rule import Rule
from tests.docs import peers
from tests.docs.table import table


def _file_text(name: str) -> str:
    return (library_folder() / f"{name}.yaml").read_text()


def _structure(name: str, rule: Rule) -> str:
    """What the file says it is made of, or which of the two endings its step has."""
    data = read_document(_file_text(name), name).data
    for key, sign in (("plus", " + "), ("chain", " >> ")):
        if key in data:
            return f"`{sign.join(map(str, data[key]))}`"
    return "assigns `p`" if rule.assigns_parameter else "`direction`"


def moved_bytes(rule: Rule) -> tuple[int, int]:
    """Bytes read and bytes written for each float32 parameter in a step, by the buffers a kernel loads and stores."""
    program = rulec.compile(rule)
    buffers = {b.name for b in kernel_buffers(program)}
    read: set[str] = set()
    written: set[str] = set()
    for stage in program.stages:
        read |= {str(n.arg) for n in walk(stage.roots) if n.op is Op.LOAD}
        written |= {s.buffer for s in stage.stores}
    size = ITEM_SIZE["float32"]
    return size * len(read & buffers), size * len(written & buffers)


def rules() -> str:
    """The library: where each rule comes from, what it remembers, and what a step of it moves."""
    rows = []
    for name in rulec.rules(wrappers=False):
        rule = rulec.load(name)
        source = f"[{rule.paper['authors']} {rule.paper['year']}]({rule.paper['url']})" if rule.paper else ""
        program = rulec.compile(rule)
        kept = sum(b.axes.elementwise for b in program.states)
        read, written = moved_bytes(rule)
        states = ", ".join(f"`{state}`" for state in rule.state)
        link = f"[`{name}`](#{_anchor(name)})"
        rows.append([link, rule.summary, source, _structure(name, rule), states, f"{4 * kept}", f"{read} + {written}"])
    head = ["rule", "what it does", "paper", "structure", "states", "state bytes", "bytes read + written"]
    return table(head, rows)


def _anchor(name: str) -> str:
    return name.replace("/", "-").replace("_", "-")


def rule_files() -> str:
    """Every rule's file, under a heading of its own."""
    parts = []
    for name in rulec.rules():
        parts.append(f"### {name} {{#{_anchor(name)}}}\n\n```yaml\n{_file_text(name).strip()}\n```")
    return "\n\n".join(parts)


def comparison() -> str:
    """Every rule beside implementations that are not ours, with the largest differences measured."""
    found = peers.read()
    rows = []
    for row in found["rows"]:
        remark = row.get("remark", "")
        if "as_shipped" in row:
            remark += f" (with that rounding: {row['as_shipped']:.1e})"
        wide, narrow = (f"{row[key]:{form}}" if row[key] else "0" for key, form in _DIFFERENCES.items())
        rows.append([f"`{row['rule']}`", f"`{row['peer']}`", wide, narrow, remark])
    versions = ", ".join(f"{package} {version}" for package, version in found["versions"].items())
    head = ["rule", "compared with", "float64: relative", "float32: ulps", "remark"]
    where = f"The largest of {found['steps']} steps, on the {found['backend']} backend, with {versions}."
    return f"{table(head, rows)}\n\n{where}"


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
