"""Prints a module in Julia that calls the C functions of a rule."""

from __future__ import annotations

from rulec.standalone.prose import margin

from .interface import about, callable_words
from .model import CFile

#: The types of elements, by their type in C.
_REALS = {"float": "Cfloat", "double": "Cdouble", "uint16_t": "UInt16"}


def julia_text(file: CFile) -> str:
    """A module with the hyper-parameters as a struct with keywords, and a function for each C function."""
    module, words = _module(file), "".join(f", {p.name}" for p in file.words_of_bits)
    told = [
        *about(file), "", f"Compile {file.name}.c to a shared library beside this file, then include it:", "",
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
        *(line for word in callable_words(file)[2:-1] for line in ("", *_julia_function(file, word))), "", "end",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _module(file: CFile) -> str:
    return "".join(word[:1].upper() + word[1:] for word in file.name.split("_"))


def _called(file: CFile, word: str) -> tuple[str, str, str]:
    """The symbol of a function, the types of its parameters, and its arguments, in Julia."""
    real = _REALS[file.real]
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
    kinds = {"elements": f"Array{{{_REALS[file.real]}}}", "state": "Vector{UInt8}", "double": "Real",
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
