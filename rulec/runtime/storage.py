"""The storage of states: the dtypes and formats that a user names, checked against the proofs of a rule."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from rulec.analysis.storage import StateStorage
from rulec.compiler.ir import Program
from rulec.compiler.layout import FLOATS, array_buffers
from rulec.compiler.weights import DTYPES
from rulec.errors import HyperError, TensorError
from rulec.formats import NAMES, Format, parse
from rulec.language.rule import Rule
from rulec.language.source import did_you_mean

#: A tensor with fewer elements than this keeps its states in floats: codes would save next to nothing there.
FEWEST_CODED = 4096


@dataclass(frozen=True)
class Storage:
    """The storage dtypes and formats of states by name; `""` is for all other states.

    A format for all is for the states that it is proved safe for; the others are stored exactly. `weights` is the kind
    of the parameters in memory that are of a dtype for it; empty for plain parameters. States without a word have the
    dtype of their parameter, and float32 beside a parameter of a kind.
    """

    words: Mapping[str, str] = field(default_factory=dict)
    weights: str = ""

    @cached_property
    def formats(self) -> dict[str, Format]:
        """The formats among the words."""
        return {name: parse(word) for name, word in self.words.items() if word not in FLOATS}

    def check(self, rules: Iterable[Rule]) -> None:
        """TensorError for a state that no rule has, or an unknown dtype; HyperError for an unsafe format."""
        rules = [*rules]
        known = {name for rule in rules for name in rule.state}
        for state, word in self.words.items():
            if state and state not in known:
                raise TensorError(f"{rules[0].name} has no state {state!r}{did_you_mean(state, known)}")
            if word not in FLOATS and word.partition("/")[0] not in NAMES:
                raise TensorError(f"state dtype {word!r} is none of {', '.join([*FLOATS, *NAMES])}")
        for state, form in self.formats.items():
            for rule in (rule for rule in rules if state in rule.state):
                fault = unsafe(rule.analysis.storage[state], form)
                if fault:
                    raise HyperError(f"state {state} of {rule.name} cannot be {form.text}: {fault}")

    def weights_of(self, dtype: str) -> str:
        """The kind of a parameter of this dtype in memory."""
        return self.weights if dtype in DTYPES.get(self.weights, ()) else ""

    def check_weights(self, dtypes: Iterable[str]) -> None:
        """HyperError for an unknown kind of weights, or one that no parameter has a dtype for.

        `dtypes` are those of the parameters. A kind beside states in float64 is an error too.
        """
        kinds, dtypes = DTYPES.get(self.weights), [*dtypes]
        if not self.weights:
            return
        if kinds is None:
            raise HyperError(
                f"weights={self.weights!r} is none of {', '.join(DTYPES)}{did_you_mean(self.weights, DTYPES)}"
            )
        if "float64" in self.words.values():
            raise HyperError(
                f"weights={self.weights!r} computes in float32: give state_dtype another dtype than float64"
            )
        if dtypes and not {*kinds}.intersection(dtypes):
            have = " and ".join(dict.fromkeys(dtypes))
            raise HyperError(
                f"weights={self.weights!r} is for parameters of {' or '.join(kinds)}, and these are of {have}: cast "
                f"the model, or leave weights out"
            )

    def of(self, program: Program, dtype: str, count: int) -> tuple[dict[str, str], dict[str, Format]]:
        """The storage dtypes, and the formats, of the states of a tensor with this dtype.

        `count` is the number of elements that may be in codes: all, or none where they are not in C order in memory.
        """
        dtypes: dict[str, str] = {}
        formats: dict[str, Format] = {}
        usual = exact(dtype) if program.weights else dtype
        for buffer in array_buffers(program):
            if buffer.role != "state" or buffer.name not in program.rule.state:
                continue
            word = buffer.name if buffer.name in self.words else ""
            form = self.formats.get(word)
            if form is None:
                kept = program.rule.state[buffer.name].storage == "exact" and not word
                dtypes[buffer.name] = exact(dtype) if kept else self.words.get(word, usual)
                continue
            proof = program.rule.analysis.storage[buffer.name]
            if count < FEWEST_CODED or unsafe(proof, form):
                dtypes[buffer.name] = exact(dtype)
            else:
                formats[buffer.name] = form.for_state(signed=not proof.unsigned, floor=proof.floor)
        return dtypes, formats


def unsafe(proof: StateStorage, form: Format) -> str:
    """The reason why a state cannot be in a format, as a clause; empty where it can."""
    if not proof.allowed:
        return proof.reason
    few = f"{form.name} has too few codes near zero, and a denominator reads the state"
    return few if form.name in proof.refused else ""


def exact(dtype: str) -> str:
    """The dtype of a state that codes are not for, beside a parameter of this dtype."""
    return "float64" if dtype == "float64" else "float32"
