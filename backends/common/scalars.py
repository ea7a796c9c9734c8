"""The scalar program of a rule as one kernel: the parts that are the same in CUDA C and Triton.

A thread or lane computes the row of the scalar table, and the new scalar states, of one tensor. It reads step counts,
hyper-parameters, shape facts and scalar states: the leaves of the program. An array with the axis `n` has a value for
each tensor, with `k` one for each group, else one for the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rulec.backend.printer import unique_name
from rulec.backend.protocol import Scalars
from rulec.compiler.ir import Program, ScalarProgram, Stage, Store
from rulec.language.expr.node import Node, Op, walk

#: The names of `t` of a tensor, of its group and of the model.
_STEPS = {"": "t", "group": "group_t", "model": "model_t"}

_LEAVES = (Op.HYPER, Op.MODEL_HYPER, Op.STEP, Op.FACT, Op.LOAD)


@dataclass(frozen=True)
class Argument:
    """An array for the kernel: of `kind` "fact", "state" or "level", and its `key` in `Scalars`."""

    kind: str
    key: str

    def array(self, known: Scalars) -> Any:
        """The array of these scalars."""
        return {"fact": known.facts, "state": known.states, "level": known.levels}[self.kind][self.key]


def has_scalars(program: Program) -> bool:
    """Whether the scalar program has any value to compute."""
    return bool(program.scalars.columns or program.scalars.stores)


def scalar_stage(program: Program) -> Stage:
    """The scalar program as a stage: the columns of the table, then new values of states."""
    values = [*(c.value for c in program.scalars.columns), *(s.value for s in program.scalars.stores)]
    return Stage(tuple(Store("", value) for value in values))


def without_table(program: Program) -> Program:
    """The program without columns, for a printer of the columns themselves."""
    return replace(program, late=(), scalars=ScalarProgram())


def scalar_leaves(program: Program) -> list[Node]:
    """The hyper-parameters, counts, facts and states in the scalar program, in the order of its values."""
    return [n for n in walk(scalar_stage(program).roots) if n.op in _LEAVES]


def argument_of(leaf: Node) -> Argument | None:
    """The array with the values of a leaf; None for hyper-parameters and the counts of tensors."""
    if leaf.op is Op.FACT:
        return Argument("fact", str(leaf.arg))
    if leaf.op is Op.LOAD:
        return Argument("state", str(leaf.arg))
    return Argument("level", str(leaf.arg)) if leaf.op is Op.STEP and leaf.arg is not None else None


def arguments(leaves: Sequence[Node]) -> list[Argument]:
    """The arrays for a kernel beside counts, groups and hyper-parameters, in the order of the leaves."""
    return [a for a in dict.fromkeys(map(argument_of, leaves)) if a is not None]


class ScalarKernel:
    """The names in the kernel of one program: `names` maps a leaf to its variable, `at` an argument to its array.

    A subclass for each language prints the reads of leaves and the other values.
    """

    #: The format of the name of an array of counts, of groups or the model.
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
        """The line of a hyper-parameter in the table of hyper-parameters."""
        return list(self.program.hyper).index(str(leaf.arg))

    def level(self, argument: Argument) -> str:
        """The level of an array's values: "tensor", "group" or "model"."""
        if argument.kind == "level":
            return argument.key
        letters = "n" if argument.kind == "fact" else self.program.buffer(argument.key).axes.letters
        return "tensor" if "n" in letters else "group" if "k" in letters else "model"
