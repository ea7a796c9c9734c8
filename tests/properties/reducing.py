"""Random rules with reductions: states and lines of every level, branches, skips and views.

Every value is kept of ordinary size, and nothing is compared that a last digit may decide, so that two ways of adding
up cannot lead far apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import strategies as st

#: What a value of each level may be made of.
WITHIN: Mapping[str, Sequence[str]] = {
    "element": ("element", "row", "col", "matrix", "tensor", "group", "model"),
    "row": ("row", "matrix", "tensor", "group", "model"),
    "col": ("col", "matrix", "tensor", "group", "model"),
    "matrix": ("matrix", "tensor", "group", "model"),
    "tensor": ("tensor", "group", "model"),
    "group": ("group", "model"),
    "model": ("model",),
}

#: What each level can be reduced from.
WIDER = {level: [wide for wide in WITHIN if wide != level and level in WITHIN[wide]] for level in WITHIN}

FORMS = ["({} + {})", "({} - {})", "({} * {})", "({} / (1 + abs({})))", "minimum({}, {})", "maximum({}, -{})"]
REDUCTIONS = ["sum", "mean", "norm", "rms", "min", "max", "count_nonzero"]
VIEWS = ["", "view: {flatten: rest}\n", "view: {short: first}\n"]
SKIPS = ["", "skip: not isfinite(sum(g))\n"]
MODEL_SKIP = 'skip: sum(abs(g), per="model") > 1e3\n'
SHAPES = [(), (1,), (5,), (3, 4), (4, 3), (2, 3, 4), (0,), (40,), (7, 1), (2, 2, 2, 3), (130, 3)]
STATES = {
    "a": "element",
    "b": "element",
    "r": "row",
    "c": "col",
    "w": "matrix",
    "n": "tensor",
    "k": "group",
    "d": "model",
}

shapes = st.lists(st.sampled_from(SHAPES), min_size=1, max_size=4)


def soft(text: str) -> str:
    """The same between -1 and 1."""
    return f"({text})/(1 + abs({text}))"


class Drawing:
    """Draws the lines of one rule; `names` are those that a line may read, by level.

    A rule has either reductions over several tensors (`joins`) or branches: programs for different tensors must take
    part in the same reductions.
    """

    def __init__(self, draw: Any) -> None:
        self.draw = draw
        self.joins: bool = draw(st.booleans())
        self.names: dict[str, list[str]] = {level: [] for level in WITHIN}
        self.names["element"] = ["g", "p"]
        for state, level in STATES.items():
            self.names[level].append(state)

    def one_of(self, choices: Sequence[Any]) -> Any:
        return self.draw(st.sampled_from(choices))

    def atom(self, level: str, reductions: bool) -> str:
        """A name, a number or a reduction of what is wider."""
        names = [name for part in WITHIN[level] for name in self.names[part]]
        kinds = ["name", "name", "number", "h" if level != "model" else "number"]
        if reductions and WIDER[level] and (self.joins or level not in ("group", "model")):
            kinds += ["reduction"] * 3
        kind = self.one_of(kinds)
        if kind == "reduction":
            return self.reduction(level)
        return kind if kind == "h" else self.one_of(names if kind == "name" and names else ["0.37", "-1.5", "2"])

    def reduction(self, level: str) -> str:
        operand = self.expression(self.one_of(WIDER[level]), depth=1, reductions=self.draw(st.booleans()))
        return f'{self.one_of(REDUCTIONS)}({soft(operand)}, per="{level}")'

    def expression(self, level: str, depth: int = 2, reductions: bool = True) -> str:
        if depth == 0:
            return str(self.atom(level, reductions))
        parts = [self.expression(level, depth - 1, reductions) for _ in range(2)]
        if self.draw(st.integers(0, 4)) == 0:
            name = self.one_of([n for part in WITHIN[level] for n in self.names[part]] or ["h"])
            return f"where({name} > 0.123, {parts[0]}, {parts[1]})"
        return str(self.one_of(FORMS).format(*parts))

    def line(self, number: int) -> str:
        """An assignment to a state, or to a name of its own at some level."""
        if self.draw(st.booleans()):
            state = self.one_of([*STATES])
            return f"{state} = 0.5*{state} + {soft(self.expression(STATES[state]))}"
        level = self.one_of([*WITHIN])
        text = f"x{number} = {soft(self.expression(level))}"
        self.names[level].append(f"x{number}")
        return text

    def branch(self, number: int) -> list[str]:
        """A branch on the shape, on the count of steps, or on a state."""
        condition = self.one_of(["ndim >= 2", "t % 2 == 0", "t < 3 and rows > 1", "n > 0.123"])
        arms = [soft(self.expression("element", depth=1, reductions=False)) for _ in range(2)]
        self.names["element"].append(f"y{number}")
        return [f"if {condition}:", f"  y{number} = {arms[0]}", "else:", f"  y{number} = {arms[1]}"]


@st.composite
def reducing_rules(draw: Any) -> str:
    """The text of a rule."""
    drawing = Drawing(draw)
    lines: list[str] = []
    for number in range(draw(st.integers(2, 5))):
        branches = not drawing.joins and draw(st.booleans())
        lines += drawing.branch(number) if branches else [drawing.line(number)]
    # Every state is used, so that each rule stores values of every level.
    lines += [f"{state} = 0.5*{state} + {soft(drawing.expression(level, 1))}" for state, level in STATES.items()]
    lines.append(f"direction = {soft(drawing.expression('element'))} + 0.1*g")
    states = ", ".join(f"{name}: {{init: 0.3, per: {level}}}" for name, level in STATES.items())
    body = "".join(f"  {line}\n" for line in lines)
    skip = drawing.one_of([*SKIPS, MODEL_SKIP] if drawing.joins else SKIPS)
    head = f"name: Drawn\n{drawing.one_of(VIEWS)}{skip}hyper: {{lr: 0.1, h: 0.7}}\n"
    return f"{head}state: {{{states}}}\nstep: |\n{body}"
