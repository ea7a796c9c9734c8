"""Plans of steps: the part that is the same whenever the same parameters have gradients."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from rulec.language.rule import Rule
from rulec.runtime.device import Scaling
from rulec.runtime.launch import Launch
from rulec.torch.engine import Home, TorchEngine
from rulec.torch.inputs import Inputs
from rulec.torch.memory import plain_memory
from rulec.torch.placed import is_placed
from rulec.torch.routes import Route
from rulec.torch.sections import Section

#: How many sets of parameters with gradients a machine remembers the plans of.
_PLANS = 1024


@dataclass(frozen=True)
class EngineTensors:
    """One engine's tensors in a step, and the places of their gradients among the step's (None: all)."""

    engine: TorchEngine
    ids: tuple[int, ...]
    places: list[int] | None


@dataclass(frozen=True)
class StepPlan:
    """A step of some parameters.

    `chosen` are their places among all parameters, and `written` the parameters themselves. `converted` are the places,
    among these, of gradients for which kernels read another tensor: complex ones and DTensors. `sections` has, for
    each tensor of a kernel, its parameter's place here and its section; empty where all are parameters.
    `copied` are routes with the contiguous copy that kernels write. `scalings` are the ways of scaling of the steps so
    far, and `later` are the messages of their later rounds.
    """

    shares: list[EngineTensors]
    chosen: Sequence[int]
    written: list[Tensor]
    converted: list[int]
    sections: list[tuple[int, Section | None]]
    copied: list[tuple[Route, Tensor]]
    scalings: set[tuple[bool, bool]] = field(default_factory=set)
    later: list[Any] = field(default_factory=list)

    @property
    def updated(self) -> list[tuple[Tensor, Section | None]]:
        """Each parameter, or each of its sections."""
        pairs = self.sections or [(place, None) for place in range(len(self.written))]
        return [(self.written[place], section) for place, section in pairs]

    def seen(self, tensors: Sequence[Any]) -> Sequence[Any]:
        """The tensors of kernels, from one tensor for each parameter of the plan."""
        if not self.sections:
            return tensors
        return [tensors[i] if section is None else section.of(tensors[i]) for i, section in self.sections]


class Plans:
    """The plans of a machine's steps, by the places of the parameters with gradients (None: all).

    `homes` and `copies`, contiguous copies of what kernels see, are by the places of `routes`. Where `ahead`, a step of
    many parameters has memory fetched before it looks at them.
    """

    def __init__(
        self, params: Sequence[Tensor], engines: Sequence[TorchEngine], routes: Sequence[Route],
        homes: Sequence[Home], copies: Mapping[int, Tensor], ahead: bool,
    ) -> None:  # fmt: skip
        self._params, self._engines, self._routes, self._homes = params, engines, routes, homes
        self._of_param: dict[int, list[int]] = {}
        for i, route in enumerate(routes):
            self._of_param.setdefault(route.place, []).append(i)
        self._copies, self._fetches = copies, ahead
        self.known: dict[tuple[int, ...] | None, StepPlan] = {}
        self.ahead: Ahead | None = None

    def of(self, present: tuple[int, ...] | None, grads: Sequence[Tensor]) -> StepPlan:
        """The plan for the parameters at some places, with these gradients."""
        return self.known.get(present) or self.make(present, grads)

    def make(self, present: tuple[int, ...] | None, grads: Sequence[Tensor]) -> StepPlan:
        """A new plan, kept."""
        chosen = range(len(self._params)) if present is None else present
        written = [self._params[i] for i in chosen]
        if len(self.known) >= _PLANS:
            self.known.clear()
        if self._fetches and len(grads) >= FEW:
            self.ahead = Ahead([*written, *grads])
        converted = [place for place, p in enumerate(written) if p.is_complex() or is_placed(p)]
        seen = [(place, i) for place, param in enumerate(chosen) for i in self._of_param[param]]
        sections = [(place, self._routes[i].section) for place, i in seen] if len(seen) > len(chosen) else []
        copied = [(self._routes[i], self._copies[i]) for _, i in seen if i in self._copies]
        shares = self._shares([i for _, i in seen])
        plan = self.known[present] = StepPlan(shares, chosen, written, converted, sections, copied)
        return plan

    def _shares(self, seen: Sequence[int]) -> list[EngineTensors]:
        shares = []
        for engine in self._engines:
            places = [place for place, i in enumerate(seen) if self._homes[i][0] is engine]
            if places:
                ids = tuple([self._homes[seen[place]][1] for place in places])
                shares.append(EngineTensors(engine, ids, None if len(places) == len(seen) else places))
        return shares


def launches_of(
    plan: StepPlan, grads: Sequence[Tensor], inputs: Inputs | None, scaling: Scaling | None = None
) -> list[Launch]:
    """Every engine's launches for a step, checked; OtherDtype where a gradient's dtype is new."""
    launches: list[Launch] = []
    for share in plan.shares:
        chosen = grads if share.places is None else [grads[i] for i in share.places]
        arguments = None if inputs is None else inputs.of(plan.updated, share.places)
        launches += share.engine.ready(share.ids, chosen, share.engine.table, arguments, scaling)
    return launches


def part_launches_of(
    plan: StepPlan, grads: Sequence[Tensor], way: Callable[[Rule], Rule | None], counts: bool,
    inputs: Inputs | None = None,
) -> list[Launch]:  # fmt: skip
    """Every engine's launches for a part of a step: see `Engine.ready_part`."""
    launches: list[Launch] = []
    for share in plan.shares:
        chosen = grads if share.places is None else [grads[i] for i in share.places]
        arguments = None if inputs is None else inputs.of(plan.updated, share.places)
        launches += share.engine.ready_part(share.ids, chosen, share.engine.table, way, counts, arguments)
    return launches


