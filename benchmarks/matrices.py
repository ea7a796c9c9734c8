"""`rulec bench matrices`: rules with matrix functions on the weights of layers, against torch and their products."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks.kernels import threads
from benchmarks.peers import EVERY, makers
from benchmarks.result import Result, Row
from benchmarks.tensors import have_torch, tensors
from rulec.tools.compare.measure import interleaved

Shape = tuple[int, int]

#: Of Muon: (matrices, shape of each).
MUON: Sequence[tuple[int, Shape]] = ((8, (1024, 1024)), (1, (1024, 4096)), (1, (4096, 1024)), (1, (2048, 2048)))
QUICK_MUON: Sequence[tuple[int, Shape]] = ((2, (64, 64)), (1, (64, 128)))
ROUNDS, QUICK_ROUNDS = 9, 3

#: The targets of Muon: times as fast as torch's, and the share of a step outside the matrix products.
OF_TORCH, OUTSIDE = 1.0, 0.15

#: Of Apollo's state at a rank of 1 % of a matrix's shorter side: (shapes, bytes for each byte of weights).
STATE_SHAPES: Sequence[Shape] = ((4096, 4096), (1024, 4096))
STATE = 0.05

#: Times as fast as other libraries, for rules that decompose matrices.
OF_OTHERS = 1.3

#: Of the rules that decompose: (matrices, shape of each).
DECOMPOSED: tuple[int, Shape] = (4, (512, 512))
QUICK_DECOMPOSED: tuple[int, Shape] = (1, (32, 32))
DECOMPOSE_ROUNDS = 5

#: What the rows say.
FASTER = "step, times as fast as torch.optim.Muon"
SHARE = "share of the step outside the matrix products"
KEPT = "bytes of state for each byte of weights"


def measure(quick: bool, only: Sequence[str], advance: Callable[[], object] = lambda: None) -> Result:
    """The measurement; `only` restricts it to some rules, `advance` is called after each part."""
    notes: list[str] = []
    with_torch = have_torch(notes)
    rows: list[Row] = []
    for part in _parts(quick, only, notes):
        rows += part() if with_torch else ()
        advance()
    return Result("matrices", rows, quick, threads(), notes)


def parts(quick: bool, only: Sequence[str]) -> int:
    """The number of calls of `advance` in `measure`."""
    return len(_parts(quick, only, []))


def _parts(quick: bool, only: Sequence[str], notes: list[str]) -> list[Callable[[], Iterator[Row]]]:
    muon, rounds = (QUICK_MUON, QUICK_ROUNDS) if quick else (MUON, ROUNDS)
    decomposed = partial(
        _decomposed,
        size=QUICK_DECOMPOSED if quick else DECOMPOSED,
        rounds=QUICK_ROUNDS if quick else DECOMPOSE_ROUNDS,
        notes=notes,
    )
    named_parts: list[tuple[str, Callable[[], Iterator[Row]]]] = [
        *(("muon", partial(_muon, count, shape, rounds, notes)) for count, shape in muon),
        *(("apollo", partial(_states, shape)) for shape in STATE_SHAPES),
        *((name, partial(decomposed, name)) for name in ("soap", "shampoo")),
    ]
    return [part for name, part in named_parts if not only or name in only]


def _muon(count: int, shape: Shape, rounds: int, notes: list[str]) -> Iterator[Row]:
    """Our step, torch's where it has one, and the matrix products of ours alone."""
    import torch

    contenders: dict[str, Callable[[], object]] = {
        "step": _our_step("muon", tensors(count, shape)),
        "orthogonalization": _orthogonalization(count, shape),
        "products": _products(count, shape),
    }
    if hasattr(torch.optim, "Muon"):
        contenders["torch"] = torch.optim.Muon(tensors(count, shape)).step
    else:
        notes.append("muon: this torch has no torch.optim.Muon to compare with")
    times = interleaved(contenders, rounds)
    subject = f"muon, {_named(count, shape)}"
    if "torch" in contenders:
        detail = {**times.medians(), "scatter": times.quartiles("torch", "step")}
        yield Row(subject, FASTER, times.ratio("torch", "step"), OF_TORCH, detail=detail)
    detail = {**times.medians(), "outside the orthogonalization": 1 - times.ratio("orthogonalization", "step")}
    yield Row(subject, SHARE, 1 - times.ratio("products", "step"), OUTSIDE, "at most", detail=detail)


