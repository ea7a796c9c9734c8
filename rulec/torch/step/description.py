"""The description of an optimizer of DTensors, equal in all ranks: tensors, equations, hyper-parameters, seed.

If the digests of descriptions differ, `rulec.torch.distributed.comparison` finds the difference.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from rulec.checkpoint.content import meaning
from rulec.language.rule_data import draws
from rulec.torch.distributed.comparison import Said, names_of
from rulec.torch.distributed.mesh import split_names
from rulec.torch.groups.engine import TensorRef
from rulec.torch.groups.entries import reaches_groups
from rulec.torch.groups.options import Options
from rulec.torch.groups.routes import Route
from rulec.torch.groups.values import Groups
from rulec.torch.tensors.dtensor import is_dtensor, sees_more

#: The bits of a digest in float64, and of a digest whose square is added up over many ranks.
_COMPARED, _SUMMED = 52, 14


class Alike:
    """The description of an optimizer's tensors in this rank; `order` has the indices of `routes` in their order."""

    def __init__(
        self, routes: Sequence[Route], tensor_refs: Sequence[TensorRef], order: Sequence[int], groups: Groups,
        options: Options,
    ) -> None:  # fmt: skip
        self._routes, self._tensor_refs, self._order = routes, tensor_refs, order
        self._named = [bool(group.get("param_names")) for group in groups]
        self._options = options
        #: Numbers whose sums over ranks show whether all have the same hyper-parameters: digests and squares.
        self.sums: tuple[float, ...] = ()
        self.take_numbers()

    # Hyper-parameters

    def take_numbers(self) -> None:
        """Takes note of the hyper-parameters of now."""
        digest = zlib.crc32(json.dumps([*self._hyper().values()]).encode())
        parts = [digest >> shift & ((1 << _SUMMED) - 1) for shift in (0, _SUMMED)]
        self.sums = tuple([float(x) for part in parts for x in (part, part * part)])

    def _hyper(self) -> dict[tuple[int, int], dict[str, str]]:
        """The hyper-parameters of the rules of DTensors, as text, by group and rule.

        Without numbers on a device: the host does not know them.
        """
        known: dict[tuple[int, int], dict[str, str]] = {}
        for place in self._order:
            route, (engine, tensor_id) = self._routes[place], self._tensor_refs[place]
            key = route.group, id(route.rule)
            if key not in known and is_dtensor(route.param):
                column = engine.tensors[tensor_id].group
                each = zip(engine.group_rule.settings, engine.table[:, column].tolist(), strict=True)
                names = route.rule.hyper
                known[key] = {n: repr(x) for n, x in each if n in names and (n, column) not in engine.live}
        return known

    # Descriptions

    def places(self, names: Sequence[str], other: Said) -> tuple[int, ...]:
        """The indices of `routes` in an order of names, that of another description."""
        here = names_of(self.described, other)
        assert here is not None
        by_name: dict[str, list[int]] = {}
        for name, place in zip(here, self._order, strict=True):
            by_name.setdefault(name, []).append(place)
        return tuple(by_name[name].pop(0) for name in names)

    @cached_property
    def ordered(self) -> bool:
        """Whether the order of tensors matters: numbers of several travel together, or random ones follow from it."""
        random = any(engine.rounds(tensor_id) for engine, tensor_id in self._tensor_refs)
        measures = self._options.schedule is not None
        return random or measures or any(sees_more(route.rule) or draws(route.rule) for route in self._routes)

    @cached_property
    def _digest(self) -> float:
        """A number for all that is described but hyper-parameters."""
        return _number({**self.described, "hyper": None})

    @property
    def digest(self) -> float:
        """A number for all that is described."""
        return _number([self._digest, [*self._hyper().values()]])

    @property
    def described(self) -> Said:
        """The description, as JSON has it: see `Said`."""
        hyper, meanings, facts = self._hyper(), dict[int, str](), dict[str, int]()
        places = {key: number for number, key in enumerate(hyper)}
        routes = [(self._routes[place], self._tensor_refs[place]) for place in self._order]
        known = split_names([route.param for route, _ in routes])
        tensors = []
        for route, (engine, tensor_id) in routes:
            placed = is_dtensor(route.param)
            if not placed and not self.ordered:
                continue
            meanings.setdefault(id(route.rule), meaning(route.rule))
            fact = _facts(route, meanings[id(route.rule)], engine.tensors[tensor_id].maximize) if placed else None
            path, section = known.get(id(route.param), ""), route.section
            tensors.append([
                route.name if self._named[route.group] else "",
                path if section is None or not path else section.name(path),
                facts.setdefault(json.dumps(fact), len(facts)),
                places.get((route.group, id(route.rule)), -1),
                route.group,
            ])  # fmt: skip
        options, rules = self._options, {id(route.rule): route.rule for route, _ in routes}.values()
        return {
            "optimizer": {
                "seed": max((engine.seed for engine, _ in self._tensor_refs), default=0), "weights": options.weights,
                "state_dtype": dict(sorted(options.state_dtypes.items())),
                "watch": None if options.schedule is None else [_words(options.watch), options.schedule.every],
            },
            "tensors": tensors, "facts": [json.loads(text) for text in facts], "hyper": [*hyper.values()],
            "ordered": self.ordered, "grouped": reaches_groups([*rules]), "across": options.across is not None,
        }  # fmt: skip


def _words(watch: Any) -> Any:
    """The statistics asked for, as a file has them."""
    return dict(watch) if isinstance(watch, Mapping) else watch if isinstance(watch, str) else [*watch]


def _facts(route: Route, equations: str, maximize: bool) -> Mapping[str, Any]:
    """The facts of a DTensor and its rule, equal in all ranks."""
    param: Any = route.param
    return {
        "shape": [*route.shape], "dtype": str(param.dtype).removeprefix("torch."), "mesh": [*param.device_mesh.shape],
        "placements": str(param.placements), "rule": route.rule.name, "equations": equations, "maximize": maximize,
    }  # fmt: skip


def _number(said: Any) -> float:
    """A digest as a whole number that float64 has."""
    return float(int(hashlib.sha256(json.dumps(said).encode()).hexdigest(), 16) >> (256 - _COMPARED))
