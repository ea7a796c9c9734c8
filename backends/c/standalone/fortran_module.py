"""Prints the module in Fortran that all rules of a dtype share: the abstract type of optimizers chosen at run time."""

from __future__ import annotations

import textwrap

from rulec.standalone.prose import margin

from .model import STATUSES

#: The element of arrays of each dtype in Fortran: its type, and its kind.
ELEMENTS = {
    "float32": ("real", "c_float"), "float64": ("real", "c_double"),
    "bfloat16": ("integer", "c_int16_t"), "float16": ("integer", "c_int16_t"),
}  # fmt: skip

#: The statuses of the module's own, and their meanings; those of the C functions are 0 and above.
_OWN = (
    ("bad_gradient", -1, "the gradient has other extents than its parameter"),
    ("bad_name", -2, "the rule has no hyper-parameter of this name"),
    ("bad_input", -3, "an input of the rule, such as the loss, was not set, or it is NaN"),
)

#: The ranks of arrays.
_RANKS = range(1, 8)


def continued(line: str) -> list[str]:
    """A line on as many lines as it needs: Fortran's end at 132 characters."""
    if len(line) <= 120 or line.startswith("!"):
        return [line]
    indent = " " * (len(line) - len(line.lstrip()))
    parts = textwrap.wrap(line.strip(), 110, break_long_words=False, break_on_hyphens=False)
    return [
        f"{indent}{'' if i == 0 else '  '}{part}{' &' if i < len(parts) - 1 else ''}" for i, part in enumerate(parts)
    ]


def module_name(dtype: str) -> str:
    """The name of the shared module, and of its file."""
    return f"rulec_{dtype}"


def module_text(dtype: str) -> str:
    """The whole file, the same for all rules of a dtype."""
    element, kind = ELEMENTS[dtype]
    statuses = [(f"rulec_{word}", code, sentence) for word, code, sentence in _statuses()]
    public = ["rulec_optimizer", "rulec_moving_optimizer", "rulec_kind", "rulec_message", *(s for s, _, _ in statuses)]
    wrappers = [line for word in ("init", "update", *_MOVES) for rank in _RANKS for line in _wrapper(word, rank)]
    text = _TEXT.replace("<statuses>", "\n".join(f"  integer, parameter :: {s} = {c}" for s, c, _ in statuses))
    text = text.replace("<messages>", "\n".join(_message(s, sentence) for s, _, sentence in statuses))
    text = text.replace("<public>", ", ".join(public)).replace("<wrappers>\n", "\n".join(wrappers))
    text = text.replace("<bindings>", "\n".join(line for word in ("init", "update", *_MOVES) for line in _bound(word)))
    text = text.replace("<module>", module_name(dtype)).replace("<kind>", kind).replace("<element>", element)
    lines = [*margin(_about(dtype), "!"), *(x for line in text.splitlines() for x in continued(line))]
    return "\n".join(lines) + "\n"


def _about(dtype: str) -> list[str]:
    element, kind = ELEMENTS[dtype]
    other = "float32" if dtype == "float64" else "float64"
    return [
        f"Optimizers chosen at run time, for arrays of {element}({kind}): the abstract type that rules extend.", "",
        f"SPDX-License-Identifier: MIT. Printed by rulec, the same for all rules with --dtype {dtype}; the C source of",
        "a rule has the notice. Compile it before the modules of rules, once for all of them.", "",
        "    class(rulec_optimizer), allocatable :: opt      ! allocate(adamw_optimizer :: opt)",
        "    integer(c_int8_t), allocatable :: state(:)      ! one for each array of parameters",
        "    call opt%set('lr', 0.01_c_double)",
        "    call opt%init(param, state)",
        "    call opt%update(param, grad, state)", "",
        "Arrays have 1 to 7 dimensions. What is contiguous is updated where it lies; the compiler copies a section",
        "with a stride, and copies it back. Arrays of another kind are errors of the compiler, which finds no specific",
        f"binding for them: `rulec build --dtype {other}` is for {ELEMENTS[other][0]}({ELEMENTS[other][1]}).", "",
        "Without `status` an error stops the program with its reason. With it, `status` is rulec_ok or a status that",
        "rulec_message puts into words; where it is not rulec_ok, no element of param or state has changed.",
    ]  # fmt: skip