def scaling_kind(scaling: Scaling | None) -> tuple[bool, bool]:
    """Whether steps may be skipped, and gradients are to be unscaled: kernels differ."""
    return scaling is not None, scaling is not None and scaling.scale is not None


def read_all(copied: Iterable[tuple[Route, Tensor]]) -> None:
    """Writes what lies at each route into its copy."""
    with plain_memory():
        for route, copy in copied:
            copy.copy_(route.here)


def write_all(copied: Iterable[tuple[Route, Tensor]]) -> None:
    """Writes each copy where its route lies."""
    with plain_memory():
        for route, copy in copied:
            route.here.copy_(copy)


_LINE = 64

#: Bytes that torch keeps of a tensor and of a storage, as far as a step looks.
_TENSOR, _STORAGE = 192, 64

#: Below this many tensors there is nothing to win.
FEW = 32

_PREFETCH = """
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)

define void @rulec_kernel(i64 %job) {
entry:
  %table = inttoptr i64 %job to ptr
  %count = load i64, ptr %table
  br label %test
test:
  %done = phi i64 [ 0, %entry ], [ %next, %body ]
  %more = icmp ult i64 %done, %count
  br i1 %more, label %body, label %end
body:
  %next = add i64 %done, 1
  %place = getelementptr i64, ptr %table, i64 %next
  %address = load i64, ptr %place
  %line = inttoptr i64 %address to ptr
  call void @llvm.prefetch.p0(ptr %line, i32 0, i32 3, i32 1)
  br label %test
end:
  ret void
}
"""


class Ahead:
    """The lines of memory of some tensors on the CPU, as they are now."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        lines = sorted({line for tensor in tensors for line in _lines(tensor)})
        self._job = np.array([len(lines), *lines], np.int64)
        self._at = self._job.ctypes.data
        self._machine = _machine()
        self._run = self._machine.run

    def ask(self) -> None:
        """Has them fetched; returns at once."""
        self._run(self._at)


def _lines(tensor: Tensor) -> Iterator[int]:
    for start, length in ((id(tensor), _LINE), (tensor._cdata, _TENSOR), (tensor.untyped_storage()._cdata, _STORAGE)):
        yield from range(start - start % _LINE, start + length, _LINE)


@functools.cache
def _machine() -> Any:
    """The compiled function; it takes the address of a count and that many addresses."""
    cpu_machine = importlib.import_module("rulec_backends.cpu.machine")
    return cpu_machine.Machine(cpu_machine.emit_object(_PREFETCH))
