"""The optimizer inside an eager one: how some of its parameters are stepped, and others later in the same step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from rulec.errors import RuleError, TensorError
from rulec.language.rule_data import RuleData
from rulec.torch.distributed.comparison import OtherOrder
from rulec.torch.distributed.consensus import Consensus
from rulec.torch.distributed.cross_process import Across
from rulec.torch.eager.scope import check_rules, joined_places, meeting_places
from rulec.torch.groups.options import OffloadOptions
from rulec.torch.offload.host_step import HostStep
from rulec.torch.offload.link import Event, Link
from rulec.torch.optimizer import RuleOptimizer
from rulec.torch.partitioned import Partitioned
from rulec.torch.step.optimizer_step import OptimizerStep


class Inner(ABC):
    """An optimizer of which some parameters, given by their indices among all groups', are stepped at a time."""

    optimizer: Any

    @property
    def late(self) -> frozenset[int]:
        """The indices of parameters that are stepped by `fire_last` alone: ranks need consensus for them."""
        return frozenset()

    @property
    def offload(self) -> OffloadOptions | None:
        """The options of steps on the host; None where steps are elsewhere."""
        return None

    @property
    def joined(self) -> frozenset[int]:
        """The indices of parameters that are stepped together, where steps are on the host."""
        return frozenset()

    def prepare(self) -> None:  # noqa: B027 - most steps are elsewhere
        """Comes before `conforming` outside of an open step."""

    def conforming(self, place: int, grad: Tensor) -> Tensor:
        """The gradient of a parameter as kernels read it, for steps on the host; TensorError where it does not fit."""
        raise NotImplementedError

    def announce(self, place: int) -> None:
        """Increases the version of a parameter that is about to be stepped on the host."""
        raise NotImplementedError

    def begin_early(self, gradients: Mapping[int, Tensor], comes: Callable[[int], bool]) -> None:
        """Begins the step of parameters that are stepped together, with gradients on the host, by their indices.

        `comes` says of an index whether its gradient is still to come.
        """
        raise NotImplementedError

    def forget_early(self) -> None:  # noqa: B027 - most steps are elsewhere
        """Drops what `begin_early` has run."""

    def hold(self) -> None:  # noqa: B027 - most steps are elsewhere
        """Has devices wait for weights from the host before their next work."""

    def fire_last(self, places: tuple[int, ...], grads: Sequence[Tensor], arrived: bool = False) -> None:
        """As `fire`, at the end of a step, in all ranks: each calls it, also without parameters."""
        if places:
            self.fire(places, grads, arrived)

    def compare(self) -> None:  # noqa: B027 - most have nobody to compare with
        """Comes before a step, in all ranks: RulecError, in all, where their descriptions differ."""

    def refuse(self) -> None:  # noqa: B027 - most have nobody to tell
        """Refuses a step, to ranks in their `fire_last`."""

    @abstractmethod
    def open(self) -> None:
        """Opens a step, with the numbers that groups have now; RulecError where it cannot be run in parts."""

    @abstractmethod
    def fire(self, places: tuple[int, ...], grads: Sequence[Tensor], arrived: bool = False) -> None:
        """Steps parameters with these gradients, also in `.grad`. Each is fired once in a step.

        Gradients that have `arrived` are `conforming` ones in host memory instead.
        """

    @abstractmethod
    def close(self) -> None:
        """Closes the step."""

    def abandon(self) -> None:  # noqa: B027 - others have nothing of a step that updated nothing
        """Closes a step without updates, or after its updates were taken back."""

    def buffers(self, place: int) -> Mapping[str, Any]:
        """The state of a parameter now; empty before its first step."""
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        state: Mapping[str, Any] = self.optimizer.state.get(params[place], {})
        return state

    def forget(self, param: Tensor) -> None:
        """Takes away the state of a parameter: it starts afresh."""
        self.optimizer.state.pop(param, None)


