"""Theirs as its users call it: how far a row is apart where it changes nothing in theirs, and the options it sets."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any
from unittest import mock

import optax
import pytorch_optimizer
import torch

from tests.rules.measure import Shapes, Trial, largest_difference
from tests.rules.peer import Peer
from tests.rules.runs import Hyper, OptaxRun, Run, our_run
from tests.rules.wrapper_peer import WrapperPeer

#: Distances up to this one are rounding.
_ROUNDING = 1e-12

#: How many steps: enough for what is computed every so many steps.
_STEPS = 12

_PACKAGES = {"torch.optim": torch.optim, "pytorch_optimizer": pytorch_optimizer, "optax": optax}

#: Options that choose code of the same meaning.
_ALIKE = ("foreach", "maximize", "fused", "capturable")


def distances(peer: Peer | WrapperPeer, shapes: Shapes) -> dict[str, float | None]:
    """By the number of dimensions, how far theirs is as its users call it, beyond rounding; None where it refuses."""
    found: dict[str, float | None] = {}
    for count in sorted({len(shape) for shape in shapes}):
        # A trial begins with a tensor that has elements to set to zero.
        first = ((5,),) if count == 0 else ()
        torch.manual_seed(0)
        trial = Trial("float64", _STEPS, (*first, *(shape for shape in shapes if len(shape) == count)))
        try:
            ours, theirs = _sides(peer, trial)
            value = largest_difference(ours, theirs, trial, peer.hyper).relative
        except (ValueError, IndexError, RuntimeError, AssertionError, NotImplementedError, TypeError):
            found[str(count)] = None
            continue
        if value > _ROUNDING:
            found[str(count)] = float(f"{value:.1e}")
    return found


def _sides(peer: Peer | WrapperPeer, trial: Trial) -> tuple[Run, Run]:
    """Ours by the reference, and theirs without a change."""
    assert peer.called is not None
    if isinstance(peer, Peer):
        ours = our_run(peer.ours(), trial.params, peer.hyper, "reference")
        return ours, peer.called(trial.params, peer.hyper, shipped=True)
    return peer.ours(trial.params), peer.called(trial.params, peer.hyper)


def options(peer: Peer) -> list[str]:
    """The arguments of theirs that no hyper-parameter sets, and that have another value than its default."""
    name = peer.theirs.split(", ")[0]
    package = next((each for each in _PACKAGES if name.startswith(f"{each}.")), "")
    kind: Any = _PACKAGES.get(package)
    for part in name.removeprefix(f"{package}.").split(".") if package else ():
        kind = getattr(kind, part, None)
    if kind is None:
        return []
    keywords = peer.keywords or (_recorded(peer, package, name, kind) if package == "optax" else None)
    if keywords is None:
        return []
    given, moved = keywords(peer.hyper), keywords(_moved(peer.hyper))
    defaults = {key: p.default for key, p in inspect.signature(kind).parameters.items()}
    fixed = {key: value for key, value in given.items() if _same(value, moved.get(key)) and key not in _ALIKE}
    return [f"`{key}={_text(v)}`" for key, v in fixed.items() if key in defaults and not _same(v, defaults[key])]


def _moved(hyper: Hyper) -> dict[str, float]:
    """Other numbers for all hyper-parameters."""
    return {key: value + 1 if isinstance(value, int) else value * 0.875 for key, value in hyper.items()}


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, bool) or isinstance(b, bool) or not isinstance(a, int | float | tuple | str):
        return a is b
    return (type(a) is type(b) and a == b) or (isinstance(a, int | float) and isinstance(b, int | float) and a == b)


def _text(value: Any) -> str:
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    return value.__name__ if callable(value) else repr(value)


def _recorded(peer: Peer, package: str, name: str, kind: Any) -> Callable[[Hyper], Mapping[str, Any]] | None:
    """The arguments that a function of optax is called with, for hyper-parameters; None where it is not called."""
    signature, calls = inspect.signature(kind), []

    def recording(*args: Any, **keywords: Any) -> Any:
        calls.append(signature.bind(*args, **keywords).arguments)
        return kind(*args, **keywords)

    def keywords(hyper: Hyper) -> Mapping[str, Any]:
        module, _, function = name.rpartition(".")
        owner: Any = optax if module == "optax" else getattr(optax, module.partition(".")[2])
        with mock.patch.object(owner, function, recording):
            run = peer.start(Trial("float64", 1).params, hyper)
        return calls[-1] if calls and isinstance(run, OptaxRun) else {}

    keywords(peer.hyper)
    return keywords if calls else None
