"""Files of CUDA C: compiled by NVRTC, by nvcc where it is, and run by a C++ compiler with a runtime of our own."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rulec
import rulec.array
from rulec.array.arrays import numpy_dtype
from rulec.runtime.storage.options import Storage
from rulec.standalone.cases import CannotBuild
from rulec.standalone.prose import written
from tests.backends import cuda_assembly
from tests.standalone.c_library import drawn
from tests.standalone.one_file import Array

HERE = Path(__file__).parent
MACHINE = HERE.parent / "backends"

#: Kinds of C types as ctypes has them.
_KINDS = {"double": ctypes.c_double, "long long": ctypes.c_int64, "unsigned": ctypes.c_uint32}

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


def text_of(rule: str, dtype: str = "float32", storage: Storage | None = None) -> str:
    ((name, text),) = written(rulec.load(rule), "cuda", name="rule", dtype=dtype, storage=storage).items()
    assert name == "rule.cu"
    return text


def structure(text: str, name: str) -> type[ctypes.Structure]:
    """A struct of the file as ctypes has it."""
    found = re.search(r"typedef struct \{\n((?:    .*;\n)*)\} " + f"{name};", text)
    assert found is not None
    fields: list[tuple[str, Any]] = []
    for line in found[1].splitlines():
        kind, _, names = line.strip(" ;").rpartition("*")
        if not kind:
            match = re.fullmatch(r"(double|long long|unsigned) (.*)", names)
            assert match is not None, line
            kind, names = match[1], match[2]
        fields += [(x.strip(), _KINDS.get(kind, ctypes.c_void_p)) for x in names.split(",")]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


class Run:
    """The functions of a file, compiled for a CPU, over some arrays."""

    def __init__(self, text: str, folder: Path, params: Sequence[Array]) -> None:
        self.library = compiled(text, folder)
        Tensor, Hyper = structure(text, "rule_tensor"), structure(text, "rule_hyper")
        self.params, self.tensors = params, (Tensor * len(params))()
        pointers = {name for name, kind, *_ in Tensor._fields_ if kind is ctypes.c_void_p} - {"param", "grad"}
        #: All states begin as zeros, but for the product of momenta.
        self.states = [{name: np.zeros(p.size + 1) for name in pointers} for p in params]
        for tensor, p, state in zip(self.tensors, params, self.states, strict=True):
            tensor.param, tensor.size, tensor.mu_product = p.ctypes.data, p.size, 1.0
            for name, array in state.items():
                setattr(tensor, name, array.ctypes.data)
        (defaults,) = re.findall(r"#define RULE_DEFAULTS \{(.*)\}", text)
        self.hyper = Hyper(*map(float, filter(None, defaults.split(", "))))
        for name in ("rule_words", "rule_fill"):
            getattr(self.library, name).restype = ctypes.c_int64

    def step(self, grads: Sequence[Array]) -> None:
        """One step, as a program takes it: one table, and one launch."""
        for tensor, grad in zip(self.tensors, grads, strict=True):
            tensor.grad = grad.ctypes.data
        count = ctypes.c_int64(len(self.params))
        words = np.zeros(self.library.rule_words(count, self.tensors), np.int64)
        at = words.ctypes.data_as(ctypes.c_void_p)
        blocks = self.library.rule_fill(count, self.tensors, ctypes.byref(self.hyper), at)
        assert self.library.rule_step(at, count, ctypes.c_int64(blocks), None) == 0


def compiled(text: str, folder: Path) -> Any:
    """The file as a library, with blocks and threads that run one after the other."""
    (folder / "rule.cu").write_text(text)
    options = ["-std=c++17", "-O1", "-fPIC", "-ffp-contract=off", "-Wall", "-Werror", "-Wno-unknown-pragmas", "-c"]
    kernel = ["-x", "c++", "-include", str(MACHINE / "cuda_on_cpu.h"), f"-I{HERE / 'cuda_stub'}", "rule.cu"]
    for last in (
        [*options, *kernel, "-o", "rule.o"], [*options, str(MACHINE / "cuda_on_cpu.cpp"), "-o", "machine.o"],
        ["-shared", "rule.o", "machine.o", "-o", "rule.so"],
    ):  # fmt: skip
        done = subprocess.run(["g++", *last], cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
    return ctypes.CDLL(str(folder / "rule.so"))


@needs_compiler
@pytest.mark.parametrize(
    ("rule", "dtype", "words"),
    [("adamw", "float32", {}), ("nadam", "float64", {}), ("lion", "bfloat16", {}), ("adamw", "float32", {"": "int8"})],
)
def test_a_program_in_c_takes_the_reference_steps(
    rule: str, dtype: str, words: dict[str, str], tmp_path: Path
) -> None:  # fmt: skip
    params, steps = drawn(19, ((8192 + 5,), (65, 127), (0,)), 3)
    arrays = [p.astype(numpy_dtype(dtype)) for p in params]
    given = [[g.astype(numpy_dtype(dtype)) for g in each] for each in steps]
    ours = [p.copy() for p in arrays]
    optimizer = rulec.array.Optimizer(rulec.load(rule), arrays, backend="numpy", state_dtype=words or None)
    run = Run(text_of(rule, dtype, Storage(words)), tmp_path, ours)
    for grads in given:
        run.step(grads)
        optimizer.step(grads)
    for x, y in zip(ours, arrays, strict=True):
        np.testing.assert_allclose(
            x.astype(float), y.astype(float), rtol=0 if words else 1e-6, atol=0 if words else 1e-7
        )
    assert [t.step for t in run.tensors] == [3] * 3
    assert not np.array_equal(ours[0].astype(float), params[0].astype(numpy_dtype(dtype)).astype(float))


@pytest.mark.skipif(bool(cuda_assembly.missing()), reason=cuda_assembly.missing())
@pytest.mark.parametrize("rule", ["adamw", "madgrad"])
def test_the_kernel_is_compiled_by_nvrtc(rule: str) -> None:
    assert len(cuda_assembly.compiled(text_of(rule), "sm_90")) > 1000


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on the path")
@pytest.mark.parametrize("rule", ["adamw", "nadam"])
def test_the_file_is_compiled_by_nvcc(rule: str, tmp_path: Path) -> None:
    (tmp_path / "rule.cu").write_text(text_of(rule))
    command = ["nvcc", "-arch=sm_90", "-std=c++17", "-fmad=false", "-c", "rule.cu", "-o", "rule.o"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "rule.o").stat().st_size > 10_000


def test_two_files_have_no_name_of_the_linker_in_common() -> None:
    names = []
    for name in ("one", "two"):
        ((_, text),) = written(rulec.load("adamw"), "cuda", name=name).items()
        names.append(set(re.findall(r'extern "C" [^(]*?(\w+)\(', text.replace("__launch_bounds__(256, 2) ", ""))))
        assert text.count('extern "C"') == 4
    assert len(names[0]) == 4
    assert names[0].isdisjoint(names[1])


def test_rules_of_several_stages_are_refused() -> None:
    with pytest.raises(CannotBuild, match="rulec build cannot write LAMB as CUDA C: it reduces over a tensor"):
        written(rulec.load("lamb"), "cuda")
