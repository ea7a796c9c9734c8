"""Which rule each parameter goes to, by its shape and its group's tags."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from rulec.compiler.routing import Router, applies
from rulec.compiler.view import matrix_view
from rulec.errors import HyperError, RulecError, TensorError
from rulec.language.rule import Rule
from rulec.runtime.layers import Layer, layer_for, layers_of
from rulec.torch.groups.entries import GroupRule, sees_sections, sees_shapes
from rulec.torch.groups.interface import Interface, torch_words
from rulec.torch.groups.values import Groups
from rulec.torch.tags import tag_each
from rulec.torch.tensors.dtensor import check_dtensor, check_flat, is_flat, section_here
from rulec.torch.tensors.sections import Section, bounds_of, checked_split
from rulec.torch.tensors.tensors import real_view


class ComplexParameter(TensorError, RuntimeError):
    """A complex parameter of a rule for real ones; a RuntimeError too, as it is with torch."""


@dataclass(frozen=True)
class Route:
    """A parameter, its group's index, and the rule it goes to; `routed` where that is not the class's own.

    With a `section`, it is this section of a fused parameter. `place` is the parameter's index among all. `rank` is the
    rank that the rule keeps where the shape allows less than the group's rank, else None. `layer` has the number of its
    layer and the count of layers, where tags or names tell them.
    """

    name: str
    param: Tensor
    group: int
    tags: frozenset[str]
    rule: Rule
    routed: bool
    place: int
    section: Section | None = None
    rank: int | None = None
    layer: Layer | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape of the tensor that the rule sees."""
        shape = tuple(self.param.shape)
        return shape if self.section is None else self.section.shape(shape)

    @property
    def like(self) -> Tensor:
        """The tensor with the placement of states: the parameter, or the local section."""
        return self.param if self.section is None else self.here

    @property
    def here(self) -> Tensor:
        """The local memory of the tensor, as kernels see it."""
        here = real_view(self.param)
        return here if self.section is None else self.section.of(here)


class Routes(list[Route]):
    """The routes of an optimizer's parameters; printed, a table."""

    def __str__(self) -> str:
        rows = [
            (route.name, str(route.shape), route.rule.name + ("" if route.rank is None else f" of rank {route.rank}"))
            for route in self
        ]
        widths = [max((len(row[i]) for row in rows), default=0) for i in (0, 1)]
        return "\n".join(f"{name:{widths[0]}}  {shape:{widths[1]}}  {rule}" for name, shape, rule in rows)


def routes_of(
    interface: Interface, group_rules: Sequence[GroupRule], groups: Groups, together: bool = False
) -> Routes:  # fmt: skip
    """The route of each parameter to its rule. TensorError or RuleError for one that no rule takes.

    `together` says that values of groups and the model are reduced over all ranks.
    """
    names = iter(enumerate(names_of(groups)))
    layers = layers_in(groups)
    routers: dict[int, Router[Rule]] = {}
    routes = Routes()
    for index, (group_rule, group) in enumerate(zip(group_rules, groups, strict=True)):
        if id(group_rule.rule) not in routers:
            routers[id(group_rule.rule)] = Router(group_rule.rule)
        router = routers[id(group_rule.rule)]
        for param, tags in zip(group["params"], tags_in(group), strict=True):
            place, name = next(names)
            check_flat(param, router.rules, name, together)
            whole = Route(name, param, index, tags, router.rules[0], False, place, layer=layers[place])
            here = _routed(interface, router, whole, _sections(group, param, name))
            routes += [replace(route, rank=_lower_rank(group_rule, group, route)) for route in here]
            if routes[-1].routed and interface.refuses and group.get("tags") is None:
                raise TensorError(_refusal(interface, routes[-1]))
    return routes


def _sections(group: Mapping[str, Any], param: Tensor, name: str) -> list[Section]:
    """The sections of a parameter of a group; none where it is no fused one."""
    dim, bounds = bounds_of(group, param, name)
    if bounds and is_flat(param):
        raise TensorError(
            f"{name} is a part of a flat parameter of FullyShardedDataParallel, which has no dimension to split: use "
            f"fully_shard, whose parameters are DTensors"
        )
    return [section_here(param, dim, start, stop, number) for number, (start, stop) in enumerate(bounds)]


