"""Rules and hyper-parameters by the paths of parameters, as in `partition({"**/bias": "sgd", "...": "adamw"})`."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import translate
from pathlib import Path
from typing import Any

from rulec.errors import HyperError, RuleError, TensorError
from rulec.language.library import load
from rulec.language.rule import Rule
from rulec.language.source import did_you_mean

#: The pattern of everything that no other takes.
REST = "..."


@dataclass(frozen=True, eq=False)
class Part:
    """A rule for some of the parameters, their hyper-parameters and tags; `given` is how the rule was named."""

    rule: Rule
    hyper: Mapping[str, Any] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    given: Rule | str | Path = ""


def part(rule: Rule | str | Path, *, tags: Collection[str] = (), **hyper: Any) -> Part:
    """A rule with hyper-parameters of its own, for some of the parameters of a partition.

    `rule` is a Rule, a library name or a path. `tags` are the words that a rule may ask for with `tagged(...)`.
    """
    if isinstance(tags, str) or not all(isinstance(tag, str) for tag in tags):
        raise HyperError(f"tags={tags!r} of a part must be words, such as ['embedding']")
    if not isinstance(rule, Rule | str | Path):
        raise RuleError(f"a part is of a rule, the name of one or a path, not of {type(rule).__name__}")
    return Part(rule if isinstance(rule, Rule) else load(rule), dict(hyper), tuple(dict.fromkeys(tags)), rule)


@dataclass(frozen=True, eq=False)
class Partition:
    """What trains each parameter, by its path: the part of the first pattern that matches; None leaves it as it is."""

    entries: tuple[tuple[str, Part | None], ...]
    allow_unused: bool = False

    def __repr__(self) -> str:
        words = [f"{p!r}: {'None' if own is None else own.rule.name}" for p, own in self.entries]
        return f"<Partition {', '.join(words)}>"

    @property
    def patterns(self) -> tuple[str, ...]:
        """The patterns, in the order in which they are tried."""
        return tuple(pattern for pattern, _ in self.entries)

    @property
    def parts(self) -> list[Part]:
        """The parts that train something, in order."""
        return [own for _, own in self.entries if own is not None]

    def split(self, paths: Sequence[str]) -> dict[str, list[str]]:
        """The paths that each pattern takes. Raises what `places` raises."""
        found: dict[str, list[str]] = {pattern: [] for pattern in self.patterns}
        for path, place in zip(paths, self.places(paths), strict=True):
            found[self.patterns[place]].append(path)
        return found

    def places(self, paths: Sequence[str]) -> list[int]:
        """For each path the index of the entry that takes it.

        TensorError where a path matches no pattern; RuleError where a pattern takes no path, unless `allow_unused`.
        """
        return places_of(self.patterns, paths, self.allow_unused)


def partition(entries: Mapping[Any, Any], *, allow_unused: bool = False) -> Partition:
    """What trains which parameter, by patterns of paths such as `layer/0/bias`; the first pattern that matches holds.

    `*` stands for one part of a path or some of it, `?` and `[abc]` for one character, `**` for any number of parts,
    and `"..."`, which comes last, for everything else. An entry is a rule (a Rule, a library name or a path), a rule
    and its hyper-parameters (`rulec.part("adamw", lr=1e-3)`, or `("adamw", {"lr": 1e-3})`), or None for parameters
    that are not trained. A pattern that takes no parameter is an error unless `allow_unused`.

    Raises RuleError or HyperError for what is none of these.
    """
    if not isinstance(entries, Mapping) or not entries:
        raise RuleError('a partition is a dict of patterns and rules, such as {"**/bias": "sgd", "...": "adamw"}')
    made = tuple((_pattern(key), _part(key, given)) for key, given in entries.items())
    if REST in [pattern for pattern, _ in made[:-1]]:
        raise RuleError('the pattern "..." stands for everything else: give it last')
    return Partition(made, allow_unused)


def _pattern(given: Any) -> str:
    if given is ...:
        return REST
    if not isinstance(given, str) or not all(given.split("/")):
        raise RuleError(
            f'the pattern {given!r} must be a path with none of its parts empty, such as "layer/*/bias", or "..."'
        )
    return given


def _part(pattern: str, given: Any) -> Part | None:
    if given is None or isinstance(given, Part):
        return given
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Mapping):
        return part(given[0], **given[1])
    if isinstance(given, Rule | str | Path):
        return part(given)
    raise RuleError(
        f"the entry of {pattern!r} is of type {type(given).__name__}: give a rule or its name, "
        f"rulec.part(rule, lr=...), or None for parameters that are not trained"
    )


# Matching


def matches(pattern: str, path: str) -> bool:
    """Whether a pattern matches a path."""
    return pattern == REST or _match(_compiled(pattern), tuple(path.split("/")))


@functools.lru_cache(maxsize=4096)
def _compiled(pattern: str) -> tuple[re.Pattern[str] | None, ...]:
    """The parts of a pattern; None is `**`, which once is as good as twice in a row."""
    parts = pattern.split("/")
    kept = [own for i, own in enumerate(parts) if own != "**" or parts[i - 1 : i] != ["**"]]
    return tuple(None if own == "**" else re.compile(translate(own)) for own in kept)


def _match(wanted: Sequence[re.Pattern[str] | None], parts: Sequence[str]) -> bool:
    """Whether parts of a path match those of a pattern: all of both, one after the other."""
    reached = {0}
    for own in wanted:
        if own is None:
            reached = set(range(min(reached), len(parts) + 1))
        else:
            reached = {i + 1 for i in reached if i < len(parts) and own.match(parts[i])}
        if not reached:
            return False
    return len(parts) in reached


def places_of(patterns: Sequence[str], paths: Sequence[str], allow_unused: bool = False) -> list[int]:
    """For each path the index of the first pattern that matches. TensorError and RuleError as `Partition.places`."""
    places = [_place(patterns, path) for path in paths]
    if not allow_unused:
        for index in sorted({*range(len(patterns))} - {*places}):
            _refuse_unused(patterns, index, paths)
    return places


def _place(patterns: Sequence[str], path: str) -> int:
    for index, pattern in enumerate(patterns):
        if matches(pattern, path):
            return index
    raise TensorError(
        f'no pattern of the partition matches the parameter {path}: add "...": a rule for everything else, or None '
        f"to leave it as it is"
    )


def _refuse_unused(patterns: Sequence[str], index: int, paths: Sequence[str]) -> None:
    pattern = patterns[index]
    if pattern == REST:
        return
    taken = next((path for path in paths if matches(pattern, path)), None)
    if taken is not None:
        first = patterns[_place(patterns, taken)]
        raise RuleError(
            f"the pattern {pattern!r} takes no parameter, for those before it take all that it matches, as {first!r} "
            f"takes {taken}: put it before them, or leave it out"
        )
    raise RuleError(
        f"the pattern {pattern!r} matches no parameter: correct it, or allow it with "
        f"allow_unused=True{_hint(pattern, paths)}"
    )


def _hint(pattern: str, paths: Sequence[str]) -> str:
    """What may have been meant by a pattern that matches nothing."""
    for other in _alternatives(pattern):
        if any(matches(other, path) for path in paths):
            return f"; did you mean {other!r}?"
    return did_you_mean(pattern, paths)


def _alternatives(pattern: str) -> Iterator[str]:
    """The same with parts written by `/`, and then at any depth."""
    for written in dict.fromkeys((pattern, pattern.replace(".", "/"))):
        if not all(written.split("/")):
            continue
        yield written
        parts = written.split("/")
        yield "/".join("**" if own == "*" else own for own in parts)
        yield f"**/{written}"
        yield f"{written}/**"
