"""The evaluations of the model in one step: their points one after the other, and the arrays that a move writes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from rulec.compiler.foreseen import decide
from rulec.compiler.weights import is_part
from rulec.language.evaluations import evaluations
from rulec.language.expr.node import const
from rulec.language.rule import Rule
from rulec.language.rule_data import RuleData
from rulec.runtime.buckets.bucket import Tensor


@functools.cache
def move_at(place: int) -> Callable[[RuleData], RuleData | None]:
    """The rule of a pass, from the rule at the end of the step; None for a rule with fewer passes."""

    def move(rule: RuleData) -> RuleData | None:
        return rule.moves[place].rule if place < len(rule.moves) else None

    return move


class EvaluationNames:
    """The evaluations of the model in a step that some rules take together.

    `count` is the number of points beyond the first. `kept` has, for each point, the inputs by which later rules read
    the gradient of before it.
    """

    def __init__(self, rules: Sequence[Rule]) -> None:
        self.count = max(map(evaluations, rules), default=1) - 1
        read = {key for rule in rules for each in (rule, *(move.rule for move in rule.moves)) for key in each.inputs}
        names = [
            {rule.moves[place].gradient for rule in rules if place < len(rule.moves)} for place in range(self.count)
        ]
        self.kept = [sorted(at & read) for at in names]
        self.inputs = {key for at in names for key in at}


Gradients = TypeVar("Gradients")


class Evaluations(Generic[Gradients]):
    """The evaluations of the model in one step, and how far they are.

    `values` has gradients of earlier points, for the rules that read them. `closed` after the last evaluation.
    """

    def __init__(self) -> None:
        self._place = 0
        self.values: dict[str, Gradients] = {}
        self.closed = False

    def advance(
        self, names: EvaluationNames, gradients: Callable[[], Gradients], wants: Callable[[int], bool],
        move: Callable[[int], None],
    ) -> bool:  # fmt: skip
        """Moves the parameters to the next point of this step; False after the last.

        `gradients` copies the gradients at the present point, for rules that read them later. `wants` tells whether the
        step has the point at a place, and `move` moves there.
        """
        while self._place < names.count:
            place, self._place = self._place, self._place + 1
            if names.kept[place]:
                self.values |= dict.fromkeys(names.kept[place], gradients())
            if wants(place):
                move(place)
                return True
        self.closed = True
        return False


def wants(tensors: Iterable[Tensor], place: int, hyper_of: Callable[[Tensor], Mapping[str, float]]) -> bool:
    """Whether any of these tensors has this pass in its next step; `hyper_of` gives a tensor's hyper-parameters."""
    known: dict[Any, bool] = {}
    for tensor in tensors:
        when = tensor.rule.moves[place].when if place < len(tensor.rule.moves) else _NEVER
        count = 0.0 if tensor.bucket is None else float(tensor.bucket.counts.numbers[tensor.position])
        key = when, tensor.group, count, tuple(tensor.facts.values())
        if key not in known:
            values = {**hyper_of(tensor), **tensor.facts, "t": count + 1}
            known[key] = when is None or bool(decide(when, values))
        if known[key]:
            return True
    return False


_NEVER = const(0)


def written(tensors: Iterable[Tensor]) -> Iterator[Any]:
    """The arrays that a pass writes: parameters, and the memory beside parameters of 16 bits."""
    for tensor in tensors:
        yield tensor.array
        if tensor.bucket is not None:
            states = tensor.bucket.states[tensor.position]
            yield from (state for name, state in states.items() if is_part(name))
