"""The manual's backend for OpenCL: its text anywhere, its kernels where a driver is installed."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import rulec
from rulec.array import Optimizer
from rulec.compiler.layout import kernel_for
from rulec.errors import TensorError
from rulec.testing import IEEE, NumpyKind, check_backend
from rulec.testing.cases import MATRIX_SHAPES, loaded
from rulec.testing.conformance import check_maximize, check_rule
from rulec.testing.trial import Subject
from rulec_backends.c.compile import compiler
from tests.backends.kinds import AWKWARD, CUTS, KINDS, check_every_operation, rule_of
from tests.docs.running import example

opencl: ModuleType = example("opencl")

needs_driver = pytest.mark.skipif(
    opencl.OpenclBackend().unavailable_reason() is not None, reason="there is no driver of OpenCL"
)
SUBJECT = Subject(opencl.OpenclBackend(), NumpyKind(), IEEE)

#: What makes C99 of OpenCL C, as far as a compiler looks at meaning.
AS_C = """\
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#define kernel
#define global
typedef unsigned int uint;
typedef unsigned short ushort;
float as_float(uint bits);
uint as_uint(float value);
size_t get_global_id(uint dimension);
"""


@pytest.mark.skipif(compiler() is None, reason="there is no C compiler")
def test_sources_mean_something_to_a_compiler_of_c(tmp_path: Path) -> None:
    files = []
    for name, dtype in [*((name, "float32") for name in (*KINDS, *AWKWARD)), ("lamb", "float64"), ("lamb", "float16")]:
        files.append(tmp_path / f"{name.replace('/', '_')}_{dtype}.c")
        source = opencl.OpenclBackend().emit(*kernel_for(rulec.compile(rule_of(name)), dtype))
        files[-1].write_text(f"{AS_C}#line 1\n{source}")
    flags = ["-std=c99", "-fsyntax-only", "-Werror", "-Wno-unknown-pragmas"]
    done = subprocess.run([*(compiler() or []), *flags, *map(str, files)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_arrays_are_arguments_and_lie_in_global_memory() -> None:
    program = rulec.compile(rulec.load("adafactor"))
    source = opencl.OpenclBackend().emit(*kernel_for(program, "float32"))
    heads = [line for line in source.splitlines() if line.startswith("kernel void")]
    assert len(heads) == len([stage for stage in program.stages if stage.roots])
    assert "global double *at" not in source
    assert "->p[" not in source


@needs_driver
@pytest.mark.parametrize(("name", "dtype"), [*zip(CUTS, ("float32", "bfloat16", "float16"), strict=True)])
def test_a_rule_for_each_way_of_cutting_tensors(name: str, dtype: str) -> None:
    check_rule(SUBJECT, loaded(name), dtype, MATRIX_SHAPES[5:])


@needs_driver
@pytest.mark.slow
@pytest.mark.parametrize(("names", "dtypes"), [(KINDS, ["float32"]), (CUTS, ["float64", "bfloat16", "float16"])])
def test_rules_of_every_kind_pass_the_suite(names: Sequence[str], dtypes: list[str]) -> None:
    report = check_backend(opencl.OpenclBackend(), rules=names, dtypes=dtypes)
    assert (report.rules, report.refused, report.unmet, report.stages) == ([*names], [], [], True)


@needs_driver
@pytest.mark.slow
def test_every_operation_and_awkward_rules() -> None:
    check_every_operation(SUBJECT, "float64")
    check_maximize(SUBJECT, loaded("lamb"), "float32")
    for name in AWKWARD:
        check_rule(SUBJECT, rule_of(name), "float32", MATRIX_SHAPES[5:])


@needs_driver
def test_bits_are_those_of_c_whatever_the_neighbours() -> None:
    """Chunks of a tensor are launches of its own; + - * / and the square root are IEEE's on both sides."""
    generator = np.random.default_rng(1)
    shapes = ((3,), (70, 130), (0, 4), (9000,))
    params = [generator.standard_normal(shape).astype(np.float32) for shape in shapes]
    grads = [generator.standard_normal(shape).astype(np.float32) for shape in shapes]

    def after(backend: object, which: slice) -> list[np.ndarray]:
        arrays = [p.copy() for p in params[which]]
        optimizer = Optimizer("adamw", arrays, backend=backend)  # type: ignore[arg-type]
        for _ in range(3):
            optimizer.step([g.copy() for g in grads[which]])
        return arrays

    together, alone = after(opencl.OpenclBackend(), slice(None)), after(opencl.OpenclBackend(), slice(1, 2))
    expected = after("c" if compiler() else "cpu", slice(None))
    assert all(np.array_equal(a, b) for a, b in zip(together, expected, strict=True))
    assert np.array_equal(together[1], alone[0])


@needs_driver
def test_arrays_that_a_kernel_cannot_walk_are_refused() -> None:
    program, layout = kernel_for(rulec.compile(rulec.load("sgd")), "float32")
    backend = opencl.OpenclBackend()
    call = backend.build(program, layout, backend.emit(program, layout)).bind([np.ones((4, 4), np.float32)], [{}])
    from rulec.backend.protocol import Rows

    rows = Rows(np.full((1, len(program.columns)), 0.5), np.zeros(1, np.int64))
    with pytest.raises(TensorError, match="contiguous NumPy arrays"):
        call(0, [np.ones((4, 8), np.float32)[:, ::2]], rows)
