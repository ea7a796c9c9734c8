"""The scalars of a bucket, evaluated once for each row: for each group, or for each leaf where leaves may differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rulec.language.node import Node, Op
from rulec.pure.library import PureLibrary
from rulec.pure.plan import Bucket
from rulec.pure.values import Hypers


class PureRows:
    """The rows of a bucket's scalar table at the step `t`.

    `row` has the row of each leaf, and `kept` one leaf of each row. `values` has every column and stored scalar, over
    rows or as one number. `numbers` gives a buffer of numbers, for each leaf or one for all.
    """

    def __init__(
        self, bucket: Bucket, library: PureLibrary, t: Any, hyper: Hypers, numbers: Callable[[str], Any]
    ) -> None:
        self._bucket, self._library, self._t, self._hyper, self._numbers = bucket, library, t, hyper, numbers
        per_leaf = bucket.own_rows or (np.ndim(t) > 0 and len(bucket.places) > 1)
        rows = np.arange(len(bucket.places)) if per_leaf else bucket.group_at
        self.kept, self.row = np.unique(rows, return_index=True, return_inverse=True)[1:]
        roots = [*bucket.table.columns, *(s.value for s in bucket.table.stores)]
        self.values = library.evaluated(roots, self._scalar)

    def _scalar(self, value: Node) -> Any:
        """A leaf of the scalar program: an array over rows, or one number."""
        if value.op is Op.CONST:
            return self._library.constant(float(value.arg))  # type: ignore[arg-type]
        if value.op is Op.STEP:
            return self._of_rows(self._t)
        if value.op in (Op.HYPER, Op.MODEL_HYPER):
            return self._stacked([self._hyper[self._bucket.group_at[i]][str(value.arg)] for i in self.kept])
        if value.op is Op.FACT:
            return self._stacked([self._bucket.facts[i][str(value.arg)] for i in self.kept])
        return self._rows_of(self._numbers(str(value.arg)))

    def _of_rows(self, t: Any) -> Any:
        return t if not np.ndim(t) else self._rows_of(self._library.take(t, np.array(self._bucket.places)))

    def _rows_of(self, numbers: Any) -> Any:
        if not np.ndim(numbers):
            return numbers
        return numbers[0] if len(self.kept) == 1 else self._library.take(numbers, self.kept)

    def _stacked(self, numbers: Sequence[Any]) -> Any:
        if all(x is numbers[0] for x in numbers) or len(numbers) == 1:
            return self._library.constant(numbers[0])
        return self._library.of.xp.stack([self._library.constant(x) for x in numbers])

    def of_leaves(self, rows: Any) -> Any:
        """Values of rows as values of leaves; one number stays one."""
        return rows if not np.ndim(rows) else self._library.take(rows, self.row)
