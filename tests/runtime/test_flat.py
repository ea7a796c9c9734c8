"""Vectors of all tensors in flat arrays between the stages of a step on a device: calls, bits, and what is fired."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import rulec
from rulec.array_api.slices import Cuts, Pieces
from rulec.language.expr.node import Op
from rulec.runtime.buckets.flat import Flats, Remembered, axes_in_flat
from rulec.runtime.engine import Engine, default_hyper, run
from rulec.runtime.stages.projected import groups_of
from rulec.runtime.stages.sets import SetValues
from rulec.torch.tensors.library import DeviceLibrary
from rulec.torch.tensors.tensors import TorchArrays
from tests.runtime.counted import Steps, counted
from tests.runtime.elsewhere import Elsewhere

#: Four shapes, taken in turns.
SHAPES = [(8, 16), (16, 8), (8, 8), (4, 24)]

#: Most calls of torch in a step of rules with vectors alone, however many tensors there are; and with counts and
#: scalars on the device, where numbers of tensors are spread too. NorMuon's products are those of four shapes.
MOST = {
    "adafactor": (31, 34), "came": (37, 38), "adamp": (37, 38), "adam_mini": (14, 16), "sm3": (7, 8),
    "normuon": (117, 118),
}  # fmt: skip


#: Most calls of rules with values of matrices: products of each shape are calls of their own, 8 in SOAP. With counts on
#: the device both arms of a branch are computed. Random numbers are one launch.
MATRICES = {
    "soap": (60, 373), "apollo": (128, 164), "apollo_mini": (73, 91), "galore": (43, 132), "fira": (181, 274),
    "shampoo": (34, 202),
    "splus": (52, 293), "kl_soap": (147, 493), "kron": (827, 930), "dash": (50, 215), "dion": (140, 330),
    "nordion2": (270, 282),
}  # fmt: skip

#: Calls that are more than 40 in a step, by kind. NorMuon's five iterations have three products each, SOAP has eight,
#: and a call is of one shape. A view launches nothing on a device.
KINDS: dict[str, dict[str, int]] = {
    "normuon": {"products": 60, "norms": 8, "views": 25, "copies": 12, "arithmetic": 12},
    "soap": {"products": 32, "views": 11, "copies": 11, "arithmetic": 6},
}

#: The kind of a call by the name of its operation; others are arithmetic.
KIND_OF = {
    "products": ("bmm", "baddbmm"), "norms": ("linalg_vector_norm", "clamp"),
    "views": ("transpose", "split", "unbind", "select"),
    "copies": ("_foreach_copy_", "_to_copy", "clone", "copy_", "lift_fresh"),
}  # fmt: skip


def four_shapes(count: int) -> list[tuple[int, ...]]:
    return [SHAPES[i % 4] for i in range(count)]


def calls(name: str, count: int, resident: bool) -> list[str]:
    steps = Steps(rulec.load(name), four_shapes(count), resident)
    for _ in range(2):
        steps.step()
    with counted() as names:
        steps.step()
    return names


@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize("name", MOST)
def test_calls_do_not_grow_with_tensors(name: str, resident: bool) -> None:
    few, many = (calls(name, count, resident) for count in (8, 300))
    assert len(many) <= MOST[name][resident], many
    assert many == few


@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize("name", MATRICES)
def test_matrices_of_one_shape_are_computed_together(name: str, resident: bool) -> None:
    few, many = (calls(name, count, resident) for count in (40, 300))
    assert len(many) <= MATRICES[name][resident], many
    assert many == few


@pytest.mark.parametrize("name", KINDS)
def test_calls_beyond_forty_are_of_these_kinds(name: str) -> None:
    kinds = {operation: kind for kind, operations in KIND_OF.items() for operation in operations}
    counts = Counter(kinds.get(call.split(".")[1], "arithmetic") for call in calls(name, 40, False))
    assert counts == KINDS[name]


def test_calls_do_not_grow_where_some_tensors_fire() -> None:
    def some(count: int) -> list[str]:
        steps = Steps(rulec.load("adafactor"), four_shapes(count))
        fired = range(0, count, 3)
        for _ in range(2):
            steps.step(fired)
        with counted() as names:
            steps.step(fired)
        return names

    assert some(300) == some(9)


class Training:
    """Steps of a rule by kernels of the backend `elsewhere`, on the tensors of these numbers."""

    def __init__(
        self, rule: str | rulec.Rule, shapes: Sequence[tuple[int, ...]], numbers: Sequence[int], **options: Any
    ) -> None:  # fmt: skip
        self.shapes, self.numbers = shapes, numbers
        self.params = [self._drawn(shapes[i], 1000 + i) for i in numbers]
        rule = rulec.load(rule) if isinstance(rule, str) else rule
        self.engine = Engine(rule, TorchArrays(), Elsewhere(), **options)
        self.ids = [self.engine.add(p, 0, f"tensor {i}", number=i) for i, p in zip(numbers, self.params, strict=True)]
        self.table = self.engine.hyper_table([default_hyper(self.engine.rule, {}, "float32")])

    @staticmethod
    def _drawn(shape: tuple[int, ...], seed: int) -> torch.Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed))

    def step(self, step: int, fired: Sequence[int]) -> None:
        """A step of the tensors of these numbers."""
        places = [k for k, i in enumerate(self.numbers) if i in fired]
        grads = [self._drawn(self.shapes[self.numbers[k]], 10 * self.numbers[k] + step) for k in places]
        self.engine.begin()
        run(self.engine.ready(tuple(self.ids[k] for k in places), grads, self.table, {}))
        self.engine.end()

    def everything(self, number: int) -> dict[str, np.ndarray[Any, Any]]:
        """The parameter and the states of the tensor of this number."""
        place = self.numbers.index(number)
        states = {name: x.float().numpy().copy() for name, x in self.engine.state(self.ids[place]).items()}
        return states | {"p": self.params[place].numpy().copy()}


def trained(
    rule: str | rulec.Rule, shapes: Sequence[tuple[int, ...]], numbers: Sequence[int], **options: Any
) -> Training:  # fmt: skip
    """All tensors, some, and all again."""
    training = Training(rule, shapes, numbers, **options)
    for step, fired in enumerate(([*numbers], [i for i in numbers if i % 3 != 1], [*numbers])):
        training.step(step, fired)
    return training


#: Of one shape, of other lengths, of several matrices, and of lengths at the ends of what a sum takes at once.
MIXED = [(6, 5), (2, 3, 4), (6, 5), (5, 6), (300, 7), (6, 5), (1, 9), (2, 6, 5), (7, 300)]


@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize(
    "name",
    ["adafactor", "came", "adamp", "adam_mini", "normuon", "sm3", "soap", "fira", "shampoo", "apollo", "apollo_mini"],
)
def test_a_tensor_has_the_same_bits_alone_and_among_others(name: str, resident: bool) -> None:
    together = trained(name, MIXED, [*range(len(MIXED))], resident=resident)
    for number in range(len(MIXED)):
        alone = trained(name, MIXED, [number], resident=resident)
        wanted = alone.everything(number)
        for key, value in together.everything(number).items():
            np.testing.assert_array_equal(value, wanted[key], err_msg=f"{key} of tensor {number}")


#: A projection beside a vector of columns and numbers of tensors, which is reduced to columns and to numbers.
BESIDE = """
name: Beside
summary: A projection with vectors beside it.
hyper: {lr: 0.1, keep: 0.9}
view: {flatten: rest}
applies_to: ndim >= 2
otherwise: sgd
state:
  m: {init: 0, shape: [2, cols]}
  c: {init: 1, per: col}
  n: {init: 1, per: tensor}
