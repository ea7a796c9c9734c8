"""Text of printed source: comments with the rule's mathematics, fixed parts, random numbers, and source as a module.

Fixed parts are texts with marks, polynomials, and functions printed only where they are used. A module of printed
source is a real file in the cache, where tracebacks, debuggers and `inspect` find its lines. Kernels compute the index
of an element where they call for its random number.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rulec.backend import cache
from rulec.backend.cache import Source
from rulec.compiler.ir import Program, Stage
from rulec.language.expr.node import RANGE, ROWS, Kind, Node, Op, name, rewrite
from rulec.language.expr.ops import FUNCTIONS as ELEMENTWISE
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
    text = re.sub(rf"\b({'|'.join(op.symbol for op in ELEMENTWISE)})f\(", r"\1(", text)
    return text.replace("fabsf(", "abs(").replace("fabs(", "abs(").replace(" ", "")


def filled(text: str, marks: Mapping[str, object]) -> str:
    """A text with a part in place of each mark. A part with marks in it comes before the parts of these marks."""
    for mark, part in marks.items():
        text = text.replace(mark, str(part))
    return text


def polynomial(name: str, terms: Sequence[str]) -> str:
    """A polynomial of a variable by Horner's scheme, from its coefficients as text, constant first."""
    *first, text = terms
    for term in reversed(first):
        text = f"({term} + {name} * {text})"
    return text


def used(parts: Mapping[str, str], text: str, code: Callable[[str], str] = str) -> list[str]:
    """The parts that a text uses, directly or through other parts; each stands before its use.

    `parts` maps a pattern of a use to the text of the part; a part comes after the parts it uses. `code` removes
    comments from a text.
    """
    needed: list[str] = []
    seen = [code(text)]
    for pattern, part in reversed(list(parts.items())):
        if any(re.search(pattern, one) for one in seen):
            needed.insert(0, part)
            seen.append(code(part))
    return needed


def run_source(backend: str, name: str, source: str) -> dict[str, Any]:
    """Runs the source printed for the program `name`. Its definitions, by name."""
    file_name = cache.file_name(name)
    path = cache.source_file(backend, cache.cache_key(source), Source(f"{file_name}.py", source))
    namespace: dict[str, Any] = {"__name__": f"rulec_printed.{file_name}", "__file__": str(path)}
    exec(compile(source, str(path), "exec"), namespace)  # noqa: S102 - printed by rulec
    return namespace


def chance_call(places: Sequence[str], words: Sequence[str]) -> str:
    """The call of `chance` with places and words, as text.

    `places` has the element's place in memory, and for some functions the place of a loop's first element. `words` has
    the operands of the operation: five, and for a part of a tensor the facts of it.
    """
    piece = words[5:]
    if len(piece) == len(RANGE):
        places = [f"in_range({', '.join([place, *piece])})" for place in places]
    elif len(piece) == len(ROWS):  # an element may lie far from the first of its loop
        places = [f"in_rows({', '.join([places[0], *piece])})"] * len(places)
    return f"chance({', '.join([*places, *words[:5]])})"