def _statuses() -> list[tuple[str, int, str]]:
    """The names of all statuses, their codes, and their meanings."""
    return [*((word.lower(), code, sentence) for code, (word, sentence) in enumerate(STATUSES)), *_OWN]


def _message(status: str, sentence: str) -> str:
    sentence += ": call init with this parameter first" * (status == "rulec_bad_state")
    return f"    case ({status})\n      text = '{sentence}'"


#: The words of moves to the point of evaluation and back.
_MOVES = ("to_evaluation", "to_training")


def _bound(word: str) -> list[str]:
    """The bindings of a procedure for all ranks, under one name."""
    names = ", ".join(f"{word}_{rank}" for rank in _RANKS)
    return [f"    procedure, private :: {names}", f"    generic :: {word} => {names}"]


def _wrapper(word: str, rank: int) -> list[str]:
    """The procedure for arrays of a rank: passes them on as they lie in memory, with their extents."""
    axes = ", ".join([":"] * rank)
    extents = "shape(param, c_int64_t)"
    gradient = ["    <element>(rulec_kind), intent(in) :: grad(" + axes + ")"] * (word == "update")
    passed = {
        "init": f"init_any(self, param, state, {extents}, status)",
        "update": f"update_any(self, param, grad, state, {extents}, shape(grad, c_int64_t), status)",
    }.get(word, f"move_any(self, {'.true.' if word == _MOVES[0] else '.false.'}, param, state, {extents}, status)")
    grad = "grad, " * (word == "update")
    return [
        f"  subroutine {word}_{rank}(self, param, {grad}state, status)",
        f"    class(rulec_optimizer), intent({'inout' if word == 'init' else 'in'}) :: self",
        f"    <element>(rulec_kind), intent({'in' if word == 'init' else 'inout'}) :: param({axes})", *gradient,
        "    integer(c_int8_t), allocatable, intent(inout) :: state(:)",
        "    integer, intent(out), optional :: status",
        f"    call {passed}", "  end subroutine", "",
    ]  # fmt: skip


