"""`rulec bench states`: how far runs with small states or weights end from runs in floats, and the cost of a step."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.kernels import threads
from benchmarks.result import Result, Row
from benchmarks.tensors import have_torch, tensors
from benchmarks.trained import Array, digits, letters
from rulec.tools.compare.measure import interleaved

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
    "both in bfloat16_sr": ("bfloat16_sr", None),
}

#: Kinds of bfloat16 weights, of which the plain one has no name.
WEIGHTS = ("", "split", "split24", "kahan", "stochastic")

#: Format -> the least speed of a step wanted, in units of the step with states in float32: of dynamic8 with AVX-512.
SPEEDS: Mapping[str, float | None] = {
    "int8": 1.1, "softsign8": 0.9, "dynamic8": 0.6, "float8_e4m3": None, "float8_e5m2": None, "dynamic4": None,
    "bfloat16_sr": None,
}  # fmt: skip

#: The least speed of dynamic8 elsewhere: a vector looks into its tables element by element.
WITHOUT_AVX512 = 0.3

#: Kind of weights -> the same in units of the step of float32 weights; of a split weight also of a master copy.
WEIGHT_SPEEDS: Mapping[str, float | None] = {
    "split": 0.85, "split24": None, "master": None, "kahan": None, "stochastic": 0.8,
}  # fmt: skip
BACKENDS = ("c", "cpu")

#: The storages of the states of a transformer.
LETTERS: Sequence[Any] = ("dynamic8", "int8", {"exp_avg": "dynamic8", "exp_avg_sq": "int8"})

#: Title of a peer's optimizer -> its module and class, and our format of the same width.
PEERS: Mapping[str, tuple[str, str, str]] = {
    "bitsandbytes' AdamW8bit": ("bitsandbytes.optim", "AdamW8bit", "dynamic8"),
    "torchao's AdamW8bit": ("torchao.optim", "AdamW8bit", "dynamic8"),
    "torchao's AdamW4bit": ("torchao.optim", "AdamW4bit", "dynamic4"),
}
PEERS_ELEMENTS = 1_000_000
ELEMENTS, QUICK_ELEMENTS = 20_000_000, 200_000
EPOCHS, SEEDS, STEPS, QUICK_STEPS = 3, 3, 300, 5
PARTS = (len(OPTIMIZERS) + 1) * len(STORAGES) + len(WEIGHTS) + len(LETTERS) + 2 * len(BACKENDS) + 1


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
        rows += _letters_distances(QUICK_STEPS if quick else STEPS, advance)
        for backend in BACKENDS:
            for speeds in (_speeds, _weight_speeds):
                rows += speeds(backend, QUICK_ELEMENTS if quick else ELEMENTS, 3 if quick else 11)
                advance()
        rows += _peers(QUICK_ELEMENTS if quick else PEERS_ELEMENTS, 3 if quick else 11, notes)
        advance()
    return Result("states", rows, quick, threads(), notes)


# How far


def _distance(name: str, storage: str, state_dtype: Any, target: float | None, scaled: bool, seeds: int) -> Row:
    """The greatest distance over some seeds, in units of the way that the weights went in floats.

    If pixels are not `scaled`, those at the border are nearly always zero: states of neighbours differ most.
    """
    each = []
    for seed in range(seeds):
        runs = (None, 0), (None, EPOCHS), (state_dtype, EPOCHS)
        each.append(_apart(*(digits(name, seed, epochs, scaled, state_dtype=dtype) for dtype, epochs in runs)))
    inputs = "pixels of equal variance" if scaled else "plain pixels"
    measure = f"distance from the run in floats, {EPOCHS} epochs of digits, {inputs}"
    return Row(f"{name}, {storage}", measure, _greatest(each), target, "at most", detail={"each": each})


def _weights_distance(kind: str, seeds: int) -> Row:
    """The same of bfloat16 weights of a kind, from the run of weights with a master copy."""
    each = []
    for seed in range(seeds):
        runs = ("master", 0), ("master", EPOCHS), (kind, EPOCHS)
        each.append(_apart(*(digits("AdamW", seed, epochs, True, weights=w) for w, epochs in runs)))
    measure = f"distance from the run with a master copy, {EPOCHS} epochs of digits in bfloat16"
    return Row(f"AdamW, weights {kind or 'plain'}", measure, _greatest(each), detail={"each": each})


def _letters_distances(steps: int, advance: Callable[[], object]) -> Iterator[Row]:
    """Runs of a transformer, and the distance that a change of 0.1 % of the first weights makes: the target's base."""
    first, exact = letters(0), letters(steps)
    base = _apart(first, exact, letters(steps, changed=1e-3))
    for storage in LETTERS:
        words = " and ".join(f"{k} in {v}" for k, v in storage.items()) if isinstance(storage, Mapping) else storage
        distance = _apart(first, exact, letters(steps, storage))
        measure = f"distance from the run in floats, {steps} steps of a transformer of characters"
        detail = {"changed": base}
        yield Row(f"AdamW, states in {words}", measure, distance, base + 0.03, "at most", detail=detail)
        advance()


def _apart(first: Array, exact: Array, run: Array) -> float:
    """The distance of the end of a run from that of the exact run, in units of the exact run's way."""
    return float(np.linalg.norm(run - exact) / np.linalg.norm(exact - first))


def _greatest(each: Sequence[float]) -> float:
    return max(each) if all(map(np.isfinite, each)) else float("inf")


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
        if form == "dynamic8" and not _has_avx512():
            target = WITHOUT_AVX512
        yield _speed(times, form, "float32", target, f"AdamW, {elements:,} elements, {backend}, states in", elements)


def _has_avx512() -> bool:
    """Whether the processor has vectors of 512 bits."""
    from llvmlite import binding

    return bool(binding.get_host_cpu_features().get("avx512f"))


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


def _peers(elements: int, rounds: int, notes: list[str]) -> Iterator[Row]:
    """A step of the cpu backend against those of installed peers."""
    import rulec.torch

    for peer, (module, name, form) in PEERS.items():
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            notes.append(f"{peer} is left out: {module.partition('.')[0]} is not installed")
            continue
        theirs = getattr(importlib.import_module(module), name)(tensors(1, elements)).step
        ours = rulec.torch.AdamW(tensors(1, elements), state_dtype=form).step
        times = interleaved({form: ours, peer: theirs}, rounds, settled=True)
        yield _speed(times, form, peer, 10, f"AdamW, {elements:,} elements, cpu, states in", elements)
