"""A rule as the gallery shows it: its place, its family, its bytes of state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import rulec
from rulec.compiler.pipeline import compile
from rulec.compiler.routing import route
from rulec.compiler.view import view_of
from rulec.language.expr.arithmetic import number_known
from rulec.language.expr.node import Node
from rulec.language.library.folder import library_folder
from rulec.language.library.load import titles
from rulec.language.rule import Rule
from rulec.tools.playground.questions import partners

#: Rows and columns of the matrix whose states are counted.
SIDE = 1024
#: Bytes of a float32.
ITEM = 4


@dataclass(frozen=True)
class Subject:
    """A rule of the library by its name there, such as `adamw` and `transforms/lookahead`."""

    name: str

    @property
    def slug(self) -> str:
        """The name of its page."""
        return self.name.replace("/", "-")

    @property
    def file_text(self) -> str:
        """The rule file."""
        return (library_folder() / f"{self.name}.yaml").read_text().strip()

    @cached_property
    def rule(self) -> Rule:
        """The rule of the file."""
        return rulec.load(self.name)

    @property
    def text(self) -> str:
        """The rule that runs, in the notation of compositions: a wrapper goes around Adam."""
        around = partners(self.rule)
        return f"{self.name}({', '.join(around)})" if around else self.name

    @cached_property
    def whole(self) -> Rule:
        """The rule that runs."""
        return rulec.load(self.text)

    @property
    def title(self) -> str:
        """The class of `rulec.torch` that is the rule; empty for transforms and wrappers."""
        return next((title for title, name in titles().items() if name == self.name), "")

    @property
    def family(self) -> str:
        """The part of the library that the rule belongs to."""
        if self.rule.wraps:
            return "wrapper"
        if self.name.startswith("transforms/"):
            return "transform"
        if self.whole.analysis.matrices:
            return "matrices"
        return {"elementwise": "elementwise", "tensor": "norms and means"}.get(self.whole.analysis.scope, "whole model")

    @cached_property
    def state_bytes(self) -> float:
        """Bytes of state for each float32 parameter of a matrix of 1024 by 1024."""
        routed = route(self.whole, (SIDE, SIDE), set())
        facts = view_of(routed, (SIDE, SIDE)).facts
        numbers = {key: h.default for key, h in routed.hyper.items() if isinstance(h.default, float | int)}
        known = {**facts, **numbers}
        total = 0.0
        for buffer in compile(routed, facts).states:
            axes = buffer.axes
            total += ITEM * _side("i", axes.rows, axes.letters, known) * _side("j", axes.cols, axes.letters, known)
        return total / SIDE**2


def _side(letter: str, size: Node | None, letters: str, known: Mapping[str, float]) -> float:
    """The extent of a state along an axis: the state's own extent, else the matrix's; 1 without that axis."""
    if size is not None:
        return number_known(size, known) or 0.0
    return SIDE if letter in letters else 1
