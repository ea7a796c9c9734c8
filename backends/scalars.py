"""A scalar program as one kernel: what it reads, under which names, and what it leaves, alike in every language.

Each of its threads or lanes has one tensor: `n` of an array's axes has a value for each, `k` one for each group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rulec.backend.printer import unique_name
from rulec.backend.protocol import Scalars
from rulec.compiler.ir import Program, ScalarProgram, Stage, Store
from rulec.language.node import Node, Op, walk

#: What `t` of a tensor, of its group and of the model is called.
_STEPS = {"": "t", "group": "group_t", "model": "model_t"}

_LEAVES = (Op.HYPER, Op.MODEL_HYPER, Op.STEP, Op.FACT, Op.LOAD)


@dataclass(frozen=True)
class Argument:
    """An array that the kernel reads: of `kind` "fact", "state" or "level", under `key`."""

    kind: str
    key: str

    def array(self, known: Scalars) -> Any:
        """The array itself."""
        return {"fact": known.facts, "state": known.states, "level": known.levels}[self.kind][self.key]


def has_scalars(program: Program) -> bool:
    """Whether there is a scalar program to print."""
    return bool(program.scalars.columns or program.scalars.stores)


def scalar_stage(program: Program) -> Stage:
    """The scalar program as a stage: the columns of the table, then new values of states."""
    values = [*(c.value for c in program.scalars.columns), *(s.value for s in program.scalars.stores)]
    return Stage(tuple(Store("", value) for value in values))


def without_table(program: Program) -> Program:
    """The program as a printer takes it that names no columns: they are what it prints."""
    return replace(program, late=(), scalars=ScalarProgram())


def scalar_leaves(program: Program) -> list[Node]:
    """The hyper-parameters, counts, facts and states that the scalar program reads, in the order of its values."""
    return [n for n in walk(scalar_stage(program).roots) if n.op in _LEAVES]


def argument_of(leaf: Node) -> Argument | None:
    """The array in which a leaf has its values; None for hyper-parameters and tensors' own counts."""
    if leaf.op is Op.FACT:
        return Argument("fact", str(leaf.arg))
    if leaf.op is Op.LOAD:
        return Argument("state", str(leaf.arg))
    return Argument("level", str(leaf.arg)) if leaf.op is Op.STEP and leaf.arg is not None else None


def arguments(leaves: Sequence[Node]) -> list[Argument]:
    """The arrays that a kernel reads beside counts, groups and hyper-parameters, in the order of these leaves."""
    return [a for a in dict.fromkeys(map(argument_of, leaves)) if a is not None]


class ScalarKernel:
    """The kernel of one program: `names` are its leaves' values, `at` the arrays that it reads.

    A language says how leaves are read, and how what it prints of the others is written.
    """

    #: What the array of the counts of a level is called.
    level_array = "{}_at"

    def __init__(self, program: Program, leaves: Sequence[Node], taken: set[str]) -> None:
        self.program, self.leaves = program, leaves
        taken |= set(_STEPS.values())
        self.names = {leaf: self._name(leaf, taken) for leaf in leaves}
        self.at = {a: unique_name(self._array_name(a), taken) for a in arguments(leaves)}

    @staticmethod
    def _name(leaf: Node, taken: set[str]) -> str:
        return _STEPS[str(leaf.arg or "")] if leaf.op is Op.STEP else unique_name(str(leaf.arg), taken)

    def _array_name(self, argument: Argument) -> str:
        return (self.level_array if argument.kind == "level" else "{}_at").format(argument.key)

    def hyper_line(self, leaf: Node) -> int:
        """The line of the table of hyper-parameters that has a leaf's values."""
        return list(self.program.hyper).index(str(leaf.arg))

    def level(self, argument: Argument) -> str:
        """What an array has a value for: each "tensor", each "group", or the "model"."""
        if argument.kind == "level":
            return argument.key
        letters = "n" if argument.kind == "fact" else self.program.buffer(argument.key).axes.letters
        return "tensor" if "n" in letters else "group" if "k" in letters else "model"
