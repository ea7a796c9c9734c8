"""The update of an evolution strategy: from the fitness of members to gradients, or to a step without gradients.

A step without gradients computes them inside the update: of noise, of factors, or some rows at a time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from rulec.backend.capabilities import Noise
from rulec.errors import HyperError, PartialUpdate
from rulec.es.binary.weights import member_weights
from rulec.es.fitness import Report, Shaping, Weights, skipped, weights
from rulec.es.perturbations import Perturbations
from rulec.runtime.buckets.launch import Launch
from rulec.runtime.stages.noise import EstimateCalls, takes_parts
from rulec.torch.eager.epilogue_tiles import ProductCalls
from rulec.torch.es.model import Perturbed
from rulec.torch.es.noise.base import Source
from rulec.torch.es.noise.build import Noises
from rulec.torch.es.self_estimating import SelfEstimators
from rulec.torch.optimizer import RuleOptimizer
from rulec.torch.step.optimizer_step import OptimizerStep
from rulec.torch.step.plan import launches_of
from rulec.torch.tensors.dtensor import is_dtensor
from rulec.torch.tensors.tensors import OtherDtype, dtype_name

Floats = np.ndarray[Any, np.dtype[np.float64]]


class Estimating:
    """The estimates from given fitness, by (sign, direction).

    Raises TensorError or HyperError for what is bad before anything is written.
    """

    def __init__(
        self, perturbations: Perturbations, perturbed: Sequence[Perturbed], noises: Noises, estimators: SelfEstimators,
        fitness: Floats, shaping: Shaping, penalty: tuple[float, float] = (0.0, 0.0),
    ) -> None:  # fmt: skip
        self._perturbations, self._perturbed, self._noises = perturbations, perturbed, noises
        self._estimators = estimators
        self._shaping, self._penalty = shaping, penalty
        estimators.check_penalty(penalty)
        self._fitness = fitness
        self._weights: Weights = weights(fitness, perturbations.population, shaping, perturbations)

    def update(self) -> Report:
        """Sets gradients."""
        if self._weights.empty:
            return self._skip()
        estimates = self._module_estimates()
        for entry in self._perturbed:
            entry.param.grad = self._gradient(entry, estimates)
        return self._report(gradient_bytes=self._gradient_bytes(self._perturbed))

    def step(self, opt: Any) -> Report:
        """Takes a step of the optimizer, by noise where its kernels make it, else by gradients, freed afterwards."""
        held = self._held(opt)
        if self._weights.empty:
            return self._skip()
        estimates, sources = self._module_estimates(), self._sources(held)
        by_param = {entry.param: entry for entry in held}
        for entry in self._perturbed:
            entry.param.grad = None
        for param in by_param.keys() - sources.keys():
            param.grad = self._gradient(by_param[param], estimates)
        fused = fused_step(opt, sources, lambda param: self._gradient(by_param[param], estimates))
        report = self._report([e.name for e in held if e.param in fused], self._gradient_bytes(held))
        for entry in self._perturbed:
            entry.param.grad = None
        return report

    def _held(self, opt: Any) -> list[Perturbed]:
        """The perturbed parameters of the optimizer; HyperError where there are none."""
        groups = getattr(opt, "param_groups", None)
        if groups is None or not callable(getattr(opt, "step", None)):
            raise HyperError(f"a step is taken by an optimizer, with param_groups and step(), not by {opt!r}")
        if _needs_closure(opt):
            raise HyperError(
                f"es.step cannot step {type(opt).__name__}: its step() evaluates a closure with gradients of its own, "
                f"which an evolution strategy has none of; give an optimizer that steps from .grad, such as Adam"
            )
        there = {id(param) for group in groups for param in group["params"]}
        held = [entry for entry in self._perturbed if id(entry.param) in there]
        if not held:
            raise HyperError("the optimizer has none of the perturbed parameters: give it es.parameters.values()")
        return held

    @torch.no_grad()
    def _sources(self, held: Sequence[Perturbed]) -> dict[Tensor, Source]:
        """The sources of gradients for kernels that take them, by parameter."""
        sources: dict[Tensor, Source] = {}
        for entry in held:
            param = entry.param
            if entry.is_self_estimated or entry.fixed is not None:
                continue
            if not self._noises.used(param) or not param.is_contiguous():
                continue
            noise = self._noises.of(entry)
            one = noise.source(self._weights.of(noise.perturbation))
            if one is not None:
                sources[param] = one
        return sources

    def _skip(self) -> Report:
        report = skipped(self._noises.step, self._weights.dropped, self._fitness.size, stacklevel=4)
        for entry in self._perturbed:
            entry.param.grad = None
        return report

    def _module_estimates(self) -> dict[int, Tensor]:
        """The estimates of modules that make their own."""
        if not self._estimators.modules:
            return {}
        mine = member_weights(self._fitness, self._shaping)
        return self._estimators.gradients(self._perturbations, self._noises.step, mine, self._penalty)

    @torch.no_grad()
    def _gradient(self, entry: Perturbed, estimates: dict[int, Tensor]) -> Tensor | None:
        """A parameter's estimate, in its dtype; None where no forward came by it."""
        param = entry.param
        if entry.is_self_estimated:
            return estimates[id(param)].to(param.dtype)
        if not self._noises.used(param):
            return None
        noise = self._noises.of(entry)
        gradient: Tensor = noise.estimate(self._weights.of(noise.perturbation), param)
        if entry.fixed is not None:
            gradient[entry.fixed] = 0.0
        return gradient.to(param.dtype)

    def _report(self, fused: Sequence[str] = (), gradient_bytes: int = 0) -> Report:
        unused = (e.name for e in self._perturbed if not e.is_self_estimated and not self._noises.used(e.param))
        return Report(
            self._noises.step, self._weights.counted, self._weights.dropped, unused=tuple(unused), fused=tuple(fused),
            gradient_bytes=gradient_bytes,
        )  # fmt: skip

    def _gradient_bytes(self, entries: Sequence[Perturbed]) -> int:
        return sum(e.param.grad.nbytes for e in entries if e.param.grad is not None)


