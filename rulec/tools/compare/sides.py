"""The sides of a comparison: our rule through a backend or the reference, and other libraries' optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, Protocol, cast

import numpy as np

from rulec.backend import registry
from rulec.backend.protocol import Backend
from rulec.compiler.pipeline import compile
from rulec.compiler.routing import Router
from rulec.errors import BackendUnsupported, RulecError, RuleError
from rulec.language.rule import Rule
from rulec.language.statistics import PREFIX, Watch, joint_place
from rulec.runtime.engine import Engine, default_hyper
from rulec.runtime.statistics import StepStatistics, checked_words, of_rule
from rulec.testing.kinds import kind_of
from rulec.testing.whole import runtime_arrays

Array = np.ndarray[Any, Any]
Hyper = Mapping[str, Any]
Inputs = Mapping[str, Any]

#: Statistics: name -> place, such as `tensor 0`, `group 0` or `model` -> a number or an array.
Measured = Mapping[str, Mapping[str, Array]]


class Side(Protocol):
    """One side: it owns its parameters and updates them by gradients."""

    name: str

    def step(self, grads: Sequence[Array], inputs: Inputs | None = None) -> None:
        """One update of every tensor; `inputs` are the rule's by name: numbers, or an array for each tensor."""
        ...

    def values(self) -> list[dict[str, Array]]:
        """For each tensor its parameter as `p`, and its states by this side's own names."""
        ...


class MeasuringSide(Side, Protocol):
    """A side that measures statistics."""

    def statistics(self) -> Measured:
        """The statistics of the last step. What was skipped has NaN, or by the reference no value."""
        ...


def check_inputs(rule: Rule) -> None:
    """RuleError for a rule with inputs: another library has no values for them."""
    if rule.inputs:
        raise RuleError(
            f"{rule.name} has inputs ({', '.join(rule.inputs)}), which only rulec check and "
            f"rulec trace have values for: use one of them"
        )


def backend_side(
    rule: Rule, params: Sequence[Array], hyper: Hyper, backend: str, watch: Watch | None = None
) -> MeasuringSide:  # fmt: skip
    """A rule of ours through a backend: by `rulec.jax`, or by the runtime on the backend's arrays.

    Every step measures the statistics in `watch`. BackendUnsupported for a rule that the backend cannot run.
    """
    if backend == "jax":
        return JaxSide(rule, params, hyper, watch)
    return EngineSide(rule, params, hyper, backend, watch)


class ReferenceSide:
    """A rule of ours by its formulas alone: in float64, or in 50 digits where `arithmetic` is "mpmath".

    With `stored`, the parameters have the dtype that they are given in, for rules that read the spacing of its numbers
    and for statistics of `p.stored`; else float64.
    """

    def __init__(
        self, rule: Rule, params: Sequence[Array], hyper: Hyper, arithmetic: str = "float64",
        watch: Watch | None = None, stored: bool = False,
    ) -> None:  # fmt: skip
        from rulec.compiler.reference import ReferenceOptimizer

        self.name = "reference" if arithmetic == "float64" else arithmetic
        words = checked_words(rule.name, watch)
        self.optimizer = ReferenceOptimizer(
            rule, [p if stored else p.astype(np.float64) for p in params], hyper, arithmetic,
            watch=lambda routed: of_rule(cast(Rule, routed), words),
        )  # fmt: skip

    def step(self, grads: Sequence[Array], inputs: Inputs | None = None) -> None:
        self.optimizer.step([g.astype(np.float64) for g in grads], inputs=inputs)

    def values(self) -> list[dict[str, Array]]:
        return [{"p": p, **self.optimizer.state(i)} for i, p in enumerate(self.optimizer.params)]

    def statistics(self) -> Measured:
        """The statistics of the last step; what was skipped has none."""
        return self.optimizer.statistics


def sparse_of(grad: Any) -> Any:
    """A tensor as a sparse one that names every element, zeros too, as torch's SparseAdam takes gradients."""
    import torch

    return torch.sparse_coo_tensor(torch.ones_like(grad).nonzero().t(), grad.flatten(), grad.shape)


