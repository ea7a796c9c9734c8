"""`rulec.array.es.Strategy`: an evolution strategy for arrays and a forward pass of one's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from rulec.array.checks import flatten
from rulec.array.es.noise import ArrayDraws, fused_step, namespace
from rulec.array.optimizer import Optimizer
from rulec.array.step import arrays_for
from rulec.backend import registry
from rulec.backend.capabilities import capabilities_of
from rulec.errors import HyperError, RulecError, TensorError
from rulec.es.families import Family, family, is_plain
from rulec.es.fitness import Report, Shaping, Weights, skipped, weights
from rulec.es.perturbation import Perturbation, places, repeats_of, tiled, warn_of_lost_noise
from rulec.es.perturbations import Perturbations
from rulec.es.strategy_state import StrategySteps
from rulec.es.streams import Stream
from rulec.language.source import did_you_mean
from rulec.locks import lock_of, synchronized


class Strategy(StrategySteps):
    """Members of a network of NumPy or CuPy arrays, step after step.

        es = Strategy(params, Perturbation("lowrank", directions=64, sigma=0.05))
        fitness = es.evaluate(lambda params: -loss(params, batch))
        es.step(fitness, opt)

    `params` is an array, or lists and dicts of arrays, nested, as `rulec.array.Optimizer` takes them; they are never
    written to but by the optimizer. All arrays of a dimension or more are perturbed but those named in `left_alone`:
    of two dimensions and more, (*window, inputs, outputs), as the family says, others with independent noise, and with
    dropout not at all. Errors are RulecError, raised before anything is written; where weights are too large or of too
    few bits for noise to move them a RuntimeWarning says so.
    """

    _evaluation, _calls = "members", "evaluate, member or product before an update"

    def __init__(
        self, params: Any, perturbation: Perturbation | Mapping[str, Perturbation], left_alone: Collection[str] = ()
    ) -> None:
        self._perturbations, self._params = Perturbations(perturbation), params
        leaves = flatten(params)
        self._arrays = arrays_for(leaves)
        for name, array in leaves.items():
            self._arrays.check_parameter(array, name)
        for name in left_alone:
            if name not in leaves:
                raise TensorError(f"left_alone has {name!r}, which is no parameter{did_you_mean(name, leaves)}")
        self._patterns: dict[str, str] = {}
        reasons: dict[str, str] = dict.fromkeys(left_alone, "it is in left_alone")
        for name, array in leaves.items():
            pattern = self._perturbations.pattern_of(name, "/")
            if pattern is None or name in left_alone:
                continue
            if array.ndim >= (2 if self._perturbations[pattern].family == "dropout" else 1):
                self._patterns[name] = pattern
            else:
                reasons[name] = f"it has {array.ndim} dimensions"
        self._perturbations.check_used(self._patterns.values(), reasons, "/")
        self._perturbed = {name: leaves[name] for name in self._patterns}
        if not self._perturbed:
            raise TensorError("no array is perturbed: give one of a dimension or more that is not left alone")
        self._numbers = {name: number for number, name in enumerate(self._perturbed)}
        #: The report of the last update; None before it.
        self.report: Report | None = None
        self._begin(0)
        for name in self._perturbed:
            self._noise(name)
        self._warn_of_lost_noise(2)

    def _warn_of_lost_noise(self, stacklevel: int) -> None:
        samples: dict[str, list[Any]] = {}
        with self._arrays.here():
            for name, array in self._perturbed.items():
                samples.setdefault(self._patterns[name], []).append((_sample(array), self._arrays.dtype(array)))
        for pattern, some in samples.items():
            warn_of_lost_noise(self._perturbations[pattern], some, stacklevel + 1)

    @property
    def _population(self) -> Perturbation:
        return self._perturbations.population

    @property
    def names(self) -> list[str]:
        """The arrays that are perturbed, in the order of their layers' numbers."""
        return [*self._perturbed]

    def _names(self) -> list[str]:
        return self.names

    # Members

    @contextmanager
    def member(self, direction: int, sign: int = 1) -> Iterator[Any]:
        """The parameters of one member, in new arrays in the structure of the others: `with es.member(3, -1) as p:`."""
        if not 0 <= direction < self._population.directions:
            raise HyperError(f"there is no direction {direction}: there are {self._population.directions}, from 0")
        if sign not in ((1, -1) if self._population.antithetic else (1,)):
            raise HyperError(f"sign={sign!r} must be 1, or -1 where pairs are antithetic")
        self._rows.add(self._population.members)
        with self._arrays.here():
            moved = {name: self._moved(name, array, direction, sign) for name, array in self._perturbed.items()}
            yield _rebuilt(self._params, moved)

    def _moved(self, name: str, array: Any, direction: int, sign: int) -> Any:
        family = self._noise(name)
        noise = family.dense(direction)
        wide = array.astype(noise.dtype)
        return (wide + sign * family.change(noise, wide)).astype(array.dtype)

    @synchronized
    def evaluate(self, function: Callable[[Any], Any]) -> Any:
        """The fitness of every member, `function(params)` of each in turn: (members,) of float64, positive signs first.

        TensorError where it is not one number.
        """
        fitness = np.empty((self._population.signs, self._population.directions))
        for direction in range(self._population.directions):
            for place, sign in enumerate((1, -1)[: self._population.signs]):
                with self.member(direction, sign) as params:
                    fitness[place, direction] = _number(function(params))
        return fitness.reshape(-1)

    # A batch of all members

    def member_batch(self, x: Any, shared: bool = True) -> Any:
        """The rows of `x` dealt to the members: all of them to each, or, where not `shared`, as many to each.

        TensorError where rows that are not shared cannot be dealt evenly.
        """
        if not shared:
            repeats_of(x.shape[0], self._population)
            return x
        return x[tiled(x.shape[0], self._population)]

    def product(self, x: Any, name: str) -> Any:
        """`x @ params[name]` of rows (rows, ..., inputs), each with the matrix (inputs, outputs) of its member.

        Row repeat*directions + direction belongs to this direction, and where antithetic to its positive sign in the
        first half of the rows. No member's matrix is formed, except for independent noise.
        """
        array = self._named(name)
        if array.ndim != 2 or x.shape[-1] != array.shape[0]:
            raise TensorError(f"{name} {list(array.shape)} is no matrix for rows of {x.shape[-1]} inputs")
        rows = x.reshape(self._repeats(x), self._population.directions, *x.shape[1:])
        with self._arrays.here():
            outputs = self._noise(name, x.dtype).product(rows, array, lambda rows, kernel: rows @ kernel)
        self._rows.add(x.shape[0])
        return outputs.reshape(-1, *outputs.shape[2:])

    def rows(self, name: str, like: Any) -> Any:
        """A vector as the members of the rows of `like` have it, to be added to these or multiplied with them."""
        array = self._named(name)
        if array.ndim != 1:
            raise TensorError(f"{name} is {list(array.shape)}: only vectors meet rows element by element")
        repeats = self._repeats(like)
        with self._arrays.here():
            vectors = self._noise(name).vectors(array, repeats)
        self._rows.add(like.shape[0])
        return vectors.reshape(-1, *(1,) * (like.ndim - 2), array.size)

    def _named(self, name: str) -> Any:
        if name not in self._perturbed:
            raise TensorError(f"{name!r} is no array that is perturbed{did_you_mean(name, self._perturbed)}")
        return self._perturbed[name]

    def _repeats(self, x: Any) -> int:
        return repeats_of(x.shape[0], self._population)

    # Updates

    def update(self, fitness: Any = None, loss: Any = None, shaping: Shaping = None) -> Any:
        """The gradient of minus the fitness, in the structure of the parameters, for `opt.step`; goes to a new step.

        `fitness` has a number for each member, in the order of `evaluate`, or for each row of a batch; `loss` is the
        same, to be minimised. None stands for arrays that are not perturbed, and, with a RuntimeWarning, for all where
        too few members have a finite fitness; `es.report` has the counts. Without `shaping` ("centered_rank",
        "zscore", "ars_top" or a function of fitness (signs, directions)) the mean is the gradient of the smoothed
        fitness.
        """
        with self._lock:
            weighed = self._weighed(fitness, loss, shaping)
            gradients = {} if weighed.empty else {name: self._gradient(name, weighed) for name in self._perturbed}
            self._end(weighed, gradients)
        return _rebuilt(self._params, gradients, None)

    def step(self, fitness: Any, opt: Optimizer, loss: Any = None, shaping: Shaping = None) -> Report:
        """`opt.step(es.update(fitness))`, without gradients where the optimizer's kernel can make them itself.

        It can for elementwise rules and noise that is of its own for each element. The report names these arrays.
        TensorError where the optimizer is one of other arrays.
        """
        self._check_optimizer(opt)
        with self._lock, lock_of(opt):
            weighed = self._weighed(fitness, loss, shaping)
            fused: tuple[str, ...] = ()
            if not weighed.empty:
                plain = [name for name in self._perturbed if self._is_plain(name)]
                noises = {name: self._draws(name).noise(self._values(name, weighed)) for name in plain}
                fused = fused_step(opt, self.names, noises, lambda name: self._gradient(name, weighed))
            return self._end(weighed, self._perturbed.keys() - fused, fused)

    def _weighed(self, fitness: Any, loss: Any, shaping: Shaping) -> Weights:
        values = self._by_member(_on_host(fitness), _on_host(loss))
        return weights(values, self._population, shaping, self._perturbations)

    def _end(self, weighed: Weights, others: Collection[str], fused: tuple[str, ...] = ()) -> Report:
        """Closes the step, in which `others` had gradients."""
        if weighed.empty:
            self.report = skipped(self._step, weighed.dropped, self._population.members, stacklevel=3)
        else:
            nbytes = sum(self._perturbed[name].nbytes for name in others)
            self.report = Report(self._step, weighed.counted, weighed.dropped, fused=fused, gradient_bytes=nbytes)
        self._begin(self._step + 1)
        return self.report

    def _gradient(self, name: str, weighed: Weights) -> Any:
        array = self._perturbed[name]
        with self._arrays.here():
            noise = self._noise(name)
            estimate = noise.estimate(self._values(name, weighed), array)
            order = "C" if array.flags.c_contiguous else "F"
            return noise.xp.asarray(estimate.astype(array.dtype), order=order)

    def _values(self, name: str, weighed: Weights) -> Any:
        return weighed.of(self._of(name))

    def _of(self, name: str) -> Perturbation:
        return self._perturbations[self._patterns[name]]

    def _is_plain(self, name: str) -> bool:
        """Whether a gradient is noise that is counted along an array's memory."""
        array = self._perturbed[name]
        return is_plain(self._of(name), array.shape) and bool(array.flags.c_contiguous)

    def _check_optimizer(self, opt: Any) -> None:
        if not isinstance(opt, Optimizer):
            raise RulecError(f"step takes an optimizer of rulec.array, not a {type(opt).__name__}")
        for name, array in self._perturbed.items():
            if opt._engine.params.get(name) is not array:
                raise TensorError(f"the optimizer's {name} is not the array that is perturbed: make both of the same")

    def _noise(self, name: str, dtype: Any = None) -> Family:
        return family(self._of(name), tuple(self._perturbed[name].shape), self._draws(name, dtype))

    def _draws(self, name: str, dtype: Any = None) -> ArrayDraws:
        """An array's random numbers, by default in the dtype that they are summed in."""
        array = self._perturbed[name]
        if dtype is None:
            dtype = np.float64 if array.dtype == np.float64 else np.float32
        perturbation = self._of(name)
        stream = Stream(perturbation.seed_or_0, self._numbers[name], self._step)
        backend = registry.get(self._arrays.backend(self._arrays.device(array)))
        fill = capabilities_of(backend).fill_noise
        assert fill is not None
        return ArrayDraws(namespace(array), fill, perturbation.values, stream, np.dtype(dtype))

    def __repr__(self) -> str:
        count = sum(math.prod(array.shape) for array in self._perturbed.values())
        return (
            f"Strategy({self._perturbations}, {count} parameters of {len(self._perturbed)} arrays, step {self._step})"
        )


def _sample(array: Any) -> Any:
    """Elements of an array, in float64 on the host."""
    return _on_host(array.ravel("K")[namespace(array).asarray(places(array.size))]).astype(np.float64)


def _on_host(values: Any) -> Any:
    """CuPy's arrays as NumPy's; everything else as it is."""
    return values.get() if hasattr(values, "get") else values


def _number(value: Any) -> float:
    if np.ndim(value) if not hasattr(value, "ndim") else value.ndim:
        raise TensorError(f"the fitness of a member has shape {value.shape}: it must be one number, such as a mean")
    return float(value)


_SAME = object()


def _rebuilt(tree: Any, leaves: Mapping[str, Any], other: Any = _SAME, prefix: str = "") -> Any:
    """A tree's containers with new leaves by name; other leaves are the old ones, or `other`."""
    if isinstance(tree, Mapping):
        return {key: _rebuilt(value, leaves, other, f"{prefix}{key}/") for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_rebuilt(value, leaves, other, f"{prefix}{index}/") for index, value in enumerate(tree)]
    return leaves.get(prefix.rstrip("/") or "param", tree if other is _SAME else other)
