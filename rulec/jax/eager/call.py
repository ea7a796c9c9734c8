"""The common part of eager steps: a rule and its settings, traced numbers, and a store of compiled functions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rulec.compiler.routing import Router
from rulec.errors import HyperError, RuleError, StepTooLarge
from rulec.jax.eager.measure import Measured, in_two_passes
from rulec.jax.eager.memory import StepBytes, bytes_of, shapes, shared_out
from rulec.jax.eager.parts import Parts
from rulec.jax.eager.tied import Tied, tied_in
from rulec.jax.eager.users import Mode
from rulec.jax.machine import call, is_wide, machine_of, numbered
from rulec.jax.recipe import Given, Rules, recipe, rules_of
from rulec.jax.transform import options
from rulec.jax.xla import compiler_options, is_outermost
from rulec.language.evaluations import check_single


class Outcome(NamedTuple):
    """The results of a step beside new parameters and state.

    `aux` is the second result of the loss or of the head, and `layer_aux` the stacked second results of the layers.
    `ok` is whether all gradients were finite, None without `skip_nonfinite`.
    """

    loss: Any
    aux: Any = None
    layer_aux: Any = None
    ok: Any = None


class EagerRun(ABC):
    """The functions of one rule, traced: a first state, and a step."""

    def __init__(self, parts: Parts, shared: Tied, mode: Mode, measured: Measured) -> None:
        self.parts, self.shared, self.mode, self.measured = parts, shared, mode, measured
        self.init = jax.jit(self._init)
        #: Parameters and state are donated; not for calls that others trace.
        self.step = jax.jit(self._step, donate_argnums=(0, 1), compiler_options=compiler_options())
        self.step_inside = jax.jit(self._step, inline=True)

    @abstractmethod
    def kept(self, params: Any, batch: Any, key: Any) -> tuple[int, int]:
        """Bytes of activations for the backward pass, and of gradients that may have to live together."""

    @abstractmethod
    def _init(self, params: Any, numbers: Any) -> Any: ...

    @abstractmethod
    def _step(self, params: Any, state: Any, batch: Any, key: Any, numbers: Any, inputs: Any) -> Any: ...


@dataclass(frozen=True)
class Call:
    """A step with all its operands: arrays, or their shapes and dtypes."""

    run: EagerRun
    params: Any
    state: Any
    batch: Any
    key: Any
    numbers: Any
    inputs: Any

    @property
    def operands(self) -> tuple[Any, ...]:
        """The operands of the step's function, in order."""
        return self.params, self.state, self.batch, self.key, self.numbers, self.inputs

    def result(self, outermost: bool) -> Any:
        """The results of the step; `outermost` is whether no other jit traces it."""
        return call(self.run.step if outermost else self.run.step_inside, *self.operands)

    def bytes(self) -> StepBytes:
        """The bytes of the step. It is compiled, once for this and for a later call, and not run."""
        stats = call(lambda: self.run.step.lower(*self.operands).compile().memory_analysis())
        copies = int(stats.output_size_in_bytes) - int(stats.alias_size_in_bytes)
        operands = bytes_of(self.params), bytes_of(self.state), bytes_of((self.batch, self.key))
        kept = self.run.kept(self.params, self.batch, self.key)
        return shared_out(operands, int(stats.temp_size_in_bytes), *kept, max(0, copies))


