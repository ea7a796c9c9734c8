"""A rule as C99: the common facts of the source, the header and the modules for other languages."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import NamedTuple

from rulec.backend.printer import unique_name
from rulec.compiler.ir import Buffer, Program
from rulec.formats import Format
from rulec.kernel.quantized import part_length
from rulec.language.eval_point import to_evaluation, to_training
from rulec.language.expr.node import Node, Op
from rulec.language.inputs import matrices_of
from rulec.language.rule import Rule
from rulec.runtime.engine import EPS, default_hyper
from rulec.runtime.storage.options import Storage
from rulec.standalone.cases import CannotBuild, Case, Family, Version, family

from ...cstyle.element import literal
from ...cstyle.numbers import LOOPS
from .matrix import WRITTEN
from .stage import RESERVED, TYPES

#: Elements of a tensor for one call of a stage's function, where no states are in codes.
CHUNK = 8192

#: The statuses that functions return, and their meanings.
STATUSES = (
    ("OK", "done"),
    ("BAD_ARGUMENT", "a pointer is NULL, or a size is negative"),
    ("BAD_HYPER", "a hyper-parameter is outside its range"),
    ("BAD_STATE", "the state block was not initialised for a tensor of this shape"),
    ("NO_MEMORY", "there is no memory for states, or for what a step works out on the way"),
    ("BAD_SHAPE", "the rule does not apply to a tensor of this shape"),
)


#: The functions `<name>_<word>`, in order: the kind of result, and the purpose.
FUNCTIONS = {
    "defaults": ("hyper", "The defaults, for languages that cannot read the macro."),
    "state_bytes": ("bytes", "The bytes of the state block of a tensor; 0 where there is no such tensor."),
    "init": (
        "status",
        "Begins: the first values of the states, and no steps. A hyper of NULL stands for the defaults.",
    ),
    "step": ("status", "One step: updates param and state. A hyper of NULL stands for the defaults."),
    "to_evaluation": ("status", "Moves param to where the model is to be evaluated, between steps."),
    "to_training": ("status", "Moves param back to where it is trained, before the next step."),
    "steps": ("steps", "The steps so far; -1 where the block was not initialised."),
    "message": ("text", "What a status means."),
}


#: The numbers in the head of a state block that choose random bits.
SEEDED = ("seed", "number")

#: The words of random bits as doubles.
_WORD_TEXTS = {
    "seed_low": "(double)(head->seed & 0xffff)", "seed_high": "(double)(head->seed >> 16 & 0xffff)",
    "number": "(double)(head->number & 0xffffff)",
}  # fmt: skip


class Parameter(NamedTuple):
    """A parameter of a function: an array is `written`, or only read.

    `kind` is "elements" (an array like the parameter), "state", "int", "count", "whole", "extents", "double" or
    "hyper"; or "view", in place of extents in functions inside the source.
    """

    name: str
    kind: str
    written: bool = False


class CFile:
    """A rule under the name `name` for tensors of one dtype: the common facts of all its printed files."""

    def __init__(self, rule: Rule, name: str, dtype: str, storage: Storage) -> None:
        self.rule, self.name, self.upper = rule, name, name.upper()
        self.dtype, self.real, self.storage = dtype, TYPES[dtype], storage
        self.family: Family = family(rule, dtype, storage, "C", WRITTEN)
        for case in self.family.cases:
            for version in case.versions:
                check_operands(rule, version)
        self.hyper = self._hyper_names()
        self.states = self._state_names()
        #: The place of the scales of each state in codes.
        self.scales = {state: unique_name(f"{state}_scale", {*self.states.values()}) for state in self._coded()}
        self.inputs = list(self.family.rule.inputs.items())
        taken = {*RESERVED, "magic", "steps", "bytes"}
        for key in matrices_of(self.family.rule.inputs):
            raise CannotBuild(rule.name, "C", f"its input {key} is a matrix with a shape of its own")
        for key in self.family.rule.inputs:
            if key in taken:
                raise CannotBuild(rule.name, "C", f"its input {key} has a name that the written functions use")

    # Parameters of functions

    @property
    def shaped(self) -> bool:
        """Whether functions take a shape instead of the number of elements."""
        return self.family.shaped

    @property
    def extents(self) -> list[Parameter]:
        """The parameters for the size of a tensor."""
        if self.shaped:
            return [Parameter("ndim", "int"), Parameter("shape", "extents")]
        return [Parameter("count", "count")]

    @property
    def words_of_bits(self) -> list[Parameter]:
        """The parameters that choose the random bits of a tensor, where the rule has any."""
        return [Parameter(word, "whole") for word in SEEDED] if self.family.seeded else []

    @property
    def words(self) -> list[str]:
        """The words in `FUNCTIONS` of this rule's functions."""
        return [word for word in FUNCTIONS if self.rule.evaluate is not None or not word.startswith("to_")]

    def parameters(self, word: str) -> list[Parameter]:
        """The parameters of a function."""
        inputs = [Parameter(key, "elements" if kind == "like p" else "double") for key, kind in self.inputs]
        param, state = Parameter("param", "elements", True), Parameter("state", "state", True)
        grad, hyper = Parameter("grad", "elements"), Parameter("hyper", "hyper")
        others = {
            "defaults": [], "state_bytes": self.extents, "steps": [state._replace(written=False)],
            "init": [state, param._replace(written=False), *self.extents, hyper, *self.words_of_bits],
            "step": [param, grad, state, *self.extents, *inputs, hyper], "message": [Parameter("status", "int")],
        }  # fmt: skip
        return others.get(word, [param, state, *self.extents, hyper])

    def inside(self, word: str) -> list[Parameter]:
        """The parameters of the function inside the source that does the work of a public function."""
        view = Parameter("view", "view")
        return [view if p.kind == "extents" else p for p in self.parameters(word) if p.kind != "int"]

    def head(self, word: str) -> tuple[str, list[str]]:
        """The type and name of a function in C, and its parameters."""
        kinds = {"hyper": f"{self.name}_hyper ", "bytes": "size_t ", "status": "int ", "steps": "int64_t ",
                 "text": "const char *"}  # fmt: skip
        return f"{kinds[FUNCTIONS[word][0]]}{self.name}_{word}", [self.declared(p) for p in self.parameters(word)]

    def declared(self, parameter: Parameter) -> str:
        """A parameter in C."""
        kinds = {"elements": f"{self.real} *", "state": "void *", "int": "int ", "count": "int64_t ",
                 "whole": "int64_t ", "extents": "const int64_t *", "double": "double ",
                 "hyper": f"const {self.name}_hyper *", "view": f"const {self.name}_view *"}  # fmt: skip
        read = "const " * (parameter.kind in ("elements", "state") and not parameter.written)
        return f"{read}{kinds[parameter.kind]}{parameter.name}"

    @property
    def defaults(self) -> list[tuple[str, float]]:
        """The fields of the hyper-parameters, and their defaults."""
        values = default_hyper(self.family.rule, {}, self.dtype)
        return [(field, values[key]) for key, field in self.hyper.items()]

    def known(self, value: Node, view: str = "") -> str:
        """A hyper-parameter, `t`, or a fact as a double; `view` stands before the extents of a tensor."""
        name = str(value.arg)
        if value.op is Op.STEP:
            return "t"
        if value.op is Op.FACT and name in _WORD_TEXTS:
            return _WORD_TEXTS[name]
        if value.op is Op.FACT:
            extent = f"(double){view}{'count' if name == 'numel' else name}"
            return literal(EPS[self.dtype]) if name == "machine_eps" else extent
        static = self.family.static
        return literal(static[name]) if name in static else f"hyper->{self.hyper[name]}"

    def _hyper_names(self) -> dict[str, str]:
        """The field of each hyper-parameter, except static ones. Names differ in more than capitals, for Fortran."""
        taken = set(RESERVED)
        fields: dict[str, str] = {}
        for key in (k for k, h in self.family.rule.hyper.items() if not h.static):
            name = unique_name(key, taken)
            while name.lower() in {other.lower() for other in fields.values()}:
                name += "_"
            fields[key] = name
        return fields

    # Cases

    @property
    def program(self) -> Program:
        """The program of the first case: expressions of numbers are the same in all."""
        return self.family.cases[0].program

    @property
    def turns(self) -> bool:
        """Whether matrices with more rows than columns are seen transposed."""
        return self.family.rule.view.get("short") == "first"

    def moves(self) -> Mapping[str, Rule]:
        """The rules that move a parameter to its point of evaluation and back, by the word of the function."""
        there, back = to_evaluation(self.rule), to_training(self.rule)
        return {} if there is None or back is None else {"to_evaluation": there, "to_training": back}

    def inner_name(self, word: str, kind: int, number: int = 0) -> str:
        """The name of the function inside for a case, and for a version of an update."""
        cases, updates = self.family.cases, word == "update"
        name = f"{self.name}_{word}{'' if updates else '_'}{f'_{kind}' * (len(cases) > 1)}"
        return name + (chr(ord("a") + number) if updates and len(cases[kind].versions) > 1 else "")

    # States

    def _state_names(self) -> dict[str, str]:
        """The name of each state: of its number in the head of a block, or of its place in the block."""
        taken = {"magic", "steps", "bytes", *RESERVED, *(p.name for p in self.words_of_bits)}
        states = dict.fromkeys(b.name for case in self.family.cases for b in case.program.states)
        return {state: unique_name(state, taken) for state in states}

    def fields_of(self, state: str) -> list[str]:
        """The places of an array state: of its values; or of its codes and of their scales."""
        return [self.states[state], *([self.scales[state]] if state in self.scales else [])]

    def _coded(self) -> set[str]:
        """The states in codes."""
        return {state for case in self.family.cases for state, _ in case.versions[0].layout.formats}

    def numbers(self) -> list[str]:
        """The scalar states of all cases, in order."""
        numbers: dict[str, None] = {}
        for case in self.family.cases:
            numbers.update(dict.fromkeys(b.name for b in case.program.states if not is_vector(b)))
        return list(numbers)

    def arrays(self, case: Case) -> list[Buffer]:
        """The array states of a case, in order."""
        return [b for b in case.program.states if is_vector(b)]

    def all_arrays(self) -> list[str]:
        """The array states of all cases, in order."""
        return list(dict.fromkeys(b.name for case in self.family.cases for b in self.arrays(case)))

    @property
    def formats(self) -> list[Format]:
        """The formats of states in codes, each once."""
        layouts = [case.versions[0].layout for case in self.family.cases]
        return list(dict.fromkeys(form for layout in layouts for _, form in layout.formats))

    @property
    def chunk(self) -> int:
        """The elements of a tensor for one call of a stage's function: with states in codes, as many as are decoded."""
        layouts = [case.versions[0].layout for case in self.family.cases]
        return max(map(part_length, layouts)) if self.formats else CHUNK

    def size(self, buffer: Buffer) -> str:
        """The number of elements of a state, in C."""
        letters = "".join(c for c in buffer.axes.letters if c in "bij")
        return "count" if letters == "bij" else LOOPS[letters][1]

    @property
    def magic(self) -> int:
        """The mark of a state block, different for other rules and dtypes."""
        kept = [(b.name, str(b.axes)) for case in self.family.cases for b in case.program.states]
        stored = self.storage.words.get("", self.dtype)
        if {*self.storage.words} - {""}:
            stored = "; ".join(case.versions[0].layout.text() for case in self.family.cases)
        facts = (self.name, stored, kept, *["seeded"] * self.family.seeded)
        return int(hashlib.sha256(repr(facts).encode()).hexdigest()[:15], 16)


def check_operands(rule: Rule, version: Version) -> None:
    """CannotBuild where a matrix function needs values of another storage than the arithmetic's."""
    layout = version.layout
    called = [v.args[0] for gap in version.plan.gaps for v in gap.values if v.op in WRITTEN]
    read = [str(operand.arg) for operand in called if operand.op is Op.LOAD]
    for name in read:
        if layout.dtype(name) != layout.compute:
            what = {"g": "the gradient", "p": "the parameter"}.get(name, name)
            why = f"a matrix function reads {what} in {layout.dtype(name)}, and computes in {layout.compute}"
            raise CannotBuild(rule.name, "C", f"{why}: give --dtype {layout.compute}")


def is_vector(buffer: Buffer) -> bool:
    """Whether a state is more than one number."""
    return bool({"b", "i", "j"} & set(buffer.axes.letters))