class TorchSide:
    """An optimizer of a subclass of torch.optim.Optimizer; its states have their own names."""

    def __init__(self, kind: Any, keywords: Mapping[str, Any], params: Sequence[Array]) -> None:
        import torch

        self.name = f"{kind.__module__.partition('.')[0]}.{kind.__name__}"
        self.tensors = [torch.tensor(p, requires_grad=True) for p in params]
        self.optimizer = kind(self.tensors, **keywords)

    def step(self, grads: Sequence[Array], inputs: Inputs | None = None) -> None:
        import torch

        for tensor, grad in zip(self.tensors, grads, strict=True):
            tensor.grad = torch.tensor(grad)
            if isinstance(self.optimizer, torch.optim.SparseAdam):
                tensor.grad = sparse_of(tensor.grad)
        self.optimizer.step()

    def values(self) -> list[dict[str, Array]]:
        values = []
        for tensor in self.tensors:
            kept = {k: v for k, v in self.optimizer.state[tensor].items() if v is not None and k != "step"}
            arrays = {k: v.detach().numpy() if hasattr(v, "detach") else np.asarray(v) for k, v in kept.items()}
            values.append({"p": tensor.detach().numpy(), **arrays})
        return values


class OptaxSide:
    """An optax transformation, `make(**keywords)`; its states have their own names."""

    def __init__(
        self, name: str, make: Callable[..., Any], keywords: Mapping[str, Any], params: Sequence[Array]
    ) -> None:
        import jax

        self.name = name
        with _wide():
            self.now = [jax.numpy.asarray(p) for p in params]
            self.transformation = make(**keywords)
            if not (hasattr(self.transformation, "init") and hasattr(self.transformation, "update")):
                raise RulecError(f"{name} does not make an optax transformation")
            self.kept = self.transformation.init(self.now)

    def step(self, grads: Sequence[Array], inputs: Inputs | None = None) -> None:
        import jax
        import optax

        with _wide():
            arrays = [jax.numpy.asarray(g) for g in grads]
            updates, self.kept = self.transformation.update(arrays, self.kept, self.now)
            self.now = optax.apply_updates(self.now, updates)

    def values(self) -> list[dict[str, Array]]:
        fields = {k: v for k, v in _fields(self.kept) if isinstance(v, list)}
        return [
            {"p": np.asarray(p), **{k: np.asarray(v[i]) for k, v in fields.items()}} for i, p in enumerate(self.now)
        ]


def _wide() -> AbstractContextManager[Any]:
    """JAX with float64, for the block alone."""
    import jax

    context: AbstractContextManager[Any] = jax.enable_x64(True)
    return context


def _fields(kept: Any) -> Iterator[tuple[str, Any]]:
    """Every field in a nest of named tuples, by name."""
    if isinstance(kept, tuple):
        for name, part in zip(getattr(kept, "_fields", [""] * len(kept)), kept, strict=True):
            if isinstance(part, tuple):
                yield from _fields(part)
            else:
                yield name, part


