"""Muon on the matrices of GPT-2 XL: its step beside its products alone, and beside other libraries one at a time."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

from benchmarks.gpu.device import Bench
from benchmarks.gpu.part import Finding, Part
from benchmarks.gpu.peers import Peer
from benchmarks.gpu.rules import AS_FAST, QUICK_ROUNDS, step_of
from benchmarks.gpu.tensors import Shape, Size, gpt2_xl, make, parameters
from benchmarks.gpu.time import Step, timed
from benchmarks.result import Row
from rulec.errors import RulecError
from rulec.language.expr.newton_schulz import multiplications
from rulec.language.expr.static import DIRECT, GRAM
from rulec.tools.compare.measure import Times

ROUNDS = 15

#: The targets: times as fast as each other library's step, and times the products alone.
OF_PEERS, OF_PRODUCTS = 1.5, 1.15

#: Elements of the stacks that are tried beside those of the adapter.
LARGER = 1 << 27

PRODUCTS = "step, times its products alone"

#: Iterations of a step, and what is counted of each: of a symmetric product, half of what a plain one takes.
ITERATIONS = 5
COUNTED: Mapping[str, float] = {"gram": 0.5, "polynomial": 0.5, "last": 1.0}
_SAID = (
    "5 times half of the product of a matrix and its transpose, half of the square of that, and the product of both; "
    "by torch.bmm and torch.baddbmm in bfloat16, matrices of one shape in one batch"
)

#: The forms of `newton_schulz`, and what a subject says of them.
FORMS = {DIRECT: "", GRAM: " by Gram matrices"}
MULTIPLICATIONS, LAUNCHES = "multiplications of a step, half of symmetric products", "launches of products in a step"

#: Muon of each library, with Nesterov's momentum and, where they have one, its own kernel for symmetric products.
PEERS = (
    Peer("torch.optim.Muon", "torch.optim", "Muon", {"nesterov": True}),
    Peer("dion's Muon", "dion", "Muon", {"nesterov": True, "use_triton": True}),
    Peer(
        "emerging-optimizers' Muon", "emerging_optimizers.orthogonalized_optimizers", "Muon",
        {"nesterov": True, "use_syrk": True},
    ),
    Peer("HeavyBall's Muon", "heavyball", "Muon", {"nesterov": True}),
)  # fmt: skip


def parts(only: Sequence[str]) -> list[Part]:
    """The products, each library that is installed, the other form, and other stacks."""
    if only and "muon" not in only:
        return []
    there = [peer for peer in PEERS if not peer.missing]
    return [
        Part("muon on GPT-2 XL against its products", products),
        *(Part(f"muon on GPT-2 XL against {p.name}", against, (p.name,), 150.0, 20.0) for p in there),
        Part("muon on GPT-2 XL by Gram matrices", forms),
        Part("muon on GPT-2 XL with larger stacks", stacks),
    ]


def missing(only: Sequence[str]) -> list[str]:
    """A note for each library that is not installed."""
    return [peer.missing for peer in PEERS if peer.missing] if not only or "muon" in only else []


def matrices(bench: Bench) -> Size:
    """The matrices of all layers of GPT-2 XL."""
    if bench.quick:
        return Size("8 matrices", [(16, 48), (16, 16), (16, 64), (64, 16)] * 2)
    return Size("the 192 matrices of GPT-2 XL", [shape for shape in gpt2_xl() if len(shape) == 2][2:])


def products(bench: Bench) -> Iterator[Finding]:
    """The step, and the products that it cannot do without."""
    size = matrices(bench)
    alone = Products(bench, size.shapes)
    contenders = {"step": [step_of("muon", parameters(bench, size))], **alone.contenders()}
    times = timed(bench.device, contenders, _rounds(bench), 8.0)
    both = with_products(times)
    rate = 1e-12 * alone.flops / both.median("products")
    detail = {
        **times.medians(), **both.detail("step", "products"), "counted": _SAID, "teraflops of the products": rate,
    }  # fmt: skip
    yield Row(f"muon, {size.name}", PRODUCTS, both.ratio("step", "products"), OF_PRODUCTS, "at most", detail=detail)


def with_products(times: Times) -> Times:
    """The seconds of a step and of its products, round by round; all else as in `times`."""
    rounds = zip(*(times.seconds[name] for name in COUNTED), strict=True)
    counted = [ITERATIONS * sum(c * s for c, s in zip(COUNTED.values(), one, strict=True)) for one in rounds]
    return replace(times, seconds={"step": times.seconds["step"], "products": counted})


def forms(bench: Bench) -> Iterator[Finding]:
    """The step in both forms of `newton_schulz`: its time, its counted multiplications and its launches of products."""
    size = matrices(bench)
    params = parameters(bench, size)
    steps = {form: step_in(form, params) for form in FORMS}
    launches = {form: launches_of(step) for form, step in steps.items()}
    times = timed(bench.device, {form: [step] for form, step in steps.items()}, _rounds(bench), 8.0)
    for form, way in FORMS.items():
        subject, seconds = f"muon{way}, {size.name}", times.median(form)
        work = multiplied(size.shapes, form)
        detail = {**times.detail(DIRECT, GRAM), "multiplications a second": work / seconds}
        yield Row(subject, "step", 1e3 * seconds, unit="ms", detail=detail)
        yield Row(subject, MULTIPLICATIONS, 1e-12 * work, unit="10^12")
        yield Row(subject, LAUNCHES, launches[form])
    detail = times.detail(DIRECT, GRAM)
    yield Row(
        f"muon by Gram matrices, {size.name}", f"{AS_FAST} the direct form", times.ratio(DIRECT, GRAM), detail=detail
    )


def step_in(form: str, params: list[Any]) -> Step:
    """The step in a form of `newton_schulz`."""
    return step_of("muon", params, ns_form=None if form == DIRECT else form)


def multiplied(shapes: Sequence[Shape], form: str) -> float:
    """The multiplications of a step, of symmetric products half."""
    return sum(multiplications(rows, cols, ITERATIONS, form, symmetric_share=0.5) for rows, cols in shapes)


def launches_of(step: Step) -> int:
    """The kernels of products that a step launches: none where the matrices are torch's."""
    kind = importlib.import_module("rulec_backends.triton.quintic_call").Work
    launched, run = 0, kind.run

    def counting(work: Any, *arguments: Any) -> None:
        nonlocal launched
        launched += 1
        run(work, *arguments)

    with mock.patch.object(kind, "run", counting):
        step()
    return launched


