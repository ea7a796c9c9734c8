"""`rulec.array.LBFGS` and `rulec.array.LineSearch`: steps with several evaluations on plain arrays.

Each search goes along a direction: that of L-BFGS, or the update of a rule; the loss decides how far. Arrays are
handled as one vector. 16-bit arrays with residuals of their weights are handled as one vector of the weights in
float32.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rulec.array.arrays import NumpyArrays
from rulec.array.checks import flatten, matching_leaves
from rulec.array.optimizer import Optimizer
from rulec.array.step import ArrayEngine, arrays_for
from rulec.compiler.ir import Memory
from rulec.compiler.scalars import evaluate_once
from rulec.compiler.weights import float_of, part_name, stored
from rulec.errors import HyperError, RulecError, StateMismatch, TensorError
from rulec.language.expr.node import Op, node
from rulec.language.source import did_you_mean
from rulec.locks import Lockable, synchronized
from rulec.runtime.lbfgs import Progress, Settings, descend
from rulec.runtime.line_search import Backtracking, PureSearch, Trial, Zoom, floats, run

_FIELDS = {field.name: field.name for field in dataclasses.fields(Progress)}


class LBFGS(Lockable):
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

    @synchronized
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

    @synchronized
    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on: the keywords, and what the method remembers (NumPy's copies)."""
        state = {name: self._saved(getattr(self._progress, name)) for name in _FIELDS}
        return {"rule": "LBFGS", "hyper": dict(self.hyper), "state": state}

    def _saved(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._saved(each) for each in value]
        return self._arrays.copied(value) if np.ndim(value) else value if value is None else _number(value)

    @synchronized
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


class LineSearch(Lockable):
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

    @synchronized
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


#: A function that gives the loss and the gradients where the arrays are, in their structure.
Evaluate = Callable[[], tuple[Any, Any]]


def module_of(arrays: NumpyArrays) -> Any:
    """NumPy or CuPy."""
    return np if arrays.module == "np" else sys.modules[arrays.module]


class Vectors:
    """Arrays as one vector, of float32 at least. `owner` names the method in errors; `grads` are the last gradients."""

    def __init__(self, owner: str, params: Mapping[str, Any], arrays: NumpyArrays, evaluate: Evaluate) -> None:
        if not callable(evaluate):
            raise RulecError(
                f"{owner} evaluates the model again in a step: give step() a function of no arguments that returns the "
                f"loss and the gradients where the arrays are then"
            )
        self._owner, self._params, self._arrays, self._evaluate = owner, params, arrays, evaluate
        self.grads: Any = None
        wide = any(arrays.dtype(array) == "float64" for array in params.values())
        self._type = np.dtype("float64" if wide else "float32")

    def evaluate(self) -> tuple[Any, Any]:
        """The loss where the arrays are, and its gradient."""
        pair = self._evaluate()
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise RulecError(
                f"the function that {self._owner} evaluates must return the loss and the gradients, a pair"
            )
        self.grads = pair[1]
        grads = matching_leaves(pair[1], [*self._params], "the gradient")
        return pair[0], module_of(self._arrays).concatenate([self._flat(grads, name) for name in self._params])

    def _flat(self, grads: Mapping[str, Any], name: str) -> Any:
        param = self._params[name]
        if name not in grads:
            return module_of(self._arrays).zeros(param.size, self._type)
        grad = grads[name]
        if not self._arrays.is_one(grad) or grad.shape != param.shape:
            what = f"has shape {grad.shape}" if self._arrays.is_one(grad) else f"is a {type(grad).__name__}"
            raise TensorError(f"the gradient of {name} {what}: give a {self._arrays.kind} of shape {param.shape}")
        return grad.reshape(-1).astype(self._type)

    def change(self, before: Sequence[Any]) -> Any:
        """The change of the arrays since these copies."""
        pairs = zip(self._params.values(), before, strict=True)
        return module_of(self._arrays).concatenate([(p.astype(self._type) - b).reshape(-1) for p, b in pairs])

    def move(self, step: float, direction: Any) -> None:
        """Adds a step along a direction to the arrays."""
        start = 0
        for param in self._params.values():
            part = direction[start : start + param.size].reshape(param.shape)
            param[...] = param + step * part
            start += param.size

    def copies(self) -> list[Any]:
        """Copies of the arrays."""
        return [param.copy() for param in self._params.values()]

    def put_back(self, copies: Sequence[Any]) -> None:
        """Gives the arrays the values of these copies."""
        for param, copy in zip(self._params.values(), copies, strict=True):
            param[...] = copy

    def add(self, vector: Any, scale: Any, other: Any) -> None:
        """Adds a multiple of another vector to a vector, in place."""
        vector += scale * other


