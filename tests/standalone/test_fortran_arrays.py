"""What a Fortran compiler makes of arrays: sections are updated as whole arrays are, other kinds are refused."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest

import rulec
from rulec.compiler.reference import ReferenceOptimizer
from rulec.standalone.prose import written
from tests.standalone.test_fortran import needs_gfortran

pytestmark = needs_gfortran

PROGRAM = """
program sections
  use, intrinsic :: iso_c_binding
  use rule_rule
  implicit none
  real({kind}) :: whole(8, 3), gradient(3, 8)
  integer(c_int8_t), allocatable :: block(:)
  type(rule_hyper) :: hyper
  integer :: i, status
  {size_declared}
  whole = reshape([(0.5_c_double*i - 3, i = 1, 24)], [8, 3])
  hyper%lr = 0.1_c_double
  allocate(block(2*rule_state_bytes({size})))
  status = rule_init(block(::2), whole(2:8:3, :), {size}, hyper)
  if (status /= 0) error stop 'init'
  do i = 1, 3
    gradient = 2
    gradient(:, 3:7:2) = transpose(whole(2:8:3, :))*i
    status = rule_step(whole(2:8:3, :), gradient(:, 7:3:-2), block(::2), {size}, hyper)
    if (status /= 0) error stop 'step'
  end do
  if (rule_steps(block(::2)) /= 3) error stop 'steps'
  print '(24f24.16)', whole
end program
"""

SIZES = {
    "adamw": ("", "9_c_int64_t"),
    "adafactor": ("integer(c_int64_t), parameter :: extents(2) = [3_c_int64_t, 3_c_int64_t]", "2_c_int, extents"),
}


def compiled(folder: Path, program: str) -> subprocess.CompletedProcess[str]:
    (folder / "program.f90").write_text(program)
    (shared,) = (file.name for file in folder.glob("rulec_*.f90"))
    command = ["gfortran", "-std=f2018", "-o", "program", shared, "rule.f90", "program.f90", "rule.c", "-lm"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def write(folder: Path, rule: str, dtype: str) -> None:
    for name, text in written(rulec.load(rule), "c", name="rule", dtype=dtype).items():
        (folder / name).write_text(text)


@pytest.mark.parametrize(("rule", "dtype"), [("adamw", "float32"), ("adafactor", "float64")])
def test_sections_are_updated_as_whole_arrays_are(rule: str, dtype: str, tmp_path: Path) -> None:
    write(tmp_path, rule, dtype)
    declared, size = SIZES[rule]
    kind = {"float32": "c_float", "float64": "c_double"}[dtype]
    done = compiled(tmp_path, PROGRAM.format(kind=kind, size_declared=declared, size=size))
    assert done.returncode == 0, done.stderr
    ran = subprocess.run(["./program"], cwd=tmp_path, check=True, capture_output=True, text=True)
    found = np.array(ran.stdout.split(), np.float64).reshape(3, 8)  # as C has it: the last index is the fastest
    expected = (0.5 * np.arange(1, 25) - 3).reshape(3, 8)
    section = expected[:, 1::3].astype(dtype)
    reference = ReferenceOptimizer(rulec.load(rule), [section.astype(np.float64)], {"lr": 0.1})
    for i in (1, 2, 3):
        # Column j of the gradient that is read is row 2 - j of the transposed parameter.
        reference.step([(np.asarray(reference.params[0]).T[::-1] * i)])
    expected[:, 1::3] = reference.params[0]
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6 if dtype == "float32" else 1e-12)
    assert np.abs(found[:, 1::3] - section).min() > 1e-4


CALL = """
program call
  use, intrinsic :: iso_c_binding
  use rule_rule
  implicit none
  real(c_float), target :: w(4), g(4)
  real(c_double) :: wide(4)
  integer(c_int8_t), target :: block(4096)
  integer(c_int32_t) :: words(1024)
  type(rule_hyper) :: hyper
  integer(c_int) :: status
  status = {call}
  if (status /= 0) error stop 'status'
end program
"""

WRONG = {
    "a wide parameter": "rule_step(wide, g, block, 4_c_int64_t, hyper)",
    "a wide gradient": "rule_step(w, wide, block, 4_c_int64_t, hyper)",
    "a wide parameter to begin with": "rule_init(block, wide, 4_c_int64_t, hyper)",
    "a state of words": "rule_step(w, g, words, 4_c_int64_t, hyper)",
    "an address": "rule_step(c_loc(w), g, block, 4_c_int64_t, hyper)",
    "one number": "rule_step(w, 0.5_c_float, block, 4_c_int64_t, hyper)",
    "a short count": "rule_step(w, g, block, 4_c_int32_t, hyper)",
    "arrays in another order": "rule_step(block, w, g, 4_c_int64_t, hyper)",
    "what cannot be written": "rule_step(2*w, g, block, 4_c_int64_t, hyper)",
}


def test_arrays_of_other_kinds_are_errors_of_the_compiler(tmp_path: Path) -> None:
    write(tmp_path, "adamw", "float32")
    done = compiled(tmp_path, CALL.format(call="rule_init(block, w, 4_c_int64_t, hyper)"))
    assert done.returncode == 0, done.stderr
    for name, call in WRONG.items():
        done = compiled(tmp_path, CALL.format(call=call))
        assert done.returncode != 0, name
        assert "Error:" in done.stderr, name


def test_no_declaration_takes_an_address(tmp_path: Path) -> None:
    kinds = {"float32": "real(c_float)", "float64": "real(c_double)", "bfloat16": "integer(c_int16_t)"}
    for dtype, kind in kinds.items():
        sources = [f"rulec_{dtype}.f90", "rule.f90"]
        for rule in ("adamw", "adafactor", "schedule_free_adamw", "sgd"):
            write(tmp_path, rule, dtype)
            text = (tmp_path / "rule.f90").read_text()
            assert "c_ptr" not in text
            assert f"{kind}, intent(inout) :: param(*)" in text
            command = ["gfortran", "-std=f2018", "-Wall", "-Wextra", "-Werror", "-c", *sources]
            done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            sources = ["rule.f90"]
