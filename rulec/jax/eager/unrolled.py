"""A step of any model in one compiled function: gradient and update, so that XLA drops each gradient by itself."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from rulec.errors import StateMismatch
from rulec.jax.eager.call import Eager, EagerRun, Outcome, unless
from rulec.jax.eager.memory import bytes_of, residual_bytes
from rulec.jax.eager.model import check_loss, pair
from rulec.jax.eager.parts import Subtree
from rulec.jax.eager.users import UserFunction
from rulec.jax.recipe import Rules


def eager_step(
    loss: Callable[..., Any], rule: Rules, *, has_aux: bool = False, state_dtype: Any = None, weights: str = "",
    maximize: bool = False, seed: int = 0, tags: Mapping[str, Collection[str]] | None = None,
    shared: Mapping[str, str] | None = None, most: int | None = None, skip_nonfinite: bool = False,
) -> EagerStep:  # fmt: skip
    """A step of a model in which a gradient is used up as soon as it is complete.

    `loss(params, batch)` gives the loss, or with `has_aux` `(loss, aux)`; it may name `key` among its parameters.
    Loops over layers in it should be Python's: a loop of JAX gives the gradients of all layers together, and
    `rulec.jax.eager_scan` is for it. The other keywords are as for `eager_scan`.
    """
    return EagerStep(
        loss,
        rule,
        has_aux,
        state_dtype=state_dtype,
        weights=weights,
        maximize=maximize,
        seed=seed,
        tags=tags,
        shared=shared,
        most=most,
        skip_nonfinite=skip_nonfinite,
    )


class EagerStep(Eager):
    """A step of a model; `rulec.jax.eager_step` makes one. States are as from `rulec.jax.init`."""

    def __init__(self, loss: Callable[..., Any], rule: Rules, has_aux: bool, **keywords: Any) -> None:
        super().__init__(rule, **keywords)
        self._loss, self._has_aux = UserFunction(loss, "loss", ["key"]), has_aux

    def _new_run(self, *common: Any) -> EagerRun:
        return _StepRun(self._loss, self._has_aux, *common)

    def _checked(self, params: Any) -> Any:
        return params

    def _count(self, state: Any) -> Any:
        if not hasattr(state, "count"):
            raise StateMismatch(f"the state is a {type(state).__name__}, not what init of eager_step returned")
        return state.count


class _StepRun(EagerRun):
    """The functions of a loss and a rule."""

    def __init__(self, loss: UserFunction, has_aux: bool, *common: Any) -> None:
        super().__init__(*common)
        self._loss, self._has_aux = loss, has_aux

    def kept(self, params: Any, batch: Any, key: Any) -> tuple[int, int]:
        """The bytes of all activations for the backward pass, and of the two largest gradients."""
        with self.mode():
            activations = residual_bytes(lambda *operands: self._loss_of(*operands)[0], params, batch, key)
        largest = sorted((bytes_of(leaf) for leaf in jax.tree.leaves(params)), reverse=True)
        return activations, sum(largest[:2])

    def _loss_of(self, params: Any, batch: Any, key: Any) -> tuple[Any, Any]:
        result = self._loss(self.shared.everywhere(params), batch, key=key)
        loss, aux = pair(result, "the loss", "loss") if self._has_aux else (result, None)
        check_loss(loss)
        return loss, aux

    def _init(self, params: Any, numbers: Any) -> Any:
        part, plans = self._planned(params)
        return self.parts.first(part, plans, numbers)

    def _planned(self, params: Any) -> tuple[Subtree, Any]:
        part = Subtree("", params)
        plans = [self.parts.planned(part)]
        self.parts.check(self.parts.tree(part).names, plans)
        return part, plans

    def _step(
        self, params: Any, state: Any, batch: Any, key: Any, numbers: Any, inputs: Any
    ) -> tuple[Any, Any, Outcome]:
        part, plans = self._planned(params)
        with self.mode():
            loss, back, aux = jax.vjp(lambda params: self._loss_of(params, batch, key), params, has_aux=True)
            (grads,) = back(jnp.ones_like(loss))
        ok = None
        if self.measured:
            known = self.measured.more(self.measured.nothing(), grads)
            one = self.measured.one(known, state.count).astype(loss.dtype)
            with self.mode():
                (grads,) = back(one)
            inputs, ok = {**inputs, **self.measured.inputs(known)}, self.measured.ok(known)
        arguments = self.parts.arguments(numbers, inputs, plans)
        new = self.parts.moved(part, grads, state, arguments, 0)
        return *unless(ok, (params, state), new), Outcome(loss, aux, ok=ok)