_TEXT = """\
module <module>
  use, intrinsic :: iso_c_binding
  implicit none
  private
  public :: <public>

  ! The kind of elements.
  integer, parameter :: rulec_kind = <kind>

  ! Statuses: rulec_message puts them into words.
<statuses>

  ! A rule with its hyper-parameters. The states of an array of parameters are a block of bytes beside it, so that one
  ! object serves all layers, or each layer a copy. Extensions are in the modules of rules, with the procedures _flat.
  type, abstract :: rulec_optimizer
  contains
    procedure(name_of), deferred, nopass :: name
    procedure(get_flat), deferred :: get_flat
    procedure(set_flat), deferred :: set_flat
    procedure(bytes_flat), deferred, nopass :: bytes_flat
    procedure(init_flat), deferred :: init_flat
    procedure(update_flat), deferred :: update_flat
    procedure(steps_flat), deferred, nopass :: steps_flat
    procedure :: get
    procedure :: set
    procedure :: steps
<bindings>
  end type

  ! A rule that is evaluated at another point than the one where it is trained. to_evaluation and to_training move a
  ! parameter there and back; for all other rules they change nothing.
  type, abstract, extends(rulec_optimizer) :: rulec_moving_optimizer
  contains
    procedure(move_flat), deferred :: move_flat
  end type

  abstract interface
    ! The name of the rule's files.
    function name_of() result(text)
      character(:), allocatable :: text
    end function
    subroutine get_flat(self, key, value, known)
      import :: rulec_optimizer, c_double
      class(rulec_optimizer), intent(in) :: self
      character(*), intent(in) :: key
      real(c_double), intent(out) :: value
      logical, intent(out) :: known
    end subroutine
    subroutine set_flat(self, key, value, known)
      import :: rulec_optimizer, c_double
      class(rulec_optimizer), intent(inout) :: self
      character(*), intent(in) :: key
      real(c_double), intent(in) :: value
      logical, intent(out) :: known
    end subroutine
    function bytes_flat(extents) result(bytes)
      import :: c_int64_t, c_size_t
      integer(c_int64_t), intent(in) :: extents(:)
      integer(c_size_t) :: bytes
    end function
    function init_flat(self, param, state, extents) result(status)
      import :: rulec_optimizer, rulec_kind, c_int8_t, c_int64_t
      class(rulec_optimizer), intent(inout) :: self
      <element>(rulec_kind), intent(in) :: param(*)
      integer(c_int8_t), intent(inout) :: state(*)
      integer(c_int64_t), intent(in) :: extents(:)
      integer :: status
    end function
    function update_flat(self, param, grad, state, extents) result(status)
      import :: rulec_optimizer, rulec_kind, c_int8_t, c_int64_t
      class(rulec_optimizer), intent(in) :: self
      <element>(rulec_kind), intent(inout) :: param(*)
      <element>(rulec_kind), intent(in) :: grad(*)
      integer(c_int8_t), intent(inout) :: state(*)
      integer(c_int64_t), intent(in) :: extents(:)
      integer :: status
    end function
    function steps_flat(state) result(count)
      import :: c_int8_t, c_int64_t
      integer(c_int8_t), intent(in) :: state(*)
      integer(c_int64_t) :: count
    end function
    function move_flat(self, evaluation, param, state, extents) result(status)
      import :: rulec_moving_optimizer, rulec_kind, c_int8_t, c_int64_t
      class(rulec_moving_optimizer), intent(in) :: self
      logical, intent(in) :: evaluation
      <element>(rulec_kind), intent(inout) :: param(*)
      integer(c_int8_t), intent(inout) :: state(*)
      integer(c_int64_t), intent(in) :: extents(:)
      integer :: status
    end function
  end interface

contains

  ! The words of a status.
  function rulec_message(status) result(text)
    integer, intent(in) :: status
    character(:), allocatable :: text
    select case (status)
<messages>
    case default
      text = 'no status of this module'
    end select
  end function

  ! A hyper-parameter by its name. It is checked at the next init or update.
  function get(self, key, status) result(value)
    class(rulec_optimizer), intent(in) :: self
    character(*), intent(in) :: key
    integer, intent(out), optional :: status
    real(c_double) :: value
    logical :: known
    call self%get_flat(key, value, known)
    call finish(self, 'get', merge(rulec_ok, rulec_bad_name, known), status, key)
  end function

  ! Changes a hyper-parameter from the next update on, or an input of the rule, such as the loss.
  subroutine set(self, key, value, status)
    class(rulec_optimizer), intent(inout) :: self
    character(*), intent(in) :: key
    real(c_double), intent(in) :: value
    integer, intent(out), optional :: status
    logical :: known
    call self%set_flat(key, value, known)
    call finish(self, 'set', merge(rulec_ok, rulec_bad_name, known), status, key)
  end subroutine

  ! The steps of an array of parameters so far; -1 where init has not been called.
  function steps(self, state) result(count)
    class(rulec_optimizer), intent(in) :: self
    integer(c_int8_t), allocatable, intent(in) :: state(:)
    integer(c_int64_t) :: count
    count = -1
    if (.not. allocated(state)) return
    if (size(state) >= 16) count = self%steps_flat(state)
  end function

  ! Begins, or begins again: allocates the states of an array of parameters, and sets them to their first values.
  subroutine init_any(self, param, state, extents, status)
    class(rulec_optimizer), intent(inout) :: self
    <element>(rulec_kind), intent(in) :: param(*)
    integer(c_int8_t), allocatable, intent(inout) :: state(:)
    integer(c_int64_t), intent(in) :: extents(:)
    integer, intent(out), optional :: status
    integer(c_int8_t), allocatable :: begun(:)
    integer(c_size_t) :: bytes
    integer :: code
    bytes = self%bytes_flat(extents)
    if (bytes == 0) then
      code = rulec_bad_shape
    else
      allocate(begun(bytes), stat=code)
      if (code /= 0) code = rulec_no_memory
      if (code == 0) code = self%init_flat(param, begun, extents)
      if (code == 0) call move_alloc(begun, state)
    end if
    call finish(self, 'init', code, status, 'extents '//words(extents))
  end subroutine

  ! One step of an array of parameters, and of its states.
  subroutine update_any(self, param, grad, state, extents, grad_extents, status)
    class(rulec_optimizer), intent(in) :: self
    <element>(rulec_kind), intent(inout) :: param(*)
    <element>(rulec_kind), intent(in) :: grad(*)
    integer(c_int8_t), allocatable, intent(inout) :: state(:)
    integer(c_int64_t), intent(in) :: extents(:), grad_extents(:)
    integer, intent(out), optional :: status
    integer :: code
    if (any(grad_extents /= extents)) then
      call finish(self, 'update', rulec_bad_gradient, status, &
        'extents '//words(grad_extents)//' and not '//words(extents))
      return
    end if
    code = checked(self, state, extents)
    if (code == 0) code = self%update_flat(param, grad, state, extents)
    call finish(self, 'update', code, status, 'extents '//words(extents))
  end subroutine

  ! Moves an array of parameters to where the model is evaluated, or back to where it is trained.
  subroutine move_any(self, evaluation, param, state, extents, status)
    class(rulec_optimizer), intent(in) :: self
    logical, intent(in) :: evaluation
    <element>(rulec_kind), intent(inout) :: param(*)
    integer(c_int8_t), allocatable, intent(inout) :: state(:)
    integer(c_int64_t), intent(in) :: extents(:)
    integer, intent(out), optional :: status
    integer :: code
    code = checked(self, state, extents)
    select type (self)
    class is (rulec_moving_optimizer)
      if (code == 0) code = self%move_flat(evaluation, param, state, extents)
    end select
    call finish(self, merge('to_evaluation', 'to_training  ', evaluation), code, status, 'extents '//words(extents))
  end subroutine

  ! Whether a block of states is as long as that of an array with these extents. The C functions check what is in it.
  function checked(self, state, extents) result(code)
    class(rulec_optimizer), intent(in) :: self
    integer(c_int8_t), allocatable, intent(in) :: state(:)
    integer(c_int64_t), intent(in) :: extents(:)
    integer :: code
    code = rulec_bad_state
    if (.not. allocated(state)) return
    if (size(state, kind=c_size_t) == self%bytes_flat(extents)) code = rulec_ok
  end function

  ! Gives a status to who asked for it; else stops the program with its words.
  subroutine finish(self, done, code, status, what)
    class(rulec_optimizer), intent(in) :: self
    character(*), intent(in) :: done, what
    integer, intent(in) :: code
    integer, intent(out), optional :: status
    character(:), allocatable :: text
    if (present(status)) then
      status = code
    else if (code /= rulec_ok) then
      text = self%name()//'_optimizer%'//trim(done)//' ('//what//'): '//rulec_message(code)
      error stop text
    end if
  end subroutine

  ! Extents in words.
  function words(extents) result(text)
    integer(c_int64_t), intent(in) :: extents(:)
    character(:), allocatable :: text
    character(21*size(extents)) :: printed
    write(printed, '(*(i0, :, " x "))') extents
    text = trim(printed)
  end function

<wrappers>
end module <module>
"""
