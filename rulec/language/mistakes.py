"""All mistakes of a text at once: reading goes on after each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

from rulec.errors import RuleError

T = TypeVar("T")


class Mistakes:
    """The mistakes of one text so far, one for each place."""

    def __init__(self) -> None:
        self._errors: dict[str, RuleError] = {}

    @contextmanager
    def part(self) -> Iterator[None]:
        """Reads a part of the text; a RuleError with a place is kept, and what follows is read as well."""
        try:
            yield
        except RuleError as error:
            if not error.place:
                raise
            for each in (error, *error.others):
                self._errors.setdefault(each.place, each)

    def read(self, keys: Iterable[str], values: Callable[[str], Mapping[str, T]], instead: T) -> dict[str, T]:
        """The values of all keys; `instead` is the value of a key with a mistake."""
        read: dict[str, T] = {}
        for key in keys:
            with self.part():
                read |= values(key)
                continue
            read[key] = instead
        return read

    def check(self) -> None:
        """Raises the first mistake, with the others in it; does nothing where there is none."""
        if self._errors:
            first, *others = self._errors.values()
            first.others = tuple(others)
            raise first
