"""A rule as one Python file for PyTorch: an optimizer whose step is one launch of a fused Triton kernel."""

from __future__ import annotations

from collections.abc import Mapping

from rulec.language.rule import Rule

from ..array_print import Dialect, operations
from ..python_standalone import OneFile, ScalarLines, call_lines, expression, indented, words_in
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

#: Names that the printed class uses.
_LOCALS = (
    "p", "g", "t", "state", "states", "torch", "triton", "tl", "inf", "nan", "step", "closure", "loss", "group",
    "tensors", "table", "rows", "known", "moving", "chunks", "counts", "key", "value", "Optimizer", "real", *_WORDS,
)  # fmt: skip

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


def files(rule: Rule, name: str, dtype: str, state_dtype: str) -> Mapping[str, str]:
    """The file, by its name."""
    return {f"{name}.py": TritonFile(rule, name, dtype, state_dtype).text()}


class TritonFile(OneFile):
    """The text of the file."""

    def __init__(self, rule: Rule, name: str, dtype: str, state_dtype: str) -> None:
        super().__init__(rule, name, dtype, state_dtype, "a file for Triton", _LOCALS)
        if "step" in {b.name for b in self.program.states}:
            self.cannot("it has a state called step, as torch calls the count of steps")
        self.stage = FlatStage(self.program, self.layout, 0)
        ops = operations(DIALECT, "float64")
        leaf = self.leaf(lambda state: f'number("{state}")')
        self.scalars = ScalarLines(self, ops, leaf, {*_LOCALS, "number", *self.fields.values()})

    def text(self) -> str:
        """The whole file."""
        kernels = ["\n".join(lines) for lines in self.stage.functions()]
        words = words_used("\n".join(kernels))
        own = "\n".join(self._class())
        imports = ["import torch", "import triton", "import triton.language as tl"]
        documentation = self.documentation()
        head = ['"""' + documentation[0], *documentation[1:], '"""', "", *imports]
        printed = "\n\n\n".join([*(w.rstrip("\n") for w in words), *kernels])
        return (
            "\n".join(
                [*head, *words_in(own, _WORDS), "", "", printed, "", "", _TABLES + _LIKE * bool(self.arrays), "", own]
            )
            + "\n"
        )

    def _class(self) -> list[str]:
        return [
            f"class {self.class_name}(torch.optim.Optimizer):", f'    """{self._summary()}"""', "",
            *(line for part in (self._init(), self._load(), self._step(), self._begin(), self._update(), self._table())
              for line in (*indented(part), "")),
        ][:-1]  # fmt: skip

    def _summary(self) -> str:
        text = " ".join((self.rule.summary or self.rule.name).split()).rstrip(".").replace('"', "'")
        return f"{text}. Parameters are {self.dtype}, contiguous, on a GPU."

    def _init(self) -> list[str]:
        pairs = [f"{x}={x}" for x in self.fields.values()]
        return [
            *call_lines("def __init__", ["self", "params", *self.keywords()], ":"),
            *indented([*self.checks(), *call_lines("defaults = dict", pairs, ""), "super().__init__(params, defaults)",
                       "self.known = {}  # tables on the device, by where tensors lie"]),
        ]  # fmt: skip

    def _load(self) -> list[str]:
        """torch gives loaded states the parameter's dtype."""
        own = ["def __setstate__(self, state):", "    super().__setstate__(state)", "    self.known = {}"]
        other = [b.name for b in self.arrays if self.layout.dtype(b.name) != self.dtype]
        if not other:
            return own
        dtypes = ", ".join(f'"{name}": torch.{self.layout.dtype(name)}' for name in other)
        return [*own, "", "def load_state_dict(self, state_dict):", *indented([
            '"""States keep their own dtypes, which torch would make the parameter\'s."""',
            "super().load_state_dict(state_dict)",
            'places = [i for group in state_dict["param_groups"] for i in group["params"]]',
            'params = [p for group in self.param_groups for p in group["params"]]',
            "for place, p in zip(places, params, strict=True):", '    if place in state_dict["state"]:',
            '        saved = state_dict["state"][place]', f"        for name, dtype in {{{dtypes}}}.items():",
            "            self.state[p][name] = saved[name].to(p.device, dtype, copy=True)",
        ])]  # fmt: skip

    def _step(self) -> list[str]:
        return ["@torch.no_grad()", "def step(self, closure=None):", *indented([
            '"""One step of all parameters that have a gradient: one launch for each device."""',
            "loss = None", "if closure is not None:", "    with torch.enable_grad():", "        loss = closure()",
            "fired = {}", "for group in self.param_groups:", '    for p in group["params"]:',
            "        if p.grad is not None:", "            self._begin(p, group)",
            "            fired.setdefault(p.device, []).append((p, p.grad.contiguous(), group))",
            "for tensors in fired.values():", "    self._update(tensors)", "return loss",
        ])]  # fmt: skip

    def _begin(self) -> list[str]:
        ops = operations(DIALECT, "float64")
        leaf = self.leaf(lambda _: "p.double()")
        made = []
        for b in self.program.states:
            assert b.init is not None
            text = expression(b.init, ops, leaf)
            if b.axes.elementwise:
                made.append(f'state["{b.name}"] = like(p, {text}, torch.{self.layout.dtype(b.name)})')
            else:
                made.append(f'state["{b.name}"] = float({text})')
        hyper = [f'{x} = group["{x}"]' for x in self.fields.values() if self.named(x, made)]
        return ["def _begin(self, p, group):", *indented([
            '"""Checks a parameter and its gradient, and makes the states before the first step."""',
            f"if p.dtype != torch.{self.dtype} or p.grad.dtype != p.dtype or p.grad.is_sparse:",
            f'    raise TypeError("parameters and gradients must be {self.dtype}, and dense")',
            "if not p.is_contiguous():", '    raise ValueError("parameters must be contiguous")',
            'if p.device.type in ("cpu", "meta") and isinstance(stage_0, triton.JITFunction):',
            '    where = "in main memory" if p.device.type == "cpu" else "on the meta device"',
            '    raise ValueError(f"parameters must be on a GPU, and one is {where}: move the model there before")',
            "state = self.state[p]", "if not state:", *indented([*hyper, *made,
            'state["step"] = torch.tensor(0.0)']),
        ])]  # fmt: skip

    def _update(self) -> list[str]:
        names = [n for n in self.stage.known if n not in ("size", "span")]
        fixed = ["p.data_ptr()" if n == "p" else f'self.state[p]["{n}"].data_ptr()' for n in names]
        arguments = ["chunks", "known", "moving", "table", "None", "None", "BLOCK"]
        arguments += ['p.device.type == "cpu"'] * self.stage.emulates
        launch = call_lines("stage_0[(len(chunks),)]", [*arguments, "num_warps=WARPS", "enable_fp_fusion=False"], "")
        keep = [f'self.state[p]["{b}"] = float(new["{b}"][i])' for b in self.scalars.stores]
        return ["def _update(self, tensors):", *indented([
            '"""One launch for tensors of one device: (parameter, gradient, group) each."""',
            "tensors = [x for x in tensors if x[0].numel()]", "if not tensors:", "    return",
            "p = tensors[0][0]",
            "places = tuple(", f"    ({', '.join([*fixed, 'p.numel()'])})", "    for p, _, _ in tensors", ")",
            "if places not in self.known:",
            "    chunks, cuts = chunks_of([place[-1] for place in places])",
            "    lines = [(*cut, *place[:-1]) for cut, place in zip(cuts, places, strict=True)]",
            "    self.known = {places: (chunks.to(p.device), torch.tensor(lines).to(p.device))}",
            "chunks, known = self.known[places]",
            f"{'table, new' if keep else 'table'} = self._table(tensors)",
            "moving = torch.tensor([(i, g.data_ptr()) for i, (_, g, _) in enumerate(tensors)])",
            "moving, table = moving.to(p.device), table.to(p.device)",
            "with torch.cuda.device_of(p):", *indented(launch),
            f"for {'i, (p, _, _)' if keep else 'p, _, _'} in {'enumerate(tensors)' if keep else 'tensors'}:",
            "    torch.autograd.graph.increment_version(p)", '    self.state[p]["step"] += 1', *indented(keep),
        ])]  # fmt: skip

    def _table(self) -> list[str]:
        scalars = self.scalars
        lines = [*scalars.lines, *scalars.columns, *scalars.stores.values()]
        count = 't = torch.tensor([float(self.state[p]["step"]) + 1 for p, _, _ in tensors], dtype=torch.float64)'
        hyper = [
            f'{x} = torch.tensor([group["{x}"] for _, _, group in tensors], dtype=torch.float64)'
            for x in self.fields.values() if self.named(x, lines)
        ]  # fmt: skip
        number = [
            "def number(name):",
            "    return torch.tensor([float(self.state[p][name]) for p, _, _ in tensors], dtype=torch.float64)",
            "",
        ]
        new = [f'"{b}": {text}' for b, text in scalars.stores.items()]
        column = "torch.as_tensor(x, dtype=torch.float64).expand(len(tensors))"
        stacked = [f"table = torch.stack([{column} for x in columns], dim=1)"] if scalars.columns else [
            "table = torch.zeros(len(tensors), 1, dtype=torch.float64)"
        ]  # fmt: skip
        return ["def _table(self, tensors):", *indented([
            '"""What depends on hyper-parameters and the count of steps alone: a row of float64 for each tensor."""',
            *number * self.named("number", lines), *[count] * self.named("t", lines), *hyper, *scalars.lines,
            *_listed("columns", scalars.columns) * bool(scalars.columns), *stacked,
            f"return table, {{{', '.join(new)}}}" if new else "return table",
        ])]  # fmt: skip


def _listed(name: str, items: list[str]) -> list[str]:
    """`name = [items]`, each on a line of its own."""
    return [f"{name} = [", *(f"    {item}," for item in items), "]"]
