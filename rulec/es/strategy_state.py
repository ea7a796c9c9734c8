"""The state of an evolution strategy, in any framework: its perturbations, its steps, and its saved form.

A saved state is checked against the strategy that loads it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from rulec.errors import RulecError, StateMismatch
from rulec.es.fitness import Floats
from rulec.es.perturbation import fitness_of
from rulec.es.perturbations import Perturbations
from rulec.locks import Lockable, synchronized


class StrategySteps(Lockable, ABC):
    """The members of a network under perturbations, step after step.

    `_rows` are the lengths of the batches that were evaluated in this step.
    """

    _perturbations: Perturbations
    _step: int
    _rows: set[int]

    #: In messages: the evaluation of members, and the calls that do it.
    _evaluation, _calls = "a forward", ""

    @abstractmethod
    def _names(self) -> list[str]:
        """The perturbed parameters, in the order of their numbers."""

    @abstractmethod
    def _warn_of_lost_noise(self, stacklevel: int) -> None:
        """Warns where noise is lost in rounding; `stacklevel` 1 is the caller of this method."""

    def _begin(self, step: int) -> None:
        """Begins a step: nothing has been evaluated in it."""
        self._step, self._rows = step, set[int]()

    @property
    def perturbation(self) -> Any:
        """The perturbation as it is now, with its seed and sigma, or a mapping of patterns to perturbations."""
        return self._perturbations.as_given

    def set_sigma(self, sigma: float | Mapping[str, float]) -> None:
        """Changes `sigma` from the next members on, for all parameters or by patterns; it is in `state_dict()`.

        Binary layers have a sigma of their own. HyperError for a bad sigma, and RulecError between members and their
        update: the estimate would be of another size.
        """
        with self._lock:
            if self._rows:
                raise RulecError(
                    f"step {self._step} has had {self._evaluation}, with the sigma there was: call update before "
                    f"set_sigma"
                )
            self._perturbations = self._perturbations.with_sigma(sigma)
            self._begin(self._step)
        self._warn_of_lost_noise(2)

    @property
    def step_count(self) -> int:
        """How many updates there were: the number of the next step."""
        return self._step

    def _by_member(self, fitness: Any, loss: Any) -> Floats:
        """Fitness by (sign, direction), checked; RulecError where nothing was evaluated in this step."""
        if not self._rows:
            raise RulecError(f"step {self._step} has had no forward: call {self._calls}")
        return fitness_of(fitness, loss, self._perturbations.population, self._rows)

    @synchronized
    def state_dict(self) -> dict[str, Any]:
        """The state that a resumed run goes on from: the number of the next step, and the arguments of its noise."""
        return saved(self._perturbations, self._step, self._names())

    @synchronized
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a `state_dict()`: with its step and sigma, and with its seed where none was given.

        StateMismatch where it is of another perturbation or of other parameters.
        """
        self._perturbations, step = restored(state, self._perturbations, self._names())
        self._begin(step)


def saved(perturbations: Perturbations, step: int, names: Sequence[str]) -> dict[str, Any]:
    """The state that a resumed run goes on from: the number of the next step, and the arguments of its noise."""
    return {"step": step, **perturbations.saved(), "parameters": list(names)}


def restored(state: Mapping[str, Any], perturbations: Perturbations, names: Sequence[str]) -> tuple[Perturbations, int]:
    """The perturbations and the number of the next step.

    StateMismatch where the state is of another perturbation, its sigma aside, or of other parameters.
    """
    content = state if isinstance(state, Mapping) else {}
    step = content.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise StateMismatch("this is no state of an evolution strategy: it has no step and no perturbation")
    resumed = perturbations.restored(content)
    if list(content.get("parameters", ())) != list(names):
        raise StateMismatch("the saved state is of other parameters than those perturbed here: give it the same")
    return resumed, step
