"""The common parts of one-file optimizers for Python libraries: the rule, its scalar program, and its words."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from rulec.backend.printer import StagePrinter, bare, identifier, unique_name
from rulec.compiler.ir import Buffer, Program, Stage
from rulec.compiler.layout import Layout, layout_for
from rulec.language.expr.node import WORDS, Node, Op, is_boolean
from rulec.language.hyper import Hyper
from rulec.language.rule import Rule
from rulec.runtime.engine import EPS, default_hyper
from rulec.runtime.storage.options import FEWEST_CODED, Storage
from rulec.standalone.cases import CannotBuild, Family, family, values
from rulec.standalone.prose import file_name, introduction, vendored

from .array_print import Dialect, StageFunction, operations
from .scalars import scalar_stage, without_table
from .text import used

#: The parts of a printed class by name: texts, and lists of lines.
Parts: TypeAlias = dict[str, str | list[str]]


#: Names in every printed file.
LOCALS = (
    "p", "g", "t", "state", "inf", "nan", "step", "seed", "seed_low", "seed_high", "tensor_number",
)  # fmt: skip


class OneFile(ABC):
    """An elementwise rule under a name, for parameters of one dtype, as one file.

    CannotBuild for a rule that is not elementwise or not possible in this `form`.
    """

    #: The kind of file, for errors; the spelling of its library; and the functions that the library spells differently
    #: or lacks.
    form: str
    dialect: Dialect
    words: Mapping[str, str]
    #: Names in the printed text, beside `LOCALS`.
    locals: tuple[str, ...]
    #: Whether the file has a function of its name.
    makes_function = False
    #: The matrix functions of this form, and whether it has reductions over several tensors.
    matrix_functions: frozenset[Op] = frozenset()
    shares = False
    #: Whether the form moves parameters to where a model is evaluated, and back.
    evaluates = False
    #: The facts of a tensor that the file knows, beside those that are the same for all.
    known_facts: frozenset[str] = frozenset()

    def __init__(self, rule: Rule, name: str, dtype: str, storage: Storage) -> None:
        self.rule, self.name, self.dtype, self.storage = rule, name, dtype, storage
        whole = family(rule, dtype, storage, self.form, self.matrix_functions, self.shares)
        #: Whether numbers are rounded at random, from a seed and the number of a tensor.
        self.seeded = whole.seeded
        self.static = whole.static
        self.program = whole.cases[0].program
        self.refuse(whole)
        states, formats = storage.of(self.program, dtype, FEWEST_CODED)
        self.layout: Layout = layout_for(self.program, dtype, states=states, formats=formats)
        #: The identifier of each state in codes, for its functions, with its format.
        self.codes = {b: (name, form) for (b, form), name in zip(formats.items(), _identifiers(formats), strict=True)}
        #: The dtype of values outside of the kernel; and the printed name of each state.
        self.precise = "float64"
        self.states = {b.name: b.name for b in self.program.states}
        self.reserved = {*LOCALS, *self.locals, *self.words, *[name] * self.makes_function}
        taken = {*self.reserved, "params", "self"}
        known = whole.rule.hyper
        self.hyper: dict[str, Hyper] = {k: h for k, h in known.items() if not h.static}
        self.fields = {key: unique_name(key, taken) for key in self.hyper}
        values_of = default_hyper(whole.rule, {}, dtype)
        self.defaults = {key: values_of[key] for key in self.hyper}

    @classmethod
    def files(cls, rule: Rule, name: str, dtype: str, storage: Storage) -> Mapping[str, str]:
        """The file, by its name."""
        return {f"{name}.py": cls(rule, name, dtype, storage).text()}

    @abstractmethod
    def text(self) -> str:
        """The whole file."""

    def file(self, imports: Sequence[str], words: Sequence[str], *parts: Sequence[str]) -> str:
        """A file of these parts, after its documentation."""
        told = [f'"""{line}' if i == 0 else line for i, line in enumerate(self.documentation())]
        body = [line for part in parts for line in ("", "", *part)]
        return "\n".join([*told, '"""', "", *imports, *words, *body, ""])

    def refuse(self, whole: Family) -> None:
        """CannotBuild for a rule without this form: by default, for all that are not elementwise."""
        program = self.program
        if len(whole.cases) > 1 or whole.applies is not None:
            self.cannot("its step depends on the shape of a tensor")
        self.refuse_stages(program)
        if not any(stage.stores for stage in program.stages):
            self.cannot("its step changes no element of a tensor")
        if self.rule.inputs:
            self.cannot(f"it needs the input {next(iter(self.rule.inputs))}")
        if self.rule.evaluate is not None and not self.evaluates:
            self.cannot("it is evaluated at another point than it is trained")
        for value in values(program):
            if value.op is Op.FACT and value.arg not in ("machine_eps", *WORDS, *self.known_facts):
                self.cannot(f"its step looks at {value.arg}")

    def refuse_stages(self, program: Program) -> None:
        """CannotBuild for a program with stages or values between them that this form lacks."""
        if not program.elementwise or program.skip is not None:
            self.cannot("it reduces over a tensor, and only rules that update each element by itself are written so")

    def cannot(self, why: str) -> None:
        """Raises CannotBuild with this reason."""
        raise CannotBuild(self.rule.name, self.form, f"{why} (--backend c may do)")

    @staticmethod
    def named(name: str, lines: Iterable[str]) -> bool:
        """Whether any line names an identifier."""
        return any(re.search(rf"(?<![\w.\"]){name}\b", line) for line in lines)

    # States

    @property
    def arrays(self) -> list[Buffer]:
        """The states of the parameter's shape."""
        return [b for b in self.program.states if b.axes.elementwise]

    @property
    def numbers(self) -> list[Buffer]:
        """The scalar states."""
        return [b for b in self.program.states if not b.axes.elementwise]

    # Texts

    def documentation(self) -> list[str]:
        """The first lines of the file: the rule, its mathematics, and the licence."""
        return [
            line.replace("\\", "\\\\").replace('"""', "'''") for line in [*introduction(self.rule), "", *vendored()]
        ]

    def parts(self) -> Parts:
        """The parts of every printed class, for `filled`."""
        summary = " ".join((self.rule.summary or self.rule.name).split()).rstrip(".").replace('"', "'")
        return {
            "class": class_name(self.rule, self.name), "summary": f"{summary}.", "dtype": self.dtype,
            "init": call_lines("def __init__", ["self", "params", *self.keywords()], ":"), "checks": self.checks(),
            "fields": [f"self.{x} = {x}" for x in [*self.fields.values(), *["seed"] * self.seeded]],
            "seeded": "yes" if self.seeded else "",
        }  # fmt: skip

    def floats(self, lines: Sequence[str]) -> list[str]:
        """The line that imports `inf` and `nan`, as far as lines name them."""
        constants = [x for x in ("inf", "nan") if self.named(x, lines)]
        return [f"from math import {', '.join(constants)}"] if constants else []

    def reads(self, form: str, lines: Sequence[str]) -> list[str]:
        """The statements, each in this form, that read the hyper-parameters named in lines."""
        return [f"{x} = {form.format(x)}" for x in self.fields.values() if self.named(x, lines)]

    def keywords(self) -> list[str]:
        """The hyper-parameters as keywords with their defaults, and the seed of random bits."""
        return [
            *(f"{self.fields[key]}={number(value)}" for key, value in self.defaults.items()),
            *["seed=0"] * self.seeded,
        ]

    def checks(self, conditions: Mapping[str, str] = {}) -> list[str]:
        """The statements that refuse hyper-parameters outside their ranges, and seeds that are none.

        `conditions` has the text of a further condition for some hyper-parameters.
        """
        lines = []
        for key, h in self.hyper.items():
            field = self.fields[key]
            tests = [f"{field} {sign} {number(end)}" for sign, end in h.ends]
            if tests:
                lines.append(f"if {conditions.get(key, '')}not ({' and '.join(tests)}):")
                lines.append(f'    raise ValueError(f"{self.fields[key]}={{{field}}} must be {h.range_text()}")')
        return lines + self.seeded * [
            "if not (isinstance(seed, int) and 0 <= seed < 2**32):",
            '    raise ValueError(f"{seed=} must be a whole number from 0 to 2**32 - 1")',
        ]

    # Numbers

    def leaf(self, value: Node, state: str) -> str | None:
        """The text of a leaf of a scalar program or an initial value; `state` is the format of a state."""
        name = str(value.arg)
        if value.op is Op.STEP:
            return "t"
        if value.op is Op.FACT and name in WORDS:  # random bits follow from these; `number` is a function's name
            return "tensor_number" if name == "number" else name
        if value.op is Op.FACT:
            return number(EPS[self.dtype])
        if value.op is Op.LOAD:
            return state.format(self.states.get(name, name))
        if value.op not in (Op.HYPER, Op.MODEL_HYPER):
            return None
        return number(self.static[name]) if name in self.static else self.fields[name]

    def printer(self, stage: Stage, state: str, kind: type[StagePrinter] = StagePrinter) -> StagePrinter:
        """The printer of scalar values."""
        return kind(
            self.form, without_table(self.program), stage, operations(self.dialect, self.precise), number,
            reserved=frozenset({*self.reserved, *self.fields.values()}), known=lambda v: self.leaf(v, state),
        )  # fmt: skip

    def scalars(self, state: str, kind: type[StagePrinter] = StagePrinter) -> ScalarLines:
        """The printed scalar program; `state` is the format of a state that it reads."""
        program, printer = self.program, self.printer(scalar_stage(self.program), state, kind)
        return ScalarLines(
            [f"{name} = {bare(text)}" for name, text in printer.lines()],
            [bare(printer.text(c.value)) for c in program.scalars.columns],
            {s.buffer: bare(printer.text(s.value)) for s in program.scalars.stores},
        )

    def begun(self, param: str, array: str, number: str) -> list[str]:
        """The statements for the states before the first step, in formats of a {state}, its {value} and its {dtype}."""
        printer, lines = self.printer(Stage(), param), []
        for b in self.program.states:
            assert b.init is not None
            value = printer.text(b.init)
            text = (
                self.first(b.name, value, array)
                if b.axes.elementwise
                else number.format(state=self.states[b.name], value=value)
            )
            lines += text.split("\n")
        return lines

    def first(self, state: str, value: str, form: str) -> str:
        """The statement for a state of the parameter's shape before the first step, in a format as of `begun`."""
        return form.format(state=self.states[state], value=value, dtype=self.layout.dtype(state))

    def passed(self, function: StageFunction, arrays: Mapping[str, str], columns: list[str], form: str) -> list[str]:
        """The arguments of a function of arrays, with numbers of the scalar table in this form."""
        known = self.program.columns
        numbers = [columns[i] if is_boolean(known[i].value) else form.format(columns[i]) for i in function.columns()]
        return [*(arrays[b] for b in function.buffers), *numbers]

    def table(self, read: str, kept: str = "{}") -> Parts:
        """The parts of a method for the scalar table and the new scalar states, each state in the form `kept`."""
        scalars = self.scalars('number("{}")')
        new = ", ".join(f'"{b}": {kept.format(text)}' for b, text in scalars.stores.items())
        return {
            "number": "number" * self.named("number", scalars.all), "t": "t" * self.named("t", scalars.all),
            "reads": self.reads(read, scalars.all), "scalars": scalars.lines,
            "columns": [f"{column}," for column in scalars.columns], "new": f", {{{new}}}" if new else "",
        }  # fmt: skip


