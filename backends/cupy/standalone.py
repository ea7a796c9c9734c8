"""A rule as one Python file for CuPy: a class with one launch of CUDA C in a step, for all its arrays."""

from __future__ import annotations

import numpy as np

from rulec.compiler.layout import scale_name
from rulec.formats import encode
from rulec.language.expr.node import Op, node

from ..common.python_standalone import OneFile, Parts, filled, words_in
from ..numpy.standalone import CLASS_HEAD, CLASS_STEP, DIALECT, WORDS
from .coded import CodedKernel, bound_in, decodes
from .format_words import format_functions
from .nvrtc import OPTIONS
from .plan import GIVEN, THREADS, given_lines, kernel_name
from .print import with_words
from .stage import StageKernel

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


_CHECK = """\
            if not isinstance(p, cupy.ndarray) or p.dtype != np.<stored> or not p.flags.c_contiguous:
                raise TypeError("parameters must be contiguous CuPy arrays of <asked>")
        self.states = [self._begin(p) for p in self.params]
        image, _ = cupy.cuda.compiler.compile_using_nvrtc(SOURCE, (<options>))
        self.module = cupy.cuda.function.Module()
        self.module.load(image)
        self.kernel = self.module.get_function("step")
"""

_UPDATE = '''\
        fired = [x for x in zip(self.params, grads, self.states, strict=True) if x[1] is not None and x[0].size]
        for p, g, _ in fired:
            if not isinstance(g, cupy.ndarray) or g.shape != p.shape or g.dtype != p.dtype or not g.flags.c_contiguous:
                raise ValueError("a gradient must be a contiguous CuPy array like its parameter")
        if not fired:
            return
        chunks = chunks_of([p.size for p, _, _ in fired])
        bound = np.array([[<bound>] for p, _, state in fired], np.int64)
        per_call = np.array([[i, 0, g.data.ptr] for i, (_, g, _) in enumerate(fired)], np.int64)
        per_call[:, 1] = ((bound | per_call[:, 2:]) % 16 == 0).all(axis=1)  # read and written by 16 bytes
        with np.errstate(all="ignore"):
            table<and_new> = self._table([state for _, _, state in fired])
        tables = [x.ravel().view(np.int64) for x in (chunks, bound, per_call, table)]
        device = cupy.asarray(np.concatenate(tables))
        at = [device.data.ptr]
        for x in tables[:-1]:
            at.append(at[-1] + x.nbytes)
        self.kernel((len(chunks),), (THREADS,), (*at, 0, 0))
        for <each>:
            state["step"] += 1
            <keep>

    def _table(self, states):
        """What depends on hyper-parameters and the count of steps alone: a row of float64 for each array."""
        <number?>def number(name):
        <number?>    return np.array([state[name] for state in states], np.float64)
        <number?>
        <seeded?>seed_low, seed_high = np.float64(self.seed % 65536), np.float64(self.seed // 65536)
        <seeded?>places = {id(state): place % 2**24 for place, state in enumerate(self.states)}
        <seeded?>tensor_number = np.array([places[id(state)] for state in states], np.float64)
        <t?>t = np.array([state["step"] + 1 for state in states], np.float64)
        <reads>
        <scalars>
        columns = [
            <columns>
        ]
        table = np.stack([np.broadcast_to(np.float64(x), len(states)) for x in columns], axis=1)
        return table<new>
'''


