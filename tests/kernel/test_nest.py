"""The nest of a stage, and its interpreter, held to the protocol that every printed kernel is held to."""

from __future__ import annotations

import pytest

import rulec
from rulec.array_api.reductions import REDUCTIONS
from rulec.compiler.layout import layout_for
from rulec.kernel.interpreter import Interpreter, nest_text
from rulec.kernel.nest import Level, Nest, written
from rulec.kernel.place import COL, ELEMENT, MATRIX, ROW, TENSOR
from rulec.language.expr.node import Op
from rulec.testing.cases import loaded
from rulec.testing.conformance import check_maximize, check_rule
from rulec.testing.kinds import IEEE, NumpyKind
from rulec.testing.trial import Subject
from tests.backends.kinds import AWKWARD, KINDS, rule_of

SUBJECT = Subject(Interpreter(), NumpyKind(), IEEE)

#: Rows and columns that differ, matrices in a batch, single rows, columns and elements, and nothing at all.
SHAPES = ((5,), (4, 7), (2, 3, 4), (1, 6), (3, 1), (), (0, 3))

ROWS_AND_COLUMNS = """
name: Both
state: {r: {init: 1, per: row}, c: {init: 1, per: col}}
step: |
  r = r + sum(g, per="row")
  c = c + max(g, per="col")
  direction = g/(r + c)*norm(p)
"""


@pytest.mark.parametrize("name", [*KINDS, *AWKWARD])
def test_nests_do_what_programs_say(name: str) -> None:
    check_rule(SUBJECT, rule_of(name), "float32", SHAPES)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_other_dtypes(dtype: str) -> None:
    check_rule(SUBJECT, loaded("adafactor"), dtype, SHAPES)
    check_maximize(SUBJECT, loaded("lamb"), dtype)


@pytest.mark.parametrize("transposed", [False, True])
def test_levels_are_those_in_memory(transposed: bool) -> None:
    program = rulec.compile(rulec.parse(ROWS_AND_COLUMNS))
    nests = [Nest(program, layout_for(program, "float32", transposed=transposed), s) for s in program.stages]
    places = [[level.place for level in nest.levels()] for nest in nests]
    assert places == [[TENSOR, MATRIX, ROW, ELEMENT]] * 2
    sums, largest = (
        next(r for r in nests[0].stage.reduces if r.value.op is op and r.axes.letters != "k") for op in (Op.SUM, Op.MAX)
    )
    tensor, matrix, row, element = nests[0].levels()
    assert (sums in row.totals, largest in matrix.empties) == (not transposed, not transposed)
    assert (sums in matrix.empties, largest in row.totals) == (transposed, transposed)
    assert len(tensor.totals) == 1
    assert element == Level(ELEMENT)
    assert nests[1].sees(COL)
    assert nests[1].sees(ROW)
    assert not nests[1].totals(TENSOR, ROW, COL)


def test_a_stage_of_elements_has_no_levels_between() -> None:
    program = rulec.compile(rulec.load("lamb"))
    first, second = (Nest(program, layout_for(program, "float32"), stage) for stage in program.stages)
    assert [level.place for level in first.levels()] == [TENSOR, ELEMENT]
    assert len(first.totals(TENSOR)) == 2
    assert first.levels_of_one_matrix() == first.levels()
    assert second.stored == [s.buffer for s in second.stage.stores]
    assert nest_text(first).splitlines()[0].startswith("tensor: totals ")


def test_a_function_of_one_matrix_has_the_totals_of_its_tensor() -> None:
    program = rulec.compile(rulec.parse(ROWS_AND_COLUMNS))
    nest = Nest(program, layout_for(program, "float32"), program.stages[0])
    tensor, matrix, *inner = nest.levels()
    outermost, *others = nest.levels_of_one_matrix()
    assert (outermost.totals, outermost.empties, others) == (tensor.totals, matrix.empties, inner)


class Spoken:
    """A language that says what it is asked for."""

    def enter(self, level: Level) -> list[str]:
        return [f"enter {level.place}"]

    def loop(self, level: Level, body: list[str]) -> list[str]:
        return [f"each {level.place}", *(f"  {line}" for line in body)]

    def leave(self, level: Level) -> list[str]:
        return [f"leave {level.place}"]

    def element(self) -> list[str]:
        return ["element"]


def test_levels_are_written_from_the_outside_in() -> None:
    assert written([Level(TENSOR), Level(ROW), Level(ELEMENT)], Spoken()) == [
        "enter tensor", "each row", "  enter row", "  each element", "    element", "  leave row", "leave tensor",
    ]  # fmt: skip


@pytest.mark.parametrize("op", REDUCTIONS)
def test_nothing_changes_no_reduction(op: Op) -> None:
    reduction = REDUCTIONS[op]
    assert all(reduction.ufunc(reduction.nothing, x) == x for x in (-2.0, 0.5, 3.0))
    assert sorted(r.code for r in REDUCTIONS.values()) == [0, 1, 2]
