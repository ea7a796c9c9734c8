"""Files of CUDA C for rules that see matrices: run by a C++ compiler with a runtime of our own, compiled by NVRTC."""

from __future__ import annotations

import ctypes
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rulec
import rulec.array
from rulec.array.arrays import numpy_dtype
from rulec.errors import RulecError
from rulec.runtime.storage.options import Storage
from rulec.standalone.cases import CannotBuild
from rulec.standalone.prose import written
from tests.backends import cuda_assembly
from tests.standalone.c_library import drawn
from tests.standalone.one_file import Array
from tests.standalone.test_c import ROWS_OF_TALL, TURNED, taken
from tests.standalone.test_cuda import Run, begun, check_nvcc, compiled, needs_compiler, rule_of, structure, text_of

#: Tensors of one dimension and of more, with matrices of odd sides, of one line, of several blocks, and none.
SHAPES = ((65, 127), (33,), (3, 9, 70), (0, 5), (1, 7), (9100,), (70, 8), (2, 300, 40))


class ShapedRun(Run):
    """The functions of a file for a rule that sees matrices, over some arrays."""

    def __init__(
        self, text: str, folder: Path, params: Sequence[Array], begun: Mapping[str, float | None] = {}
    ) -> None:  # fmt: skip
        self.library, self.text = compiled(text, folder), text
        Tensor, Hyper = structure(text, "rule_tensor"), structure(text, "rule_hyper")
        self.params, self.tensors, self.begun = params, (Tensor * len(params))(), {"mu_product": 1.0, **begun}
        self.kept: list[Array] = []
        for tensor, p in zip(self.tensors, params, strict=True):
            tensor.param, tensor.ndim = p.ctypes.data, p.ndim
            tensor.shape[: p.ndim] = p.shape
            self._begin(tensor, p)
        (defaults,) = re.findall(r"#define RULE_DEFAULTS \{(.*)\}", text)
        self.hyper = Hyper(*map(float, filter(None, defaults.split(", "))))
        self.plan = np.zeros(4096, np.int64)
        self.library.rule_prepare.restype = ctypes.c_int64
        self.refused = self.prepare()

    def prepare(self) -> int:
        """Plans the steps: 0, or one more than the place of the first tensor that the rule is not for."""
        return int(self.library.rule_prepare(ctypes.c_int64(len(self.params)), self.tensors, at(self.plan)))

    def step(self, grads: Sequence[Array]) -> int:
        """One step, as a program takes it: one table, and its launches. The error that it returns."""
        for tensor, grad in zip(self.tensors, grads, strict=True):
            tensor.grad = grad.ctypes.data
        words = np.full(self.plan[0] + 1, -1, np.int64)
        # What a step works in begins at multiples of 16 bytes, and nothing behind it is written.
        self.scratch = np.full(self.plan[1] // 8 + 4, np.nan)
        first = self.scratch.ctypes.data // 8 % 2
        scratch = self.scratch[first:]
        self.library.rule_fill(at(self.plan), self.tensors, ctypes.byref(self.hyper), at(scratch), at(words))
        assert words[-1] == -1
        error = int(self.library.rule_step(at(self.plan), at(words), None))
        assert np.isnan(scratch[self.plan[1] // 8 :]).all()
        return error


def at(array: Array) -> Any:
    """The address of an array."""
    return array.ctypes.data_as(ctypes.c_void_p)


def check_steps(rule: str, dtype: str, folder: Path, count: int = 3, words: Mapping[str, str] = {}) -> None:
    """The steps of a file are those of the reference, over tensors of all kinds."""
    shapes = [s for s in taken(rule_of(rule), SHAPES) if len(s) > 1 or rule is not TURNED]
    params, steps = drawn(31, tuple(shapes), count)
    arrays = [p.astype(numpy_dtype(dtype)) for p in params]
    given = [[g.astype(numpy_dtype(dtype)) for g in each] for each in steps]
    ours = [p.copy() for p in arrays]
    optimizer = rulec.array.Optimizer(rule_of(rule), arrays, backend="numpy", state_dtype=dict(words) or None)
    run = ShapedRun(text_of(rule, dtype, Storage(words)), folder, ours, begun(rule, dtype))
    assert run.refused == 0
    for grads in given:
        assert run.step(grads) == 0
        optimizer.step(grads)
    relative = {"float64": 1e-11, "float32": 2e-5, "bfloat16": 0.0}[dtype]
    for x, y in zip(ours, arrays, strict=True):
        np.testing.assert_allclose(x.astype(float), y.astype(float), rtol=relative, atol=relative / 10)
    assert [t.step for t in run.tensors] == [count] * len(params)
    assert not np.array_equal(ours[0].astype(float), params[0].astype(numpy_dtype(dtype)).astype(float))


#: A rule whose names are those of the file's own functions.
NAMES = """
name: Names
hyper: {lr: 0.1, k: 1, plan: 2, end: 3, double: 0.5, rows_: 1}
state: {m: 0, shape: {init: 0, per: row}, view: {init: 0, per: matrix}, next: {init: 0, per: tensor}}
step: |
  place = plan*k*t
  at = place*place + plan
  m = k*m + g*at
  work = mean(abs(g), per="row") + place
  shape = 0.5*shape + work
  index = sum(shape, per="matrix")
  view = view + index
  next = next + sum(view, per="tensor")
  direction = (m/shape + view*double)/next + end + rows_
"""


@needs_compiler
@pytest.mark.parametrize(
    ("rule", "dtype"),
    [
        (NAMES, "float64"), ("adafactor", "float64"), ("adam_mini", "float32"), ("sm3", "float64"), ("came", "float64"),
        ("clip_by_global_norm >> adafactor", "float64"), ("adamp", "bfloat16"), (ROWS_OF_TALL, "float64"),
    ],
)  # fmt: skip
def test_rows_and_columns_are_those_of_the_reference(rule: str, dtype: str, tmp_path: Path) -> None:
    check_steps(rule, dtype, tmp_path)


@needs_compiler
@pytest.mark.parametrize(("rule", "dtype"), [("muon", "float64"), ("normuon", "float64"), (TURNED, "float64")])
def test_matrices_are_orthogonal_as_those_of_the_reference(rule: str, dtype: str, tmp_path: Path) -> None:
    check_steps(rule, dtype, tmp_path)


@needs_compiler
def test_states_may_be_codes_where_no_stage_sees_rows(tmp_path: Path) -> None:
    """The reference keeps no codes for tensors of a few elements."""
    (rule, words), shapes = ("adafactor", {"v": "dynamic8"}), ((9100,), (70, 8), (8193,))
    params, steps = drawn(5, shapes, 3)
    arrays = [p.astype(np.float32) for p in params]
    ours = [p.copy() for p in arrays]
    optimizer = rulec.array.Optimizer(rulec.load(rule), arrays, backend="numpy", state_dtype=words)
    run = ShapedRun(text_of(rule, "float32", Storage(words)), tmp_path, ours)
    for grads in steps:
        given = [g.astype(np.float32) for g in grads]
        assert run.step(given) == 0
        optimizer.step(given)
    for x, y in zip(ours, arrays, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6)


@cache
def forms() -> tuple[Sequence[str], Sequence[str]]:
    """The rules of the library that are written as CUDA C; and those of them that see matrices."""
    texts = {}
    for name in rulec.rules():
        with suppress(RulecError):
            texts[name] = text_of(name)
    return [*texts], [name for name, text in texts.items() if "rule_prepare(" in text]


@pytest.mark.slow
def test_so_many_rules_of_the_library_are_written() -> None:
    every, shaped = forms()
    assert (len(every), len(shaped), len(rulec.rules())) == (225, 43, 336)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_every_rule_that_sees_matrices_takes_the_reference_steps(part: int, tmp_path: Path) -> None:
    for name in forms()[1][part::8]:
        (tmp_path / name).mkdir(parents=True)
        check_steps(name, "float64", tmp_path / name)


@needs_compiler
def test_a_tensor_of_a_shape_that_the_rule_is_not_for_is_named(tmp_path: Path) -> None:
    run = ShapedRun(text_of("muon"), tmp_path, [np.zeros(shape, np.float32) for shape in ((3, 4), (2, 2), (5,))])
    assert run.refused == 3
    run.tensors[2].ndim = 2
    run.tensors[2].shape[:2] = 1, 5
    assert run.prepare() == 0
    run.tensors[0].ndim = 9
    assert run.prepare() == 1
    (tmp_path / "vector").mkdir()
    run = ShapedRun(text_of(TURNED, "float64"), tmp_path / "vector", [np.zeros(shape) for shape in ((3, 4), (5,))])
    assert run.refused == 2


@needs_compiler
def test_launches_do_not_grow_with_tensors_and_bits_do_not_depend_on_neighbours(tmp_path: Path) -> None:
    shapes = ((40, 30), (7,), (2, 9, 12))
    params, steps = drawn(8, shapes, 2)
    text = text_of("clip_by_norm >> came", "float64")

    def stepped(arrays: Sequence[Array], gradients: Sequence[Sequence[Array]], folder: Path) -> tuple[int, list[Array]]:
        folder.mkdir()
        run, left = ShapedRun(text, folder, [p.copy() for p in arrays]), 1 << 20
        for grads in gradients:
            ctypes.c_int.in_dll(run.library, "cuda_launches_left").value = left
            assert run.step(grads) == 0
        return left - ctypes.c_int.in_dll(run.library, "cuda_launches_left").value, [*run.params]

    few, alone = stepped(params, steps, tmp_path / "few")
    five = [[g for g in each for _ in range(5)] for each in steps]
    many, beside = stepped([p for p in params for _ in range(5)], five, tmp_path / "many")
    assert few == many <= 24
    for i, p in enumerate(beside):
        np.testing.assert_array_equal(p, alone[i // 5])


@needs_compiler
def test_the_error_of_a_launch_is_returned_and_no_launch_follows(tmp_path: Path) -> None:
    params, (grads,) = drawn(3, ((7, 9), (5,)), 1)
    run = ShapedRun(text_of("adafactor", "float64"), tmp_path, params)
    before, left = [p.copy() for p in params], ctypes.c_int.in_dll(run.library, "cuda_launches_left")
    for launches in range(3):
        left.value = launches
        assert run.step(grads) == 719
        assert left.value == -1
    for p, q in zip(params, before, strict=True):
        np.testing.assert_array_equal(p, q)


@needs_compiler
def test_a_step_of_no_tensors_or_of_empty_ones_launches_no_empty_grid(tmp_path: Path) -> None:
    run = ShapedRun(text_of("came", "float64"), tmp_path, [np.zeros((0, 3)), np.zeros((3, 0)), np.zeros(0)])
    assert run.step(run.params) == 0
    run.params, run.tensors = [], (type(run.tensors[0]) * 0)()
    assert run.prepare() == 0
    assert run.step([]) == 0


@pytest.mark.skipif(bool(cuda_assembly.missing()), reason=cuda_assembly.missing())
@pytest.mark.parametrize(("rule", "dtype"), [("adafactor", "float32"), ("muon", "bfloat16"), ("came", "float64")])
def test_the_kernels_are_compiled_by_nvrtc(rule: str, dtype: str) -> None:
    assert len(cuda_assembly.compiled(text_of(rule, dtype), "sm_90")) > 1000


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on the path")
@pytest.mark.parametrize("rule", ["adafactor", "muon", "clip_by_global_norm >> came"])
def test_the_file_is_compiled_by_nvcc(rule: str, tmp_path: Path) -> None:
    check_nvcc(text_of(rule), tmp_path)


def test_two_files_have_no_name_of_the_linker_in_common() -> None:
    names = []
    for name in ("one", "two"):
        ((_, text),) = written(rulec.load("muon"), "cuda", name=name).items()
        names.append(set(re.findall(r'extern "C" [^(]*?(\w+)\(', re.sub(r"__launch_bounds__\([^)]*\) ", "", text))))
        assert text.count('extern "C"') == len(names[-1]) == 8
    assert names[0].isdisjoint(names[1])


@pytest.mark.parametrize(
    ("rule", "storage", "why"),
    [
        (
            "schedule_free(adafactor)",
            {},
            "it is evaluated at another point than it is trained, and sees rows or columns",
        ),
        ("adam_mini", {"m": "int8"}, "it sees rows and columns of states in codes"),
        ("shampoo", {}, "it needs the matrix function transpose"),
        ("polargrad", {}, "it iterates newton_schulz with other coefficients than Muon's"),
    ],
)
def test_a_rule_that_sees_matrices_is_refused_for_a_reason(rule: str, storage: dict[str, str], why: str) -> None:
    with pytest.raises(CannotBuild, match=f"rulec build cannot write .* as CUDA C: {why}"):
        text_of(rule, "float32", Storage(storage))
