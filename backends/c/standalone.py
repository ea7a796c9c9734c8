"""A rule as C99: what the source, the header and the declarations for other languages agree on, and all their texts."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from rulec.compiler.ir import Buffer
from rulec.language.rule import Rule
from rulec.runtime.engine import default_hyper
from rulec.standalone.cases import Case, Family, family
from rulec.standalone.refusal import CannotBuild

from .standalone_matrix import WRITTEN
from .standalone_numbers import LOOPS
from .standalone_step import hyper_names
from .standalone_words import RESERVED, TYPES

#: What functions return, and what it means.
STATUSES = (
    ("OK", "done"),
    ("BAD_ARGUMENT", "a pointer is NULL, or a size is negative"),
    ("BAD_HYPER", "a hyper-parameter is outside its range"),
    ("BAD_STATE", "the state block was not initialised for a tensor of this shape"),
    ("NO_MEMORY", "there is no memory for what a step works out on the way"),
    ("BAD_SHAPE", "the rule does not apply to a tensor of this shape"),
)


class CFile:
    """A rule under the name `name` for tensors of one dtype: what all the printed files agree on."""

    def __init__(self, rule: Rule, name: str, dtype: str, state_dtype: str) -> None:
        self.rule, self.name, self.upper = rule, name, name.upper()
        self.dtype, self.real = dtype, TYPES[dtype]
        self.family: Family = family(rule, dtype, state_dtype, "C", WRITTEN)
        self.state_dtype = state_dtype or dtype
        self.hyper = hyper_names(self.family)
        self.inputs = list(self.family.rule.inputs.items())
        taken = {*RESERVED, "magic", "steps", "bytes"}
        for key in self.family.rule.inputs:
            if key in taken:
                raise CannotBuild(rule.name, "C", f"its input {key} has a name that the written functions use")

    # What the functions take

    @property
    def shaped(self) -> bool:
        """Whether functions take a shape, rather than the number of elements."""
        return self.family.shaped

    @property
    def extents(self) -> list[str]:
        """The parameters that say how large a tensor is."""
        return ["int ndim", "const int64_t *shape"] if self.shaped else ["int64_t count"]

    @property
    def given(self) -> list[str]:
        """The parameters for the inputs of the rule."""
        kinds = {"like p": f"const {self.real} *", "scalar": "double "}
        return [f"{kinds[kind]}{key}" for key, kind in self.inputs]

    @property
    def step_parameters(self) -> list[str]:
        """The parameters of a step."""
        return [
            f"{self.real} *param", f"const {self.real} *grad", "void *state", *self.extents, *self.given,
            f"const {self.name}_hyper *hyper",
        ]  # fmt: skip

    @property
    def init_parameters(self) -> list[str]:
        """The parameters of the initialisation."""
        return ["void *state", f"const {self.real} *param", *self.extents, f"const {self.name}_hyper *hyper"]

    @property
    def defaults(self) -> list[tuple[str, float]]:
        """The fields of the hyper-parameters, and their defaults."""
        values = default_hyper(self.family.rule, {}, self.dtype)
        return [(field, values[key]) for key, field in self.hyper.items()]

    # States

    def numbers(self) -> list[str]:
        """The states that are one number, in any case, in order."""
        found: dict[str, None] = {}
        for case in self.family.cases:
            found.update(dict.fromkeys(b.name for b in case.program.states if not is_vector(b)))
        return list(found)

    def arrays(self, case: Case) -> list[Buffer]:
        """The states of a case that are arrays, in order."""
        return [b for b in case.program.states if is_vector(b)]

    def all_arrays(self) -> list[str]:
        """The states that are arrays in any case."""
        return list(dict.fromkeys(b.name for case in self.family.cases for b in self.arrays(case)))

    def size(self, buffer: Buffer) -> str:
        """How many elements a state has."""
        letters = "".join(c for c in buffer.axes.letters if c in "bij")
        return "count" if letters == "bij" else LOOPS[letters][1]

    @property
    def magic(self) -> int:
        """What marks a state block: other rules' and dtypes' blocks have another."""
        kept = [(b.name, str(b.axes)) for case in self.family.cases for b in case.program.states]
        return int(hashlib.sha256(repr((self.name, self.state_dtype, kept)).encode()).hexdigest()[:15], 16)


def is_vector(buffer: Buffer) -> bool:
    """Whether a state is more than one number."""
    return bool({"b", "i", "j"} & set(buffer.axes.letters))


def move_parameters(file: CFile) -> list[str]:
    """The parameters of the functions that move a parameter to its evaluation point and back."""
    return [f"{file.real} *param", "void *state", *file.extents, f"const {file.name}_hyper *hyper"]


def files(rule: Rule, name: str, dtype: str, state_dtype: str) -> Mapping[str, str]:
    """The source, its header, and the declarations for Fortran and Julia, by file name."""
    from .standalone_bindings import fortran_text, julia_text
    from .standalone_header import header_text
    from .standalone_source import Source

    file = CFile(rule, name, dtype, state_dtype)
    return {
        f"{name}.c": Source(file).text(), f"{name}.h": header_text(file), f"{name}.f90": fortran_text(file),
        f"{name}.jl": julia_text(file),
    }  # fmt: skip
