"""A step in which gradients are made inside the update: of noise, of factors, or some rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from rulec.backend.noise import Noise
from rulec.errors import PartialUpdate
from rulec.runtime.estimate import EstimateCalls, takes_parts
from rulec.runtime.launch import Launch
from rulec.torch.assembly import Assembly, _launches
from rulec.torch.eager.epilogue_launch import ProductCalls
from rulec.torch.es.layer import Source
from rulec.torch.memory import plain_arithmetic
from rulec.torch.optimizer import RuleOptimizer
from rulec.torch.placed import is_placed
from rulec.torch.tensors import OtherDtype, dtype_name

#: The gradient of a parameter that has no source.
Gradient = Callable[[Tensor], Tensor | None]


def fused_step(opt: Any, given: Mapping[Tensor, Source], gradient: Gradient) -> set[Tensor]:
    """One step of an optimizer in which gradients are made inside the updates of some parameters; gives these.

    `given` says what of, for parameters of the optimizer without a gradient. Where an update cannot make one,
    `gradient` gives it, of the parameter's dtype, before hooks are called and anything is written. Other parameters
    have gradients, or none, as in any step. Noise is counted along a parameter's elements, row by row. Bits, states,
    counts and hooks are those of a step with all gradients in `.grad`.

    An update can where the optimizer is a `RuleOptimizer` whose rules need no more than gradients and never skip, the
    parameter's rule is elementwise, its backend has such a kernel, and it is contiguous and neither complex nor
    distributed. Errors are those of `step`.
    """
    if not isinstance(opt, RuleOptimizer) or opt.interface.inputs or opt.interface.skips or opt._scaling() is not None:
        return _plain_step(opt.step, given, gradient)
    if not opt._is_watched():
        return _update(opt, given, gradient) or _plain_step(opt.step, given, gradient)
    # Hooks look at gradients, may change what is stepped with, and are called for steps alone.
    chosen = _update(opt, given)
    _give(given.keys() - chosen, gradient)
    if not chosen:
        return _plain_step(opt.step, given, gradient)
    hooked: set[Tensor] = _hooked_update(opt, {param: given[param] for param in chosen}, gradient)
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


def _update(opt: RuleOptimizer, given: Mapping[Tensor, Source], gradient: Gradient | None = None) -> set[Tensor]:
    """The step, or without `gradient` what it would be: the parameters whose gradients are made inside their updates.

    Where there are none, nothing was done.
    """
    opt._check_trained()
    # Made anew where gradients had other dtypes before.
    for current in (opt._current, opt._assemble):
        assembly = current()
        own = {place: given[p] for place, p in enumerate(assembly.params) if p in given}
        if not own or assembly.residence.capturing:
            break
        assembly.begin(opt.param_groups)
        try:
            _prepare(assembly, own)
            chosen, launches = _ready(assembly, own)
            params = {assembly.params[place] for place in chosen}
            if not chosen or gradient is None:
                return params
            _give([assembly.params[place] for place in own if place not in chosen], gradient)
            if _write(assembly, chosen, launches):
                opt._opt_called = True  # type: ignore[attr-defined]  # what torch's schedulers ask
                return params
        except OtherDtype:
            continue
        finally:
            assembly.end(opt.param_groups)
    return set()


def _update_of_hooks(opt: RuleOptimizer, given: Mapping[Tensor, Source], gradient: Gradient) -> set[Tensor]:
    """The step when hooks were called."""
    opt._opt_called = True  # type: ignore[attr-defined]  # as where no hook is called
    return _update(opt, given, gradient) or _plain_step(opt._update, given, gradient)


_hooked_update: Any = Optimizer.profile_hook_step(_update_of_hooks)


class _Calls:
    """The other calls of an assembly's buckets."""

    def __init__(self) -> None:
        self.estimates, self.products = EstimateCalls(), ProductCalls()


_CALLS: WeakKeyDictionary[Assembly, _Calls] = WeakKeyDictionary()


def _prepare(assembly: Assembly, places: Collection[int]) -> None:
    """Gives every parameter that is updated its states, before anything is bound to those of its like."""
    for member in assembly.members:
        found = {}
        for place, (home, tensor_id) in enumerate(assembly._homes):
            param = assembly.params[place]
            like = param if place in places else param.grad
            if home is member and like is not None:
                found[tensor_id] = dtype_name(like.dtype)
        member.engine.prepare([*found], [*found.values()], member.table)


def _ready(assembly: Assembly, own: Mapping[int, Source]) -> tuple[set[int], list[Launch]]:
    """The places whose parameters' updates can make the gradients themselves, and these updates, checked."""
    calls = _CALLS.setdefault(assembly, _Calls())
    at = {id(_tensor(assembly, place)): place for place in own if _is_plain(assembly, place)}
    noises = {place: made for place in at.values() if isinstance(made := own[place], Noise)}
    launches = [
        launch
        for launch in _of(assembly, tuple(noises))
        if calls.estimates.give(launch, [noises[at[id(tensor)]] for tensor in launch.part.tensors])
    ]
    for place in at.values():
        if not isinstance(made := own[place], Noise):
            alone = _of(assembly, (place,))
            for launch in alone:
                calls.products.give(launch, made)
            launches += alone
    return {at[id(tensor)] for launch in launches for tensor in launch.part.tensors}, launches


def _tensor(assembly: Assembly, place: int) -> Any:
    """The parameter as its engine knows it."""
    member, tensor_id = assembly._homes[place]
    return member.engine.tensors[tensor_id]


def _is_plain(assembly: Assembly, place: int) -> bool:
    """Whether a kernel writes the parameter itself, element by element as it is counted."""
    param = assembly.params[place]
    return param.is_contiguous() and not param.is_complex() and not is_placed(param)


def _of(assembly: Assembly, places: tuple[int, ...]) -> list[Launch]:
    """The launches of those of these parameters that take parts, with gradients still to be given."""
    # Of gradients only shape and dtype are looked at.
    shapes = [torch.empty_like(assembly.params[place], device="meta", requires_grad=False) for place in places]
    plan = assembly._plans.get(places) or assembly._plan(places, shapes)
    return [launch for launch in _launches(plan, shapes, None) if takes_parts(launch.version.program)]


def _write(assembly: Assembly, places: Collection[int], launches: Sequence[Launch]) -> bool:
    """Updates these parameters, and first all others that have gradients; False, and nothing done, for a new dtype."""
    grads = {place: p.grad for place, p in enumerate(assembly.params) if p.grad is not None and place not in places}
    if grads and not assembly.fire(tuple(grads), [*grads.values()]):
        return False
    casting = [*filter(torch.is_autocast_enabled, assembly.residence.types)]
    try:
        with plain_arithmetic(casting) if casting or assembly.residence.there else nullcontext():
            increment_version([assembly.params[place] for place in places])
            assembly._run(launches)
    except Exception as error:
        if not grads or isinstance(error, PartialUpdate):
            raise
        names = ", ".join(assembly.names[place] for place in [*grads][:5])
        raise PartialUpdate(f"a step failed after {names} and others were updated by gradients: {error}") from error
    if any(member.extensions != member.engine.extensions for member in assembly.members):
        assembly._publish()
    return True
