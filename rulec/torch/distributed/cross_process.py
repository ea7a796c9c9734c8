"""Values of groups and of the model over several ranks, each of which has its own part of the parameters.

`Across` reduces them with collectives, and has the ranks agree on the step. `shared_hyper` and `formula` follow what is
computed from values of groups and the model alone, such as the bound of a clip: its hyper-parameters must be equal in
all ranks.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rulec.array_api.reductions import REDUCTIONS
from rulec.checkpoint.content import meaning
from rulec.errors import HyperError, RulecError
from rulec.language.expr.node import Kind, Node, Op, walk
from rulec.language.expr.text import expression_text
from rulec.language.rule import Rule
from rulec.language.rule_data import assignments
from rulec.language.statistics import is_joint
from rulec.runtime.buckets.launch import Launch
from rulec.runtime.distributed.process_group import DeferredError, RemoteError, Unreached
from rulec.torch.distributed.consensus import behind, reaching
from rulec.torch.distributed.devices import backends_of, device_of
from rulec.torch.distributed.traffic import Traffic

_OPS = (Op.SUM, Op.MIN, Op.MAX)
_COMBINE: Mapping[Op, Callable[[Tensor, Tensor], Tensor]] = {
    Op.SUM: torch.add,
    Op.MIN: torch.minimum,
    Op.MAX: torch.maximum,
}
_LEVELS = ("group", "model")

#: The largest number of reductions over groups and the model in a step.
_MOST = 32

_REFUSED = -1

#: The number of words in a message about the formula of values of groups and of the model.
_FORMULA = 4

#: The largest number of words in a message.
_LENGTH = _MOST + 5 + _FORMULA

_OF_FORMULA, _OF_STEP = itemgetter(slice(-_FORMULA, None)), itemgetter(slice(None, -_FORMULA))

#: The bytes of an error that are sent to other ranks.
_TEXT = 600

Reduction = tuple[Op, str]


def reaches_across(rules: Sequence[Rule]) -> bool:
    """Whether a rule among these has a value of a whole group or of the model."""
    parts = [*walk([part for rule in rules for part in rule.expressions])]
    return any(n.op.kind is Kind.REDUCE and n.arg in _LEVELS for n in parts)


class Across:
    """Cross-process reductions over a process group whose ranks step together; every element belongs to one rank.

    A rank of a mesh is in a group with one rank of each other mesh: all take part in every total.

    `total` reduces the float64 numbers of all ranks, in the order of ranks, so that all have the same bits. Before that
    they `agree` on the step: RulecError, in all ranks, where one would take another step.
    """

    #: Whether the ranks have agreed on the step, and the lengths of the totals that are still to come in it.
    agreed = False
    _left: tuple[int, ...] = ()
    #: Whether a rank reported an error in this step, and the reason that others have taken a step without this rank.
    _told, _behind = False, ""
    #: The words about the formula, and the objects from which they were computed.
    _formula: tuple[int, ...] = (0,) * _FORMULA
    _like: tuple[Any, Any, int] = (None, None, 0)
    #: The devices that words of the host travel by, and values of this step.
    _of_host = _of_values = torch.device("cpu")

    def __init__(self, group: Any) -> None:
        if not torch.distributed.is_available() or not torch.distributed.is_initialized():
            raise HyperError("reduce_over needs processes: call torch.distributed.init_process_group() before")
        if not isinstance(group, torch.distributed.ProcessGroup):
            raise HyperError(f"reduce_over={group!r} must be a process group, such as torch.distributed.group.WORLD")
        self._group, self.size = group, torch.distributed.get_world_size(group)
        if self.size < 1:
            raise HyperError("reduce_over is a process group that this process does not belong to")
        self._of_host = self._of_values = device_of(group, self.label)
        self.traffic = Traffic()
        #: Messages that this rank did not wait for.
        self._on_their_way: list[Any] = []

    @property
    def label(self) -> str:
        """The keyword with the number of ranks."""
        return f"reduce_over ({self.size})"

    @property
    def group(self) -> Any:
        """The process group."""
        return self._group

    @property
    def ranks(self) -> list[int]:
        """The global ranks of the group."""
        return torch.distributed.get_process_group_ranks(self._group)

    @property
    def rank(self) -> int:
        """The rank of this process in the group."""
        return torch.distributed.get_rank(self._group)

    def __reduce__(self) -> Any:
        raise RulecError("an optimizer with reduce_over belongs to its processes: copy its state_dict() instead")

    def open(self, measures: bool = False) -> None:
        """Begins a step, on which all ranks must agree, whether it `measures` statistics or not."""
        self.agreed, self._told, self._left = False, False, ()
        self.traffic.begin()

    def check_even(self) -> None:
        """RulecError where other ranks have taken a step without this rank."""
        if self._behind:
            raise behind(self._behind)

    def restore(self) -> None:
        """Records that a checkpoint was loaded."""
        self._behind = ""

    def leave(self) -> None:
        """Ends a step, taken or not."""
        self._told = True

    def refuse(self, waits: bool = True) -> None:
        """Tells waiting ranks that this rank takes no step, and waits for them if `waits`."""
        if self.agreed:
            return
        if waits:
            self._exchange([_REFUSED])
            return
        self.agreed = True
        sent = torch.zeros(_LENGTH, dtype=torch.int64)
        sent[0] = _REFUSED
        sent = sent.to(self._of_host)
        parts = [torch.empty_like(sent) for _ in range(self.size)]
        self._on_their_way = [each for each in self._on_their_way if not each[0].is_completed()]
        with reaching(self.label):
            work = torch.distributed.all_gather(parts, sent, group=self._group, async_op=True)
        self._on_their_way.append((work, sent, parts))

    def agree(self, launches: Sequence[Launch], groups: int, remembers: bool, overflowed: bool) -> None:
        """Agrees with other ranks on a step of these launches; a rank without launches takes part in the reductions.

        `remembers`: groups or the model have states. `overflowed`: scaled gradients have an infinity.
        """
        reductions = _reductions(launches)
        fired = sorted({place for launch in launches for place in _places(launch)})
        codes = [_OPS.index(op) * len(_LEVELS) + _LEVELS.index(level) for op, level in reductions]
        like = (launches[0].version, launches[0].common.hyper.table, len(launches)) if launches else (None, None, 0)
        if like[0] is not self._like[0] or like[1] is not self._like[1] or like[2] != self._like[2]:
            self._like, self._formula = like, formula(launches)
        kind = _kind_of(launches)
        words = [groups, zlib.crc32(repr(fired).encode()), len(codes), *codes, overflowed, *self._formula]
        every = self._exchange([*words, kind != "cpu"])
        refused = [rank for rank, message in enumerate(every) if message[0] == _REFUSED]
        if refused:
            raise RulecError(f"process {refused[0]} of reduce_over takes no step, for an error of its own: see there")
        self._of_values = self._device_of([bool(message[-1]) for message in every], kind)
        every = [message[:-1] for message in every]
        formulas, every = [*map(_OF_FORMULA, every)], [*map(_OF_STEP, every)]
        if len({*formulas}) > 1:
            check_formulas(formulas)
        if len({message[-1] for message in every}) > 1:
            raise RulecError(
                "the scaled gradients of some processes of reduce_over have an infinity, and those of others none: "
                "reduce what GradScaler finds over all of them; nothing was changed"
            )
        kinds = {message[:-1] for message in every if remembers or message[2]}
        if len({message[0] for message in every}) > 1 or len({message[:1] + message[2:] for message in kinds}) > 1:
            raise RulecError("the processes of reduce_over have other groups or rules: make their optimizers alike")
        if remembers and len(kinds) > 1:
            raise RulecError(
                "a process of reduce_over has gradients in other groups than another, and the rule remembers numbers "
                "of groups or of the model: give every process a part of each"
            )
        codes = [*kinds.pop()[3:]] if kinds else []
        levels = [_LEVELS[code % len(_LEVELS)] for code in codes]
        self._left = tuple(groups if level == "group" else 1 for level in levels)
        if not reductions:
            for code, length in zip(codes, self._left, strict=True):
                op = _OPS[code // len(_LEVELS)]
                self.total(op, np.full(length, REDUCTIONS[op].nothing))

    def _exchange(self, words: Sequence[int]) -> list[tuple[int, ...]]:
        """All-gathers the words of each rank; `words` are those of this rank."""
        self.agreed = True
        row = torch.zeros(_LENGTH, dtype=torch.int64)
        row[: len(words)] = torch.tensor([*words])
        messages = [tuple(part.tolist()) for part in self._gathered(row, self._of_host)]
        return [(part[:1] if part[0] == _REFUSED else part[: 5 + part[2] + _FORMULA]) for part in messages]

    def _device_of(self, there: Sequence[bool], kind: str) -> torch.device:
        """The device for values of this step: the CPU where they are in the host's memory in all ranks, by `there`.

        A rank with values on the CPU sends them by the device of the others.
        """
        if not any(there):
            return self._of_host
        others = [each for each in sorted(backends_of(self._group)) if each != "cpu"]
        return device_of(self._group, self.label, kind if kind != "cpu" else others[0] if others else "cpu")

    def total(self, op: Op, numbers: Any) -> Any:
        """All-reduces numbers element by element, as an array or a tensor, like `numbers`.

        RulecError, in all ranks, where one has failed.
        """
        here = numbers if isinstance(numbers, Tensor) else torch.from_numpy(np.array(numbers, np.float64))
        self._left = self._left[1:]
        parts = self._gathered(torch.cat([here, here.new_zeros(1)]), self._of_values)
        if torch.stack([part[-1] for part in parts]).any():
            raise self._said("")
        first, *others = (part[:-1] for part in parts)
        for other in others:
            first = _COMBINE[op](first, other)
        return first.to(here.device) if isinstance(numbers, Tensor) else first.cpu().numpy()

    def fail(self, error: Exception, tensors: Sequence[str]) -> Exception:
        """Reports an error at some tensors to the waiting ranks. Returns the error that this rank raises.

        It is the same error where no rank waits any more, or where this rank may refuse the step.
        """
        if not self.agreed or self._told or isinstance(error, Unreached):
            return error
        failure = DeferredError()
        failure.note(error, tensors)
        if not self._left:
            self._behind = str(failure) if self.size > 1 else ""
            return error
        self._gathered(torch.tensor([0.0] * self._left[0] + [1.0], dtype=torch.float64), self._of_values)
        told = self._said(failure.sentence(torch.distributed.get_rank()))
        told.__cause__ = error.__cause__ if isinstance(error, RemoteError) else error
        return told

    def _said(self, text: str) -> RemoteError:
        """The common error of all ranks: the text of the first rank with a text."""
        self._told = True
        row = torch.zeros(_TEXT, dtype=torch.uint8)
        sent = text.encode()[:_TEXT]
        row[: len(sent)] = torch.tensor([*sent], dtype=torch.uint8)
        parts = self._gathered(row, self._of_host)
        texts = [bytes(part.tolist()).rstrip(b"\0").decode(errors="ignore") for part in parts]
        return RemoteError(next(text for text in texts if text))

    def _gathered(self, here: Tensor, device: torch.device) -> list[Tensor]:
        sent = here.contiguous().to(device)
        parts = [torch.empty_like(sent) for _ in range(self.size)]
        self.traffic.reduced(self, sent.numel(), device.type)
        self.traffic.end_round()
        with reaching(self.label):
            torch.distributed.all_gather(parts, sent, group=self._group)
        return parts


def _kind_of(launches: Sequence[Launch]) -> str:
    """The type of the devices with values of these launches."""
    there = [launch.part.bucket for launch in launches if launch.part.bucket.capabilities.on_device]
    kinds = [param.device.type for bucket in there for param in bucket.params[:1]]
    return next((kind for kind in kinds if kind != "cpu"), "cpu")


def _places(launch: Launch) -> list[int]:
    """The groups of a launch's tensors, by their indices in the optimizer."""
    return [launch.common.processes.places[tensor.group] for tensor in launch.part.tensors]


