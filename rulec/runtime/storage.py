"""The storage of states: the dtypes and formats that a user names, checked against the proofs of a rule."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from rulec.analysis.storage import StateStorage
from rulec.compiler.ir import Program
from rulec.compiler.layout import ITEM_SIZE, array_buffers
from rulec.errors import HyperError, TensorError
from rulec.formats import NAMES, Format, parse
from rulec.language.rule import Rule
from rulec.language.source import did_you_mean

#: A tensor with fewer elements than this keeps its states in floats: codes would save next to nothing there.
FEWEST_CODED = 4096


@dataclass(frozen=True)
class Storage:
    """The storage dtypes and formats of states by name; `""` is for all other states.

    A format for all is for the states that it is proved safe for; the others are stored exactly.
    """

    words: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def formats(self) -> dict[str, Format]:
        """The formats among the words."""
        return {name: parse(word) for name, word in self.words.items() if word not in ITEM_SIZE}

    def check(self, rules: Iterable[Rule]) -> None:
        """TensorError for a state that no rule has, or an unknown dtype; HyperError for an unsafe format."""
        rules = [*rules]
        known = {name for rule in rules for name in rule.state}
        for state, word in self.words.items():
            if state and state not in known:
                raise TensorError(f"{rules[0].name} has no state {state!r}{did_you_mean(state, known)}")
            if word not in ITEM_SIZE and word.partition("/")[0] not in NAMES:
                raise TensorError(f"state dtype {word!r} is none of {', '.join([*ITEM_SIZE, *NAMES])}")
        for state, form in self.formats.items():
            for rule in (rule for rule in rules if state in rule.state):
                fault = unsafe(rule.analysis.storage[state], form)
                if fault:
                    raise HyperError(f"state {state} of {rule.name} cannot be {form.text}: {fault}")

    def of(self, program: Program, dtype: str, count: int) -> tuple[dict[str, str], dict[str, Format]]:
        """The storage dtypes, and the formats, of the states of a tensor with this dtype.

        `count` is the number of elements that may be in codes: all, or none where they are not in C order in memory.
        """
        dtypes: dict[str, str] = {}
        formats: dict[str, Format] = {}
        for buffer in array_buffers(program):
            if buffer.role != "state":
                continue
            word = buffer.name if buffer.name in self.words else ""
            form = self.formats.get(word)
            if form is None:
                kept = program.rule.state[buffer.name].storage == "exact" and not word
                dtypes[buffer.name] = exact(dtype) if kept else self.words.get(word, dtype)
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
