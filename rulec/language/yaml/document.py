"""YAML as plain data with places: a SafeLoader with YAML 1.2 scalars.

PyYAML follows YAML 1.1, where `1e-3` is a string and `no` is false. Here scalars are YAML 1.2's, and every value keeps
its place. A repeated key is an error. Anchors, aliases and tags are refused: no rule file needs them, and nested
aliases expand without bound.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Any

import yaml

from rulec.errors import RuleError
from rulec.language.expr.names import short
from rulec.language.parse.located import Position, Text
from rulec.language.source import MAX_DOCUMENT, Source, Span, rule_error

MAX_NESTING = 20

Path = tuple[str | int, ...]

#: The scalars of YAML 1.2's core schema: tag, pattern of the whole scalar, characters it may begin with.
_SCALARS = (
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("tag:yaml.org,2002:int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    ("tag:yaml.org,2002:float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("tag:yaml.org,2002:float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", "-+."),
    ("tag:yaml.org,2002:null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
)

#: Characters refused in a text: controls, and line breaks that editors do not count.
_STRANGE = re.compile("[^\n\t -~\xa0-\u2027\u202a-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

#: Pattern of PyYAML's message -> our message.
_SAID = (
    (r"character '\\t'", "a tab: indent and separate with spaces"),
    (r"expected ',' or '}'", "a comma or } is missing in this mapping"),
    (r"expected ',' or '\]'", "a comma or ] is missing in this list"),
    (r"expected ':'", "a colon is missing after this key"),
    (r"end of stream", "this quote is never closed"),
    (r"<block end>|<document start>", "this line is indented otherwise than the ones above it"),
    (r"single document", "a rule file holds one document: remove this"),
    (r"cannot start any token", "a value cannot begin with this character: put it in quotes"),
)


def use_yaml_1_2(kind: Any) -> Any:
    """The loader or dumper class with YAML 1.2's scalars in place of YAML 1.1's."""
    kind.yaml_implicit_resolvers = {}
    for tag, pattern, first in _SCALARS:
        kind.add_implicit_resolver(tag, re.compile(rf"(?:{pattern})\Z"), list(first))
    return kind


@use_yaml_1_2
class _Loader(yaml.SafeLoader):
    """Composes nodes, and refuses anchors, aliases, tags and deep nesting at their first place."""

    def __init__(self, source: Source) -> None:
        super().__init__(source.text)
        self.source = source
        self.nesting = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """The next node: no alias, without anchor and tag, and not nested too deeply."""
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        message = ""
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            message = "an anchor or alias is not part of a rule file: write the value out, in quotes if it is a text"
        elif event.tag is not None:
            message = "a tag is not part of a rule file: remove it, or put the text in quotes"
        elif self.nesting >= MAX_NESTING and isinstance(event, yaml.CollectionStartEvent):
            message = f"this is nested deeper than {MAX_NESTING} levels"
        if message:
            raise rule_error(message, _span(self.source, event))
        self.nesting += 1
        node = super().compose_node(parent, index)
        self.nesting -= 1
        return node


@dataclass
class Document:
    """A YAML document as dicts, lists and scalars, with the place of each value and key."""

    source: Source
    data: Any = None
    places: dict[Path, yaml.Node] = field(default_factory=dict)
    keys: dict[Path, yaml.Node] = field(default_factory=dict)

    def span(self, path: Path, key: bool = False) -> Span:
        """The place of the value (or key) at `path`, or of the nearest value above it that exists."""
        while path and path not in self.places:
            path = path[:-1]
        key_node = self.keys.get(path) if key else None
        return _span(self.source, key_node or self.places[path])

    def at(self, path: Path) -> Any:
        """The value at `path`."""
        data = self.data
        for part in path:
            data = data[part]
        return data

    def below(self, path: Path) -> Document:
        """The value at `path` as a document of its own, with the same places in the same source."""
        size = len(path)
        places = {key[size:]: node for key, node in self.places.items() if key[:size] == path}
        keys = {key[size:]: node for key, node in self.keys.items() if key[:size] == path and len(key) > size}
        return Document(self.source, self.at(path), places, keys)

    def text(self, path: Path) -> Text:
        """The string at `path` as rule text with the place of each character."""
        value = str(self.at(path))
        return Text(value, self.source, _positions(self.source.text, self.places[path], value))

    def key_text(self, path: Path) -> Text:
        """The key at `path` as rule text with the place of each character."""
        value = str(path[-1])
        return Text(value, self.source, _positions(self.source.text, self.keys[path], value))


def _positions(source: str, at: yaml.Node, value: str) -> list[Position]:
    """The place of each character of a scalar's value in the source, then of its end: line and column from 1.

    The value's characters are the source's in order, except for blanks joined by folding and for escapes.
    """
    style = getattr(at, "style", None) or ""
    index = _index(at.start_mark) + (style in ("'", '"'))
    if style in ("|", ">"):
        index = source.index("\n", index) + 1
    starts = [0, *(m.end() for m in re.finditer("\n", source))]

    def position() -> Position:
        line = bisect_right(starts, min(index, len(source)))
        return line, min(index, len(source)) - starts[line - 1] + 1

    positions = []
    for character in value:
        if style == '"':
            index = re.compile(r"(\\\n\s*)*").match(source, index).end()  # type: ignore[union-attr]
        width = _escape_width(source, index, style)
        if not character.isspace() and not width:
            while index < len(source) and source[index].isspace():
                index += 1
            width = _escape_width(source, index, style) or 1
        positions.append(position())
        index += width or (source[index : index + 1] == character)
    return [*positions, position()]


_ESCAPE = re.compile(r"\\(?:x..|u.{4}|U.{8}|.)", re.DOTALL)


def _escape_width(source: str, index: int, style: str) -> int:
    """The width of the escape at `index` in characters of the source; 0 where there is no escape."""
    if style == "'" and source.startswith("''", index):
        return 2
    escape = _ESCAPE.match(source, index) if style == '"' else None
    return len(escape[0]) if escape else 0


def _index(mark: yaml.Mark | None) -> int:
    assert mark is not None  # of a text, the parser knows where everything stands
    return mark.index


def _span(source: Source, at: yaml.Node | yaml.Event) -> Span:
    mark, end = at.start_mark, at.end_mark
    assert mark is not None
    assert end is not None
    width = end.column - mark.column if end.line == mark.line else len(source.line(mark.line + 1)) - mark.column
    return Span(source, mark.line + 1, mark.column + 1, max(1, width))


def read_document(text: str, name: str) -> Document:
    """The document of a YAML text known to users as `name`; RuleError at the place of a mistake."""
    if len(text) > MAX_DOCUMENT:
        raise rule_error(f"{name} has {len(text)} characters, over the limit of {MAX_DOCUMENT}: it is no rule file")
    source = Source(name, text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n"))
    _check_characters(source)
    root = _compose(source)
    if root is None:
        raise rule_error(f"{name} is empty: a rule file begins with name:")
    document = Document(source)
    document.data = _convert(document, root, ())
    return document


def _check_characters(source: Source) -> None:
    for number, line in enumerate(source.text.split("\n"), 1):
        strange = _STRANGE.search(line)
        if strange:
            message = f"the character U+{ord(strange[0]):04X} has no place in a rule file: remove it"
            raise rule_error(message, Span(source, number, strange.start() + 1))
        before = line[: len(line) - len(line.lstrip())]
        if "\t" in before:
            raise rule_error("a tab: indent and separate with spaces", Span(source, number, before.index("\t") + 1))


def _compose(source: Source) -> yaml.Node | None:
    try:
        return _Loader(source).get_single_node()
    except yaml.MarkedYAMLError as error:
        raise _refused(source, error) from None
    except RuleError:
        raise
    except (yaml.YAMLError, ValueError, OverflowError):
        raise rule_error(f"{source.name} is not YAML: an escape or a number in it is out of range") from None


def _refused(source: Source, error: yaml.MarkedYAMLError) -> RuleError:
    said = f"{error.context or ''} {error.problem or ''}"
    mark = error.problem_mark or error.context_mark
    if error.context_mark and re.search(r"<stream end>|end of stream|expected (',' or|':')", said):
        mark = error.context_mark
    place = Span(source, mark.line + 1, mark.column + 1) if mark else None
    if "mapping values are not allowed" in said and mark is not None:
        second = ":" in source.line(mark.line + 1)[: mark.column]
        above = "this key cannot stand here: a colon is missing above it, or it is indented too far"
        return rule_error("a second colon in one value: put the value in quotes" if second else above, place)
    ours = next((ours for theirs, ours in _SAID if re.search(theirs, said)), f"this is not YAML: {error.problem}")
    return rule_error(ours, place)


def _convert(document: Document, at: yaml.Node, path: Path) -> Any:
    document.places[path] = at
    if isinstance(at, yaml.MappingNode):
        return _convert_mapping(document, at, path)
    if isinstance(at, yaml.SequenceNode):
        return [_convert(document, child, (*path, i)) for i, child in enumerate(at.value)]
    return _scalar(document, at)


def _convert_mapping(document: Document, at: yaml.MappingNode, path: Path) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key_node, value_node in at.value:
        span = _span(document.source, key_node)
        if not isinstance(key_node, yaml.ScalarNode):
            raise rule_error("a key must be a name", span)
        key = str(key_node.value)
        if at.flow_style and key.count(")") > key.count("("):
            raise rule_error("the comma before this parts a value in two: put the whole value in quotes", span)
        if key in result:
            raise rule_error(f"the key {short(key)} is given twice", span)
        document.keys[(*path, key)] = key_node
        result[key] = _convert(document, value_node, (*path, key))
    return result


def _scalar(document: Document, at: yaml.Node) -> Any:
    kind, text = at.tag.rpartition(":")[2], str(at.value)
    if kind == "bool":
        return text.lower() == "true"
    if kind == "int" and len(text) < 300:
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
    if kind in ("int", "float"):
        return _number(document, at, text)
    if kind == "null":
        return None
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise rule_error("half of a character: write the whole character", _span(document.source, at))
    return text


def _number(document: Document, at: yaml.Node, text: str) -> float:
    plain = text.lower().replace(".inf", "inf").replace(".nan", "nan")
    value = math.inf if plain.startswith(("0o", "0x")) else float(plain)
    if math.isinf(value) and "inf" not in plain:
        message = "this number is larger than a float64 can hold: write .inf for infinity"
        raise rule_error(message, _span(document.source, at))
    if value == 0 and re.match(r"[-+]?[0.]*[1-9]", plain):
        raise rule_error("this number is smaller than a float64 can hold: write 0", _span(document.source, at))
    return value
