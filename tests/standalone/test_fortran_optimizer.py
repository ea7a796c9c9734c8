"""Optimizers in Fortran that are chosen at run time: they have the bits of the C functions, and refuse wrong arrays."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

import rulec
from rulec.runtime.storage.options import Storage
from rulec.standalone.prose import written
from tests.standalone.c_library import Array, CRule, CRun, drawn
from tests.standalone.test_fortran import needs_gfortran

pytestmark = needs_gfortran

STRICT = ("-std=f2018", "-Wall", "-Wextra", "-Werror", "-fcheck=all,no-array-temps")

#: Rules in one program, among them a rule with one state, a rule of shapes and a rule with a point for evaluation.
RULES = ("adamw", "lion", "adafactor", "schedule_free_adamw")

#: The shapes of parameters in C; those of Fortran are the reverse.
SHAPES = ((4, 2, 3, 3), (5,), (7, 6))

CHOOSE = """
program choose
  use, intrinsic :: iso_c_binding
  use rulec_{dtype}
  {uses}
  implicit none
  class(rulec_optimizer), allocatable :: opt
  real(rulec_kind), allocatable :: kernel(:, :, :, :), bias(:), weight(:, :)
  real(rulec_kind), allocatable :: kernel_gradient(:, :, :, :), bias_gradient(:), weight_gradient(:, :)
  integer(c_int8_t), allocatable :: states(:), of_bias(:), of_weight(:)
  character(40) :: word
  integer :: i
  call get_command_argument(1, word)
  select case (word)
  {cases}
  case default
    error stop 'no such rule'
  end select
  if (opt%name() /= word) error stop 'another name'
  call opt%set('lr', 0.05_c_double)
  if (abs(opt%get('lr') - 0.05_c_double) > 0) error stop 'another learning rate'
  allocate(kernel(3, 3, 2, 4), bias(5), weight(6, 7))
  allocate(kernel_gradient(3, 3, 2, 4), bias_gradient(5), weight_gradient(6, 7))
  open(10, file='in.bin', access='stream', form='unformatted', status='old')
  read(10) kernel, bias, weight
  if (opt%steps(states) /= -1) error stop 'steps before init'
  call opt%init(kernel, states)
  call opt%init(bias, of_bias)
  call opt%init(weight, of_weight)
  do i = 1, 3
    read(10) kernel_gradient, bias_gradient, weight_gradient
    call opt%update(kernel, kernel_gradient, states)
    call opt%update(bias, bias_gradient, of_bias)
    call opt%update(weight, weight_gradient, of_weight)
  end do
  if (opt%steps(states) /= 3 .or. opt%steps(of_weight) /= 3) error stop 'another number of steps'
  call opt%to_evaluation(weight, of_weight)
  write(*, '(*(z0, :, " "))') bits(reshape(weight, [42]))
  call opt%to_training(weight, of_weight)
  write(*, '(*(z0, :, " "))') bits(reshape(kernel, [72])), bits(bias), bits(reshape(weight, [42]))
contains
  elemental function bits(x) result(word)
    real(rulec_kind), intent(in) :: x
    integer({integer}) :: word
    word = transfer(x, word)
  end function
