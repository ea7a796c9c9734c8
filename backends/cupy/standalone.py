"""A rule as one Python file for CuPy: a class whose step is one launch of CUDA C for all its arrays."""

from __future__ import annotations

from collections.abc import Mapping

from rulec.language.rule import Rule

from ..array_print import operations
from ..c.words import words_used
from ..numpy.standalone import DIALECT, WORDS
from ..python_standalone import OneFile, ScalarLines, call_lines, expression, indented, words_in
from .nvrtc import OPTIONS
from .plan import GIVEN, bound_lines, given_lines, kernel_name
from .stage import StageKernel
from .words import DIALECT as CUDA
from .words import parts_used, types_used

#: Names that the printed class uses.
_LOCALS = (
    "p", "g", "t", "state", "states", "grads", "fired", "np", "cupy", "math", "inf", "nan", "step", "count", "chunks",
    "bound", "given", "table", "columns", "device", "at", "number", "start", "new", "i", *WORDS,
)  # fmt: skip

_DTYPES = ("float32", "float64", "float16")

_CHUNKS = '''\
CHUNK = 8192  # elements that a block of threads takes
THREADS = 256


def chunks_of(sizes):
    """(array, start, stop, 0) for every chunk."""
    counts = [-(-size // CHUNK) for size in sizes]
    array = np.repeat(np.arange(len(sizes)), counts)
    start = CHUNK * np.concatenate([np.arange(count) for count in counts])
    stop = np.minimum(start + CHUNK, np.asarray(sizes)[array])
    return np.stack([array, start, stop, np.zeros_like(start)], axis=1)
'''


def files(rule: Rule, name: str, dtype: str, state_dtype: str) -> Mapping[str, str]:
    """The file, by its name."""
    return {f"{name}.py": CupyFile(rule, name, dtype, state_dtype).text()}


