"""Updates inside the backward pass on the GPU: the memory and time of whole steps, and products with an epilogue.

The model is a stack of the layers of Llama 3.1 8B. Attention is left out, since it has no weights: the figures are of
products and updates. A step has one forward and one backward pass over the tokens of a usual step on one GPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

import rulec
from benchmarks.gpu.device import Bench
from benchmarks.gpu.part import Finding, Note, Part, sentence
from benchmarks.gpu.tensors import make
from benchmarks.gpu.time import Step, timed
from benchmarks.kernels import hyper_defaults
from benchmarks.result import Row
from rulec.backend import registry
from rulec.backend.capabilities import Product, capabilities_of
from rulec.compiler.layout import layout_for
from rulec.runtime.buckets.scalar_table import ScalarRows

#: Of a layer: the width of the stream, of keys and values, and inside; how many layers there are.
WIDE, NARROW, INNER, LAYERS = 4096, 1024, 14336, 32

#: Tokens of a step, and bytes for each parameter of one: itself, its gradient and two states of 16 bits, and more.
TOKENS, BYTES_EACH = 1024, 10

#: The factor by which all sizes are smaller in a quick measurement.
SMALLER = 64

#: Matrices whose products are measured alone, and the tokens they are summed over.
SHAPES = ((INNER, WIDE), (WIDE, INNER), (WIDE, WIDE), (NARROW, WIDE))
SUMMED = (1024, 8192)

ROUNDS, QUICK_ROUNDS = 12, 2

DEFERRED, FUSED, EAGER, EPILOGUE, TILES = "deferred", "torch's fused AdamW", "eager", "eager with epilogue", "by tiles"
WAYS = (FUSED, DEFERRED, EAGER, EPILOGUE, TILES)

PEAK, TIME = "peak of memory, times that of", "time of a step, times that of"
FLOPS = "product and update,"
AS_FAST = "times as fast as"

ALONE, BOTH, KERNEL, BY_TILES = "torch's product", "torch's product and our step", "in one kernel", "tile by tile"

#: Tiles of the kernel that are timed beside its own choice: its `Tile`s of the largest size, for one to be chosen.
CANDIDATES = (
    (128, 256, 64, 8, 8, 3, True), (128, 256, 64, 8, 8, 4), (128, 128, 64, 8, 4, 3, True), (128, 128, 64, 8, 4, 3),
    (64, 256, 64, 16, 4, 2, True), (128, 128, 64, 4, 8, 4, True), (256, 128, 64, 8, 8, 4, True),
)  # fmt: skip

_RATE = {"lr": 1e-4, "weight_decay": 0.01}


def parts(only: Sequence[str]) -> list[Part]:
    """Steps of AdamW in each way, and the products alone."""
    if only and "adamw" not in only:
        return []
    products = [Part(f"product of {h} by {w} with adamw in its epilogue", product, (h, w)) for h, w in SHAPES]
    return [Part("steps of a stack of layers, deferred and eager", steps, seconds=90.0), *products]


# Steps of a model


def steps(bench: Bench) -> Iterator[Finding]:
    """The peak of memory and the time of a step, in each way; by itself, one after the other, from the same start."""
    tokens, layers = (16, 1) if bench.quick else (TOKENS, _layers(bench))
    measured: dict[str, dict[str, float]] = {}
    for way in WAYS:
        try:
            measured[way] = _measured(bench, way, tokens, layers)
        except Exception as error:  # noqa: BLE001 - the other ways are measured all the same
            yield Note(f"{way}: steps of {layers} layers of Llama 8B: not run: {sentence(error)}")
        bench.device.release()
    subject = f"adamw in bfloat16, {layers} layers of Llama 8B, {tokens} tokens"
    for way in (way for way in WAYS if way in measured and way != FUSED and FUSED in measured):
        detail = {"ours": measured[way], "theirs": measured[FUSED]}
        peak, taken = (measured[way][key] / measured[FUSED][key] for key in ("peak", "step"))
        yield Row(f"{subject}: {way}", f"{PEAK} {FUSED}", peak, 1.0, "at most", detail=detail)
        yield Row(f"{subject}: {way}", f"{TIME} {FUSED}", taken, None, "at most", detail=detail)


def _layers(bench: Bench) -> int:
    """The number of layers for which there is memory."""
    each = 2 * WIDE * WIDE + 2 * NARROW * WIDE + 3 * INNER * WIDE
    return max(1, min(LAYERS, int(0.9 * bench.device.free_bytes() / (BYTES_EACH * each))))


def _measured(bench: Bench, way: str, tokens: int, layers: int) -> dict[str, float]:
    """The seconds of a step, and its bytes: at the peak, before the step, and of the parameters."""
    smaller = SMALLER if bench.quick else 1
    model = stack(bench, layers, smaller)
    step = _step_of(model, way, make(bench, (tokens, WIDE // smaller), "bfloat16"))
    for _ in range(3):  # states are made, the first step is watched, and kernels are compiled
        step()
    before = memory_now(bench)
    memory_reset(bench)
    step()
    bench.device.synchronize()
    peak = memory_peak(bench)
    times = timed(bench.device, {"step": [step]}, QUICK_ROUNDS if bench.quick else ROUNDS, 4.0)
    weights = sum(p.nbytes for p in model.parameters())
    return {"step": times.median("step"), "peak": peak, "before": before, "weights": weights}


def stack(bench: Bench, layers: int, smaller: int = 1) -> Any:
    """The layers, `smaller` times as narrow, in bfloat16."""
    import torch
    from torch import nn

    wide, narrow, inner = WIDE // smaller, NARROW // smaller, INNER // smaller

    class Layer(nn.Module):
        """The weights of one layer; the product of keys and values stands for attention."""

        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList([nn.RMSNorm(wide), nn.RMSNorm(wide)])
            self.queries, self.back = nn.Linear(wide, wide, bias=False), nn.Linear(wide, wide, bias=False)
            self.keys, self.values = nn.Linear(wide, narrow, bias=False), nn.Linear(wide, narrow, bias=False)
            self.gate, self.up = nn.Linear(wide, inner, bias=False), nn.Linear(wide, inner, bias=False)
            self.down = nn.Linear(inner, wide, bias=False)

        def forward(self, x: Any) -> Any:
            y = self.norms[0](x)
            values = (self.keys(y) * self.values(y)).repeat(1, wide // narrow)
            x = x + self.back(self.queries(y) * values)
            y = self.norms[1](x)
            return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))

    with torch.device(bench.device.name):
        return nn.Sequential(*(Layer().to(torch.bfloat16) for _ in range(layers)))


def _step_of(model: Any, way: str, inputs: Any) -> Step:
    """One step of a model by AdamW: forward, backward and update."""
    import torch

    import rulec.torch

    def loss() -> Any:
        return model(inputs).float().square().mean()

    if way in (FUSED, DEFERRED):
        kind: Any = torch.optim.AdamW if way == FUSED else rulec.torch.AdamW
        plain = kind(model.parameters(), **_RATE, **({"fused": True} if way == FUSED else {}))
        return lambda: (plain.zero_grad(), loss().backward(), plain.step())
    epilogue: Any = {EAGER: False, EPILOGUE: "kernel", TILES: "tiles"}[way]
    keywords: dict[str, Any] = {**_RATE, "epilogue": epilogue}
    eager = rulec.torch.EagerUpdate(model, "adamw", **keywords)

    def step() -> None:
        with eager.backward():
            loss().backward()
        eager.step()

    return step


def memory_now(bench: Bench) -> int:
    """Bytes of tensors now; 0 on a device that does not count them."""
    import torch

    return torch.cuda.memory_allocated() if bench.device.name == "cuda" else 0


def memory_peak(bench: Bench) -> int:
    """The most bytes of tensors since `memory_reset`; 1 on a device that does not count them."""
    import torch

    return torch.cuda.max_memory_allocated() if bench.device.name == "cuda" else 1


def memory_reset(bench: Bench) -> None:
    """Has the peak counted from here on."""
    import torch

    if bench.device.name == "cuda":
        torch.cuda.reset_peak_memory_stats()


# Products alone


def product(bench: Bench, height: int, width: int) -> Iterator[Finding]:
    """A product with its update in one kernel, beside torch's product and the step after it, and tile by tile."""
    if bench.quick:
        height, width = height // SMALLER, width // SMALLER
    for tokens in (32,) if bench.quick else SUMMED:
        matrix = Matrix(bench, height, width, tokens)
        times = timed(bench.device, matrix.contenders(), QUICK_ROUNDS if bench.quick else ROUNDS, 1.5)
        subject = f"adamw in bfloat16, ({height}, {width}) from {tokens} tokens"
        flops = 2e-12 * height * width * tokens
        seconds = times.medians()
        detail = {**seconds, "teraflops": {name: flops / taken for name, taken in seconds.items()}}
        ways = [name for name in (KERNEL, BY_TILES) if name in seconds]
        yield Row(subject, f"{FLOPS} {ways[0]}", flops / seconds[ways[0]], unit="TFLOP/s", detail=detail)
        for name in ways:
            faster = times.ratio(BOTH, name)
            yield Row(subject, f"{name}, {AS_FAST} {BOTH}", faster, detail=times.detail(BOTH, name))


