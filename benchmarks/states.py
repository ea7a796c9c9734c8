"""`rulec bench states`: how far runs with small states or weights end from runs in floats, and the cost of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.kernels import threads
from benchmarks.result import Result, Row
from benchmarks.tensors import have_torch, tensors
from rulec.compare.interleave import interleaved

Array = np.ndarray[Any, Any]

#: torch's class -> the optimizers of the accuracy rows.
OPTIMIZERS = ("AdamW", "NAdam")

#: Title of a storage -> its `state_dtype`, and the largest distance wanted, where there is a target.
STORAGES: Mapping[str, tuple[Any, float | None]] = {
    "v in dynamic8": ({"exp_avg_sq": "dynamic8"}, 0.07),
    "v in int8": ({"exp_avg_sq": "int8"}, 0.07),
    "m in int8": ({"exp_avg": "int8"}, 0.04),
    "both in int8": ("int8", None),
    "both in softsign8": ("softsign8", None),
    "both in dynamic8": ("dynamic8", None),
    "both in float8_e4m3": ("float8_e4m3", None),
    "both in float8_e5m2": ("float8_e5m2", None),
    "both in dynamic4": ("dynamic4", None),
}

#: Kinds of bfloat16 weights, of which the plain one has no name.
WEIGHTS = ("", "split", "split24", "kahan", "stochastic")

#: Format -> the least speed of a step wanted, in units of the step with states in float32.
SPEEDS: Mapping[str, float | None] = {
    "int8": 1.1, "softsign8": 0.9, "dynamic8": 0.6, "float8_e4m3": None, "float8_e5m2": None, "dynamic4": None,
}  # fmt: skip

#: Kind of weights -> the same in units of the step of float32 weights; of a split weight also of a master copy.
WEIGHT_SPEEDS: Mapping[str, float | None] = {
    "split": 0.85, "split24": None, "master": None, "kahan": None, "stochastic": 0.8,
}  # fmt: skip
BACKENDS = ("c", "cpu")
ELEMENTS, QUICK_ELEMENTS = 20_000_000, 200_000
EPOCHS, SEEDS, BATCH = 3, 3, 64
PARTS = (len(OPTIMIZERS) + 1) * len(STORAGES) + len(WEIGHTS) + 2 * len(BACKENDS)


def measure(quick: bool, advance: Callable[[], object] = lambda: None) -> Result:
    """The measurement; `advance` is called after every storage and after every backend."""
    notes: list[str] = []
    rows: list[Row] = []
    if have_torch(notes):
        for name in OPTIMIZERS:
            for storage, (state_dtype, target) in STORAGES.items():
                rows.append(_distance(name, storage, state_dtype, target, True, 1 if quick else SEEDS))
                advance()
        for storage, (state_dtype, _) in STORAGES.items():
            rows.append(_distance(OPTIMIZERS[0], storage, state_dtype, None, False, 1 if quick else SEEDS))
            advance()
        for kind in WEIGHTS:
            rows.append(_weights_distance(kind, 1 if quick else SEEDS))
            advance()
        for backend in BACKENDS:
            for speeds in (_speeds, _weight_speeds):
                rows += speeds(backend, QUICK_ELEMENTS if quick else ELEMENTS, 3 if quick else 11)
                advance()
    return Result("states", rows, quick, threads(), notes)


# How far


def _distance(name: str, storage: str, state_dtype: Any, target: float | None, scaled: bool, seeds: int) -> Row:
    """The greatest distance over some seeds, in units of the way that the weights went in floats.

    Where pixels are not `scaled`, those at the border are nearly always zero: states of neighbours differ most.
    """
    each = []
    for seed in range(seeds):
        runs = (None, 0), (None, EPOCHS), (state_dtype, EPOCHS)
        each.append(_apart(*(_trained(name, seed, epochs, scaled, state_dtype=dtype) for dtype, epochs in runs)))
    inputs = "pixels of equal variance" if scaled else "plain pixels"
    measure = f"distance from the run in floats, {EPOCHS} epochs of digits, {inputs}"
    return Row(f"{name}, {storage}", measure, _greatest(each), target, "at most", detail={"each": each})


def _weights_distance(kind: str, seeds: int) -> Row:
    """The same of bfloat16 weights of a kind, from the run of weights with a master copy."""
    each = []
    for seed in range(seeds):
        runs = ("master", 0), ("master", EPOCHS), (kind, EPOCHS)
        each.append(_apart(*(_trained("AdamW", seed, epochs, True, weights=w) for w, epochs in runs)))
    measure = f"distance from the run with a master copy, {EPOCHS} epochs of digits in bfloat16"
    return Row(f"AdamW, weights {kind or 'plain'}", measure, _greatest(each), detail={"each": each})


def _apart(first: Array, exact: Array, run: Array) -> float:
    """The distance of the end of a run from that of the exact run, in units of the exact run's way."""
    return float(np.linalg.norm(run - exact) / np.linalg.norm(exact - first))