class EngineSide:
    """A rule of ours on the arrays of its backend's library.

    `params` are NumPy arrays, and are copied. Every step measures the statistics in `watch`. `groups` are the numbers
    of their groups, all with the same `hyper`; without it there is one. BackendUnsupported where the runtime does not
    know the backend's arrays.
    """

    def __init__(
        self, rule: Rule, params: Sequence[Array], hyper: Mapping[str, float], backend: str | Backend,
        watch: Watch | None = None, groups: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        self.rule = rule
        chosen = registry.usable(backend) if isinstance(backend, str) else backend
        self.name = chosen.name
        self.kind = kind_of(chosen)
        arrays = runtime_arrays(self.kind)
        if arrays is None:
            raise BackendUnsupported(self.name, "a comparison", rule.name)
        self.engine = Engine(rule, arrays, chosen, watch=watch)
        self.params = [self.kind.make(p) for p in params]
        numbers = groups or [0] * len(params)
        add, count = self.engine.add, len(params)
        self.ids = tuple(add(p, numbers[i], f"tensor {i}", layer=(i, count)) for i, p in enumerate(self.params))
        values = default_hyper(rule, hyper, params[0].dtype.name)
        self.table = self.engine.hyper_table([values] * (max(numbers, default=0) + 1))
        self.steps = 0

    def step(self, grads: Sequence[Array], inputs: Mapping[str, Any] | None = None) -> None:
        """One update of every tensor."""
        arguments = {k: [*map(self.kind.make, v)] if isinstance(v, list) else v for k, v in (inputs or {}).items()}
        self.engine.statistics.begin(bool(self.engine.statistics.names))
        self.engine.step(self.ids, [*map(self.kind.make, grads)], self.table, arguments)
        self.steps += 1

    def values(self) -> list[dict[str, Array]]:
        """For each tensor its parameter as `p`, and its states by the rule's names."""
        values = []
        for param, i in zip(self.params, self.ids, strict=True):
            states = {k: v for k, v in self.engine.state(i).items() if k != "step"}
            values.append({"p": self.kind.read(param), **{k: self._read(v) for k, v in states.items()}})
        return values

    def statistics(self) -> StepStatistics:
        """The statistics of the last step; what was skipped has NaN."""
        places = [f"tensor {i}" for i in self.ids]
        return self.engine.statistics.of_step(self.steps, places, self._read, self._read)

    def _read(self, value: Any) -> Array:
        return np.array(value) if isinstance(value, np.ndarray | np.generic) else self.kind.read(value)


class JaxSide:
    """A rule of ours in JAX with float64 allowed, by the jax backend alone.

    `params` are NumPy arrays, and are copied. Every step measures the statistics in `watch`.
    """

    name = "jax"

    def __init__(
        self, rule: Rule, params: Sequence[Array], hyper: Mapping[str, Any], watch: Watch | None = None
    ) -> None:  # fmt: skip
        import jax

        import rulec.jax

        self.rule, self.hyper, self.watch = rule, hyper, watch or None
        self._measured: Mapping[str, Any] = {}
        routed = [Router(rule).choose(p.shape, ()) for p in params]
        #: The tensors that have a state, by its name.
        self.having = {n: [i for i, r in enumerate(routed) if n in r.state] for each in routed for n in each.state}
        with jax.enable_x64(True):
            self.params = [jax.numpy.array(p) for p in params]
            self.state = rulec.jax.init(rule, self.params, tags={}, **hyper)

    def step(self, grads: Sequence[Array], inputs: Mapping[str, Any] | None = None) -> None:
        """One update of every tensor."""
        import jax

        import rulec.jax

        with jax.enable_x64(True):
            gradients = [jax.numpy.array(g) for g in grads]
            beside: dict[str, Any] = {
                k: [*map(jax.numpy.array, v)] if isinstance(v, list) else v for k, v in (inputs or {}).items()
            }
            self.params, self.state, *measured = rulec.jax.step(
                self.rule, self.params, gradients, self.state, backend="jax", tags={}, watch=self.watch, **self.hyper,
                **beside,
            )  # fmt: skip
        self._measured = measured[0] if measured else {}

    def values(self) -> list[dict[str, Array]]:
        """For each tensor its parameter as `p`, and its states by the rule's names."""
        values: list[dict[str, Array]] = [{"p": np.asarray(p)} for p in self.params]
        for name, kept in self._states().items():
            for place, i in enumerate(self.having[name]):
                values[i][name] = np.asarray(kept[i] if isinstance(kept, list) else _number(kept, place))
        return values

    def statistics(self) -> Measured:
        """The statistics of the last step; what was skipped has NaN."""
        return {
            name: {f"tensor {i}": np.asarray(x) for i, x in enumerate(kept) if x is not None}
            if isinstance(kept, list)
            else {joint_place(self._letters[name]): np.asarray(kept)}
            for name, kept in self._measured.items()
        }

    @cached_property
    def _letters(self) -> dict[str, str]:
        """The axes of each statistic."""
        words = checked_words(self.rule.name, self.watch)
        measuring = ((rule, of_rule(rule, words)) for rule in Router(self.rule).rules)
        programs = [compile(rule, watch=watch) for rule, watch in measuring]
        return {b.name.removeprefix(PREFIX): b.axes.letters for program in programs for b in program.statistics}

    def _states(self) -> dict[str, Any]:
        from rulec.jax.recipe import recipe
        from rulec.jax.state import fields_of

        rules = [routed for group in recipe(self.rule, {}, None).groups for routed in Router(group.rule).rules]
        fields = fields_of(rules, {}).every
        return {name: getattr(self.state, fields[name]) for name in self.having}


def _number(kept: Any, place: int) -> Any:
    """The number of the tensor at `place`; of a state of the group or of the model its only number."""
    numbers = np.asarray(kept).reshape(-1)
    return numbers[place if numbers.size > 1 else 0]
