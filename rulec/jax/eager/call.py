"""What every eager step has: a rule and its settings, numbers that are traced, compiled functions that are kept."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rulec.compiler.routing import Router
from rulec.errors import HyperError, RuleError, StepTooLarge
from rulec.jax.eager.bytes import StepBytes, bytes_of, shapes, shared_out
from rulec.jax.eager.measure import Measured, in_two_passes
from rulec.jax.eager.parts import Parts
from rulec.jax.eager.tied import Tied, tied_in
from rulec.jax.eager.users import Mode
from rulec.jax.machine import Settings, call, is_wide, machine_of, numbered
from rulec.jax.recipe import Given, Rules, recipe, rules_of
from rulec.jax.transform import options
from rulec.jax.xla import compiler_options, is_outermost


class Outcome(NamedTuple):
    """What a step tells beside new parameters and state.

    `aux` is what the loss, or the head, returned beside its number, `layer_aux` what layers did beside theirs, stacked.
    `ok` says whether all gradients were finite, and is None where a step was not asked to look.
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
        """Bytes of activations that the backward pass reads, and of gradients that may have to live together."""

    @abstractmethod
    def _init(self, params: Any, numbers: Any) -> Any: ...

    @abstractmethod
    def _step(self, params: Any, state: Any, batch: Any, key: Any, numbers: Any, inputs: Any) -> Any: ...


@dataclass(frozen=True)
class Call:
    """A step with all that it is given, of arrays or of their shapes and dtypes."""

    run: EagerRun
    params: Any
    state: Any
    batch: Any
    key: Any
    numbers: Any
    inputs: Any

    @property
    def operands(self) -> tuple[Any, ...]:
        """What the step's function takes."""
        return self.params, self.state, self.batch, self.key, self.numbers, self.inputs

    def made(self, outermost: bool) -> Any:
        """What the step returns."""
        return call(self.run.step if outermost else self.run.step_inside, *self.operands)

    def bytes(self) -> StepBytes:
        """What the step needs. It is compiled for that, once for this and for a later call, and not run."""
        stats = call(lambda: self.run.step.lower(*self.operands).compile().memory_analysis())
        copies = int(stats.output_size_in_bytes) - int(stats.alias_size_in_bytes)
        given = bytes_of(self.params), bytes_of(self.state), bytes_of((self.batch, self.key))
        kept = self.run.kept(self.params, self.batch, self.key)
        return shared_out(given, int(stats.temp_size_in_bytes), *kept, max(0, copies))


