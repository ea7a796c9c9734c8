"""Classes of optimizers: those of mlx.optimizers by their names, and one for any rule."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from mlx import optimizers

from rulec.errors import HyperError
from rulec.language.library.load import load
from rulec.language.rule import Rule
from rulec.language.source import did_you_mean
from rulec.language.statistics import Watch
from rulec.mlx.entries import Entry, entry_of
from rulec.mlx.optimizer import RuleOptimizer


class MlxOptimizer(RuleOptimizer):
    """A rule under a name, the keywords and the defaults of mlx.optimizers."""

    signature: ClassVar[inspect.Signature]

    def __init__(
        self, *values: Any, seed: int = 0, state_dtype: str | Mapping[str, str] | None = None, weights: str = "",
        watch: Watch | None = None, watch_every: int = 1, **keywords: Any,
    ) -> None:  # fmt: skip
        name, known = type(self).__name__, self.signature.parameters
        unknown = next((keyword for keyword in keywords if keyword not in known), None)
        if unknown is not None:
            advice = did_you_mean(unknown, known) or f": it takes {', '.join(known)}"
            raise HyperError(f"rulec.mlx.{name} has no keyword {unknown!r}{advice}")
        try:
            arguments = self.signature.bind(*values, **keywords)
        except TypeError as error:
            raise HyperError(f"{error}: rulec.mlx.{name} takes {', '.join(known)}") from None
        arguments.apply_defaults()
        learning_rate = arguments.arguments.pop("learning_rate")
        self.entry, hyper = entry_of(name, arguments.arguments)
        if learning_rate is None and "lr" in self.entry.rule.settings:
            raise HyperError(f"{name} needs a learning_rate: give a number or a function of the step")
        options: dict[str, Any] = {"state_dtype": state_dtype, "weights": weights}
        super().__init__(learning_rate, seed=seed, watch=watch, watch_every=watch_every, **options, **hyper)


def mlx_optimizer(name: str) -> type[RuleOptimizer]:
    """The class with the name and the signature of a class of mlx.optimizers."""
    signature = inspect.signature(getattr(optimizers, name))
    body = {"signature": signature, "__signature__": signature, "__doc__": f"{name} as mlx.optimizers has it."}
    return type(name, (MlxOptimizer,), body | {"__module__": "rulec.mlx"})


def optimizer(rule: Rule | str | Path) -> type[RuleOptimizer]:
    """The optimizer class of a rule, a library name (`"lion"`) or the path of a rule file.

    Its keywords are `learning_rate` and the rule's other hyper-parameters; `beta1`, `beta2`, ... are one tuple,
    `betas`. It computes the library's rule, even with a class of the same name in mlx.optimizers.
    """
    loaded = rule if isinstance(rule, Rule) else load(rule)
    body = {"entry": Entry(loaded), "__doc__": loaded.summary, "__module__": "rulec.mlx"}
    return type(loaded.name, (RuleOptimizer,), body)
