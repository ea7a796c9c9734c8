"""The programs of a rule in a file for Triton, and the states of tensors before their first step."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from rulec.backend.printer import StagePrinter, bare
from rulec.compiler.ir import Buffer, Stage
from rulec.compiler.layout import scale_name
from rulec.formats import encode
from rulec.language.expr.node import WORDS as SEED_WORDS
from rulec.language.expr.node import Node, Op, names_in
from rulec.language.rule import Rule
from rulec.runtime.buckets.flat import axes_in_flat
from rulec.runtime.storage.options import Storage
from rulec.standalone.cases import CannotBuild, Family

from ...common.array_print import Dialect
from ...common.python_standalone import OneFile, indented, number
from .forms import Form, fact_text, forms_of

#: Functions on the host that torch lacks. The kernels' own functions have other names.
WORDS = {
    "cube_root": '''\
def cube_root(x):
    """The cube root, with the sign of x."""
    return torch.sign(x) * torch.abs(x) ** (1 / 3)
''',
    "real": '''\
def real(x):
    """A number of float64."""
    return torch.tensor(x, dtype=torch.float64)
''',
    "like": '''\
def like(p, value, dtype):
    """A state of the shape of a parameter, and its first value."""
    return torch.empty_like(p, dtype=dtype).copy_(torch.as_tensor(value))
''',
}

DIALECT = Dialect(
    backend="triton",
    module="torch",
    parameters=(),
    imports=(),
    functions=dict.fromkeys(WORDS, ""),
    cast="{}.to(torch.{})",
    number="real({0})",
    copy="{}",
    others={Op.CBRT: "cube_root", Op.POW: "torch.pow", Op.ERF: "torch.erf", Op.SIGMOID: "torch.sigmoid"},
)

#: Conditions on shapes as Python.
_CONDITIONS = {
    Op.ADD: "({} + {})", Op.SUB: "({} - {})", Op.MUL: "({} * {})", Op.DIV: "({} / {})", Op.NEG: "(-{})",
    Op.LT: "({} < {})", Op.LE: "({} <= {})", Op.GT: "({} > {})", Op.GE: "({} >= {})", Op.EQ: "({} == {})",
    Op.NE: "({} != {})", Op.AND: "({} and {})", Op.OR: "({} or {})", Op.NOT: "(not {})",
    Op.POW: "({} ** {})", Op.SQRT: "({} ** 0.5)", Op.MINIMUM: "min({}, {})", Op.MAXIMUM: "max({}, {})",
    Op.MOD: "({} % {})", Op.FLOORDIV: "({} // {})",
}  # fmt: skip


class FormsFile(OneFile):
    """A rule in its forms, with all that is printed of shapes and of first states."""

    form = "a file for Triton"
    dialect, words = DIALECT, WORDS
    matrix_functions = frozenset({Op.NEWTON_SCHULZ})
    shares = True
    locals = (
        "states", "torch", "triton", "tl", "math", "closure", "loss", "group", "groups", "tensors", "table", "moving",
        "columns", "grads", "hyper", "at", "x", "out", "words", "kind", "number", "seeds", "self", "batch", "rows",
        "cols", "numel", "ndim", "turned", "every", "real", "Optimizer", "Launch", "Stage", "Uploads", "Batch",
        "Vectors", "blocks", "tiles", "joined", "matrices", "kept", "together", "newton_schulz", "evaluating",
        *(f"dim{k}" for k in range(8)),
    )  # fmt: skip

    def __init__(self, rule: Rule, name: str, dtype: str, storage: Storage) -> None:
        super().__init__(rule, name, dtype, storage)
        #: The facts of shapes that printed values have named.
        self.facts: dict[str, None] = {}
        self.turns = self.family.rule.view.get("short") == "first"
        self.forms = forms_of(rule, self.family, dtype, storage, self.form, self.cannot)
        self.steps = [f for f in self.forms if not f.word]
        joins = [[f.program.sites[n] for n in f.program.joins] for f in self.steps]
        self.yields = bool(joins[0])
        if any(sites != joins[0] for sites in joins):
            self.cannot("its sums over all tensors depend on the shape of a tensor")
        if self.yields and len(self.forms) > len(self.steps):
            self.cannot("it has both sums over all tensors and a point of evaluation")

    def refuse(self, whole: Family) -> None:
        """Forms refuse on their own."""
        self.family = whole

    @property
    def derived(self) -> dict[str, str]:
        """The default of a hyper-parameter that follows from others, as an expression of a `group`."""

        def leaf(n: Node) -> str | None:
            return f'group["{self.fields[str(n.arg)]}"]' if n.op is Op.NAME else None

        printer = StagePrinter(self.form, self.program, Stage(), _CONDITIONS, lambda x: f"{x!r}", known=leaf)
        defaults = {key: h.default for key, h in self.hyper.items() if isinstance(h.default, Node)}
        return {
            key: bare(printer.text(value)).replace("'", '"') for key, value in defaults.items()
            if names_in([value]) and set(names_in([value])) <= self.fields.keys()
        }  # fmt: skip

    def keywords(self) -> list[str]:
        """As of all files; a default that follows from others is None."""
        unset = {f"{self.fields[key]}={number(self.defaults[key])}": f"{self.fields[key]}=None" for key in self.derived}
        return [unset.get(keyword, keyword) for keyword in super().keywords()]

    def checks(self, conditions: Mapping[str, str] = MappingProxyType({})) -> list[str]:
        """As of all files; None is a hyper-parameter that follows from others."""
        return super().checks({key: f"{self.fields[key]} is not None and " for key in self.derived} | {**conditions})

    def cannot(self, why: str) -> None:
        """As of all files; C has no sums over tensors either."""
        if any(case.program.joins for case in self.family.cases):
            raise CannotBuild(self.rule.name, self.form, why)
        super().cannot(why)

    @staticmethod
    def number_text(value: float) -> str:
        """A number as Python."""
        return number(value)

    def condition(self, value: Node) -> str:
        """A condition on the shape as Python, for `p` and its `batch, rows, cols`."""

        def leaf(n: Node) -> str | None:
            name = str(n.arg)
            if name in self.static:
                return number(self.static[name])
            return fact_text(name) if n.op in (Op.FACT, Op.NAME, Op.HYPER) else None

        printer = StagePrinter(self.form, self.program, Stage(), _CONDITIONS, lambda x: f"{x:g}", known=leaf)
        return bare(printer.text(value))

    @staticmethod
    def viewing(lines: Sequence[str]) -> list[str]:
        """The statement for the matrices of a parameter, where lines name them."""
        return ["batch, rows, cols, _ = matrices(p.shape)"] * any(re.search(r"\b(rows|cols)\b", x) for x in lines)

    # States before the first step

    def of(self, form: Form) -> FormsFile:
        """This file with the program of a form."""
        other = copy.copy(self)
        other.program, other.layout, other.facts = form.program, form.layout, {}
        return other

    def leaf(self, value: Node, state: str) -> str | None:
        """As of all files; facts of shapes are names."""
        name = str(value.arg)
        if value.op is Op.FACT and name not in (*SEED_WORDS, "machine_eps"):
            self.facts[name] = None
            return name
        return super().leaf(value, state)

    def begun(self, param: str, array: str, number: str) -> list[str]:
        """As of all files; codes begin as those of one number, and vectors with the shape of their axes."""
        printer, lines = self.printer(Stage(), param), []
        for b in self.program.states:
            assert b.init is not None
            if self.layout.format(b.name):
                lines += self._first_codes(b)
                continue
            value, axes = printer.text(b.init), axes_in_flat(b.axes)
            if b.axes.elementwise:
                lines.append(array.format(state=b.name, value=value, dtype=self.layout.dtype(b.name)))
            elif axes:
                dtype = self.layout.dtype(b.name)
                lines.append(
                    f'state["{b.name}"] = torch.full(kept(p, "{axes}"), {value}, dtype=torch.{dtype}, device=p.device)'
                )
            else:
                lines.append(number.format(state=b.name, value=value))
        return lines

    def _first_codes(self, buffer: Buffer) -> list[str]:
        """The statements for the codes and scales of a state before the first step."""
        form, init = self.layout.format(buffer.name), buffer.init
        assert form is not None
        if init is None or init.op is not Op.CONST:
            self.cannot(f"its state {buffer.name} in codes begins with more than a number")
            raise AssertionError
        codes, scales = encode(form, np.full(form.block, init.arg, np.float32))
        size = "p.shape" if form.bits == 8 else "((p.numel() + 1) // 2,)"
        kind, count = f"dtype=torch.{form.code_dtype}, device=p.device", f"(-(-p.numel() // {form.block}),)"
        return [
            f'state["{buffer.name}"] = torch.full({size}, {int(codes[0])}, {kind})',
            f'state["{scale_name(buffer.name)}"] = torch.full(',
            f"    {count}, {float(scales[0])!r}, dtype=torch.float32, device=p.device",
            ")",
        ]

    def first_lines(self, form: Form) -> list[str]:
        """The methods `first` and `sizes` of a form's class."""
        other = self.of(form)
        begun = other.begun(
            "p.double()", 'state["{state}"] = like(p, {value}, torch.{dtype})',
            'state["{state}"] = torch.tensor({value}, dtype=torch.float64)',
        )  # fmt: skip
        facts = [f"{name} = {fact_text(name)}" for name in other.facts]
        body = [*other.reads('group["{}"]', begun), *self.viewing(facts), *facts, *begun]
        sizes = other.sizes(form)
        return [
            "@staticmethod", "def first(state, p, group):", *indented(
                ['"""The states of a parameter before the first step."""', *body, 'state["step"] = torch.tensor(0.0)']
            ),
            "", "@staticmethod", "def counts(p):", *indented(
                ['"""The number of elements of each state of a parameter."""', "return {", *indented(sizes), "}"]
            ),
        ]  # fmt: skip

    def sizes(self, form: Form) -> list[str]:
        """The number of elements of each state of a parameter, by name."""
        sizes = {b.name: "p.numel()" for b in form.arrays} | {b.name: "1" for b in form.numbers}
        sizes |= {b.name: f'math.prod(kept(p, "{axes_in_flat(b.axes)}"))' for b in form.vectors}
        for name, coded in form.layout.formats:
            sizes[scale_name(name)] = f"-(-p.numel() // {coded.block})"
            sizes[name] = "p.numel()" if coded.bits == 8 else "(p.numel() + 1) // 2"
        return [f'"{name}": {size},' for name, size in (sizes | {"step": "1"}).items()]
