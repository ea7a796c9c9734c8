"""Reductions over the tensors of several launches that are parts of larger ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rulec.array_api.numpy import NumpyLibrary
from rulec.language.expr.node import Op
from rulec.runtime.buckets.reductions import Join, LaunchShare, Processes, joined, joined_shares

#: The tensors of each part of two launches, of tensors 0 to 5 and 6 to 9.
PARTS = [(4, 1), (8, 6), (0, 5, 2, 3), (9, 7)]


@pytest.mark.parametrize("per_group", [False, True])
@pytest.mark.parametrize("level", ["model", "group"])
def test_the_result_is_that_of_the_larger_launches(level: str, per_group: bool) -> None:
    random = np.random.default_rng(0)
    numbers = random.standard_normal(10) * 10.0 ** random.integers(-8, 8, 10)
    groups = np.array([0, 1, 0, 2, 1, 0, 1, 1, 3, 0])
    of_groups = random.standard_normal(4) * 1e3
    owner = Processes()

    def join(tensors: Any) -> Join:
        mine = groups[[*tensors]]
        if per_group:
            mine = np.unique(mine)
        values = of_groups[mine] if per_group else numbers[[*tensors]]
        return Join((0,), Op.SUM, level, values, mine, NumpyLibrary(), per_group, owner)

    whole = [np.asarray(x) for x in joined([join(range(6)), join(range(6, 10))])]
    parts = [join(tensors) for tensors in PARTS]
    found = joined_shares(parts, [LaunchShare((min(t) >= 6,), t) for t in PARTS])
    for tensors, part, result in zip(PARTS, parts, found, strict=True):
        first = min(tensors) >= 6
        if level == "model":
            wanted = whole[first]
        elif per_group:
            every = np.unique(groups[6:] if first else groups[:6])
            wanted = whole[first][np.searchsorted(every, part.groups)]
        else:
            wanted = whole[first][np.array(tensors) - 6 * first]
        np.testing.assert_array_equal(np.asarray(result), wanted)
