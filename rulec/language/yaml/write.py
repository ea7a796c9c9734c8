"""Rule files: a Rule back into YAML text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from rulec.language.expr.counts import level_text
from rulec.language.expr.node import Node, Op
from rulec.language.expr.text import expression_text
from rulec.language.hyper import Hyper, well_known_range
from rulec.language.inputs import kind_data
from rulec.language.parse.step import step_text
from rulec.language.rule_data import RATE, Pass, RuleData, State
from rulec.language.sizes import entries, lists_of
from rulec.language.yaml.document import use_yaml_1_2


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
    entry: dict[str, Any] = {"default": _plain(hyper.default)}
    if hyper.limits != well_known_range(key):
        # A range that is empty must still be written, or the well-known one would come back.
        entry.update(hyper.limits or {"min": Hyper.min})
    if hyper.static:
        entry["static"] = True
    if hyper.whole:
        entry["whole"] = True
    if hyper.decides:
        entry["decides"] = True
    if hyper.follows:
        entry["follows"] = True
    return entry["default"] if len(entry) == 1 and entry["default"] is not None else entry


def _hyper_data(rule: RuleData) -> dict[str, Any]:
    """The hyper-parameters; a list of them is one entry, with its length: the step is written out for it."""
    data: dict[str, Any] = {}
    lists = lists_of(rule)
    list_of = {name: key for key, length in lists.items() for name in entries(key, length)}
    for name, hyper in rule.hyper.items():
        key = list_of.get(name)
        if key is None:
            data[name] = _hyper_entry(name, hyper)
        elif key not in data:
            defaults = [_plain(rule.hyper[part].default) for part in entries(key, lists[key])]
            others = _hyper_entry(key, hyper)
            others = others if isinstance(others, dict) else {}
            data[key] = {**others, "default": defaults, "length": len(defaults)}
    return data


def _state_entry(state: State) -> Any:
    entry: dict[str, Any] = {"init": _plain(state.init)}
    if state.per != "element":
        entry["per"] = level_text(state.per, state.number)
    if state.shape is not None:
        entry["shape"] = [_plain(x) for x in state.shape]
    if state.condition is not None:
        entry["if"] = _plain(state.condition)
    return entry["init"] if len(entry) == 1 else entry


def _pass_entry(each: Pass) -> Any:
    point = _plain(each.point)
    return point if each.when is None else {"point": point, "when": _plain(each.when)}


def _listed(values: Any) -> Any:
    return [*map(_listed, values)] if isinstance(values, tuple) else values


def rule_to_yaml(rule: RuleData) -> str:
    """The rule as a rule file, composed rules written out in full."""
    return dumped(_rule_data(rule))


def dumped(data: Mapping[str, Any]) -> str:
    """The text of a rule file with these keys."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=110, allow_unicode=True)


def _rule_data(rule: RuleData) -> dict[str, Any]:
    data: dict[str, Any] = {"name": rule.name, "summary": rule.summary, "paper": dict(rule.paper)}
    if rule.wraps:
        shape = rule.wraps_shape
        calls = rule.wraps[0] if len(rule.wraps) == 1 else [*rule.wraps]
        data["wraps"] = {rule.wraps[0]: {"shape": [_plain(x) for x in shape]}} if shape else calls
    data["hyper"] = _hyper_data(rule)
    data["state"] = {key: _state_entry(s) for key, s in rule.state.items()}
    data["storage"] = {key: s.storage for key, s in rule.state.items() if s.storage}
    data["inputs"] = {key: kind_data(kind) for key, kind in rule.inputs.items()}
    data["passes"] = {key: _pass_entry(each) for key, each in rule.passes.items()}
    data["step"] = step_text(rule.step) + "\n"
    data["rate"] = None if rule.rate is RATE else _plain(rule.rate)
    data["statistics"] = {key: expression_text(each.value) for key, each in rule.statistics.items()}
    for key in ("evaluate", "skip", "applies_to"):
        value = getattr(rule, key)
        data[key] = None if value is None else expression_text(value)
    if (rest := rule.otherwise) is not None:
        data["otherwise"] = rest.text if rest.text or rest.rule is None else _rule_data(rest.rule)
    data["view"], data["interop"] = dict(rule.view), dict(rule.interop)
    data["variants"] = {key: _listed(values) for key, values in rule.variants.items()}
    return {k: v for k, v in data.items() if v not in (None, "", {})}
