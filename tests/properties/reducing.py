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


#: Conditions and their levels. Those known before a step may differ between tensors that joined at different times.
FORESEEN = {"t % 2 == 0": "tensor", "t > 2": "tensor", "h < 0.5 or t < 3": "tensor", "h > 0.5": "group"}
COMPUTED = {"n > 0.123": "tensor", "k > 0.123": "group", "d > 0.123": "model", "k < h": "group"}

#: Levels of matrices as those of axes.
_BY_AXES = {
    'per="row"': "per=axis(0)",
    'per="col"': "per=axis(-1)",
    'per="matrix"': 'per="tensor"',
    "per: row": "per: axis(0)",
}
_BY_AXES |= {"per: col": "per: axis(-1)", "per: matrix": "per: tensor"}


class Branching(Drawing):
    """Draws rules whose branches assign values of different axes on their arms, and reduce before, on and after them.

    Reductions over several tensors stand anywhere, and branches on the shape nowhere: there they are refused.
    """

    def __init__(self, draw: Any) -> None:
        super().__init__(draw)
        self.joins = draw(st.integers(0, 3)) > 0
        self.names["element"] += ["q[0]", "q[1]"]
        self.locals = 0
        #: The reductions of what branches assign: the direction has them all.
        self.ends: list[str] = []
        #: The levels of the computed conditions around a line: a state that an arm assigns is of no wider one.
        self.around: list[str] = []
        self.within = 0

    def narrower(self, level: str) -> str:
        """A number, or a value of this level or of one with fewer axes."""
        chosen = self.one_of(["number", *WITHIN[level]])
        numbers = ["0", "1", *(["h"] if level != "model" else []), *(["t"] if level not in ("group", "model") else [])]
        return str(self.one_of(numbers) if chosen == "number" else soft(self.expression(chosen, depth=1)))

    def assignment(self) -> list[str]:
        """A state, set to anything that fits in it, or to a number."""
        levels = {**STATES, "q": "element"}
        state = self.one_of([name for name, level in levels.items() if all(x in WITHIN[level] for x in self.around)])
        value = self.narrower(levels[state])
        if state == "q":
            return [f"q = {value}"]
        kept = f" + 0.5*{state}" if levels[state] in ("row", "col", "matrix") or self.draw(st.booleans()) else ""
        return [f"{state} = {value}{kept}"]

    def arm(self, name: str, level: str, depth: int) -> list[str]:
        """The lines of one arm: they assign the name, and perhaps states, other names and further branches."""
        before = {part: [*names] for part, names in self.names.items()}
        lines = [line for _ in range(self.draw(st.integers(0, 2))) for line in self.inner(depth)]
        lines.append(f"{name} = {self.narrower(level)}")
        self.names = before  # names of an arm end with it
        return [f"  {line}" for line in lines]

    def inner(self, depth: int) -> list[str]:
        """Lines of an arm."""
        kind = self.one_of(["state", "local", "branch" if depth else "local"])
        if kind == "state":
            return self.assignment()
        if kind == "branch":
            return self.choice(depth - 1)
        self.locals += 1
        level = self.one_of([*WITHIN])
        lines = [f"z{self.locals} = {soft(self.expression(level, depth=1))}"]
        self.names[level].append(f"z{self.locals}")
        return lines

    def choice(self, depth: int = 1) -> list[str]:
        """A branch, and its name for the lines after it."""
        self.locals += 1
        condition = self.one_of([*FORESEEN, *FORESEEN, *COMPUTED])
        needs = {**FORESEEN, **COMPUTED}[condition]
        name, level = f"y{self.locals}", self.one_of([level for level in WITHIN if needs in WITHIN[level]])
        around, self.within = self.around, self.within + 1
        self.around = [*around, needs] if condition in COMPUTED else around
        then, otherwise = self.arm(name, level, depth), self.arm(name, level, depth)
        self.around, self.within = around, self.within - 1
        self.names[level].append(name)
        states = [line.split()[0] for line in (*then, *otherwise)]
        reduced = [(name, level), *((s, {**STATES, "q": "element"}[s]) for s in states if s in (*STATES, "q"))]
        ends = {} if self.within else dict(reduced)
        lines = [line for x, of in ends.items() for line in self.reduced("q[0]" if x == "q" else x, of)]
        return [f"if {condition}:", *then, "else:", *otherwise, *lines]

    def reduced(self, name: str, level: str) -> list[str]:
        """A reduction of a value that a branch assigned, to a level that it can be reduced to."""
        lower = [low for low in WIDER if level in WIDER[low] and (self.joins or low not in ("group", "model"))]
        if not lower:
            return []
        self.locals += 1
        low = self.one_of(lower)
        self.names[low].append(f"z{self.locals}")
        self.ends.append(f"z{self.locals}")
        reduction = f'{self.one_of(REDUCTIONS)}({name}, per="{low}")'
        return [f"z{self.locals} = {soft(reduction)}"]


@st.composite
def branching_rules(draw: Any, most: int = 4) -> str:
    """The text of a rule with branches, by axes in place of rows and columns one in four; of two parts up to `most`."""
    drawing = Branching(draw)
    lines: list[str] = []
    for number in range(draw(st.integers(min(most, 2), most))):
        lines += drawing.choice() if draw(st.integers(0, 2)) else [drawing.line(number)]
    for state, level in STATES.items():
        more = f" + {soft(drawing.expression(level, 1))}" if most > 1 or level in ("element", "group") else ""
        lines.append(f"{state} = 0.5*{state}{more}")
    lines.append(f"q = 0.5*q[0] + {soft(drawing.expression('element', 1))}")
    lines.append(" + ".join([f"direction = {soft(drawing.expression('element'))}", "0.1*g", *drawing.ends]))
    states = ", ".join(f"{name}: {{init: 0.3, per: {level}}}" for name, level in STATES.items())
    body = "".join(f"  {line}\n" for line in lines)
    head = f"name: Drawn\n{drawing.one_of(SKIPS)}hyper: {{lr: 0.1, h: 0.7}}\n"
    text = f"{head}state: {{{states}, q: {{init: 0.3, history: 2}}}}\nstep: |\n{body}"
    for level, axis in _BY_AXES.items() if draw(st.integers(0, 3)) == 0 else ():
        text = text.replace(level, axis)
    return text


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