end program
"""

INTEGERS = {"float32": "c_int32_t", "float64": "c_int64_t"}


def write(folder: Path, rules: Sequence[str], dtype: str = "float32") -> list[str]:
    """Writes rules; the sources of Fortran and C in the order of their compilation."""
    for rule in rules:
        for name, text in written(rulec.load(rule), "c", dtype=dtype).items():
            (folder / name).write_text(text)
    return [f"rulec_{dtype}.f90", *(f"{rule}{suffix}" for suffix in (".f90", ".c") for rule in rules)]


def build(folder: Path, sources: Sequence[str], program: str) -> subprocess.CompletedProcess[str]:
    """Compiles each source once, and the program with them."""
    (folder / "program.f90").write_text(program)
    for source in (s for s in sources if not (folder / f"{s}.o").exists()):
        compiler = ["gfortran", *STRICT] if source.endswith(".f90") else ["gcc", "-std=c99", "-O2"]
        command = [*compiler, "-c", source, "-o", f"{source}.o"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    command = ["gfortran", *STRICT, "-o", "program", "program.f90", *(f"{s}.o" for s in sources), "-lm"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def run(folder: Path, *words: str) -> str:
    done = subprocess.run(["./program", *words], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def choosing(folder: Path, dtype: str) -> None:
    """Builds the program of all rules."""
    uses = "\n  ".join(f"use {rule}_rule, only: {rule}_optimizer" for rule in RULES)
    cases = "\n  ".join(f"case ('{rule}')\n    allocate({rule}_optimizer :: opt)" for rule in RULES)
    program = CHOOSE.format(dtype=dtype, uses=uses, cases=cases, integer=INTEGERS[dtype])
    done = build(folder, write(folder, RULES, dtype), program)
    assert done.returncode == 0, done.stderr


def expected(folder: Path, rule: str, dtype: str) -> tuple[Array, list[Array]]:
    """What the C functions make of the same numbers: the last array where it is evaluated, and all where they train."""
    folder.mkdir()
    params, steps = drawn(3, SHAPES, 3)
    run = CRun(CRule(rulec.load(rule), folder, dtype), params, {"lr": 0.05})
    for grads in steps:
        run.step(grads, {"lr": 0.05})
    trained = [x.copy() for x in run.arrays]
    if run.rule.file.moves():
        run.move("to_evaluation", {"lr": 0.05})
        assert not np.array_equal(run.arrays[2], trained[2])
        there = run.arrays[2].copy()
        run.move("to_training", {"lr": 0.05})
        return there, [*trained[:2], run.arrays[2]]
    return trained[2], trained


def told(text: str, dtype: str) -> Array:
    kind = {"float32": np.uint32, "float64": np.uint64}[dtype]
    return np.array([int(word, 16) for word in text.split()], kind).view(dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_rule_chosen_by_its_name_has_the_bits_of_its_c(dtype: str, tmp_path: Path) -> None:
    choosing(tmp_path, dtype)
    params, steps = drawn(3, SHAPES, 3)
    numbers = [np.asarray(x, dtype).ravel() for arrays in (params, *steps) for x in arrays]
    np.concatenate(numbers).tofile(tmp_path / "in.bin")
    ends = np.cumsum([np.prod(s) for s in SHAPES])[:-1]
    seen = set()
    for rule in RULES:
        there, trained = expected(tmp_path / rule, rule, dtype)
        evaluated, flat = (told(line, dtype) for line in run(tmp_path, rule).splitlines())
        assert evaluated.tobytes() == there.tobytes(), rule
        for ours, theirs in zip(np.split(flat, ends), trained, strict=True):
            assert ours.tobytes() == theirs.tobytes(), rule
        seen.add(flat.tobytes())
    assert len(seen) == len(RULES)


REFUSED = """
program refused
  use, intrinsic :: iso_c_binding
  use rulec_float32
  use adamw_rule, only: adamw_optimizer, adamw_hyper
  use adafactor_rule, only: adafactor_optimizer
  use muon_rule, only: muon_optimizer
  implicit none
  class(rulec_optimizer), allocatable :: opt
  real(rulec_kind) :: w(3, 2), g(3, 2), turned(2, 3), line(6), grown(3, 4), before(3, 2)
  integer(c_int8_t), allocatable :: state(:), saved(:), other(:)
  integer :: status
  w = 1
  g = 2
  turned = 2
  grown = 2
  line = 1
  before = w
  allocate(opt, source=adamw_optimizer(adamw_hyper(lr=0.1_c_double)))
  call opt%update(w, g, state, status)
  call expect(rulec_bad_state, 'no state')
  if (allocated(state)) error stop 'a state was made'
  call opt%init(w, state)
  saved = state
  call opt%update(w, turned, state, status)
  call expect(rulec_bad_gradient, 'a turned gradient')
  call opt%update(w, grown, state, status)
  call expect(rulec_bad_gradient, 'a longer gradient')
  call opt%update(w, g(:, :1), state, status)
  call expect(rulec_bad_gradient, 'a shorter gradient')
  call opt%init(grown, other)
  call opt%update(w, g, other, status)
  call expect(rulec_bad_state, 'the state of another parameter')
  other = state(:size(state) - 1)
  call opt%update(w, g, other, status)
  call expect(rulec_bad_state, 'a state that was cut')
  call opt%to_evaluation(w, other, status)
  call expect(rulec_bad_state, 'a state that was cut')
  call opt%set('learning_rate', 0.5_c_double, status)
  call expect(rulec_bad_name, 'an unknown hyper-parameter')
  call opt%set('beta1', 2.0_c_double, status)
  if (status /= rulec_ok) error stop 'set'
  call opt%update(w, g, state, status)
  call expect(rulec_bad_hyper, 'a hyper-parameter outside its range')
  call opt%init(w, state, status)
  call expect(rulec_bad_hyper, 'a hyper-parameter outside its range')
  call opt%set('beta1', 0.9_c_double)
  deallocate(opt)
  allocate(muon_optimizer :: opt)
  call opt%init(line, other, status)
  call expect(rulec_bad_shape, 'a vector for Muon')
  deallocate(opt)
  allocate(adafactor_optimizer :: opt)
  call opt%update(w, g, state, status)
  call expect(rulec_bad_state, 'the state of another rule')
  call opt%init(w, other)
  call opt%update(turned, turned, other, status)
  call expect(rulec_bad_state, 'a state for the transpose')
  call opt%update(w, g, other, status)
  if (status /= rulec_ok .or. all(abs(w - before) <= 0)) error stop 'what fits is refused'
  print '(a)', rulec_message(rulec_bad_gradient)
