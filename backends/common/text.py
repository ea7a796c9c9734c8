"""The mathematics of a rule, for the comments of printed source."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping

from rulec.compiler.ir import Program, Stage
from rulec.language.expr.node import Kind, Node, Op, name, rewrite
from rulec.language.expr.text import expression_text
from rulec.language.parse.step import step_text

#: A longer formula tells less than its name.
_LONGEST = 60


def about(program: Program) -> list[str]:
    """The lines about a program's rule: its name and summary, its paper, and its step as its author wrote it."""
    rule = program.rule
    paper = {key: " ".join(str(text).split()) for key, text in rule.paper.items()}
    written = ", ".join(paper[key] for key in ("authors", "year") if key in paper)
    title = " ".join([*([paper["title"]] if "title" in paper else []), *([f"({written})"] if written else [])])
    head = [" ".join(f"{rule.name}: {rule.summary}".split()).rstrip(":"), title, paper.get("url", "")]
    return [*filter(None, head), "", *(f"    {line}" for line in step_text(rule.step).splitlines())]


def about_stage(program: Program, index: int) -> list[str]:
    """The lines about a stage: its stores and reductions, and the values computed before it."""
    stage = program.stages[index]
    left = left_by(stage)
    if len(program.stages) == 1:
        return [f"One element: {left}."]
    before = [f"    {line}" for line in _worked_out(program, stage)]
    return [f"Stage {index} for one element: {left}.", *["", "Before it:", *before] * bool(before)]


def docstring(text: str) -> list[str]:
    """A text as a Python docstring: several lines where it is long."""
    first, *others = textwrap.wrap(text, 106)
    return [f'"""{first}', *others, '"""'] if others else [f'"""{first}"""']


def left_by(stage: Stage) -> str:
    """The stores and reductions of a stage, in words."""
    reduced = [r.name if r.name.endswith(f"_{r.value.arg}") else f"{r.name} per {r.value.arg}" for r in stage.reduces]
    stored = [f"stores {', '.join(s.buffer for s in stage.stores)}"] * bool(stage.stores)
    return "; ".join([*stored, *[f"reduces to {', '.join(reduced)}"] * bool(reduced)])


def _worked_out(program: Program, stage: Stage) -> list[str]:
    """The columns of the scalar table and the vectors computed just before the stage, as formulas."""
    names = {column.value: column.name for column in program.late}
    names |= {vector.value: vector.name for vector in program.vectors}
    late = [(program.columns[i].name, program.columns[i].value) for i in stage.columns]
    fresh = [(name, program.result(name).value) for name in stage.vectors]
    return [f"{name} = {value_formula(program, names, value)}" for name, value in (*late, *fresh)]


def column_formula(program: Program, column: int) -> str:
    """The formula of a column of the scalar table, in the rule's language; empty where it is its name or long."""
    known = program.columns[column]
    if column >= len(program.scalars.columns) or known.value.size > _LONGEST:
        return ""
    text = expression_text(known.value)
    return "" if text == known.name or len(text) > _LONGEST else text


def value_formula(program: Program, names: Mapping[Node, str], value: Node) -> str:
    """The formula of a named value of a stage, in the rule's language, with hyper-parameters and earlier names."""

    def spelled(part: Node) -> Node:
        if part.op is not Op.SCALAR:
            return part
        column = int(part.arg)  # type: ignore[call-overload]
        formula = column_formula(program, column)
        return program.columns[column].value if formula else name(program.columns[column].name)

    known: dict[Node, Node] = {}
    (whole,) = rewrite([value], spelled, known)
    named = {known[v]: n for v, n in names.items() if v in known and v is not value and v.op.kind is not Kind.LEAF}
    return expression_text(whole, named)


def line_comment(program: Program, names: Mapping[Node, str], value: Node, printed: str) -> str:
    """The formula of a printed line; empty where the line itself says the same."""
    text = value_formula(program, names, value)
    return "" if len(text) > _LONGEST or _bare(text) == _bare(printed) else text


def _bare(text: str) -> str:
    """A formula without the marks of C's types."""
    text = re.sub(r"(\d)(?:\.0)?f?\b", r"\1", text)
    text = re.sub(r"\b(sqrt|cbrt|exp|log|tanh|erf|floor|sign|sigmoid|minimum|maximum)f\(", r"\1(", text)
    return text.replace("fabsf(", "abs(").replace("fabs(", "abs(").replace(" ", "")
