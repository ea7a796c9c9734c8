"""Prints the header of a rule in C: its functions, hyper-parameters and statuses."""

from __future__ import annotations

from ...cstyle.dialect import comment, indented
from ...cstyle.element import literal
from .interface import HYPER_NOTE, dimensions_note, fixed_note, hyper_notes, limits, notice
from .model import FUNCTIONS, STATUSES, CFile
from .stage import signature


def header_text(file: CFile) -> str:
    """The whole header."""
    guard = f"{file.upper}_H"
    lines = [
        *comment([*_introduction(file)]), f"#ifndef {guard}", f"#define {guard}", "", "#include <stddef.h>",
        "#include <stdint.h>", "", "#ifdef __cplusplus", 'extern "C" {', "#endif", "", *_hyper(file), "",
        *_statuses(file),
        "", *_functions(file), "#ifdef __cplusplus", "}", "#endif", "", "#endif",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _introduction(file: CFile) -> list[str]:
    size = "ndim, shape" if file.shaped else "count"
    lines = [
        *notice(file), "", "For each tensor of parameters (a layer's weights), once:", "",
        f"    void *state = malloc({file.name}_state_bytes({size}));",
        f"    {file.name}_init(state, param, {size}, NULL{''.join(f', {p.name}' for p in file.words_of_bits)});", "",
        "and after each backward pass:", "",
        f"    {file.name}_step(param, grad, state, {size}, {''.join(f'{key}, ' for key, _ in file.inputs)}&hyper);", "",
        f"param and grad are {file.real}, contiguous, and do not overlap; param is updated in place.",
    ]  # fmt: skip
    if file.shaped:
        lines += [
            "shape has ndim extents, the last the fastest in memory: those of a Fortran or Julia array are reversed.",
            dimensions_note(file),
        ]
    else:
        lines.append("count is the number of elements, whatever their shape.")
    lines += [
        "The state block is plain bytes without pointers: copy or save it as it is to keep a checkpoint. It counts the",
        "steps itself. malloc's alignment is enough; 64 bytes are best. Blocks of different tensors may be used from",
        "different threads at the same time. With OpenMP several threads update a large tensor; their number",
        "changes no bit of a result.", "",
        "Compile with -O3 -fno-math-errno -fno-trapping-math: these change no bit, and let compilers use vectors.",
        "", "What returns int returns 0 or one of the statuses below; where it is not 0, nothing was written.",
    ]  # fmt: skip
    return [*lines, *limits(file)]


def _hyper(file: CFile) -> list[str]:
    fields = [f"double {field}; /* {note} */" for field, note in hyper_notes(file)]
    fixed = fixed_note(file)
    lines = [f"/* {HYPER_NOTE} */"]
    lines += [f"/* {fixed} */"] if fixed else []
    values = ", ".join(literal(value) for _, value in file.defaults) or "0.0"
    return [
        *lines, "typedef struct {",
        *indented(fields or ["double none; /* the rule has none */"]), f"}} {file.name}_hyper;",
        "", f"/* {file.name}_hyper hyper = {file.upper}_DEFAULTS; */", f"#define {file.upper}_DEFAULTS \\",
        f"    {{{values}}}",
    ]  # fmt: skip


def _statuses(file: CFile) -> list[str]:
    return [
        "enum {",
        *indented([f"{file.upper}_{key} = {i}, /* {text} */" for i, (key, text) in enumerate(STATUSES[:-1])]),
        *indented([f"{file.upper}_{key} = {len(STATUSES) - 1} /* {text} */" for key, text in STATUSES[-1:]]),
        "};",
    ]


def _functions(file: CFile) -> list[str]:
    return [
        line for word in file.words for line in (f"/* {FUNCTIONS[word][1]} */", *signature(*file.head(word), ";"), "")
    ]
