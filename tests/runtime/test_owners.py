"""The schedule of an exchange: balanced owners, one sender for each part, and bounded buckets."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from rulec.compiler.view import matrix_view
from rulec.runtime.distributed.all_to_all import cuts
from rulec.runtime.distributed.owners import (
    Assignment,
    Division,
    Load,
    Schedule,
    Share,
    Work,
    assignment,
    owners_of,
    schedule_of,
    share_pays,
)


def division(shape: tuple[int, ...], shards: int, replicas: int = 1) -> Division:
    """Rows cut as torch cuts them, in each of several replicas."""
    size = -(-shape[0] // shards)
    starts = [min(shape[0], rank * size) for rank in range(shards)]
    parts = [(slice(at, min(shape[0], at + size)), *(slice(0, n) for n in shape[1:])) for at in starts]
    return Division(tuple(parts * replicas))


def schedule(shapes: Sequence[tuple[int, int]], shards: int, replicas: int = 1, room: int = 1 << 40) -> Schedule:
    """Tensors of one byte an element, the longest work first, that go to their owners and back."""
    shapes = sorted(shapes, key=lambda shape: -matrix_view(shape).work)
    parts = tuple(division(shape, shards, replicas) for shape in shapes)
    works = tuple(Work(matrix_view(shape).work) for shape in shapes)
    owners = tuple(owner for (owner,) in assignment(works, shards * replicas, parts).owners)
    loads = tuple(Load(((part, "int8"),), ((part, "int8"),)) for part in parts)
    return schedule_of(loads, owners, shards * replicas, room)


def layers(count: int, seed: int = 0) -> list[tuple[int, int]]:
    numbers = np.random.default_rng(seed)
    return [(int(m), int(n)) for m, n in numbers.integers(1, 300, (count, 2))]


def busiest(costs: Sequence[float], chosen: Sequence[int], size: int) -> float:
    return float(np.bincount(chosen, weights=costs, minlength=size).max())


@pytest.mark.parametrize("shards", [2, 3, 7, 16])
def test_owners_of_large_parts_have_no_more_work(shards: int) -> None:
    for seed in range(5):
        shapes = layers(40, seed)
        parts = [division(shape, shards).counts for shape in shapes]
        costs = [matrix_view(shape).work for shape in shapes]
        plain, chosen = owners_of(costs, shards), owners_of(costs, shards, parts)
        assert busiest(costs, chosen, shards) <= busiest(costs, plain, shards) * (1 + 1e-12)
        held = [sum(int(p[rank]) for p, rank in zip(parts, way, strict=True)) for way in (plain, chosen)]
        assert held[1] >= held[0]


def test_equal_loads_go_to_the_largest_part_and_then_to_the_first() -> None:
    parts = [np.array(part) for part in ([1, 5, 5], [4, 2, 2], [1, 1, 9])]
    assert owners_of([3.0, 3.0, 3.0], 3, parts) == [1, 0, 2]
    assert owners_of([3.0, 3.0, 3.0], 3) == [0, 1, 2]
    # The last goes to the idlest; it moves to its largest part where the first stays the busiest.
    assert owners_of([9.0, 3.0, 2.0], 3, [np.array(x) for x in ([5, 1, 1], [1, 5, 1], [1, 5, 1])]) == [0, 1, 1]
    assert owners_of([9.0, 3.0, 7.0], 3, [np.array(x) for x in ([5, 1, 1], [1, 5, 1], [1, 5, 1])]) == [0, 2, 1]


def test_three_tiny_matrices_send_the_least_that_balance_allows() -> None:
    """Rows of 4 and 3, 6 and 6, 1 and 0."""
    made = schedule([(7, 5), (12, 4), (1, 3)], 2)
    assert ([*made.owners].count(0), made.sent(2), made.least) == (1, [15 + 24 + 3, 15 + 24 + 3], 2 * (15 + 24))
    # Cut along the rows of a model's layers, nearly the least.
    for shards in (2, 4, 8):
        made = schedule([(64 * k, 128) for k in (1, 2, 3, 3, 2, 1, 1, 3)] + [(50, 30)] * 8, shards)
        assert made.least <= sum(made.sent(shards)) <= 1.05 * made.least


@pytest.mark.parametrize(("shards", "replicas"), [(2, 2), (3, 2), (2, 4), (1, 3), (4, 1)])
def test_one_replica_sends_each_part(shards: int, replicas: int) -> None:
    shapes = layers(30)
    made = schedule(shapes, shards, replicas)
    size = shards * replicas
    there = np.zeros(size)
    for load, owner, (senders,) in zip(made.loads, made.owners, made.senders, strict=True):
        lies = load.there[0][0]
        sent: Counter[tuple[int, int]] = Counter()
        for rank in senders:
            rows = lies.rectangles[rank][0]
            sent[rows.start, rows.stop] += 1
            there[rank] += lies.counts[rank]
        assert set(sent.values()) == {1}
        assert sum(stop - start for start, stop in sent) * lies.rectangles[0][1].stop == lies.numel
        assert owner in senders or not lies.counts[owner]
    # Equal work, and nearly equal bytes: each of four elements takes three ways.
    costs = sorted((matrix_view(shape).work for shape in shapes), reverse=True)
    assert busiest(costs, made.owners, size) <= max(sum(costs) / size, max(costs)) * 4 / 3
    sent_by = made.sent(size)
    assert sum(sent_by) >= made.least
    assert max(sent_by) <= 2 * sum(sent_by) / size


def paid(costs: Sequence[float], size: int, replicas: int, moved: int = 0) -> bool:
    """Whether replicas share such work, with `moved` bytes of each element on its way to the owner and back."""
    works = tuple(Work(cost, moved, moved) for cost in costs)
    every, alone = (tuple(division((8, 4), size, n) for _ in costs) for n in (replicas, 1))
    return share_pays(assignment(works, size * replicas, every), assignment(works, size, alone), size * replicas)


def test_replicas_share_work_where_the_busiest_is_done_before() -> None:
    assert paid([2.0, 1.0, 1.0], 2, 2) is False  # the longest takes as long
    assert paid([2.0, 1.0, 1.0, 1.0], 2, 2) is True
    assert paid([0.1], 3, 2) is False
    assert paid([], 2, 2) is False
    # One large matrix of little work sends its result to one replica, or to all of them.
    assert paid([9e3, 9e3, 9e3, 9e3], 2, 2, moved=1) is True
    assert paid([9e3, 1.0, 1.0], 2, 4, moved=1) is False
    # Groups of more than 512 processes are avoided.
    assert paid([1.0] * 2000, 4, 128) is True
    assert paid([1.0] * 2000, 4, 129) is False


def of_matrices(shapes: Sequence[tuple[int, int]], size: int) -> tuple[tuple[Work, ...], Assignment]:
    """The owners of matrices of Muon."""
    works = tuple(Work(5 * matrix_view(s).work, 2, 2, Share(min(s), 5, "bfloat16")) for s in shapes)
    return works, assignment(works, size, tuple(division(shape, size) for shape in shapes))


def test_large_matrices_have_several_owners_who_follow_one_another() -> None:
    shapes = [(8192, 28672), *[(8192, 8192)] * 3, *[(1024, 8192)] * 9]
    works, chosen = of_matrices(shapes, 16)
    teams = [len(owners) for owners in chosen.owners]
    assert teams[0] >= 4
    assert all(team & (team - 1) == 0 for team in teams)
    assert teams[4:] == [1] * 9
    for owners in chosen.owners:
        assert [*owners] == [*range(owners[0], owners[0] + len(owners))]
        assert owners[0] % len(owners) == 0
        assert owners[-1] < 16
    loads = chosen.load(works, 16)
    assert loads.sum() == pytest.approx(sum(work.cost for work in works))
    # Whole, the largest alone would take three times the mean; time that is sent for is counted, too.
    assert loads.max() < 1.5 * loads.mean() < works[0].cost / 2
    # Small matrices of as unequal work stay whole: they would send for longer than they work.
    _, small = of_matrices([(m // 64, n // 64) for m, n in shapes], 16)
    assert {len(owners) for owners in small.owners} == {1}


def test_what_owners_of_one_matrix_send_to_one_another() -> None:
    shares = [Share(7, 2, "bfloat16", place, 3) for place in range(3)]
    assert [(s.block(s.place).start, s.block(s.place).stop) for s in shares] == [(0, 2), (2, 4), (4, 7)]
    # Squares; then twice sums of the rows of others in float32, and rows of two matrices to two others in bfloat16.
    assert shares[0].sent == 2 * 8 + 2 * 7 * (5 * 4 + 2 * 2 * 2 * 2)
    assert shares[2].sent == 2 * 8 + 2 * 7 * (4 * 4 + 2 * 3 * 2 * 2)
    assert (Share(7, 2, "bfloat16").sent, Share(7, 2, "bfloat16").room, shares[0].exchanges) == (0, 0, 7)


def test_by_gram_matrices_owners_send_less() -> None:
    """Two iterations have the sums and the rows of one Gram matrix; a third alone sends its polynomial too."""
    share = Share(7, 3, "bfloat16", 0, 3, form="gram")
    assert [len(block) for block in share.blocks] == [2, 1]
    assert share.exchanges == 1 + 2 + 3
    assert share.sent == 2 * 8 + 7 * (5 * 4 + 2 * 2 * 2) + 7 * (5 * 4 + 2 * 2 * 2 * 2)
    square = Share(7, 3, "bfloat16", 0, 3, form="gram", square=True)
    assert (square.exchanges, square.sent) == (10, Share(7, 3, "bfloat16", 0, 3).sent)
    kinds = {share.kind, square.kind, Share(7, 3, "bfloat16", 0, 3).kind, Share(9, 3, "bfloat16", 1, 3).kind}
    assert len(kinds) == 3


def test_pieces_of_a_matrix_are_in_one_bucket() -> None:
    parts = division((64, 32), 4)
    pieces = [Share(32, 5, "bfloat16", k, 2) for k in range(2)]
    way = tuple(((parts.piece(0, 32 * k, 32 * k + 32), "bfloat16"),) for k in range(2))
    shared = [Load(x, x, share) for x, share in zip(way, pieces, strict=True)]
    whole = Load(((parts, "bfloat16"),), ((parts, "bfloat16"),))
    made = schedule_of((whole, whole, *shared, *shared, whole), (0, 0, 0, 1, 2, 3, 1), 4, shared[0].bytes)
    # Process 0 has no room for its piece beside the first two; process 1 none for the last beside its piece.
    assert made.buckets == ((0, 1, 4, 5), (2, 3), (6,))
    assert made.between(4) == [pieces[0].sent, pieces[1].sent] * 2
    assert made.exchanges == 2 * 16


def test_a_piece_has_the_parts_that_lie_in_it() -> None:
    whole = division((10, 3), 4)  # 3, 3, 3 and 1 rows
    piece = whole.piece(0, 4, 10)
    assert [[*map(int, (r[0].start, r[0].stop))] for r in piece.rectangles] == [[0, 0], [0, 2], [2, 5], [5, 6]]
    assert piece.numel == 18
    assert whole.piece(0, 4, 10) is piece


@pytest.mark.parametrize(("side", "count"), [(171, 2), (10, 4), (3, 4), (8, 1), (0, 2)])
def test_pieces_of_a_side_follow_one_another_and_are_nearly_equal(side: int, count: int) -> None:
    bounds = cuts(side, count)
    starts, stops = [start for start, _ in bounds], [stop for _, stop in bounds]
    assert [*starts, side] == [0, *stops]
    lengths = [stop - start for start, stop in bounds]
    assert max(lengths) - min(lengths) <= 1


def test_buckets_are_bounded_for_every_owner() -> None:
    shapes = sorted(layers(60), key=lambda shape: -matrix_view(shape).work)
    made = schedule(shapes, 4, room=50_000)
    assert sorted(place for bucket in made.buckets for place in bucket) == [*range(60)]
    assert len(made.buckets) > 3
    for bucket in made.buckets:
        for rank in range(4):
            mine = [math.prod(shapes[i]) for i in bucket if made.owners[i] == rank]
            assert sum(mine) <= 50_000 or len(mine) == 1
    # One bucket where all have room, and one tensor of each process in each where none has.
    assert len(schedule(shapes, 4).buckets) == 1
    alone = schedule(shapes, 4, room=1)
    assert all(max(Counter(alone.owners[i] for i in bucket).values()) == 1 for bucket in alone.buckets)


def test_nothing_to_own() -> None:
    made = schedule([], 3)
    assert (made.owners, made.buckets, made.sent(3), made.least) == ((), (), [0, 0, 0], 0)
    empty = schedule([(0, 4), (2, 3)], 2)
    assert (frozenset(),) in empty.senders
    assert empty.sent(2) == schedule([(2, 3)], 2).sent(2)
