"""A rule as one Python file for JAX: a function that gives `(init, update)` as optax's do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rulec.language.node import Node, Op, is_boolean, node
from rulec.language.rule import Rule

from ..array_print import Dialect, StageFunction, operations
from ..python_standalone import OneFile, ScalarLines, call_lines, expression, field_names, indented, words_in
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

#: Names that the printed functions use.
_LOCALS = (
    "p", "g", "t", "state", "grads", "params", "jnp", "jax", "inf", "nan", "step", "init", "update", "one", "tree",
    "real", "rate", "State", "NamedTuple", "Any", "GradientTransformation", *_WORDS,
)  # fmt: skip


def files(rule: Rule, name: str, dtype: str, state_dtype: str) -> Mapping[str, str]:
    """The file, by its name."""
    return {f"{name}.py": JaxFile(rule, name, dtype, state_dtype).text()}


class _Function(StageFunction):
    """The function of the one stage."""

    printer_kind = SumPrinter


class JaxFile(OneFile):
    """The text of the file."""

    def __init__(self, rule: Rule, name: str, dtype: str, state_dtype: str) -> None:
        super().__init__(rule, name, dtype, state_dtype, "a file for JAX", (*_LOCALS, name))
        self.function = _Function(DIALECT, self.program, self.layout)
        self.states = field_names(self.program.states, ("step", "count", "index"))
        self.real = self.layout.compute

    def text(self) -> str:
        """The whole file."""
        step, own = self._step(), [*self._types(), "", "", *self._maker()]
        words = words_in("\n".join([*step, *own]), _WORDS)
        floats = [x for x in ("inf", "nan") if self.named(x, step)]
        imports = [f"from math import {', '.join(floats)}"] * bool(floats) + ["from typing import Any, NamedTuple", ""]
        documentation = self.documentation()
        head = [
            '"""' + documentation[0],
            *documentation[1:],
            '"""',
            "",
            *imports,
            "import jax",
            "import jax.numpy as jnp",
        ]
        if self.real == "float64":
            head += ["", 'jax.config.update("jax_enable_x64", True)']
        return "\n".join([*head, *words, "", "", *step, "", "", *own]) + "\n"

    def _step(self) -> list[str]:
        def returns(written: Mapping[str, str]) -> list[str]:
            return [f"return {{{', '.join(f'{chr(34)}{b}{chr(34)}: {text}' for b, text in written.items())}}}"]

        summary = f"New values of one array and its states, in {self.real}. Scalars are 0-d."
        return self.function.source(summary, returns).split("\n")

    def _types(self) -> list[str]:
        fields = [f"{field}: Any" for field in self.states.values()]
        return [
            "class State(NamedTuple):",
            '    """The steps so far, and the states: trees like the parameters, and numbers."""', "",
            "    step: Any", *indented(fields), "", "", "class GradientTransformation(NamedTuple):",
            '    """What optax has under this name: `init(params)` and `update(grads, state, params)`."""', "",
            "    init: Any", "    update: Any",
        ]  # fmt: skip

    def _maker(self) -> list[str]:
        summary = " ".join((self.rule.summary or self.rule.name).split()).rstrip(".").replace('"', "'")
        about = [
            f'"""{summary}.', "",
            f"`update` gives what is to be added to the parameters, which are {self.dtype}, and the new state.",
            *["`lr` is a number, or a function of the number of steps before this one."] * ("lr" in self.fields), '"""',
        ]  # fmt: skip
        number = f"not callable({self.fields.get('lr')}) and "
        body = [*about, *self.checks({"lr": number}), "", *self._init(), "", *self._update(), "",
                "return GradientTransformation(init, update)"]  # fmt: skip
        return [*call_lines(f"def {self.name}", self.keywords(), ":"), *indented(body)]

    def _init(self) -> list[str]:
        ops = operations(DIALECT, self.real)
        leaf = self._rated(self.leaf(lambda _: f"p.astype(jnp.{self.real})"))
        made = []
        for b in self.program.states:
            assert b.init is not None
            text = expression(b.init, ops, leaf)
            if b.axes.elementwise:
                dtype = self.layout.dtype(b.name)
                value = f"jnp.full_like(p, {text}, dtype=jnp.{dtype})"
                made.append(f"{self.states[b.name]}=jax.tree.map(lambda p: {value}, params),")
            else:
                made.append(f"{self.states[b.name]}=jnp.asarray({text}, jnp.{self.real}),")
        return [
            "def init(params):",
            *indented(
                [*self._rate("0", made), "return State(", "    step=jnp.zeros((), jnp.int32),", *indented(made), ")"]
            ),
        ]

    def _update(self) -> list[str]:
        taken = {*_LOCALS, *self.fields.values()}
        ops = operations(DIALECT, self.real)
        leaf = self._rated(self.leaf(lambda state: f"state.{self.states[state]}"))
        scalars = _Scalars(self, ops, leaf, taken)
        arrays = [b.name for b in self.arrays]
        numbers = [self._number(scalars.columns[i], self.program.columns[i].value) for i in self.function.columns()]
        given = {"p": "p", "g": "g"} | {b: f"{self.states[b]}" for b in arrays}
        call = call_lines("new = step", [*(given[b] for b in self.function.buffers), *numbers], "")
        updated = {s.buffer for s in self.program.stages[0].stores}
        results = [
            f"jnp.asarray({f'new[{chr(34)}{b}{chr(34)}]' if b in updated else given[b]}, {given[b]}.dtype)"
            for b in ("p", *arrays)
        ]
        trees = ["params", "grads", *(f"state.{self.states[b]}" for b in arrays)]
        # Without states, too, it is a tuple.
        changes = [f"{results[0]} - p{',' * (not arrays)}", *results[1:]]
        one = [*call, *call_lines("return ", changes, "")]
        parts = ["updates", *(self.states[b] for b in arrays)]
        fields = ["step=state.step + 1", *(f"{self.states[b]}={self.states[b]}" for b in arrays)]
        fields += [f"{self.states[b]}={text}" for b, text in scalars.stores.items()]
        work = [*scalars.lines, *one, *scalars.stores.values()]
        count = [f"t = (state.step + 1).astype(jnp.{self.real})"] * self.named("t", work)
        return ["def update(grads, state, params):", *indented([
            *count, *self._rate("state.step", work), *scalars.lines, *[""] * bool(scalars.lines),
            f"def one({', '.join(['p', 'g', *(self.states[b] for b in arrays)])}):", *indented(one), "",
            f"made = jax.tree.map(one, {', '.join(trees)})", "leaves, tree = jax.tree.flatten(params)",
            f"columns = zip(*tree.flatten_up_to(made), strict=True) if leaves else [[]] * {len(parts)}",
            f"{', '.join(parts)}{',' if len(parts) == 1 else ''} = (tree.unflatten(column) for column in columns)",
            *call_lines("return updates, State", fields, ""),
        ])]  # fmt: skip

    @staticmethod
    def _rated(leaf: Callable[[Node], str]) -> Callable[[Node], str]:
        """The same texts, with the learning rate of this step for `lr`."""
        return lambda value: "rate" if value.op is Op.HYPER and value.arg == "lr" else leaf(value)

    def _rate(self, steps: str, lines: Sequence[str]) -> list[str]:
        """The statement that finds the learning rate after so many steps, where lines name it."""
        lr = self.fields.get("lr")
        return [f"rate = {lr}({steps}) if callable({lr}) else {lr}"] * self.named("rate", lines)

    def _number(self, text: str, value: Node) -> str:
        return text if is_boolean(value) else f"jnp.asarray({text}, jnp.{self.real})"


class _Scalars(ScalarLines):
    """The scalar program in the precision that JAX has: what cancels in it is computed in another way."""

    def text(self, value: Node, defining: bool = False) -> str:
        if value.op is Op.SUB and (defining or value not in self.names):
            one, power = value.args
            if one.op is Op.CONST and one.arg == 1.0 and power.op is Op.POW and power.args[1] is node(Op.STEP):
                return f"one_minus_power({self.text(power.args[0])}, {self.text(power.args[1])})"
        return super().text(value, defining)