def _greatest(each: Sequence[float]) -> float:
    return max(each) if all(map(np.isfinite, each)) else float("inf")


def _trained(
    name: str, seed: int, epochs: int, scaled: bool, state_dtype: Any = None, weights: str | None = None
) -> Array:
    """The weights of a small network after some epochs on the handwritten digits, as one vector in float64.

    Where `weights` are of a kind, the network is in bfloat16; an empty kind is a plain one.
    """
    import torch
    from sklearn.datasets import load_digits

    import rulec.torch

    images, labels = load_digits(return_X_y=True)
    images = (images - images.mean(0)) / (images.std(0) + 1e-6) if scaled else images / 16.0
    x, y = torch.tensor(images, dtype=torch.float32), torch.tensor(labels)
    torch.manual_seed(seed)
    net = torch.nn.Sequential(
        torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)
    )
    if weights is not None:
        net, x, state_dtype = net.bfloat16(), x.bfloat16(), "float32"
    optimizer = getattr(rulec.torch, name)(net.parameters(), lr=1e-3, state_dtype=state_dtype, weights=weights)
    order = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for batch in torch.split(torch.randperm(len(x), generator=order), BATCH):
            optimizer.zero_grad()
            loss: Any = torch.nn.functional.cross_entropy(net(x[batch]), y[batch])
            loss.backward()
            optimizer.step()
    return np.concatenate([p.detach().double().numpy().ravel() for p in net.parameters()])


# How fast


def _speeds(backend: str, elements: int, rounds: int) -> Iterator[Row]:
    """A step of AdamW on one tensor for each format, against the step with states in float32."""
    import rulec.torch

    steps = {
        form: rulec.torch.AdamW(tensors(1, elements), state_dtype=form, backend=backend).step
        for form in ("float32", *SPEEDS)
    }
    times = interleaved(steps, rounds, settled=True)
    for form, target in SPEEDS.items():
        yield _speed(times, form, "float32", target, f"AdamW, {elements:,} elements, {backend}, states in", elements)


def _weight_speeds(backend: str, elements: int, rounds: int) -> Iterator[Row]:
    """A step of AdamW with states in float32 for each kind of bfloat16 weights, against float32 weights."""
    import torch

    import rulec.torch

    def step(kind: str) -> Callable[[], object]:
        params = tensors(1, elements)
        if kind != "float32":
            brain = [torch.nn.Parameter(p.detach().bfloat16()) for p in params]
            for p, wide in zip(brain, params, strict=True):
                p.grad = None if wide.grad is None else wide.grad.bfloat16()
            params = brain
        weights = None if kind == "float32" else kind
        return rulec.torch.AdamW(params, state_dtype="float32", backend=backend, weights=weights).step

    times = interleaved({kind: step(kind) for kind in ("float32", *WEIGHT_SPEEDS)}, rounds, settled=True)
    title = f"AdamW, {elements:,} elements, {backend}, weights"
    for kind, target in WEIGHT_SPEEDS.items():
        yield _speed(times, kind, "float32", target, title, elements)
    yield _speed(times, "split", "master", 1.0, title, elements)


def _speed(times: Any, which: str, base: str, target: float | None, title: str, elements: int) -> Row:
    """The speed of a step in units of another's."""
    seconds = times.medians()
    detail = {"seconds": seconds[which], base: seconds[base], "scatter": times.quartiles(which, base)}
    measure = f"step, times as fast as with {base}; {1e9 * seconds[which] / elements:.2f} ns an element"
    return Row(f"{title} {which}", measure, times.ratio(base, which), target, "at least", detail=detail)
