"""The values of hyper-parameters in a step; a default may follow from other hyper-parameters.

Second learning rates follow `lr/lr_at_start`. A learning rate may be a function of the step count. A schedule may begin
at 0, or near it, and so `lr_at_start` is its largest value.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from rulec.functional.plan import Bucket
from rulec.functional.values import Hypers, PureLibrary
from rulec.language.expr.node import Node, Op, const, names_in, node
from rulec.language.expr.node import name as named
from rulec.language.hyper import AT_START, Hyper, followed, followers, number_of, work_out


def resolved(
    owner: str, settings: Mapping[str, Hyper], chosen: Collection[str], numbers: Mapping[str, Any], machine_eps: float,
    library: PureLibrary,
) -> dict[str, Any]:  # fmt: skip
    """Every hyper-parameter's value in a step: from `numbers`, traced or not, or its default.

    Second learning rates have followed `lr`.

    `chosen` are the names whose defaults are not used. HyperError where there is no default; `owner` names the rule.
    """
    pending = {name: setting.default for name, setting in settings.items() if name not in chosen}

    def number(_: str, default: float | Node, values: Mapping[str, Any]) -> Any:
        return _worked_out(default, values, library) if isinstance(default, Node) else default

    values = work_out(pending, {"machine_eps": machine_eps, **numbers}, number, owner)
    return _followed(settings, {name: values[name] for name in settings}, library)


def _followed(settings: Mapping[str, Hyper], values: dict[str, Any], library: PureLibrary) -> dict[str, Any]:
    second = followers(settings)
    if not second:
        return values
    now, start = values["lr"], values[AT_START]
    if all(isinstance(values[key], int | float) for key in ("lr", AT_START, *second)):
        return followed(settings, values)
    if now is start:  # whoever kept no rate of the start
        return values
    rates = {"lr": now, AT_START: start}
    scaled = {key: _worked_out(_SCALED, {**rates, "second": values[key]}, library) for key in second}
    return {**values, **scaled}


#: A second learning rate as it follows the first: in arithmetic of the library, for numbers of any kind.
_SCALED = node(
    Op.MUL, named("second"),
    node(Op.WHERE, node(Op.GT, named(AT_START), const(0)), node(Op.DIV, named("lr"), named(AT_START)), const(1)),
)  # fmt: skip


def _worked_out(default: Node, values: Mapping[str, Any], library: PureLibrary) -> Any:
    known = {name: values[name] for name in names_in([default])}
    if all(isinstance(x, int | float) for x in known.values()):
        return number_of(default, known)

    def leaf(value: Node) -> Any:
        return library.constant(value.arg if value.arg not in known else known[str(value.arg)])

    return library.evaluated([default], leaf)[default]


class PureRows:
    """The rows of a bucket's scalar table at the step `t`.

    `row` has the row of each leaf, and `kept` one leaf of each row. `values` has every column and stored scalar, over
    rows or as one number. `numbers` gives a buffer of numbers, for each leaf or one for all; `facts` those of a leaf.
    """

    def __init__(
        self, bucket: Bucket, library: PureLibrary, t: Any, hyper: Hypers, numbers: Callable[[str], Any],
        facts: Callable[[int], Mapping[str, Any]],
    ) -> None:  # fmt: skip
        self._bucket, self._library, self._t, self._hyper, self._numbers = bucket, library, t, hyper, numbers
        self._facts = facts
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
            return self._stacked([self._facts(int(i))[str(value.arg)] for i in self.kept])
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


#: Counts of steps that are looked at one by one, and how many more up to the last.
_DENSE, _SPARSE, _LAST = 1 << 16, 1 << 12, 2**31 - 2

Counts = np.ndarray[Any, np.dtype[np.int32]]


def peak_of(values_at: Callable[[Counts], Any], value_at: Callable[[int], Any] | None = None) -> float | None:
    """The largest value of a schedule; None where it has none above 0, or cannot be asked.

    `values_at` gives its values at many counts of steps. A schedule that cannot do that is asked by `value_at` for one
    count at a time. A schedule that grows without end counts as its first value.
    """
    ways: list[tuple[Callable[[Any], float], Any]] = [(_peak_of_many, values_at), (_peak_of_few, value_at)]
    for peak_by, ask in ways[: 1 if value_at is None else 2]:
        try:
            peak = peak_by(ask)
        except Exception:  # noqa: BLE001 - a function of a user, that may want one count at a time
            continue
        return peak if 0 < peak < np.inf else None
    return None


def _peak_of_many(values_at: Callable[[Counts], Any]) -> float:
    later = np.geomspace(_DENSE, _LAST, _SPARSE)
    counts = np.concatenate([np.arange(_DENSE), np.unique(later.astype(np.int64))]).astype(np.int32)
    values = _finite(values_at(counts), len(counts))
    place = int(np.argmax(values))
    if place + 1 >= np.count_nonzero(np.isfinite(values)):
        return float(values[0])
    if place < _DENSE - 1:
        return float(values[place])
    between = np.linspace(counts[place - 1], counts[place + 1], _DENSE).astype(np.int32)
    return float(np.max(_finite(values_at(between), len(between))))


def _peak_of_few(value_at: Callable[[int], Any]) -> float:
    """The largest value among some counts, which are chosen ever more closely around the largest so far."""
    counts = np.unique(np.concatenate([[0], np.geomspace(1, _LAST, 60)]).astype(np.int64))
    while True:
        values = [float(value_at(int(count))) for count in counts]
        best = int(np.argmax(values))
        if counts[best] == _LAST:
            return float(value_at(0))
        if counts[-1] - counts[0] < len(counts):
            return values[best]
        around = counts[max(best - 1, 0)], counts[min(best + 1, len(counts) - 1)]
        counts = np.unique(np.linspace(*around, 17).astype(np.int64))


def _finite(values: Any, count: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The values in float64, with the lowest in the place of any that is not finite."""
    spread = np.broadcast_to(np.asarray(values, np.float64), (count,))
    return np.where(np.isfinite(spread), spread, -np.inf)
