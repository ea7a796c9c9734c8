"""optax's names for the rules of the library: the `optax` entries of their interop sections (rules/README.md)."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import optax

from rulec.errors import HyperError
from rulec.language.compose.wrap import variant, without
from rulec.language.expr.node import Op, name, node
from rulec.language.library.load import decayed, interop_entries, interop_index, load
from rulec.language.rule import Rule
from rulec.language.rule_data import Assign

#: Keywords that say which leaves weight decay is for.
MASKS = ("mask", "weight_decay_mask")


def is_number(value: Any) -> bool:
    """Whether a value is a number that is known now, traced or not."""
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


@dataclass(frozen=True, eq=False)
class Entry:
    """One function of optax, and the rule that it means where its keywords are as `when` says.

    With `scales` it gives the direction alone. `decay` is the transform for which `weight_decay` stands, and `ignores`
    are keywords without effect on optax's function in this case. `inputs` has the keyword of its update for each input
    of the rule.
    """

    file: str
    function: str
    when: Mapping[str, Any] = field(default_factory=dict)
    args: Mapping[str, Any] = field(default_factory=dict)
    state: Mapping[str, str] = field(default_factory=dict)
    decay: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    lines: Mapping[str, str] = field(default_factory=dict)
    start: Mapping[str, Any] = field(default_factory=dict)
    dtypes: Mapping[str, str] = field(default_factory=dict)
    ignores: Sequence[str] = ()
    inputs: Mapping[str, str] = field(default_factory=dict)
    scales: bool = False

    @functools.cached_property
    def signature(self) -> inspect.Signature:
        """The signature of optax's function."""
        return inspect.signature(functools.reduce(getattr, self.function.split("."), optax))

    @functools.cached_property
    def base(self) -> Rule:
        """The rule of the library."""
        return load(self.file)

    @functools.cached_property
    def changed(self) -> Rule:
        """The rule of the library with the lines that optax's function has otherwise."""
        if not self.lines and not self.start:
            return self.base
        defaults = {k: p.default for k, p in self.signature.parameters.items() if is_number(p.default)}
        return variant(self.base, self.lines, self.start, defaults)

    @functools.cached_property
    def places(self) -> Mapping[str, str | list[str]]:
        """Keyword of optax's function -> hyper-parameter of the rule, or several where the keyword is a tuple."""
        taken = {name for value in self.args.values() for name in (value if isinstance(value, list) else [value])}
        fixed = {keyword for keyword, value in self.when.items() if value not in ("nonzero", "given")}
        hyper = self.changed.settings
        same = {k: k for k in self.signature.parameters if k in hyper and k not in taken and k not in fixed}
        return {"learning_rate": "lr", **same, **self.args}

    def matches(self, values: Mapping[str, Any]) -> bool:
        """Whether these keywords mean this rule; a traced number counts as nonzero."""
        return not self.differs(values)

    def differs(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Keyword -> wanted value, for the keywords with another value here."""
        return {keyword: wanted for keyword, wanted in self.when.items() if not _is(values[keyword], wanted)}

    def rule(self, values: Mapping[str, Any]) -> Rule:
        """The rule for these keywords; always the same object for the same rule."""
        zeros = frozenset(k for k, v in values.items() if is_number(v) and v == 0)
        decays = bool(self.decay) and _is(values["weight_decay"], "nonzero")
        scales = self.scales or values.get("learning_rate", 0) is None
        return self._cached(zeros & self._more, decays, scales)

    @functools.cached_property
    def _more(self) -> frozenset[str]:
        """The hyper-parameters of optax's function that the rule of the library lacks."""
        return frozenset(self.changed.hyper.keys() - self.base.hyper.keys())

    @functools.cached_property
    def _known(self) -> dict[Any, Rule]:
        return {}

    def _cached(self, zeros: frozenset[str], decays: bool, scales: bool) -> Rule:
        key = zeros, decays, scales
        if key not in self._known:
            rule = without(self.changed, zeros, self.base) if self.changed is not self.base else self.base
            if decays:
                rule = decayed(rule, self.decay)
            self._known[key] = as_direction(rule) if scales else rule
        return self._known[key]

    def hyper(self, values: Mapping[str, Any], rule: Rule) -> dict[str, Any]:
        """The hyper-parameters of `rule`, from these keywords."""
        known = rule.settings
        hyper: dict[str, Any] = {}
        for keyword, ours in self.places.items():
            value = values.get(keyword)
            if value is None and isinstance(self.defaults.get(keyword), str):
                value = values[self.defaults[keyword]]
            if keyword == "weight_decay" and value is None:
                value = 0.0
            if value is not None:
                hyper |= dict(zip(ours, value, strict=True)) if isinstance(ours, list) else {ours: value}
        if self.decay and "weight_decay" in known:
            hyper["weight_decay"] = values["weight_decay"]
        return {name: value for name, value in hyper.items() if name in known}

    def check(self, values: Mapping[str, Any]) -> None:
        """HyperError for a keyword that nothing here knows, unless it has its default."""
        known = {
            *self.places,
            *self.when,
            *self.dtypes,
            *self.ignores,
            *MASKS,
            *(["weight_decay"] if self.decay else []),
        }
        for keyword, value in values.items():
            default = self.signature.parameters[keyword].default
            if keyword not in known and value is not default and not _equal(value, default):
                advice = "" if isinstance(value, _PLAIN) else ", or name it among the static_args of inject_hyperparams"
                raise HyperError(
                    f"rulec.jax.{self.function} has no {keyword}={value!r}, only the default {default!r}: leave it "
                    f"out{advice}"
                )


def _is(value: Any, wanted: Any) -> bool:
    if wanted == "given":
        return value is not None
    if wanted == "nonzero":
        return value is not None and not (is_number(value) and value == 0)
    return _equal(value, wanted)


#: Values that are compared at once; arrays may be traced.
_PLAIN = (bool, int, float, str, tuple, type(None))


def _equal(value: Any, wanted: Any) -> bool:
    """Whether both are the same; False where one is an array, since it may be traced."""
    return isinstance(value, _PLAIN) and isinstance(wanted, _PLAIN) and value == wanted


def as_direction(rule: Rule) -> Rule:
    """The rule that moves by its direction itself, upwards and at no learning rate."""
    if rule.assigns_parameter:
        raise HyperError(f"{rule.name} has no direction that a learning rate multiplies: give it a learning rate")
    moved = Assign("p", node(Op.ADD, name("p"), name("direction")))
    return replace(rule, step=(*rule.step, moved))


def index() -> Mapping[str, tuple[str, ...]]:
    """Function of optax -> the files of the rules with an entry for it."""
    return interop_index("optax", "function|scaler")


@functools.cache
def entries(function: str) -> tuple[Entry, ...]:
    """The entries of all rules for a function of optax."""
    return tuple(entry for file in index()[function] for entry in entries_of(file) if entry.function == function)


def entries_of(file: str) -> Iterator[Entry]:
    """The entries of one rule; an entry for the direction alone comes after the entry in which it is written."""
    for entry in interop_entries(load(file), "optax"):
        data = dict(entry)
        scaler = data.pop("scaler", None)
        data["decay"] = data.pop("weight_decay", "")
        functions = data.pop("function")
        for function in [functions] if isinstance(functions, str) else functions:
            yield Entry(file, function, **data)
        if scaler is not None:
            more = {"function": scaler} if isinstance(scaler, str) else scaler
            yield Entry(file, **{**data, "decay": "", **more}, scales=True)
