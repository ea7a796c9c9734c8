"""Rules in JAX as one side of a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

import rulec
import rulec.jax
from tests.rules.runs import Array, Hyper

#: The two ways to take a step; there is also "kernel", the first by the cpu backend where it can.
WAYS = ("step", "transform")


class JaxRun:
    """A rule of ours by `rulec.jax.step`, or by `rulec.jax.transform` and what optax adds up.

    JAX is allowed 64 bits where the parameters are float64. `compared` names a state to compare in place of the
    parameters. Parameters without dimensions, matrices and the rest are one dict, as layers of a model would be.
    """

    def __init__(
        self, rule: rulec.Rule | str, params: Sequence[Array], way: str = "step", compared: str = "",
        **options: Any,
    ) -> None:  # fmt: skip
        self.rule, self.options, self.way, self.compared = rule, options, way, compared
        self.wide = any(p.dtype == np.float64 for p in params)
        self.order = [f"layer{i:02d}" for i in range(len(params))]
        self.state: Any = None
        with jax.enable_x64(self.wide):
            self.now = self.tree(params)

    def tree(self, arrays: Sequence[Array]) -> dict[str, Any]:
        """Arrays by name, as JAX's own."""
        return {name: jax.numpy.array(a) for name, a in zip(self.order, arrays, strict=True)}

    def transformation(self, hyper: Hyper) -> optax.GradientTransformationExtraArgs:
        """The rule with these hyper-parameters."""
        return rulec.jax.transform(self.rule, **self.options, **hyper, tags={})

    def step(self, grads: Sequence[Array], hyper: Hyper, inputs: Mapping[str, Any] | None = None) -> None:
        """One update; `inputs` are numbers, or lists of an array for each parameter."""
        with jax.enable_x64(self.wide):
            if self.state is None:  # as theirs: with the hyper-parameters of the first step
                self.state = self.transformation(hyper).init(self.now)
            given = {k: self.tree(v) if isinstance(v, list) else v for k, v in (inputs or {}).items()}
            if self.way != "transform":
                backend = "cpu" if self.way == "kernel" else None
                found = rulec.jax.step(
                    self.rule,
                    self.now,
                    self.tree(grads),
                    self.state,
                    backend=backend,
                    **self.options,
                    **hyper,
                    **given,
                    tags={},
                )
                self.now, self.state = found
                return
            update = self.transformation(hyper).update
            changes, self.state = update(self.tree(grads), self.state, self.now, **given)
            self.now = optax.apply_updates(self.now, changes)

    def params(self) -> list[Array]:
        """The parameters now, or the state that is compared."""
        tree = getattr(self.state, self.compared) if self.compared else self.now
        return [np.array(tree[name]) for name in self.order]
