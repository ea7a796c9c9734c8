"""The rules that entries of interop sections mean: with other lines or keys than the file, or another `otherwise`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from rulec.errors import RuleError
from rulec.language.compose.wrap import iterates, variant
from rulec.language.expr.static import GRAM
from rulec.language.library.load import interop_entries, parse
from rulec.language.rule import Rule
from rulec.language.rule_data import Routing
from rulec.language.yaml.document import read_document
from rulec.language.yaml.write import dumped
from rulec.torch.groups.entries import Entry

#: Libraries whose keywords a class takes beside its own.
LIBRARIES = ("pytorch_optimizer", "timm")

#: The prefix of a line of the rule under `otherwise`.
REST = "otherwise."


def namesakes(rule: Rule) -> list[Mapping[str, Any]]:
    """What the interop section says of the same optimizer elsewhere, of its authors' words first."""
    return [fields for package in ("authors", *LIBRARIES) for fields in interop_entries(rule, package)]


def is_changed(fields: Mapping[str, Any]) -> bool:
    """Whether an entry is of another rule than its file's: with other lines, or other keys of the file."""
    return any(key in fields for key in ("lines", "start", "rule"))


def meant_rule(rule: Rule, fields: Mapping[str, Any]) -> Rule:
    """The rule of an entry: the rule of the file, with the changes of the entry."""
    if not is_changed(fields):
        return rule
    whole = _revised(rule, fields.get("rule", {}))
    lines = fields.get("lines", {})
    there = {target.removeprefix(REST): text for target, text in lines.items() if target.startswith(REST)}
    here = {target: text for target, text in lines.items() if not target.startswith(REST)}
    changed = variant(whole, here, fields.get("start", {}), fields.get("defaults", {}))
    return replace(changed, otherwise=Routing(variant(_rest(rule, changed), there, {}, {}))) if there else changed


def each_of(fields: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The entry for each value of a list under `when`; the entry itself where there is no list."""
    when = fields.get("when", {})
    choices = [value if isinstance(value, list) else [value] for value in when.values()]
    return (
        [{**fields, "when": dict(zip(when, values, strict=True))} for values in product(*choices)] if when else [fields]
    )


def _revised(rule: Rule, keys: Mapping[str, Any]) -> Rule:
    """The rule with other values for these keys of its file.

    Hyper-parameters and states are added to its own, and what is null is taken away.
    """
    if not keys or rule.path is None:
        return rule
    name = f"the interop section of {rule.name}"
    data = {**read_document(rule.path.read_text(encoding="utf-8"), name).data, "interop": {}}
    for key, value in keys.items():
        data[key] = _merged(data.get(key, {}), value) if key in ("hyper", "state") and value else value
    data = {key: value for key, value in data.items() if value is not None}
    return parse(dumped(data), name)


def _merged(entries: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The entries with the changes to them, without the null ones."""
    return {name: value for name, value in {**entries, **changes}.items() if value is not None}


def with_forms(entries: Sequence[Entry]) -> list[Entry]:
    """The entries, and of rules with a `newton_schulz` each again in its `gram` form, by the keyword `ns_form`."""
    if not any(iterates(entry.rule) for entry in entries):
        return [*entries]
    usual = [replace(entry, when={**entry.when, "ns_form": None}) for entry in entries]
    return usual + [
        replace(entry, rule=entry.rule.in_form(GRAM), when={**entry.when, "ns_form": GRAM})
        for entry in entries if iterates(entry.rule)
    ]  # fmt: skip


def with_rests(rule: Rule, entries: Sequence[Entry]) -> list[Entry]:
    """The entries, and each again for a keyword of the rule under `otherwise` alone, which counts where it is given."""
    words = {word: name for fields in namesakes(rule) for word, name in fields.get("rest", {}).items()}
    done = [*entries]
    for word, name in words.items():
        others = [replace(entry, when={**entry.when, word: None}) for entry in done]
        done = others + [
            replace(entry, rule=_with_rest(entry.rule, {name: word}), when={**entry.when, word: "given"})
            for entry in done
        ]
    return done


def _with_rest(rule: Rule, bindings: Mapping[str, str]) -> Rule:
    """The rule with hyper-parameters of these names for its other tensors alone."""
    return replace(rule, otherwise=Routing(_rest(rule, rule).bind(**bindings)))


def _rest(rule: Rule, changed: Rule) -> Rule:
    """The rule under `otherwise`; RuleError where the interop section of a rule needs one and there is none."""
    rest = changed.otherwise
    if rest is None or not isinstance(rest.rule, Rule):
        raise RuleError(f"the interop section of {rule.name} is of a rule under `otherwise`, and it names none")
    return rest.rule
