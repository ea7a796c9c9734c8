"""Rules that `rulec build` cannot write, and the reasons."""

from __future__ import annotations

from rulec.compiler.ir import Program
from rulec.errors import RulecError
from rulec.language.node import Kind, Node, Op, walk


class CannotBuild(RulecError, NotImplementedError):
    """A rule without a form as a file of its own for a backend. The message has the reason."""

    def __init__(self, rule: str, form: str, why: str) -> None:
        super().__init__(f"rulec build cannot write {rule} as {form}: {why}")


def values(program: Program) -> list[Node]:
    """Every value of a program: in stages, in the scalar program, and between and after the stages."""
    roots = [root for stage in program.stages for root in stage.roots]
    roots += [c.value for c in program.scalars.columns] + [s.value for s in program.scalars.stores]
    roots += [] if program.skip is None else [program.skip]
    return list(walk([*roots, *program.between]))


def refuse_shared(program: Program, form: str) -> None:
    """CannotBuild for a rule with reductions over several tensors."""
    if program.joins:
        value = program.joins[0]
        why = f"it takes a {value.op.symbol} over all tensors of the {value.arg}, and what is written updates one alone"
        raise CannotBuild(program.name, form, why)


def refuse_unwritten(program: Program, form: str, written: frozenset[Op] = frozenset()) -> None:
    """CannotBuild for a rule with random numbers, or with matrix functions other than `written`."""
    for value in values(program):
        if value.op.kind is Kind.MATRIX and value.op not in written:
            raise CannotBuild(program.name, form, f"it needs the matrix function {value.op.symbol}")
        if value.op.kind is Kind.RANDOM:
            raise CannotBuild(program.name, form, f"it draws random numbers ({value.op.symbol})")


def refuse_predicates(program: Program, form: str, most: int) -> None:
    """CannotBuild for a rule with more than `most` branches on `t` or hyper-parameters."""
    if len(program.predicates) > most:
        why = f"it has {len(program.predicates)} branches on t or hyper-parameters, and at most {most} are written out"
        raise CannotBuild(program.name, form, why)
