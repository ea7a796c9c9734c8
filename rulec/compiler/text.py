"""Programs as text, for people to read the result of each pass."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from rulec.compiler.ir import Program, Stage
from rulec.language.expr.node import Kind, Node, Op, name, rewrite, walk
from rulec.language.expr.text import expression_text, shared

#: A scalar value with more nodes than this gets a line of its own where it is used twice.
_LARGE = 30


def program_text(program: Program) -> str:
    """Buffers, scalar program and stages, one line a value, with the author's names."""
    lines = [f"program {program.name}"]
    for buffer in program.buffers:
        init = "" if buffer.init is None else f" = {expression_text(buffer.init)}"
        lines.append(f"  {buffer.role} {buffer.name}: {buffer.axes}{init}")
    if program.scalars.columns or program.scalars.stores:
        lines.append("  scalars (float64, once per group and t)")
        lines += [f"    {line}" for line in _scalar_lines(program)]
    for index, stage in enumerate(program.stages):
        lines += _section(f"before stage {index}", _between_lines(program, stage))
        lines += _section(f"stage {index}", stage_lines(program, stage))
    after = [f"store {s.buffer} = {_between_text(program, s.value)}" for s in program.finish]
    if program.skip is not None:
        lines.append(f"  skip where {_between_text(program, program.skip)}")
    return "\n".join([*lines, *_section("after the last stage", after), *(f"  {why}" for why in program.decisions)])


def _section(title: str, lines: list[str]) -> list[str]:
    return [f"  {title}", *(f"    {line}" for line in lines)] if lines else []


def _between_lines(program: Program, stage: Stage) -> list[str]:
    """The values computed before a stage: late columns of the scalar table, and vectors."""
    values = [(program.columns[i].name, "", program.columns[i].value) for i in stage.columns]
    results = [program.result(vector) for vector in stage.vectors]
    values += [(result.name, f": {result.axes}", result.value) for result in results]
    return [f"{title}{axes} = {_between_text(program, value, defining=True)}" for title, axes, value in values]


def _between_text(program: Program, value: Node, defining: bool = False) -> str:
    """The text of a value computed between stages; values with a name are written by it."""
    named = {v.value: v.name for v in program.vectors} | {c.value: c.name for c in program.late}
    named = {v: n for v, n in named.items() if v.op.kind is not Kind.LEAF and not (defining and v is value)}
    marks: dict[Node, Node] = {}
    marked = dict(zip(_mark(named, marks), named.values(), strict=True))
    text = named.get(value) or expression_text(_mark([value], marks)[0], marked)
    return re.sub(r"\x00(\d+)", lambda m: program.columns[int(m[1])].name, text)


def _scalar_lines(program: Program) -> list[str]:
    """The columns and states of the scalar program; large values with several uses get lines of their own."""
    columns, stores = program.scalars.columns, program.scalars.stores
    large = [v for v in shared([*(c.value for c in columns), *(s.value for s in stores)]) if v.size > _LARGE]
    names = {value: f"s{i}" for i, value in enumerate(large)}
    lines = [f"{name} = {expression_text(value, names)}" for value, name in names.items()]
    lines += [
        f"[{i}] {c.name} = {names.get(c.value) or expression_text(c.value, names)}" for i, c in enumerate(columns)
    ]
    return lines + [f"store {s.buffer} = {names.get(s.value) or expression_text(s.value, names)}" for s in stores]


def named_values(program: Program, roots: list[Node]) -> dict[Node, str]:
    """A name for each value with a line of its own: the author's, or else `x` and a number."""
    labelled = {v: re.sub(r"\W", "_", label) for v, label in program.labels.items()}
    wanted = set(shared(roots)) | set(labelled) | _parts_of_sums(roots)
    names: dict[Node, str] = {}
    taken = {b.name for b in program.buffers}
    for value in walk(roots):
        if value in wanted and value.op.kind is not Kind.LEAF:
            name = labelled.get(value, f"x{len(names)}")
            while name in taken:
                name += "_"
            taken.add(name)
            names[value] = name
    return names


#: Terms with constants in one line.
_TERMS = 3


def _parts_of_sums(roots: Sequence[Node]) -> set[Node]:
    """Long sums of terms with constants, and the sums of every few of their terms: else a line has all of them."""
    terms: dict[Node, int] = {}
    for value in walk(roots):
        rest = _without_term(value)
        if rest is not None:
            terms[value] = 1 + terms.get(rest, 0)
    inner = {_without_term(value) for value in terms}
    return {value for value, count in terms.items() if not count % _TERMS or (count > _TERMS and value not in inner)}


def _without_term(value: Node) -> Node | None:
    """`x` of a polynomial's `x*y + 2`, by Horner's rule, and of `x - y*2`; None of anything else."""
    if value.op is Op.ADD and value.args[1].op is Op.CONST and value.args[0].op is Op.MUL:
        return value.args[0].args[0]
    if value.op is Op.SUB and value.args[1].op is Op.MUL and value.args[1].args[1].op is Op.CONST:
        return value.args[0]
    return None


def stage_lines(program: Program, stage: Stage) -> list[str]:
    """The values and effects of one stage."""
    names = named_values(program, stage.roots)
    columns = [c.name for c in program.columns]
    marks: dict[Node, Node] = {}
    marked = dict(zip(_mark(names, marks), names.values(), strict=True))

    def text(value: Node) -> str:
        written = expression_text(_mark([value], marks)[0], marked)
        return re.sub(r"\x00(\d+)", lambda m: columns[int(m[1])], written)

    def effect(value: Node) -> str:
        return names.get(value) or text(value)

    lines = [f"{name} = {text(value)}" for value, name in names.items()]
    lines += [f"store {s.buffer} = {effect(s.value)}" for s in stage.stores]
    return lines + [f"{r.name}: {r.axes} = {text(r.value)}" for r in stage.reduces]


def _mark(values: Iterable[Node], marks: dict[Node, Node]) -> list[Node]:
    """The values with each scalar column as a marker; the printed text has the column's name in its place.

    `marks` has the values marked so far.
    """
    return rewrite(values, lambda n: name(f"\0{n.arg}") if n.op is Op.SCALAR else n, marks)
