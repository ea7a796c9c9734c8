"""The parts of the pages that are made from the code: tables of the language, of the rules, of measurements."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import rulec
import rulec.math
from rulec.backend.layout import ITEM_SIZE, kernel_buffers
from rulec.bench import page
from rulec.bench.suite import MEASUREMENTS
from rulec.cli.app import app
from rulec.language.document import read_document
from rulec.language.functions import FUNCTIONS
from rulec.language.library import library_folder
from rulec.language.node import Op, walk
from rulec.language.rule import WELL_KNOWN, Hyper, Rule
from tests.docs import peers
from tests.docs.markdown import ROOT

#: What the functions do that `rulec.math` has no counterpart of.
_TEXT_ONLY = {
    "matmul": "Product of two matrices, as `a @ b`.",
    "transpose": "The transposed matrix.",
    "newton_schulz": "The nearest orthogonal matrix, roughly, by Muon's quintic iteration in `dtype`.",
    "qr": "The orthogonal factor of the QR decomposition.",
    "eigh": "The eigenvectors of a symmetric matrix, by ascending eigenvalue.",
    "inverse_root": "`x**(-1/order)` of a symmetric positive matrix.",
    "uniform": "A matrix of these extents, of random numbers uniform in [0, 1). `at` names the draw, by default `t`: "
    "the same gives the same numbers.",
    "normal": "Likewise, of normal random numbers.",
}


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def functions() -> str:
    """Every function of the language, with what it does."""
    rows = []
    for name, function in FUNCTIONS.items():
        words = _TEXT_ONLY.get(name) or getattr(rulec.math, name).__doc__.partition("\n")[0]
        rows.append([f"`{function.signature()}`", words])
    return table(["function", "value"], rows)


def well_known_ranges() -> str:
    """The ranges that some hyper-parameters have by their names."""
    rows = [[f"`{pattern}`", Hyper(0, **limits).range_text()] for pattern, limits in WELL_KNOWN]
    return table(["name (a regular expression)", "range"], rows)


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
    for name in rulec.rules():
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


def commands() -> str:
    """The commands of the command line, by the first line of what they say of themselves."""
    found = [(c.name, c.callback.__doc__) for c in app.registered_commands if c.callback is not None]
    found += [(g.name, g.typer_instance.info.help) for g in app.registered_groups if g.typer_instance is not None]
    return table(["command", "does"], [[f"`rulec {name}`", str(text).partition("\n")[0]] for name, text in found])


#: The rows of README.md's table, by how their text begins.
_HEADLINES = (
    "adamw, ", "lion, float32", "nadam, ", "1000 tensors", "300 tensors", "148 tensors", "1 tensors", "500 groups",
    "import",
)  # fmt: skip


def benchmarks() -> str:
    """The figures of README.md, from what `rulec bench` last wrote: some rows, and every target that was missed."""
    folder = ROOT / "docs" / "benchmarks"
    results = [page.read(folder / f"{name}.json") for name in MEASUREMENTS if (folder / f"{name}.json").is_file()]
    if not results:
        return "No results are recorded yet: the command records them."
    every = [row for result in results for row in result.rows]
    chosen = [row for row in every if row.what.startswith(_HEADLINES)]
    rows = table(["figure", "measured", "target"], [[r.what, page.figure(r), page.target(r)] for r in chosen])
    judged, missed = [r for r in every if r.target is not None], [r for r in every if r.met is False]
    verdict = f"{len(judged) - len(missed)} of {len(judged)} targets are met."
    if missed:
        lines = "\n".join(f"- {r.what}: {page.figure(r)}, wanted {page.target(r)}" for r in missed)
        verdict += f" Missed:\n\n{lines}\n\n"
    machine, threads = results[0].machine, results[0].threads
    where = f"Measured on {results[0].measured}, {machine['cpu']}, {threads} threads."
    return f"{where} {verdict} Every figure: [benchmarks](docs/benchmarks.md).\n\n{rows}"


MAKERS: Mapping[str, Callable[[], str]] = {
    "functions": functions,
    "well-known-ranges": well_known_ranges,
    "rules": rules,
    "rule-files": rule_files,
    "comparison": comparison,
    "torch-classes": torch_classes,
    "commands": commands,
    "benchmarks": benchmarks,
}
