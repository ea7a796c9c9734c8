"""Rule files: YAML text into a Rule, and a Rule back into YAML."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import yaml
from pydantic import BaseModel, ValidationError

from rulec.errors import RuleError
from rulec.language import compose
from rulec.language.document import Document, read_document, use_yaml_1_2
from rulec.language.document import Path as Place
from rulec.language.expression import parse_expression
from rulec.language.node import FACTS, Node, Op, const, node
from rulec.language.rule import (
    Hyper,
    Limits,
    Routing,
    Rule,
    State,
    check_direction_free_of_lr,
    check_rule,
    well_known_range,
)
from rulec.language.schema import HyperEntry, PaperEntry, RuleFile, StateEntry
from rulec.language.source import Span, did_you_mean, rule_error
from rulec.language.step import RESERVED, Scope, StepParser, step_text
from rulec.language.text import expression_text

#: Finds the rule that a file names as a component; the loader's, so that files can name library rules and paths.
Resolve = Callable[[str], Rule]


def parse_rule(text: str, name: str, resolve: Resolve, path: Path | None = None) -> Rule:
    """The rule of a YAML text; `name` is what errors call it, `resolve` finds the rules it names."""
    return _RuleReader(read_document(text, name), resolve, path).rule()


def _value_place(document: Document, loc: tuple[Any, ...]) -> Place:
    """pydantic's location without the names of union members that it mixes in."""
    place: Place = ()
    for part in loc:
        if (*place, part) in document.places:
            place = (*place, part)
    return place


def _validate(document: Document) -> RuleFile:
    if not isinstance(document.data, dict):
        raise rule_error("a rule file is a mapping that begins with name:", document.span(()))
    try:
        return RuleFile.model_validate(document.data)
    except ValidationError as error:
        problem = max(error.errors(), key=lambda e: (e["type"] in ("extra_forbidden", "missing"), len(e["loc"])))
        raise _explain(document, problem) from None


def _explain(document: Document, problem: Any) -> RuleError:
    place, kind = _value_place(document, problem["loc"]), problem["type"]
    last = str(problem["loc"][-1]) if problem["loc"] else ""
    if kind == "extra_forbidden":
        parts: dict[Any, type[BaseModel]] = {"paper": PaperEntry, "hyper": HyperEntry, "state": StateEntry}
        model = parts.get(place[0], RuleFile) if len(place) > 1 else RuleFile
        known = [f.alias or k for k, f in model.model_fields.items()]
        return rule_error(f"unknown key {last!r}{did_you_mean(last, known)}", document.span(place, key=True))
    if kind == "missing":
        return rule_error(f"the key {last!r} is missing", document.span(place))
    if kind == "value_error":
        return rule_error(problem["msg"].removeprefix("Value error, "), document.span(place))
    where = ".".join(map(str, place)) or "the file"
    return rule_error(f"{where}: {problem['msg'][0].lower()}{problem['msg'][1:]}", document.span(place))


