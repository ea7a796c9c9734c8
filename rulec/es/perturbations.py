"""The perturbation of each parameter, one for all or one for each pattern of names, and default seeds of strategies.

Strategies without a given seed have different seeds, and the same calls in the same order have the same seeds.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

from rulec.errors import HyperError, StateMismatch
from rulec.es.perturbation import Perturbation
from rulec.language.source import did_you_mean

#: The pattern of all parameters, where one perturbation is given for all of them.
ALL = "*"


class Perturbations:
    """The perturbations of a strategy by patterns of names; the first pattern that matches a parameter holds.

    All have the same directions and signs, for a member is one network. A perturbation without a seed gets one that no
    other strategy of the process has. HyperError for anything but perturbations, and for patterns that disagree about
    members.
    """

    def __init__(self, asked: Any) -> None:
        self._is_one = isinstance(asked, Perturbation)
        entries: dict[str, Perturbation] = {ALL: asked} if self._is_one else _checked(asked)
        self._unseeded = frozenset(pattern for pattern, p in entries.items() if p.seed is None)
        common = next_seed() if self._unseeded else None
        self._entries = {pattern: replace(p, seed=common) if p.seed is None else p for pattern, p in entries.items()}
        self.note_seeds()

    def __getitem__(self, pattern: str) -> Perturbation:
        return self._entries[pattern]

    def __iter__(self) -> Iterator[Perturbation]:
        return iter(self._entries.values())

    def __repr__(self) -> str:
        return repr(self.population if self._is_one else self._entries)

    def note_seeds(self) -> None:
        """Marks these seeds as used: strategies without a seed get others."""
        for perturbation in self:
            use(perturbation.seed_or_0)

    @property
    def population(self) -> Perturbation:
        """One of them, for what all have in common: directions, signs and members."""
        return next(iter(self))

    @property
    def as_given(self) -> Perturbation | Mapping[str, Perturbation]:
        """One, or one for each pattern, as they are now: with a seed, and with the sigma that they have."""
        return self.population if self._is_one else MappingProxyType(self._entries)

    # Patterns

    def pattern_of(self, name: str, separator: str) -> str | None:
        """The first pattern that matches a parameter's name or the name of a container of it; None where none does."""
        if self._is_one:
            return ALL
        return next((pattern for pattern in self._entries if _matches(pattern, name, separator)), None)

    def check_used(self, used: Collection[str | None], reasons: Mapping[str, str], separator: str) -> None:
        """HyperError for a pattern of no perturbed parameter; `reasons` say why each of the others is left alone."""
        for pattern in self._entries:
            if self._is_one or pattern in used:
                continue
            why = [f"{name}: {reason}" for name, reason in reasons.items() if _matches(pattern, name, separator)]
            if why:
                raise HyperError(f"nothing that the pattern {pattern!r} matches can be perturbed ({'; '.join(why)})")
            raise HyperError(
                f"the pattern {pattern!r} matches no parameter that the patterns before it leave: correct it or leave "
                f"it out"
            )

    # What changes

    def with_sigma(self, sigma: Any) -> Perturbations:
        """The same with another sigma for all, or for some by their pattern; HyperError for a bad one."""
        if not isinstance(sigma, Mapping):
            some = {pattern: p for pattern, p in self._entries.items() if p.family != "dropout"}
            return self._with({pattern: p.with_sigma(sigma) for pattern, p in (some or self._entries).items()})
        for pattern in sigma:
            if pattern not in self._entries:
                raise HyperError(
                    f"{pattern!r} is no pattern of the perturbations{did_you_mean(str(pattern), self._entries)}"
                )
        return self._with({pattern: self[pattern].with_sigma(value) for pattern, value in sigma.items()})

    def _with(self, changed: Mapping[str, Perturbation]) -> Perturbations:
        result = copy.copy(self)
        result._entries = {**self._entries, **changed}
        result.note_seeds()
        return result

    # Checkpoints

    def saved(self) -> dict[str, Any]:
        """Their fields, for a saved state."""
        if self._is_one:
            return {"perturbation": self.population.as_dict()}
        return {"perturbations": {pattern: p.as_dict() for pattern, p in self._entries.items()}}

    def restored(self, state: Mapping[str, Any]) -> Perturbations:
        """These with the sigma of a saved state, and with its seeds where none were given.

        StateMismatch where the state is of other perturbations.
        """
        fields: Any = {ALL: state.get("perturbation")} if self._is_one else state.get("perturbations")
        if not isinstance(fields, Mapping) or not all(isinstance(each, Mapping) for each in fields.values()):
            raise StateMismatch(
                f"the saved state has no {'perturbation' if self._is_one else 'perturbations by patterns'}: it is of "
                f"another strategy, or of none"
            )
        if [*fields] != [*self._entries]:
            raise StateMismatch(
                f"the saved perturbations are of the patterns {', '.join(map(repr, fields))}, where these are of "
                f"{', '.join(map(repr, self._entries))}"
            )
        return self._with({pattern: self._restored(pattern, entry) for pattern, entry in fields.items()})

    def _restored(self, pattern: str, fields: Mapping[str, Any]) -> Perturbation:
        expected = self[pattern].as_dict()
        moved = {"sigma", "seed"} if pattern in self._unseeded and fields.get("seed") is not None else {"sigma"}
        for name in {**expected, **fields}:
            if name not in moved and expected.get(name) != fields.get(name):
                raise StateMismatch(
                    f"the saved perturbation has {name}={fields.get(name)!r}, where this one has {expected.get(name)!r}"
                )
        try:
            return replace(self[pattern], **{name: fields[name] for name in moved})
        except (HyperError, KeyError) as error:
            raise StateMismatch(f"the saved perturbation is damaged: {error}") from error


def _checked(asked: Any) -> dict[str, Perturbation]:
    if not isinstance(asked, Mapping) or not asked:
        raise HyperError(
            f"perturbation={asked!r} must be a rulec.es.Perturbation, or a dict of them by patterns of names"
        )
    for pattern, perturbation in asked.items():
        if not isinstance(pattern, str) or not isinstance(perturbation, Perturbation):
            raise HyperError(
                f"the entry {pattern!r}: {perturbation!r} must be a pattern of names, such as 'layers.*', and a "
                f"rulec.es.Perturbation"
            )
    (first, one), *others = asked.items()
    for pattern, other in others:
        for name in ("directions", "antithetic"):
            if getattr(one, name) != getattr(other, name):
                raise HyperError(
                    f"{pattern!r} has {name}={getattr(other, name)} and {first!r} has {name}={getattr(one, name)}: a "
                    f"member is one network, give both the same"
                )
    return dict(asked)


def _matches(pattern: str, name: str, separator: str) -> bool:
    """Whether a pattern matches a name, or the part of it before a separator: the name of a container."""
    parts = name.split(separator)
    return any(fnmatchcase(separator.join(parts[:count]), pattern) for count in range(1, len(parts) + 1))


#: The first of these seeds: those that people write are smaller.
FIRST = 2**31

_lock = threading.Lock()
_used: set[int] = set()


def next_seed() -> int:
    """The least seed from `FIRST` on that no strategy of this process has had."""
    with _lock:
        seed = FIRST
        while seed in _used:
            seed += 1
        _used.add(seed)
        return seed


def use(seed: int) -> None:
    """Keeps `next_seed` from giving this one."""
    with _lock:
        _used.add(seed)