#: A weight in the expressions of its parts.
_NEW = "new"


@dataclass(frozen=True)
class _Copy:
    """An array, the part beside it where there is one, and the weight of both in float32."""

    array: Any
    part: Any
    weight: Any


class WeightVectors(Vectors):
    """The weights of an engine's arrays as one vector: a change of a weight below the array's dtype is a change."""

    def __init__(self, owner: str, engine: ArrayEngine, evaluate: Evaluate) -> None:
        super().__init__(owner, engine.params, engine.arrays, evaluate)
        self._engine = engine

    def copies(self) -> list[Any]:
        """Copies of the arrays and of what is beside them."""
        return [_Copy(p.copy(), _copied(self._part(n)), self._weight(n).copy()) for n, p in self._params.items()]

    def change(self, before: Sequence[Any]) -> Any:
        """The change of the weights since these copies."""
        each = zip(self._params, before, strict=True)
        return np.concatenate([(self._weight(name) - copy.weight).reshape(-1) for name, copy in each])

    def move(self, step: float, direction: Any) -> None:
        """Adds a step along a direction to the weights."""
        start = 0
        for name, param in self._params.items():
            weight = self._weight(name)
            part = direction[start : start + param.size].reshape(param.shape)
            self._put(name, (weight + step * part).astype(weight.dtype))
            start += param.size

    def put_back(self, copies: Sequence[Any]) -> None:
        """Writes copies back: arrays, and the parts beside them."""
        for (name, param), copy in zip(self._params.items(), copies, strict=True):
            part = self._part(name)
            if part is not None and copy.part is None:  # the first step made it
                self._put(name, copy.weight)
            elif part is not None:
                part[...] = copy.part
            param[...] = copy.array

    def _name(self, name: str) -> str:
        return part_name(self._engine.weights, self._arrays.dtype(self._params[name]))

    def _part(self, name: str) -> Any:
        """The part beside an array; None where its dtype has none, and before the first step."""
        return self._engine.states(name).get(self._name(name))

    def _weight(self, name: str) -> Any:
        """The weight of an array, as a step reads it."""
        param, part = self._params[name], self._part(name)
        if part is None:
            return param.astype(self._type)
        return float_of(self._engine.weights, param.astype("float32"), part.astype("float32"))

    def _put(self, name: str, weight: Any) -> None:
        """Stores a weight as a step stores it."""
        part = self._part(name)
        if part is None:
            self._params[name][...] = weight
            return
        for store in stored(Memory(self._engine.weights), node(Op.LOAD, _NEW)):
            array = self._params[name] if store.buffer == "p" else part
            array[...] = np.asarray(evaluate_once(store.value, {}, {}, {_NEW: weight})).astype(array.dtype)


def vectors_of(owner: str, engine: ArrayEngine, evaluate: Evaluate) -> Vectors:
    """The arrays of an engine as one vector: of their weights, where they have parts beside them."""
    if engine.weights:
        return WeightVectors(owner, engine, evaluate)
    return Vectors(owner, engine.params, engine.arrays, evaluate)


def check_weights(owner: str, engine: ArrayEngine) -> None:
    """HyperError for weights that a method cannot move along a direction."""
    if engine.weights == "stochastic":
        raise HyperError(
            f"{owner} takes parts of an update, and weights='stochastic' rounds at random in whole steps alone: take "
            f"weights='split' or 'master'"
        )
    if engine.weights and engine.arrays.module != "np":
        raise HyperError(f"{owner} has weights={engine.weights!r} for NumPy's arrays alone: leave weights out")


def _copied(part: Any) -> Any:
    return None if part is None else part.copy()
