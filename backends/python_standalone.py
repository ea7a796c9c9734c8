"""What the one-file optimizers for Python libraries have in common: the rule, its scalar program, and its words."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from rulec.backend.printer import OpTable, bare, identifier, unique_name
from rulec.compiler.ir import Buffer
from rulec.compiler.layout import Layout, layout_for
from rulec.compiler.show import named_values
from rulec.language.hyper import Hyper
from rulec.language.node import Kind, Node, Op, walk
from rulec.language.rule import Rule
from rulec.runtime.engine import EPS, default_hyper
from rulec.standalone.cases import family
from rulec.standalone.prose import file_name, introduction, vendored
from rulec.standalone.refusal import CannotBuild, values


class OneFile:
    """An elementwise rule under a name, for parameters of one dtype: what its one-file optimizers are printed from.

    CannotBuild for a rule that is not elementwise, or that `form` does not provide for.
    """

    def __init__(self, rule: Rule, name: str, dtype: str, state_dtype: str, form: str, reserved: Sequence[str]) -> None:
        self.rule, self.name, self.dtype, self.form = rule, name, dtype, form
        whole = family(rule, dtype, state_dtype, form)
        self.static = whole.static
        self.program = whole.cases[0].program
        self._refuse(len(whole.cases) > 1 or whole.applies is not None)
        states = dict.fromkeys((b.name for b in self.program.states), state_dtype or dtype)
        self.layout: Layout = layout_for(self.program, dtype, states=states)
        taken = {*reserved, "params", "self"}
        known = whole.rule.hyper
        self.hyper: dict[str, Hyper] = {k: h for k, h in known.items() if not h.static}
        self.fields = {key: unique_name(key, taken) for key in self.hyper}
        values_of = default_hyper(whole.rule, {}, dtype)
        self.defaults = {key: values_of[key] for key in self.hyper}
        self.class_name = class_name(rule, name)

    def _refuse(self, by_shape: bool) -> None:
        program = self.program
        if by_shape:
            self.cannot("its step depends on the shape of a tensor")
        if not program.elementwise or program.skip is not None:
            self.cannot("it reduces over a tensor, and only rules that update each element by itself are written so")
        if not program.stages[0].stores:
            self.cannot("its step changes no element of a tensor")
        if self.rule.inputs:
            self.cannot(f"it needs the input {next(iter(self.rule.inputs))}")
        if self.rule.evaluate is not None:
            self.cannot("it is evaluated at another point than it is trained")
        for value in values(program):
            if value.op is Op.FACT and value.arg != "machine_eps":
                self.cannot(f"its step looks at {value.arg}")

    def cannot(self, why: str) -> None:
        """CannotBuild with that reason."""
        raise CannotBuild(self.rule.name, self.form, f"{why} (--backend c may do)")

    @staticmethod
    def named(name: str, lines: Sequence[str]) -> bool:
        """Whether any line names an identifier."""
        return any(re.search(rf"(?<![\w.\"]){name}\b", line) for line in lines)

    # States

    @property
    def arrays(self) -> list[Buffer]:
        """The states that have the parameter's shape."""
        return [b for b in self.program.states if b.axes.elementwise]

    @property
    def numbers(self) -> list[Buffer]:
        """The states that are one number."""
        return [b for b in self.program.states if not b.axes.elementwise]

    # Texts

    def documentation(self) -> list[str]:
        """What the file begins with: the rule, its mathematics, and the licence."""
        return [
            line.replace("\\", "\\\\").replace('"""', "'''") for line in [*introduction(self.rule), "", *vendored()]
        ]

    def keywords(self) -> list[str]:
        """The hyper-parameters as keywords with their defaults."""
        return [f"{self.fields[key]}={number(value)}" for key, value in self.defaults.items()]

    def checks(self, given: Mapping[str, str] = {}) -> list[str]:
        """The statements that refuse hyper-parameters outside their ranges; `given` has a condition before some."""
        lines = []
        for key, h in self.hyper.items():
            own = self.fields[key]
            limits = h.limits
            ends = [(">=", limits.get("min")), (">", limits.get("above")), ("<=", limits.get("max")),
                    ("<", limits.get("below"))]  # fmt: skip
            tests = [f"{own} {sign} {number(end)}" for sign, end in ends if end is not None]
            if tests:
                lines.append(f"if {given.get(key, '')}not ({' and '.join(tests)}):")
                lines.append(f'    raise ValueError(f"{self.fields[key]}={{{own}}} must be {h.range_text()}")')
        return lines

    def leaf(self, state: Callable[[str], str]) -> Callable[[Node], str]:
        """The text of what a scalar program and initial values are made of."""

        def text(value: Node) -> str:
            own = str(value.arg)
            if value.op is Op.STEP:
                return "t"
            if value.op is Op.FACT:
                return number(EPS[self.dtype])
            if value.op is Op.LOAD:
                return state(own)
            return number(self.static[own]) if own in self.static else self.fields[own]

        return text


