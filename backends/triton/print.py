"""Prints a program as Triton source: the functions that it calls, and the kernels of its stages."""

from __future__ import annotations

from rulec.backend.layout import Layout
from rulec.compiler.ir import Program

from ..plan import is_shaped
from .flat import FlatStage
from .scalars import ScalarSource, has_scalars
from .shaped import ShapedStage
from .words import words_used


def program_source(program: Program, layout: Layout) -> str:
    """The whole file; BackendUnsupported for an operation that Triton has no word for."""
    title = f"{program.name} by the triton backend: {layout.text()}. Printed by rulec."
    functions = [
        "\n".join(lines) for index in range(len(program.stages)) for lines in _stage_functions(program, layout, index)
    ]
    if has_scalars(program):
        functions.append("\n".join(ScalarSource(program).function()))
    words = words_used("\n".join([*functions, *["finish("] * _reduces(program)]))
    head = "\n".join([f'"""{title}"""', "", "import triton", "import triton.language as tl"])
    return "\n\n\n".join([head, *(w.rstrip("\n") for w in words), *functions]) + "\n"


def _stage_functions(program: Program, layout: Layout, index: int) -> list[list[str]]:
    """The functions of a stage; none where it has nothing to do."""
    stage = program.stages[index]
    if not stage.roots:
        return []
    kind = ShapedStage if is_shaped(program, stage, layout) else FlatStage
    return kind(program, layout, index).functions()


def _reduces(program: Program) -> bool:
    return any(stage.reduces for stage in program.stages)
