"""`rulec.array.LineSearch`: how far to go along the update of a rule, by the loss there."""

from __future__ import annotations

from typing import Any

from rulec.array.optimizer import Optimizer
from rulec.array.vectors import Evaluate, Vectors
from rulec.array.weights import check_weights, vectors_of
from rulec.errors import HyperError
from rulec.locks import Turns, in_turn
from rulec.runtime.line_search import Trial, run
from rulec.runtime.pure_search import Backtracking, PureSearch, Zoom, floats


class LineSearch(Turns):
    """Goes along the update of an optimizer of arrays to where the loss is low enough, as optax's line searches do.

    `search` is a `Backtracking` or a `Zoom`, which have the keywords of optax's. It begins with the share of the update
    that the last step took, or with `keep=False` with the whole update. Where no trial is good enough the arrays stay.
    `learning_rate` is the share that the last step took.
    """

    def __init__(self, optimizer: Optimizer, search: PureSearch[Any], *, keep: bool = True) -> None:
        if not isinstance(search, Backtracking | Zoom):
            raise HyperError(f"a line search cannot be made of {search!r}: give a Backtracking(...) or Zoom(...)")
        check_weights("LineSearch", optimizer._engine)
        self.optimizer, self.learning_rate = optimizer, 1.0
        self._search, self._keep = search, keep

    @in_turn
    def step(self, evaluate: Evaluate) -> Any:
        """One step in place. Returns the loss of before it.

        `evaluate` gives the loss and the gradients where the arrays are then, in their structure. An exception in it
        puts the arrays and their states back.
        """
        engine = self.optimizer._engine
        space = vectors_of("LineSearch", engine, evaluate)
        saved = self.optimizer.state_dict()
        with engine.arrays.here():
            before = space.copies()
            try:
                return self._along(space, before)
            except BaseException:
                space.put_back(before)
                self.optimizer.load_state_dict(saved)
                raise

    def _along(self, space: Vectors, before: list[Any]) -> Any:
        loss, gradient = space.evaluate()
        self.optimizer.step(space.grads)
        update = space.change(before)
        space.put_back(before)

        def at(step: float) -> Trial:
            space.move(step, update)
            value, there = space.evaluate()
            space.put_back(before)
            return Trial(step, float(value), float(there @ update))

        # After a step of no length the whole update is tried again.
        guess = (self.learning_rate if self._keep else 0.0) or 1.0
        trial, _ = run(floats(self._search, Trial(0.0, float(loss), float(gradient @ update)), guess), at)
        space.move(trial.step, update)
        self.learning_rate = trial.step
        return loss
