"""The file of CUDA C for a rule: one form for rules of elements and numbers, another for rules with matrices."""

from __future__ import annotations

from collections.abc import Mapping

from rulec.compiler.ir import Program
from rulec.language.expr.node import WORDS, Op
from rulec.language.rule import Rule
from rulec.runtime.storage.options import Storage
from rulec.standalone.cases import family, values

from .cuda_file import CudaFile
from .cuda_shaped import ShapedFile


def files(rule: Rule, name: str, dtype: str, storage: Storage) -> Mapping[str, str]:
    """The file, by its name; CannotBuild for a rule without this form."""
    whole = family(rule, dtype, storage, CudaFile.form, ShapedFile.matrix_functions, CudaFile.shares)
    several = len(whole.cases) > 1 or whole.applies is not None
    kind = ShapedFile if several or sees_matrices(whole.cases[0].program) else CudaFile
    return {f"{name}.cu": kind(rule, name, dtype, storage).text()}


def sees_matrices(program: Program) -> bool:
    """Whether a program has values of rows, columns or matrices."""
    axes = [r.axes for stage in program.stages for r in stage.reduces]
    axes += [b.axes for b in program.states if not b.axes.elementwise]
    facts = {str(n.arg) for n in values(program) if n.op is Op.FACT} - {"machine_eps", "numel", *WORDS}
    shares = any(b.role == "scratch" for b in program.buffers)
    return bool(program.vectors or facts) or shares or not all(a.number for a in axes)
