"""What `rulec build` cannot write, and why."""

from __future__ import annotations

from rulec.compiler.ir import Program
from rulec.errors import RulecError
from rulec.language.node import Kind, Node, Op, walk


class CannotBuild(RulecError, NotImplementedError):
    """A rule that has no form as a file of its own for a backend; the message says why."""

    def __init__(self, rule: str, form: str, why: str) -> None:
        super().__init__(f"rulec build cannot write {rule} as {form}: {why}")


def values(program: Program) -> list[Node]:
    """Every value of a program: its stages', those of the scalar table, and those between and after stages."""
    roots = [root for stage in program.stages for root in stage.roots]
    roots += [c.value for c in program.columns] + [v.value for v in program.vectors]
    roots += [s.value for s in (*program.finish, *program.scalars.stores)]
    roots += [] if program.skip is None else [program.skip]
    return list(walk(roots))


def refuse_shared(program: Program, form: str) -> None:
    """CannotBuild for a rule whose tensors need one another."""
    if program.joins:
        value = program.joins[0]
        why = f"it takes a {value.op.symbol} over all tensors of the {value.arg}, and what is written updates one alone"
        raise CannotBuild(program.name, form, why)


def refuse_unwritten(program: Program, form: str, written: frozenset[Op] = frozenset()) -> None:
    """CannotBuild for a rule with random numbers, or matrix functions but for those that are `written`."""
    for value in values(program):
        if value.op.kind is Kind.MATRIX and value.op not in written:
            raise CannotBuild(program.name, form, f"it needs the matrix function {value.op.symbol}")
        if value.op.kind is Kind.RANDOM:
            raise CannotBuild(program.name, form, f"it draws random numbers ({value.op.symbol})")


def refuse_predicates(program: Program, form: str, most: int) -> None:
    """CannotBuild for a rule with more branches on `t` or hyper-parameters than have a version each."""
    if len(program.predicates) > most:
        why = f"it has {len(program.predicates)} branches on t or hyper-parameters, and at most {most} are written out"
        raise CannotBuild(program.name, form, why)