def _reductions(launches: Sequence[Launch]) -> list[Reduction]:
    """The reductions over groups and the model that launches come to, in order."""
    joining = [launch for launch in launches if not launch.version.plan.alone]
    if not joining:
        return []
    plan = joining[0].version.plan
    joins = plan.program.joins
    if any("n" not in plan.axes[value.args[0]].letters for value in joins):
        raise RulecError(f"{joining[0].name} reduces numbers of groups, which several processes would count twice")
    if len(joins) > _MOST:
        raise RulecError(f"{joining[0].name} has {len(joins)} values of groups and the model: {_MOST} is the most")
    return [(value.op, str(value.arg)) for value in joins]


@dataclass(frozen=True)
class _Value:
    """A value that is of elements or tensors, or `shared` by a group or the model, or of hyper-parameters alone.

    `names` are its hyper-parameters where it is not of elements or tensors.
    """

    wide: bool = False
    shared: bool = False
    names: frozenset[str] = frozenset()


@functools.lru_cache(maxsize=256)
def shared_hyper(rule: Rule) -> tuple[str, ...]:
    """The hyper-parameters in values of groups or of the model; without the learning rate, a stage may have another."""
    values: dict[str, _Value] = {}
    chosen: set[str] = set()
    for line in assignments(rule.standalone().step):
        values[line.target] = _value(line.value, rule, values, chosen)
    rate = "lr" if rule.rate is None else str(rule.rate.arg)
    return tuple(sorted(chosen - {"lr", rate}))


