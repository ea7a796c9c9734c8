"""`rulec bench states`: how far a run with states in codes ends from the run in floats, and what its steps cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from benchmarks.kernels import threads
from benchmarks.result import Result, Row
from benchmarks.tensors import have_torch, tensors
from rulec.compare.interleave import interleaved

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

#: Format -> how fast a step should be, in units of the step with states in float32.
SPEEDS: Mapping[str, float | None] = {
    "int8": 1.1, "softsign8": 0.9, "dynamic8": 0.6, "float8_e4m3": None, "float8_e5m2": None, "dynamic4": None,
}  # fmt: skip
BACKENDS = ("c", "cpu")
ELEMENTS, QUICK_ELEMENTS = 20_000_000, 200_000
EPOCHS, SEEDS, BATCH = 3, 3, 64
PARTS = (len(OPTIMIZERS) + 1) * len(STORAGES) + len(BACKENDS)


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
        for backend in BACKENDS:
            rows += _speeds(backend, QUICK_ELEMENTS if quick else ELEMENTS, 3 if quick else 11)
            advance()
    return Result("states", rows, quick, threads(), notes)


# How far


def _distance(name: str, storage: str, state_dtype: Any, target: float | None, scaled: bool, seeds: int) -> Row:
    """The greatest distance over some seeds, in units of the way that the weights went in floats.

    Where pixels are not `scaled`, those at the border are nearly always zero: states of neighbours differ most.
    """
    each = []
    for seed in range(seeds):
        first, floats, coded = (_trained(name, seed, dtype, epochs, scaled) for dtype, epochs in _runs(state_dtype))
        each.append(float(np.linalg.norm(coded - floats) / np.linalg.norm(floats - first)))
    finite = all(map(np.isfinite, each))
    value = max(each) if finite else float("inf")
    inputs = "pixels of equal variance" if scaled else "plain pixels"
    measure = f"distance from the run in floats, {EPOCHS} epochs of digits, {inputs}"
    return Row(f"{name}, {storage}", measure, value, target, "at most", detail={"each": each})


def _runs(state_dtype: Any) -> list[tuple[Any, int]]:
    """The storage and the epochs of each run: none, in floats, in codes."""
    return [(None, 0), (None, EPOCHS), (state_dtype, EPOCHS)]


def _trained(name: str, seed: int, state_dtype: Any, epochs: int, scaled: bool) -> np.ndarray[Any, Any]:
    """The weights of a small network after some epochs on the handwritten digits, as one vector in float64."""
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
    optimizer = getattr(rulec.torch, name)(net.parameters(), lr=1e-3, state_dtype=state_dtype)
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
    seconds = times.medians()
    for form, target in SPEEDS.items():
        detail = {"seconds": seconds[form], "float32": seconds["float32"], "scatter": times.quartiles(form, "float32")}
        nanoseconds = 1e9 * seconds[form] / elements
        measure = f"step, times that in float32 states; {nanoseconds:.2f} ns an element"
        yield Row(f"AdamW, {elements:,} elements, {backend}, {form}", measure, times.ratio(form, "float32"),
                  target, "at most", detail=detail)  # fmt: skip
