"""Prints a program as Triton source: the kernels of its stages, and the functions they call."""

from __future__ import annotations

from rulec.compiler.ir import Program, Stage
from rulec.compiler.layout import Layout
from rulec.errors import BackendUnsupported
from rulec.kernel.place import is_shaped

from ..common.scalars import has_scalars
from .coded import CodedStage, coded_in
from .flat import FlatStage
from .format_words import format_functions
from .quotient import functions as quotient_functions
from .scalars import ScalarSource
from .shaped import ShapedStage
from .words import file_text, words_used


def program_source(program: Program, layout: Layout) -> str:
    """The whole file; BackendUnsupported for an operation without a word in Triton, and codes with rows."""
    stages = [
        "\n".join(lines) for index in range(len(program.stages)) for lines in _stage_functions(program, layout, index)
    ]
    scalars = ["\n".join(ScalarSource(program).function())] if has_scalars(program) else []
    first = words_used("\n".join(stages))
    every = words_used("\n".join([*stages, *["finish("] * _reduces(program), *scalars]))
    formats = format_functions([form for _, form in layout.formats], "\n".join(stages))
    formats += quotient_functions("\n".join(stages))
    title = f"{program.name} by the triton backend: {layout.text()}. Printed by rulec."
    return file_text(program, title, [*first, *formats, *stages, *(w for w in every if w not in first), *scalars])


def _stage_functions(program: Program, layout: Layout, index: int) -> list[list[str]]:
    """The functions of a stage; none for an empty stage."""
    stage = program.stages[index]
    if not stage.roots:
        return []
    return _kind(program, layout, stage)(program, layout, index).functions()


def _kind(program: Program, layout: Layout, stage: Stage) -> type[FlatStage | ShapedStage]:
    if not is_shaped(program, stage, layout):
        return CodedStage if coded_in(program, stage, layout) else FlatStage
    if coded_in(program, stage, layout):
        raise BackendUnsupported("triton", "states in codes in a stage with rows and columns", program.name)
    return ShapedStage


def _reduces(program: Program) -> bool:
    return any(stage.reduces for stage in program.stages)