class ScalarLines:
    """The scalar program as lines of Python: `lines` first, then the text of each column and new state."""

    def __init__(self, file: OneFile, ops: OpTable, leaf: Callable[[Node], str], taken: set[str]) -> None:
        program = file.program
        self.ops, self.leaf, self.program = ops, leaf, program
        columns = [c.value for c in program.scalars.columns]
        stores = [s.value for s in program.scalars.stores]
        named = named_values(program, [*columns, *stores])
        self.names = {v: unique_name(n, taken) for v, n in named.items()}
        order = [v for v in walk([*columns, *stores]) if v in self.names]
        self.lines = [f"{self.names[v]} = {bare(self.text(v, defining=True))}" for v in order]
        self.columns = [bare(self.text(value)) for value in columns]
        self.stores = {s.buffer: bare(self.text(s.value)) for s in program.scalars.stores}

    def text(self, value: Node, defining: bool = False) -> str:
        """A value as an expression over the names of the lines before it."""
        if value in self.names and not defining:
            return self.names[value]
        return expression(value, self.ops, self.leaf, self.text)


def expression(
    value: Node, ops: OpTable, leaf: Callable[[Node], str], text: Callable[[Node], str] | None = None
) -> str:
    """An expression in Python; `text` prints its operands, by default in full."""
    if value.op is Op.CONST:
        return number(float(value.arg))  # type: ignore[arg-type]
    if value.op.kind is Kind.LEAF:
        return leaf(value)
    operands = [text(a) if text else expression(a, ops, leaf) for a in value.args]
    form = ops[value.op]
    return form.format(*operands) if isinstance(form, str) else form(*operands)


def number(value: float) -> str:
    """A number as Python has it."""
    text = repr(float(value))
    return {"inf": "float('inf')", "-inf": "-float('inf')", "nan": "float('nan')"}.get(text, text)


def class_name(rule: Rule, name: str) -> str:
    """The name of the class: the rule's own where that is an identifier and no other was asked for."""
    if name == file_name(rule, "") and rule.name.isidentifier():
        return rule.name
    return "".join(word[:1].upper() + word[1:] for word in name.split("_"))


def words_in(text: str, words: Mapping[str, str]) -> list[str]:
    """The definitions that a printed text needs."""
    found = [source for name, source in words.items() if re.search(rf"(?<![\w.]){name}\(", text)]
    return [line for source in found for line in ("", "", *source.rstrip("\n").split("\n"))]


def call_lines(head: str, arguments: Sequence[str], end: str) -> list[str]:
    """`head(arguments)end` on as many lines as it needs."""
    line = f"{head}({', '.join(arguments)}){end}"
    if len(line) <= 110:
        return [line]
    lines = [""]
    for argument in arguments:
        if lines[-1] and len(lines[-1]) + len(argument) > 100:
            lines.append("")
        lines[-1] += f"{' ' if lines[-1] else ''}{argument},"
    return [f"{head}(", *(f"    {x}" for x in lines), f"){end}"]


def indented(lines: Sequence[str], depth: int = 1) -> list[str]:
    """Lines inside a block."""
    return ["    " * depth + line if line else line for line in lines]


def field_names(buffers: Sequence[Buffer], reserved: Sequence[str]) -> dict[str, str]:
    """An identifier for each state."""
    taken = set(reserved)
    return {b.name: unique_name(identifier(b.name), taken) for b in buffers}
