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
from rulec.language.library.load import NOT_LOADED, load
from rulec.language.rule import Rule
from rulec.language.source import did_you_mean

#: The pattern for all parameters without a pattern of their own.
REST = "..."


@dataclass(frozen=True, eq=False)
class Part:
    """A rule for some of the parameters, with their hyper-parameters and tags.

    `origin` is the rule as the user wrote it: a Rule, a library name or a path.
    """

    rule: Rule
    hyper: Mapping[str, Any] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    origin: Rule | str | Path = ""


def part(rule: Rule | str | Path, *, tags: Collection[str] = (), **hyper: Any) -> Part:
    """A rule with hyper-parameters of its own, for some of the parameters of a partition.

    `rule` is a Rule, a library name or a path. `tags` are words; a rule asks for them with `tagged(...)`. Raises
    HyperError for tags of another type, and RuleError as `rulec.load` does.
    """
    if isinstance(tags, str) or not all(isinstance(tag, str) for tag in tags):
        raise HyperError(f"tags={tags!r} of a part must be words, such as ['embedding']")
    if not isinstance(rule, Rule | str | Path):
        raise RuleError(f"a part is of a rule, the name of one or a path, not of {type(rule).__name__}")
    return Part(rule if isinstance(rule, Rule) else load(rule), dict(hyper), tuple(dict.fromkeys(tags)), rule)


@dataclass(frozen=True, eq=False)
class Partition:
    """Patterns of paths, each with its part. The first pattern to match a parameter's path decides.

    A part of None leaves its parameters untrained.
    """

    entries: tuple[tuple[str, Part | None], ...]
    allow_unused: bool = False

    def __repr__(self) -> str:
        words = [f"{p!r}: {'None' if entry is None else entry.rule.name}" for p, entry in self.entries]
        return f"<Partition {', '.join(words)}>"

    @property
    def patterns(self) -> tuple[str, ...]:
        """The patterns, in the order in which they are tried."""
        return tuple(pattern for pattern, _ in self.entries)

    @property
    def parts(self) -> list[Part]:
        """The parts, in order, without the None of untrained parameters."""
        return [entry for _, entry in self.entries if entry is not None]

    def split(self, paths: Sequence[str]) -> dict[str, list[str]]:
        """Pattern -> the paths it takes. Raises as `places` does."""
        taken: dict[str, list[str]] = {pattern: [] for pattern in self.patterns}
        for path, place in zip(paths, self.places(paths), strict=True):
            taken[self.patterns[place]].append(path)
        return taken

    def places(self, paths: Sequence[str]) -> list[int]:
        """For each path, the index of its entry.

        TensorError where a path matches no pattern; RuleError where a pattern takes no path, unless `allow_unused`.
        """
        return places_of(self.patterns, paths, self.allow_unused)


NOT_LOADED[Partition] = "a partition is of several rules, not one: give it to rulec.jax or rulec.torch.Partitioned"


def partition(entries: Mapping[Any, Any], *, allow_unused: bool = False) -> Partition:
    """Rules for parameters by patterns of their paths, such as `layer/0/bias`. The first pattern to match decides.

    `*` stands for one part of a path or some of it, `?` and `[abc]` for one character, `**` for any number of parts,
    and `"..."`, which comes last, for everything else. An entry is a rule (a Rule, a library name or a path), a rule
    and its hyper-parameters (`rulec.part("adamw", lr=1e-3)`, or `("adamw", {"lr": 1e-3})`), or None for parameters
    that are not trained. A pattern that takes no parameter is an error unless `allow_unused`.

    Raises RuleError for a pattern or an entry of another kind, and HyperError as `rulec.part` does.
    """
    if not isinstance(entries, Mapping) or not entries:
        raise RuleError('a partition is a dict of patterns and rules, such as {"**/bias": "sgd", "...": "adamw"}')
    pairs = tuple((_pattern(key), _part(key, entry)) for key, entry in entries.items())
    if REST in [pattern for pattern, _ in pairs[:-1]]:
        raise RuleError('the pattern "..." stands for everything else: give it last')
    return Partition(pairs, allow_unused)


def _pattern(pattern: Any) -> str:
    if pattern is ...:
        return REST
    if not isinstance(pattern, str) or not all(pattern.split("/")):
        raise RuleError(
            f'the pattern {pattern!r} must be a path with none of its parts empty, such as "layer/*/bias", or "..."'
        )
    return pattern


def _part(pattern: str, entry: Any) -> Part | None:
    if entry is None or isinstance(entry, Part):
        return entry
    if isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[1], Mapping):
        return part(entry[0], **entry[1])
    if isinstance(entry, Rule | str | Path):
        return part(entry)
    raise RuleError(
        f"the entry of {pattern!r} is of type {type(entry).__name__}: give a rule or its name, "
        f"rulec.part(rule, lr=...), or None for parameters that are not trained"
    )


# Matching


def matches(pattern: str, path: str) -> bool:
    """Whether a pattern matches a path."""
    return pattern == REST or _match(_compiled(pattern), tuple(path.split("/")))


@functools.lru_cache(maxsize=4096)
def _compiled(pattern: str) -> tuple[re.Pattern[str] | None, ...]:
    """The parts of a pattern as expressions. None stands for `**`, or for several `**` in a row."""
    parts = pattern.split("/")
    kept = [word for i, word in enumerate(parts) if word != "**" or parts[i - 1 : i] != ["**"]]
    return tuple(None if word == "**" else re.compile(translate(word)) for word in kept)


def _match(wanted: Sequence[re.Pattern[str] | None], parts: Sequence[str]) -> bool:
    """Whether the parts of a path match the parts of a pattern, all of both in order."""
    reached = {0}
    for expression in wanted:
        if expression is None:
            reached = set(range(min(reached), len(parts) + 1))
        else:
            reached = {i + 1 for i in reached if i < len(parts) and expression.match(parts[i])}
        if not reached:
            return False
    return len(parts) in reached


def places_of(patterns: Sequence[str], paths: Sequence[str], allow_unused: bool = False) -> list[int]:
    """For each path, the index of its first matching pattern. Raises as `Partition.places` does."""
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
    """The advice for a pattern without a match: a similar pattern with matches, or a similar path."""
    for other in _alternatives(pattern):
        if any(matches(other, path) for path in paths):
            return f"; did you mean {other!r}?"
    return did_you_mean(pattern, paths)


def _alternatives(pattern: str) -> Iterator[str]:
    """The pattern with `/` for `.`, and the same at any depth."""
    for written in dict.fromkeys((pattern, pattern.replace(".", "/"))):
        if not all(written.split("/")):
            continue
        yield written
        parts = written.split("/")
        yield "/".join("**" if word == "*" else word for word in parts)
        yield f"**/{written}"
        yield f"{written}/**"
