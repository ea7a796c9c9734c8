"""On-gradient handlers: the work of a running backward pass when a gradient arrives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._C import _current_graph_task_id as graph_task
from torch._C._autograd import _get_current_graph_task_keep_graph as keeps_graph
from torch.autograd.variable import Variable
from torch.nn.modules.module import register_module_forward_pre_hook

from rulec.errors import PartialUpdate, RulecError
from rulec.torch.eager.hooks import Arrivals, Reads
from rulec.torch.eager.open_step import OpenStep


class BackwardHandler(ABC):
    """Handles the gradients of one step as they arrive, in one backward pass or in several for segments."""

    def __init__(self, step: OpenStep) -> None:
        self.step, self._index = step, step.parameter_index
        self._passes: set[int] = set()
        self._begun: set[int] = set()

    def arrive(self, place: int) -> None:
        """Takes a parameter's gradient, all of it or a contribution, which arrived in `.grad`."""
        self._check_pass()
        self._follow(graph_task())
        if self._index.params[place].grad is not None:  # torch also runs hooks where no gradient arrived
            self.step.gradient_bytes.arrive(place)
            self._arrived(place)

    def _follow(self, task: int) -> None:
        """Notes a backward pass, and has torch say when it is complete; it does not where the pass fails."""
        if task >= 0 and task not in self._passes:
            self._passes.add(task)
            self._begun.add(task)
            Variable._execution_engine.queue_callback(partial(self._begun.discard, task))

    def check_complete(self) -> None:
        """RulecError where a backward pass failed and its exception did not leave it."""
        if self._begun:
            raise RulecError(
                "a backward pass failed inside of opt.backward(), and its exception did not leave it: let it out, so "
                "that it is known that the step is not whole"
            )

    def _check_pass(self) -> None:
        """RulecError where the graph of this backward pass is needed again."""
        if torch.is_grad_enabled():
            raise RulecError(
                "create_graph=True keeps the backward pass for another derivative, and parameters that were updated in "
                "it would make that wrong: use the optimizer without eager updates"
            )

    def postpone(self, place: int) -> None:
        """Leaves a gradient to hooks that torch runs after its arrival; RulecError where it is used at once."""
        raise RulecError(
            f"a hook was registered on {self._index.names[place]} inside of the scope, where its gradient is used "
            f"before that hook runs: register it before the scope"
        )

    @abstractmethod
    def _arrived(self, place: int) -> None: ...

    @abstractmethod
    def end(self) -> None:
        """Ends a complete backward pass."""

    def close(self) -> None:  # noqa: B027 (most have nothing to close)
        """Leaves the backward pass, complete or not."""


class Accumulating(BackwardHandler):
    """Handles a micro-batch that is not the last: gradients are added up and stay, or leave for the host."""

    def __init__(self, step: OpenStep) -> None:
        super().__init__(step)
        self._postponed: set[int] = set()

    def postpone(self, place: int) -> None:
        """Leaves a gradient where it is."""
        self._postponed.add(place)

    def _arrived(self, place: int) -> None:
        self.step.accumulated = True
        if place not in self._postponed and self.step.collects(place, joined=False):
            self.step.collect(place)

    def end(self) -> None:
        """Waits for the host."""
        self.step.settle()


class Folding(BackwardHandler):
    """Handles a micro-batch before the last: its gradients are folded into states as they arrive."""

    def _arrived(self, place: int) -> None:
        self.step.fold(place)

    def end(self) -> None:
        """Does nothing: gradients are gone."""


class Counting(BackwardHandler):
    """Counts arrivals in a backward pass; at a parameter's last arrival its gradient is complete."""

    def __init__(self, step: OpenStep, arrivals: Arrivals) -> None:
        super().__init__(step)
        self._arrivals = arrivals
        self.counts: dict[int, int] = {}

    def _arrived(self, place: int) -> None:
        count = self.counts[place] = self.counts.get(place, 0) + 1
        expected = self._arrivals.expected(place)
        if count == expected:
            self._complete(place)
        elif count > expected > 0:
            self._again(place, count)

    @abstractmethod
    def _complete(self, place: int) -> None: ...

    @abstractmethod
    def _again(self, place: int, count: int) -> None:
        """Handles one more arrival than expected."""


