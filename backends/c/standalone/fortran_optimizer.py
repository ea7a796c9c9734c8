"""Prints the extension of the abstract type in Fortran for a rule, and its procedures."""

from __future__ import annotations

from .fortran_module import ELEMENTS, module_name
from .model import CFile

#: The procedures that every extension has: those without, and those with the object.
_OF_THE_RULE, _OF_THE_OBJECT = (
    ("name", "bytes_flat", "steps_flat"),
    ("get_flat", "set_flat", "init_flat", "update_flat"),
)

#: A quiet NaN: an input before it is set.
_UNSET = "transfer(int(z'7FF8000000000000', c_int64_t), 1.0_c_double)"


def element_type(file: CFile) -> str:
    """The type of elements."""
    element, kind = ELEMENTS[file.dtype]
    return f"{element}({kind})"


def extends(file: CFile) -> bool:
    """Whether the rule has an extension: its inputs are numbers, if it has any."""
    return all(kind != "like p" for _, kind in file.inputs)


def used_modules(file: CFile) -> list[str]:
    """The statements that bring in the shared module."""
    names = [f"{file.name}_kind => rulec_kind"]
    if not extends(file):
        return [f"use {module_name(file.dtype)}, only: {names[0]}"]
    names += [_parent(file), *["rulec_bad_input"] * bool(file.inputs)]
    nan = ["use, intrinsic :: ieee_arithmetic, only: ieee_is_nan"] * bool(file.inputs)
    return [*nan, f"use {module_name(file.dtype)}, only: {', '.join(names)}"]


def _parent(file: CFile) -> str:
    return "rulec_moving_optimizer" if file.moves() else "rulec_optimizer"


def declaration(file: CFile) -> list[str]:
    """The type, with the hyper-parameters, the inputs, and the numbers that choose random bits as components."""
    if not extends(file):
        return []
    inputs = [f"    real(c_double) :: {key} = {_UNSET}" for key, _ in file.inputs]
    components = [f"    type({file.name}_hyper) :: hyper"]
    if inputs:
        inputs = ["", f"  type :: {file.name}_inputs", *inputs, "  end type"]
        components += [f"    type({file.name}_inputs) :: inputs"]
    if file.words_of_bits:
        remark = "Random bits follow from the seed and the number of an array: each init takes the next number."
        components += [f"    ! {remark}", "    integer(c_int64_t) :: seed = 0, number = 0"]
    bound = [*_OF_THE_OBJECT, *["move_flat"] * bool(file.moves())]
    return [
        *inputs, "", f"  type, extends({_parent(file)}) :: {file.name}_optimizer", *components, "  contains",
        f"    procedure, nopass :: {', '.join(_OF_THE_RULE)}", f"    procedure :: {', '.join(bound)}", "  end type",
    ]  # fmt: skip


def procedures(file: CFile) -> list[str]:
    """The procedures of the type."""
    if not extends(file):
        return []
    parts = [_name(file), _bytes(file), _steps(file), _get(file), _set(file), _init(file), _update(file)]
    parts += [_move(file)] if file.moves() else []
    return ["", "contains", *(f"  {line}".rstrip() for part in parts for line in ("", *part)), ""]


def _procedure(head: str, declared: list[str], body: list[str]) -> list[str]:
    """A procedure, a function where its head has a result."""
    kind = "function" if "result(" in head else "subroutine"
    return [f"{kind} {head}", *(f"  {line}" for line in (*declared, *body)), f"end {kind}"]


_EXTENTS, _STATUS = "integer(c_int64_t), intent(in) :: extents(:)", "integer :: status"
_STATE, _KEY = "integer(c_int8_t), intent(inout) :: state(*)", "character(*), intent(in) :: key"
_KNOWN = "logical, intent(out) :: known"


def _self(file: CFile, intent: str) -> str:
    return f"class({file.name}_optimizer), intent({intent}) :: self"


def _elements(file: CFile, name: str, intent: str) -> str:
    return f"{ELEMENTS[file.dtype][0]}({file.name}_kind), intent({intent}) :: {name}(*)"


