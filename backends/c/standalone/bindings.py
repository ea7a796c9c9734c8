"""Prints modules in Fortran and Julia that call the C functions of a rule."""

from __future__ import annotations

import textwrap

from rulec.standalone.prose import margin, title

from ...cstyle.numbers import used
from .model import FUNCTIONS, CFile, Parameter


def _told(file: CFile) -> list[str]:
    return [
        title(file.rule), "",
        f"SPDX-License-Identifier: MIT. Printed by rulec; {file.name}.c has the notice, the mathematics and the paper.",
        f"What the functions do is said in {file.name}.h.",
    ]  # fmt: skip


# Fortran


def fortran_text(file: CFile) -> str:
    """A module with a type for the hyper-parameters, the defaults in its components, and the interfaces."""
    told = [
        *_told(file), "", "Pass arrays as they are, of any rank. What is contiguous is updated where it lies.",
        *(["A shape is that of C: reverse that of a Fortran array, [size(w, 2), size(w, 1)]."] if file.shaped else []),
    ]  # fmt: skip
    hyper = [f"real(c_double) :: {field} = {_real(value)}" for field, value in file.defaults]
    functions = [line for word in _callable(file) for line in _function(file, word)]
    lines = [
        *margin(told, "!"), f"module {file.name}_rule", "  use, intrinsic :: iso_c_binding", "  implicit none",
        "  private",
        f"  public :: {', '.join([f'{file.name}_hyper', *(f'{file.name}_{word}' for word in _callable(file))])}", "",
        f"  type, bind(c) :: {file.name}_hyper",
        *(f"    {x}" for x in hyper or ["real(c_double) :: none = 0.0_c_double"]),
        "  end type", "", "  interface", *(f"    {x}" for x in functions), "  end interface",
        f"end module {file.name}_rule",
    ]  # fmt: skip
    return "\n".join(x for line in lines for x in _continued(line)) + "\n"


#: The types of elements in Fortran and in Julia, by their type in C.
_REALS = {
    "float": ("real(c_float)", "Cfloat"), "double": ("real(c_double)", "Cdouble"),
    "uint16_t": ("integer(c_int16_t)", "UInt16"),
}  # fmt: skip

#: The types of results in Fortran.
_RESULTS = {"bytes": "integer(c_size_t)", "status": "integer(c_int)", "steps": "integer(c_int64_t)"}


def _callable(file: CFile) -> list[str]:
    """The words of the functions for other languages."""
    return [word for word in file.words if FUNCTIONS[word][0] in _RESULTS]


def _real(value: float) -> str:
    if value in (float("inf"), float("-inf")):
        return f"{'-' if value < 0 else ''}huge(1.0_c_double)"
    text = repr(value)
    return f"{text}_c_double" if "." in text or "e" in text else f"{text}.0_c_double"


def _declared(file: CFile, parameter: Parameter) -> str:
    """A parameter in Fortran."""
    array = f"intent({'inout' if parameter.written else 'in'}) :: {parameter.name}(*)"
    kinds = {
        "elements": f"{_REALS[file.real][0]}, {array}", "state": f"integer(c_int8_t), {array}",
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


# Julia


def julia_text(file: CFile) -> str:
    """A module with the hyper-parameters as a struct with keywords, and a function for each C function."""
    module, words = _module(file), "".join(f", {p.name}" for p in file.words_of_bits)
    told = [
        *_told(file), "", f"Compile {file.name}.c to a shared library beside this file, then include it:", "",
        f"    cc -O3 -fno-math-errno -std=c99 -fopenmp -shared -fPIC -o lib{file.name}.so {file.name}.c -lm", "",
        f'    include("{file.name}.jl")', f"    hyper = {module}.Hyper()",
        f"    state = {module}.init(param, hyper{words})",
        f"    {module}.step!(param, grad, state, {''.join(f'{key}, ' for key, _ in file.inputs)}hyper)",
    ]  # fmt: skip
    fields = [f"    {field}::Cdouble = {_julia_number(value)}" for field, value in file.defaults]
    lines = [
        *margin(told, "#"), f"module {module}", "", f'const library = joinpath(@__DIR__, "lib{file.name}")', "",
        "Base.@kwdef struct Hyper", *(fields or ["    none::Cdouble = 0.0"]), "end", "", "function check(status)",
        "    status == 0 && return",
        f"    message = ccall((:{file.name}_message, library), Cstring, (Cint,), status)",
        "    error(unsafe_string(message))", "end", "", *_julia_function(file, "init"),
        *(line for word in _callable(file)[2:-1] for line in ("", *_julia_function(file, word))), "", "end",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _module(file: CFile) -> str:
    return "".join(word[:1].upper() + word[1:] for word in file.name.split("_"))


def _called(file: CFile, word: str) -> tuple[str, str, str]:
    """The symbol of a function, the types of its parameters, and its arguments, in Julia."""
    real = _REALS[file.real][1]
    kinds = {"elements": f"Ptr{{{real}}}", "state": "Ptr{UInt8}", "int": "Cint", "count": "Int64", "whole": "Int64",
             "extents": "Ptr{Int64}", "double": "Cdouble", "hyper": "Ref{Hyper}"}  # fmt: skip
    values = {"ndim": "ndims(param)", "count": "length(param)"}
    parameters = file.parameters(word)
    types, arguments = [kinds[p.kind] for p in parameters], [values.get(p.name, p.name) for p in parameters]
    return f"(:{file.name}_{word}, library)", ", ".join(types), ", ".join(arguments)


def _checked(file: CFile, word: str) -> list[str]:
    """The call of a function with a status as its result."""
    symbol, types, arguments = _called(file, word)
    return [f"    check(ccall({symbol}, Cint,", f"        ({types}),", f"        {arguments}))"]


def _julia_function(file: CFile, word: str) -> list[str]:
    """A Julia function for a C function."""
    kinds = {"elements": f"Array{{{_REALS[file.real][1]}}}", "state": "Vector{UInt8}", "double": "Real",
             "whole": "Integer", "hyper": "Hyper"}  # fmt: skip
    takes = [f"{p.name}::{kinds[p.kind]}" for p in file.parameters(word) if p.kind in kinds]
    before, name = [], f"{word}!"
    if word == "init":
        symbol, types, arguments = _called(file, "state_bytes")
        before = [
            f"    bytes = ccall({symbol}, Csize_t, ({types},), {arguments})",
            "    state = Vector{UInt8}(undef, bytes)",
        ]
        takes, name = takes[1:], word
    size_of = ["    shape = collect(Int64, reverse(size(param)))"] * file.shaped
    same = ['    size(grad) == size(param) || throw(DimensionMismatch("gradient and parameter differ in size"))']
    return [
        f"function {name}({', '.join(takes)})", *same * (word == "step"), *size_of, *before, *_checked(file, word),
        f"    return {'state' if word == 'init' else 'param'}", "end",
    ]  # fmt: skip


def _julia_number(value: float) -> str:
    if value in (float("inf"), float("-inf")):
        return "Inf" if value > 0 else "-Inf"
    return repr(value)
