"""Noise in CUDA C: the kernels' own text on the CPU, and the machine code that NVRTC makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rulec
from rulec.backend.capabilities import Values
from rulec.compiler.ir import Program
from rulec.compiler.layout import Layout, layout_for
from rulec.testing.kinds import CupyKind
from rulec_backends.cupy import CupyBackend
from rulec_backends.cupy.noise import estimate_source
from rulec_backends.cupy.plan import pack_width
from tests import ledger
from tests.backends import cuda_stand_in
from tests.backends.cuda_assembly import ARCHITECTURES, CHECKERS, kernels, missing
from tests.backends.noises import VALUES, fused_as_filled, noise_of, summed, worst_fills
from tests.backends.test_cuda_code import moved

needs_gcc = pytest.mark.skipif(bool(cuda_stand_in.MISSING), reason=cuda_stand_in.MISSING or "g++ is here")
needs_nvrtc = pytest.mark.skipif(bool(missing()), reason=missing() or "NVRTC is here")


def backend() -> CupyBackend:
    """Of few threads, so that small tensors fill several blocks and a block has two warps."""
    return CupyBackend(threads=64)


slow = pytest.mark.slow


@needs_gcc
@pytest.mark.parametrize(
    ("dtype", "most"),
    [("float32", 1e-6), pytest.param("float64", 2e-15, marks=slow), pytest.param("float16", 1e-3, marks=slow)],
)
def test_sums_are_those_of_the_definition(cupy: Any, dtype: str, most: float) -> None:
    assert worst_fills(backend(), CupyKind(), dtype, (1, 35), 700) < most


@needs_gcc
def test_threads_in_any_order_give_the_same_bits(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_stand_in, "backwards", True)
    out = cupy.empty(9001, np.float32)
    backend().fill_noise(out, noise_of("popcount", 6), 256)
    np.testing.assert_array_equal(out.get(), summed(noise_of("popcount", 6), 9001, 256, "float32"))


@needs_gcc
def test_an_update_by_noise_has_the_bits_of_one_by_a_filled_gradient(cupy: Any) -> None:
    assert fused_as_filled(backend(), CupyKind(), "adamw", "float32", "popcount")
    assert fused_as_filled(backend(), CupyKind(), "adamw", "float32", "popcount", skip=1)


@needs_gcc
@pytest.mark.slow
@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize(("rule", "dtype"), [("lion", "float16"), ("sgd", "float64")])
def test_updates_by_other_rules_and_in_other_dtypes(cupy: Any, rule: str, dtype: str, values: Values) -> None:
    assert fused_as_filled(backend(), CupyKind(), rule, dtype, values, skip=1)


@needs_gcc
def test_tensors_that_stay_scales_and_some_of_the_tensors(cupy: Any) -> None:
    cuda, kind = backend(), CupyKind()
    assert fused_as_filled(cuda, kind, "adamw", "float32", "popcount", tensors=[1, 3])
    assert fused_as_filled(cuda, kind, "adamw", "float32", "popcount", stays=lambda: cupy.asarray([False, True]))
    assert fused_as_filled(
        cuda, kind, "adamw", "float32", "popcount", scale=lambda: cupy.asarray(np.array([3.0], np.float32))
    )


@needs_gcc
@pytest.mark.slow
def test_gradients_of_another_dtype_and_ascent(cupy: Any) -> None:
    assert fused_as_filled(backend(), CupyKind(), "adamw", "float64", "popcount", grad="float32", maximize=True)
    assert fused_as_filled(backend(), CupyKind(), "adamw", "float32", "rademacher", grad="float16")


def check(rule: str, dtype: str, values: Values, architecture: str, grad: str | None = None) -> None:
    """Proves that a kernel keeps nothing in local memory and moves what its program moves, but for the gradient."""
    program = rulec.compile(rulec.load(rule))
    layout = layout_for(program, dtype, grad=grad)
    source = estimate_source(program, layout, values)
    claim = ledger.digest(ledger.checker(Path(__file__), *CHECKERS), architecture, source)
    ledger.prove({rule: claim}, lambda _: check_code(source, architecture, program, layout, values))


def check_code(source: str, architecture: str, program: Program, layout: Layout, values: Values) -> None:
    code = kernels(source, architecture, ["step"])["step"]
    assert (code.local(), code.stack) == ([], 0)
    stage = program.stages[0]
    read, written = moved(program, layout, stage)
    wide, own = pack_width(program, layout, stage), {"float32": 4, "float64": 8}.get(layout.dtype("g"), 2)
    assert code.wide_accesses() == {(wide * (read - own), wide * written)}
    names = [name for _, name, _ in code.instructions]
    assert sum(name.startswith("IMAD.WIDE.U32") for name in names) >= 20, "the products of ten rounds"
    assert not [name for name in names if name.startswith(("POPC", "MUFU.COS", "MUFU.SIN"))]
    assert not (values != "normal" and [name for name in names if name.startswith("I2F")])


@needs_nvrtc
@pytest.mark.proof
def test_machine_code_keeps_sums_in_registers() -> None:
    check("adamw", "float32", "popcount", "sm_90")


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.proof
@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize(
    ("dtype", "architecture"), [*(("float32", a) for a in ARCHITECTURES), ("bfloat16", "sm_90"), ("float64", "sm_80")]
)
def test_machine_code_of_other_kinds(dtype: str, values: Values, architecture: str) -> None:
    check("adamw", dtype, values, architecture)
