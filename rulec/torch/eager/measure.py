"""Two passes: the first takes the norm of all gradients, the second updates with what the norm makes of them."""

from __future__ import annotations

import torch

from rulec.errors import RulecError
from rulec.torch.eager.arrivals import Arrivals
from rulec.torch.eager.factor import Factor
from rulec.torch.eager.open_step import OpenStep
from rulec.torch.eager.window import Counting


class Measuring(Counting):
    """The first of two passes: every gradient is looked at and freed."""

    def __init__(self, step: OpenStep, arrivals: Arrivals, factor: Factor) -> None:
        super().__init__(step, arrivals)
        self._factor = factor

    def _complete(self, place: int) -> None:
        param = self._roster.params[place]
        if param.grad is not None:
            with torch.no_grad():
                self._factor.take(place, param.grad)
            param.grad = None
            self.step.gradient_bytes.leave([place], inside=False)

    def _again(self, place: int, count: int) -> None:
        raise RulecError(
            f"the gradient of {self._roster.names[place]} arrived {count} times in opt.measure(), where {count - 1} "
            f"were expected: nothing was updated; call relearn() and measure again"
        )

    def end(self) -> None:
        """Looks at the gradients whose last arrival was not known."""
        for place in range(len(self._roster.params)):
            self._complete(place)
        self.step.factor = self._factor
