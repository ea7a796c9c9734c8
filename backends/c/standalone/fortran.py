"""Prints a module in Fortran that calls the C functions of a rule."""

from __future__ import annotations

from rulec.errors import RulecError
from rulec.standalone.prose import margin

from ...cstyle.numbers import used
from .fortran_module import continued, module_name, module_text
from .fortran_optimizer import declaration, element_type, extends, procedures, used_modules
from .interface import about, callable_words
from .model import FUNCTIONS, CFile, Parameter


def fortran_files(file: CFile) -> dict[str, str]:
    """The module of a rule, and the one that all rules of its dtype share, by file name.

    RulecError where both would have the same name.
    """
    shared = module_name(file.dtype)
    if file.name.lower() == shared:
        raise RulecError(f"--name {file.name} is the name of the Fortran module that all rules share: choose another")
    return {f"{file.name}.f90": fortran_text(file), f"{shared}.f90": module_text(file.dtype)}


def fortran_text(file: CFile) -> str:
    """A module with a type for the hyper-parameters, the interfaces, and an extension of the shared abstract type."""
    extended, words = extends(file), callable_words(file)
    public = [f"{file.name}_{word}" for word in ("kind", "hyper", *["optimizer"] * extended, *words)]
    functions = [line for word in words for line in _function(file, word)]
    lines = [
        *margin(_head(file), "!"), f"module {file.name}_rule", "  use, intrinsic :: iso_c_binding",
        *(f"  {x}" for x in used_modules(file)), "  implicit none", "  private",
        f"  public :: {', '.join(public)}", "",
        *_hyper(file), *declaration(file), "", "  interface", *(f"    {x}" for x in functions), "  end interface",
        *procedures(file), f"end module {file.name}_rule",
    ]  # fmt: skip
    return "\n".join(x for line in lines for x in continued(line)) + "\n"


def _head(file: CFile) -> list[str]:
    shared = module_name(file.dtype)
    head = [
        *about(file), "", f"Compile {shared}.f90 first: it says how {file.name}_optimizer is used."
        if extends(file) else "Rules with arrays as inputs have no type for optimizers chosen at run time.", "",
        "Pass arrays to the functions as they are, of any rank. What is contiguous is updated where it lies.",
    ]  # fmt: skip
    if file.shaped:
        head.append("A shape is that of C: reverse that of a Fortran array, [size(w, 2), size(w, 1)].")
    return head


def _hyper(file: CFile) -> list[str]:
    fields = [f"real(c_double) :: {field} = {_real(value)}" for field, value in file.defaults]
    return [
        f"  type, bind(c) :: {file.name}_hyper",
        *(f"    {x}" for x in fields or ["real(c_double) :: none = 0.0_c_double"]), "  end type",
    ]  # fmt: skip


#: The types of results by their kind.
_RESULTS = {"bytes": "integer(c_size_t)", "status": "integer(c_int)", "steps": "integer(c_int64_t)"}


def _real(value: float) -> str:
    if value in (float("inf"), float("-inf")):
        return f"{'-' if value < 0 else ''}huge(1.0_c_double)"
    text = repr(value)
    return f"{text}_c_double" if "." in text or "e" in text else f"{text}.0_c_double"


def _declared(file: CFile, parameter: Parameter) -> str:
    """A parameter in Fortran."""
    array = f"intent({'inout' if parameter.written else 'in'}) :: {parameter.name}(*)"
    kinds = {
        "elements": f"{element_type(file)}, {array}", "state": f"integer(c_int8_t), {array}",
        "int": f"integer(c_int), value :: {parameter.name}", "count": "integer(c_int64_t), value :: count",
        "whole": f"integer(c_int64_t), value :: {parameter.name}",
        "extents": f"integer(c_int64_t), {array}", "double": f"real(c_double), value :: {parameter.name}",
        "hyper": f"type({file.name}_hyper), intent(in) :: hyper",
    }  # fmt: skip
    return kinds[parameter.kind]


def _function(file: CFile, word: str) -> list[str]:
    """The interface of a function in Fortran."""
    parameters, kind, name = file.parameters(word), _RESULTS[FUNCTIONS[word][0]], f"{file.name}_{word}"
    declared = [_declared(file, p) for p in parameters]
    words = ("c_int", "c_int8_t", "c_int16_t", "c_int64_t", "c_size_t", "c_float", "c_double", f"{file.name}_hyper")
    named = [x for x in words if used([kind, *declared], x)]
    result = "status" if FUNCTIONS[word][0] == "status" else "answer"
    return [
        f'function {name}({", ".join(p.name for p in parameters)}) bind(c, name="{name}") result({result})',
        f"  import :: {', '.join(named)}", *(f"  {d}" for d in declared), f"  {kind} :: {result}", "end function",
    ]  # fmt: skip