class Firing(Counting):
    """Handles the last backward pass of a step: a complete gradient updates its parameter and is freed."""

    def __init__(self, step: OpenStep, arrivals: Arrivals) -> None:
        super().__init__(step, arrivals)
        # On the host, a transfer buffer gathers them.
        self._gather = Gather(room_for(step.parameter_index.largest) if step.host is None else 0)
        self._late: dict[int, int] = {}
        self._postponed: set[int] = set()
        self._collected: dict[int, int] = {}
        step.gradients.comes = arrivals.comes
        self._updating = False
        # Only modules that run during the backward pass pay for it: activation checkpointing runs them again.
        self._watch = register_module_forward_pre_hook(self._module_reads)
        self._reads = Reads(step.parameter_index.params, self._read) if arrivals.watches else nullcontext()
        self._reads.__enter__()

    def _check_pass(self) -> None:
        super()._check_pass()
        if keeps_graph():
            raise RulecError(
                "retain_graph=True keeps the backward pass to run it again, and parameters that were updated in it "
                "would make that wrong: add up the losses and call backward() once, without retain_graph"
            )

    @contextmanager
    def _update(self) -> Iterator[None]:
        """A context in which parameters are read by an update itself."""
        self._updating = True
        try:
            yield
        finally:
            self._updating = False

    def arrive(self, place: int) -> None:
        """Takes a gradient that arrived; where it is complete, the parameter is updated."""
        with self._update():
            super().arrive(place)

    def postpone(self, place: int) -> None:
        """Defers a parameter to `step()`, if this arrival of its gradient is the last."""
        self._postponed.add(place)

    def _arrived(self, place: int) -> None:
        if place not in self._postponed and self.step.collects(place):
            count = self._collected[place] = self._collected.get(place, 0) + 1
            self.step.collect(place, complete=count == self._arrivals.expected(place))
        else:
            super()._arrived(place)

    def _complete(self, place: int) -> None:
        if place not in self._index.chosen or place in self._postponed:
            return
        size = self._index.sizes[place]
        if not self._gather.takes(size):
            self.step.fire((place,))
        else:
            self.step.fire(self._gather.add(place, size))

    def completes(self, place: int) -> bool:
        """Whether the next arrival of a parameter's gradient is the last, and updates it with the gradient as it is."""
        expected = self._arrivals.expected(place)
        return place in self._index.chosen and self.counts.get(place, 0) + 1 == expected and self.step.factor is None

    def take(self, place: int, update: Callable[[], int]) -> None:
        """Takes an arrival that completes a gradient without computing it; `update` is as in `OpenStep.take`."""
        self._check_pass()
        self.step.take(place, update)  # which reads the parameter, before its gradient counts as complete
        self.counts[place] = self.counts.get(place, 0) + 1

    def _again(self, place: int, count: int) -> None:
        if place in self._gather.waiting:
            self._gather.withdraw(place)
        elif self.step.has_used(place):
            raise PartialUpdate(
                f"the gradient of {self._index.names[place]} arrived {count} times in this backward pass, where "
                f"{count - 1} were expected and it was updated then: make every step's backward pass of as many "
                f"segments as the first, or call relearn() before one that has more",
                self._index.named([*self.step.fired]), [self._index.names[place]],
            )  # fmt: skip

    def _module_reads(self, module: nn.Module, args: Any) -> None:
        for param in module._parameters.values():
            self._read(self._index.places.get(id(param), -1), type(module).__name__)

    def _read(self, place: int, reader: str) -> None:
        """RulecError where a reader during the backward pass reads a parameter that was updated."""
        if self._updating:
            return
        if place in self._gather.waiting:
            self._gather.withdraw(place)
        if self.step.has_used(place):
            raise RulecError(
                f"{reader} runs during the backward pass and reads {self._index.names[place]}, which was updated: "
                f"call relearn() before a step that recomputes other modules than the first"
            )
        if place in self.counts:
            self._late[place] = self.counts[place]

    def end(self) -> None:
        """Fires the gradients that still wait, and remembers the number of arrivals of each."""
        with self._update():
            self.step.fire(self._gather.take())
            self.step.settle()
        late = [i for i, count in self._late.items() if count == self.counts[i]]
        self._arrivals.learn(self.counts, late, self._collected)
        self.step.over = True
        self._index.release([*self.step.fired, *self._collected])

    def close(self) -> None:
        """Stops watching for reads of parameters."""
        self._reads.__exit__(None, None, None)
        self._watch.remove()


class Finishing(Firing):
    """Handles the last backward pass of a step whose gradients are folded into states."""

    def _arrived(self, place: int) -> None:
        self.step.fold(place)
        super()._arrived(place)

    def _complete(self, place: int) -> None:
        if place in self._index.chosen:
            self.step.fire_folded((place,))

    def postpone(self, place: int) -> None:
        """RulecError: gradients are folded as they arrive."""
        BackwardHandler.postpone(self, place)

    def completes(self, place: int) -> bool:
        """Always returns False: gradients are folded as a whole."""
        return False


#: A gradient of more bytes than this fires alone.
SMALL = 1 << 16

#: The part of the largest gradient's bytes that waiting gradients may take together.
_PART = 20


class Gather:
    """Gathers complete small gradients that wait to fire together, at most `room` bytes of them, by parameter index."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.waiting: dict[int, int] = {}
        self._bytes = 0

    def takes(self, size: int) -> bool:
        """Whether a gradient of so many bytes waits for others."""
        return size <= SMALL and size <= self.room

    def add(self, place: int, size: int) -> list[int]:
        """Adds a waiting gradient, and returns the gradients to fire first where there is no room."""
        ready = self.take() if self._bytes + size > self.room else []
        self.waiting[place] = size
        self._bytes += size
        return ready

    def withdraw(self, place: int) -> None:
        """Removes a gradient that was not complete after all."""
        self._bytes -= self.waiting.pop(place)

    def take(self) -> list[int]:
        """Removes and returns all waiting gradients."""
        ready, self._bytes = sorted(self.waiting), 0
        self.waiting.clear()
        return ready


def room_for(largest: int) -> int:
    """The bytes of gradients that may wait where the largest gradient has `largest` bytes."""
    return largest // _PART
