"""A rule as one Python file for PyTorch: an optimizer with one launch of a fused Triton kernel for a step."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import numpy as np

from rulec.compiler.ir import Buffer
from rulec.compiler.layout import scale_name
from rulec.formats import encode
from rulec.language.expr.node import Op

from ..common.array_print import Dialect
from ..common.python_standalone import OneFile, Parts, call_lines, filled, number, words_in
from .blocks import Block
from .coded import CodedStage, halved, lengthened
from .flat import FlatStage
from .format_words import format_functions, words
from .words import words_used

#: Functions on the host that torch lacks. The kernels' own functions have other names.
_WORDS = {
    "cube_root": '''\
def cube_root(x):
    """The cube root, with the sign of x."""
    return torch.sign(x) * torch.abs(x) ** (1 / 3)
''',
}

DIALECT = Dialect(
    backend="triton",
    module="torch",
    parameters=(),
    imports=(),
    functions=dict.fromkeys(_WORDS, ""),
    cast="{}.to(torch.{})",
    number="torch.tensor({0}, dtype=torch.{1})",
    copy="{}",
    others={Op.CBRT: "cube_root", Op.POW: "torch.pow", Op.ERF: "torch.erf", Op.SIGMOID: "torch.sigmoid"},
)

_TABLES = '''\
BLOCK = <block>  # elements that a program of the grid takes at a time
WARPS = <warps>  # warps of a program
PROGRAMS = 65536  # programs for one tensor, at most


def chunks_of(sizes):
    """(tensor, which of its chunks) for every chunk, and for each tensor its size and the blocks in a chunk."""
    blocks = [-(-size // BLOCK) for size in sizes]
    spans = [max(1, -(-count // PROGRAMS)) for count in blocks]
    counts = [-(-count // span) for count, span in zip(blocks, spans, strict=True)]
    pairs = [torch.stack([torch.full((n,), i), torch.arange(n)], dim=1) for i, n in enumerate(counts)]
    return torch.cat(pairs).int(), list(zip(sizes, spans, strict=True))
'''

_LIKE = '''

def like(p, value, dtype):
    """A state of the shape of a parameter, and its first value."""
    return torch.empty_like(p, dtype=dtype).copy_(torch.as_tensor(value))
'''


_CLASS = '''
class <class>(torch.optim.Optimizer):
    """<summary> Parameters are <dtype>, contiguous, on a GPU."""

    <init>
        <checks>
        <defaults>
        super().__init__(params, defaults)
        self.known = {}  # tables on the device, by where tensors lie
        <coded?>self.words = {}  # tables of codes on each device

    def __setstate__(self, state):
        self._check(state["state"], state["param_groups"])
        super().__setstate__(state)
        self.known = {}
        <coded?>self.words = {}

    def _check(self, states, groups):
        """ValueError for what another optimizer saved, before anything is loaded."""
        for name in getattr(self, "defaults", {}):
            if any(name not in group for group in groups):
                raise ValueError(f"a saved group has no {name}: load what this class saved")
        for p, saved in states.items():
            if not isinstance(p, torch.Tensor) or not saved:
                continue
            sizes = {
                <sizes>
            }
            for name, size in sizes.items():
                if name not in saved:
                    raise ValueError(f"saved states are {', '.join(saved)}, without {name}: load what this class saved")
                count = torch.as_tensor(saved[name]).numel()
                if count != size:
                    raise ValueError(f"{name} has {count} saved numbers for {size} here: load what this class saved")

    <others?>def load_state_dict(self, state_dict):
    <others?>    """States keep their own dtypes, which torch would make the parameter's."""
    <others?>    super().load_state_dict(state_dict)
    <others?>    places = [i for group in state_dict["param_groups"] for i in group["params"]]
    <others?>    params = [p for group in self.param_groups for p in group["params"]]
    <others?>    for place, p in zip(places, params, strict=True):
    <others?>        if place in state_dict["state"]:
    <others?>            saved = state_dict["state"][place]
    <others?>            for name, dtype in {<others>}.items():
    <others?>                self.state[p][name] = saved[name].to(p.device, dtype, copy=True)
    <others?>
    @torch.no_grad()
    def step(self, closure=None):
        """One step of all parameters that have a gradient: one launch for each device."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        fired = {}
        <seeded?>every = (p for group in self.param_groups for p in group["params"])
        <seeded?>self.numbers = {p: i for i, p in enumerate(every)}
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._begin(p, group)
                    fired.setdefault(p.device, []).append((p, p.grad.resolve_neg().contiguous(), group))
        for tensors in fired.values():
            self._update(tensors)
        return loss

    def _begin(self, p, group):
        """Checks a parameter and its gradient, and makes the states before the first step."""
        if p.dtype != torch.<dtype> or p.grad.dtype != p.dtype or p.grad.is_sparse:
            raise TypeError("parameters and gradients must be <dtype>, and dense")
        if not p.is_contiguous() or p.is_neg():
            raise ValueError("parameters must be contiguous, and no negative views")
        if p.device.type in ("cpu", "meta") and isinstance(stage_0, triton.JITFunction):
            where = "in main memory" if p.device.type == "cpu" else "on the meta device"
            raise ValueError(f"parameters must be on a GPU, and one is {where}: move the model there before")
        state = self.state[p]
        if not state:
            <first>
            <begun>
            state["step"] = torch.tensor(0.0)

    <coded?>def _tables(self, device):
    <coded?>    """The tables of codes on a device, by state."""
    <coded?>    if device not in self.words:
    <coded?>        kind = {"dtype": torch.float32, "device": device}
    <coded?>        self.words[device] = {name: torch.tensor(numbers, **kind) for name, numbers in WORDS.items()}
    <coded?>    return self.words[device]
    <coded?>
    def _update(self, tensors):
        """One launch for tensors of one device: (parameter, gradient, group) each."""
        tensors = [x for x in tensors if x[0].numel()]
        if not tensors:
            return
        p = tensors[0][0]
        <coded?>words = self._tables(p.device)
        places = tuple(
            (<places>)
            for p, _, _ in tensors
        )
        if places not in self.known:
            chunks, cuts = chunks_of([place[-1] for place in places])
            lines = [(*cut, *place[:-1]) for cut, place in zip(cuts, places, strict=True)]
            self.known = {places: (chunks.to(p.device), torch.tensor(lines).to(p.device))}
        chunks, known = self.known[places]
        table<and_new> = self._table(tensors)
        moving = torch.tensor([(i, g.data_ptr()) for i, (_, g, _) in enumerate(tensors)])
        moving, table = moving.to(p.device), table.to(p.device)
        with torch.cuda.device_of(p):
            <launch>
        for <each>:
            torch.autograd.graph.increment_version(p)
            self.state[p]["step"] += 1
            <keep>

    def _table(self, tensors):
        """What depends on hyper-parameters and the count of steps alone: a row of float64 for each tensor."""
        <number?>def number(name):
        <number?>    return torch.tensor([float(self.state[p][name]) for p, _, _ in tensors], dtype=torch.float64)
        <number?>
        <seeded?>seeds = torch.tensor([group["seed"] for _, _, group in tensors])
        <seeded?>seed_low, seed_high = (seeds % 65536).double(), (seeds // 65536).double()
        <seeded?>tensor_number = torch.tensor([float(self.numbers[p] % 2**24) for p, _, _ in tensors]).double()
        <t?>t = torch.tensor([float(self.state[p]["step"]) + 1 for p, _, _ in tensors], dtype=torch.float64)
        <reads>
        <scalars>
        <columns?>columns = [
            <columns>
        <columns?>]
        table = <stacked>
        return table<new>
'''

_STACKED = "torch.stack([torch.as_tensor(x, dtype=torch.float64).expand(len(tensors)) for x in columns], dim=1)"


class TritonFile(OneFile):
    """The text of the file."""

    form = "a file for Triton"
    dialect, words = DIALECT, _WORDS
    locals = (
        "states", "torch", "triton", "tl", "closure", "loss", "group", "tensors", "table", "rows", "known", "moving",
        "chunks", "counts", "key", "value", "Optimizer", "real", "seeds", "every",
    )  # fmt: skip

    def text(self) -> str:
        """The whole file."""
        if "step" in self.states:
            self.cannot("it has a state called step, as torch calls the count of steps")
        stage = (CodedStage if self.layout.formats else FlatStage)(self.program, self.layout, 0)
        kernels = ["\n".join(lines) for lines in stage.functions()]
        codes = format_functions([form for _, form in self.layout.formats], "\n".join(kernels))
        block = Block(1024, 128)
        block = lengthened(halved(block), self.layout.formats) if self.layout.formats else block
        tables = "\n".join(filled(_TABLES, {"block": str(block.elements), "warps": str(block.threads // 32)}))
        parts = [*words_used("\n".join(kernels)), *codes, *kernels, tables, *self._words(), *[_LIKE] * self._has_plain]
        table = self.table('torch.tensor([group["{}"] for _, _, group in tensors], dtype=torch.float64)')
        stacked = _STACKED if table["columns"] else "torch.zeros(len(tensors), 1, dtype=torch.float64)"
        class_lines = filled(_CLASS, self.parts() | self._step(stage) | table | {"stacked": stacked})
        floats = self.floats(self._words())
        imports = [*floats, *[""] * len(floats), "import torch", "import triton", "import triton.language as tl"]
        return self.file(
            imports, words_in(class_lines, _WORDS), *(part.strip("\n").split("\n") for part in parts), class_lines
        )

    @property
    def _has_plain(self) -> bool:
        """Whether a state of the parameter's shape is in no codes."""
        return any(self.layout.format(b.name) is None for b in self.arrays)

    def _words(self) -> list[str]:
        """The tables of codes, by state, as a text."""
        rows = []
        for name, form in self.layout.formats:
            numbers, margin = ", ".join(number(float(x)) for x in words(form)) or "0.0", " " * 8
            lines = textwrap.wrap(numbers, 110, initial_indent=margin, subsequent_indent=margin)
            rows += [f'    "{name}": [', *lines, "    ],"]
        return ["\n".join(["#: The tables of codes, by state.", "WORDS = {", *rows, "}"])] * bool(rows)

    def begun(self, param: str, array: str, number: str) -> list[str]:
        """As of all files; codes begin as those of one number."""
        coded = [b for b in self.arrays if self.layout.format(b.name)]
        replaced = tuple(f'state["{b.name}"] =' for b in coded)
        lines = [line for line in super().begun(param, array, number) if not line.startswith(replaced)]
        return lines + [line for b in coded for line in self._first_codes(b)]

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

    def _place(self, column: str) -> str:
        """The address of a column of the table `known`."""
        state = column.removesuffix("::table")
        if column == "p":
            return "p.data_ptr()"
        return f'words["{state}"].data_ptr()' if state != column else f'self.state[p]["{column}"].data_ptr()'

    def _dtypes(self) -> dict[str, str]:
        """The dtypes of arrays of states by their names, with those of codes and scales."""
        dtypes = {b.name: self.layout.dtype(b.name) for b in self.arrays}
        for name, form in self.layout.formats:
            dtypes |= {name: form.code_dtype, scale_name(name): "float32"}
        return dtypes

    def _sizes(self) -> list[str]:
        """The number of elements of each state of a parameter, by name."""
        sizes = {b.name: "p.numel()" if b.axes.elementwise else "1" for b in self.program.states}
        for name, form in self.layout.formats:
            sizes[scale_name(name)] = f"-(-p.numel() // {form.block})"
            sizes[name] = "p.numel()" if form.bits == 8 else "(p.numel() + 1) // 2"
        return [f'"{name}": {size},' for name, size in (sizes | {"step": "1"}).items()]

    def _step(self, stage: FlatStage) -> Parts:
        names = [n for n in stage.known if n not in ("size", "span")]
        places = [self._place(name) for name in names]
        emulated = ['p.device.type == "cpu"'] * stage.emulates
        arguments = ["chunks", "known", "moving", "table", "None", "None", "BLOCK", *emulated]
        begun = self.begun(
            "p.double()", 'state["{state}"] = like(p, {value}, torch.{dtype})', 'state["{state}"] = float({value})'
        )
        dtypes, named = self._dtypes(), [*self.fields.values(), *["seed"] * self.seeded]
        stores = [s.buffer for s in self.program.scalars.stores]
        return {
            "coded": "yes" if self.layout.formats else "",
            "defaults": call_lines("defaults = dict", [f"{x}={x}" for x in named], ""),
            "others": ", ".join(f'"{name}": torch.{dtype}' for name, dtype in dtypes.items() if dtype != self.dtype),
            "sizes": self._sizes(),
            "begun": begun, "first": self.reads('group["{}"]', begun), "places": _listed([*places, "p.numel()"]),
            "launch": call_lines(
                "stage_0[(len(chunks),)]", [*arguments, "num_warps=WARPS", "enable_fp_fusion=False"], ""
            ),
            "and_new": ", new" * bool(stores),
            "each": "i, (p, _, _) in enumerate(tensors)" if stores else "p, _, _ in tensors",
            "keep": [f'self.state[p]["{b}"] = float(new["{b}"][i])' for b in stores],
        }  # fmt: skip


def _listed(items: Sequence[str]) -> str:
    """Items of a tuple in the template, on a line each where there are many."""
    line = ", ".join(items)
    return line if len(line) <= 160 else ",\n             ".join(items)


files = TritonFile.files
