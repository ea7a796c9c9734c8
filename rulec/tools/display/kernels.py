"""The source of a rule's kernel on each backend."""

from __future__ import annotations

from rulec.backend import registry
from rulec.backend.capabilities import capabilities_of
from rulec.compiler.ir import Program
from rulec.compiler.layout import Layout, layout_for, scheduled
from rulec.compiler.pipeline import compile
from rulec.errors import RulecError
from rulec.language.rule import Rule
from rulec.runtime.storage.options import FEWEST_CODED, Storage

#: Backend -> language of its source, where this is not Python.
LANGUAGES = {"c": "c", "cupy": "cuda"}
#: Backend -> the title of its tab, for the backends with kernels of their own.
TABS = {"cpu": "CPU", "c": "C", "cupy": "CUDA (CuPy)", "triton": "Triton", "jax": "JAX"}

PLAIN = Storage()


def kernel_source(rule: Rule, backend: str, dtype: str = "float32", storage: Storage = PLAIN) -> str:
    """The source of a rule's kernel; RulecError where the backend refuses the rule."""
    program = program_of(rule, dtype, storage)
    printer, kernel = registry.get(backend), scheduled(program, layout_of(program, dtype, storage))
    if kernel.layout.formats and not capabilities_of(printer).decodes(*kernel):
        raise RulecError(f"{backend} has no kernel of {rule.name} with states in codes: they are decoded before it")
    return printer.emit(*kernel)


def program_of(rule: Rule, dtype: str, storage: Storage = PLAIN) -> Program:
    """The program of a rule whose states are stored so."""
    storage.check_weights([dtype])
    return compile(rule, memory=storage.memory_of(rule, dtype))


def layout_of(program: Program, dtype: str, storage: Storage = PLAIN) -> Layout:
    """The layout of a program; RulecError for a state that cannot be stored so."""
    storage.check([program.rule])
    states, formats = storage.of(program, dtype, FEWEST_CODED)
    return layout_for(program, dtype, states=states, formats=formats)
