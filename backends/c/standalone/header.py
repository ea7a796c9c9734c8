"""Prints the header of a rule in C: its functions, hyper-parameters and statuses."""

from __future__ import annotations

from rulec.compiler.weights import PARTS
from rulec.language.expr.node import Node
from rulec.language.expr.text import expression_text, number_text
from rulec.standalone.prose import title

from ...cstyle.dialect import comment, indented
from ...cstyle.element import literal
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
        title(file.rule), "",
        f"SPDX-License-Identifier: MIT. Printed by rulec; {file.name}.c has the notice, the mathematics and the paper.",
        "",
        "For each tensor of parameters (a layer's weights), once:", "",
        f"    void *state = malloc({file.name}_state_bytes({size}));",
        f"    {file.name}_init(state, param, {size}, NULL{''.join(f', {p.name}' for p in file.words_of_bits)});", "",
        "and after each backward pass:", "",
        f"    {file.name}_step(param, grad, state, {size}, {''.join(f'{key}, ' for key, _ in file.inputs)}&hyper);", "",
        f"param and grad are {file.real}, contiguous, and do not overlap; param is updated in place.",
    ]  # fmt: skip
    if file.shaped:
        lines += [
            "shape has ndim extents, the last the fastest in memory: those of a Fortran or Julia array are reversed.",
            "A tensor of more than two dimensions is a batch of matrices, its last two."
            if file.family.rule.view.get("flatten") != "rest"
            else "A tensor of more than two dimensions is a matrix: all but the first are its columns.",
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
    return [*lines, *_limits(file)]


def _stored(file: CFile) -> list[str]:
    """The lines on states in codes and on weights in parts."""
    coded = {name: form.text for case in file.family.cases for name, form in case.versions[0].layout.formats}
    lines = []
    if coded:
        listed = ", ".join(f"{name} {text}" for name, text in coded.items())
        lines += ["", f"States in codes, with a scale for each block of so many elements: {listed}.",
                  "Tensors of any size have them."]  # fmt: skip
    if file.family.seeded:
        lines += ["", *_random(file)]
    if file.storage.weights in PARTS:
        kind = file.storage.weights
        lines += ["", f"Weights are stored as {kind}: the state block has what param has no place for."]
    return lines


def _random(file: CFile) -> list[str]:
    """The lines on numbers that are rounded at random."""
    states = {state for case in file.family.cases for state in case.program.memory.unbiased}
    rounded = [*["param"] * (file.storage.weights == "stochastic"), *sorted(states)]
    return [
        f"Rounded up or down at random: {', '.join(rounded)}. The bits follow from seed, from number (of the tensor,",
        "another one for each, below 2**24), from the step, and from the place of an element in its tensor.",
    ]


def _limits(file: CFile) -> list[str]:
    lines = _stored(file)
    wide = [b.name for case in file.family.cases for b in case.program.states if "n" not in b.axes.letters]
    if wide:
        shared = " and ".join(dict.fromkeys(wide))
        told = "among tensors; here each has its own, which is the same where all take every step."
        lines += ["", f"The rule shares {shared}", told]
    if file.family.applies is not None:
        lines += [
            "",
            f"The rule applies where {expression_text(file.family.applies)}: give other tensors another rule.",
        ]
    return lines


def _hyper(file: CFile) -> list[str]:
    family, defaults = file.family, file.defaults
    fields = []
    for (field, value), key in zip(defaults, file.hyper, strict=True):
        h = family.rule.hyper[key]
        text = number_text(value)
        if isinstance(h.default, Node):
            text = f"{expression_text(h.default)}, {text}"
        range_text = h.range_text()
        fields.append(f"double {field}; /* {text}{'; ' + range_text if range_text else ''} */")
    fixed = [f"{key} = {number_text(v)}" for key, v in family.static.items()]
    lines = ["/* Hyper-parameters, with their defaults and ranges. They may change from step to step. */"]
    lines += [f"/* Fixed when this file was printed: {', '.join(fixed)}. */"] if fixed else []
    values = ", ".join(literal(value) for _, value in defaults) or "0.0"
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
