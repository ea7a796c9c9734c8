"""Totals of statistics over shards, without processes: the messages of all ranks, and their sum."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rulec.language.expr.node import Op
from rulec.torch.distributed.statistics_reducer import _problem_of, _Row, _words


def _totals(op: Op, ranks: list[list[float]], counted: list[bool]) -> Any:
    """The totals of tensors 0 and 2; `counted` says whether a rank has the first replica."""
    places = torch.tensor([0, 2])
    rows = [_Row(0, "r", op, 2, places, None if counts else torch.tensor([False, False])) for counts in counted]
    peers: list[Any] = [SimpleNamespace(rank=rank, size=len(ranks)) for rank in range(len(ranks))]
    sent = [row.sent(np.array(numbers), at) for row, numbers, at in zip(rows, ranks, peers, strict=True)]
    assert {len(each) for each in sent} == {rows[0].length(peers[0])}
    return rows[0].received(torch.stack(sent).sum(0), np.array(ranks[0]))


def test_sums_and_extremes_of_all_ranks_are_those_of_one_sum() -> None:
    ranks = [[1.0, 5.0, -3.0], [-2.0, 6.0, np.inf], [4.0, 7.0, -8.0]]
    shards = np.array(ranks)[:, [0, 2]]
    for op, oracle in ((Op.SUM, np.sum), (Op.MAX, np.max), (Op.MIN, np.min)):
        whole = _totals(op, ranks, [True, True, True])
        assert whole.tolist() == [oracle(shards[:, 0]), 5.0, oracle(shards[:, 1])]


def test_empty_shards_and_nan_are_kept_in_extremes() -> None:
    ranks = [[-np.inf, 0.0, 1.0], [-7.0, 0.0, np.nan]]
    whole = _totals(Op.MAX, ranks, [True, True])
    assert whole[0] == -7.0
    assert np.isnan(whole[2])


def test_replicas_count_once() -> None:
    ranks = [[1.0, 0.0, 2.0], [1.0, 0.0, 2.0]]
    assert _totals(Op.SUM, ranks, [True, False]).tolist() == [1.0, 0.0, 2.0]
    assert _totals(Op.MAX, ranks, [True, False]).tolist() == [1.0, 0.0, 2.0]


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        (_words(3, 12345), ""), (_words(4, 12345), "in other steps"), (_words(3, 12346), "of other tensors"),
        (_words(3, 12345 + (1 << 20)), "of other tensors"), (_words(3, 12345, changed=1), "of other tensors"),
        (_words(0, 12345, failed=1), "took no step"),
    ],
)  # fmt: skip
def test_words_say_whether_all_ranks_took_one_step(other: list[float], problem: str) -> None:
    words = [sum(each) for each in zip(_words(3, 12345), _words(3, 12345), other, strict=True)]
    said = _problem_of(words)
    assert problem in said
    assert bool(said) == bool(problem)
