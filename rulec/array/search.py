"""`rulec.array.LBFGS`: several evaluations in a step, and a search along each direction, on plain arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from rulec.array.checks import flatten
from rulec.array.engine import arrays_for
from rulec.array.vectors import Evaluate, Vectors, module_of
from rulec.errors import HyperError, StateMismatch
from rulec.language.source import did_you_mean
from rulec.locks import Turns, in_turn
from rulec.runtime.lbfgs import Progress, Settings, descend

_FIELDS = {field.name: field.name for field in dataclasses.fields(Progress)}


class LBFGS(Turns):
    """The L-BFGS method of Liu and Nocedal on NumPy or CuPy arrays, in place, with the keywords of `rulec.torch.LBFGS`.

    `params` is an array, or lists and dicts of arrays, as for `rulec.array.Optimizer`. The keywords are also in
    `opt.hyper`, where they may be changed. An error puts the arrays back to where they were before the step.
    """

    def __init__(self, params: Any, **settings: Any) -> None:
        leaves = flatten(params)
        self._params, self._arrays = leaves, arrays_for(leaves)
        for name, array in leaves.items():
            self._arrays.check_parameter(array, name)
        self._arrays.claim([*leaves.values()], [f"parameter {name}" for name in leaves])
        self.names = [*leaves]
        self.hyper: dict[str, Any] = {**dataclasses.asdict(Settings()), **settings}
        self.hyper["max_eval"] = _settings(self.hyper).evaluations
        self._progress = Progress()

    @in_turn
    def step(self, evaluate: Evaluate) -> Any:
        """One step of up to `max_iter` iterations, in place. Returns the loss of before it.

        `evaluate` gives the loss and the gradients where the arrays are then, in their structure; an array whose
        gradient is None stays as it is.
        """
        space, settings = Vectors("LBFGS", self._params, self._arrays, evaluate), _settings(self.hyper)
        with self._arrays.here():
            before = space.copies()
            try:
                loss, self._progress = descend(space, self._progress, settings)
            except BaseException:
                space.put_back(before)
                raise
        return loss

    @in_turn
    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on: the keywords, and what the method remembers (NumPy's copies)."""
        state = {name: self._saved(getattr(self._progress, name)) for name in _FIELDS}
        return {"rule": "LBFGS", "hyper": dict(self.hyper), "state": state}

    def _saved(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._saved(each) for each in value]
        return self._arrays.copied(value) if np.ndim(value) else value if value is None else _number(value)

    @in_turn
    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Goes on from a `state_dict()`. StateMismatch, before anything is changed, where it is of other arrays."""
        if (
            not isinstance(saved, Mapping)
            or saved.get("rule") != "LBFGS"
            or not isinstance(saved.get("state"), Mapping)
        ):
            raise StateMismatch("the saved state is not of LBFGS: give what state_dict() of an LBFGS returned")
        hyper = {**self.hyper, **saved.get("hyper", {})}
        _settings(hyper)
        with self._arrays.here():
            self._progress = Progress.of(saved["state"], _FIELDS, self._loaded)
        self.hyper = hyper

    def _loaded(self, value: Any, key: str) -> Any:
        if not np.ndim(value):
            return value
        size = sum(array.size for array in self._params.values())
        if np.shape(value) != (size,):
            raise StateMismatch(
                f"{key} was saved with shape {np.shape(value)}, where the arrays have {size} elements in all"
            )
        vector = module_of(self._arrays).empty(size, value.dtype)
        self._arrays.fill(vector, value)
        return vector


def _settings(hyper: Mapping[str, Any]) -> Settings:
    """The keywords as settings; HyperError for one that there is not, or a value that means nothing."""
    known = [field.name for field in dataclasses.fields(Settings)]
    for key in hyper:
        if key not in known:
            raise HyperError(f"LBFGS has no keyword {key!r}{did_you_mean(str(key), known)}")
    return Settings(**hyper)


def _number(value: Any) -> Any:
    """A number of Python, exactly; whole where it is."""
    return value if isinstance(value, int) else float(value)