def _value(value: Node, rule: Rule, values: Mapping[str, _Value], chosen: set[str]) -> _Value:
    """The kind of an expression. The hyper-parameters of a shared value are added to `chosen`."""
    kinds = {n: _Value(shared=True) for n in walk([value]) if n.op.kind is Kind.REDUCE and n.arg in _LEVELS}
    for part in walk([value], kinds):
        kinds[part] = kind = _kind(part, [kinds[a] for a in part.args], rule, values)
        if kind.shared:
            chosen.update(kind.names)
    return kinds[value]


def _kind(part: Node, parts: list[_Value], rule: Rule, values: Mapping[str, _Value]) -> _Value:
    """The kind of a value whose operands are of the kinds `parts`."""
    if part.op is Op.NAME:
        name = str(part.arg)
        state = rule.state.get(name)
        if name in rule.hyper:
            return _Value(names=frozenset({name}))
        if state is not None:
            return _Value(wide=state.per not in _LEVELS, shared=state.per in _LEVELS)
        return values.get(name, _Value(wide=name != "t"))
    if part.op is Op.FACT or part.op.kind in (Kind.REDUCE, Kind.MATRIX, Kind.RANDOM) or any(x.wide for x in parts):
        return _Value(wide=True)
    return _Value(False, any(x.shared for x in parts), frozenset().union(*(x.names for x in parts)))


