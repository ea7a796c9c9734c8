"""A rule as one Python file for NumPy: a class that updates its arrays in place."""

from __future__ import annotations

from collections.abc import Mapping

from rulec.backend.printer import unique_name
from rulec.compiler.layout import scale_name

from ..common.array_codes import bit_words, code_functions
from ..common.array_print import Dialect, StageFunction
from ..common.python_standalone import OneFile, Parts, call_lines, filled, words_in
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
    "from_bfloat16": '''\
def from_bfloat16(bits):
    """float32 numbers of the bits of bfloat16, which are uint16."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
''',
    "to_bfloat16": '''\
def to_bfloat16(x):
    """The bits of bfloat16 numbers nearest to float32 numbers, ties to even."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    even = bits + (np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1)))
    nan = bits & np.uint32(0x80000000) | np.uint32(0x7FC00000)
    return (np.where(np.isnan(x), nan, even) >> np.uint32(16)).astype(np.uint16)
''',
    "bits_of": '''\
def bits_of(x, what):
    """The bits of an array of bfloat16, in the same memory: of ml_dtypes' type, or uint16 already."""
    if x.dtype != np.uint16 and x.dtype.name != "bfloat16":
        raise TypeError(f"{what} is {x.dtype}, and this file is for bfloat16: of ml_dtypes, or its bits in uint16")
    return x.view(np.uint16)
''',
    **bit_words("np"),
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
    prints_bits=True,
)


#: A class over a list of arrays, in two texts: up to the checks of a parameter, and from its states to the step.
CLASS_HEAD = '''
class <class>:
    """<summary>"""

    <init>
        """Arrays of <arrays>, which steps update where they are."""
        <checks>
        <fields>
        self.params = <params>
        <native?>for p in self.params:
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
            <native?>if p.dtype != np.<dtype>:
            <native?>    raise TypeError(f"a parameter is {p.dtype}, and this file is for <dtype>")
        self.states = [self._begin(p) for p in self.params]
"""

_UPDATE = """\
        with np.errstate(all="ignore"):
            <reads>
            <seeded?>seed_low, seed_high = np.float64(self.seed % 65536), np.float64(self.seed // 65536)
            for <each>:
                if g is None:
                    continue
                <bits?>g = bits_of(g, "a gradient")
                <seeded?>tensor_number = np.float64(place % 2**24)
                if g.shape != p.shape:
                    raise ValueError(f"a gradient of shape {g.shape} for a parameter of shape {p.shape}")
                <work>
                state["step"] += 1
"""


class _Function(StageFunction):
    """The function of the one stage; numbers in bfloat16 are read of their bits."""

    def _load(self, name: str) -> str:
        if name in self.vectors or self.layout.dtype(name) != "bfloat16":
            return super()._load(name)
        return f"from_bfloat16({self.arrays[name]})"

    def stored(self, buffer: str, text: str) -> str:
        """The statement that stores a value."""
        value = f"to_bfloat16({text})" if self.layout.dtype(buffer) == "bfloat16" else text
        return f"{self.arrays[buffer]}[...] = {value}"


class NumpyFile(OneFile):
    """The text of the file."""

    form = "a file for NumPy"
    dialect, words = DIALECT, WORDS
    locals = ("states", "grads", "np", "math", "update", "place", "params")

    def text(self) -> str:
        """The whole file."""
        function = _Function(DIALECT, self.program, self.layout, 0, copied(self.program, 0))
        update, class_lines = self._update(function), self._class(function)
        words, floats = words_in([*update, *class_lines], WORDS), self.floats(update)
        codes = [code_functions(name, form, "np", flushes=False) for name, form in self.codes.values()]
        math = ["import math", ""] * self.named("math", [*words, *(line for lines in codes for line in lines)])
        imports = [*math, *floats, *[""] * len(floats), "import numpy as np"]
        return self.file(imports, words, *codes, update, class_lines)

    def _update(self, function: _Function) -> list[str]:
        def ending(written: Mapping[str, str]) -> list[str]:
            return [function.stored(b, text) for b, text in written.items()]

        summary = f"Update one array in place, in {self.layout.compute}. Scalars are 0-d."
        return function.source(summary, ending).replace("def step(", "def update(", 1).split("\n")

    def _class(self, function: _Function) -> list[str]:
        scalars = self.scalars('state["{}"]')
        taken = {*self.reserved, *self.fields.values(), *function.values.values()}
        decoded = {b: unique_name(f"{name}_decoded", taken) for b, (name, _) in self.codes.items()}
        arrays = {"p": "p", "g": "g"} | {b.name: f'state["{b.name}"]' for b in self.arrays} | decoded
        passed = self.passed(function, arrays, scalars.columns, f"np.{self.layout.compute}({{}})")
        stores = [f'state["{b}"] = {text}' for b, text in scalars.stores.items()]
        before = [f"{decoded[b]} = decode_{name}({self._coded(b)}, p.shape)" for b, (name, _) in self.codes.items()]
        after = [f"{self._coded(b)} = encode_{name}({decoded[b]})" for b, (name, _) in self.codes.items()]
        work = ['t = np.float64(state["step"] + 1)', *scalars.lines, *before]
        work += [*call_lines("update", passed, ""), *after, *stores]
        begun, read = self._begun(), "np.float64(self.{})"
        parts: Parts = {
            "arrays": f"dtype {self.dtype}", "begun": begun, "first": self.reads(read, begun),
            "reads": self.reads(read, work), "work": work,
            "each": f"{'place, (p, g, state)' if self.seeded else 'p, g, state'} in {self._tensors()}",
            "params": "list(params)", "bits": "", "native": "yes",
        }  # fmt: skip
        if self.dtype == "bfloat16":
            parts |= {"params": '[bits_of(p, "a parameter") for p in params]', "bits": "yes", "native": ""}
        return filled(CLASS_HEAD + _CHECK + CLASS_STEP + _UPDATE, self.parts() | parts)

    def _tensors(self) -> str:
        every = "zip(self.params, grads, self.states, strict=True)"
        return f"enumerate({every})" if self.seeded else every

    @staticmethod
    def _coded(state: str) -> str:
        """The codes and the scales of a state."""
        return f'state["{state}"], state["{scale_name(state)}"]'

    def _begun(self) -> list[str]:
        """The statements for the states before the first step."""
        param = "from_bfloat16(p)" if self.dtype == "bfloat16" else "p"
        return self.begun(
            f"{param}.astype(np.float64)", 'state["{state}"] = np.full_like(p, {value}, dtype=np.{dtype})',
            'state["{state}"] = np.float64({value})',
        )  # fmt: skip

    def first(self, state: str, value: str, form: str) -> str:
        """As of all files; codes are encoded, and numbers in bfloat16 are bits."""
        if state in self.codes:
            return f"{self._coded(state)} = encode_{self.codes[state][0]}(np.full(p.shape, {value}, np.float32))"
        if self.layout.dtype(state) == "bfloat16":
            return f'state["{state}"] = np.full_like(p, to_bfloat16({value}), dtype=np.uint16)'
        return form.format(state=state, value=value, dtype=self.layout.dtype(state))


files = NumpyFile.files
