"""The statistics of an engine's steps: the programs that measure them, and their values by tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rulec.errors import RuleError
from rulec.language.rule import Rule
from rulec.language.statistics import Watch, Watched, watched
from rulec.runtime.buckets.bucket import Tensor
from rulec.runtime.buckets.launch import Launch, Measured, Part


class Statistics:
    """The statistics that a user asks for, of tensors with any of some rules.

    Where `due`, the next steps measure them. A rule that lacks the name of a statistic has no value of it. RuleError
    where all rules lack one, or an expression has a mistake.
    """

    def __init__(self, rules: Sequence[Rule], watch: Watch | None) -> None:
        self.asked, self.due = bool(watch), False
        self._watched = _by_rule(rules, watch) if watch else {}
        self._launches: list[Launch] = []

    def of(self, part: Part) -> Watched:
        """The statistics of the tensors of a part."""
        return self._watched[id(part.bucket.program.rule)]

    def begin(self, due: bool) -> None:
        """Begins a step, which measures the statistics where they are `due`; values of earlier ones are gone then."""
        self.due = due
        if due:
            self._launches = []

    def take(self, launches: Sequence[Launch]) -> None:
        """Takes the launches of a step, whose statistics are there once these have run."""
        self._launches += launches

    def values(self) -> Iterator[tuple[Tensor, str, Any]]:
        """The values of the last step that measured them: tensor, name and value.

        A value is a float64 number, or an array of one number a row, column or matrix, on the tensor's device. It is
        NaN for a tensor that skipped the step.
        """
        for launch in self._launches:
            for measured in launch.statistics:
                yield from _values(measured)


def _values(measured: Measured) -> Iterator[tuple[Tensor, str, Any]]:
    """The values of the tensors of one portion."""
    library, count = measured.library, len(measured.tensors)
    for name, value in measured.values.items():
        each = value
        if hasattr(value, "dtype") or isinstance(value, float | int):
            each = library.spread(library.cast(value, "float64"), (count,))
        for i, tensor in enumerate(measured.tensors):
            yield tensor, name, _unless_skipped(measured, i, each[i])


def _unless_skipped(measured: Measured, i: int, value: Any) -> Any:
    """The value of a tensor; NaN where it skipped the step."""
    stays, library = measured.stays, measured.library
    if stays is None:
        return value
    if isinstance(stays, np.ndarray):
        return value * np.nan if stays[i] else value
    from rulec.language.expr.node import Op

    return library.arithmetic[Op.WHERE](library.at(stays, i), library.constant(float("nan")), value)


def _by_rule(rules: Sequence[Rule], watch: Watch) -> Mapping[int, Watched]:
    """The statistics of each rule, by its identity; what a rule lacks is left out where another has it."""
    words = [*watch.items()] if isinstance(watch, Mapping) else [watch] if isinstance(watch, str) else [*watch]
    done: dict[int, dict[str, Any]] = {id(rule): {} for rule in rules}
    for word in words:
        mistake: RuleError | None = None
        lacking = 0
        for rule in rules:
            try:
                done[id(rule)] |= dict(watched(rule, dict([word]) if isinstance(word, tuple) else [word]))
            except RuleError as error:
                mistake, lacking = mistake or error, lacking + 1
        if mistake is not None and lacking == len(rules):
            raise mistake
    return {key: tuple(each.items()) for key, each in done.items()}
