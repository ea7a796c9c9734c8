"""The checkpoints of torch's own class that a printed class loads: its names for hyper-parameters and states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rulec.language.rule import Rule

from ...common.python_standalone import Parts, indented

#: Keys of an entry under which torch's class computes something else than the rule.
_OTHERWISE = ("lines", "rule", "start", "flags")

#: Words of `when`, and torch's word for the value that stands for None.
_NONE = {"adjust_lr_fn": "original"}


def entry_of(rule: Rule) -> Mapping[str, Any] | None:
    """The names of torch's class for exactly this rule; None where there is none."""
    known = rule.interop.get("torch") or []
    entries = [known] if isinstance(known, Mapping) else known
    plain = [e for e in entries if not any(key in e for key in _OTHERWISE)]
    return next((e for e in plain if not {"nonzero", "given"} & {str(x) for x in e.get("when", {}).values()}), None)


def foreign_parts(rule: Rule | None, fields: Mapping[str, str]) -> Parts:
    """The parts of the printed class for torch's checkpoints; `reads` is empty where it loads none.

    `fields` has the keyword of each hyper-parameter.
    """
    entry = None if rule is None else entry_of(rule)
    if entry is None:
        return {"reads": "", "foreign": "", "places": [], "when": []}
    places = {name: (name, 0) for name in fields}
    for keyword, names in entry.get("args", {}).items():
        for place, name in enumerate([names] if isinstance(names, str) else names):
            places[name] = (keyword, place)
    when = {name: _values(name, value) for name, value in entry.get("when", {}).items()} | {"maximize": "[False]"}
    if "weight_decay" not in fields:
        when["weight_decay"] = "[0, 0.0]"
    ours = {fields[name]: place for name, place in places.items() if name in fields}
    keys = [*dict.fromkeys([*(k for k, _ in ours.values()), *entry.get("when", {}), "maximize", "differentiable"])]
    theirs, states = f"torch.optim.{entry['class']}", entry.get("state", {})
    return {
        "reads": "yes", "foreign": f", or what {theirs} saved", "theirs": theirs,
        "keys": ", ".join(f'"{key}"' for key in keys if key not in fields.values()),
        "when": indented([f'"{name}": {text},' for name, text in when.items()]),
        "places": indented([f'"{name}": ("{key}", {place}),' for name, (key, place) in ours.items()]),
        "names": ", ".join(f'"{name}": "{ours_}"' for ours_, name in states.items()),
        "absent": ' | {"step": torch.tensor(0.0)}' if entry.get("step") == "absent" else "",
    }  # fmt: skip


def _values(name: str, value: Any) -> str:
    values = [value, *[_NONE[name] for _ in (name,) if value is None and name in _NONE]]
    return repr(values).replace("'", '"')
