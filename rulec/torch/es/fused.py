"""A step in which gradients are made inside the update: of noise, of factors, or some rows at a time."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from rulec.backend.noise import Noise
from rulec.backend.product import Product, RowsSource
from rulec.errors import PartialUpdate
from rulec.runtime.estimate import EstimateCalls, takes_parts
from rulec.runtime.launch import Launch
from rulec.torch.assembly import Assembly, _launches
from rulec.torch.eager.epilogue_launch import ProductCalls
from rulec.torch.memory import plain_arithmetic
from rulec.torch.optimizer import RuleOptimizer
from rulec.torch.tensors import OtherDtype, dtype_name

#: What may stand for a gradient.
Made = Noise | Product | RowsSource


def fused_step(opt: Any, given: Mapping[Tensor, Made]) -> bool:
    """One step of a rulec.torch optimizer in which the gradients of some parameters are made inside their updates.

    `given` says what of; other parameters have gradients, or none, as in any step, and a parameter that is not the
    optimizer's is left out. Noise is counted along a parameter's elements, row by row. Bits, states, counts and hooks
    are those of a step with the gradients in `.grad`, rounded to the parameters' dtypes.

    False, and nothing done, where that cannot be: the optimizer is no `RuleOptimizer`, its rule is not elementwise or
    needs more than gradients, a parameter is complex, distributed or not contiguous, or the backend has no such kernel.
    Else errors are those of `step`.
    """
    if not isinstance(opt, RuleOptimizer) or opt.interface.inputs or opt.interface.skips or opt._scaling() is not None:
        return False
    if not opt._is_watched():
        return _update(opt, given)
    # Hooks may change what is stepped with, and are called for steps alone.
    if not _update(opt, given, asking=True):
        return False
    _hooked_update(opt, given)
    return True


def _update(opt: RuleOptimizer, given: Mapping[Tensor, Made], asking: bool = False) -> bool:
    """The step; where `asking`, only whether there would be one."""
    opt._check_trained()
    # Made anew where gradients had other dtypes before.
    for current in (opt._current, opt._assemble):
        assembly = current()
        own = {place: given[p] for place, p in enumerate(assembly.params) if p in given}
        if not own or assembly.residence.capturing:
            return False
        assembly.begin(opt.param_groups)
        try:
            _prepare(assembly, own)
            launches = _ready(assembly, own)
            if launches is None or asking:
                return launches is not None
            if _write(assembly, tuple(own), launches):
                opt._opt_called = True  # type: ignore[attr-defined]  # what torch's schedulers ask
                return True
        except OtherDtype:
            continue
        finally:
            assembly.finish(opt.param_groups)
    return False


_hooked_update: Any = Optimizer.profile_hook_step(_update)


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


def _ready(assembly: Assembly, own: Mapping[int, Made]) -> list[Launch] | None:
    """What updates the parameters at these places, checked; None where there is no kernel for one."""
    calls = _CALLS.setdefault(assembly, _Calls())
    noises = {place: made for place, made in own.items() if isinstance(made, Noise)}
    others = {place: made for place, made in own.items() if not isinstance(made, Noise)}
    launches = _of(assembly, tuple(noises)) if noises else []
    if launches is None:
        return None
    by_tensor = {id(_tensor(assembly, place)): noise for place, noise in noises.items()}
    for launch in launches:
        if not calls.estimates.give(launch, [by_tensor[id(t)] for t in launch.part.tensors]):
            return None
    for place, made in others.items():
        alone = _of(assembly, (place,))
        if alone is None:
            return None
        for launch in alone:
            calls.products.give(launch, made)
        launches += alone
    return launches


def _tensor(assembly: Assembly, place: int) -> Any:
    """The parameter as its engine knows it."""
    member, tensor_id = assembly._homes[place]
    return member.engine.tensors[tensor_id]


def _of(assembly: Assembly, places: tuple[int, ...]) -> list[Launch] | None:
    """The launches of these parameters, with gradients still to be given; None where they take none."""
    params = [assembly.params[place] for place in places]
    # Of gradients only shape and dtype are looked at.
    shapes = [torch.empty_like(p, device="meta", requires_grad=False) for p in params]
    plan = assembly._plans.get(places) or assembly._plan(places, shapes)
    if plan.converted or plan.copied or not all(p.is_contiguous() for p in params):
        return None
    launches = _launches(plan, shapes, None)
    return launches if all(takes_parts(launch.version.program) for launch in launches) else None


def _write(assembly: Assembly, places: Sequence[int], launches: Sequence[Launch]) -> bool:
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