def _orthogonalization(count: int, shape: Shape) -> Callable[[], object]:
    """The matrix function of the step alone, casts and norm included, over gradients."""
    from rulec.language.expr.node import Op
    from rulec.torch.tensors.matrix import TORCH_MATRIX

    function = TORCH_MATRIX[Op.NEWTON_SCHULZ]
    operands = [tensor.grad.numpy()[None] for tensor in tensors(count, shape)]
    return lambda: [function(x, 5.0, dtype="bfloat16") for x in operands]


def _products(count: int, shape: Shape) -> Callable[[], object]:
    """The products of five iterations alone, each with the sum that is part of it: nothing is cast or normalized."""
    import torch

    from rulec.torch.tensors.matrix import gram, polynomial

    wide = [t.grad if shape[0] <= shape[1] else t.grad.T for t in tensors(count, shape)]
    operands = [(x / x.norm()).to(torch.bfloat16) for x in wide]

    def run() -> None:
        for x in operands:
            for _ in range(5):
                torch.addmm(x, polynomial(gram(x), 1.0, 1.0), x)

    return run


def _states(shape: Shape) -> Iterator[Row]:
    """The bytes of Apollo's state, with a target, and of AdamW's beside it."""
    rank = max(1, round(0.01 * min(shape)))
    subject = f"one of {shape[0]:,} by {shape[1]:,}"
    yield _kept("apollo", f"apollo of rank {rank}, {subject}", shape, {"rank": rank}, STATE)
    yield _kept("adamw", f"adamw, {subject}", shape, {}, None)


def _kept(name: str, subject: str, shape: Shape, keywords: Mapping[str, Any], target: float | None) -> Row:
    import rulec.torch

    params = tensors(1, shape)
    optimizer = rulec.torch.optimizer(name)(params, **keywords)
    optimizer.step()
    states = {k: v.numel() * v.element_size() for k, v in optimizer.state[params[0]].items()}
    weights = params[0].numel() * params[0].element_size()
    detail = {"weights": weights, "states": states}
    return Row(subject, KEPT, sum(states.values()) / weights, target, "at most", detail=detail)


def _decomposed(name: str, size: tuple[int, Shape], rounds: int, notes: list[str]) -> Iterator[Row]:
    """The steps from one decomposition to the next, ours and other libraries'."""
    theirs = {kind: _repeated(make(tensors(*size))) for kind, make in makers(name).items()}
    if not theirs:
        notes.append(f"{name}: pytorch_optimizer, to compare with, is not installed")
        return
    times = interleaved({"step": _repeated(_our_step(name, tensors(*size))), **theirs}, rounds)
    for kind in theirs:
        seconds = {contender: times.median(contender) / EVERY for contender in ("step", kind)}
        detail = {**seconds, "scatter": times.quartiles(kind, "step")}
        measure = f"step, times as fast as {kind}"
        yield Row(f"{name}, {_named(*size)}", measure, times.ratio(kind, "step"), OF_OTHERS, detail=detail)


def _repeated(step: Callable[[], object]) -> Callable[[], object]:
    return lambda: [step() for _ in range(EVERY)]


def _our_step(name: str, params: list[Any]) -> Callable[[], object]:
    import rulec.torch

    step: Callable[[], object] = rulec.torch.optimizer(name)(params).step
    return step


def _named(count: int, shape: Shape) -> str:
    return f"{count} matri{'x' if count == 1 else 'ces'} of {shape[0]:,} by {shape[1]:,}"
