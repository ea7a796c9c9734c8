"""A rule as one Python file for NumPy: a class whose step updates arrays in place."""

from __future__ import annotations

from collections.abc import Mapping

from rulec.language.node import Node, Op, is_boolean
from rulec.language.rule import Rule

from ..array_print import Dialect, StageFunction, operations
from ..python_standalone import OneFile, ScalarLines, call_lines, expression, indented, words_in

#: What NumPy spells in another way, or lacks.
WORDS = {
    "cbrt": "cbrt = np.cbrt\n",
    "power": "power = np.power\n",
    "erf": '''\
def erf(x):
    """The error function."""
    return np.vectorize(math.erf, otypes=[float])(x).astype(np.asarray(x).dtype)
''',
    "sigmoid": '''\
def sigmoid(x):
    """1/(1 + exp(-x)) without overflow: exp only sees what is not positive."""
    small = np.exp(-np.abs(x))
    return np.where(x < 0, small, 1) / (1 + small)
''',
}

DIALECT = Dialect(
    backend="numpy",
    module="np",
    parameters=(),
    imports=(),
    functions=dict.fromkeys(WORDS, ""),
    cast="{}.astype(np.{})",
    number="np.{1}({0})",
    copy="{}.copy()",
)

#: Names that the printed class uses.
_LOCALS = ("p", "g", "t", "state", "states", "grads", "np", "math", "inf", "nan", "step", "update", *WORDS)

_DTYPES = {"float32": "float32", "float64": "float64"}


def files(rule: Rule, name: str, dtype: str, state_dtype: str) -> Mapping[str, str]:
    """The file, by its name."""
    return {f"{name}.py": NumpyFile(rule, name, dtype, state_dtype).text()}


class NumpyFile(OneFile):
    """The text of the file."""

    def __init__(self, rule: Rule, name: str, dtype: str, state_dtype: str) -> None:
        super().__init__(rule, name, dtype, state_dtype, "a file for NumPy", _LOCALS)
        for asked in (dtype, state_dtype or dtype):
            if asked not in _DTYPES:
                self.cannot(f"NumPy has no arithmetic of its own for {asked}")
        stores = self.program.stages[0].stores
        written = {s.buffer for s in stores}
        # A value that is a buffer as it was must be read before that buffer is written.
        copied = [str(s.value.arg) for s in stores if s.value.op is Op.LOAD and s.value.arg in written]
        self.function = StageFunction(DIALECT, self.program, self.layout, 0, copied)

    def text(self) -> str:
        """The whole file."""
        update, own = self._update(), self._class()
        words = words_in("\n".join([*update, *own]), WORDS)
        floats = [x for x in ("inf", "nan") if self.named(x, update)]
        imports = ["import math", ""] * any("math." in x for x in words)
        imports += [f"from math import {', '.join(floats)}", ""] * bool(floats)
        head = ['"""' + self.documentation()[0], *self.documentation()[1:], '"""', "", *imports, "import numpy as np"]
        return "\n".join([*head, *words, "", "", *update, "", "", *own]) + "\n"

    def _update(self) -> list[str]:
        def ending(written: Mapping[str, str]) -> list[str]:
            return [f"{self.function.arrays[b]}[...] = {text}" for b, text in written.items()]

        summary = f"Update one array in place, in {self.layout.compute}. Scalars are 0-d."
        return self.function.source(summary, ending).replace("def step(", "def update(", 1).split("\n")

    def _class(self) -> list[str]:
        fields = [self.fields[key] for key in self.hyper]
        head = call_lines("def __init__", ["self", "params", *self.keywords()], ":")
        init = [
            *head, *indented(['"""Arrays of dtype DTYPE, which steps update where they are."""', *self.checks(),
            *(f"self.{x} = {x}" for x in fields), "self.params = list(params)", "for p in self.params:",
            f"    if p.dtype != np.{self.dtype}:",
            f'        raise TypeError(f"a parameter is {{p.dtype}}, and this file is for {self.dtype}")',
            "self.states = [self._begin(p) for p in self.params]"]),
        ]  # fmt: skip
        init = [x.replace("DTYPE", self.dtype) for x in init]
        return [
            f"class {self.class_name}:", f'    """{self._summary()}"""', "", *indented(init), "",
            *indented(self._begin()), "", *indented(self._step()),
        ]  # fmt: skip

    def _summary(self) -> str:
        return " ".join((self.rule.summary or self.rule.name).split()).rstrip(".").replace('"', "'") + "."

    def _hyper(self, lines: list[str]) -> list[str]:
        """The hyper-parameters that lines name, as float64."""
        return [f"{x} = np.float64(self.{x})" for x in self.fields.values() if self.named(x, lines)]

    def _begin(self) -> list[str]:
        ops = operations(DIALECT, "float64")
        leaf = self.leaf(lambda state: "p.astype(np.float64)")
        made = []
        for b in self.program.states:
            assert b.init is not None
            text = expression(b.init, ops, leaf)
            if b.axes.elementwise:
                made.append(f'state["{b.name}"] = np.full_like(p, {text}, dtype=np.{self.layout.dtype(b.name)})')
            else:
                made.append(f'state["{b.name}"] = np.float64({text})')
        return ["def _begin(self, p):", '    """The states before the first step."""',
                *indented([*self._hyper(made), 'state = {"step": 0}', *made, "return state"])]  # fmt: skip

    def _step(self) -> list[str]:
        ops = operations(DIALECT, "float64")
        taken = {*_LOCALS, *self.fields.values()}
        scalars = ScalarLines(self, ops, self.leaf(lambda state: f'state["{state}"]'), taken)
        given = {"p": "p", "g": "g"} | {b.name: f'state["{b.name}"]' for b in self.arrays}
        numbers = [self._number(scalars.columns[i], self.program.columns[i].value) for i in self.function.columns()]
        call = call_lines("update", [*(given[b] for b in self.function.buffers), *numbers], "")
        stores = [f'state["{b}"] = {text}' for b, text in scalars.stores.items()]
        work = ['t = np.float64(state["step"] + 1)', *scalars.lines, *call, *stores]
        hyper = self._hyper(work)
        body = [
            '"""One step, with a gradient for each parameter, or None for one that stays as it is."""',
            'with np.errstate(all="ignore"):', *indented([*hyper,
            "for p, g, state in zip(self.params, grads, self.states, strict=True):",
            "    if g is None:", "        continue", "    if g.shape != p.shape:",
            '        raise ValueError(f"a gradient of shape {g.shape} for a parameter of shape {p.shape}")',
            *indented(work), '    state["step"] += 1']),
        ]  # fmt: skip
        return ["def step(self, grads):", *indented(body)]

    def _number(self, text: str, value: Node) -> str:
        return text if is_boolean(value) else f"np.{self.layout.compute}({text})"
