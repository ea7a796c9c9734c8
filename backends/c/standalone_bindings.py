"""Writes what Fortran and Julia need to call the C functions of a rule."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

from rulec.standalone.prose import margin, title

from .standalone import CFile


def _told(file: CFile) -> list[str]:
    return [
        title(file.rule), "",
        f"SPDX-License-Identifier: MIT. Printed by rulec; {file.name}.c has the notice, the mathematics and the paper.",
        f"What the functions do is said in {file.name}.h.",
    ]  # fmt: skip


# Fortran


def fortran_text(file: CFile) -> str:
    """A module with the type of the hyper-parameters, whose components have their defaults, and the interfaces."""
    told = [
        *_told(file), "", "Pass arrays as they are, of any rank. What is contiguous is updated where it lies.",
        *(["A shape is that of C: reverse that of a Fortran array, [size(w, 2), size(w, 1)]."] if file.shaped else []),
    ]  # fmt: skip
    hyper = [f"real(c_double) :: {field} = {_real(value)}" for field, value in file.defaults]
    functions = [line for part in _fortran_functions(file) for line in part]
    lines = [
        *margin(told, "!"), f"module {file.name}_rule", "  use, intrinsic :: iso_c_binding", "  implicit none",
        "  private",
        f"  public :: {', '.join([f'{file.name}_hyper', *_names(file)])}", "",
        f"  type, bind(c) :: {file.name}_hyper",
        *(f"    {x}" for x in hyper or ["real(c_double) :: none = 0.0_c_double"]),
        "  end type", "", "  interface", *(f"    {x}" for x in functions), "  end interface",
        f"end module {file.name}_rule",
    ]  # fmt: skip
    return "\n".join(x for line in lines for x in _continued(line)) + "\n"


#: What the elements of arrays are in Fortran, by their type in C.
_KINDS = {"float": "real(c_float)", "double": "real(c_double)", "uint16_t": "integer(c_int16_t)"}


def _names(file: CFile) -> list[str]:
    moves = ["to_evaluation", "to_training"] if file.rule.evaluate is not None else []
    return [f"{file.name}_{word}" for word in ("state_bytes", "init", "step", *moves, "steps")]


def _real(value: float) -> str:
    if value in (float("inf"), float("-inf")):
        return f"{'-' if value < 0 else ''}huge(1.0_c_double)"
    text = repr(value)
    return f"{text}_c_double" if "." in text or "e" in text else f"{text}.0_c_double"


def _fortran_functions(file: CFile) -> list[list[str]]:
    extents = ["ndim", "shape"] if file.shaped else ["count"]
    given = [key for key, _ in file.inputs]
    size = ["integer(c_int), value :: ndim", "integer(c_int64_t), intent(in) :: shape(*)"] if file.shaped else [
        "integer(c_int64_t), value :: count"
    ]  # fmt: skip
    hyper = [f"type({file.name}_hyper), intent(in) :: hyper"]

    def array(name: str, intent: str) -> str:
        kind = "integer(c_int8_t)" if name == "state" else _KINDS[file.real]
        return f"{kind}, intent({intent}) :: {name}(*)"

    inputs = [array(key, "in") if kind == "like p" else f"real(c_double), value :: {key}" for key, kind in file.inputs]
    param, state = array("param", "inout"), array("state", "inout")

    name = file.name
    found = [
        _function(f"{name}_state_bytes", extents, "integer(c_size_t)", size),
        _function(f"{name}_init", ["state", "param", *extents, "hyper"], "integer(c_int)",
                  [state, array("param", "in"), *size, *hyper]),
        _function(f"{name}_step", ["param", "grad", "state", *extents, *given, "hyper"], "integer(c_int)",
                  [param, array("grad", "in"), state, *size, *inputs, *hyper]),
    ]  # fmt: skip
    for word in _names(file)[3:-1]:
        declared = [param, state, *size, *hyper]
        found.append(_function(word, ["param", "state", *extents, "hyper"], "integer(c_int)", declared))
    return [*found, _function(f"{name}_steps", ["state"], "integer(c_int64_t)", [array("state", "in")])]


def _function(name: str, parameters: Sequence[str], kind: str, declared: Sequence[str]) -> list[str]:
    words = ("c_int", "c_int8_t", "c_int16_t", "c_int64_t", "c_size_t", "c_float", "c_double")
    used = [x for x in words if any(_has(x, d) for d in (kind, *declared))]
    hyper = (
        [next(d.split("(")[1].split(")")[0] for d in declared if "_hyper)" in d)]
        if any("_hyper)" in d for d in declared)
        else []
    )
    found = "status" if kind == "integer(c_int)" else "found"
    return [
        f'function {name}({", ".join(parameters)}) bind(c, name="{name}") result({found})',
        f"  import :: {', '.join([*used, *hyper])}", *(f"  {d}" for d in declared), f"  {kind} :: {found}",
        "end function",
    ]  # fmt: skip


def _has(word: str, line: str) -> bool:
    return re.search(rf"\b{word}\b", line) is not None


def _continued(line: str) -> list[str]:
    """A line on as many as it needs, for Fortran's lines end at 132 characters."""
    if len(line) <= 120 or line.startswith("!"):
        return [line]
    indent = " " * (len(line) - len(line.lstrip()))
    parts = textwrap.wrap(line.strip(), 110, break_long_words=False, break_on_hyphens=False)
    return [
        f"{indent}{'' if i == 0 else '  '}{part}{' &' if i < len(parts) - 1 else ''}" for i, part in enumerate(parts)
    ]


