"""Prints a program as Triton source: the functions that it calls, and the kernels of its stages."""

from __future__ import annotations

from rulec.compiler.ir import Program
from rulec.compiler.layout import Layout
from rulec.kernel.place import is_shaped

from ..comment import about
from .flat import FlatStage
from .scalars import ScalarSource, has_scalars
from .shaped import ShapedStage
from .words import words_used


def program_source(program: Program, layout: Layout) -> str:
    """The whole file; BackendUnsupported for an operation that Triton has no word for."""
    stages = [
        "\n".join(lines) for index in range(len(program.stages)) for lines in _stage_functions(program, layout, index)
    ]
    scalars = ["\n".join(ScalarSource(program).function())] if has_scalars(program) else []
    first = words_used("\n".join(stages))
    every = words_used("\n".join([*stages, *["finish("] * _reduces(program), *scalars]))
    parts = [_head(program, layout), *first, *stages, *(w for w in every if w not in first), *scalars]
    return "\n\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def _head(program: Program, layout: Layout) -> str:
    """What the file is, what it imports."""
    title = f"{program.name} by the triton backend: {layout.text()}. Printed by rulec."
    text = "\n".join([title, "", *about(program)]).replace("\\", "\\\\").replace('"""', "'''")
    return f'"""{text}\n"""\n\nimport triton\nimport triton.language as tl'


def _stage_functions(program: Program, layout: Layout, index: int) -> list[list[str]]:
    """The functions of a stage; none where it has nothing to do."""
    stage = program.stages[index]
    if not stage.roots:
        return []
    kind = ShapedStage if is_shaped(program, stage, layout) else FlatStage
    return kind(program, layout, index).functions()


def _reduces(program: Program) -> bool:
    return any(stage.reduces for stage in program.stages)