class RuleInner(Inner):
    """An optimizer of a rule. If it `collects`, rules may step parameters together, on the host."""

    def __init__(self, optimizer: RuleOptimizer, collects: bool = False) -> None:
        self.optimizer: RuleOptimizer = optimizer
        self._checked: OptimizerStep | None = None
        self._collects = collects
        self._uploads: dict[Link, Event] = {}
        self._check()

    def _check(self) -> None:
        check_rules(self.optimizer, self.offload is not None)
        self._late = meeting_places(self.optimizer)
        self._joined = self._late | joined_places(self.optimizer) if self.offload is not None else frozenset()

    @property
    def late(self) -> frozenset[int]:
        return self._late

    @property
    def offload(self) -> OffloadOptions | None:
        options = self.optimizer._options.offload
        return options if self._collects and options is not None and options.kind == "step" else None

    @property
    def joined(self) -> frozenset[int]:
        return self._joined

    def prepare(self) -> None:
        if self.offload is not None:
            with self.optimizer._lock:
                self.optimizer._current()

    def conforming(self, place: int, grad: Tensor) -> Tensor:
        return self.machine.conforming(place, grad)

    def announce(self, place: int) -> None:
        self.machine.announce(place)

    def begin_early(self, gradients: Mapping[int, Tensor], comes: Callable[[int], bool]) -> None:
        with self.optimizer._lock:
            self.machine.begin_early(gradients, comes)

    def forget_early(self) -> None:
        with self.optimizer._lock:
            if self.optimizer._machine is not None:
                self.machine.forget_early()

    def hold(self) -> None:
        uploads, self._uploads = self._uploads, {}
        for link, event in uploads.items():
            link.hold(event)

    def open(self) -> None:
        """Opens a step; RuleError where groups mean a rule now that cannot be run in parts."""
        optimizer = self.optimizer
        with optimizer._lock:
            optimizer._check_trained()
            optimizer._current().begin(optimizer.param_groups)
        if self.machine is not self._checked:
            self._check()
            self._checked = self.machine

    @property
    def machine(self) -> OptimizerStep:
        """The machine of the step that is open."""
        assert self.optimizer._machine is not None
        return self.optimizer._machine

    def fire(self, places: tuple[int, ...], grads: Sequence[Tensor], arrived: bool = False) -> None:
        """Steps these parameters; nothing is written where anything is wrong."""
        if not self._late.isdisjoint(places):
            raise RuleError(
                f"{self.optimizer.interface.name} reduces values over processes, which meet once in a step: update all "
                f"parameters at once"
            )
        self._fire(places, grads, False, arrived)

    def fire_last(self, places: tuple[int, ...], grads: Sequence[Tensor], arrived: bool = False) -> None:
        options = self.optimizer._options
        together = options.processes if self._late else []
        for processes in together:
            processes.open(options.due)
        try:
            if together:
                self._fire_together(together, places, grads, arrived)
            else:
                super().fire_last(places, grads, arrived)
        except BaseException:
            for refusing in (*together, options.reducer):
                if refusing is not None:
                    refusing.refuse()
            raise

    def _fire_together(
        self, together: Sequence[Across | Consensus], places: tuple[int, ...], grads: Sequence[Tensor], arrived: bool
    ) -> None:  # fmt: skip
        for processes in together:
            processes.check_even()
        try:
            self._fire(places, grads, True, arrived)
        except OtherOrder as other:
            self._take_order(other)
            coordinator = self.optimizer._options.coordinator
            assert coordinator is not None
            coordinator.open(self.optimizer._options.due)
            self._fire(places, grads, True, arrived)

    def _take_order(self, other: OtherOrder) -> None:
        with self.optimizer._lock:
            if self.optimizer._take_order(other):
                self.machine.begin(self.optimizer.param_groups)

    def compare(self) -> None:
        with self.optimizer._lock:
            self.optimizer._first = None
            if not self.optimizer._compared:
                self.optimizer._compare()

    def refuse(self) -> None:
        if self._late or self.optimizer._options.reducer is not None:
            self.optimizer.refuse()

    def _fire(self, places: tuple[int, ...], grads: Sequence[Tensor], meets: bool, arrived: bool) -> None:
        optimizer = self.optimizer
        with optimizer._lock:
            if self._fired(places, grads, meets, arrived):
                return
            if optimizer.interface.shared:
                raise TensorError(
                    f"{optimizer.interface.name} remembers numbers of groups, and a gradient has another dtype than "
                    f"before: it cannot be updated inside the backward pass"
                )
            machine = optimizer._build()
            machine.begin(optimizer.param_groups)
            self._fired(places, grads, meets, arrived)

    def _fired(self, places: tuple[int, ...], grads: Sequence[Tensor], meets: bool, arrived: bool) -> bool:
        offload = self.machine.offload
        try:
            return self.machine.fire(places, grads, meets, arrived)
        finally:
            if isinstance(offload, HostStep):
                self._uploads |= offload.uploads()

    def fire_part(
        self, places: tuple[int, ...], grads: Sequence[Tensor], way: Callable[[RuleData], RuleData], counts: bool
    ) -> None:  # fmt: skip
        """Runs a part of the step that is open: see `Engine.ready_part`."""
        with self.optimizer._lock:
            self.machine.fire_part(places, grads, way, counts)

    def close(self) -> None:
        with self.optimizer._lock:
            self.machine.end(self.optimizer.param_groups)

    def abandon(self) -> None:
        with self.optimizer._lock:
            if self.optimizer._machine is not None:
                self.machine.abandon()

    def buffers(self, place: int) -> Mapping[str, Any]:
        return self.machine.buffers.written(place)