def _size(file: CFile) -> str:
    """The arguments for the size of an array; extents are those of C, in reverse order."""
    return "size(extents, kind=c_int), extents(size(extents):1:-1)" if file.shaped else "product(extents)"


def _name(file: CFile) -> list[str]:
    return _procedure("name() result(text)", ["character(:), allocatable :: text"], [f"text = '{file.name}'"])


def _bytes(file: CFile) -> list[str]:
    declared = [_EXTENTS, "integer(c_size_t) :: bytes"]
    return _procedure(
        "bytes_flat(extents) result(bytes)", declared, [f"bytes = {file.name}_state_bytes({_size(file)})"]
    )


def _steps(file: CFile) -> list[str]:
    declared = [_STATE.replace("inout", "in"), "integer(c_int64_t) :: count"]
    return _procedure("steps_flat(state) result(count)", declared, [f"count = {file.name}_steps(state)"])


def _keys(file: CFile) -> list[tuple[str, str]]:
    """The names for `get` and `set`, each with its component."""
    hyper = [field for field, _ in file.defaults] or ["none"]
    return [*((key, f"self%hyper%{key}") for key in hyper), *((key, f"self%inputs%{key}") for key, _ in file.inputs)]


def _get(file: CFile) -> list[str]:
    declared = [_self(file, "in"), _KEY, "real(c_double), intent(out) :: value", _KNOWN]
    cases = [line for key, place in _keys(file) for line in (f"case ('{key}')", f"  value = {place}")]
    body = ["known = .true.", "select case (key)", *cases, "case default", "  value = 0", "  known = .false."]
    return _procedure("get_flat(self, key, value, known)", declared, [*body, "end select"])


def _set(file: CFile) -> list[str]:
    declared = [_self(file, "inout"), _KEY, "real(c_double), intent(in) :: value", _KNOWN]
    cases = [line for key, place in _keys(file) for line in (f"case ('{key}')", f"  {place} = value")]
    body = ["known = .true.", "select case (key)", *cases, "case default", "  known = .false."]
    return _procedure("set_flat(self, key, value, known)", declared, [*body, "end select"])


def _init(file: CFile) -> list[str]:
    seeded = bool(file.words_of_bits)
    declared = [_self(file, "inout"), _elements(file, "param", "in"), _STATE, _EXTENTS, _STATUS]
    bits = "".join(f", self%{p.name}" for p in file.words_of_bits)
    body = [f"status = {file.name}_init(state, param, {_size(file)}, self%hyper{bits})"]
    body += ["if (status == 0) self%number = self%number + 1"] * seeded
    return _procedure("init_flat(self, param, state, extents) result(status)", declared, body)


def _update(file: CFile) -> list[str]:
    declared = [
        _self(file, "in"), _elements(file, "param", "inout"), _elements(file, "grad", "in"), _STATE, _EXTENTS, _STATUS,
    ]  # fmt: skip
    inputs = "".join(f"self%inputs%{key}, " for key, _ in file.inputs)
    unset = " .or. ".join(f"ieee_is_nan(self%inputs%{key})" for key, _ in file.inputs)
    body = ["status = rulec_bad_input", f"if ({unset}) return"] * bool(file.inputs)
    body += [f"status = {file.name}_step(param, grad, state, {_size(file)}, {inputs}self%hyper)"]
    return _procedure("update_flat(self, param, grad, state, extents) result(status)", declared, body)


def _move(file: CFile) -> list[str]:
    declared = [
        _self(file, "in"), "logical, intent(in) :: evaluation", _elements(file, "param", "inout"), _STATE, _EXTENTS,
        _STATUS,
    ]  # fmt: skip
    there, back = (f"  status = {file.name}_{word}(param, state, {_size(file)}, self%hyper)" for word in file.moves())
    body = ["if (evaluation) then", there, "else", back, "end if"]
    return _procedure("move_flat(self, evaluation, param, state, extents) result(status)", declared, body)