class Eager(ABC):
    """A rule and what it is to be done with."""

    def __init__(
        self, rule: Rules, *, state_dtype: Any, seed: int, maximize: bool,
        tags: Mapping[str, Collection[str]] | None, shared: Mapping[str, str] | None, most: int | None,
        skip_nonfinite: bool,
    ) -> None:  # fmt: skip
        self._most = most
        self._seen: set[Any] = set()
        self._tags, self._shared = dict(tags or {}), dict(shared or {})
        self._options = options(state_dtype, maximize, seed)
        self._inputs = _inputs(rule)
        self._rule, reductions = in_two_passes(rule)
        self._measured = Measured(reductions, skip_nonfinite, bool(maximize))
        self._runs: dict[Any, Any] = {}

    @abstractmethod
    def _made(self, *common: Any) -> EagerRun:
        """The functions for the arguments of an EagerRun."""

    @abstractmethod
    def _checked(self, params: Any) -> Any:
        """Parameters as they are taken; TensorError where they cannot be."""

    @abstractmethod
    def _count(self, state: Any) -> Any:
        """How many steps were done."""

    def init(self, params: Any, **hyper: Given) -> Any:
        """The state before the first step; only rules whose states begin with a hyper-parameter need any of these."""
        shared = tied_in(self._checked(params), self._shared)
        run, numbers = self._run(hyper, None, shared)
        return call(run.init, shared.once(params), numbers)

    def step(self, params: Any, state: Any, batch: Any, *, key: Any = None, **hyper: Given) -> tuple[Any, Any, Outcome]:
        """New parameters, the new state, and what else there is to tell.

        Parameters and state are donated: afterwards they cannot be used, but for calls inside of another jit.
        Hyper-parameters, and what the rule names under `inputs`, are traced numbers or functions of the count.
        """
        made = self._bound(params, state, batch, key, hyper, self._count(state))
        outermost = is_outermost(*made.operands)
        if outermost:
            self._look_at(made)
        params, state, outcome = made.made(outermost)
        return made.run.shared.everywhere(params), state, outcome

    def bytes(self, params: Any, batch: Any, *, key: Any = None, **hyper: Given) -> StepBytes:
        """What a step needs in memory, by kind, without doing one.

        `params` and `batch` are arrays, or `jax.ShapeDtypeStruct`s that need none.
        """
        given = jax.tree.map(_array, shapes(batch))
        made = self._bound(shapes(params), None, given, key, hyper, None)
        state = call(lambda: jax.eval_shape(made.run.init, made.params, made.numbers))
        return replace(made, state=state).bytes()

    def _bound(self, params: Any, state: Any, batch: Any, key: Any, hyper: Mapping[str, Given], count: Any) -> Call:
        shared = tied_in(self._checked(params), self._shared)
        given = dict(hyper)
        inputs = {name: self._input(name, given) for name in self._inputs}
        run, numbers = self._run(given, count, shared)
        return Call(run, shared.once(params), state, jax.tree.map(_array, batch), key, numbers, inputs)

    def _look_at(self, made: Call) -> None:
        """Looks at the bytes of a step that was not done before with such a batch."""
        seen = id(made.run), tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(made.batch))
        if self._most is None or seen in self._seen:
            return
        found = made.bytes()
        if found.working > self._most:
            raise _too_large(found, self._most)
        self._seen.add(seen)

    def _input(self, name: str, given: dict[str, Any]) -> Any:
        if name not in given:
            raise HyperError(f"the rule needs {name}: give it to step as a keyword, {name}=...")
        return given.pop(name)

    def _run(self, hyper: Mapping[str, Given], count: Any, shared: Tied) -> tuple[EagerRun, list[dict[str, Any]]]:
        made, numbers = numbered(recipe(self._rule, hyper, self._tags), count)
        settings, mode = Settings(replace(self._options, backend="jax"), (), is_wide()), Mode.now()
        key = made.key, settings, mode, shared
        if key not in self._runs:
            self._runs[key] = self._made(machine_of(Parts, made, settings), shared, mode, self._measured)
        return self._runs[key], numbers


def _array(leaf: Any) -> Any:
    """As an array of the user's own mode; what stands for one stays."""
    return leaf if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) else jnp.asarray(leaf)


def _inputs(rule: Rules) -> list[str]:
    """What the rules name under inputs; RuleError for what is not one number."""
    found = {name: (kind, own) for given in rules_of(rule) for own in Router(given).rules
             for name, kind in own.inputs.items()}  # fmt: skip
    for name, (kind, own) in found.items():
        if kind == "like p":
            raise RuleError(
                f"{own.name} needs {name} for every parameter, which an eager update does not keep until it comes to "
                f"it: update with rulec.jax.step"
            )
    return list(found)


def unless(ok: Any, old: Any, new: Any) -> Any:
    """New arrays where all is well, else the old ones; `ok` is None where nobody asked."""
    return new if ok is None else jax.tree.map(lambda o, n: jnp.where(ok, n, o), old, new)


def _too_large(found: StepBytes, most: int) -> StepTooLarge:
    return StepTooLarge(
        f"the step needs {found.working:,} bytes beside weights, state and batch, and most={most:,} allows no more: "
        f"{found.activations:,} for activations, {found.gradients:,} for gradients, {found.temporaries:,} else",
        found,
    )
