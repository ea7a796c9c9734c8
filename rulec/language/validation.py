"""The check of a rule file's keys and types against the schema, with errors at their place in the file."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ValidationError

from rulec.errors import RuleError
from rulec.language.document import Document
from rulec.language.document import Path as Place
from rulec.language.names import short
from rulec.language.schema import HyperEntry, PaperEntry, RuleFile, StateEntry, ViewEntry, WrapEntry, wanted
from rulec.language.source import did_you_mean, rule_error


def _value_place(document: Document, loc: tuple[Any, ...]) -> Place:
    """pydantic's location without the names of union members in it."""
    place: Place = ()
    for part in loc:
        if (*place, part) in document.places:
            place = (*place, part)
    return place


def validated(document: Document) -> RuleFile:
    """The content of a rule file by the schema; RuleError at the place of the worst mistake."""
    if not isinstance(document.data, dict):
        raise rule_error("a rule file is a mapping that begins with name:", document.span(()))
    try:
        return RuleFile.model_validate(document.data)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False)
        depth = {"extra_forbidden": 100, "missing": 100}
        worst = max(problems, key=lambda e: depth.get(e["type"], 0) + len(_value_place(document, e["loc"])))
        raise _explain(document, worst) from None


def _explain(document: Document, problem: Any) -> RuleError:
    place, kind = _value_place(document, problem["loc"]), problem["type"]
    last = str(problem["loc"][-1]) if problem["loc"] else ""
    if kind == "extra_forbidden":
        parts: dict[Any, type[BaseModel]] = {
            "paper": PaperEntry, "hyper": HyperEntry, "state": StateEntry, "view": ViewEntry,
            "wraps": WrapEntry,
        }  # fmt: skip
        model = parts.get(place[0], RuleFile) if len(place) > 1 else RuleFile
        known = [f.alias or k for k, f in model.model_fields.items()]
        hint = did_you_mean(last, known) or f": the keys are {', '.join(known)}"
        return rule_error(f"unknown key {short(last)}{hint}", document.span(place, key=True))
    if kind == "missing":
        return rule_error(f"the key {last!r} is missing", document.span(place))
    if kind == "value_error":
        return rule_error(str(problem["ctx"]["error"]), document.span(place))
    where = "".join(f"[{p}]" if isinstance(p, int) else f".{short(p)[1:-1]}" for p in place).removeprefix(".")
    actual = _described(document.at(place))
    return rule_error(f"{where} must be {wanted(place)}, not {actual}", document.span(place))


def _described(value: Any) -> str:
    if isinstance(value, dict | list):
        kind = "mapping" if isinstance(value, dict) else "list"
        return f"a {kind}" if value else f"an empty {kind}"
    if value is None:
        return "nothing"
    if isinstance(value, str):
        return f"the text {short(value)}"
    return str(value).lower() if isinstance(value, bool) else f"the number {short(str(value))[1:-1]}"
