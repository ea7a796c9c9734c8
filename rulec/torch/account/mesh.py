"""A step on a mesh of devices, on paper: the bytes that each keeps and sends, and its share of the work on matrices.

Parameters are cut along their first dimension, as by `fully_shard`; replicas have the same parts, and share the work.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode

from rulec.arrays.matrix import iterations
from rulec.compiler.layout import ITEM_SIZE
from rulec.compiler.routing import Router
from rulec.compiler.view import MatrixView, matrix_view
from rulec.errors import HyperError
from rulec.language.node import Node, Op, walk
from rulec.language.rule import Rule
from rulec.memory.live import Account
from rulec.runtime.exchange import BUCKET
from rulec.runtime.owners import Division, Load, Schedule, owners_by_parts, schedule_of, share_pays
from rulec.torch.account.meter import Training
from rulec.torch.tags import tagged_groups
from rulec.torch.tensors import DTYPES

#: The dtype of elements on their way, in which `newton_schulz` works.
_TRAVELS = "bfloat16"


@dataclass(frozen=True)
class Mesh:
    """Replicas, each of so many shards."""

    replicas: int
    shards: int

    @property
    def devices(self) -> int:
        """The number of devices."""
        return self.replicas * self.shards


def mesh_of(text: str) -> Mesh:
    """A mesh written as `64` or, with replicas first, `8x64`; HyperError for other text."""
    match = re.fullmatch(r"(?:([1-9]\d{0,5})x)?([1-9]\d{0,5})", text)
    if match is None:
        raise HyperError(f"--mesh {text!r} must be a number of shards, such as 64, or replicas x shards, such as 8x64")
    return Mesh(int(match[1] or 1), int(match[2]))


@dataclass(frozen=True)
class MeshAccount:
    """What the device with most has, in bytes: `kept` by kind, and sent in a step.

    `model` is sent by `fully_shard` for weights and gradients; `exchanged` by the optimizer for `matrices`, of which
    `least` is the mean over all devices. `work` and `mean_work` are floating-point operations on matrices, two for each
    multiplication.
    """

    mesh: Mesh
    kept: Mapping[str, int]
    model: int
    exchanged: int
    least: int
    matrices: int
    work: float
    mean_work: float

    def data(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "devices": self.mesh.devices, "replicas": self.mesh.replicas, "shards": self.mesh.shards,
            "kept": dict(self.kept), "sent": {"model": self.model, "matrices": self.exchanged, "least": self.least},
            "matrices": self.matrices, "work": self.work, "mean_work": self.mean_work,
        }  # fmt: skip


def on_mesh(training: Training, measured: Account, mesh: Mesh) -> MeshAccount:
    """The account of a mesh, from that of one device."""
    shapes, exchanged = _shapes(training)
    numel = sum(map(math.prod, shapes))
    first = sum(_part(shape, mesh.shards, 0) for shape in shapes)
    share = first / numel if numel else 0.0
    kept = {kind: round(measured.peak[kind] * share) for kind in ("weights", "gradients", "state")}
    size = ITEM_SIZE[training.dtype]
    # Weights are gathered for both passes, and gradients reduced and scattered; then reduced over replicas.
    others = 3 * size * first * (mesh.shards - 1)
    replicas = 2 * size * first * (mesh.replicas - 1) // mesh.replicas
    sent, work = [0] * mesh.devices, [0.0] * mesh.devices
    if mesh.shards > 1:
        schedule, size = _schedule([view.shape for view, _ in exchanged], [view.work for view, _ in exchanged], mesh)
        sent = schedule.sent(size) * (mesh.devices // size)
        for (view, steps), owner in zip(exchanged, schedule.owners, strict=True):
            for device in range(owner, mesh.devices, size):
                work[device] += 2 * steps * view.work
    else:
        # Whole replicas exchange nothing.
        work = [sum(2 * steps * view.work for view, steps in exchanged)] * mesh.devices
    return MeshAccount(
        mesh, kept, others + replicas, max(sent), sum(sent) // mesh.devices, len(exchanged), max(work),
        sum(work) / mesh.devices,
    )  # fmt: skip


def _shapes(training: Training) -> tuple[list[tuple[int, ...]], list[tuple[MatrixView, int]]]:
    """The shapes of all parameters, and the views of those whose matrices are exchanged, with their iterations."""
    rule = training.rule.standalone()
    router = Router(rule)
    with FakeTensorMode(allow_non_fake_inputs=True):
        groups = tagged_groups(training.model(dtype=DTYPES[training.dtype], device="cpu"))
        params = [(name, tuple(p.shape), frozenset(g["tags"])) for g in groups for name, p in g["params"]]
    exchanged = []
    for name, shape, tags in params:
        chosen = router.choose(shape, tags, name)
        steps = _iterations(chosen, training.hyper)
        if steps:
            exchanged.append((matrix_view(shape, chosen.view), steps))
    return [shape for _, shape, _ in params], exchanged


def _iterations(rule: Rule, hyper: Mapping[str, Any]) -> int:
    """The products of `newton_schulz` in a step of a rule, as iterations of it; 0 without."""
    values = {name: hyper.get(name, known.default) for name, known in rule.hyper.items()}
    calls = [part for part in walk(rule.expressions) if part.op is Op.NEWTON_SCHULZ]
    return sum(iterations(_number(call.args[1], values)) for call in calls)


def _number(value: Node, values: Mapping[str, Any]) -> float:
    return float(values[str(value.arg)] if value.op in (Op.NAME, Op.HYPER) else value.arg)  # type: ignore[arg-type]


def _part(shape: Sequence[int], shards: int, rank: int) -> int:
    """The elements in a shard: equal ones, until there are no more."""
    rows = shape[0] if shape else 1
    size = -(-rows // shards)
    return max(0, min(size, rows - rank * size)) * math.prod(shape[1:])


def _schedule(shapes: Sequence[tuple[int, ...]], costs: Sequence[float], mesh: Mesh) -> tuple[Schedule, int]:
    """The ways of matrices to their owners and back, among so many devices: all, or those of each replica."""
    known = {shape: _division(shape, mesh.shards) for shape in shapes}
    alone = tuple(known[shape] for shape in shapes)
    every = {shape: Division(division.rectangles * mesh.replicas) for shape, division in known.items()}
    parts, size = tuple(every[shape] for shape in shapes), mesh.devices
    owners, few = owners_by_parts(tuple(costs), size, parts), owners_by_parts(tuple(costs), mesh.shards, alone)
    if not share_pays(costs, owners, few):
        parts, size, owners = alone, mesh.shards, few
    loads = {part: Load(((part, _TRAVELS),), ((part, _TRAVELS),)) for part in parts}
    return schedule_of(tuple(loads[part] for part in parts), owners, size, BUCKET), size


def _division(shape: Sequence[int], shards: int) -> Division:
    """Rows as torch cuts them."""
    rows = -(-shape[0] // shards)
    starts = [min(shape[0], rank * rows) for rank in range(shards)]
    others = tuple(slice(0, side) for side in shape[1:])
    return Division(tuple((slice(start, min(shape[0], start + rows)), *others) for start in starts))