class PartitionedInner(Inner):
    """The optimizers of a partition's rules; `collects` is as in `RuleInner`."""

    def __init__(self, optimizer: Partitioned, collects: bool = False) -> None:
        self.optimizer: Partitioned = optimizer
        self._collects = collects
        self._inner = [RuleInner(each, collects) for each in optimizer.optimizers]
        self._tensor_refs: list[tuple[int, int]] = []

    @property
    def offload(self) -> OffloadOptions | None:
        return self._inner[0].offload

    @property
    def joined(self) -> frozenset[int]:
        places = enumerate(self._places())
        return frozenset(place for place, (number, inner) in places if inner in self._inner[number].joined)

    def prepare(self) -> None:
        self._tensor_refs = self._places()
        for each in self._inner:
            each.prepare()

    def conforming(self, place: int, grad: Tensor) -> Tensor:
        number, inner_place = self._tensor_refs[place]
        return self._inner[number].conforming(inner_place, grad)

    def announce(self, place: int) -> None:
        number, inner_place = self._tensor_refs[place]
        self._inner[number].announce(inner_place)

    def begin_early(self, gradients: Mapping[int, Tensor], comes: Callable[[int], bool]) -> None:
        of_place = {ref: place for place, ref in enumerate(self._tensor_refs)}
        for number, each in enumerate(self._inner):
            mine = {i: gradients[place] for (n, i), place in of_place.items() if n == number and place in gradients}
            if mine:
                each.begin_early(mine, lambda i, number=number: comes(of_place[number, i]))  # type: ignore[misc]

    def forget_early(self) -> None:
        for each in self._inner:
            each.forget_early()

    def abandon(self) -> None:
        for each in self._inner:
            each.abandon()

    def hold(self) -> None:
        for each in self._inner:
            each.hold()

    def open(self) -> None:
        """Opens a step of every rule."""
        more = self.optimizer.optimizers[len(self._inner) :]
        self._inner += [RuleInner(each, self._collects) for each in more]
        self._tensor_refs = self._places()
        for each in self._inner:
            each.open()

    def fire(self, places: tuple[int, ...], grads: Sequence[Tensor], arrived: bool = False) -> None:
        """Steps these parameters, each by its own rule."""
        for each, inner_places, chosen in self.split(places):
            each.fire(inner_places, [grads[i] for i in chosen], arrived)

    @property
    def late(self) -> frozenset[int]:
        places = enumerate(self._places())
        return frozenset(place for place, (number, inner) in places if inner in self._inner[number].late)

    def fire_last(self, places: tuple[int, ...], grads: Sequence[Tensor], arrived: bool = False) -> None:
        chosen = {each: (inner_places, mine) for each, inner_places, mine in self.split(places)}
        for number, each in enumerate(self._inner):
            inner_places, mine = chosen.get(each, ((), []))
            try:
                each.fire_last(inner_places, [grads[i] for i in mine], arrived)
            except BaseException:
                for later in self._inner[number + 1 :]:
                    later.refuse()
                raise

    def compare(self) -> None:
        for each in self._inner:
            each.compare()

    def refuse(self) -> None:
        for each in self._inner:
            each.refuse()

    def _places(self) -> list[tuple[int, int]]:
        """For each parameter the number of its optimizer, and its index in it."""
        ids_of = [[id(p) for g in each.param_groups for p in g["params"]] for each in self.optimizer.optimizers]
        tensor_refs = {i: (number, place) for number, ids in enumerate(ids_of) for place, i in enumerate(ids)}
        return [tensor_refs[id(p)] for group in self.optimizer.param_groups for p in group["params"]]

    def split(self, places: Sequence[int]) -> Iterator[tuple[RuleInner, tuple[int, ...], list[int]]]:
        """Each optimizer with parameters with these indices, the indices in it, and the positions among `places`."""
        for number, each in enumerate(self._inner):
            mine = [i for i, place in enumerate(places) if self._tensor_refs[place][0] == number]
            if mine:
                yield each, tuple(self._tensor_refs[places[i]][1] for i in mine), mine

    def close(self) -> None:
        """Closes the step of every rule."""
        for each in self._inner:
            each.close()

    def buffers(self, place: int) -> Mapping[str, Any]:
        number, inner_place = self._tensor_refs[place]
        return self._inner[number].buffers(inner_place)

    def forget(self, param: Tensor) -> None:
        for each in self.optimizer.optimizers:
            each.state.pop(param, None)
