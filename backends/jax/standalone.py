"""A rule as one Python file for JAX: a function that returns `(init, update)`, as in optax."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rulec.backend.printer import StagePrinter
from rulec.language.node import Node, Op, node
from rulec.language.rule import Rule
from rulec.runtime.storage import Storage

from ..array_print import Dialect, StageFunction
from ..python_standalone import OneFile, Parts, call_lines, field_names, filled, words_in
from .sums import SumPrinter

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
    "power": "power = jnp.power\n",
    "erf": "erf = jax.scipy.special.erf\n",
    "sigmoid": "sigmoid = jax.nn.sigmoid\n",
    "one_minus_power": '''\
def one_minus_power(base, t):
    """1 - base**t: written out in float32, 1 - 0.999**t would be wrong in the fifth digit."""
    return -jnp.expm1(t * jnp.log1p(base - 1.0))
''',
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
        <scalars>
        <scalars?>
        def one(<arrays>):
            <one>

        made = jax.tree.map(one, <trees>)
        leaves, tree = jax.tree.flatten(params)
        columns = zip(*tree.flatten_up_to(made), strict=True) if leaves else [[]] * <count>
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
        "GradientTransformation",
    )  # fmt: skip
    makes_function = True

    def __init__(self, rule: Rule, name: str, dtype: str, storage: Storage) -> None:
        super().__init__(rule, name, dtype, storage)
        self.states = field_names(self.program.states, ("step", "count", "index"))
        # JAX may have no wider dtype.
        self.real = self.precise = self.layout.compute

    def text(self) -> str:
        """The whole file."""
        function = _Function(DIALECT, self.program, self.layout)
        step = self._step(function)
        class_lines = filled(_TYPES_AND_MAKER, self.parts() | self._maker() | self._update(function))
        wide = ["", 'jax.config.update("jax_enable_x64", True)'] * (self.real == "float64")
        types = ["from typing import Any, NamedTuple", "", "import jax", "import jax.numpy as jnp"]
        return self.file(
            [*self.floats(step), *types, *wide], words_in([*step, *class_lines], _WORDS), step, class_lines
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
            "states": [f"{field}: Any" for field in self.states.values()], "first": self._rate("0", begun),
        }  # fmt: skip

    def _update(self, function: StageFunction) -> Parts:
        scalars = self.scalars("state.{}", _Printer)
        arrays = {b.name: self.states[b.name] for b in self.arrays}
        buffers = {"p": "p", "g": "g"} | arrays
        passed = self.passed(function, buffers, scalars.columns, f"jnp.asarray({{}}, jnp.{self.real})")
        updated = {s.buffer for s in self.program.stages[0].stores}
        changes = [
            f"jnp.asarray({f'new[{chr(34)}{b}{chr(34)}]' if b in updated else buffers[b]}, {buffers[b]}.dtype)"
            for b in ("p", *arrays)
        ]
        # Without states, it is a tuple too.
        changes[0] += f" - p{',' * (not arrays)}"
        one = [*call_lines("new = step", passed, ""), *call_lines("return ", changes, "")]
        results = ["updates", *arrays.values()]
        fields = ["step=state.step + 1", *(f"{x}={x}" for x in arrays.values())]
        fields += [f"{self.states[b]}={text}" for b, text in scalars.stores.items()]
        work = [*scalars.lines, *one, *scalars.stores.values()]
        return {
            "t": "t" * self.named("t", work), "rate": self._rate("state.step", work), "scalars": scalars.lines,
            "arrays": ", ".join(buffers.values()), "one": one, "count": str(len(results)),
            "trees": ", ".join(["params", "grads", *(f"state.{x}" for x in arrays.values())]),
            "results": ", ".join(results) + "," * (not arrays),
            "updated": call_lines("return updates, State", fields, ""),
        }  # fmt: skip

    def leaf(self, value: Node, state: str) -> str | None:
        """The text of a leaf, with the learning rate of this step for `lr`."""
        return "rate" if value.op is Op.HYPER and value.arg == "lr" else super().leaf(value, state)

    def _rate(self, steps: str, lines: Sequence[str]) -> list[str]:
        """The statement for the learning rate after `steps` steps, where lines name it."""
        lr = self.fields.get("lr")
        return [f"rate = {lr}({steps}) if callable({lr}) else {lr}"] * self.named("rate", lines)


files = JaxFile.files
