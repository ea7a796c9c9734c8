"""Files of CUDA C: compiled by NVRTC, by nvcc where it is, and run by a C++ compiler with a runtime of our own."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
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
from rulec.backend.printer import identifier
from rulec.compiler.scalars import evaluate_once
from rulec.errors import RulecError
from rulec.language.expr.node import Op
from rulec.runtime.engine import default_hyper
from rulec.runtime.storage.options import Storage
from rulec.standalone.cases import CannotBuild, family
from rulec.standalone.prose import written
from tests.backends import cuda_assembly
from tests.backends.cuda_stand_in import kept, version
from tests.standalone.c_library import drawn
from tests.standalone.one_file import Array

HERE = Path(__file__).parent
MACHINE = HERE.parent / "backends"

#: Kinds of C types as ctypes has them.
_KINDS = {"double": ctypes.c_double, "long long": ctypes.c_int64, "unsigned": ctypes.c_uint32}

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


def rule_of(rule: str) -> rulec.Rule:
    """A rule by its name, or by its text, which has several lines."""
    return rulec.parse(rule) if "\n" in rule else rulec.load(rule)


def text_of(rule: str, dtype: str = "float32", storage: Storage | None = None) -> str:
    ((name, text),) = written(rule_of(rule), "cuda", name="rule", dtype=dtype, storage=storage).items()
    assert name == "rule.cu"
    return text


def structure(text: str, name: str) -> type[ctypes.Structure]:
    """A struct of the file as ctypes has it; `kinds` has the C type that each pointer is to."""
    found = re.search(r"typedef struct \{\n((?:    .*;\n)*)\} " + f"{name};", text)
    assert found is not None
    fields: list[tuple[str, Any]] = []
    kinds: dict[str, str] = {}
    for line in found[1].splitlines():
        kind, _, names = line.strip(" ;").rpartition("*")
        if not kind:
            match = re.fullmatch(r"(double|long long|unsigned) (.*)", names)
            assert match is not None, line
            kind, names = match[1], match[2]
        for name, extent in re.findall(r"(\w+)(?:\[(\d+)\])?", names):
            one = _KINDS.get(kind, ctypes.c_void_p)
            fields.append((name, one * int(extent) if extent else one))
        kinds |= {x.strip(): kind.strip() for x in names.split(",")}
    return type(name, (ctypes.Structure,), {"_fields_": fields, "kinds": kinds})


class Run:
    """The functions of a file, compiled for a CPU, over some arrays.

    `begun` has the first values of states that do not begin as zeros: numbers, or None for the parameter itself.
    """

    def __init__(
        self, text: str, folder: Path, params: Sequence[Array], begun: Mapping[str, float | None] = {}
    ) -> None:  # fmt: skip
        self.library, self.text = compiled(text, folder), text
        Tensor, Hyper = structure(text, "rule_tensor"), structure(text, "rule_hyper")
        self.params, self.tensors, self.begun = params, (Tensor * len(params))(), {"mu_product": 1.0, **begun}
        self.kept: list[Array] = []
        for tensor, p in zip(self.tensors, params, strict=True):
            tensor.param, tensor.size = p.ctypes.data, p.size
            self._begin(tensor, p)
        self.shared = structure(text, "rule_shared")() if "rule_shared;" in text else None
        if self.shared is not None:
            self._begin(self.shared, np.zeros(0))
        (defaults,) = re.findall(r"#define RULE_DEFAULTS \{(.*)\}", text)
        self.hyper = Hyper(*map(float, filter(None, defaults.split(", "))))
        for name in ("rule_words", "rule_scratch"):
            if f" {name}(" in text:
                getattr(self.library, name).restype = ctypes.c_int64

    def _begin(self, owner: ctypes.Structure, p: Array) -> None:
        """The first values of the states of a tensor or of the model."""
        for name, kind, *_ in type(owner)._fields_:
            first = self.begun.get(name, 0.0)
            if kind is ctypes.c_double:
                setattr(owner, name, first)
            if kind is not ctypes.c_void_p or name in ("param", "grad"):
                continue
            dtype = np.float32 if type(owner).kinds[name] == "float" else np.float64  # type: ignore[attr-defined]
            array = (
                np.full(p.size + sum(p.shape) + 1, first, dtype)
                if first is not None
                else np.append(p.ravel(), p.dtype.type(0))
            )
            self.kept.append(array)
            setattr(owner, name, array.ctypes.data)

    def step(self, grads: Sequence[Array]) -> int:
        """One step, as a program takes it: one table, and its launches. The error that it returns."""
        for tensor, grad in zip(self.tensors, grads, strict=True):
            tensor.grad = grad.ctypes.data
        return self.launched("rule_fill", "rule_step")

    def launched(self, fill: str, launch: str) -> int:
        """Writes the tables by a function of the file, and launches kernels by another. The error of the latter."""
        count = ctypes.c_int64(len(self.params))
        words = np.full(self.library.rule_words(count, self.tensors), -1, np.int64)
        at = words.ctypes.data_as(ctypes.c_void_p)
        more: list[Any] = [] if self.shared is None else [ctypes.byref(self.shared)]
        if " rule_scratch(" in self.text and fill == "rule_fill":
            self.scratch = np.full(self.library.rule_scratch(count, self.tensors) // 8, np.nan)
            more.append(self.scratch.ctypes.data_as(ctypes.c_void_p))
        function = getattr(self.library, fill)
        function.restype = ctypes.c_int64
        blocks = function(count, self.tensors, ctypes.byref(self.hyper), *more, at)
        return int(getattr(self.library, launch)(at, count, ctypes.c_int64(blocks), None))


def compiled(text: str, folder: Path) -> Any:
    """The file as a library of its own, with blocks and threads that run one after the other."""
    (folder / "rule.cu").write_text(text)
    options = ["-std=c++17", "-O1", "-fPIC", "-ffp-contract=off", "-Wall", "-Werror", "-Wno-unknown-pragmas", "-c"]
    kernel = ["-x", "c++", "-include", str(MACHINE / "cuda_on_cpu.h"), f"-I{HERE / 'cuda_stub'}", "rule.cu"]
    machine = [*options, str(MACHINE / "cuda_on_cpu.cpp"), "-o", "machine.o"]
    headers = [MACHINE / "cuda_on_cpu.h", MACHINE / "cuda_on_cpu.cpp", HERE / "cuda_stub" / "cuda_runtime.h"]

    def make(library: Path) -> None:
        link = ["-shared", "rule.o", "machine.o", "-o", str(library)]
        for last in ([*options, *kernel, "-o", "rule.o"], machine, link):
            done = subprocess.run(["g++", *last], cwd=folder, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr[-3000:]

    once = kept("librule.so", (version("g++"), text, *options, *(x.read_text() for x in headers)), make)
    return ctypes.CDLL(str(shutil.copy(once, folder / "rule.so")))


def check_steps(rule: str, dtype: str, words: dict[str, str], folder: Path, count: int = 3) -> None:
    """The steps of a file are those of the reference, over tensors of odd sizes.

    The reference keeps no codes for tensors of a few elements.
    """
    params, steps = drawn(19, ((8192 * 2 + 5,), (65, 127), (0,), *[(3,)] * (not words)), count)
    arrays = [p.astype(numpy_dtype(dtype)) for p in params]
    given = [[g.astype(numpy_dtype(dtype)) for g in each] for each in steps]
    ours, exact = [p.copy() for p in arrays], dtype == "bfloat16" or bool(words)
    optimizer = rulec.array.Optimizer(rulec.load(rule), arrays, backend="numpy", state_dtype=words or None)
    run = Run(text_of(rule, dtype, Storage(words)), folder, ours, begun(rule, dtype))
    for grads in given:
        assert run.step(grads) == 0
        optimizer.step(grads)
    relative = 0 if exact else 1e-12 if dtype == "float64" else 1e-6
    for x, y in zip(ours, arrays, strict=True):
        np.testing.assert_allclose(x.astype(float), y.astype(float), rtol=relative, atol=relative / 10)
    assert [t.step for t in run.tensors] == [count] * len(params)
    assert not np.array_equal(ours[0].astype(float), params[0].astype(numpy_dtype(dtype)).astype(float))


def begun(rule: str, dtype: str) -> dict[str, float | None]:
    """The first value of each state: a number, or None for the parameter itself."""
    whole = family(rule_of(rule), dtype, Storage({}), "a test", frozenset({Op.NEWTON_SCHULZ}), shares=True)
    hyper, states = default_hyper(whole.rule, {}, dtype), [b for case in whole.cases for b in case.program.states]
    inits = {identifier(b.name): b.init for b in states if b.init is not None}
    return {b: None if x.op is Op.LOAD else float(evaluate_once(x, hyper, {}, {})) for b, x in inits.items()}


@needs_compiler
@pytest.mark.parametrize(
    ("rule", "dtype", "words"),
    [("adamw", "float32", {}), ("nadam", "float64", {}), ("lion", "bfloat16", {}), ("adamw", "float32", {"": "int8"})],
)
def test_a_program_in_c_takes_the_reference_steps(
    rule: str, dtype: str, words: dict[str, str], tmp_path: Path
) -> None:  # fmt: skip
    check_steps(rule, dtype, words, tmp_path)


@needs_compiler
@pytest.mark.parametrize(
    ("rule", "dtype", "words"),
    [
        ("lamb", "float32", {}), ("clip_by_global_norm >> adamw", "float64", {}), ("prodigy", "float32", {}),
        ("lamb", "float32", {"": "int8"}), ("lars", "bfloat16", {}), ("adaptive_sgd", "float64", {}),
    ],
)  # fmt: skip
def test_numbers_between_stages_are_those_of_the_reference(
    rule: str, dtype: str, words: dict[str, str], tmp_path: Path
) -> None:
    check_steps(rule, dtype, words, tmp_path)


@needs_compiler
@pytest.mark.parametrize(
    ("rule", "dtype", "words"),
    [
        ("schedule_free_adamw", "float64", {}), ("schedule_free_adamw", "float32", {"v": "dynamic8"}),
        ("schedule_free(lamb)", "float64", {}), ("ema(adam)", "float64", {}),
    ],
)  # fmt: skip
def test_parameters_move_to_where_the_model_is_evaluated_and_back(
    rule: str, dtype: str, words: dict[str, str], tmp_path: Path
) -> None:
    params, steps = drawn(23, ((8192 + 5,), (65, 127), (0,)), 4)
    arrays = [p.astype(dtype) for p in params]
    ours, relative = [p.copy() for p in arrays], 1e-12 if dtype == "float64" else 1e-6
    optimizer = rulec.array.Optimizer(rulec.load(rule), arrays, backend="numpy", state_dtype=words or None)
    run = Run(text_of(rule, dtype, Storage(words)), tmp_path, ours, begun(rule, dtype))
    for number, grads in enumerate(steps):
        given = [g.astype(dtype) for g in grads]
        assert run.step(given) == 0
        optimizer.step(given)
        if number == 1:
            before = [p.copy() for p in ours]
            assert run.launched("rule_to_evaluation_fill", "rule_to_evaluation") == 0
            optimizer.eval()
            for x, y in zip(ours, arrays, strict=True):
                np.testing.assert_allclose(x, y, rtol=relative, atol=relative / 10)
            assert not np.allclose(ours[0], before[0], rtol=1e-5, atol=0)
            assert run.launched("rule_to_training_fill", "rule_to_training") == 0
            optimizer.train()
    for x, y in zip(ours, arrays, strict=True):
        np.testing.assert_allclose(x, y, rtol=relative, atol=relative / 10)
    assert [t.step for t in run.tensors] == [4] * len(params)


@cache
def of_stages() -> list[str]:
    """The rules of the library that are written with numbers between stages, or after the last."""
    names = []
    for name in rulec.rules():
        with suppress(RulecError):
            if "_launch(rule_join" in text_of(name):
                names.append(name)
    return names


@pytest.mark.parametrize("rule", ["novograd", "ldog"])
def test_pointers_of_numbers_between_stages_are_declared(rule: str) -> None:
    """Both rules write a number of a tensor after its last stage."""
    functions = re.split(r"(?=^extern )", text_of(rule, "float64"), flags=re.MULTILINE)
    used = [{*re.findall(r"at<double>\((\w+)\[", text)} for text in functions]
    declared = [{*re.findall(r"const int64_t \*(?:const )?(\w+)", text)} for text in functions]
    assert any("*at<double>(entry[" in text for text in functions)
    assert [names - known for names, known in zip(used, declared, strict=True)] == [set()] * len(functions)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_every_rule_of_several_stages_takes_the_reference_steps(part: int, tmp_path: Path) -> None:
    names = of_stages()
    assert len(names) >= 50
    for name in names[part::8]:
        (tmp_path / name).mkdir(parents=True)
        # AdaShift's gradients are ten steps old, and nothing moves before.
        check_steps(name, "float64", {}, tmp_path / name, 12 if name == "adashift" else 3)


@needs_compiler
def test_the_error_of_a_launch_is_returned_and_no_launch_follows(tmp_path: Path) -> None:
    params, (grads,) = drawn(3, ((70,), (5,)), 1)
    run = Run(text_of("lamb", "float64"), tmp_path, params)
    before = [p.copy() for p in params]
    left = ctypes.c_int.in_dll(run.library, "cuda_launches_left")
    for launches in range(4):
        left.value = launches
        assert run.step(grads) == 719
        assert left.value == -1
        for p, q in zip(params, before, strict=True):
            np.testing.assert_array_equal(p, q)
    left.value = 4
    assert run.step(grads) == 0
    assert left.value == 0
    assert not np.array_equal(params[0], before[0])


@needs_compiler
def test_a_step_of_no_tensors_or_of_empty_ones_launches_no_empty_grid(tmp_path: Path) -> None:
    run = Run(text_of("prodigy", "float64"), tmp_path, [np.zeros(0)], begun("prodigy", "float64"))
    assert run.step([np.zeros(0)]) == 0
    run.params, run.tensors = [], (type(run.tensors[0]) * 0)()
    assert run.step([]) == 0


@pytest.mark.skipif(bool(cuda_assembly.missing()), reason=cuda_assembly.missing())
@pytest.mark.parametrize("rule", ["adamw", "madgrad", "lamb", "prodigy"])
def test_the_kernel_is_compiled_by_nvrtc(rule: str) -> None:
    assert len(cuda_assembly.compiled(text_of(rule), "sm_90")) > 1000


def check_nvcc(text: str, folder: Path) -> None:
    """Compiles a file by nvcc, for compute capability 9.0."""
    (folder / "rule.cu").write_text(text)
    command = ["nvcc", "-arch=sm_90", "-std=c++17", "-fmad=false", "-c", "rule.cu", "-o", "rule.o"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (folder / "rule.o").stat().st_size > 10_000


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on the path")
@pytest.mark.parametrize("rule", ["adamw", "nadam", "lamb", "prodigy"])
def test_the_file_is_compiled_by_nvcc(rule: str, tmp_path: Path) -> None:
    check_nvcc(text_of(rule), tmp_path)


def test_two_files_have_no_name_of_the_linker_in_common() -> None:
    names = []
    for name in ("one", "two"):
        ((_, text),) = written(rulec.load("adamw"), "cuda", name=name).items()
        names.append(set(re.findall(r'extern "C" [^(]*?(\w+)\(', text.replace("__launch_bounds__(256, 2) ", ""))))
        assert text.count('extern "C"') == 4
    assert len(names[0]) == 4
    assert names[0].isdisjoint(names[1])


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        ("skip_not_finite >> adam", "it skips steps, and what is written always takes them"),
        ("momo", "it needs the input loss"),
        ("dion", "it draws random numbers"),
    ],
)
def test_a_rule_without_a_form_is_refused(rule: str, why: str) -> None:
    with pytest.raises(CannotBuild, match=f"rulec build cannot write .* as CUDA C: {why}"):
        written(rulec.load(rule), "cuda")
