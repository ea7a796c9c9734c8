"""Hyper-parameters that are functions of the number of steps before this one: their values."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from rulec.errors import HyperError, RulecError
from rulec.jax.operands import without_remarks
from rulec.jax.traced import is_traced

#: Compiled functions are kept for this many.
_KEPT = 256

_compiled: OrderedDict[int, Callable[[Any], Any]] = OrderedDict()
_lock = threading.Lock()


def value_at(count: Any, function: Callable[[Any], Any], what: str) -> Any:
    """The value of a user's function at a count of steps, computed as under the user's own jit.

    `count` is a whole number, or one for each leaf: then the largest is taken. HyperError where the value is not one
    real number; `what` names the function in it.
    """

    def value(count: Any) -> Any:
        number = function(jnp.max(count) if jnp.ndim(count) else count)
        check_number(f"what the function for {what} returns", number)
        return number

    if is_traced(count):
        return value(count)
    with _lock:
        # It holds the function, whose id is therefore no other's.
        compiled = _compiled.pop(id(function), None) or jax.jit(value)
    try:
        number = compiled(count)
    except RulecError as error:
        without_remarks(error)
        raise
    # What the function closes over may be traced, and must not be kept.
    if not is_traced(number):
        with _lock:
            _compiled[id(function)] = compiled
            if len(_compiled) > _KEPT:
                _compiled.popitem(last=False)
    return number


def check_number(what: str, number: Any) -> None:
    """HyperError for anything but one real number."""
    if not hasattr(number, "dtype") and not isinstance(number, bool | int | float):
        raise HyperError(f"{what} must be one number, and is a {type(number).__name__}")
    if jnp.ndim(number):
        raise HyperError(f"{what} must be one number, and is an array of shape {jnp.shape(number)}")
    if jnp.iscomplexobj(number):
        raise HyperError(f"{what} must be a real number, and is complex")
