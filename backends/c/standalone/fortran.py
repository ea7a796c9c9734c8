"""Prints a module in Fortran that calls the C functions of a rule."""

from __future__ import annotations

import textwrap

from rulec.standalone.prose import margin

from ...cstyle.numbers import used
from .interface import about, callable_words
from .model import FUNCTIONS, CFile, Parameter


def fortran_text(file: CFile) -> str:
    """A module with a type for the hyper-parameters, the defaults in its components, and the interfaces."""
    told = [
        *about(file), "", "Pass arrays as they are, of any rank. What is contiguous is updated where it lies.",
        *(["A shape is that of C: reverse that of a Fortran array, [size(w, 2), size(w, 1)]."] if file.shaped else []),
    ]  # fmt: skip
    hyper = [f"real(c_double) :: {field} = {_real(value)}" for field, value in file.defaults]
    words = callable_words(file)
    functions = [line for word in words for line in _function(file, word)]
    lines = [
        *margin(told, "!"), f"module {file.name}_rule", "  use, intrinsic :: iso_c_binding", "  implicit none",
        "  private",
        f"  public :: {', '.join([f'{file.name}_hyper', *(f'{file.name}_{word}' for word in words)])}", "",
        f"  type, bind(c) :: {file.name}_hyper",
        *(f"    {x}" for x in hyper or ["real(c_double) :: none = 0.0_c_double"]),
        "  end type", "", "  interface", *(f"    {x}" for x in functions), "  end interface",
        f"end module {file.name}_rule",
    ]  # fmt: skip
    return "\n".join(x for line in lines for x in _continued(line)) + "\n"


#: The types of elements, by their type in C.
_REALS = {"float": "real(c_float)", "double": "real(c_double)", "uint16_t": "integer(c_int16_t)"}

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
        "elements": f"{_REALS[file.real]}, {array}", "state": f"integer(c_int8_t), {array}",
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
    result = "status" if FUNCTIONS[word][0] == "status" else "found"
    return [
        f'function {name}({", ".join(p.name for p in parameters)}) bind(c, name="{name}") result({result})',
        f"  import :: {', '.join(named)}", *(f"  {d}" for d in declared), f"  {kind} :: {result}", "end function",
    ]  # fmt: skip


def _continued(line: str) -> list[str]:
    """A line on as many lines as it needs: Fortran's end at 132 characters."""
    if len(line) <= 120 or line.startswith("!"):
        return [line]
    indent = " " * (len(line) - len(line.lstrip()))
    parts = textwrap.wrap(line.strip(), 110, break_long_words=False, break_on_hyphens=False)
    return [
        f"{indent}{'' if i == 0 else '  '}{part}{' &' if i < len(parts) - 1 else ''}" for i, part in enumerate(parts)
    ]