class Eager(ABC):
    """A rule with its options, on any model."""

    def __init__(
        self, rule: Rules, *, state_dtype: Any, weights: str, seed: int, maximize: bool,
        tags: Mapping[str, Collection[str]] | None, shared: Mapping[str, str] | None, most: int | None,
        skip_nonfinite: bool,
    ) -> None:  # fmt: skip
        self._most = most
        self._seen: set[Any] = set()
        self._tags, self._shared = tags, dict(shared or {})
        self._options = options(state_dtype, maximize, seed, weights)
        for part in rules_of(rule):
            check_single(part, "a step inside the backward pass")
        self._inputs = _inputs(rule)
        self._rule, reductions = in_two_passes(rule)
        self._measured = Measured(reductions, skip_nonfinite, bool(maximize))
        self._runs: dict[Any, Any] = {}

    @abstractmethod
    def _new_run(self, *common: Any) -> EagerRun:
        """A EagerRun with these common arguments."""

    @abstractmethod
    def _checked(self, params: Any) -> Any:
        """The parameters, after a check of their tree; TensorError where it is wrong."""

    @abstractmethod
    def _count(self, state: Any) -> Any:
        """The number of steps done."""

    def init(self, params: Any, **hyper: Given) -> Any:
        """The state before the first step; hyper-parameters are needed only where a state begins with one."""
        shared = tied_in(self._checked(params), self._shared)
        run, numbers = self._run(hyper, None, shared)
        return call(run.init, shared.once(params), numbers)

    def step(self, params: Any, state: Any, batch: Any, *, key: Any = None, **hyper: Given) -> tuple[Any, Any, Outcome]:
        """New parameters, the new state, and the outcome.

        Parameters and state are donated: afterwards they cannot be used, but for calls inside of another jit.
        Hyper-parameters and the rule's `inputs` are traced numbers or functions of the count.
        """
        bound = self._bound(params, state, batch, key, hyper, self._count(state))
        outermost = is_outermost(*bound.operands)
        if outermost:
            self._look_at(bound)
        params, state, outcome = bound.result(outermost)
        return bound.run.shared.everywhere(params), state, outcome

    def bytes(self, params: Any, batch: Any, *, key: Any = None, **hyper: Given) -> StepBytes:
        """The memory of a step, by kind, without doing one.

        `params` and `batch` are arrays, or `jax.ShapeDtypeStruct`s that need no memory.
        """
        bound = self._bound(shapes(params), None, shapes(batch), key, hyper, None)
        state = call(lambda: jax.eval_shape(bound.run.init, bound.params, bound.numbers))
        return replace(bound, state=state).bytes()

    def _bound(self, params: Any, state: Any, batch: Any, key: Any, hyper: Mapping[str, Given], count: Any) -> Call:
        shared = tied_in(self._checked(params), self._shared)
        keywords = dict(hyper)
        inputs = {name: self._input(name, keywords) for name in self._inputs}
        run, numbers = self._run(keywords, count, shared)
        return Call(run, shared.once(params), state, jax.tree.map(_array, batch), key, numbers, inputs)

    def _look_at(self, bound: Call) -> None:
        """StepTooLarge where a step takes more than `most` bytes; looked at once for each shape of a batch."""
        seen = id(bound.run), tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(bound.batch))
        if self._most is None or seen in self._seen:
            return
        needed = bound.bytes()
        if needed.working > self._most:
            raise _too_large(needed, self._most)
        self._seen.add(seen)

    def _input(self, name: str, keywords: dict[str, Any]) -> Any:
        if name not in keywords:
            raise HyperError(f"the rule needs {name}: give it to step as a keyword, {name}=...")
        return keywords.pop(name)

    def _run(self, hyper: Mapping[str, Given], count: Any, shared: Tied) -> tuple[EagerRun, list[dict[str, Any]]]:
        current, numbers = numbered(recipe(self._rule, hyper, self._tags), count)
        options, mode = replace(self._options, backend="jax"), Mode.now()
        key = current.key, options, is_wide(), mode, shared
        if key not in self._runs:
            self._runs[key] = self._new_run(machine_of(Parts, current, options), shared, mode, self._measured)
        return self._runs[key], numbers


def _array(leaf: Any) -> Any:
    """A leaf as an array in the user's mode of JAX; a `jax.ShapeDtypeStruct` stays."""
    return leaf if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) else jnp.asarray(leaf)


def _inputs(rule: Rules) -> list[str]:
    """The names of the rules' inputs; RuleError for an input that is not one number."""
    inputs = {name: (kind, routed) for part in rules_of(rule) for routed in Router(part).rules
              for name, kind in routed.inputs.items()}  # fmt: skip
    for name, (kind, routed) in inputs.items():
        if kind == "like p":
            raise RuleError(
                f"{routed.name} needs {name} for every parameter, which an eager update does not keep until it comes "
                f"to it: update with rulec.jax.step"
            )
    return list(inputs)


def unless(ok: Any, old: Any, new: Any) -> Any:
    """New arrays where `ok` is true or None, else the old ones."""
    return new if ok is None else jax.tree.map(lambda o, n: jnp.where(ok, n, o), old, new)


def _too_large(needed: StepBytes, most: int) -> StepTooLarge:
    return StepTooLarge(
        f"the step needs {needed.working:,} bytes beside weights, state and batch, and most={most:,} allows no more: "
        f"{needed.activations:,} for activations, {needed.gradients:,} for gradients, {needed.temporaries:,} else",
        needed,
    )
