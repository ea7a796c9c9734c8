"""The words on a rule's C interface, for its header and for the modules in other languages."""

from __future__ import annotations

from rulec.compiler.weights import PARTS
from rulec.language.expr.node import Node
from rulec.language.expr.text import expression_text, number_text
from rulec.standalone.prose import title

from .model import FUNCTIONS, CFile

#: The kinds of results of functions that other languages call.
RESULTS = ("bytes", "status", "steps")

#: The introduction of the hyper-parameters.
HYPER_NOTE = "Hyper-parameters, with their defaults and ranges. They may change from step to step."


def notice(file: CFile) -> list[str]:
    """The lines at the beginning of every file beside the source: the rule and the licence."""
    return [
        title(file.rule), "",
        f"SPDX-License-Identifier: MIT. Printed by rulec; {file.name}.c has the notice, the mathematics and the paper.",
    ]  # fmt: skip


def about(file: CFile) -> list[str]:
    """The lines at the beginning of a file that declares the functions: the header describes them."""
    return [*notice(file), f"What the functions do is said in {file.name}.h."]


def callable_words(file: CFile) -> list[str]:
    """The words of the functions for other languages."""
    return [word for word in file.words if FUNCTIONS[word][0] in RESULTS]


def hyper_notes(file: CFile) -> list[tuple[str, str]]:
    """The fields of the hyper-parameters, each with its default and its range in words."""
    notes = []
    for (field, value), key in zip(file.defaults, file.hyper, strict=True):
        h, text = file.family.rule.hyper[key], number_text(value)
        if isinstance(h.default, Node):
            text = f"{expression_text(h.default)}, {text}"
        range_text = h.range_text()
        notes.append((field, f"{text}{'; ' + range_text if range_text else ''}"))
    return notes


def fixed_note(file: CFile) -> str:
    """A sentence with the hyper-parameters that are no fields, and their values; empty where there are none."""
    fixed = [f"{key} = {number_text(v)}" for key, v in file.family.static.items()]
    return f"Fixed when this file was printed: {', '.join(fixed)}." if fixed else ""


def dimensions_note(file: CFile) -> str:
    """A sentence on tensors of more than two dimensions."""
    if file.family.rule.view.get("flatten") == "rest":
        return "A tensor of more than two dimensions is a matrix: all but the first are its columns."
    return "A tensor of more than two dimensions is a batch of matrices, its last two."


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


def limits(file: CFile) -> list[str]:
    """The lines on what a tensor must be, and on how its states are stored; each group behind an empty line."""
    lines = _stored(file)
    wide = [b.name for case in file.family.cases for b in case.program.states if "n" not in b.axes.letters]
    if wide:
        shared = " and ".join(dict.fromkeys(wide))
        among = "among tensors; here each has its own, which is the same where all take every step."
        lines += ["", f"The rule shares {shared}", among]
    if file.family.applies is not None:
        lines += [
            "",
            f"The rule applies where {expression_text(file.family.applies)}: give other tensors another rule.",
        ]
    return lines
