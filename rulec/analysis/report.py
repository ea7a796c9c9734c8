"""The analysis of a rule: all facts about it, proved, refuted or open, and their text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rulec.analysis.accumulate import Accumulation
from rulec.analysis.flow import Fact
from rulec.analysis.storage import StateStorage
from rulec.analysis.structure import Cost, StateBytes
from rulec.analysis.zero import AtZero, Rest


@dataclass(frozen=True)
class Analysis:
    """Facts about a rule, derived from its expressions.

    `scope` is the widest level in the update of one element: `elementwise`, `tensor`, `group` or `model`. `linear` says
    of every state whether its new value is linear in `g`, with all else held fixed. `accumulates` says whether such
    states can accumulate gradients exactly. `constant_scale` and `changing_scale` say whether `p` moves the same when
    gradients are multiplied by a positive number, one for all steps or another for each. `at_zero` has the effects of a
    zero gradient. `state_bytes` and `cost` are at float32. `storage` says of every state how it may be stored.

    The claims are about tensors the rule applies to; with `routes`, other tensors go to another rule. Inputs besides
    the gradient are held fixed.
    """

    name: str
    scope: str
    matrices: bool
    linear: Mapping[str, Fact]
    accumulates: Accumulation
    constant_scale: Fact
    changing_scale: Fact
    at_zero: AtZero
    reads_parameter: bool
    assigns_parameter: bool
    reads_step: bool
    random: bool
    inputs: tuple[str, ...]
    routes: bool
    evaluates: bool
    skips: bool
    state_bytes: Mapping[str, StateBytes]
    state_text: str
    cost: Cost
    storage: Mapping[str, StateStorage]

    def __str__(self) -> str:
        width = max(len(head) for head, _ in self.lines)
        return "\n".join([self.name, *(f"  {head:{width}}  {text}" for head, text in self.lines)])

    @property
    def lines(self) -> list[tuple[str, str]]:
        """The facts in words, each with its head."""
        stages = f"{self.cost.stages} stage{'' if self.cost.stages == 1 else 's'}"
        return [
            ("scope", self.scope + (", with matrix functions" if self.matrices else "")),
            *((f"{key} linear in g", str(fact)) for key, fact in self.linear.items()),
            ("accumulates", str(self.accumulates)),
            ("one scale of g", str(self.constant_scale)),
            ("a scale each step", str(self.changing_scale)),
            ("g = 0, first step", _rests(self.at_zero.first)),
            ("g = 0, later", _rests(self.at_zero.later)),
            ("has", ", ".join(self.traits) or "nothing else"),
            ("state bytes", self.state_text),
            *((f"{key} stored", str(storage)) for key, storage in self.storage.items()),
            ("moves", f"{self.cost.read} + {self.cost.written} bytes per parameter and step, in {stages}"),
        ]

    @property
    def traits(self) -> list[str]:
        """The true ones of the short facts, in words."""
        named = {
            "reads p": self.reads_parameter, "assigns p": self.assigns_parameter, "reads t": self.reads_step,
            "random numbers": self.random, "routing": self.routes, "an evaluation point": self.evaluates,
            "a skip": self.skips,
        }  # fmt: skip
        return [word for word, holds in named.items() if holds] + [f"input {key}" for key in self.inputs]


def _rests(rests: Mapping[str, tuple[Rest, ...]]) -> str:
    return "; ".join(f"{key} {', '.join(map(str, cases))}" for key, cases in rests.items())
