"""Noise made in the rule's kernel, against noise written as a gradient and then read by an optimizer.

One tensor of float32 far larger than the caches. The same generator writes the gradient, by `fill_noise`. Its reader is
rulec's kernel for the same rule, or torch's fused optimizer where there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

import rulec
from benchmarks.es.turns import Turn, by_turns
from benchmarks.kernels import Pair, bound, pair
from benchmarks.resident import peak_growth
from benchmarks.result import Row
from rulec.backend import registry
from rulec.backend.capabilities import Noise, Values
from rulec.compiler.layout import layout_for
from rulec.es.streams import short_weights
from rulec.tools.compare.measure import Times

ELEMENTS, QUICK_ELEMENTS = 50_000_000, 200_000

RULES = ("sgd", "lion", "adamw")
VALUES: tuple[Values, ...] = ("popcount", "rademacher", "normal")
DIRECTIONS = (1, 16, 64)

#: Of noise that takes long, a tenth of the elements: it is arithmetic alone, and the caches do not matter.
SLOW = (("normal", 64),)

#: What the step may take of the time of the two: with one direction of whole numbers, and else.
ONE, MANY = 0.7, 1.0

ROUNDS, QUICK_ROUNDS, SECONDS = 9, 1, 2.0

#: Bytes for each parameter by which peak memory may grow in a step without a gradient: pages are counted late.
PER_PARAMETER = 0.25

#: What rows say.
OURS = "noise in the kernel, of the time of noise as a gradient and our kernel"
TORCH = "noise in the kernel, of the time of noise as a gradient and torch's fused step"
GRADIENT = "growth of peak memory in a step, for each parameter"


def plan(only: Sequence[str] = ()) -> list[tuple[str, Values, int]]:
    """Rule, values and directions of every comparison."""
    rules = [rule for rule in RULES if not only or rule in only]
    return [(rule, values, count) for rule in rules for values in VALUES for count in DIRECTIONS]


def elements_of(values: str, directions: int, quick: bool) -> int:
    """The number of parameters of a comparison."""
    whole = QUICK_ELEMENTS if quick else ELEMENTS
    return whole // 10 if (values, directions) in SLOW else whole


def rows(rule: str, values: Values, directions: int, quick: bool) -> Iterator[Row]:
    """The rows of one comparison."""
    step = Steps(rule, values, directions, elements_of(values, directions, quick))
    contenders = {"fused": Turn(step.fused), "fill": Turn(step.fill), "ours": Turn(step.ours)}
    theirs = torch_step(rule, step.elements)
    if theirs is not None:
        contenders["torch"] = Turn(theirs)
    times = by_turns(contenders, QUICK_ROUNDS if quick else ROUNDS, SECONDS)
    subject = f"{rule}, {values}, {directions} direction{'s' * (directions > 1)}"
    bar = ONE if directions == 1 and values != "normal" else MANY
    for name, measure in (("ours", OURS), ("torch", TORCH)):
        if name in contenders:
            yield _row(subject, measure, summed(times, name), bar, step.elements)
    if directions == 1 and values == VALUES[0]:
        yield _grown(subject, step)


class Steps:
    """A rule's step with noise as its gradient, in one kernel and in two; `params` has the parameters of each way."""

    def __init__(self, rule: str, values: Values, directions: int, elements: int) -> None:
        program = rulec.compile(rulec.load(rule))
        kernels = pair(program, layout_for(program, "float32"))
        self.elements = elements
        self.params = [np.full(elements, 0.5, np.float32) for _ in range(2)]
        states = [{name: np.full(elements, 0.01, np.float32) for name in kernels.state_names} for _ in range(2)]
        self._noise = Noise(values, 0, 0, 1, short_weights(_weights(directions), values))
        self._grad = np.zeros(elements, np.float32)
        self._fill: Callable[..., None] = registry.usable("cpu").fill_noise  # type: ignore[attr-defined]
        self._table = kernels.rows(1, (elements,))
        self._estimate = _estimate_kernel(kernels, values).bind(self.params[:1], states[:1])
        self._ours = bound(kernels.kernel, self.params[1:], [self._grad], states[1:], self._table)

    def fused(self) -> None:
        """The step in one kernel."""
        self._estimate(0, [self._noise], self._table)

    def fill(self) -> None:
        """The gradient."""
        self._fill(self._grad, self._noise)

    def ours(self) -> None:
        """The step from it."""
        self._ours()


def _weights(directions: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.random.default_rng(0).normal(size=directions)


def _estimate_kernel(kernels: Pair, values: Values) -> Any:
    backend: Any = registry.usable("cpu")
    source = backend.emit_estimate(kernels.program, kernels.layout, values)
    return backend.build_estimate(kernels.program, kernels.layout, values, source)


def torch_step(rule: str, elements: int) -> Callable[[], object] | None:
    """torch's fused step over that many parameters with a gradient; None where torch has none for the rule."""
    import torch

    from benchmarks.tensors import tensors

    makers: dict[str, Callable[[list[Any]], Any]] = {
        "sgd": lambda p: torch.optim.SGD(p, lr=1e-3, fused=True), "adamw": lambda p: torch.optim.AdamW(p, fused=True)
    }  # fmt: skip
    if rule not in makers:
        return None
    step: Callable[[], object] = makers[rule](tensors(1, elements)).step
    return step


def summed(times: Times, second: str) -> Times:
    """The times of the one kernel, and the sums of fill and step, round by round."""
    both = [a + b for a, b in zip(times.seconds["fill"], times.seconds[second], strict=True)]
    return Times({"fused": times.seconds["fused"], "fill": times.seconds["fill"], "both": both})


def _row(subject: str, measure: str, times: Times, bar: float, elements: int) -> Row:
    detail = times.medians()
    scatter = {"scatter": times.quartiles("fused", "both"), "elements": elements}
    return Row(subject, measure, times.ratio("fused", "both"), bar, "at most", detail={**detail, **scatter})


def _grown(subject: str, step: Steps) -> Row:
    """The growth of memory in a step without a gradient, after the timed ones."""
    grown = peak_growth(step.fused) / step.elements
    return Row(subject, GRADIENT, grown, PER_PARAMETER, "at most", "B", {"elements": step.elements})