@functools.lru_cache(maxsize=256)
def _words_of(rule: Rule) -> tuple[int, int]:
    return zlib.crc32(rule.name.encode()), zlib.crc32(meaning(rule).encode())


def formula(launches: Sequence[Launch]) -> tuple[int, ...]:
    """Digests of the name and the equations of the first rule with values of groups or the model, and of its numbers.

    The last is of the statistics of groups and of the model that the step measures. Zeros without such a rule.
    """
    joining = [launch for launch in launches if not launch.version.plan.alone]
    if not joining:
        return (0,) * _FORMULA
    launch = joining[0]
    rule, named = launch.version.program.rule, launch.common.hyper.named
    numbers = [sorted({*named[name].tolist()}) for name in shared_hyper(rule) if name in named]
    watched = {key: each for launch in joining for key, each in launch.version.program.watch if is_joint(each)}
    texts = sorted((key, expression_text(each.value)) for key, each in watched.items())
    return *_words_of(rule), *(zlib.crc32(repr(said).encode()) for said in (numbers, texts))


def check_formulas(formulas: Sequence[Sequence[int]]) -> None:
    """RulecError where two ranks have different equations of one rule, or different numbers or statistics of all."""
    known: dict[int, tuple[int, Sequence[int]]] = {}
    measuring = [(process, watched) for process, (name, *_, watched) in enumerate(formulas) if name]
    for process, watched in measuring:
        if watched != measuring[0][1]:
            raise RulecError(
                f"process {process} of reduce_over has other statistics of groups or of the model than process "
                f"{measuring[0][0]}: give their optimizers the same watch= and watch_every=; nothing was changed"
            )
    for process, (name, *words, _) in enumerate(formulas):
        first, before = known.setdefault(name, (process, words))
        if before != words:
            what = "equations" if before[0] != words[0] else "hyper-parameters of values of groups or of the model"
            raise RulecError(
                f"process {process} of reduce_over has other {what} than process {first} for the same rule: make their "
                f"optimizers alike; nothing was changed"
            )
