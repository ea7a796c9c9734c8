"""`rulec bench offload`: the step on the host of states and float32 weights that lie there, for weights in 16 bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

from benchmarks.gpu.tensors import Shape, gpt
from benchmarks.kernels import threads
from benchmarks.peers import Maker, host_makers
from benchmarks.result import Result, Row
from benchmarks.stages import bound_limit
from benchmarks.tensors import have_torch
from rulec.compiler.layout import traffic
from rulec.language.library.load import load
from rulec.tools.compare.measure import Times, interleaved

#: Elements of a buffer that gradients or new weights are copied through: 64 MiB of bfloat16. There are so many of each
#: and they are used again and again.
BUFFER, BUFFERS = 2**25, 3

#: Some 50 million elements: in two matrices, the first as large as a buffer, and in the tensors of a GPT.
SIZES: Mapping[str, list[Shape]] = {
    "50M elements in 2 matrices": [(4096, 8192), (2008, 8192)], "51M elements, a GPT of 100 tensors": gpt(8, 512),
}  # fmt: skip
QUICK: Mapping[str, list[Shape]] = {"2 matrices": [(64, 64), (32, 64)], "a GPT of 16 tensors": [*gpt(1, 8)[1:]]}

#: The rules, and those that are compared with other libraries.
RULES, COMPARED = ("adamw", "lion", "adafactor"), ("adamw",)

ROUNDS, QUICK_ROUNDS = 11, 3

#: The targets: of the limit's speed; times as fast as others that read and write the same 16-bit arrays.
OF_LIMIT, OF_TORCHAO, OF_DEEPSPEED = 0.9, 1.5, 1.0

LIMIT = "host step, of the speed of its stages' limit"

#: What a peer's step reads and writes, and the words for it.
WAYS: Mapping[str, str] = {
    "16 bits": "with bfloat16 gradients and new weights",
    "float32": "with float32 gradients and weights",
    "bfloat16": "all in bfloat16",
}

#: What is measured, one line of progress for each.
PARTS = len(RULES) * len(SIZES)


def measure(quick: bool, advance: Callable[[], object] = lambda: None) -> Result:
    """The measurement; `advance` is called after each of its `PARTS`."""
    notes: list[str] = []
    rows = [*_host(quick, notes, advance)] if have_torch(notes) else []
    return Result("offload", rows, quick, threads(), notes)


def _host(quick: bool, notes: list[str], advance: Callable[[], object]) -> Iterator[Row]:
    """The rows of the host's step."""
    makers = host_makers()
    if "DeepSpeed" not in makers:
        notes.append("DeepSpeedCPUAdam is left out: deepspeed is not installed")
    for rule in RULES:
        for label, shapes in (QUICK if quick else SIZES).items():
            yield from _rows(rule, label, shapes, makers if rule in COMPARED else {}, quick)
            advance()


def _rows(rule: str, label: str, shapes: list[Shape], makers: Mapping[str, Maker], quick: bool) -> Iterator[Row]:
    host, peers = HostStep(rule, shapes), _peers(makers, shapes)
    contenders = {"step": host.step, "limit": host.limit(), **{f"{name}, {way}": step for name, way, step in peers}}
    times = interleaved(contenders, QUICK_ROUNDS if quick else ROUNDS)
    subject, moved = f"{rule}, {label}", host.bytes_moved()
    detail = {
        "step": times.median("step"), "limit": times.median("limit"), "bytes": moved,
        "bytes_per_second": moved / times.median("step"), "scatter": times.quartiles("limit", "step"),
    }  # fmt: skip
    yield Row(subject, LIMIT, times.ratio("limit", "step"), OF_LIMIT, detail=detail)
    for name, way, _ in peers:
        yield _against(subject, name, way, times)


def _against(subject: str, name: str, way: str, times: Times) -> Row:
    """A peer's time over that of the step; a target for a peer that reads and writes the same."""
    theirs = f"{name}, {way}"
    target = {"torchao": OF_TORCHAO, "DeepSpeed": OF_DEEPSPEED}[name] if way == "16 bits" else None
    detail = {"step": times.median("step"), name: times.median(theirs), "scatter": times.quartiles(theirs, "step")}
    return Row(
        subject, f"host step, times as fast as {name}'s {WAYS[way]}", times.ratio(theirs, "step"), target, detail=detail
    )