step: |
  R = normal([2, rows], at=t)/sqrt(rows) @ (g*c)
  m = keep*m*c + R/n
  s = sum(m, per="col")
  n = max(abs(m)) + 1
  c = 1/(1 + s*s)
  direction = g*s
"""


@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize("state_dtype", [{}, {"": "bfloat16"}])
@pytest.mark.parametrize("name", ["apollo", "apollo_mini", "beside"])
def test_projections_in_flat_arrays_have_the_bits_of_stacks(name: str, resident: bool, state_dtype: Any) -> None:
    shapes, numbers = [*MIXED, *MIXED], [*range(2 * len(MIXED))]
    rule = rulec.parse(BESIDE) if name == "beside" else rulec.load(name)
    groups: list[list[list[int]]] = []

    def noted(*arguments: Any) -> list[list[int]]:
        groups.append(groups_of(*arguments))
        return groups[-1]

    with mock.patch("rulec.runtime.stages.evaluate.groups_of", noted):
        flat = trained(rule, shapes, numbers, resident=resident, state_dtype=state_dtype)
    with mock.patch("rulec.runtime.stages.evaluate.groups_of", return_value=[]):
        stacks = trained(rule, shapes, numbers, resident=resident, state_dtype=state_dtype)
    assert [len(each) for each in groups] == [1] * len(groups) != []
    for number in numbers:
        wanted = stacks.everything(number)
        for key, value in flat.everything(number).items():
            np.testing.assert_array_equal(value, wanted[key], err_msg=f"{key} of tensor {number}")


@pytest.mark.parametrize("state_dtype", [{}, {"": "bfloat16"}])
@pytest.mark.parametrize("name", ["adam_mini", "normuon", "sm3"])
def test_without_sums_between_stages_bits_are_those_of_tensors_on_their_own(name: str, state_dtype: Any) -> None:
    numbers = [*range(len(MIXED))]
    flat = trained(name, MIXED, numbers, state_dtype=state_dtype)
    with mock.patch.object(DeviceLibrary, "flattens", False):
        apart = trained(name, MIXED, numbers, state_dtype=state_dtype)
    for number in numbers:
        wanted = apart.everything(number)
        for key, value in flat.everything(number).items():
            np.testing.assert_array_equal(value, wanted[key], err_msg=f"{key} of tensor {number}")


@pytest.mark.parametrize("name", ["adafactor", "came", "soap", "apollo"])
@pytest.mark.parametrize("new", ["object", "data", "turned"])
def test_states_in_new_memory_are_read_and_written_there(name: str, new: str) -> None:
    """As after a checkpoint was loaded, or with `data` replaced: the flat arrays and the views know the old memory."""
    shapes = [(6, 5), (5, 6)]
    steady, moved = (Training(name, shapes, [0, 1]) for _ in range(2))
    for training in (steady, moved):
        training.step(0, [0, 1])
    for states in moved.engine.tensors[0].bucket.states:  # type: ignore[union-attr]
        for state, x in [*states.items()]:
            if x.shape in shapes:  # kernels know the addresses of states like the parameter
                continue
            if new == "data":
                x.data = x.clone()
            elif new == "object" or x.dim() < 2:
                states[state] = x.clone()
            else:
                states[state] = x.mT.contiguous().mT
    for training in (steady, moved):
        training.step(1, [0, 1])
    for number in (0, 1):
        wanted = steady.everything(number)
        for key, value in moved.everything(number).items():
            np.testing.assert_array_equal(value, wanted[key], err_msg=key)


@pytest.mark.parametrize("name", ["soap", "normuon", "galore", "dash"])
@pytest.mark.parametrize("resident", [False, True])
def test_stacks_in_memory_that_stays_have_the_bits_of_new_ones(name: str, resident: bool) -> None:
    numbers = [*range(len(MIXED))]
    kept = trained(name, MIXED, numbers, resident=resident)
    with mock.patch("rulec.runtime.stages.kernel_arguments.KEPT", 0):
        new = trained(name, MIXED, numbers, resident=resident)
    for number in numbers:
        wanted = new.everything(number)
        for key, value in kept.everything(number).items():
            np.testing.assert_array_equal(value, wanted[key], err_msg=f"{key} of tensor {number}")


def _missing() -> Remembered:
    raise AssertionError("this set was forgotten")


def test_sets_of_tensors_that_fire_once_are_forgotten() -> None:
    steps = Steps(rulec.load("adafactor"), four_shapes(8))
    steps.step()
    bucket = steps.engine.tensors[0].bucket
    assert bucket is not None
    kept = bucket.sets.of(None, 8, _missing)
    for first in range(8):
        for last in range(first + 1, 8):
            steps.step([first, last])
            steps.step([0, 1, 2])
    assert 16 < bucket.sets.size <= 32
    assert bucket.sets.of(None, 8, _missing) is kept
    assert bucket.sets.of([0, 1, 2], 8, _missing)


# The parts


def flats(extents: Sequence[tuple[int, int, int]]) -> Flats:
    return Flats(extents, DeviceLibrary("cpu"))


def test_values_are_spread_over_more_axes() -> None:
    made = flats([(1, 2, 3), (2, 1, 2)])
    numbers = torch.tensor([1.0, 2.0])
    assert made.spread(numbers, "", "bi").tolist() == [1, 1, 2, 2]
    assert made.spread(numbers, "", "bj").tolist() == [1, 1, 1, 2, 2, 2, 2]
    assert made.spread(torch.tensor([1.0, 2.0, 3.0]), "b", "bj").tolist() == [1, 1, 1, 2, 2, 3, 3]
    assert made.spread(torch.tensor([1.0, 2.0, 3.0]), "i", "bi").tolist() == [1, 2, 3, 3]


def test_one_matrix_a_tensor_needs_no_spreading() -> None:
    numbers = torch.tensor([1.0, 2.0])
    assert flats([(1, 2, 3), (1, 4, 2)]).spread(numbers, "", "b") is numbers


@pytest.mark.parametrize("op", [Op.SUM, Op.MIN, Op.MAX])
def test_runs_are_reduced_with_neighbours_that_are_not_numbers(op: Op) -> None:
    made = flats([(1, 3, 9), (2, 2, 9), (1, 0, 9), (1, 1, 9)])
    terms = torch.tensor([1.0, 2.0, 4.0, float("nan"), 1.0, 5.0, 3.0, 8.0], dtype=torch.float64)
    found = made.reduced(op, Pieces(terms, made.cuts("bi")), "bi", "b").tolist()
    of: Any = {Op.SUM: sum, Op.MIN: min, Op.MAX: max}[op]
    nothing = {Op.SUM: 0.0, Op.MIN: np.inf, Op.MAX: -np.inf}[op]
    assert found[:1] + found[2:] == [of([1.0, 2.0, 4.0]), of([5.0, 3.0]), nothing, 8.0]
    assert np.isnan(found[1])
    whole = made.reduced(op, Pieces(terms, made.cuts("bi")), "bi", "").tolist()
    assert np.isnan(whole[1])
    assert whole[0] == found[0]


@pytest.mark.parametrize(("after", "wanted"), [("bj", [4, 6, 8]), ("bi", [6, 12]), ("j", [4, 6, 8]), ("", [18])])
def test_matrices_are_reduced_each_to_its_rows_columns_and_numbers(after: str, wanted: list[float]) -> None:
    made = flats([(1, 2, 3), (2, 3, 2)])
    terms = Pieces(
        torch.cat([torch.tensor([1, 2, 3, 3, 4, 5]).double(), torch.full((12,), torch.nan).double()]), made.cuts("bij")
    )
    found = made.reduced(Op.SUM, terms, "bij", after)
    assert found[: len(wanted)].tolist() == wanted
    assert found[len(wanted) :].isnan().all()
    assert len(found) - len(wanted) == {"bj": 4, "bi": 6, "j": 2, "": 1}[after]


def test_results_of_some_tensors_are_taken_without_gaps() -> None:
    whole = Pieces(torch.arange(6.0), Cuts.of([(1, 2, 1), (1, 3, 1), (1, 1, 1)]))
    first = flats([(1, 2, 9), (1, 3, 9)]).taken(whole.chosen([0, 1]), "bi")
    assert first.flat.tolist() == [0, 1, 2, 3, 4]
    some = flats([(1, 2, 9), (1, 1, 9)]).taken(whole.chosen([0, 2]), "bi")
    assert some.flat.tolist() == [0, 1, 5]
    assert [x.tolist() for x in some] == [[[[0.0], [1.0]]], [[[5.0]]]]


def test_rows_and_columns_that_begin_at_the_same_places_are_taken_each_in_their_lengths() -> None:
    made = flats([(1, 2, 3)])
    rows, cols = (Pieces(torch.arange(9.0), Cuts.of([(4,), shape])).chosen([1]) for shape in ((1, 2, 1), (1, 1, 3)))
    assert made.taken(rows, "bi").flat.tolist() == [4, 5]
    assert made.taken(cols, "bj").flat.tolist() == [4, 5, 6]


def test_only_vectors_of_the_parameters_own_extents_lie_in_flat_arrays() -> None:
    program = rulec.compile(rulec.load("came"))
    axes = {b.name: axes_in_flat(b.axes) for b in program.states}
    assert axes == {"m": None, "r": "bi", "c": "bj", "ur": "bi", "uc": "bj"}


@pytest.mark.parametrize("axes", [(1, 2), (2,), (1,), (0, 1, 2)])
def test_sums_of_small_matrices_do_not_depend_on_their_neighbours(axes: tuple[int, ...]) -> None:
    values: Any = SimpleNamespace(library=DeviceLibrary("cpu"))
    stack = torch.randn(6, 210, 300, generator=torch.Generator().manual_seed(1))
    together = SetValues.reduced_in(values, Op.SUM, stack, axes, 3)
    alone = [SetValues.reduced_in(values, Op.SUM, stack[k : k + 2], axes, 1) for k in (0, 2, 4)]
    assert torch.equal(together, torch.cat(alone))
    torch.testing.assert_close(alone[0], stack[:2].double().sum(axes, keepdim=True))