class Matrix:
    """A parameter with its states, the factors of its gradient, and its kernels."""

    def __init__(self, bench: Bench, height: int, width: int, tokens: int) -> None:
        program = rulec.compile(rulec.load("adamw"))
        self._layout = layout_for(program, "bfloat16")
        self._program, self._bench = program, bench
        self._backend: Any = registry.usable("triton" if bench.device.name == "cuda" else "cpu")
        self._kernel = self._backend.build(program, self._layout, self._backend.emit(program, self._layout))
        self._param = make(bench, (height, width), "bfloat16")
        self._states = {b.name: make(bench, (height, width), "bfloat16").abs_() for b in program.states}
        self._product = Product(make(bench, (tokens, height), "bfloat16"), make(bench, (tokens, width), "bfloat16"))
        hyper = {k: np.array([v]) for k, v in hyper_defaults(program).items()}
        self._rows = ScalarRows(program, np.zeros(1, np.int64), [{}]).shared(1, hyper)

    @property
    def tensors(self) -> list[Any]:
        """The parameter and its states."""
        return [self._param, *self._states.values()]

    def contenders(self) -> dict[str, Sequence[Step]]:
        """Ways to update the parameter; all of them write the same memory."""
        from rulec.torch.eager.epilogue_tiles import TiledCall

        ways: dict[str, Sequence[Step]] = {ALONE: [self._alone()], BOTH: [self._both()]}
        ways[BY_TILES] = [self._called(TiledCall(self._kernel, [self._param], [self._states], "bfloat16"))]
        kernels = capabilities_of(self._backend).epilogue
        if kernels is not None:
            source = kernels.emit_epilogue(self._program, self._layout, "bfloat16")
            kernel: Any = kernels.build_epilogue(self._program, self._layout, "bfloat16", source)
            ways[KERNEL] = [self._called(kernel.bind([self._param], [self._states]))]
            kind = importlib.import_module("rulec_backends.triton.product").Tile
            for numbers in CANDIDATES:
                tiles = (kind(*numbers),)
                ways[f"{KERNEL} {numbers}"] = [self._called(kernel.bind([self._param], [self._states], tiles=tiles))]
        return ways

    def _alone(self) -> Step:
        outputs, inputs = self._product.outputs.t(), self._product.inputs
        gradient = make(self._bench, tuple(self._param.shape), "bfloat16")
        return lambda: torch_mm(outputs, inputs, gradient)

    def _both(self) -> Step:
        outputs, inputs = self._product.outputs.t(), self._product.inputs
        gradient = make(self._bench, tuple(self._param.shape), "bfloat16")
        call, rows = self._kernel.bind([self._param], [self._states]), self._rows

        def both() -> None:
            torch_mm(outputs, inputs, gradient)
            call(0, [gradient], rows)

        return both

    def _called(self, call: Any) -> Step:
        products, rows = [self._product], self._rows
        return lambda: call(0, products, rows)


def torch_mm(a: Any, b: Any, out: Any) -> None:
    """A product by torch."""
    import torch

    torch.mm(a, b, out=out)
