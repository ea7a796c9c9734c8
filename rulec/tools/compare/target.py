"""The other side of a comparison, by name: a class or function of another library, and its names for our rule."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rulec.errors import RulecError
from rulec.language.library.load import interop_entries
from rulec.language.rule import Rule
from rulec.language.source import did_you_mean
from rulec.tools.compare.sides import Array, OptaxSide, Side, TorchSide


def resolve(text: str) -> Any:
    """The object with the name `package.module.Name` or `package.module:Name`; RulecError where there is none."""
    module_name, _, attribute = text.partition(":") if ":" in text else text.rpartition(".")
    if not module_name or not attribute:
        raise RulecError(f"{text!r} names nothing to compare with: write torch.optim.Adam, optax.adam or module:Class")
    place, rest = _import(module_name, text)
    for name in [*rest, *attribute.split(".")]:
        if not hasattr(place, name):
            near = did_you_mean(name, [n for n in dir(place) if not n.startswith("_")])
            raise RulecError(f"{getattr(place, '__name__', place)!s} has no {name!r}{near}")
        place = getattr(place, name)
    return place


def _import(name: str, text: str) -> tuple[Any, list[str]]:
    """The module of the longest possible part of a dotted name, and the attributes after it."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            return importlib.import_module(".".join(parts[:count])), parts[count:]
        except ModuleNotFoundError as error:
            # A module that exists and lacks one of its own requirements is another mistake.
            if error.name is None or not ".".join(parts[:count]).startswith(error.name):
                raise RulecError(f"{text} cannot be imported: {error}") from None
    raise RulecError(f"{text} cannot be imported: there is no module {parts[0]!r} here")


@dataclass(frozen=True)
class Target:
    """Another library's optimizer, made for the hyper-parameters of a rule of ours."""

    name: str
    kind: Any
    package: str
    keywords: Mapping[str, Any]
    states: Mapping[str, str]
    left_out: tuple[str, ...]

    @property
    def call(self) -> str:
        """The call that constructs it, as text."""
        return f"{self.name}({', '.join(f'{k}={v!r}' for k, v in self.keywords.items())})"

    def start(self, params: Sequence[Array]) -> Side:
        """A side with this optimizer; RulecError where it refuses its keywords."""
        try:
            if self.package == "torch":
                return TorchSide(self.kind, self.keywords, params)
            return OptaxSide(self.name, self.kind, self.keywords, params)
        except (TypeError, ValueError, LookupError, AttributeError, RuntimeError) as error:
            raise RulecError(f"{self.call} cannot be made: {error}") from error


def find_target(text: str, rule: Rule, hyper: Mapping[str, float], overrides: Mapping[str, Any]) -> Target:
    """The optimizer with the name `text`, and its keywords for `hyper`; `overrides` are keywords that take precedence.

    RulecError where it is neither a torch.optim.Optimizer class nor an optax function.
    """
    kind = resolve(text)
    package = _package(text, kind)
    called = text.replace(":", ".").removeprefix("torch.optim." if package == "torch" else "optax.")
    translated = translate(hyper, kind, entry_for(rule, package, called), overrides)
    return Target(text, kind, package, translated.keywords, translated.states, translated.left_out)


def _package(text: str, kind: Any) -> str:
    torch: Any = sys.modules.get("torch")
    if torch is not None and isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer):
        return "torch"
    if "optax" in sys.modules and callable(kind) and not isinstance(kind, type):
        return "optax"
    raise RulecError(f"{text} is neither a torch.optim.Optimizer class nor an optax function, nor a rule")


@dataclass(frozen=True)
class Translation:
    """Keywords to construct theirs, state of ours -> their key, and our hyper-parameters without a keyword."""

    keywords: Mapping[str, Any]
    states: Mapping[str, str]
    left_out: tuple[str, ...] = ()


def entry_for(rule: Rule, package: str, called: str) -> Mapping[str, Any]:
    """The entry for their class or function of that name; empty where the rule has none."""
    for entry in interop_entries(rule, package):
        names = entry.get("class", entry.get("function"))
        if called in ([names] if isinstance(names, str) else names):
            return entry
    return {}


def translate(
    hyper: Mapping[str, float], target: Any, entry: Mapping[str, Any], overrides: Mapping[str, Any]
) -> Translation:
    """The construction of `target`, their class or function, for these values of our hyper-parameters.

    `entry` is the rule's interop entry for it, or empty; `overrides` are keywords of theirs that take precedence.
    """
    parameters = inspect.signature(target).parameters
    keywords = {k: v for k, v in entry.get("when", {}).items() if v not in ("nonzero", "given")}
    used: set[str] = set()
    for keyword, ours in _names(parameters, hyper, entry).items():
        names = ours if isinstance(ours, list) else [ours]
        if keyword not in keywords and all(name in hyper for name in names):
            values = tuple(hyper[n] for n in names)
            keywords[keyword] = values if isinstance(ours, list) else _as_theirs(values[0], parameters.get(keyword))
            used.update(names)
    left_out = tuple(name for name in hyper if name not in used)
    return Translation({**keywords, **overrides}, entry.get("state", {}), left_out)


def _as_theirs(value: float, parameter: inspect.Parameter | None) -> float | int:
    """A whole number as an int where theirs is one, such as a number of iterations."""
    whole = parameter is not None and type(parameter.default) is int and float(value).is_integer()
    return int(value) if whole else value


def _names(
    parameters: Mapping[str, inspect.Parameter], hyper: Iterable[str], entry: Mapping[str, Any]
) -> dict[str, Any]:
    """Keyword of theirs -> hyper-parameter of ours, or a list of them where the keyword is a tuple."""
    told = dict(entry.get("args", {}))
    taken = {name for value in told.values() for name in (value if isinstance(value, list) else [value])}
    places: dict[str, Any] = {}
    betas = [name for name in hyper if re.fullmatch(r"beta\d*", name)]
    for keyword, parameter in parameters.items():
        numbered = re.fullmatch(r"b(\d)", keyword)
        if keyword in hyper:
            places[keyword] = keyword
        elif keyword == "learning_rate":
            places[keyword] = "lr"
        elif keyword == "betas":
            wanted = len(parameter.default) if isinstance(parameter.default, tuple) else len(betas)
            # Some of theirs cannot be told: without all of them, theirs keeps its own.
            places |= {keyword: betas[:wanted]} if len(betas) >= wanted else {}
        elif numbered:
            places[keyword] = f"beta{numbered[1]}"
    return {k: v for k, v in places.items() if not isinstance(v, str) or v not in taken} | told