class CupyFile(OneFile):
    """The text of the file."""

    def __init__(self, rule: Rule, name: str, dtype: str, state_dtype: str) -> None:
        super().__init__(rule, name, dtype, state_dtype, "a file for CuPy", _LOCALS)
        for asked in (dtype, state_dtype or dtype):
            if asked not in _DTYPES:
                self.cannot(f"CuPy has no arrays of {asked}")
        ops = operations(DIALECT, "float64")
        leaf = self.leaf(lambda state: f'number("{state}")')
        self.scalars = ScalarLines(self, ops, leaf, {*_LOCALS, *self.fields.values()})

    def text(self) -> str:
        """The whole file."""
        own = [line for part in self._class() for line in (*part, "")][:-1]
        words = words_in("\n".join(own), WORDS)
        documentation = self.documentation()
        imports = ["import math", ""] * any("math." in x for x in words) + ["import cupy", "import numpy as np"]
        head = ['"""' + documentation[0], *documentation[1:], '"""', "", *imports]
        source = ["SOURCE = r'''", *self._source().rstrip("\n").split("\n"), "'''"]
        return "\n".join([*head, *words, "", "", *source, "", *_CHUNKS.split("\n"), "", *own]) + "\n"

    def _source(self) -> str:
        """The kernel, and what it calls."""
        stage = self.program.stages[0]
        kernels = StageKernel(self.program, self.layout, stage, kernel_name(self.program, 0), "element").texts()
        parts = parts_used("\n".join(kernels))
        words = words_used("\n".join([*parts, *kernels]), CUDA)
        types = types_used("\n".join([*words, *parts, *kernels]))
        return "\n\n".join(text.rstrip("\n") for text in ["\n".join(types), *words, *parts, *kernels]) + "\n"

    def _class(self) -> list[list[str]]:
        summary = " ".join((self.rule.summary or self.rule.name).split()).rstrip(".").replace('"', "'")
        head = [f"class {self.class_name}:", f'    """{summary}."""']
        return [head, *(indented(part) for part in (self._init(), self._begin(), self._step(), self._table()))]

    def _init(self) -> list[str]:
        wrong = f'raise TypeError("parameters must be contiguous CuPy arrays of {self.dtype}")'
        options = ", ".join(f'"{option}"' for option in OPTIONS)
        return [*call_lines("def __init__", ["self", "params", *self.keywords()], ":"), *indented([
            f'"""Arrays of {self.dtype} on one GPU, which steps update where they are."""', *self.checks(),
            *(f"self.{x} = {x}" for x in self.fields.values()), "self.params = list(params)", "for p in self.params:",
            f"    if not isinstance(p, cupy.ndarray) or p.dtype != np.{self.dtype} or not p.flags.c_contiguous:",
            f"        {wrong}", "self.states = [self._begin(p) for p in self.params]",
            f"image, _ = cupy.cuda.compiler.compile_using_nvrtc(SOURCE, ({options}))",
            "self.module = cupy.cuda.function.Module()", "self.module.load(image)",
            'self.kernel = self.module.get_function("step")',
        ])]  # fmt: skip

    def _begin(self) -> list[str]:
        ops, leaf = operations(DIALECT, "float64"), self.leaf(lambda _: "p.astype(np.float64)")
        made = []
        for b in self.program.states:
            assert b.init is not None
            text = expression(b.init, ops, leaf)
            if b.axes.elementwise:
                made.append(f'state["{b.name}"] = cupy.zeros(p.shape, np.{self.layout.dtype(b.name)})')
                made += [f'state["{b.name}"][...] = {text}'] if text != "0.0" else []
            else:
                made.append(f'state["{b.name}"] = float({text})')
        hyper = [f"{x} = self.{x}" for x in self.fields.values() if self.named(x, made)]
        return ["def _begin(self, p):", '    """The states before the first step."""',
                *indented([*hyper, 'state = {"step": 0}', *made, "return state"])]  # fmt: skip

    def _step(self) -> list[str]:
        bound = ", ".join("p.data.ptr" if n == "p" else f'state["{n}"].data.ptr' for n in bound_lines(self.program))
        assert (*GIVEN, *given_lines(self.program)) == ("row", "wide", "g")
        keep = [f'state["{b}"] = float(new["{b}"][i])' for b in self.scalars.stores]
        return ["def step(self, grads):", *indented([
            '"""One step, with a gradient for each parameter, or None for one that stays as it is."""',
            "fired = [x for x in zip(self.params, grads, self.states, strict=True) if x[1] is not None and x[0].size]",
            "for p, g, _ in fired:",
            "    if not isinstance(g, cupy.ndarray) or g.shape != p.shape or g.dtype != p.dtype "
            "or not g.flags.c_contiguous:",
            '        raise ValueError("a gradient must be a contiguous CuPy array like its parameter")',
            "if not fired:", "    return", "chunks = chunks_of([p.size for p, _, _ in fired])",
            f"bound = np.array([[{bound}] for p, _, state in fired], np.int64)",
            "given = np.array([[i, 0, g.data.ptr] for i, (_, g, _) in enumerate(fired)], np.int64)",
            "given[:, 1] = ((bound | given[:, 2:]) % 16 == 0).all(axis=1)  # read and written by 16 bytes",
            'with np.errstate(all="ignore"):',
            f"    {'table, new' if keep else 'table'} = self._table([state for _, _, state in fired])",
            "tables = [x.ravel().view(np.int64) for x in (chunks, bound, given, table)]",
            "device = cupy.asarray(np.concatenate(tables))", "at = [device.data.ptr]", "for x in tables[:-1]:",
            "    at.append(at[-1] + x.nbytes)", "self.kernel((len(chunks),), (THREADS,), (*at, 0, 0))",
            f"for {'i, (_, _, state)' if keep else '_, _, state'} in {'enumerate(fired)' if keep else 'fired'}:",
            '    state["step"] += 1', *indented(keep),
        ])]  # fmt: skip

    def _table(self) -> list[str]:
        scalars = self.scalars
        lines = [*scalars.lines, *scalars.columns, *scalars.stores.values()]
        hyper = [f"{x} = np.float64(self.{x})" for x in self.fields.values() if self.named(x, lines)]
        number = ["def number(name):", "    return np.array([state[name] for state in states], np.float64)", ""]
        count = 't = np.array([state["step"] + 1 for state in states], np.float64)'
        new = ", ".join(f'"{b}": np.broadcast_to({text}, len(states))' for b, text in scalars.stores.items())
        return ["def _table(self, states):", *indented([
            '"""What depends on hyper-parameters and the count of steps alone: a row of float64 for each array."""',
            *number * self.named("number", lines), *[count] * self.named("t", lines), *hyper, *scalars.lines,
            "columns = [", *(f"    {column}," for column in scalars.columns or ["0.0"]), "]",
            "table = np.stack([np.broadcast_to(np.float64(x), len(states)) for x in columns], axis=1)",
            f"return table, {{{new}}}" if new else "return table",
        ])]  # fmt: skip
