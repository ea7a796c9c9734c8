"""Files of CUDA C for rules that see matrices: run by a C++ compiler with a runtime of our own, compiled by NVRTC."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Sequence
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
from tests.standalone.test_cuda import Run, begun, compiled, needs_compiler, structure, text_of

#: Tensors of one dimension and of more, with matrices of odd sides, of one line, of several blocks, and none.
SHAPES = ((65, 127), (33,), (3, 9, 70), (0, 5), (1, 7), (9100,), (70, 8), (2, 300, 40))


class ShapedRun(Run):
    """The functions of a file for a rule that sees matrices, over some arrays."""

    def __init__(self, text: str, folder: Path, params: Sequence[Array], begun: dict[str, float | None] = {}) -> None:
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


def shapes_of(rule: str) -> Sequence[tuple[int, ...]]:
    """Those of `SHAPES` that a rule is for."""
    one = rulec.load(rule)

    def takes(shape: tuple[int, ...]) -> bool:
        with suppress(RulecError):
            rulec.array.Optimizer(one, [np.zeros(shape)], backend="numpy")
            return True
        return False

    return [shape for shape in SHAPES if takes(shape)]


def check_steps(rule: str, dtype: str, folder: Path, count: int = 3, words: dict[str, str] = {}) -> None:
    """The steps of a file are those of the reference, over tensors of all kinds."""
    params, steps = drawn(31, tuple(shapes_of(rule)), count)
    arrays = [p.astype(numpy_dtype(dtype)) for p in params]
    given = [[g.astype(numpy_dtype(dtype)) for g in each] for each in steps]
    ours = [p.copy() for p in arrays]
    optimizer = rulec.array.Optimizer(rulec.load(rule), arrays, backend="numpy", state_dtype=words or None)
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


@needs_compiler
@pytest.mark.parametrize(
    ("rule", "dtype"),
    [
        ("adafactor", "float64"), ("adam_mini", "float32"), ("sm3", "float64"), ("came", "float64"),
        ("clip_by_global_norm >> adafactor", "float64"), ("adamp", "bfloat16"),
    ],
)  # fmt: skip
def test_rows_and_columns_are_those_of_the_reference(rule: str, dtype: str, tmp_path: Path) -> None:
    check_steps(rule, dtype, tmp_path)
