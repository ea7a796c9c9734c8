"""Noise as a gradient on the GPU: made in the rule's kernel, against filled into a gradient for torch's fused step.

One tensor of 50 million parameters. The same backend makes the same noise in both; one of them writes and reads a
gradient.
"""

from __future__ import annotations

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
from rulec.backend.capabilities import Noise, Values
from rulec.compiler.layout import layout_for
from rulec.es.streams import short_weights
from rulec.runtime.buckets.scalar_table import ScalarRows

ELEMENTS, QUICK_ELEMENTS = 50_000_000, 10_000

VALUES: tuple[Values, ...] = ("popcount", "rademacher", "normal")
DIRECTIONS = (1, 16, 128)

#: The backends whose kernels are measured on a GPU, and on the processor.
BACKENDS, ON_HOST = ("triton", "cupy"), ("c",)

#: What a step may take of the time of the two: with one direction of whole numbers, and else.
ONE, MANY = 0.7, 1.0

ROUNDS, QUICK_ROUNDS, SECONDS = 15, 2, 3.0

FUSED, FILL, BOTH = "noise in the kernel", "noise as a gradient", "noise as a gradient and torch's fused step"
SHARE = f"{FUSED}, of the time of {BOTH}"
RATE = f"{FUSED}: values of noise in a second"


def parts(only: Sequence[str]) -> list[Part]:
    """A part for each kind of values, for AdamW."""
    if only and "adamw" not in only:
        return []
    return [Part(f"{values} noise in the kernel of adamw", noise, (values,)) for values in VALUES]


def noise(bench: Bench, values: Values) -> Iterator[Finding]:
    """Steps by noise of some directions, on every backend that can make it here."""
    for backend in ON_HOST if bench.device.name == "cpu" else BACKENDS:
        for directions in DIRECTIONS:
            try:
                yield from _measured(bench, backend, values, directions)
            except Exception as error:  # noqa: BLE001 - the others are measured all the same
                yield Note(f"{values} noise of {directions} directions on {backend}: not run: {sentence(error)}")
            bench.device.release()


def _measured(bench: Bench, backend: str, values: Values, directions: int) -> Iterator[Row]:
    step = NoisyStep(bench, backend, values, directions)
    contenders: dict[str, Sequence[Step]] = {FUSED: [step.fused], FILL: [step.fill], BOTH: [step.both]}
    times = timed(bench.device, contenders, QUICK_ROUNDS if bench.quick else ROUNDS, SECONDS)
    subject = f"adamw, {backend}, {values}, {directions} direction{'s' * (directions > 1)}"
    seconds = times.medians()
    detail = {**times.detail(FUSED, BOTH), "elements": step.elements}
    most = ONE if directions == 1 and values != "normal" else MANY
    yield Row(subject, SHARE, times.ratio(FUSED, BOTH), most, "at most", detail=detail)
    yield Row(subject, RATE, 1e-9 * step.elements * directions / seconds[FUSED], unit="G/s", detail=detail)


class NoisyStep:
    """A parameter in two copies: one updated by noise that is made in the kernel, one by torch from a gradient."""

    def __init__(self, bench: Bench, backend: str, values: Values, directions: int) -> None:
        import torch

        self._program = rulec.compile(rulec.load("adamw"))
        self._layout = layout_for(self._program, "float32")
        self._backend: Any = registry.usable(backend)
        self.elements = QUICK_ELEMENTS if bench.quick else ELEMENTS
        weights = np.random.default_rng(0).standard_normal(directions)
        self._noises = [Noise(values, 0, 0, 1, short_weights(weights, values))]
        self.param, self.theirs = (make(bench, (self.elements,)) for _ in range(2))
        self.states = {b.name: torch.zeros_like(self.param) for b in self._program.states}
        self._call = self._bound(values)
        hyper = {k: np.array([v]) for k, v in hyper_defaults(self._program).items()}
        self._rows = ScalarRows(self._program, np.zeros(1, np.int64), [{}]).shared(1, hyper)
        self.theirs.grad = torch.zeros_like(self.theirs)
        self._torch = torch.optim.AdamW([self.theirs], lr=hyper["lr"].item(), fused=True)

    def _bound(self, values: Values) -> Any:
        source = self._backend.emit_estimate(self._program, self._layout, values)
        kernel = self._backend.build_estimate(self._program, self._layout, values, source)
        return kernel.bind([self.param], [self.states])

    def fused(self) -> None:
        """The step in one kernel."""
        self._call(0, self._noises, self._rows)

    def fill(self) -> None:
        """The gradient alone."""
        self._backend.fill_noise(self.theirs.grad, self._noises[0])

    def both(self) -> None:
        """The gradient, and torch's step by it."""
        self.fill()
        self._torch.step()
