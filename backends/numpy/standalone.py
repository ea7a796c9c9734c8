"""A rule as one Python file for NumPy: a class that updates its arrays in place."""

from __future__ import annotations

from collections.abc import Mapping

from ..array_print import Dialect, StageFunction
from ..python_standalone import OneFile, Parts, call_lines, filled, words_in
from .print import copied

#: Functions with another spelling in NumPy, or without one.
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


#: A class over a list of arrays, in two texts: up to the checks of a parameter, and from its states to the step.
CLASS_HEAD = '''
class <class>:
    """<summary>"""

    <init>
        """Arrays of <arrays>, which steps update where they are."""
        <checks>
        <fields>
        self.params = list(params)
        for p in self.params:
'''
CLASS_STEP = '''
    def _begin(self, p):
        """The states before the first step."""
        <first>
        state = {"step": 0}
        <begun>
        return state

    def step(self, grads):
        """One step, with a gradient for each parameter, or None for one that stays as it is."""
'''

_CHECK = """\
            if p.dtype != np.<dtype>:
                raise TypeError(f"a parameter is {p.dtype}, and this file is for <dtype>")
        self.states = [self._begin(p) for p in self.params]
"""

_UPDATE = """\
        with np.errstate(all="ignore"):
            <reads>
            for p, g, state in zip(self.params, grads, self.states, strict=True):
                if g is None:
                    continue
                if g.shape != p.shape:
                    raise ValueError(f"a gradient of shape {g.shape} for a parameter of shape {p.shape}")
                <work>
                state["step"] += 1
"""


class NumpyFile(OneFile):
    """The text of the file."""

    form = "a file for NumPy"
    dialect, words = DIALECT, WORDS
    locals = ("states", "grads", "np", "math", "update")
    dtypes = ("float32", "float64")
    lacking = "NumPy has no arithmetic of its own for"

    def text(self) -> str:
        """The whole file."""
        function = StageFunction(DIALECT, self.program, self.layout, 0, copied(self.program, 0))
        update, class_lines = self._update(function), self._class(function)
        words = words_in([*update, *class_lines], WORDS)
        floats = self.floats(update)
        math = ["import math", ""] * self.named("math", words)
        return self.file([*math, *floats, *[""] * len(floats), "import numpy as np"], words, update, class_lines)

    def _update(self, function: StageFunction) -> list[str]:
        def ending(written: Mapping[str, str]) -> list[str]:
            return [f"{function.arrays[b]}[...] = {text}" for b, text in written.items()]

        summary = f"Update one array in place, in {self.layout.compute}. Scalars are 0-d."
        return function.source(summary, ending).replace("def step(", "def update(", 1).split("\n")

    def _class(self, function: StageFunction) -> list[str]:
        scalars = self.scalars('state["{}"]')
        arrays = {"p": "p", "g": "g"} | {b.name: f'state["{b.name}"]' for b in self.arrays}
        passed = self.passed(function, arrays, scalars.columns, f"np.{self.layout.compute}({{}})")
        stores = [f'state["{b}"] = {text}' for b, text in scalars.stores.items()]
        work = ['t = np.float64(state["step"] + 1)', *scalars.lines, *call_lines("update", passed, ""), *stores]
        begun = self.begun(
            "p.astype(np.float64)", 'state["{state}"] = np.full_like(p, {value}, dtype=np.{dtype})',
            'state["{state}"] = np.float64({value})',
        )  # fmt: skip
        read = "np.float64(self.{})"
        parts: Parts = {
            "arrays": f"dtype {self.dtype}", "begun": begun, "first": self.reads(read, begun),
            "reads": self.reads(read, work), "work": work,
        }  # fmt: skip
        return filled(CLASS_HEAD + _CHECK + CLASS_STEP + _UPDATE, self.parts() | parts)


files = NumpyFile.files