class HostStep:
    """The step of a rule on the host, over tensors of these shapes, a buffer's worth of them at once.

    bfloat16 gradients lie in one ring of buffers, and new bfloat16 weights in another, as copies from and to a device
    find them. float32 weights and the rule's states, in float32, have memory of their own. No step reads a parameter.
    """

    def __init__(self, rule: str, shapes: Sequence[Shape]) -> None:
        import torch

        from rulec.runtime.engine import Engine, default_hyper
        from rulec.torch.tensors.tensors import TorchArrays

        known, sizes = load(rule), [prod(shape) for shape in shapes]
        size = max(*sizes, min(BUFFER, max(BUFFERS, sum(sizes))))  # one larger than a buffer is a load of its own
        self.engine = Engine(known, TorchArrays(), "cpu", {"": "float32"}, weights="master", exclusive=True)
        down, up = (torch.randn(BUFFERS, size).mul_(0.02).bfloat16() for _ in range(2))
        #: The tensors of one launch: their numbers, and their gradients.
        self.loads: list[tuple[tuple[int, ...], list[Any]]] = []
        for place, those in enumerate(_loads(shapes, size)):
            params, grads = (_cut(ring[place % BUFFERS], those) for ring in (up, down))
            ids = tuple(self.engine.add(p, 0, f"{place}.{i}") for i, p in enumerate(params))
            self.loads.append((ids, grads))
        self._hyper = self.engine.hyper_table([default_hyper(known, {}, "bfloat16")])
        self.step()  # allocates the states

    def step(self) -> None:
        """A step of all tensors, load by load."""
        for ids, grads in self.loads:
            self.engine.step(ids, grads, self._hyper)

    def limit(self) -> Callable[[], object]:
        """A function that moves the bytes of all stages of a step and computes nothing."""
        runs = [run for ids, grads in self.loads for run in self._limits(ids, grads)]

        def all_runs() -> None:
            for run in runs:
                run()

        return all_runs

    def _limits(self, ids: Sequence[int], grads: Sequence[Any]) -> Iterator[Callable[[], object]]:
        """The limits of one launch, one for each bucket of its tensors."""
        by_bucket: dict[int, list[int]] = {}
        for place, number in enumerate(ids):
            by_bucket.setdefault(id(self.engine.tensors[number].bucket), []).append(place)
        for places in by_bucket.values():
            tensors = [self.engine.tensors[ids[place]] for place in places]
            bucket = tensors[0].bucket
            assert bucket is not None
            version = bucket.compiled()
            yield bound_limit(
                version.program, version.layout, [t.view for t in tensors], [t.array for t in tensors],
                [grads[place] for place in places], [bucket.states[t.position] for t in tensors],
            )  # fmt: skip

    def bytes_moved(self) -> float:
        """The bytes that all stages of a step read and write, of all tensors."""
        versions = [(bucket.compiled(), bucket.tensors) for bucket in self.engine.buckets.values()]
        return sum(sum(traffic(v.program, v.layout)) * sum(t.numel for t in tensors) for v, tensors in versions)


def _loads(shapes: Sequence[Shape], size: int) -> Iterator[list[Shape]]:
    """The shapes in their order, as many together as a buffer of this size has room for."""
    together: list[Shape] = []
    for shape in shapes:
        if together and sum(map(prod, [*together, shape])) > size:
            yield together
            together = []
        together.append(shape)
    yield together


def _cut(buffer: Any, shapes: Sequence[Shape]) -> list[Any]:
    """Tensors of these shapes in a buffer, one behind the other."""
    sizes = [prod(shape) for shape in shapes]
    parts = buffer[: sum(sizes)].split(sizes)
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _peers(makers: Mapping[str, Maker], shapes: Sequence[Shape]) -> list[tuple[str, str, Callable[[], object]]]:
    """Other libraries' steps on the host: name, way and step."""
    steps: list[tuple[str, str, Callable[[], object]]] = []
    for name, maker in makers.items():
        params = _parameters(shapes, "float32")
        step = maker(params)
        steps += [(name, "16 bits", _converted(step, params)), (name, "float32", step)]
        if name == "torchao":
            steps.append((name, "bfloat16", maker(_parameters(shapes, "bfloat16"))))
    return steps


def _parameters(shapes: Sequence[Shape], dtype: str) -> list[Any]:
    import torch

    kind = getattr(torch, dtype)
    params = [torch.randn(shape).mul_(0.02).to(kind).requires_grad_() for shape in shapes]
    for param in params:
        param.grad = torch.randn(param.shape).mul_(0.02).to(kind)
    return params


def _converted(step: Callable[[], object], params: Sequence[Any]) -> Callable[[], object]:
    """A step of float32 parameters that takes bfloat16 gradients and leaves the new parameters in bfloat16 too."""
    import torch

    grads, new = ([torch.zeros_like(p, dtype=torch.bfloat16).fill_(0.02) for p in params] for _ in range(2))

    @torch.no_grad()
    def converted() -> None:
        for param, grad in zip(params, grads, strict=True):
            param.grad.copy_(grad)
        step()
        for param, copy in zip(params, new, strict=True):
            copy.copy_(param)

    return converted
