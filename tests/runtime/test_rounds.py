"""Rounds of values between stages: their order, and operations on several tensors in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import rulec
from rulec.language.expr.node import Kind, Node, Op, node
from rulec.runtime.buckets.plan import Plan
from rulec.runtime.buckets.rounds import in_rounds, rounds
from rulec.runtime.stages.kept_stacks import KeptStacks, StackShape
from rulec.torch.tensors import foreach
from rulec.torch.tensors.library import DeviceLibrary
from tests.runtime.counted import counted


def plan_of(name: str) -> Plan:
    return Plan(rulec.compile(rulec.load(name)))


def assert_after_operands(values: Sequence[Node]) -> None:
    """Each value comes once, and those of its operands that are among the values come before it."""
    assert len({*values}) == len(values)
    place = {value: number for number, value in enumerate(values)}
    for value in values:
        assert all(place.get(a, -1) < place[value] for a in value.args), value


@pytest.mark.parametrize(
    "name", ["adafactor", "came", "adamp", "sm3", "normuon", "soap", "apollo", "kl_soap", "prodigy"]
)
def test_values_come_after_their_operands(name: str) -> None:
    plan = plan_of(name)
    assert_after_operands([value for gap in plan.gaps for value in gap.values])
    for gap in plan.gaps:
        grouped = plan.rounds(gap.values)
        assert [value for each in grouped for value in each] == [*gap.values]
        for each in grouped:
            assert not any(a in each for value in each for a in value.args)


def test_rows_and_columns_share_their_rounds() -> None:
    """Each of CAME's two gaps with vectors has seven steps that rows and columns both take."""
    plan = plan_of("came")
    shared = [[each[0].op for each in plan.rounds(gap.values) if len(each) == 2] for gap in plan.gaps]
    assert [ops for ops in shared if ops] == [[Op.DIV, Op.MUL, Op.MUL, Op.ADD, Op.RSQRT]] * 2


def test_independent_reductions_are_one_round() -> None:
    """Adalite's 13 reductions between stages depend on one another four times: shards send sums of five rounds."""
    plan = plan_of("adalite")
    shared = [each for gap in plan.gaps for each in plan.rounds(gap.values) if each[0].op.kind is Kind.REDUCE]
    assert [len(each) for each in shared] == [1, 4, 4, 3, 1]
    assert_after_operands([value for gap in plan.gaps for value in gap.values])


def test_reductions_over_tensors_are_no_round() -> None:
    first, second = (node(Op.SUM, _load(name), "model") for name in "xy")
    letters: dict[Node, str | None] = dict.fromkeys((first, second), "")
    assert rounds([first, second], letters) == [(first, second)]
    assert rounds([first, second], letters, {first, second}) == [(first,), (second,)]


def _load(name: str) -> Node:
    return node(Op.LOAD, name)


def test_fixed_values_keep_their_places() -> None:
    """What comes before a fixed value still does, though a round could join it."""
    a, b, c = (_load(name) for name in "abc")
    first, fixed, last = node(Op.SQRT, a), node(Op.MUL, b, b), node(Op.SQRT, c)
    values = [a, b, c, first, fixed, last]
    letters: dict[Node, str | None] = dict.fromkeys(values, "bi")
    assert in_rounds(values, letters, ()).index(last) == 4
    order = in_rounds(values, letters, {fixed})
    assert order.index(first) < order.index(fixed) < order.index(last)
    letters[fixed] = None
    assert in_rounds(values, letters, ()) == order


def test_a_round_has_one_number() -> None:
    x, y, two, three = _load("x"), _load("y"), node(Op.CONST, 2.0), node(Op.CONST, 3.0)
    values = [node(Op.MUL, two, x), node(Op.MUL, two, y), node(Op.MUL, three, x)]
    letters: dict[Node, str | None] = {x: "bi", y: "bj", two: "", three: ""} | dict.fromkeys(values, "bi")
    assert rounds(values, letters) == [(values[0], values[1]), (values[2],)]
    numbers: dict[Node, str | None] = letters | dict.fromkeys(values, "")
    assert rounds(values, numbers) == [(value,) for value in values]


