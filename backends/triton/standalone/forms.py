"""The forms of a rule in a file for Triton: a program for each kind of tensor, and for each move of the parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from rulec.compiler.ir import Buffer, Program
from rulec.compiler.layout import Layout
from rulec.kernel.place import is_shaped
from rulec.language.eval_point import to_evaluation, to_training
from rulec.language.expr.node import WORDS, Kind, Node, Op
from rulec.language.rule import Rule
from rulec.runtime.buckets.flat import axes_in_flat
from rulec.runtime.buckets.plan import Plan
from rulec.runtime.storage.options import Storage
from rulec.standalone.cases import Case, Family, Version, family, oriented, values

#: What moves parameters between steps.
MOVES: Mapping[str, Callable[[Rule], Rule | None]] = {"to_evaluation": to_evaluation, "to_training": to_training}


@dataclass(frozen=True)
class Form:
    """A program under the name of its class and the prefix of its kernels.

    `word` is empty for a step, and else what moves parameters.
    """

    class_name: str
    prefix: str
    word: str
    version: Version
    case: Case

    @property
    def program(self) -> Program:
        """The program, with both arms of branches on `t` and hyper-parameters."""
        return self.version.program

    @property
    def layout(self) -> Layout:
        """How its buffers are stored."""
        return self.version.layout

    @property
    def plan(self) -> Plan:
        """Its values between stages."""
        return self.version.plan

    @property
    def scratch(self) -> list[str]:
        """Buffers that live in a step alone."""
        return [b.name for b in self.program.buffers if b.role == "scratch"]

    @property
    def arrays(self) -> list[Buffer]:
        """The states of the parameter's shape."""
        return [b for b in self.program.states if b.axes.elementwise]

    @property
    def vectors(self) -> list[Buffer]:
        """The states of matrices, rows or columns."""
        return [b for b in self.program.states if not b.axes.elementwise and not b.axes.number]

    @property
    def numbers(self) -> list[Buffer]:
        """The scalar states."""
        return [b for b in self.program.states if b.axes.number]

    @cached_property
    def host_numbers(self) -> list[str]:
        """The scalar states that the host knows; the others follow from reductions."""
        late = {s.buffer for s in self.program.finish}
        return [b.name for b in self.numbers if b.name not in late]

    @property
    def shaped(self) -> bool:
        """Whether a kernel sees rows and columns."""
        return any(is_shaped(self.program, stage, self.layout) for stage in self.program.stages)

    @property
    def viewed(self) -> bool:
        """Whether anything of a step sees a tensor as matrices."""
        return self.shaped or bool(self.vectors or self.program.vectors or self.scratch)

    @cached_property
    def has_matrix_function(self) -> bool:
        """Whether it iterates newton_schulz."""
        return any(v.op is Op.NEWTON_SCHULZ for gap in self.plan.gaps for v in gap.values)


def forms_of(
    rule: Rule, whole: Family, dtype: str, storage: Storage, form: str, refuse: Callable[[str], None]
) -> list[Form]:  # fmt: skip
    """The forms of a rule's step, then those of its moves."""
    kinds = [
        (version, case) for case in whole.cases for version in oriented(whole.rule, case.program, (), dtype, storage)
    ]
    alone = len(kinds) == 1
    forms = [
        Form("Tensors" if alone else f"Tensors{i}", "" if alone else f"tensors_{i}_", "", version, case)
        for i, (version, case) in enumerate(kinds, 1)
    ]
    for word, moved in MOVES.items():
        move = moved(rule) if rule.evaluate is not None else None
        if move is not None:
            cases = family(move, dtype, storage, form).cases
            if len(cases) > 1:
                refuse("its point of evaluation depends on the shape of a tensor")
            name = "".join(part.title() for part in word.split("_"))
            (version, *_) = oriented(move, cases[0].program, (), dtype, storage)
            forms.append(Form(name, f"{word}_", word, version, cases[0]))
    for each in forms:
        check(each, refuse)
    return forms


def check(form: Form, refuse: Callable[[str], None]) -> None:
    """Refuses, in words, a form that no file has."""
    program = form.program
    if program.skip is not None:
        refuse("it may leave a step out, for a reason that the kernels find")
    if not any(stage.stores for stage in program.stages):
        refuse("its step changes no element of a tensor")
    if program.rule.inputs:
        refuse(f"it needs the input {next(iter(program.rule.inputs))}")
    if program.rule.view.keys() - {"flatten", "short"} or program.parts:
        refuse("it sees more axes than those of matrices")
    for buffer in form.vectors:
        if axes_in_flat(buffer.axes) is None:
            refuse(f"its state {buffer.name} has a shape of its own")
    for value in values(program):
        if value.op is Op.FACT and value.arg in ("start_low", "width_low"):
            refuse("it rounds parts of tensors at random")
    for stage in program.stages:
        if form.layout.formats and is_shaped(program, stage, form.layout):
            refuse("it sees rows and columns of states in codes")
    for b in program.states:
        if b.init is not None and any(n.op.kind in (Kind.REDUCE, Kind.MATRIX, Kind.RANDOM) for n in _walk(b.init)):
            refuse(f"its state {b.name} begins with more than an expression of each element")


def _walk(value: Node) -> list[Node]:
    return [value, *(n for a in value.args for n in _walk(a))]


#: Facts of shapes as expressions of a parameter `p` in torch.
def fact_text(name: str) -> str:
    """A fact of a shape, for a parameter `p` whose view is `batch, rows, cols`."""
    if name in WORDS or name == "machine_eps":
        raise AssertionError(name)
    texts = {"ndim": "p.ndim", "numel": "p.numel()", "rows": "rows", "cols": "cols"}
    return texts.get(name) or f"p.shape[{name.removeprefix('dim')}]"