# Julia


def julia_text(file: CFile) -> str:
    """A module with the hyper-parameters as a struct with keywords, and a function for each of C's."""
    module = _module(file)
    told = [
        *_told(file), "", f"Compile {file.name}.c to a shared library beside this file, then include it:", "",
        f"    cc -O3 -fno-math-errno -std=c99 -fopenmp -shared -fPIC -o lib{file.name}.so {file.name}.c -lm", "",
        f'    include("{file.name}.jl")', f"    hyper = {module}.Hyper()", f"    state = {module}.init(param, hyper)",
        f"    {module}.step!(param, grad, state, {''.join(f'{key}, ' for key, _ in file.inputs)}hyper)",
    ]  # fmt: skip
    fields = [f"    {field}::Cdouble = {_julia_number(value)}" for field, value in file.defaults]
    lines = [
        *margin(told, "#"), f"module {module}", "", f'const library = joinpath(@__DIR__, "lib{file.name}")', "",
        "Base.@kwdef struct Hyper", *(fields or ["    none::Cdouble = 0.0"]), "end", "", "function check(status)",
        "    status == 0 && return",
        f"    message = ccall((:{file.name}_message, library), Cstring, (Cint,), status)",
        "    error(unsafe_string(message))", "end", "", *_julia_init(file), "", *_julia_step(file),
        *(line for word in _names(file)[3:-1] for line in ("", *_julia_move(file, word))), "", "end",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _module(file: CFile) -> str:
    return "".join(word[:1].upper() + word[1:] for word in file.name.split("_"))


def _julia_real(file: CFile) -> str:
    return {"float": "Cfloat", "double": "Cdouble", "uint16_t": "UInt16"}[file.real]


def _julia_size(file: CFile) -> tuple[list[str], str, str]:
    """The line that says how large a tensor is, the types of it in C, and the values."""
    if not file.shaped:
        return [], "Int64", "length(param)"
    return ["    shape = collect(Int64, reverse(size(param)))"], "Cint, Ptr{Int64}", "ndims(param), shape"


def _julia_init(file: CFile) -> list[str]:
    size_of, types, values = _julia_size(file)
    real = _julia_real(file)
    return [
        f"function init(param::Array{{{real}}}, hyper::Hyper)", *size_of,
        f"    bytes = ccall((:{file.name}_state_bytes, library), Csize_t, ({types},), {values})",
        "    state = Vector{UInt8}(undef, bytes)", f"    check(ccall((:{file.name}_init, library), Cint,",
        f"        (Ptr{{UInt8}}, Ptr{{{real}}}, {types}, Ref{{Hyper}}),", f"        state, param, {values}, hyper))",
        "    return state", "end",
    ]  # fmt: skip


def _julia_step(file: CFile) -> list[str]:
    size_of, types, values = _julia_size(file)
    real = _julia_real(file)
    kinds = {"like p": (f"Array{{{real}}}", f"Ptr{{{real}}}"), "scalar": ("Real", "Cdouble")}
    given = "".join(f"{key}::{kinds[kind][0]}, " for key, kind in file.inputs)
    passed = "".join(f", {kinds[kind][1]}" for _, kind in file.inputs)
    keys = "".join(f", {key}" for key, _ in file.inputs)
    return [
        f"function step!(param::Array{{{real}}}, grad::Array{{{real}}}, state::Vector{{UInt8}}, {given}hyper::Hyper)",
        '    size(grad) == size(param) || throw(DimensionMismatch("gradient and parameter differ in size"))',
        *size_of, f"    check(ccall((:{file.name}_step, library), Cint,",
        f"        (Ptr{{{real}}}, Ptr{{{real}}}, Ptr{{UInt8}}, {types}{passed}, Ref{{Hyper}}),",
        f"        param, grad, state, {values}{keys}, hyper))", "    return param", "end",
    ]  # fmt: skip


def _julia_move(file: CFile, word: str) -> list[str]:
    size_of, types, values = _julia_size(file)
    real = _julia_real(file)
    short = word.removeprefix(f"{file.name}_")
    return [
        f"function {short}!(param::Array{{{real}}}, state::Vector{{UInt8}}, hyper::Hyper)", *size_of,
        f"    check(ccall((:{word}, library), Cint,", f"        (Ptr{{{real}}}, Ptr{{UInt8}}, {types}, Ref{{Hyper}}),",
        f"        param, state, {values}, hyper))", "    return param", "end",
    ]  # fmt: skip


def _julia_number(value: float) -> str:
    if value in (float("inf"), float("-inf")):
        return "Inf" if value > 0 else "-Inf"
    return repr(value)