class CupyFile(OneFile):
    """The text of the file."""

    form = "a file for CuPy"
    dialect, words = DIALECT, WORDS
    locals = (
        "states", "grads", "fired", "np", "cupy", "math", "count", "chunks", "bound", "per_call", "table", "columns",
        "device", "at", "number", "start", "new", "i", "places", "place",
    )  # fmt: skip

    def text(self) -> str:
        """The whole file."""
        table = self.table("np.float64(self.{})", "np.broadcast_to({}, len(states))")
        columns: Parts = {"columns": table["columns"] or ["0.0,"]}
        template = CLASS_HEAD + _CHECK + CLASS_STEP + _UPDATE
        class_lines = filled(template, self.parts() | self._step() | table | columns)
        words = words_in(class_lines, WORDS)
        imports = [*["import math", ""] * self.named("math", words), "import cupy", "import numpy as np"]
        source = ["SOURCE = r'''", *self._source().rstrip("\n").split("\n"), "'''", ""]
        return self.file(imports, words, [*source, *_CHUNKS.rstrip().split("\n")], class_lines)

    def _source(self) -> str:
        """The kernel, after the types and functions that it uses."""
        stage, formats = self.program.stages[0], [form for _, form in self.layout.formats]
        if not decodes(self.program, self.layout, THREADS):
            short = min(formats, key=lambda form: form.block)
            self.cannot(f"a thread takes more neighbouring elements than a block of {short.text} has")
        kind = CodedKernel if formats else StageKernel
        kernels = kind(self.program, self.layout, stage, kernel_name(self.program, 0), "element").texts()
        return with_words([*format_functions(formats, "\n".join(kernels)), *kernels])

    def _step(self) -> Parts:
        lines = bound_in(self.program, self.layout)
        bound = ["p.data.ptr" if n == "p" else f'state["{n}"].data.ptr' for n in lines]
        assert (*GIVEN, *given_lines(self.program)) == ("row", "wide", "g")
        array = 'state["{state}"] = cupy.zeros(p.shape, np.{dtype})\nstate["{state}"][...] = {value}'
        bits = self.dtype == "bfloat16"
        param = "(p.astype(np.uint32) << 16).view(np.float32)" if bits else "p"
        begun = self.begun(f"{param}.astype(np.float64)", array, 'state["{state}"] = float({value})')
        begun = [line for line in begun if not line.endswith(("[...] = 0.0", "[...] = 0"))]
        stores = [s.buffer for s in self.program.scalars.stores]
        return {
            "params": "list(params)", "native": "yes", "stored": "uint16" if bits else self.dtype,
            "asked": "uint16, the bits of bfloat16" if bits else self.dtype,
            "arrays": f"{self.dtype}{', as its bits in uint16,' * bits} on one GPU",
            "bound": ", ".join(bound), "begun": begun,
            "options": ", ".join(f'"{option}"' for option in OPTIONS),
            "first": self.reads("self.{}", begun), "and_new": ", new" * bool(stores),
            "each": "i, (_, _, state) in enumerate(fired)" if stores else "_, _, state in fired",
            "keep": [f'state["{b}"] = float(new["{b}"][i])' for b in stores],
        }  # fmt: skip

    def first(self, state: str, value: str, form: str) -> str:
        """As of all files; codes and numbers in bfloat16 are the bits of one number, or of the parameter."""
        coded, dtype = self.layout.format(state), self.layout.dtype(state)
        if coded is None and dtype != "bfloat16":
            return super().first(state, value, form)
        init = next(b.init for b in self.program.states if b.name == state)
        if coded is None and init is node(Op.LOAD, "p") and self.dtype == "bfloat16":
            return f'state["{state}"] = p.copy()'
        if init is None or init.op is not Op.CONST:
            self.cannot(f"its state {state}, in {coded.text if coded else dtype}, begins with more than a number")
            raise AssertionError
        number = np.full(1, init.arg, np.float32)[0]
        if coded is None:
            bits = int(number.view(np.uint32))
            return form.format(state=state, value=bits + 0x7FFF + (bits >> 16 & 1) >> 16, dtype="uint16")
        codes, scales = encode(coded, np.full(coded.block, number))
        size = "p.shape" if coded.bits == 8 else "(p.size + 1) // 2"
        scale = form.format(state=scale_name(state), value=repr(float(scales[0])), dtype="float32")
        return "\n".join([
            form.format(state=state, value=int(codes[0]), dtype=coded.code_dtype).replace("p.shape", size),
            scale.replace("p.shape", f"-(-p.size // {coded.block})"),
        ])  # fmt: skip


files = CupyFile.files
