"""The engines of an optimizer: one for each rule that its groups mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from rulec.backend.protocol import Backend
from rulec.errors import HyperError, TensorError
from rulec.language.seed import checked_seed
from rulec.runtime.engine import Engine
from rulec.runtime.joins import Processes
from rulec.runtime.rows import Numbers
from rulec.torch.across import Across
from rulec.torch.fake import ShapesBackend, is_fake
from rulec.torch.flavour import Choice
from rulec.torch.interface import CHOOSING, Interface
from rulec.torch.routes import Route
from rulec.torch.tensors import TorchArrays, real_view
from rulec.torch.values import Groups, table_of


@dataclass(frozen=True)
class Options:
    """What belongs to the whole optimizer: storage dtypes of states by name (`""`: all), and the backend asked for.

    `capturable` asks for step counts and scalars on the device, where groups do not say it; `across` are the processes
    over which values of groups and the model are taken.
    """

    state_dtypes: Mapping[str, str] = field(default_factory=dict)
    backend: str | Backend | None = None
    capturable: bool = False
    across: Across | None = None


def fitting(options: Options, params: Sequence[Tensor]) -> Options:
    """The options, with a backend that computes nothing where parameters are fake; TensorError where only some are."""
    fake = [*map(is_fake, params)]
    if not any(fake):
        return options
    if not all(fake):
        raise TensorError("some parameters are fake tensors and others are not: give an optimizer those of one kind")
    return replace(options, backend=ShapesBackend())


@dataclass
class Member:
    """One engine, its groups (their indices, in the engine's order) and their hyper-parameters now."""

    engine: Engine
    choice: Choice
    groups: list[int]
    table: Numbers
    extensions: int = 0


def members_of(
    interface: Interface, choices: Sequence[Choice], groups: Groups, options: Options, resident: bool = False
) -> list[Member]:
    """The engines for groups that mean these choices, still without parameters; `resident` as an engine takes it."""
    by_engine: dict[Any, list[int]] = {}
    for index, choice in enumerate(choices):
        by_engine.setdefault(choice.engine, []).append(index)
    if len(by_engine) > 1 and interface.shared:
        raise HyperError(
            f"{interface.name} keeps {min(interface.shared)} across groups, so they must agree on which "
            f"hyper-parameters are None"
        )
    members = []
    for indices in by_engine.values():
        choice = choices[indices[0]]
        dtypes = {o: d for s, d in options.state_dtypes.items() if (o := _ours(choice, s)) is not None}
        processes = Processes(options.across, indices, len(groups))
        engine = Engine(
            choice.rule, TorchArrays(), options.backend, dtypes, seed=seed_of(groups), resident=resident,
            processes=processes,
        )  # fmt: skip
        members.append(Member(engine, choice, indices, table_of(choice, [groups[i] for i in indices])))
    return members


def add_parameters(
    members: Sequence[Member], choices: Sequence[Choice], routes: Sequence[Route]
) -> list[tuple[Member, int]]:
    """Adds every parameter to its engine; for each its engine and its id there."""
    homes = []
    of_group = {g: (m, column) for m in members for column, g in enumerate(m.groups)}
    for place, route in enumerate(routes):
        member, column = of_group[route.group]
        array, maximize = real_view(route.param), choices[route.group].maximize
        homes.append((member, member.engine.add(array, column, route.name, route.tags, place, maximize)))
    return homes


def words_of(groups: Groups) -> list[list[Any]]:
    """What groups say of the rules that their tensors go to and of their random numbers."""
    return [[group.get(key) for key in CHOOSING] for group in groups]


def seed_of(groups: Groups) -> int:
    """The seed of random numbers, which is one for the whole optimizer; HyperError where it is none."""
    seeds = {checked_seed(group.get("seed", 0)) for group in groups}
    if len(seeds) > 1:
        raise HyperError(f"seed is one for all groups, and they have {', '.join(map(repr, seeds))}: give all the same")
    return min(seeds, default=0)


def _ours(choice: Choice, name: str) -> str | None:
    """Our name for a state of the choice's rule called by torch's or ours; None where it is a state of another rule."""
    states = {state for rule in choice.flavour.rules for state in rule.state}
    return name if name in {"", *states} else next((s for s in states if choice.flavour.outside(s) == name), None)
