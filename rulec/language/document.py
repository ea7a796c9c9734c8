"""YAML as plain data with places: a SafeLoader with YAML 1.2 scalars and nothing that surprises.

PyYAML follows YAML 1.1, where `1e-3` is a string and `no` is false. Here scalars are YAML 1.2's, a key given twice
is an error, anchors and aliases are refused (no document of ours needs them, and nested ones expand without
bound), and every value keeps its place.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from rulec.language.expression import Text
from rulec.language.source import Source, Span, rule_error

#: Longest document, in characters; a rule file is about twenty lines.
MAX_DOCUMENT = 200_000
MAX_NESTING = 20

Path = tuple[str | int, ...]

_SCALARS = (
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("tag:yaml.org,2002:int", r"[-+]?[0-9]+", "-+0123456789"),
    ("tag:yaml.org,2002:float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("tag:yaml.org,2002:float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", "-+."),
    ("tag:yaml.org,2002:null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
)


def use_yaml_1_2(kind: Any) -> Any:
    """The loader or dumper class with YAML 1.2's scalars in place of YAML 1.1's."""
    kind.yaml_implicit_resolvers = {}
    for tag, pattern, first in _SCALARS:
        kind.add_implicit_resolver(tag, re.compile(rf"(?:{pattern})\Z"), list(first))
    return kind


@use_yaml_1_2
class _Loader(yaml.SafeLoader):
    pass


@dataclass
class Document:
    """A YAML document as dicts, lists and scalars, and where each value stands."""

    source: Source
    data: Any = None
    places: dict[Path, yaml.Node] = field(default_factory=dict)
    keys: dict[Path, yaml.Node] = field(default_factory=dict)

    def span(self, path: Path, key: bool = False) -> Span:
        """The place of the value (or key) at `path`, or of the nearest that exists above it."""
        while path and path not in self.places:
            path = path[:-1]
        found = self.keys.get(path) if key else None
        return _span(self.source, found or self.places[path])

    def text(self, path: Path) -> Text:
        """The string at `path` as rule text that knows where each of its lines stands."""
        at = self.places[path]
        value = _at(self.data, path)
        line, column = at.start_mark.line + 1, at.start_mark.column + 1
        if getattr(at, "style", None) in ("|", ">"):
            body = self.source.text.splitlines()[line:]
            indent = next((len(x) - len(x.lstrip(" ")) for x in body if x.strip()), 0)
            return Text(value, self.source, line + 1, indent + 1, indent)
        return Text(str(value), self.source, line, column + (getattr(at, "style", None) is not None))


def _at(data: Any, path: Path) -> Any:
    for part in path:
        data = data[part]
    return data


def _span(source: Source, at: yaml.Node) -> Span:
    mark, end = at.start_mark, at.end_mark
    width = end.column - mark.column if end.line == mark.line else 1
    return Span(source, mark.line + 1, mark.column + 1, max(1, width))


def read_document(text: str, name: str) -> Document:
    """The document of a YAML text known to users as `name`; RuleError at the place of anything wrong."""
    source = Source(name, text)
    if len(text) > MAX_DOCUMENT:
        raise rule_error(f"{name} has {len(text)} characters, over the limit of {MAX_DOCUMENT}: it is no rule file")
    _check_tabs(source)
    root = _compose(source)
    if root is None:
        raise rule_error(f"{name} is empty: a rule file begins with name:")
    document = Document(source)
    document.data = _convert(document, root, ())
    return document


def _check_tabs(source: Source) -> None:
    for number, line in enumerate(source.text.splitlines(), 1):
        before = line[: len(line) - len(line.lstrip())]
        if "\t" in before:
            raise rule_error("a tab: indent with spaces", Span(source, number, before.index("\t") + 1))


def _compose(source: Source) -> yaml.Node | None:
    try:
        return _guarded_compose(source)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = Span(source, mark.line + 1, mark.column + 1) if mark else None
        raise rule_error(f"this is not YAML: {error.problem or error.context}", place) from None
    except yaml.YAMLError as error:
        raise rule_error(f"{source.name} is not YAML: {str(error).splitlines()[0]}") from None


def _guarded_compose(source: Source) -> yaml.Node | None:
    depth = 0
    for event in yaml.parse(source.text, Loader=_Loader):
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise rule_error(
                "anchors and aliases are not part of a rule file: write the value out", _event(source, event)
            )
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_NESTING:
            raise rule_error(f"{source.name} is nested deeper than {MAX_NESTING} levels", _event(source, event))
    return yaml.compose(source.text, Loader=_Loader)


def _event(source: Source, event: yaml.Event) -> Span:
    mark = event.start_mark
    assert mark is not None  # of a text, the parser knows where every event stands
    return Span(source, mark.line + 1, mark.column + 1)


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
        if key in result:
            raise rule_error(f"the key {key!r} is given twice", span)
        document.keys[(*path, key)] = key_node
        result[key] = _convert(document, value_node, (*path, key))
    return result


def _scalar(document: Document, at: yaml.Node) -> Any:
    kind, text = at.tag.rpartition(":")[2], str(at.value)
    if kind == "bool":
        return text.lower() == "true"
    if kind == "int":
        return int(text) if len(text) < 300 else float(text)
    if kind == "float":
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    if kind == "null":
        return None
    if kind == "str":
        return text
    raise rule_error(f"the tag {at.tag} is not part of a rule file", _span(document.source, at))