contains
  subroutine expect(code, what)
    integer, intent(in) :: code
    character(*), intent(in) :: what
    if (status /= code) error stop what
    if (any(abs(w - before) > 0)) error stop 'a parameter was written: '//what
    if (.not. allocated(saved)) return
    if (any(saved /= state)) error stop 'a state was written: '//what
  end subroutine
end program
"""


@pytest.mark.slow
def test_what_does_not_fit_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    done = build(tmp_path, write(tmp_path, ("adamw", "adafactor", "muon")), REFUSED)
    assert done.returncode == 0, done.stderr
    assert run(tmp_path) == "the gradient has other extents than its parameter\n"


STOPS = {
    "call opt%update(w, turned, state)": (
        "adamw_optimizer%update (extents 2 x 3 and not 3 x 2): the gradient has other extents than its parameter"
    ),
    "call opt%update(turned, turned, late)": (
        "adamw_optimizer%update (extents 2 x 3): the state block was not initialised for a tensor of this shape: call "
        "init with this parameter first"
    ),
    "call opt%set('lrr', 1.0_c_double)": "adamw_optimizer%set (lrr): the rule has no hyper-parameter of this name",
    "print *, opt%get('lrr')": "adamw_optimizer%get (lrr): the rule has no hyper-parameter of this name",
}

STOPPED = """
program stopped
  use, intrinsic :: iso_c_binding
  use rulec_float32
  use adamw_rule, only: adamw_optimizer
  implicit none
  type(adamw_optimizer) :: opt
  real(c_float) :: w(3, 2) = 1, turned(2, 3) = 1
  integer(c_int8_t), allocatable :: state(:), late(:)
  character(40) :: word
  call opt%init(w, state)
  call get_command_argument(1, word)
  if (allocated(late)) deallocate(late)
  select case (word)
  {cases}
  end select
  if (all(w < 0)) print *, turned
end program
"""


@pytest.mark.slow
def test_without_a_status_a_program_stops_with_the_reason(tmp_path: Path) -> None:
    cases = "\n  ".join(f"case ('{i}')\n    {call}" for i, call in enumerate(STOPS))
    done = build(tmp_path, write(tmp_path, ["adamw"]), STOPPED.format(cases=cases))
    assert done.returncode == 0, done.stderr
    for i, reason in enumerate(STOPS.values()):
        stopped = subprocess.run(["./program", str(i)], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert stopped.returncode != 0
        assert f"ERROR STOP {reason}\n" in stopped.stderr


KINDS = """
program kinds
  use, intrinsic :: iso_c_binding
  use rulec_float32, only: rulec_optimizer
  use rulec_float64, only: wide_optimizer => rulec_optimizer
  use adamw_rule, only: adamw_optimizer, adamw_kind
  use wide_rule, only: wide_adamw => wide_optimizer, wide_kind
  implicit none
  class(rulec_optimizer), allocatable :: opt
  class(wide_optimizer), allocatable :: wide
  real(adamw_kind) :: w(3) = 1, g(3) = 1
  real(wide_kind) :: x(3) = 1, y(3) = 1
  integer(c_int8_t), allocatable :: state(:), of_x(:)
  allocate(adamw_optimizer :: opt)
  allocate(wide_adamw :: wide)
  call opt%init({w}, state)
  call wide%init(x, of_x)
  call opt%update({w}, {g}, state)
  call wide%update({x}, y, of_x)
  if (any(abs(x - w) > 1e-6) .or. all(abs(x - w) <= 0)) error stop 'not the two kinds of one step'
  if (any(abs(g) > 1) .or. kind(w) == kind(x)) error stop 'kinds'
