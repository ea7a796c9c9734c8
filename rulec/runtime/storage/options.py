"""The storage of states: the dtypes and formats that a user names, checked against the proofs of a rule."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from rulec.analysis import analyse
from rulec.analysis.storage import StateStorage
from rulec.compiler.ir import Memory, Program
from rulec.compiler.layout import FLOATS, PLAIN_STORAGE, Layout, array_buffers
from rulec.compiler.weights import DTYPES
from rulec.errors import HyperError, TensorError
from rulec.formats import NAMES, UNBIASED, Format, parse
from rulec.language.rule_data import RuleData
from rulec.language.source import did_you_mean

#: The dtypes and formats of states, by which users name them.
KNOWN = (*PLAIN_STORAGE, *NAMES)

#: Other words for a dtype or a number of bits, and the state dtype that a user of them wants.
_MEANT = {
    "half": "float16", "fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "single": "float32", "fp64": "float64",
    "double": "float64", "e5m2": "float8_e5m2", "e4m3": "float8_e4m3", "8": "dynamic8",
    "byte": "dynamic8", "4": "dynamic4",
}  # fmt: skip


def no_state_dtype(word: object) -> str:
    """The sentence about an unknown dtype of states: the word that the user may mean, and all known words.

    Words such as `8bit`, `fp8` and `int8 state` mean dynamic8, whose error is the smallest of eight bits.
    """
    text = str(word)
    meant = next((known for part, known in _MEANT.items() if re.search(rf"(?<!\d){part}(?!\d)", text.lower())), "")
    hint = f"; did you mean {meant!r}?" if meant else did_you_mean(text, KNOWN)
    return f"there is no state dtype {text[:100]!r}{hint}: use {', '.join(KNOWN)}"


#: A tensor with fewer elements than this keeps its states in floats: codes would save next to nothing there.
FEWEST_CODED = 4096


@dataclass(frozen=True)
class Storage:
    """The storage dtypes and formats of states by name; `""` is for all other states.

    A format for all, and `bfloat16_sr`, are for the states that are safe in them; the others are stored exactly.
    `weights` is the kind of the parameters in memory that are of a dtype for it; empty for plain parameters. States
    without a word have the dtype of their parameter, and float32 beside a parameter of a kind. If `exclusive`, steps
    alone write the parameters: those with a master copy are not read.
    """

    words: Mapping[str, str] = field(default_factory=dict)
    weights: str = ""
    exclusive: bool = False

    @property
    def random(self) -> bool:
        """Whether parameters or states are rounded at random, so that a step depends on a seed."""
        return self.weights == "stochastic" or UNBIASED in self.words.values()

    @cached_property
    def formats(self) -> dict[str, Format]:
        """The formats among the words."""
        return {name: parse(word) for name, word in self.words.items() if word not in PLAIN_STORAGE}

    def check(self, rules: Iterable[RuleData]) -> None:
        """TensorError for a state that no rule has, or an unknown dtype; HyperError for an unsafe format."""
        rules = [*rules]
        known = {name for rule in rules for name in rule.state}
        for state, word in self.words.items():
            if state and state not in known:
                raise TensorError(f"{rules[0].name} has no state {state!r}{did_you_mean(state, known)}")
            if word not in PLAIN_STORAGE and word.partition("/")[0] not in NAMES:
                raise TensorError(no_state_dtype(word))
        for state, word in self.words.items():
            for rule in (rule for rule in rules if state in rule.state):
                self._check_safe(rule, state, word)

    def _check_safe(self, rule: RuleData, state: str, word: str) -> None:
        if word in FLOATS:
            return
        proof, form = analyse(rule).storage[state], self.formats.get(state)
        fault = proof.exact if form is None else unsafe(proof, form)
        if fault:
            raise HyperError(f"state {state} of {rule.name} cannot be {form.text if form else word}: {fault}")

    def memory_of(self, rule: RuleData, dtype: str, whole: bool = True) -> Memory:
        """The memory of a rule's program for a parameter of this dtype, or for a shard of one where not `whole`.

        TensorError for a state of another shape than the shard: ranks may have the same numbers, and must round them
        alike.
        """
        unbiased = {state for state in rule.state if self._is_unbiased(rule, state, dtype)}
        narrow = {s for s in unbiased if rule.state[s].per != "element" or rule.state[s].shape is not None}
        named = narrow & self.words.keys()
        if named and not whole:
            raise TensorError(
                f"{min(named)} of {rule.name} is a state of rows or columns, or of a shape of its own, which has no "
                f"{UNBIASED} where processes have parts of a tensor: give state_dtype={{{min(named)!r}: 'float32'}}"
            )
        weights = self.weights_of(dtype)
        rounded = frozenset(unbiased if whole else unbiased - narrow)
        return Memory(weights, rounded, exclusive=self.exclusive and weights == "master")

    def _is_unbiased(self, rule: RuleData, state: str, dtype: str) -> bool:
        if state in self.words:
            return self.words[state] == UNBIASED
        safe = self.words.get("") == UNBIASED and dtype != "float64"
        return safe and not analyse(rule).storage[state].exact

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

        `count` is the number of elements that may be quantized: all, or none where they are not in C order in memory.
        """
        dtypes: dict[str, str] = {}
        formats: dict[str, Format] = {}
        usual = exact(dtype) if program.memory.weights else dtype
        for buffer in array_buffers(program):
            if buffer.role != "state" or buffer.name not in program.rule.state:
                continue
            word = buffer.name if buffer.name in self.words else ""
            form = self.formats.get(word)
            if self.words.get(word) == UNBIASED:
                dtypes[buffer.name] = "bfloat16" if buffer.name in program.memory.unbiased else exact(dtype)
                continue
            if form is None:
                kept = program.rule.state[buffer.name].storage == "exact" and not word
                dtypes[buffer.name] = exact(dtype) if kept else self.words.get(word, usual)
                continue
            proof = analyse(program.rule).storage[buffer.name]
            if count < FEWEST_CODED or unsafe(proof, form):
                dtypes[buffer.name] = exact(dtype)
            else:
                formats[buffer.name] = form.for_state(signed=not proof.unsigned, floor=proof.floor)
        return dtypes, formats


def check_single(program: Program, layout: Layout, tensor: str) -> Layout:
    """The same layout; TensorError where the bits of float32 are asked for, and a tensor is computed in float64."""
    words = [f"weights={program.memory.weights!r}"] if program.memory.weights not in ("", "master") else []
    words += [f"{UNBIASED} for {state}" for state in sorted(program.memory.unbiased)]
    if words and layout.compute == "float64":
        wide = next(buffer for buffer, dtype in layout.dtypes if dtype == "float64")
        what = {"p": tensor, "g": f"the gradient of {tensor}"}.get(wide, f"{wide} of {tensor}")
        raise TensorError(f"{words[0]} computes in float32, and {what} is of float64: take float32 for both")
    return layout


def unsafe(proof: StateStorage, form: Format) -> str:
    """The reason why a state cannot be in a format, as a clause; empty where it can."""
    if not proof.allowed:
        return proof.reason
    few = f"{form.name} has too few codes near zero, and a denominator reads the state"
    return few if form.name in proof.refused else ""


def exact(dtype: str) -> str:
    """The dtype of a state that codes are not for, beside a parameter of this dtype."""
    return "float64" if dtype == "float64" else "float32"