def _routed(interface: Interface, router: Router[Rule], whole: Route, sections: Sequence[Section]) -> list[Route]:
    """The route of a parameter, or the routes of its sections, where a rule sees more than elements."""
    each = [replace(whole, name=section.name(whole.name), section=section) for section in sections]
    routes = [_route(interface, router, route) for route in each]
    if any(sees_sections(route.rule) for route in routes):
        return routes
    return [_route(interface, router, whole)]


def _route(interface: Interface, router: Router[Rule], route: Route) -> Route:
    name, param, shape = route.name, route.param, route.shape
    if param.is_complex() and sees_shapes(interface.rules):
        raise ComplexParameter(
            f"{interface.name} does not support complex parameters such as {name}, for it treats tensors by their "
            f"dimensions: pass torch.view_as_real of it"
        )
    rule = router.choose(shape, route.tags, name)
    check_dtensor(param, rule, name)
    layer_for(rule, name, route.layer)
    return replace(route, rule=rule, routed=not applies(router.rules[0], shape, route.tags))


def _lower_rank(group_rule: GroupRule, group: Mapping[str, Any], route: Route) -> int | None:
    """The shorter side of a matrix whose rule has a `rank` above it; None where the rank is the group's."""
    if "rank" not in route.rule.hyper:
        return None
    keyword, _ = group_rule.entry.place("rank")
    facts = matrix_view(route.shape, route.rule.view).facts
    side = int(min(facts["rows"], facts["cols"]))
    return side if isinstance(group[keyword], int | float) and group[keyword] > side else None


def _refusal(interface: Interface, route: Route) -> str:
    keyword = next((k for k in interface.signature.parameters if k.endswith("_lr")), "lr")
    return (
        f"{interface.name} does not apply to {route.name}, of shape {tuple(route.param.shape)}: leave it out, as with "
        f"torch.optim.{interface.name}, or give its group tags, as rulec.torch.tagged_groups does, and "
        f"{route.rule.name} updates it with {keyword}{torch_words(interface.name, 'params', [route.param])}"
    )


def check_unsplit(routes: Sequence[Route], verb: str) -> None:
    """RulecError where a fused parameter has states of its sections, for layouts of whole parameters."""
    for route in routes:
        if route.section is not None:
            raise RulecError(f"{verb} is for states of whole parameters, and {route.name} is split: use state_dict()")


def names_of(groups: Groups) -> list[str]:
    """The name of each parameter in messages: its name where it has one, else its index."""
    names: list[str] = []
    for group in groups:
        group_names = group.get("param_names", [])
        if len(group_names) != len(group["params"]):
            group_names = [f"parameter {len(names) + i}" for i in range(len(group["params"]))]
        names += group_names
    return names


def layers_in(groups: Groups) -> list[Layer | None]:
    """The layer of each parameter, by its tags and its name among all groups; None where nothing tells it."""
    names: list[str] = []
    for group in groups:
        here = group.get("param_names", [])
        names += here if len(here) == len(group["params"]) else [""] * len(group["params"])
    return layers_of(names, [tags for group in groups for tags in tags_in(group)])


def tags_in(group: Mapping[str, Any]) -> list[frozenset[str]]:
    """The tags of each parameter of a group: the group's, and its own."""
    each = group.get("param_tags") or [()] * len(group["params"])
    return [frozenset([*(group.get("tags") or ()), *tags]) for tags in each]


def checked_tags(tags: Any) -> tuple[str, ...]:
    """A group's tags, as they are kept; HyperError where they are not words."""
    if isinstance(tags, str) or not isinstance(tags, Collection) or not all(isinstance(tag, str) for tag in tags):
        raise HyperError(f"tags={tags!r} of a group must be a list of words, such as ['embedding']")
    return tuple(dict.fromkeys(tags))


def tag_all(groups: Sequence[dict[str, Any]]) -> None:
    """Checks the tags of all groups, and what their parameters are joined of, and keeps them as tuples."""
    tag_each(groups)
    for group in groups:
        split, _ = checked_split(group)
        if split is not None:
            group["split"] = split
        if group.get("tags") is not None:
            group["tags"] = checked_tags(group["tags"])
        if group.get("param_tags") is not None:
            group["param_tags"] = tuple(checked_tags(tags) for tags in group["param_tags"])
            if len(group["param_tags"]) != len(group["params"]):
                counts = len(group["param_tags"]), len(group["params"])
                raise HyperError(
                    f"param_tags of a group has {counts[0]} entries for {counts[1]} parameters: give all, or none"
                )
