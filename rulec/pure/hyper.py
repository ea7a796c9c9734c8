"""The values of hyper-parameters in a step; a default may follow from other hyper-parameters."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from rulec.errors import HyperError
from rulec.language.hyper import Hyper, number_of
from rulec.language.node import Node, names_in
from rulec.pure.library import PureLibrary


def resolved(
    owner: str, settings: Mapping[str, Hyper], chosen: Collection[str], numbers: Mapping[str, Any], machine_eps: float,
    library: PureLibrary,
) -> dict[str, Any]:  # fmt: skip
    """Every hyper-parameter's value: from `numbers`, traced or not, or its default.

    `chosen` are the names whose defaults are not used. HyperError where there is no default; `owner` names the rule.
    """
    values: dict[str, Any] = {"machine_eps": machine_eps, **numbers}
    pending = {name: setting.default for name, setting in settings.items() if name not in chosen}
    while pending:
        ready = [k for k, v in pending.items() if not isinstance(v, Node) or {*names_in([v])} <= values.keys()]
        if not ready:
            raise HyperError(f"the defaults of {' and '.join(pending)} of {owner} depend on each other: give one")
        for name in ready:
            default = pending.pop(name)
            if default is None:
                raise HyperError(f"{name} of {owner} has no default: give it a value")
            values[name] = _worked_out(default, values, library) if isinstance(default, Node) else default
    return {name: values[name] for name in settings}


def _worked_out(default: Node, values: Mapping[str, Any], library: PureLibrary) -> Any:
    named = {name: values[name] for name in names_in([default])}
    if all(isinstance(x, int | float) for x in named.values()):
        return number_of(default, named)

    def leaf(value: Node) -> Any:
        return library.constant(value.arg if value.arg not in named else named[str(value.arg)])

    return library.evaluated([default], leaf)[default]
