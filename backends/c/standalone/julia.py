"""Prints a module in Julia that calls the C functions of a rule, and may be a rule of Optimisers.jl."""

from __future__ import annotations

from rulec.standalone.prose import margin

from .interface import about, callable_words
from .model import CFile

#: The types of elements, by their type in C.
_REALS = {"float": "Cfloat", "double": "Cdouble", "uint16_t": "UInt16"}


def julia_text(file: CFile) -> str:
    """A module with the rule as a struct with keywords, and a function for each C function."""
    fields = [f"    {field}::Cdouble = {_julia_number(value)}" for field, value in file.defaults]
    words = [word for word in callable_words(file) if word not in ("state_bytes", "init", "steps")]
    parts = [
        ["Base.@kwdef struct Rule <: Parent", *(fields or ["    none::Cdouble = 0.0"]), "end"],
        _check(file), _ARRAYS, _bytes(file), _init(file), *(_moving(file, word) for word in words),
        *([_optimisers(file)] if chains(file) else []),
    ]  # fmt: skip
    lines = [
        *margin(_notes(file), "#"), f"module {module_name(file)}", "",
        f'const library = joinpath(@__DIR__, "lib{file.name}")', f"const Element = {_REALS[file.real]}", "",
        *(_PARENT if chains(file) else ["const Parent = Any"]),
        *(line for part in parts for line in ("", *part)), "", "end",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def chains(file: CFile) -> bool:
    """Whether the rule can be one of Optimisers.jl: it has parameters of real numbers, no inputs and no seeds."""
    return file.real != "uint16_t" and not file.inputs and not file.words_of_bits


def module_name(file: CFile) -> str:
    """The name of the module: it ends in Rule, as Optimisers.jl exports names such as Lion."""
    return "".join(word[:1].upper() + word[1:] for word in file.name.split("_")) + "Rule"


def _notes(file: CFile) -> list[str]:
    module, words = module_name(file), "".join(f", {p.name}" for p in file.words_of_bits)
    inputs = "".join(f"{key}, " for key, _ in file.inputs)
    notes = [
        *about(file), "",
        "No test of rulec runs this file: it follows the manuals of Julia 1.10 and Optimisers.jl 0.4.", "",
        f"Compile {file.name}.c to a shared library beside this file, then include it:", "",
        f"    cc -O3 -fno-math-errno -std=c99 -fopenmp -shared -fPIC -o lib{file.name}.so {file.name}.c -lm", "",
        f'    include("{file.name}.jl")', f"    rule = {module}.Rule()",
        f"    state = {module}.init(param, rule{words})",
        f"    {module}.step!(param, grad, state, {inputs}rule)", "",
        "An Array is updated where it lies. Another strided array, such as a view, is copied before the step and back",
        "after it. Other parameters and elements are an ArgumentError. A gradient may be any array of these elements.",
    ]  # fmt: skip
    if not chains(file):
        return notes
    return [
        *notes, "", "With `using Optimisers` before the include, Rule is a rule of Optimisers.jl:", "",
        f"    Optimisers.setup(OptimiserChain(ClipNorm(1), {module}.Rule()), model)", "",
        "Optimisers.jl subtracts what a rule returns, so apply! steps a copy y of x and returns x - y. The new",
        "parameter, x - (x - y), is y to the bit where y lies between half and twice x. Elsewhere it may differ from",
        "what step! gives by a rounding of the larger of x and y.",
    ]  # fmt: skip


_PARENT = [
    "# Optimisers.jl, where the module around this one has loaded it, else nothing.",
    "const around = parentmodule(@__MODULE__)",
    "const optimisers = isdefined(around, :Optimisers) ? around.Optimisers : nothing",
    "const Parent = optimisers === nothing ? Any : optimisers.AbstractRule",
]

_ARRAYS = """\
# What C reads: an Array itself, or a copy.
readable(x::Array{Element}) = x
readable(x::AbstractArray{Element}) = Array(x)
readable(x::AbstractArray) = throw(ArgumentError(
    "the elements are $(eltype(x)), and this file is for $Element: convert them, or use rulec build --dtype"))

# What C writes: an Array itself, or a copy that `written` brings back.
writable(x::StridedArray{Element}) = readable(x)
writable(x::AbstractArray{Element}) = throw(ArgumentError(
    "the parameter is a $(typeof(x)), which is no strided array: step a copy of it, collect(param), and assign that"))
writable(x::AbstractArray) = readable(x)

written(x, values) = values === x ? x : copyto!(x, values)

function same_size(x, param)
    size(x) == size(param) && return
    throw(DimensionMismatch("an array has the size $(size(x)), and its parameter has $(size(param))"))
end

function check_length(state, param)
    length(state) == state_bytes(param) && return
    throw(ArgumentError("the state is not that of an array of this size: call init with this parameter first"))
end""".splitlines()


def _check(file: CFile) -> list[str]:
    return [
        "function check(status)", "    status == 0 && return",
        f"    message = ccall((:{file.name}_message, library), Cstring, (Cint,), status)",
        "    error(unsafe_string(message))", "end",
    ]  # fmt: skip


def _called(file: CFile, word: str) -> tuple[str, str, str]:
    """The symbol of a function, the types of its parameters, and its arguments, in Julia."""
    real = _REALS[file.real]
    kinds = {"elements": f"Ptr{{{real}}}", "state": "Ptr{UInt8}", "int": "Cint", "count": "Int64", "whole": "Int64",
             "extents": "Ptr{Int64}", "double": "Cdouble", "hyper": "Ref{Rule}"}  # fmt: skip
    values = {"ndim": "ndims(param)", "count": "length(param)", "hyper": "rule",
              "shape": "collect(Int64, reverse(size(param)))"}  # fmt: skip
    parameters = file.parameters(word)
    values |= {p.name: "values" if p.written else f"readable({p.name})" for p in parameters if p.kind == "elements"}
    types, arguments = [kinds[p.kind] for p in parameters], [values.get(p.name, p.name) for p in parameters]
    return f"(:{file.name}_{word}, library)", ", ".join(types), ", ".join(arguments)


def _checked(file: CFile, word: str) -> list[str]:
    """The call of a function with a status as its result."""
    symbol, types, arguments = _called(file, word)
    return [f"    check(ccall({symbol}, Cint,", f"        ({types},),", f"        {arguments}))"]


def _bytes(file: CFile) -> list[str]:
    symbol, types, arguments = _called(file, "state_bytes")
    call = [f"    return ccall({symbol}, Csize_t, ({types},),", f"        {arguments})"]
    return ["function state_bytes(param)", *call, "end"]


def _takes(file: CFile, word: str) -> list[str]:
    """The parameters of a Julia function."""
    kinds = {"elements": "AbstractArray", "state": "Vector{UInt8}", "double": "Real", "whole": "Integer"}
    parameters = [p for p in file.parameters(word) if p.kind in (*kinds, "hyper")]
    return ["rule::Rule" if p.kind == "hyper" else f"{p.name}::{kinds[p.kind]}" for p in parameters]


def _init(file: CFile) -> list[str]:
    """The function that begins the states of an array."""
    return [
        f"function init({', '.join(_takes(file, 'init')[1:])})",
        "    state = Vector{UInt8}(undef, state_bytes(param))", *_checked(file, "init"), "    return state", "end",
    ]  # fmt: skip


def _moving(file: CFile, word: str) -> list[str]:
    """A function that updates a parameter."""
    read = [p.name for p in file.parameters(word) if p.kind == "elements" and not p.written]
    return [
        f"function {word}!({', '.join(_takes(file, word))})", *(f"    same_size({name}, param)" for name in read),
        "    check_length(state, param)", "    values = writable(param)", *_checked(file, word),
        "    return written(param, values)", "end",
    ]  # fmt: skip


def _optimisers(file: CFile) -> list[str]:
    """The methods of Optimisers.jl."""
    rate = [
        "", "    function optimisers.adjust(rule::Rule, eta::Real)", "        return optimisers.adjust(rule; lr = eta)",
        "    end",
    ]  # fmt: skip
    return [
        "if optimisers !== nothing", "    function optimisers.init(rule::Rule, x::AbstractArray)",
        "        return init(x, rule)", "    end", "",
        "    function optimisers.apply!(rule::Rule, state, x::AbstractArray, dx)",
        "        grad = convert(Array{Element}, Base.Broadcast.materialize(dx))",
        "        return state, x .- step!(Array(x), grad, state, rule)", "    end",
        *(rate if "lr" in dict(file.defaults) else []), "end",
    ]  # fmt: skip


def _julia_number(value: float) -> str:
    if value in (float("inf"), float("-inf")):
        return "Inf" if value > 0 else "-Inf"
    return repr(value)
