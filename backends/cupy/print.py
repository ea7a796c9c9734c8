"""Prints a program as CUDA C: for each stage the function of an element, and the kernel that calls it."""

from __future__ import annotations

from collections.abc import Sequence

from rulec.compiler.ir import Program, Stage
from rulec.compiler.layout import Layout
from rulec.errors import BackendUnsupported
from rulec.kernel.place import is_shaped

from ..common.text import about
from ..cstyle.text import comment
from ..cstyle.words import words_used
from .coded import CodedKernel, coded_in
from .format_words import format_functions
from .plan import kernel_name
from .scalars import scalars_kernel
from .stage import StageKernel
from .words import DIALECT, FINISH_KERNEL, parts_used, types_used


def kernel_source(program: Program, layout: Layout) -> str:
    """The source of all kernels of a program; BackendUnsupported for an operation without a spelling in CUDA C."""
    kernels = []
    for index, stage in enumerate(program.stages):
        if stage.roots:
            element = "element" if len(program.stages) == 1 else f"element_{index}"
            kind = _kind(program, layout, stage)
            kernels += kind(program, layout, stage, kernel_name(program, index), element).texts()
    kernels = [*format_functions([form for _, form in layout.formats], "\n".join(kernels)), *kernels]
    if any(stage.reduces for stage in program.stages):
        kernels.append(FINISH_KERNEL)
    return file_text(program, f"{program.name} by the cupy backend: {layout.text()}.", kernels)


def _kind(program: Program, layout: Layout, stage: Stage) -> type[StageKernel]:
    if not coded_in(program, stage, layout):
        return StageKernel
    if is_shaped(program, stage, layout):
        raise BackendUnsupported("cupy", "states in codes in a stage with rows and columns", program.name)
    return CodedKernel


def file_text(program: Program, title: str, kernels: list[str]) -> str:
    """The file of these kernels of a program and the kernel of its scalar program, under a title."""
    head = [*comment([f"{title} Printed by rulec.", "", *about(program)]), ""]
    return with_words([*kernels, *scalars_kernel(program)], head)


def with_words(kernels: Sequence[str], head: Sequence[str] = ()) -> str:
    """The text of these kernels after the types and functions that they use; `head` are the first lines."""
    parts = parts_used("\n".join(kernels))
    words = words_used("\n".join([*parts, *kernels]), DIALECT)
    types = types_used("\n".join([*words, *parts, *kernels]))
    texts = ["\n".join([*head, *types]), *words, *parts, *kernels]
    return "\n\n".join(text.rstrip("\n") for text in texts) + "\n"
