"""Gradients folded into the states of a rule that adds them up there: none is kept between micro-batches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from torch import Tensor

from rulec.analysis.accumulate import Phase, phase_rule
from rulec.errors import RuleError
from rulec.language.rule import Rule
from rulec.torch.eager.scope import rules_of
from rulec.torch.eager.wrapped import ForeignInner, Inner, PartitionedInner, RuleInner


def check_folds(inner: Inner) -> None:
    """RuleError where a gradient cannot be added to the states of a rule, part by part."""
    if isinstance(inner, ForeignInner):
        raise RuleError(
            f"what {type(inner.optimizer).__name__} does with a gradient is not known here: use accumulate='sum'"
        )
    if inner.late:
        raise RuleError(
            "gradients of DTensors are folded into states by rules of single elements alone: use accumulate='sum'"
        )
    for rule in rules_of(inner.optimizer):
        accumulates = rule.analysis.accumulates
        if not (accumulates and accumulates.adds):
            raise RuleError(f"{rule.name} cannot fold gradients into its states ({accumulates}): use accumulate='sum'")


def fold(inner: Inner, place: int, grad: Tensor, first: bool) -> None:
    """Adds a part of a parameter's gradient to its states; with the `first` they take the step's decay, once."""
    _run(inner, (place,), [grad], "first" if first else "more")


def update_folded(inner: Inner, places: tuple[int, ...], params: Sequence[Tensor]) -> None:
    """Steps parameters whose gradients are folded into their states."""
    _run(inner, places, [p.detach() for p in params], "last")  # the gradient is not read, but something must be there


def _run(inner: Inner, places: tuple[int, ...], grads: Sequence[Tensor], phase: Phase) -> None:
    if isinstance(inner, RuleInner):
        inner.fire_part(places, grads, _way(phase), phase == "last")
    if isinstance(inner, PartitionedInner):
        for each, theirs, chosen in inner.split(places):
            _run(each, theirs, [grads[i] for i in chosen], phase)


@functools.cache
def _way(phase: Phase) -> Callable[[Rule], Rule]:
    return functools.partial(phase_rule, phase=phase)
