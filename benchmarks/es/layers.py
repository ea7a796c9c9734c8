"""Layers of a population in one batch: their time over the plain layer's, and over one member at a time.

Sizes, batch and columns are as in the table of NESgpu's readme: https://github.com/jamesal1/NESgpu.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.es.turns import Turn, by_turns
from benchmarks.result import Row
from rulec.es import Perturbation
from rulec.tools.compare.measure import Times

if TYPE_CHECKING:
    import torch

#: Members, each with one row of the batch: half as many directions, with two signs.
MEMBERS, QUICK_MEMBERS = 1024, 32

#: Members that are run one at a time; their time is scaled to all.
SAMPLE = 8

#: Rounds of a row, and the seconds after which no more are begun.
ROUNDS, QUICK_ROUNDS, SECONDS = 9, 1, 3.0

#: What rows say.
BASE = "forward, times the unperturbed layer"
ALONE = "forward, times as fast as one member at a time"
DRAWN = "forward with its noise drawn, times the unperturbed layer"
UPDATE = "update, of the unperturbed layer's forward"
KEPT = "bytes kept between forward and update, the result apart"


@dataclass(frozen=True)
class Layer:
    """A layer and the size of its inputs: with `kernel` 0 it is linear, else a convolution of square images."""

    inputs: int
    outputs: int
    kernel: int = 0
    size: int = 1

    def __str__(self) -> str:
        if not self.kernel:
            return f"linear {self.inputs} x {self.outputs}"
        return f"conv {self.inputs} to {self.outputs}, {self.kernel}x{self.kernel}, on {self.size}x{self.size}"

    def module(self) -> torch.nn.Module:
        """A model of this layer alone, without a bias."""
        import torch

        if not self.kernel:
            return torch.nn.Sequential(torch.nn.Linear(self.inputs, self.outputs, bias=False))
        padding = self.kernel // 2
        return torch.nn.Sequential(torch.nn.Conv2d(self.inputs, self.outputs, self.kernel, padding=padding, bias=False))

    def batch(self, rows: int) -> torch.Tensor:
        """Random inputs, the same in every call."""
        import torch

        shape = (rows, self.inputs, self.size, self.size) if self.kernel else (rows, self.inputs)
        return torch.randn(shape, generator=torch.Generator().manual_seed(0))


SQUARES = tuple(Layer(n, n) for n in (256, 512, 1024))
CONVS = (Layer(16, 16, 3, 64), Layer(32, 32, 3, 64), Layer(64, 64, 3, 32), Layer(32, 32, 1, 32), Layer(1024, 1024, 1))
LAYERS, QUICK_LAYERS = (*SQUARES, *CONVS), (Layer(64, 64), Layer(8, 8, 3, 8))

#: The layer that is judged, and what is asked of it: forward over the plain layer, and the update over that.
JUDGED = Layer(1024, 1024)
BARS = {"lowrank, rank 1": 1.15, "signflip": 2.1, "permuted": 2.4, "dropout, keep 0.5": 1.0}
UPDATE_BARS = {"signflip": 0.1}

#: Families by their names in the table; those of linear layers and those of convolutions have some of their own.
_COMMON: dict[str, dict[str, Any]] = {
    "lowrank, rank 1": {"family": "lowrank"}, "signflip": {"family": "signflip", "sides": "rows"},
    "permuted": {"family": "permuted"},
    "dropout, keep 0.5": {"family": "dropout"}, "independent": {"family": "independent"},
}  # fmt: skip
_LINEAR: dict[str, dict[str, Any]] = {
    f"permuted, {side} {share}": {"family": "permuted", side: share}
    for side in ("in_sparsity", "out_sparsity")
    for share in (0.5, 0.1)
} | {f"sparse, k={k}": {"family": "sparse", "sparsity": k} for k in (1, 2)}
_CONV = {name: family for name, family in _LINEAR.items() if "out_sparsity" in name}


def families(layer: Layer) -> dict[str, dict[str, Any]]:
    """Name -> perturbation, for the perturbations with which a layer is measured."""
    return _COMMON | (_CONV if layer.kernel else _LINEAR)


def plan(quick: bool) -> list[tuple[Layer, str]]:
    """Every layer with each of its families."""
    return [(layer, name) for layer in (QUICK_LAYERS if quick else LAYERS) for name in families(layer)]


def rows(layer: Layer, name: str, quick: bool) -> Iterator[Row]:
    """The rows of one layer with one family."""
    import rulec.torch

    members = QUICK_MEMBERS if quick else MEMBERS
    model, batch = layer.module(), layer.batch(members)
    perturbation = Perturbation(**families(layer)[name], directions=members // 2, sigma=0.01, seed=0)
    es = rulec.torch.perturb(model, perturbation)
    contenders = {
        "base": Turn(lambda: _plain(model, batch)),
        "forward": Turn(lambda: es(batch), before=lambda: es(batch)),
        "alone": Turn(lambda: one_at_a_time(model, batch, perturbation.sigma, SAMPLE)),
    }
    judged = layer == (QUICK_LAYERS[0] if quick else JUDGED)
    if judged:
        fitness = np.random.default_rng(0).normal(size=members)
        if perturbation.family != "independent":  # whose noise is drawn in every forward
            contenders["drawn"] = Turn(lambda: es(batch), before=es.free_memory)
        contenders["update"] = Turn(lambda: es.update(fitness), before=lambda: es(batch))
    times = by_turns(contenders, QUICK_ROUNDS if quick else ROUNDS, SECONDS)
    yield from _timed(f"{layer}, {name}", times, members, BARS.get(name) if layer == JUDGED else None)
    if judged:
        yield from _judged(f"{layer}, {name}", times, UPDATE_BARS.get(name) if layer == JUDGED else None)
        yield _kept(f"{layer}, {name}", es, batch, _bytes_allowed(layer, perturbation))


def _timed(subject: str, times: Times, members: int, bar: float | None) -> Iterator[Row]:
    detail = times.medians()
    alone = times.ratio("alone", "forward") * members / SAMPLE
    scatter = {"scatter": times.quartiles("forward", "base"), "rounds": len(times.seconds["base"])}
    yield Row(subject, BASE, times.ratio("forward", "base"), bar, "at most", detail=detail | scatter)
    yield Row(subject, ALONE, alone, detail={"sample": SAMPLE, "members": members})


def _judged(subject: str, times: Times, bar: float | None) -> Iterator[Row]:
    for name, measure, target in (("drawn", DRAWN, None), ("update", UPDATE, bar)):
        if name not in times.seconds:
            continue
        detail = {"seconds": times.median(name), "scatter": times.quartiles(name, "base")}
        yield Row(subject, measure, times.ratio(name, "base"), target, "at most", detail=detail)


def _kept(subject: str, es: Any, batch: torch.Tensor, allowed: float | None) -> Row:
    """The bytes that a forward keeps beside its result: noise, in any form, for the update."""
    es.free_memory()
    kept = kept_bytes(lambda: es(batch))
    es.free_memory()
    return Row(subject, KEPT, float(kept), allowed, "at most", "B")


def _bytes_allowed(layer: Layer, perturbation: Perturbation) -> float | None:
    """Zero bytes for independent noise; for low rank the factors in float32, and a hundredth more for counters."""
    if perturbation.family == "independent":
        return 0.0
    if perturbation.family != "lowrank":
        return None
    lines = layer.outputs + layer.inputs * max(1, layer.kernel) ** 2
    return 1.01 * 4 * perturbation.directions * perturbation.rank * lines


def _plain(model: torch.nn.Module, batch: torch.Tensor) -> None:
    import torch

    with torch.no_grad():
        model(batch)


def one_at_a_time(model: torch.nn.Module, batch: torch.Tensor, sigma: float, members: int) -> None:
    """The first members of a batch one by one, each with one row and the weights plus torch's noise."""
    import torch
    from torch.func import functional_call

    weights = dict(model.named_parameters())
    with torch.no_grad():
        for member in range(members):
            perturbed = {name: torch.randn_like(w).mul_(sigma).add_(w) for name, w in weights.items()}
            functional_call(model, perturbed, (batch[member : member + 1],))


def kept_bytes(work: Callable[[], torch.Tensor]) -> int:
    """The bytes by which the memory of torch and NumPy has grown after `work`, without its result."""
    from torch.profiler import ProfilerActivity, profile

    tracemalloc.start()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            result = work()
        arrays = sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces([_arrays()]).traces)
    finally:
        tracemalloc.stop()
    assert seen.profiler is not None
    events = seen.profiler.kineto_results.events()
    tensors = sum(event.nbytes() for event in events if event.name() == "[memory]")
    return int(tensors + arrays - result.nbytes)


def _arrays() -> tracemalloc.DomainFilter:
    """A filter for NumPy's allocations of arrays, without Python's objects."""
    return tracemalloc.DomainFilter(inclusive=True, domain=np.lib.tracemalloc_domain)
