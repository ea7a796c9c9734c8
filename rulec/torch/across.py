"""Values of groups and of the model over several processes, each of which has its own part of the parameters."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rulec.arrays.reductions import REDUCTIONS
from rulec.errors import HyperError, RulecError
from rulec.language.node import Kind, Op, walk
from rulec.language.rule import Rule
from rulec.runtime.launch import Launch
from rulec.torch.communication import Traffic

_OPS = (Op.SUM, Op.MIN, Op.MAX)
_COMBINE: Mapping[Op, Callable[[Tensor, Tensor], Tensor]] = {
    Op.SUM: torch.add,
    Op.MIN: torch.minimum,
    Op.MAX: torch.maximum,
}
_LEVELS = ("group", "model")

#: How many reductions over groups and the model a step may have.
_MOST = 32

_REFUSED = -1

Reduction = tuple[Op, str]


def reaches_across(rules: Sequence[Rule]) -> bool:
    """Whether a rule among these has a value of a whole group or of the model."""
    parts = [*walk([part for rule in rules for part in rule.expressions])]
    return any(n.op.kind is Kind.REDUCE and n.arg in _LEVELS for n in parts)


class Across:
    """The processes of a group, that take their steps together; every tensor, or element, belongs to one of them.

    A process of a mesh is in a group with one process of each other mesh: all take part in every total.

    `total` puts the float64 numbers of all together, in the order of processes, so that all have the same bits. Before
    that they `agree` on the step: RulecError, in all of them, where one would take another step.
    """

    def __init__(self, group: Any) -> None:
        if not torch.distributed.is_available() or not torch.distributed.is_initialized():
            raise HyperError("reduce_over needs processes: call torch.distributed.init_process_group() before")
        if not isinstance(group, torch.distributed.ProcessGroup):
            raise HyperError(f"reduce_over={group!r} must be a process group, such as torch.distributed.group.WORLD")
        self._group, self.size = group, torch.distributed.get_world_size(group)
        if self.size < 1:
            raise HyperError("reduce_over is a process group that this process does not belong to")
        nccl = torch.distributed.get_backend(group) == "nccl"
        self._device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
        self._agreed = False
        self.traffic = Traffic()

    @property
    def label(self) -> str:
        """The keyword with the number of processes."""
        return f"reduce_over ({self.size})"

    @property
    def ranks(self) -> list[int]:
        """The processes, by their places among all."""
        return torch.distributed.get_process_group_ranks(self._group)

    @property
    def rank(self) -> int:
        """The place of this process in the group."""
        return torch.distributed.get_rank(self._group)

    def __reduce__(self) -> Any:
        raise RulecError("an optimizer with reduce_over belongs to its processes: copy its state_dict() instead")

    def open(self) -> None:
        """Begins a step, in which all processes must come to agree."""
        self._agreed = False
        self.traffic.begin()

    def refuse(self) -> None:
        """Tells the others, where they wait, that this process takes no step."""
        if not self._agreed:
            self._exchange([_REFUSED])

    def agree(self, launches: Sequence[Launch], groups: int, remembers: bool) -> None:
        """Agrees with the others on a step of these launches; `remembers`: groups or the model have states.

        A process without any takes part in the others' reductions here.
        """
        reductions = _reductions(launches)
        fired = sorted({place for launch in launches for place in _places(launch)})
        codes = [_OPS.index(op) * len(_LEVELS) + _LEVELS.index(level) for op, level in reductions]
        every = self._exchange([groups, zlib.crc32(repr(fired).encode()), len(codes), *codes])
        refused = [rank for rank, message in enumerate(every) if message[0] == _REFUSED]
        if refused:
            raise RulecError(f"process {refused[0]} of reduce_over takes no step, for an error of its own: see there")
        kinds = {tuple(message) for message in every if remembers or message[2]}
        if len({message[0] for message in every}) > 1 or len({message[:1] + message[2:] for message in kinds}) > 1:
            raise RulecError("the processes of reduce_over have other groups or rules: make their optimizers alike")
        if remembers and len(kinds) > 1:
            raise RulecError(
                "a process of reduce_over has gradients in other groups than another, and the rule remembers numbers "
                "of groups or of the model: give every process a part of each"
            )
        if not reductions and kinds:
            for code in kinds.pop()[3:]:
                op, level = _OPS[code // len(_LEVELS)], _LEVELS[code % len(_LEVELS)]
                self.total(op, np.full(groups if level == "group" else 1, REDUCTIONS[op].nothing))

    def _exchange(self, words: Sequence[int]) -> list[tuple[int, ...]]:
        """What each process says: `words` here."""
        self._agreed = True
        row = torch.zeros(_MOST + 4, dtype=torch.int64)
        row[: len(words)] = torch.tensor([*words])
        messages = [tuple(part.tolist()) for part in self._gathered(row)]
        return [(part[:1] if part[0] == _REFUSED else part[: 3 + part[2]]) for part in messages]

    def total(self, op: Op, numbers: Any) -> Any:
        """The numbers of all processes, reduced one by one: as an array or tensor, like those here."""
        here = numbers if isinstance(numbers, Tensor) else torch.from_numpy(np.array(numbers, np.float64))
        first, *others = self._gathered(here)
        for other in others:
            first = _COMBINE[op](first, other)
        return first.to(here.device) if isinstance(numbers, Tensor) else first.cpu().numpy()

    def _gathered(self, here: Tensor) -> list[Tensor]:
        sent = here.contiguous().to(self._device)
        parts = [torch.empty_like(sent) for _ in range(self.size)]
        self.traffic.reduced(self, sent.numel())
        self.traffic.end_round()
        torch.distributed.all_gather(parts, sent, group=self._group)
        return parts


def _places(launch: Launch) -> list[int]:
    """The groups that a launch's tensors are of, as the optimizer counts them."""
    return [launch.common.processes.places[tensor.group] for tensor in launch.part.tensors]


def _reductions(launches: Sequence[Launch]) -> list[Reduction]:
    """The reductions over groups and the model that launches come to, in order."""
    joining = [launch for launch in launches if not launch.version.plan.alone]
    if not joining:
        return []
    plan = joining[0].version.plan
    if any("n" not in plan.axes[value.args[0]].letters for value in plan.joins):
        raise RulecError(f"{joining[0].name} reduces numbers of groups, which several processes would count twice")
    if len(plan.joins) > _MOST:
        raise RulecError(f"{joining[0].name} has {len(plan.joins)} values of groups and the model: {_MOST} is the most")
    return [(value.op, str(value.arg)) for value in plan.joins]
