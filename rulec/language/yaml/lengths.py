"""The lengths of the lists in a rule file: of hyper-parameters, of states, and of histories."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

from rulec.errors import RuleError
from rulec.language.dimensions import Dimensions, axis_variable
from rulec.language.expr.node import Node
from rulec.language.parse.expression import length_of, parse_expression, tagged
from rulec.language.parse.located import Text
from rulec.language.sizes import entries
from rulec.language.source import rule_error
from rulec.language.yaml.document import Document
from rulec.language.yaml.document import Path as Place
from rulec.language.yaml.schema import HyperEntry, RuleFile, StateEntry

#: The shape facts of a condition on tensors.
_SHAPE = ("ndim", "numel", "rows", "cols")

#: The keys of a state that is a list.
_WORDS = ("count", "history", "each")


class Lengths:
    """The lists of one rule file.

    `values` has other values of lists and of counts than the file. `lists` has the lengths by name, `histories` the
    names of histories. `each` has, of a state for each axis, the variable of every entry with its value, and the
    condition of the tensors that have this axis. `counts` has the values of static hyper-parameters, and `counts_read`
    the ones in lengths, loops and indices. If `fixed`, a list has one length alone.
    """

    def __init__(self, document: Document, file: RuleFile, values: Mapping[str, Any]) -> None:
        self.document, self.file, self.values = document, file, values
        self.fixed = False
        self.lists = self.hyper_lists()
        self.counts = {key: n for key in file.hyper if (n := self._count(key)) is not None}
        self.counts_read: dict[str, float] = {}
        self.histories: set[str] = set()
        self.each: dict[str, list[tuple[dict[str, int], Node | None]]] = {}
        for key, entry in file.state.items():
            if isinstance(entry, StateEntry) and any(getattr(entry, word) is not None for word in _WORDS):
                self.lists[key] = self._state(key, entry)
        self._check_names()

    def hyper_names(self) -> list[str]:
        """The names of the file's hyper-parameters, with the entries of lists."""
        lists = self.hyper_lists()
        return [name for key in self.file.hyper for name in (entries(key, lists[key]) if key in lists else [key])]

    def hyper_lists(self) -> dict[str, int]:
        """The lengths of lists of hyper-parameters."""
        lists = {}
        for key, entry in self.file.hyper.items():
            default = entry.default if isinstance(entry, HyperEntry) else entry
            length = entry.length if isinstance(entry, HyperEntry) else None
            if isinstance(default, list):
                lists[key] = len(self.values.get(key, default))
            if length is not None and (not isinstance(default, list) or lists[key] != length):
                listed = f"and its list has {lists[key]} values" if isinstance(default, list) else "and is no list"
                raise rule_error(f"{key} is of length {length}, {listed}", self.document.span(("hyper", key), key=True))
            self.fixed |= length is not None
        return lists

    def chosen(self, key: str) -> list[float] | None:
        """The values of a hyper-parameter, where they are others than the file's."""
        if key not in self.values:
            return None
        value = self.values[key]
        return [float(x) for x in value] if isinstance(value, list | tuple) else [float(value)]

    def read(self, names: Iterable[str]) -> None:
        """Notes the counts read by lengths, loops or indices."""
        self.counts_read |= {name: self.counts[name] for name in names}

    def _check_names(self) -> None:
        """RuleError where a list is called as something else is."""
        wraps = self.file.wraps or ()
        others = [*self.file.inputs, *([wraps] if isinstance(wraps, str) else wraps)]
        for key in self.lists:
            if key in others or (key in self.file.hyper and key in self.file.state):
                section = "state" if key in self.file.state else "hyper"
                message = f"{key!r} is something else already: choose another name for this list"
                raise rule_error(message, self.document.span((section, key), key=True))
        if "lr" in self.hyper_lists():
            raise rule_error("'lr' is one number, not a list", self.document.span(("hyper", "lr"), key=True))

    def _count(self, key: str) -> float | None:
        """The value of a static hyper-parameter; None for another one."""
        entry = self.file.hyper[key]
        if not isinstance(entry, HyperEntry) or not entry.static:
            return None
        value = self.values.get(key, entry.default)
        return float(value) if isinstance(value, int | float) else None

    @cached_property
    def dimensions(self) -> Dimensions:
        """The numbers of dimensions of the rule's tensors."""
        if self.file.applies_to is None:
            return Dimensions()
        return Dimensions(parse_expression(self.document.text(("applies_to",)), _SHAPE, tagged))

    def _axes(self, key: str, entry: StateEntry) -> list[tuple[dict[str, int], Node | None]]:
        """The variable of each entry with its value, and the condition of the tensors that have it."""
        span = self.document.span(("state", key, "each"))
        try:
            variable = axis_variable(entry.each, f"state {key}")
            if variable in self.file.hyper or variable in _SHAPE:
                raise RuleError(f"{variable!r} has a value already: use another name for the number of the axis")
            return [({variable: axis}, condition) for axis, condition in self.dimensions.axes]
        except RuleError as error:
            raise error if error.place else rule_error(error.message, span) from None

    def _state(self, key: str, entry: StateEntry) -> int:
        """The length of a list of states, or of a history."""
        words = [word for word in _WORDS if getattr(entry, word) is not None]
        place: Place = ("state", key, words[-1])
        if len(words) > 1:
            message = f"state {key} has both {words[0]} and {words[1]}: keep one of them"
            raise rule_error(message, self.document.span(place))
        (word,) = words
        if word == "each":
            self.each[key] = self._axes(key, entry)
            return len(self.each[key])
        if word == "history":
            self.histories.add(key)
        value: float | Text = self.document.at(place)
        if isinstance(value, str):
            value = self.document.text(place)
        what, span = f"the {word} of {key}", self.document.span(place)
        length, names = length_of(value, what, self.hyper_lists(), self.counts, span)
        self.read(names)
        return length