# Operations on several tensors


def several(op: Op, operands: Sequence[Sequence[Any]]) -> tuple[list[Tensor], list[str]]:
    """The results of the device library, and its calls of torch."""
    library = DeviceLibrary("cpu")
    with counted() as names:
        results = library.several(op, operands)
    for result, each in zip(results, operands, strict=True):
        wanted = library.arithmetic[op](*each)
        assert result.dtype == wanted.dtype
        assert torch.equal(result.nan_to_num(7.0), wanted.nan_to_num(7.0))
        assert torch.equal(result.signbit(), wanted.signbit())
    return results, names


def drawn(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-310, 5e-324], dtype=dtype)
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    for x in drawn:
        x.view(-1)[: len(special)] = special[: x.numel()]
    return drawn


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("op", [Op.ADD, Op.SUB, Op.MUL, Op.DIV])
def test_two_operands_are_computed_in_one_call(op: Op, dtype: torch.dtype) -> None:
    a, b = drawn((9,), (4, 25), dtype=dtype), drawn((9,), (4, 25), dtype=dtype)
    _, names = several(op, [[a[0], b[0].flip(0)], [a[1], b[1].flip(0)]])
    assert len(names) == 1


@pytest.mark.parametrize(("op", "count"), [(Op.SQRT, 1), (Op.RSQRT, 2)])
def test_roots_are_computed_in_one_call(op: Op, count: int) -> None:
    _, names = several(op, [[x] for x in drawn((40,), (9, 3))])
    assert len(names) == count


@pytest.mark.parametrize("op", [Op.ADD, Op.MUL])
@pytest.mark.parametrize("first", [False, True])
def test_a_number_on_either_side_is_computed_in_one_call(op: Op, first: bool) -> None:
    number = torch.tensor(0.3, dtype=torch.float64)
    _, names = several(op, [[number, x] if first else [x, number] for x in drawn((40,), (9, 3))])
    assert len(names) == 1


def test_operations_without_a_foreach_launch_are_computed_one_by_one() -> None:
    number, (a, b) = torch.tensor(0.3, dtype=torch.float64), drawn((6, 6), (8, 8))
    for op, operands in [
        (Op.DIV, [[a, number], [b, number]]), (Op.SUB, [[a, number], [b, number]]), (Op.MUL, [[a, a.mT], [b, b.mT]]),
        (Op.MUL, [[a, a[:1]], [b, b[:1]]]), (Op.MUL, [[a, a], [b.float(), b.float()]]),
        (Op.MUL, [[a, number], [b, number + 1]]), (Op.MAXIMUM, [[a, a], [b, b]]), (Op.MUL, [[a, a]]),
    ]:  # fmt: skip
        assert foreach.together(op, operands) is None, (op, operands)
        several(op, operands)


# Stacks in memory that stays


@pytest.mark.parametrize("turned", [False, True])
def test_stacks_are_read_in_one_call(turned: bool) -> None:
    shapes = {0: StackShape(2, (3, 4), 4, 3, True) if turned else StackShape(2, (3, 4), 3, 4, False)}
    shapes[3] = StackShape(2, (2, 2, 5), 2, 5, False)
    kept = KeptStacks(shapes, "bfloat16", DeviceLibrary("cpu"))
    arrays = [*drawn((3, 4), (3, 4), dtype=torch.float32), *drawn((2, 2, 5), (2, 2, 5), dtype=torch.float32)]
    with counted() as names:
        kept.read(arrays)
    assert len(names) == 1
    first, second = torch.stack(arrays[:2]).bfloat16(), torch.cat(arrays[2:]).bfloat16()
    for stack, wanted in (kept.stacks[0], first.mT if turned else first), (kept.stacks[3], second):
        torch.testing.assert_close(stack, wanted, rtol=0, atol=0, equal_nan=True)
    for k, stack in kept.stacks.items():
        torch.testing.assert_close(kept.transposed[k], stack.mT, rtol=0, atol=0, equal_nan=True)