class ScalarLines(NamedTuple):
    """The scalar program as lines of Python: `lines` first, then the text of each column and new state."""

    lines: list[str]
    columns: list[str]
    stores: dict[str, str]

    @property
    def all(self) -> list[str]:
        """All texts together."""
        return [*self.lines, *self.columns, *self.stores.values()]


def filled(template: str, parts: Parts) -> list[str]:
    """The lines of a template.

    `<part>` in a line stands for a text. Alone in a line it stands for a list of lines. A line with `<part?>` is left
    out where the part is empty; with several of them, where any is.
    """
    lines: list[str] = []
    for line in template.strip("\n").split("\n"):
        needed = re.findall(r"<(\w+)\?>", line)
        alone = re.fullmatch(r"( *)<(\w+)>", line)
        if alone and not isinstance(parts[alone[2]], str):
            lines += indented(parts[alone[2]], len(alone[1]) // 4)
        elif all(parts[name] for name in needed):
            lines.append(re.sub(r"<(\w+)>", lambda m: str(parts[m[1]]), re.sub(r"<\w+\?>", "", line)).rstrip())
    return lines


def number(value: float) -> str:
    """A number as a Python expression."""
    text = repr(float(value))
    return {"inf": "float('inf')", "-inf": "-float('inf')", "nan": "float('nan')"}.get(text, text)


def class_name(rule: Rule, name: str) -> str:
    """The name of the class: the rule's, if it is an identifier and the user asked for no other."""
    if name == file_name(rule, "") and rule.name.isidentifier():
        return rule.name
    return "".join(word[:1].upper() + word[1:] for word in name.split("_"))


def words_in(lines: Sequence[str], words: Mapping[str, str]) -> list[str]:
    """The definitions that printed lines need, each before its use."""
    patterns = {rf"(?<![\w.]){name}\(": source for name, source in words.items()}
    sources = used(patterns, "\n".join(lines), lambda text: re.sub(r'def \w+|"""(?s:.*?)"""', "", text))
    return [line for source in sources for line in ("", "", *source.rstrip("\n").split("\n"))]


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


def _identifiers(names: Iterable[str]) -> list[str]:
    """Names of rules as identifiers, all different."""
    taken: set[str] = set()
    return [unique_name(name, taken) for name in names]


def field_names(buffers: Sequence[Buffer], reserved: Sequence[str]) -> dict[str, str]:
    """An identifier for each state."""
    taken = set(reserved)
    return {b.name: unique_name(identifier(b.name), taken) for b in buffers}
