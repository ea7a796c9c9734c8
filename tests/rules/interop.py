"""The interop section of a rule, read as rules/README.md says."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import optax
import torch

import rulec
from rulec.language.compose.wrap import variant

#: What a keyword may have to be that many values are.
OPEN = ("nonzero", "given")


@dataclass(frozen=True)
class Entry:
    """One entry of the interop section of the rule `rule` for the library `package`, torch or optax."""

    rule: str
    package: str
    callable: str
    when: Mapping[str, Any] = field(default_factory=dict)
    args: Mapping[str, Any] = field(default_factory=dict)
    state: Mapping[str, str] = field(default_factory=dict)
    weight_decay: str | Mapping[str, str] = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    step: str = "step"
    start: Mapping[str, Any] = field(default_factory=dict)
    lines: Mapping[str, str] = field(default_factory=dict)
    dtypes: Mapping[str, Any] = field(default_factory=dict)
    rows: bool = False

    @functools.cached_property
    def function(self) -> Any:
        """Their class or function."""
        root = torch.optim if self.package == "torch" else optax
        return functools.reduce(getattr, self.callable.split("."), root)

    @functools.cached_property
    def signature(self) -> Mapping[str, inspect.Parameter]:
        """The keywords their class or function takes."""
        return inspect.signature(self.function).parameters

    @functools.cached_property
    def meant(self) -> rulec.Rule:
        """Our rule, with the lines and initial values that are otherwise there."""
        rule = rulec.load(self.rule)
        if not self.lines and not self.start:
            return rule
        numbers = {k: p.default for k, p in self.signature.items() if type(p.default) in (int, float)}
        return variant(rule, self.lines, self.start, numbers)

    @functools.cached_property
    def our_defaults(self) -> dict[str, float | None]:
        """Every hyper-parameter of our rule at its default; None where that is an expression."""
        defaults = {name: hyper.default for name, hyper in self.meant.standalone().hyper.items()}
        return {name: value if isinstance(value, float) else None for name, value in defaults.items()}

    @functools.cached_property
    def names(self) -> dict[str, Any]:
        """Keyword of theirs to hyper-parameters of ours: `args`, and those called the same."""
        mapped = {name for value in self.args.values() for name in (value if isinstance(value, list) else [value])}
        lr = {"learning_rate": "lr"} if self.package == "optax" else {}
        fixed = {name for name, value in self.when.items() if value not in OPEN}
        same = {name: name for name in self.our_defaults if name in self.signature and name not in fixed}
        return {**lr, **{k: v for k, v in same.items() if v not in mapped}, **self.args}

    def keywords(self, hyper: Mapping[str, float | None]) -> dict[str, Any]:
        """Their keywords for hyper-parameters of ours; None for one that has no number."""
        given = {k: v for k, v in self.when.items() if v not in OPEN}
        for key, ours in self.names.items():
            given[key] = tuple(map(hyper.get, ours)) if isinstance(ours, list) else hyper.get(ours)
        return given

    def decays(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """The transforms that their weight decay may stand for, each with the keywords that choose it."""
        choices = {"default": self.weight_decay} if isinstance(self.weight_decay, str) else self.weight_decay
        for flag, transform in choices.items():
            yield transform, {} if flag == "default" else {flag: True}

    def __str__(self) -> str:
        return f"{self.rule} as {self.package}.{self.callable}"


def entries() -> list[Entry]:
    """Every interop entry of the library, one for each function where it names several.

    Those for the direction alone, and those with inputs, are compared in tests/jax.
    """
    found = []
    for rule in rulec.rules():
        for package, section in rulec.load(rule).interop.items():
            if package not in ("torch", "optax"):  # the others are compared in tests/torch/test_weight_decay.py
                continue
            for given in section if isinstance(section, list) else [section]:
                if given.get("scales") or given.get("inputs"):
                    continue
                data = {key: value for key, value in given.items() if key not in ("scaler", "ignores")}
                called = data.pop("class" if package == "torch" else "function")
                for name in [called] if isinstance(called, str) else called:
                    found.append(Entry(rule, package, name, **data))
    return found