end program
"""


@pytest.mark.slow
def test_each_kind_has_a_file_and_no_other_is_taken(tmp_path: Path) -> None:
    narrow = write(tmp_path, ["adamw"])
    for name, text in written(rulec.load("adamw"), "c", name="wide", dtype="float64").items():
        (tmp_path / name).write_text(text)
    sources = [*narrow, "rulec_float64.f90", "wide.f90", "wide.c"]
    right = {"w": "w", "g": "g", "x": "x"}
    done = build(tmp_path, sources, KINDS.format(**right))
    assert done.returncode == 0, done.stderr
    run(tmp_path)
    for wrong in ({"w": "x"}, {"g": "y"}, {"x": "w"}, {"g": "reshape(g, [3, 1])"}):
        done = build(tmp_path, sources, KINDS.format(**{**right, **wrong}))
        assert done.returncode != 0, wrong
        assert "no matching specific binding for the call to the GENERIC" in done.stderr, wrong


AWAY = """
program away
  use, intrinsic :: iso_c_binding
  use rulec_float32
  use aegd_rule, only: aegd_optimizer
  implicit none
  type(aegd_optimizer), target :: opt
  class(rulec_optimizer), pointer :: any
  real(rulec_kind) :: w(4) = 1, g(4) = 2
  integer(c_int8_t), allocatable :: state(:)
  integer :: status
  any => opt
  call any%init(w, state)
  call any%update(w, g, state, status)
  if (status /= rulec_bad_input .or. any%steps(state) /= 0) error stop 'a step without a loss'
  call any%set('loss', 0.25_c_double)
  call any%update(w, g, state)
  print '(*(z0, :, " "))', transfer(w, [0])
end program
"""


@pytest.mark.slow
def test_inputs_that_are_numbers_are_set_by_name(tmp_path: Path) -> None:
    done = build(tmp_path, write(tmp_path, ["aegd"]), AWAY)
    assert done.returncode == 0, done.stderr
    stepped = told(run(tmp_path), "float32")
    energy = np.sqrt(1.25)  # of the paper: r falls by a factor of 1 + 2*lr*v*v, for v = g/(2*sqrt(loss + c))
    v = 2 / (2 * np.sqrt(1.25))
    energy /= 1 + 2 * 0.1 * v * v
    np.testing.assert_allclose(stepped, 1 - 2 * 0.1 * energy * v, rtol=1e-6)


def test_rules_with_arrays_as_inputs_have_the_interfaces_alone() -> None:
    files = written(rulec.load("sophia"), "c")
    assert "sophia_step" in files["sophia.f90"]
    assert "extends(" not in files["sophia.f90"]


SEEDED = """
program seeded
  use, intrinsic :: iso_c_binding
  use rulec_bfloat16
  use adamw_rule, only: adamw_optimizer
  implicit none
  type(adamw_optimizer) :: opt
  integer(rulec_kind) :: w(256, 2), g(256)
  integer(c_int8_t), allocatable :: state(:), second(:)
  integer :: i
  open(10, file='in.bin', access='stream', form='unformatted', status='old')
  read(10) w, g
  opt%seed = 7
  call opt%init(w(:, 1), state)
  call opt%init(w(:, 2), second)
  do i = 1, 3
    call opt%update(w(:, 1), g, state)
    call opt%update(w(:, 2), g, second)
  end do
  print '(*(z0, :, " "))', reshape(w, [512])
end program
"""


@pytest.mark.slow
def test_each_array_has_random_bits_of_its_own(tmp_path: Path) -> None:
    rule, storage = rulec.load("adamw"), Storage(weights="stochastic")
    texts: Mapping[str, str] = written(rule, "c", dtype="bfloat16", storage=storage)
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    param = np.full(256, 0x3F80, np.uint16)
    grad = np.full(256, 0x3C23, np.uint16)
    np.concatenate([param, param, grad]).tofile(tmp_path / "in.bin")
    done = build(tmp_path, ["rulec_bfloat16.f90", "adamw.f90", "adamw.c"], SEEDED)
    assert done.returncode == 0, done.stderr
    printed = np.array([int(x, 16) for x in run(tmp_path).split()], np.uint16).reshape(2, 256)
    (tmp_path / "c").mkdir()
    built = CRule(rule, tmp_path / "c", "bfloat16", weights="stochastic")
    reference = CRun(built, [param.view(built_dtype()), param.view(built_dtype())], seed=7)
    for _ in range(3):
        reference.step([grad.view(built_dtype())] * 2)
    for ours, theirs in zip(printed, reference.arrays, strict=True):
        assert ours.tobytes() == theirs.tobytes()
    assert not np.array_equal(printed[0], printed[1])


def built_dtype() -> np.dtype[np.generic]:
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)