class _RuleReader:
    """Reads the parts of one rule file."""

    def __init__(self, document: Document, resolve: Resolve, path: Path | None) -> None:
        self.document, self.resolve, self.path = document, resolve, path
        self.file = _validate(document)
        self.hyper_names = list(self.file.hyper)

    def rule(self) -> Rule:
        file = self.file
        body = self._step_rule() if file.step is not None else self._composed_rule()
        given = document_attributes(file)
        rule = replace(body, name=file.name, path=self.path, **given, **self._expressions(body))
        return check_rule(rule)

    def _composed_rule(self) -> Rule:
        key, join = ("plus", compose.plus) if self.file.plus is not None else ("chain", compose.chain)
        parts = [self._component((key, i)) for i in range(len(self.document.data[key]))]
        try:
            joined = join(parts, self.file.name)
            bound = joined.bind(**(self.document.data.get("hyper") or {}))
        except RuleError as error:
            if error.place:
                raise
            raise rule_error(error.message, self.document.span((key,), key=True)) from None
        if self.file.state:
            span = self.document.span(("state",), key=True)
            raise rule_error(f"a rule made by {key} has the states of its parts", span)
        return bound

    def _component(self, place: Place) -> Rule:
        """The rule that `name`, or `name: {hyper: binding}`, stands for."""
        entry = self._data(place)
        span = self.document.span(place)
        component, bindings = (entry, {}) if isinstance(entry, str) else next(iter(entry.items()))
        try:
            return self.resolve(component).bind(**bindings)
        except RuleError as error:
            if error.place:
                raise
            raise rule_error(error.message, span) from None

    def _data(self, place: Place) -> Any:
        data = self.document.data
        for part in place:
            data = data[part]
        return data

    def _step_rule(self) -> Rule:
        uses = self._uses()
        hyper = {key: self._hyper(key) for key in self.file.hyper}
        own = Rule(self.file.name, (), hyper=hyper)
        try:
            hyper = compose.unify_hyper([(own.name, hyper), *((r.name, r.hyper) for r in uses.values())])
        except RuleError as error:
            raise rule_error(error.message, self.document.span(("uses",), key=True)) from None
        self.hyper_names = list(hyper)
        state = {key: self._state(key) for key in self.file.state}
        inner = {k: s for prefix, rule in uses.items() for k, s in compose.called_states(rule, prefix).items()}
        scope = Scope(hyper, {**state, **inner}, self.file.inputs, uses)
        step = StepParser(self.document.text(("step",)), scope).parse()
        unused = [key for key in uses if key not in scope.called]
        if unused:
            message = f"{unused[0]} is named under uses but never called: write {unused[0]}(g) in the step"
            raise rule_error(message, self.document.span(("uses",), key=True))
        rule = replace(own, step=step, hyper=hyper, state={**state, **inner})
        if rule.state:
            check_rule(rule)
        return check_direction_free_of_lr(rule)

    def _uses(self) -> dict[str, Rule]:
        entries = self.document.data.get("uses") or []
        if isinstance(entries, dict):
            return {key: self._component(("uses", key)) for key in entries}
        found = {}
        for i, entry in enumerate(entries):
            component = entry if isinstance(entry, str) else next(iter(entry))
            found[Path(component).stem] = self._component(("uses", i))
        return found

    def _name(self, place: Place) -> None:
        key = str(place[-1])
        span = self.document.span(place, key=True)
        if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", key):
            raise rule_error(f"{key!r} is not a name: use letters, digits and _", span)
        if key in RESERVED or key in ("p", "direction"):
            raise rule_error(f"{key!r} is {RESERVED.get(key, 'a name of the language')}: choose another name", span)
        if place[0] == "state" and key in self.hyper_names:
            raise rule_error(f"{key!r} is already a hyper-parameter: choose another name", span)

    def _expression(self, place: Place, known: list[str]) -> Node:
        value = self._data(place)
        if isinstance(value, int | float):
            return const(value)
        return parse_expression(self.document.text(place), known, _tagged)

    def _hyper(self, key: str) -> Hyper:
        place: Place = ("hyper", key)
        self._name(place)
        entry = self.file.hyper[key]
        span = self.document.span(place, key=True)
        if not isinstance(entry, HyperEntry):
            return Hyper(self._default(place), **well_known_range(key), span=span)
        limits = _limits(entry) or well_known_range(key)
        default = None if entry.default is None else self._default((*place, "default"))
        return Hyper(default, **limits, static=entry.static, span=span)

    def _default(self, place: Place) -> float | Node:
        value = self._expression(place, [*self.hyper_names, *FACTS])
        return float(value.arg) if value.op is Op.CONST else value  # type: ignore[arg-type]

    def _state(self, key: str) -> State:
        place: Place = ("state", key)
        self._name(place)
        entry, span = self.file.state[key], self.document.span(place, key=True)
        known = [*self.hyper_names, "p", *FACTS]
        if not isinstance(entry, StateEntry):
            return State(self._expression(place, known), span=span)
        data = self.document.data["state"][key]
        return State(
            init=self._expression((*place, "init"), known) if "init" in data else const(0),
            per=entry.per,
            shape=None if entry.shape is None else tuple(
                self._expression((*place, "shape", i), known) for i in range(len(entry.shape))
            ),
            condition=self._expression((*place, "if"), list(FACTS)) if entry.condition else None,
            span=span,
        )  # fmt: skip

    def _expressions(self, body: Rule) -> dict[str, Any]:
        known = ["p", "t", *FACTS, *body.hyper, *body.state]
        scopes = {"evaluate": known, "skip": [*known, "g", "grad", *self.file.inputs], "applies_to": list(FACTS)}
        found: dict[str, Any] = {k: self._expression((k,), v) for k, v in scopes.items() if getattr(self.file, k)}
        if self.file.otherwise is not None:
            entry = self.file.otherwise
            component, bindings = (entry, {}) if isinstance(entry, str) else next(iter(entry.items()))
            found["otherwise"] = Routing(component, bindings)
        return found


