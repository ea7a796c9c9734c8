"""A rule as one Python file for PyTorch: an optimizer with one launch of a fused Triton kernel for a step."""

from __future__ import annotations

from ..array_print import Dialect
from ..python_standalone import OneFile, Parts, call_lines, filled, words_in
from .flat import FlatStage
from .words import words_used

_WORDS = {
    "cbrt": '''\
def cbrt(x):
    """The cube root, with the sign of x."""
    return torch.sign(x) * torch.abs(x) ** (1 / 3)
''',
    "power": "power = torch.pow\n",
    "erf": "erf = torch.erf\n",
    "sigmoid": "sigmoid = torch.sigmoid\n",
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
)

_TABLES = '''\
BLOCK = 1024  # elements that a program of the grid takes at a time
WARPS = 4  # warps of a program
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

    def __setstate__(self, state):
        super().__setstate__(state)
        self.known = {}

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
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._begin(p, group)
                    fired.setdefault(p.device, []).append((p, p.grad.contiguous(), group))
        for tensors in fired.values():
            self._update(tensors)
        return loss

    def _begin(self, p, group):
        """Checks a parameter and its gradient, and makes the states before the first step."""
        if p.dtype != torch.<dtype> or p.grad.dtype != p.dtype or p.grad.is_sparse:
            raise TypeError("parameters and gradients must be <dtype>, and dense")
        if not p.is_contiguous():
            raise ValueError("parameters must be contiguous")
        if p.device.type in ("cpu", "meta") and isinstance(stage_0, triton.JITFunction):
            where = "in main memory" if p.device.type == "cpu" else "on the meta device"
            raise ValueError(f"parameters must be on a GPU, and one is {where}: move the model there before")
        state = self.state[p]
        if not state:
            <first>
            <begun>
            state["step"] = torch.tensor(0.0)

    def _update(self, tensors):
        """One launch for tensors of one device: (parameter, gradient, group) each."""
        tensors = [x for x in tensors if x[0].numel()]
        if not tensors:
            return
        p = tensors[0][0]
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
        "chunks", "counts", "key", "value", "Optimizer", "real",
    )  # fmt: skip

    def text(self) -> str:
        """The whole file."""
        if "step" in self.states:
            self.cannot("it has a state called step, as torch calls the count of steps")
        stage = FlatStage(self.program, self.layout, 0)
        kernels = ["\n".join(lines) for lines in stage.functions()]
        parts = [*words_used("\n".join(kernels)), *kernels, _TABLES, *[_LIKE] * bool(self.arrays)]
        table = self.table('torch.tensor([group["{}"] for _, _, group in tensors], dtype=torch.float64)')
        stacked = _STACKED if table["columns"] else "torch.zeros(len(tensors), 1, dtype=torch.float64)"
        class_lines = filled(_CLASS, self.parts() | self._step(stage) | table | {"stacked": stacked})
        imports = ["import torch", "import triton", "import triton.language as tl"]
        return self.file(
            imports, words_in(class_lines, _WORDS), *(part.strip("\n").split("\n") for part in parts), class_lines
        )

    def _step(self, stage: FlatStage) -> Parts:
        names = [n for n in stage.known if n not in ("size", "span")]
        places = ["p.data_ptr()" if n == "p" else f'self.state[p]["{n}"].data_ptr()' for n in names]
        emulated = ['p.device.type == "cpu"'] * stage.emulates
        arguments = ["chunks", "known", "moving", "table", "None", "None", "BLOCK", *emulated]
        begun = self.begun(
            "p.double()", 'state["{state}"] = like(p, {value}, torch.{dtype})', 'state["{state}"] = float({value})'
        )
        dtypes = {b.name: self.layout.dtype(b.name) for b in self.arrays}
        stores = [s.buffer for s in self.program.scalars.stores]
        return {
            "defaults": call_lines("defaults = dict", [f"{x}={x}" for x in self.fields.values()], ""),
            "others": ", ".join(f'"{name}": torch.{dtype}' for name, dtype in dtypes.items() if dtype != self.dtype),
            "begun": begun, "first": self.reads('group["{}"]', begun), "places": ", ".join([*places, "p.numel()"]),
            "launch": call_lines(
                "stage_0[(len(chunks),)]", [*arguments, "num_warps=WARPS", "enable_fp_fusion=False"], ""
            ),
            "and_new": ", new" * bool(stores),
            "each": "i, (p, _, _) in enumerate(tensors)" if stores else "p, _, _ in tensors",
            "keep": [f'self.state[p]["{b}"] = float(new["{b}"][i])' for b in stores],
        }  # fmt: skip


files = TritonFile.files
