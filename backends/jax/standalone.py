"""A rule as one Python file for JAX: a function that returns `(init, update)`, as in optax."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rulec.backend.printer import StagePrinter, unique_name
from rulec.compiler.weights import part_name
from rulec.language.expr.node import Node, Op, node
from rulec.language.expr.ops import FUNCTIONS as ELEMENTWISE
from rulec.language.rule import Rule
from rulec.runtime.storage.options import Storage

from ..common.array_codes import bit_words, code_functions
from ..common.array_print import Dialect, StageFunction
from ..common.python_standalone import OneFile, Parts, call_lines, field_names, filled, words_in
from .print import SumPrinter
from .words import FORMULAS


def _text_of(formula: Callable[..., Any]) -> str:
    """The text of a formula, without types and imports: the file has its own."""
    text = re.sub(r": Any| -> Any", "", inspect.getsource(formula))
    return re.sub(r"\n    import .*\n\n?", "\n", text)


_WORDS = {
    "cbrt": '''\
def cbrt(x):
    """The cube root, with the sign of x; zero where x is subnormal, for which XLA may find the wrong sign."""
    return jnp.where(jnp.abs(x) < jnp.finfo(x.dtype).tiny, 0.0 * x, jnp.cbrt(x))
''',
    "rounded": '''\
def rounded(x):
    """x as it is, rounded to its dtype before XLA adds anything more."""
    return jax.lax.reduce_precision(x, jnp.finfo(x.dtype).nexp, jnp.finfo(x.dtype).nmant)
''',
    "checked": '''\
def checked(p, g):
    """A parameter, where a step is for it and this gradient."""
    if not all(jnp.issubdtype(jnp.result_type(x), jnp.floating) for x in (p, g)):
        kinds = f"{jnp.result_type(p)} and {jnp.result_type(g)}"
        raise TypeError(f"a parameter and its gradient are {kinds}: give both as real floating-point numbers")
    if jnp.shape(p) != jnp.shape(g):
        raise ValueError(f"a gradient has shape {jnp.shape(g)}, and its parameter {jnp.shape(p)}: give equal shapes")
    return p
''',
    "power": "power = jnp.power\n",
    "erf": "erf = jax.scipy.special.erf\n",
    "sigmoid": "sigmoid = jax.nn.sigmoid\n",
    "one_minus_power": '''\
def one_minus_power(base, t):
    """1 - base**t: written out in float32, 1 - 0.999**t would be wrong in the fifth digit."""
    return -jnp.expm1(t * jnp.log1p(base - 1.0))
''',
    "change": '''\
def change(new, p):
    """The float32 change from an array of 16 bits to a new one, and where their sum, rounded, is another number."""
    if p.dtype != new.dtype:
        raise TypeError(f"a parameter is {p.dtype}, and was {new.dtype}: add updates with optax.apply_updates")
    kind, before = jnp.finfo(p.dtype), p.astype(jnp.float32)
    updates = jax.lax.reduce_precision(new, kind.nexp, kind.nmant).astype(jnp.float32) - before
    sums = (before + updates).astype(p.dtype)
    return updates, sums.view(jnp.uint16) != new.view(jnp.uint16)
''',
    **bit_words("jnp"),
    **{name: _text_of(formula) for name, formula in FORMULAS.items()},
}

DIALECT = Dialect(
    backend="jax",
    module="jnp",
    parameters=(),
    imports=(),
    functions=dict.fromkeys(_WORDS, ""),
    cast="{}.astype(jnp.{})",
    number="jnp.{1}({0})",
    copy="{}",
    writes=False,
    others={op: op.symbol for op in ELEMENTWISE if op.symbol in FORMULAS},
    prints_bits=True,
)


_TYPES_AND_MAKER = '''
class State(NamedTuple):
    """The steps so far, and the states: trees like the parameters, and numbers."""

    step: Any
    <states>


class GradientTransformation(NamedTuple):
    """What optax has under this name: `init(params)` and `update(grads, state, params)`."""

    init: Any
    update: Any


<maker>
    """<summary>

    `update` gives what is to be added to the parameters, which are <dtype>, and the new state.
    <kind?>Updates are float32, for optax.apply_updates: the state has the digits that a parameter lacks after exactly
    <kind?>these, so nothing may change them before.
    <lr?>`lr` is a number, or a function of the number of steps before this one.
    """
    <checks>

    def init(params):
        <first>
        return State(
            step=jnp.zeros((), jnp.int32),
            <begun>
        )

    def update(grads, state, params):
        <t?>t = (state.step + 1).astype(jnp.<real>)
        <rate>
        <seeded?>seed_low, seed_high = seed % 65536, seed // 65536
        <seeded?>leaves, tree = jax.tree.flatten(params)
        <seeded?>places = tree.unflatten([place % 2**24 for place in range(len(leaves))])
        <scalars>
        <scalars?>
        def one(<arrays>):
            p = checked(p, g)
            <one>

        updated = jax.tree.map(one, <trees>)
        leaves, tree = jax.tree.flatten(params)
        columns = zip(*tree.flatten_up_to(updated), strict=True) if leaves else [[]] * <count>
        <results> = (tree.unflatten(column) for column in columns)
        <updated>

    return GradientTransformation(init, update)
'''


class _Function(StageFunction):
    """The function of the one stage."""

    printer_kind = SumPrinter


class _Printer(StagePrinter):
    """The scalar program in the compute dtype: `1 - base**t` would cancel there, and has another formula."""

    def text(self, value: Node, defining: bool = False) -> str:
        if value.op is Op.SUB and (defining or value not in self.names):
            one, power = value.args
            if one.op is Op.CONST and one.arg == 1.0 and power.op is Op.POW and power.args[1] is node(Op.STEP):
                return f"one_minus_power({self.text(power.args[0])}, {self.text(power.args[1])})"
        return super().text(value, defining)


class JaxFile(OneFile):
    """The text of the file."""

    form = "a file for JAX"
    dialect, words = DIALECT, _WORDS
    locals = (
        "grads", "params", "jnp", "jax", "init", "update", "one", "tree", "real", "rate", "State", "NamedTuple", "Any",
        "GradientTransformation", "places", "place", "leaves", "math", "np", "new", "missed",
    )  # fmt: skip
    makes_function = True

    def __init__(self, rule: Rule, name: str, dtype: str, storage: Storage) -> None:
        super().__init__(rule, name, dtype, storage)
        self.states = field_names(self.program.states, ("step", "count", "index"))
        taken = {*self.reserved, *self.states.values(), *self.fields.values(), "count", "index"}
        #: The name of the scales of each state in codes, among the states.
        self.scales = {b: unique_name(f"{self.states[b]}_scale", taken) for b in self.codes}
        # JAX may have no wider dtype.
        self.real = self.precise = self.layout.compute

    def text(self) -> str:
        """The whole file."""
        function = _Function(DIALECT, self.program, self.layout)
        step = self._step(function)
        class_lines = filled(_TYPES_AND_MAKER, self.parts() | self._maker() | self._update(function))
        wide = ["", 'jax.config.update("jax_enable_x64", True)'] * (self.real == "float64")
        types = ["from typing import Any, NamedTuple", "", "import jax", "import jax.numpy as jnp"]
        codes = [code_functions(name, form, "jnp", flushes=True) for name, form in self.codes.values()]
        if self.named("np", [line for lines in codes for line in lines]):
            types.append("import numpy as np")
        return self.file(
            [*["import math"] * bool(codes), *self.floats(step), *types, *wide],
            words_in([*step, *class_lines], _WORDS),
            *codes,
            step,
            class_lines,
        )

    def _step(self, function: StageFunction) -> list[str]:
        def returns(written: Mapping[str, str]) -> list[str]:
            return [f"return {{{', '.join(f'{chr(34)}{b}{chr(34)}: {text}' for b, text in written.items())}}}"]

        summary = f"New values of one array and its states, in {self.real}. Scalars are 0-d."
        return function.source(summary, returns).split("\n")

    def _maker(self) -> Parts:
        begun = self.begun(
            f"p.astype(jnp.{self.real})",
            "{state}=jax.tree.map(lambda p: jnp.full_like(p, {value}, dtype=jnp.{dtype}), params),",
            f"{{state}}=jnp.asarray({{value}}, jnp.{self.real}),",
        )
        lr = self.fields.get("lr", "")
        return {
            "maker": call_lines(f"def {self.name}", self.keywords(), ":"), "real": self.real, "lr": lr,
            "checks": self.checks({"lr": f"not callable({lr}) and "}), "begun": begun,
            "states": [f"{field}: Any" for field in [*self.states.values(), *self.scales.values()]],
            "first": self._rate("0", begun), "kind": self.program.memory.weights,
        }  # fmt: skip

    def first(self, state: str, value: str, form: str) -> str:
        """As of all files; codes are encoded."""
        if state not in self.codes:
            return super().first(state, value, form)
        encoded = f"encode_{self.codes[state][0]}(jnp.full(p.shape, {value}, jnp.float32))"
        return "\n".join(
            f"{field}=jax.tree.map(lambda p: {encoded}[{place}], params),"
            for place, field in enumerate((self.states[state], self.scales[state]))
        )

    def _update(self, function: StageFunction) -> Parts:
        scalars = self.scalars("state.{}", _Printer)
        arrays = {b.name: self.states[b.name] for b in self.arrays}
        decoded = {b: f"decode_{name}({arrays[b]}, {self.scales[b]}, p.shape)" for b, (name, _) in self.codes.items()}
        buffers = {"p": "p", "g": "g"} | arrays | decoded
        passed = self.passed(function, buffers, scalars.columns, f"jnp.asarray({{}}, jnp.{self.real})")
        one = [*call_lines("new = step", passed, ""), *self._results(arrays)]
        states = [y for b, x in arrays.items() for y in (x, *([self.scales[b]] if b in self.scales else []))]
        results = ["updates", *states]
        fields = ["step=state.step + 1", *(f"{x}={x}" for x in states)]
        fields += [f"{self.states[b]}={text}" for b, text in scalars.stores.items()]
        work = [*scalars.lines, *one, *scalars.stores.values()]
        return {
            "t": "t" * self.named("t", work), "rate": self._rate("state.step", work), "scalars": scalars.lines,
            "arrays": ", ".join([*["tensor_number"] * self.seeded, "p", "g", *states]),
            "one": one, "count": str(len(results)),
            "trees": ", ".join([*["places"] * self.seeded, "params", "grads", *(f"state.{x}" for x in states)]),
            "results": ", ".join(results) + "," * (not arrays),
            "updated": call_lines("return updates, State", fields, ""),
        }  # fmt: skip

    def _results(self, arrays: Mapping[str, str]) -> list[str]:
        """The statements that return the update and the new states of one array."""
        weights, part = self.program.memory.weights, part_name(self.program.memory.weights, self.dtype)
        updated = {s.buffer for s in self.program.stages[0].stores}
        texts = []
        for b, name in arrays.items():
            new = f'new["{b}"]' if b in updated else name
            if b in self.codes:
                single = new if self.real == "float32" else f"{new}.astype(jnp.float32)"
                texts.append(f"*encode_{self.codes[b][0]}({single})" if b in updated else f"{name}, {self.scales[b]}")
                continue
            # A loss or low places belong to one parameter alone: without them the weight is the parameter.
            new = f"jnp.where(missed, 0, {new})" if b == part and weights != "master" else new
            texts.append(f"jnp.asarray({new}, {name}.dtype)")
        comma = "," * (not arrays)  # a tuple too
        if not weights:
            param = 'jnp.asarray(new["p"], p.dtype) - p' if "p" in updated else "jnp.asarray(p, p.dtype) - p"
            return call_lines("return ", [f"{param}{comma}", *texts], "")
        param = f'new["p"].astype(jnp.{self.dtype})' if "p" in updated else "p"
        lines = [f"updates, missed = change({param}, p)"]
        return [*lines, *call_lines("return ", [f"updates{comma}", *texts], "")]

    def leaf(self, value: Node, state: str) -> str | None:
        """The text of a leaf, with the learning rate of this step for `lr`."""
        return "rate" if value.op is Op.HYPER and value.arg == "lr" else super().leaf(value, state)

    def _rate(self, steps: str, lines: Sequence[str]) -> list[str]:
        """The statement for the learning rate after `steps` steps, where lines name it."""
        lr = self.fields.get("lr")
        return [f"rate = {lr}({steps}) if callable({lr}) else {lr}"] * self.named("rate", lines)


files = JaxFile.files
