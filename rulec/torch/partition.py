"""The parameter groups of a partition, and the keywords of classes by either name: the class's own or the rule's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor

from rulec.errors import HyperError, RuleError, TensorError
from rulec.language.partition import Part, Partition
from rulec.language.source import did_you_mean
from rulec.torch.classes import optimizer
from rulec.torch.groups.interface import OWN, Interface

#: What `model.named_parameters()` gives.
Named: TypeAlias = Iterable[tuple[str, Tensor]]


def partitioned_groups(partition: Partition, named_parameters: Named) -> list[dict[str, Any]]:
    """The parameter groups of a partition whose parts are all of one rule: the argument of its class.

    There is one for each pattern that takes parameters, with its hyper-parameters and tags. A name such as
    `layer.0.bias` is the path `layer/0/bias`. RuleError where there are several rules: those need `Partitioned`.
    """
    taken = parts_taken(partition, named_pairs(named_parameters))
    kinds = {optimizer(part.origin): part.rule.name for part, _ in taken}
    if len(kinds) > 1:
        raise RuleError(
            f"one optimizer has one rule, and the partition has {', '.join(kinds.values())}: use "
            f"rulec.torch.Partitioned(partition, model.named_parameters())"
        )
    return [group_of(optimizer(part.origin).interface, part, params, {}) for part, params in taken]


def named_pairs(parameters: Any) -> list[tuple[str, Tensor]]:
    """Named parameters in a list; TensorError for what has no names."""
    pairs = [*parameters] if isinstance(parameters, Iterable) else [parameters]
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
            raise TensorError("a partition goes by names: give it model.named_parameters(), or pairs like these")
    return pairs


def parts_taken(
    partition: Partition, named: Sequence[tuple[str, Tensor]]
) -> list[tuple[Part, Sequence[tuple[str, Tensor]]]]:
    """The parts and their parameters. Parts without parameters are left out, and so are parameters without a part."""
    params: list[list[tuple[str, Tensor]]] = [[] for _ in partition.entries]
    places = partition.places([name.replace(".", "/") for name, _ in named])
    for place, pair in zip(places, named, strict=True):
        params[place].append(pair)
    entries = zip(partition.entries, params, strict=True)
    return [(part, members) for (_, part), members in entries if part is not None and members]


def group_of(
    interface: Interface, part: Part, params: Sequence[tuple[str, Tensor]], keywords: Mapping[str, Any]
) -> dict[str, Any]:
    """A parameter group; with tags even where there are none: its rule may route tensors."""
    whole = {*OWN, *(["capturable"] if interface.asks_once else [])}
    for name in part.hyper:
        if name in whole:
            raise HyperError(f"{name} is of a whole optimizer, not of a pattern: give it to Partitioned")
    group_keywords = _translated(interface, part.hyper, keywords_of(interface, keywords))
    return {"params": [*params], "tags": part.tags, **group_keywords}


def keywords_of(interface: Interface, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of a class among these, under its names."""
    known_keywords = {name: value for name, value in keywords.items() if _place(interface, name) is not None}
    dtypes = known_keywords.get("state_dtype")
    if isinstance(dtypes, Mapping):
        known = interface.state_names()
        known_keywords["state_dtype"] = {name: dtype for name, dtype in dtypes.items() if not name or name in known}
    return _translated(interface, known_keywords, {})


def _translated(interface: Interface, hyper: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of a class, of which some are called as the rule calls its hyper-parameters.

    `others` and the defaults complete a tuple of which not all was given. HyperError for what the class does not have.
    """
    translated: dict[str, Any] = {}
    for name, value in hyper.items():
        place = _place(interface, name)
        if place is None:
            raise HyperError(f"{interface.name} has no keyword {name!r}{interface.suggestion(name)}")
        keyword, position = place
        if position is None:
            translated[keyword] = value
            continue
        whole = translated.get(keyword, others.get(keyword, interface.signature.parameters[keyword].default))
        translated[keyword] = (*whole[:position], value, *whole[position + 1 :])
    return translated


def _place(interface: Interface, name: str) -> tuple[str, int | None] | None:
    """The keyword of a name, and the position in it where it is a tuple; None where there is none."""
    if name in interface.signature.parameters and name != "params":
        return name, None
    return next((entry.places[name] for entry in interface.entries if name in entry.places), None)


def check_keywords(interfaces: Sequence[Interface], keywords: Mapping[str, Any]) -> None:
    """HyperError or TensorError for a keyword, or a state of `state_dtype`, that no class has."""
    known = {name: None for interface in interfaces for name in interface.signature.parameters}
    for name in keywords:
        if all(_place(interface, name) is None for interface in interfaces):
            raise HyperError(f"no rule of the partition has a keyword {name!r}{did_you_mean(name, known)}")
    dtypes = keywords.get("state_dtype")
    states = {state for interface in interfaces for state in interface.state_names()}
    for state in dtypes if isinstance(dtypes, Mapping) else ():
        if state and state not in states:
            raise TensorError(f"no rule of the partition has a state {state!r}{did_you_mean(state, states)}")