def stacks(bench: Bench) -> Iterator[Finding]:
    """The step with larger stacks of matrices, beside the step as it is."""
    size = matrices(bench)
    params = parameters(bench, size)
    contenders = {"step": [step_of("muon", params)], "larger": [_with_stacks(params, LARGER)]}
    times = timed(bench.device, contenders, _rounds(bench), 4.0)
    measure = f"step, times as fast with stacks of {LARGER >> 20} Mi elements"
    detail = times.detail("step", "larger")
    yield Row(f"muon, {size.name}", measure, times.ratio("step", "larger"), detail=detail)


def _with_stacks(params: list[Any], elements: int) -> Step:
    """The step with stacks of so many elements: the first step decides, and is taken here."""
    from rulec.torch.tensors import library

    with mock.patch.object(library, "_STACKED", elements):
        step = step_of("muon", params)
        step()
    return step


class Products:
    """The three products of an iteration, each of all matrices, those of one shape in one batch."""

    def __init__(self, bench: Bench, shapes: Sequence[Shape]) -> None:
        counts = Counter((min(shape), max(shape)) for shape in shapes)
        self.flops = 2 * multiplied(shapes, DIRECT)
        self._sets = [self._batch(bench, n, m, k) for (m, k), n in counts.items()]

    @staticmethod
    def _batch(bench: Bench, count: int, rows: int, cols: int) -> dict[str, Any]:
        square, wide = (count, rows, rows), (count, rows, cols)
        spread = cols**-0.5
        return {
            "x": make(bench, wide, "bfloat16", spread), "y": make(bench, wide, "bfloat16", spread),
            "a": make(bench, square, "bfloat16", spread), "b": make(bench, square, "bfloat16", spread),
        }  # fmt: skip

    def contenders(self) -> dict[str, Sequence[Step]]:
        """Each product by itself."""
        return {"gram": [self.gram], "polynomial": [self.polynomial], "last": [self.last]}

    def gram(self) -> None:
        """`a = x x'`."""
        import torch

        for one in self._sets:
            torch.bmm(one["x"], one["x"].mT, out=one["a"])

    def polynomial(self) -> None:
        """`b = -4.775 a + 2.0315 a a`."""
        import torch

        for one in self._sets:
            torch.baddbmm(one["a"], one["a"], one["a"], beta=-4.775, alpha=2.0315, out=one["b"])

    def last(self) -> None:
        """`y = 3.4445 x + b x`."""
        import torch

        for one in self._sets:
            torch.baddbmm(one["x"], one["b"], one["x"], beta=3.4445, out=one["y"])


def against(bench: Bench, name: str) -> Iterator[Finding]:
    """Our step beside a library's, over the same parameters and gradients."""
    (peer,) = (peer for peer in PEERS if peer.name == name)
    size = matrices(bench)
    yield versus(bench, f"muon, {size.name}", peer, "muon", parameters(bench, size), _rounds(bench))


def versus(
    bench: Bench, subject: str, peer: Peer, rule: str, params: list[Any], rounds: int, steps: int = 1,
    target: float | None = OF_PEERS, **keywords: Any,
) -> Row:  # fmt: skip
    """The speed of `steps` of ours in times of a library's, which is to be the target at least."""
    contenders = {
        "step": [repeated(step_of(rule, params, **keywords), steps)],
        "peer": [repeated(peer.step(params), steps)],
    }
    times = timed(bench.device, contenders, rounds, 8.0)
    if any(param.grad is None for param in params):
        raise RulecError(f"{peer.name} took gradients away, after which a step has nothing to do")
    each = {name: seconds / steps for name, seconds in times.medians().items()}
    detail = {**times.detail("peer", "step"), **each, "steps": steps}
    return Row(subject, f"{AS_FAST} {peer.name}", times.ratio("peer", "step"), target, detail=detail)


def repeated(step: Step, times: int) -> Step:
    """A step so many times."""
    return step if times == 1 else lambda: [step() for _ in range(times)]


def _rounds(bench: Bench) -> int:
    return QUICK_ROUNDS if bench.quick else ROUNDS
