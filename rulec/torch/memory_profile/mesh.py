"""Forecasts a step on a device mesh: the bytes that each device keeps and sends, and its share of matrix work.

Parameters are sharded along dimension 0, as by `fully_shard`; replicas have the same shards, and share the work.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch._subclasses.fake_tensor import FakeTensorMode

from rulec.compiler.layout import ITEM_SIZE, Layout, layout_for, scheduled
from rulec.compiler.pipeline import compile
from rulec.compiler.routing import Router
from rulec.compiler.scalars import ScalarTable
from rulec.compiler.view import MatrixView, view_of
from rulec.errors import HyperError
from rulec.language.expr.node import Node
from rulec.language.rule import Rule
from rulec.memory.live import Account
from rulec.runtime.buckets.hyper import EPS
from rulec.runtime.buckets.plan import Plan
from rulec.runtime.distributed.all_to_all import BUCKET, Sharding, cuts
from rulec.runtime.distributed.owner_plan import OwnerPlan, OwnerTask
from rulec.runtime.distributed.owners import (
    Assignment,
    Division,
    Load,
    Schedule,
    Work,
    assignment,
    schedule_of,
    share_pays,
)
from rulec.runtime.distributed.shards import ShardLayout
from rulec.runtime.storage.allocator import state_specs
from rulec.torch.memory_profile.meter import Training
from rulec.torch.tags import tagged_groups
from rulec.torch.tensors.dtensor import has_matrices
from rulec.torch.tensors.tensors import DTYPES

#: The steps of which the most frequent one counts as usual: late ones, and a hundred of them for rare branches.
_LATE = np.arange(1001.0, 1101.0)


@dataclass(frozen=True)
class Mesh:
    """A device mesh: replicas, each with the same number of shards."""

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
    """The largest bytes of any device: `kept` by kind, and sent in a step.

    `model` is sent by `fully_shard` for weights and gradients; `exchanged` by the optimizer for `matrices`, of which
    `least` is the mean over all devices. `work` and `mean_work` are floating-point operations on matrices, two for each
    multiplication. `shared` of the matrices have several owners, which send one another `between` bytes.
    """

    mesh: Mesh
    kept: Mapping[str, int]
    model: int
    exchanged: int
    least: int
    matrices: int
    work: float
    mean_work: float
    shared: int = 0
    between: int = 0

    def data(self) -> dict[str, Any]:
        """The record as plain dicts and numbers."""
        return {
            "devices": self.mesh.devices, "replicas": self.mesh.replicas, "shards": self.mesh.shards,
            "kept": dict(self.kept), "sent": {"model": self.model, "matrices": self.exchanged, "least": self.least},
            "matrices": self.matrices, "work": self.work, "mean_work": self.mean_work,
            "shared": {"matrices": self.shared, "sent": self.between},
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
    works = [matrix.work for matrix in exchanged]
    # Unsharded replicas send no matrix.
    group, shared = 1, 0
    sent, between, work = np.zeros(1, np.int64), np.zeros(1, np.int64), np.array([sum(x.cost for x in works)])
    if mesh.shards > 1:
        spreads, chosen, group = _owners(exchanged, mesh)
        schedules = [*_schedules(exchanged, spreads, chosen.owners, group)]
        sent, between = (
            sum((np.array(x, np.int64) for x in each), np.zeros(group, np.int64))
            for each in ([s.sent(group) for s in schedules], [s.between(group) for s in schedules])
        )
        work, shared = chosen.load(works, group), sum(len(owners) > 1 for owners in chosen.owners)
    return MeshAccount(
        mesh, kept, others + replicas, int(sent.max()), int(sent.sum()) // group, len(exchanged),
        2 * float(work.max()), 2 * float(work.sum()) / group, shared, int(between.max()),
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Matrix:
    """A parameter whose matrices travel to owner ranks: its view, and the values of its owner in a usual step.

    `states` has the shapes of states with one of their own, by name.
    """

    view: MatrixView
    owner_plan: OwnerPlan
    layout: Layout
    work: Work
    states: Mapping[str, tuple[int, ...]]


def _shapes(training: Training) -> tuple[list[tuple[int, ...]], list[Matrix]]:
    """The shapes of all parameters, and the shapes with matrices for owner ranks."""
    router = Router(training.rule.standalone())
    with FakeTensorMode(allow_non_fake_inputs=True):
        groups = tagged_groups(training.model(dtype=DTYPES[training.dtype], device="cpu"))
        params = [(name, tuple(p.shape), frozenset(g["tags"])) for g in groups for name, p in g["params"]]
    chosen = [(shape, router.choose(shape, tags, name)) for name, shape, tags in params]
    alike: dict[tuple[Rule, tuple[int, ...]], Matrix] = {}
    for shape, rule in chosen:
        if has_matrices(rule) and (rule, shape) not in alike:
            alike[rule, shape] = _matrix(rule, shape, training)
    matrices = [alike[rule, shape] for shape, rule in chosen if (rule, shape) in alike]
    return [shape for shape, _ in chosen], [matrix for matrix in matrices if matrix.owner_plan.whole]


def _matrix(rule: Rule, shape: tuple[int, ...], training: Training) -> Matrix:
    """A parameter of this rule and shape. A usual step has the branches of most steps."""
    view = view_of(rule, shape)
    hyper = {name: float(training.hyper.get(name, known.default)) for name, known in rule.hyper.items()}
    static = {name: hyper[name] for name, known in rule.hyper.items() if known.static}
    facts = {**view.facts, "machine_eps": EPS[training.dtype]}
    program = compile(rule, facts, static)
    if program.predicates:
        table, _ = ScalarTable.of([n for _, n in program.predicates]).evaluate(_LATE.shape, hyper, _LATE, facts, {})
        ((outcome, _),) = Counter(map(tuple, (table != 0).tolist())).most_common(1)
        assumed = {place: truth for (place, _), truth in zip(program.predicates, outcome, strict=True)}
        program = compile(rule, facts, static, assumed)
    program, layout = scheduled(program, layout_for(program, training.dtype))
    owner_plan = Plan(program, halved=True).owner_plan
    assert owner_plan is not None
    specs = [s for s in state_specs(program, layout) if {"i", "j"} <= set(s.axes.letters) and not s.axes.elementwise]
    shapes = {s.name: s.shape(view, hyper, facts) for s in specs}
    return Matrix(view, owner_plan, layout, owner_plan.work(facts, static, view, layout), shapes)


def _part(shape: Sequence[int], shards: int, rank: int) -> int:
    """The elements in a shard: equal shards, until no elements are left."""
    rows = shape[0] if shape else 1
    size = -(-rows // shards)
    return max(0, min(size, rows - rank * size)) * math.prod(shape[1:])


def _owners(matrices: Sequence[Matrix], mesh: Mesh) -> tuple[list[Sharding], Assignment, int]:
    """The sharding of matrices, their owners, and the number of ranks that share them: all, or those of a replica."""
    shapes, works = [matrix.view.shape for matrix in matrices], tuple(matrix.work for matrix in matrices)
    known = {shape: _division(shape, mesh.shards) for shape in shapes}
    alone = tuple(known[shape] for shape in shapes)
    every = {shape: Division(division.rectangles * mesh.replicas) for shape, division in known.items()}
    parts, group = tuple(every[shape] for shape in shapes), mesh.devices
    chosen, few = assignment(works, group, parts), assignment(works, mesh.shards, alone)
    if not share_pays(chosen, few, group):
        parts, group, chosen = alone, mesh.shards, few
    nobody: Any = None
    places = tuple(((rank % mesh.shards, mesh.shards),) for rank in range(group))
    spreads = {part: Sharding(nobody, part, places) for part in parts}
    return [spreads[part] for part in parts], chosen, group


def _schedules(
    matrices: Sequence[Matrix], spreads: Sequence[Sharding], owners: Sequence[tuple[int, ...]], group: int
) -> Iterator[Schedule]:  # fmt: skip
    """The schedules of the all-to-alls to owners and back, one after the other."""
    loads: dict[tuple[Matrix, Sharding, int], list[list[Load]]] = {}
    keys = [(matrix, spread, len(team)) for matrix, spread, team in zip(matrices, spreads, owners, strict=True)]
    for matrix, spread, count in dict.fromkeys(keys):
        half = ShardLayout(matrix.view, matrix.view.shape, spread, matrix.states)
        loads[matrix, spread, count] = [_pieces(matrix, half, d, count) for gap in matrix.owner_plan.gaps for d in gap]
    each = sorted(zip(keys, owners, strict=True), key=lambda pair: -pair[0][0].work.cost / pair[0][2])
    for number in range(max((len(x) for x in loads.values()), default=0)):
        chosen = [
            way for key, team in each if number < len(loads[key]) for way in zip(loads[key][number], team, strict=True)
        ]
        yield schedule_of(tuple(x for x, _ in chosen), tuple(owner for _, owner in chosen), group, BUCKET)


def _pieces(matrix: Matrix, half: ShardLayout, owner_task: OwnerTask, count: int) -> list[Load]:
    """The divisions of the arrays of an owner task, for each of several owners."""
    load, share = _load(matrix, half, owner_task), matrix.work.share
    if count == 1 or share is None:
        return [load]
    if not owner_task.whole:
        return [load] * count

    def cut(ways: Sequence[tuple[Division, str]], start: int, stop: int) -> tuple[tuple[Division, str], ...]:
        return tuple((division.piece(half.long, start, stop), dtype) for division, dtype in ways)

    bounds = cuts(half.shape[half.long], count)
    return [
        Load(cut(load.there, *at), cut(load.back, *at), replace(share, place=k, count=count))
        for k, at in enumerate(bounds)
    ]


def _load(matrix: Matrix, half: ShardLayout, owner_task: OwnerTask) -> Load:
    """The divisions of the arrays of an owner task."""
    whole = matrix.owner_plan

    def way(value: Node) -> tuple[Division, str]:
        lies = half.state(whole.stored_in(value)) if whole.is_factor(value) else half.along(whole.letters(value))
        return lies, whole.dtypes(value, matrix.layout)[0]

    return Load(tuple(map(way, owner_task.sent)), tuple(map(way, owner_task.returned)))


def _division(shape: Sequence[int], shards: int) -> Division:
    """The division of rows, as torch shards them."""
    rows = -(-shape[0] // shards)
    starts = [min(shape[0], rank * rows) for rank in range(shards)]
    others = tuple(slice(0, side) for side in shape[1:])
    return Division(tuple((slice(start, min(shape[0], start + rows)), *others) for start in starts))
