"""Prints a module in Rust, without crates, that calls the C functions of a rule behind safe functions over slices."""

from __future__ import annotations

import math

from rulec.errors import RulecError
from rulec.standalone.prose import margin

from ...cstyle.dialect import indented
from .interface import HYPER_NOTE, callable_words, dimensions_note, fixed_note, hyper_notes, limits, notice
from .model import FUNCTIONS, CFile, Parameter
from .rust_state import state_text
from .rust_words import KEYWORDS, REALS, call, literal, named, own_parameters, signature

#: The types of results.
_RESULTS = {"bytes": "usize", "status": "c_int", "steps": "i64"}


def rust_text(file: CFile) -> str:
    """The module: hyper-parameters, statuses, states, and a safe function for each C function with a status."""
    if file.name in KEYWORDS:
        raise RulecError(f"--name {file.name} is a word of Rust: choose another for --bindings rust")
    steps = [word for word in callable_words(file) if FUNCTIONS[word][0] == "status" and word != "init"]
    texts = [
        "\n".join([*margin(_introduction(file), "//!"), _ALLOWED, "", *_IMPORTS]), _declared(file), _hyper(file),
        state_text(file), *(_function(file, word) for word in steps),
    ]  # fmt: skip
    return "\n\n".join(text.strip("\n") for text in texts) + "\n"


_ALLOWED = "#![allow(dead_code, non_snake_case, clippy::too_many_arguments)]"
_IMPORTS = ("use std::ffi::c_int;", "use std::fmt;")


def _introduction(file: CFile) -> list[str]:
    inputs, bits = own_parameters(file, "step", ("param", "grad")), own_parameters(file, "init", ("param",))
    between = "".join(f", {'' if kind == 'double' else '&'}{name}" for name, kind in inputs)
    return [
        *notice(file), "", f"Compile {file.name}.c and link it, for Rust 1.82 or later:", "", "```sh",
        f"cc -O3 -fno-math-errno -fno-trapping-math -std=c99 -c {file.name}.c",
        f"rustc -O main.rs -C link-arg={file.name}.o", "```", "",
        "For each tensor of parameters once, and then after each backward pass:", "", "```ignore",
        f"let hyper = {file.name}::Hyper::default();",
        f"let mut state = {file.name}::State::new(&hyper, &shape, &param{''.join(f', {name}' for name, _ in bits)})?;",
        f"{file.name}::step(&mut state, &hyper, &mut param, &grad{between})?;", "```", "",
        f"Elements are {REALS[file.real]}{_bits(file)}. A shape has the extents of a tensor, the last the fastest in",
        "memory. A function that returns an error has written nothing, and no function panics.",
        *([dimensions_note(file)] if file.shaped else []), *limits(file),
    ]  # fmt: skip


def _bits(file: CFile) -> str:
    return f", the bits of {file.dtype}" if file.real == "uint16_t" else ""


def _declared(file: CFile) -> str:
    """The C functions."""
    lines = []
    for word in callable_words(file):
        takes = [f"{named(p.name)}: {_c_type(file, p)}" for p in file.parameters(word)]
        lines += signature(f"fn {file.name}_{word}", takes, f" -> {_RESULTS[FUNCTIONS[word][0]]};", 4)
    return "\n".join(['unsafe extern "C" {', *indented(lines), "}"])


def _c_type(file: CFile, parameter: Parameter) -> str:
    """The type of a parameter of a C function."""
    pointer = "*mut" if parameter.written else "*const"
    kinds = {"elements": f"{pointer} {REALS[file.real]}", "state": f"{pointer} u8", "int": "c_int", "count": "i64",
             "whole": "i64", "extents": "*const i64", "double": "f64", "hyper": "*const Hyper"}  # fmt: skip
    return kinds[parameter.kind]


def _hyper(file: CFile) -> str:
    """The struct of hyper-parameters, and their defaults."""
    fields, values = [], []
    for (field, note), (_, value) in zip(hyper_notes(file), file.defaults, strict=True):
        fields += [f"/// {note}", f"pub {named(field)}: f64,"]
        values.append(f"{named(field)}: {_number(value)}")
    fixed = fixed_note(file)
    return "\n".join([
        f"/// {HYPER_NOTE}", *([f"/// {fixed}"] if fixed else []), "#[derive(Clone, Copy, Debug, PartialEq)]",
        "#[repr(C)]", "pub struct Hyper {", *indented(fields or ["none: f64,"]), "}", "", "impl Default for Hyper {",
        "    fn default() -> Self {", *indented(indented(literal("Hyper", values or ["none: 0.0"]))), "    }", "}",
    ])  # fmt: skip


def _number(value: float) -> str:
    if math.isinf(value):
        return "f64::INFINITY" if value > 0 else "f64::NEG_INFINITY"
    return repr(float(value))


def _function(file: CFile, word: str) -> str:
    """The safe function for a C function with a status."""
    real = REALS[file.real]
    takes, slices = ["state: &mut State", "hyper: &Hyper"], []
    for p in file.parameters(word):
        name = named(p.name)
        if p.kind == "elements":
            takes.append(f"{name}: &{'mut ' * p.written}[{real}]")
            slices.append(name)
        elif p.kind == "double":
            takes.append(f"{name}: f64")
    checks = [f'check_length("{name}", state.count, {name}.len())?;' for name in slices]
    meaning = FUNCTIONS[word][1].partition(" A hyper of NULL")[0]
    return "\n".join([
        f"/// {meaning}", *signature(f"pub fn {word}", takes, " -> Result<(), Status> {", 0), *indented(checks),
        "    // SAFETY: all slices have as many elements as the tensor, and C writes to param and state alone.",
        *indented(call(file, word, "")), "}",
    ])  # fmt: skip
