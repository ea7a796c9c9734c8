"""A step in which gradients are made inside the update: of noise, of factors, or some rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from rulec.backend.capabilities import Noise
from rulec.errors import PartialUpdate
from rulec.runtime.buckets.runtime_launch import Launch
from rulec.runtime.stages.noise import EstimateCalls, takes_parts
from rulec.torch.eager.epilogue_tiles import ProductCalls
from rulec.torch.es.noise.base import Source
from rulec.torch.optimizer import RuleOptimizer
from rulec.torch.step.machine import Machine
from rulec.torch.step.plan import launches_of
from rulec.torch.tensors.dtensor import is_placed
from rulec.torch.tensors.tensors import OtherDtype, dtype_name

#: The gradient of a parameter that has no source.
Gradient = Callable[[Tensor], Tensor | None]


def fused_step(opt: Any, sources: Mapping[Tensor, Source], gradient: Gradient) -> set[Tensor]:
    """One step of an optimizer, with gradients made inside the updates of some parameters; returns these parameters.

    `sources` has the sources of gradients, for parameters of the optimizer without a gradient. Where an update cannot
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
        if not by_place or machine.residence.capturing:
            break
        machine.begin(opt.param_groups)
        try:
            _prepare(machine, by_place)
            chosen, launches = _ready(machine, by_place)
            params = {machine.params[place] for place in chosen}
            if not chosen or gradient is None:
                return params
            _give([machine.params[place] for place in by_place if place not in chosen], gradient)
            if _write(machine, chosen, launches):
                opt._opt_called = True  # type: ignore[attr-defined]  # what torch's schedulers ask
                return params
        except OtherDtype:
            continue
        finally:
            machine.end(opt.param_groups)
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


_CALLS: WeakKeyDictionary[Machine, _Calls] = WeakKeyDictionary()


def _prepare(machine: Machine, places: Collection[int]) -> None:
    """Allocates the states of every updated parameter, before a launch binds the states of its bucket."""
    for engine in machine.engines:
        dtypes = {}
        for route, (home, tensor_id) in zip(machine.routes, machine.homes, strict=True):
            like = route.param if route.place in places else route.param.grad
            if home is engine and like is not None:
                dtypes[tensor_id] = dtype_name(like.dtype)
        engine.prepare([*dtypes], [*dtypes.values()], engine.table)


def _ready(machine: Machine, by_place: Mapping[int, Source]) -> tuple[set[int], list[Launch]]:
    """The places of parameters whose updates make the gradients themselves, and the updates, checked."""
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


def _plain_tensor(machine: Machine, place: int) -> Any:
    """The parameter as its engine knows it; None unless a kernel writes it itself, element by element as counted."""
    param, home = machine.params[place], machine.home(place)
    if home is None or not param.is_contiguous() or param.is_complex() or is_placed(param):
        return None
    return home[0].tensors[home[1]]


def _of(machine: Machine, places: tuple[int, ...]) -> list[Launch]:
    """The launches for some parameters, as far as kernels take parts; their gradients are still to be bound."""
    # Of gradients only shape and dtype are looked at.
    shapes = [torch.empty_like(machine.params[place], device="meta", requires_grad=False) for place in places]
    launches = launches_of(machine.plans.of(places, shapes), shapes, None)
    return [launch for launch in launches if takes_parts(launch.version)]


def _write(machine: Machine, places: Collection[int], launches: Sequence[Launch]) -> bool:
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
