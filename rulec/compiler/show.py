"""Programs as text, for people: what each pass made of a rule."""

from __future__ import annotations

import re
from collections.abc import Iterable

from rulec.compiler.ir import Program, Result, Stage, Store
from rulec.language.node import Node, Op
from rulec.language.text import expression_text, shared

#: A scalar value that is larger than this, written out in full, is written once.
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
        lines.append(f"  stage {index}")
        lines += [f"    {line}" for line in stage_lines(program, stage)]
    return "\n".join(lines)


def _scalar_lines(program: Program) -> list[str]:
    """The columns and states of the scalar program; what is large and stands in several places gets its own line."""
    columns, stores = program.scalars.columns, program.scalars.stores
    large = [v for v in shared([*(c.value for c in columns), *(s.value for s in stores)]) if v.size > _LARGE]
    names = {value: f"s{i}" for i, value in enumerate(large)}
    lines = [f"{name} = {expression_text(value, names)}" for value, name in names.items()]
    lines += [
        f"[{i}] {c.name} = {names.get(c.value) or expression_text(c.value, names)}" for i, c in enumerate(columns)
    ]
    return lines + [f"store {s.buffer} = {names.get(s.value) or expression_text(s.value, names)}" for s in stores]


def named_values(program: Program, roots: list[Node]) -> dict[Node, str]:
    """A name for each value that deserves a line of its own: the author's where there is one."""
    labelled = {v: re.sub(r"\W", "_", label) for v, label in program.labels.items()}
    wanted = set(shared(roots)) | set(labelled)
    names: dict[Node, str] = {}
    taken = {b.name for b in program.buffers}
    from rulec.language.node import Kind, walk

    for value in walk(roots):
        if value in wanted and value.op.kind is not Kind.LEAF:
            name = labelled.get(value, f"x{len(names)}")
            while name in taken:
                name += "_"
            taken.add(name)
            names[value] = name
    return names


def stage_lines(program: Program, stage: Stage) -> list[str]:
    """The values and effects of one stage."""
    finish = [s.value for s in stage.finish]
    names = named_values(program, [*stage.roots, *finish])
    columns = {Op.SCALAR: [c.name for c in program.scalars.columns]}

    def text(value: Node, defining: bool = False) -> str:
        named = {k: v for k, v in names.items() if not (defining and k is value)}
        marked = expression_text(_mark(value), _marked(named))
        return re.sub(r"\x00(\d+)", lambda m: columns[Op.SCALAR][int(m[1])], marked)

    def effect(value: Node) -> str:
        return names.get(value) or text(value)

    lines = [f"{name} = {text(value, defining=True)}" for value, name in names.items()]
    lines += _effects("store", stage.stores, effect) + _results(stage.reduces, text) + _results(stage.matrix, text)
    return lines + _effects("finish", stage.finish, effect)


def _mark(value: Node) -> Node:
    """The value with scalar columns as names that `stage_lines` turns into the columns' own."""
    from rulec.language.node import name, rewrite

    return rewrite([value], lambda n: name(f"\0{n.arg}") if n.op is Op.SCALAR else n)[0]


def _marked(named: dict[Node, str]) -> dict[Node, str]:
    return {_mark(value): name for value, name in named.items()}


def _effects(word: str, stores: Iterable[Store], text: object) -> list[str]:
    return [f"{word} {s.buffer} = {text(s.value)}" for s in stores]  # type: ignore[operator]


def _results(results: Iterable[Result], text: object) -> list[str]:
    return [f"{r.name}: {r.axes} = {text(r.value)}" for r in results]  # type: ignore[operator]