def _limits(entry: HyperEntry) -> Limits:
    given = {k: float(v) for k in Limits.__annotations__ if (v := getattr(entry, k)) is not None}
    return cast(Limits, given)


def document_attributes(file: RuleFile) -> dict[str, Any]:
    """The attributes of a rule that a file says plainly."""
    paper = file.paper.model_dump(exclude_none=True) if file.paper else {}
    found: dict[str, Any] = {"summary": file.summary, "paper": paper, "interop": file.interop}
    if file.inputs:
        found["inputs"] = dict(file.inputs)
    if file.view:
        found["view"] = file.view
    return found


def _tagged(called: str, values: list[Node], args: list[Any], span: Span) -> Node | None:
    if called != "tagged":
        return None
    if len(args) != 1 or not isinstance(args[0], str):
        raise rule_error('tagged takes one word in quotes: tagged("embedding")', span)
    return node(Op.FACT, f'tagged("{args[0]}")')


@use_yaml_1_2
class _Dumper(yaml.SafeDumper):
    """Writes multi-line text as a literal block and short mappings on one line."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


def _number(dumper: yaml.SafeDumper, value: float) -> yaml.Node:
    text = {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}.get(repr(value), repr(value))
    return dumper.represent_scalar("tag:yaml.org,2002:float", text)


_Dumper.add_representer(str, _text)
_Dumper.add_representer(float, _number)


def _plain(value: Node | float | None) -> Any:
    if isinstance(value, Node):
        return float(value.arg) if value.op is Op.CONST else expression_text(value)  # type: ignore[arg-type]
    return value


def _hyper_entry(key: str, hyper: Hyper) -> Any:
    limits = {k: v for k in Limits.__annotations__ if (v := getattr(hyper, k)) != getattr(Hyper(0), k)}
    entry: dict[str, Any] = {"default": _plain(hyper.default)}
    if limits != well_known_range(key):
        # A range that is empty must still be written, or the well-known one would come back.
        entry.update(limits or {"min": Hyper(0).min})
    if hyper.static:
        entry["static"] = True
    return entry["default"] if len(entry) == 1 and entry["default"] is not None else entry


def _state_entry(state: State) -> Any:
    entry: dict[str, Any] = {"init": _plain(state.init)}
    if state.per != "element":
        entry["per"] = state.per
    if state.shape is not None:
        entry["shape"] = [_plain(x) for x in state.shape]
    if state.condition is not None:
        entry["if"] = _plain(state.condition)
    return entry["init"] if len(entry) == 1 else entry


def rule_to_yaml(rule: Rule) -> str:
    """The rule as a rule file, composed rules written out in full."""
    data: dict[str, Any] = {"name": rule.name, "summary": rule.summary, "paper": dict(rule.paper)}
    data["hyper"] = {key: _hyper_entry(key, h) for key, h in rule.hyper.items()}
    data["state"] = {key: _state_entry(s) for key, s in rule.state.items()}
    data["inputs"] = dict(rule.inputs)
    data["step"] = step_text(rule.step) + "\n"
    for key in ("evaluate", "skip", "applies_to"):
        value = getattr(rule, key)
        data[key] = None if value is None else expression_text(value)
    if rule.otherwise is not None:
        bindings = dict(rule.otherwise.bindings)
        data["otherwise"] = {rule.otherwise.rule: bindings} if bindings else rule.otherwise.rule
    data["view"], data["interop"] = dict(rule.view), dict(rule.interop)
    kept = {k: v for k, v in data.items() if v not in (None, "", {})}
    return yaml.dump(kept, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=110, allow_unicode=True)