def _needs_closure(opt: Any) -> bool:
    """Whether an optimizer's step cannot do without a closure, as that of torch.optim.LBFGS."""
    closure = inspect.signature(opt.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


#: The gradient of a parameter that has no source.
Gradient = Callable[[Tensor], Tensor | None]


def fused_step(opt: Any, sources: Mapping[Tensor, Source], gradient: Gradient) -> set[Tensor]:
    """One step of an optimizer, with gradients made inside the updates of some parameters; returns these parameters.

    `sources` has the sources of gradients, for parameters of the optimizer without a gradient. If an update cannot
    use one, `gradient` returns the gradient, of the parameter's dtype, before hooks are called and anything is written.
    Other parameters have gradients, or none, as in any step. Noise is counted along a parameter's elements, row by row.
    Bits, states, counts and hooks are those of a step with all gradients in `.grad`.

    An update can where the optimizer is a `RuleOptimizer` whose rules need no more than gradients and never skip, the
    parameter's rule is elementwise, its backend has such a kernel, and it is contiguous and neither complex nor
    distributed. Errors are those of `step`.
    """
    if not isinstance(opt, RuleOptimizer) or opt.interface.inputs or opt.interface.skips or opt._scaling() is not None:
        return _plain_step(opt.step, sources, gradient)
    if not opt._is_watched():
        return _update(opt, sources, gradient) or _plain_step(opt.step, sources, gradient)
    # Hooks look at gradients, may change what is stepped with, and are called for steps alone.
    chosen = _update(opt, sources)
    _give(sources.keys() - chosen, gradient)
    if not chosen:
        return _plain_step(opt.step, sources, gradient)
    hooked: set[Tensor] = _hooked_update(opt, {param: sources[param] for param in chosen}, gradient)
    return hooked


def _plain_step(step: Callable[[], Any], params: Collection[Tensor], gradient: Gradient) -> set[Tensor]:
    """A step by gradients alone."""
    _give(params, gradient)
    step()
    return set()


def _give(params: Collection[Tensor], gradient: Gradient) -> None:
    """Gives these parameters gradients, where they have none."""
    for param in params:
        if param.grad is None:
            param.grad = gradient(param)


def _update(opt: RuleOptimizer, sources: Mapping[Tensor, Source], gradient: Gradient | None = None) -> set[Tensor]:
    """Takes the step; returns the parameters with gradients made inside their updates.

    Nothing is done where there are none, and without `gradient`.
    """
    opt._check_trained()
    # Made anew where gradients had other dtypes before.
    for current in (opt._current, opt._build):
        machine = current()
        by_place = {place: sources[p] for place, p in enumerate(machine.params) if p in sources}
        if not by_place or machine.capture_mode.capturing:
            break
        taken = False
        machine.begin(opt.param_groups)
        try:
            _prepare(machine, by_place)
            chosen, launches = _ready(machine, by_place)
            params = {machine.params[place] for place in chosen}
            if not chosen or gradient is None:
                return params
            _give([machine.params[place] for place in by_place if place not in chosen], gradient)
            taken = _write(machine, chosen, launches)
            if taken:
                opt._opt_called = True  # type: ignore[attr-defined]  # what torch's schedulers ask
                return params
        except OtherDtype:
            continue
        finally:
            machine.end(opt.param_groups, taken)
    return set()


def _update_of_hooks(opt: RuleOptimizer, sources: Mapping[Tensor, Source], gradient: Gradient) -> set[Tensor]:
    """The step when hooks were called."""
    opt._opt_called = True  # type: ignore[attr-defined]  # as where no hook is called
    return _update(opt, sources, gradient) or _plain_step(opt._update, sources, gradient)


_hooked_update: Any = Optimizer.profile_hook_step(_update_of_hooks)


class _Calls:
    """The calls of a machine's buckets that take sources."""

    def __init__(self) -> None:
        self.estimates, self.products = EstimateCalls(), ProductCalls()


_CALLS: WeakKeyDictionary[OptimizerStep, _Calls] = WeakKeyDictionary()


def _prepare(machine: OptimizerStep, places: Collection[int]) -> None:
    """Allocates the states of every updated parameter, before a launch binds the states of its bucket."""
    for engine in machine.engines:
        dtypes = {}
        for route, (tensor_ref, tensor_id) in zip(machine.routes, machine.tensor_refs, strict=True):
            like = route.param if route.place in places else route.param.grad
            if tensor_ref is engine and like is not None:
                dtypes[tensor_id] = dtype_name(like.dtype)
        engine.prepare([*dtypes], [*dtypes.values()], engine.table)


def _ready(machine: OptimizerStep, by_place: Mapping[int, Source]) -> tuple[set[int], list[Launch]]:
    """The indices of parameters whose updates make the gradients themselves, and the updates, checked."""
    calls = _CALLS.setdefault(machine, _Calls())
    at = {id(tensor): place for place in by_place if (tensor := _plain_tensor(machine, place)) is not None}
    noises = {place: source for place in at.values() if isinstance(source := by_place[place], Noise)}
    launches = [
        launch
        for launch in _of(machine, tuple(noises))
        if calls.estimates.give(launch, [noises[at[id(tensor)]] for tensor in launch.part.tensors])
    ]
    for place in at.values():
        if not isinstance(source := by_place[place], Noise):
            alone = _of(machine, (place,))
            for launch in alone:
                calls.products.give(launch, source)
            launches += alone
    return {at[id(tensor)] for launch in launches for tensor in launch.part.tensors}, launches


def _plain_tensor(machine: OptimizerStep, place: int) -> Any:
    """The parameter as its engine knows it; None unless a kernel writes it itself, element by element as counted."""
    param, tensor_ref = machine.params[place], machine.tensor_ref(place)
    if tensor_ref is None or not param.is_contiguous() or param.is_complex() or is_dtensor(param):
        return None
    return tensor_ref[0].tensors[tensor_ref[1]]


def _of(machine: OptimizerStep, places: tuple[int, ...]) -> list[Launch]:
    """The launches for some parameters, as far as kernels take parts; their gradients are still to be bound."""
    # Of gradients only shape and dtype are looked at.
    shapes = [torch.empty_like(machine.params[place], device="meta", requires_grad=False) for place in places]
    launches = launches_of(machine.plans.of(places, shapes), shapes, None)
    return [launch for launch in launches if takes_parts(launch.version)]


def _write(machine: OptimizerStep, places: Collection[int], launches: Sequence[Launch]) -> bool:
    """Updates first all others with gradients, then these parameters; False, and nothing done, for a new dtype."""
    grads = {place: p.grad for place, p in enumerate(machine.params) if p.grad is not None and place not in places}
    if grads and not machine.fire(tuple(grads), [*grads.values()]):
        return False
    try:
        machine.fire_launches(launches, [machine.params[place] for place in places])
    except Exception as error:
        if not grads or isinstance(error, PartialUpdate):
            raise
        names = ", ".join(machine.names[place] for place in [*grads][:5])
        raise PartialUpdate(f"a step failed after {names} and others were updated by gradients: {error}") from error
    return True
