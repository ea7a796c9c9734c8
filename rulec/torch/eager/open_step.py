"""An open eager step: from its first backward pass to the end of `opt.step()`.

Some rules add gradients up in a state. Their gradients are folded into the state, and none is kept between
micro-batches.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from rulec.analysis.accumulate import Phase, phase_rule
from rulec.errors import PartialUpdate, RulecError, RuleError
from rulec.language.rule_data import RuleData
from rulec.torch.eager.grad_norm import Factor
from rulec.torch.eager.inner import Inner, PartitionedInner, RuleInner
from rulec.torch.eager.on_host import HostGradients, HostUpdates
from rulec.torch.eager.params import GradientBytes, ParameterIndex, Report
from rulec.torch.eager.scope import rules_of
from rulec.torch.eager.wrapped import ForeignInner, Frozen
from rulec.torch.tensors.fake import plain_memory
from rulec.torch.tensors.memory import check_gradient_memory, check_memory, check_state_memory

#: The result of an update.
Written = TypeVar("Written")


class OpenStep:
    """The updates of this step so far, and the way to more of them.

    `fired` has the indices of updated parameters, in order; `folded` the indices of parameters with parts of their
    gradients in their states; `dropped` the indices of updates that were given up. `over` says that the last backward
    pass is done.

    With a `host`, updates are there. `sent` has the indices of parameters before their update, and `gradients` those
    kept there until `step()`.
    """

    def __init__(
        self, inner: Inner, parameter_index: ParameterIndex, journal: bool, host: HostUpdates | None = None
    ) -> None:  # fmt: skip
        self.inner, self.parameter_index, self.host = inner, parameter_index, host
        self.gradients = HostGradients(inner, parameter_index.names)
        self.sent: dict[int, None] = {}
        self.factor: Factor | None = None
        self.gradient_bytes = GradientBytes(parameter_index.sizes)
        self.journal = Journal(inner, parameter_index) if journal else None
        self.fired: dict[int, None] = {}
        self.folded: dict[int, None] = {}
        self.dropped: dict[int, None] = {}
        self.accumulated = self.over = self.poisoned = self.broken = False
        self._frozen: Frozen | None = None
        self._inside = self._launches = 0

    @property
    def begun(self) -> bool:
        """Whether anything was written."""
        return bool(self.fired or self.folded or self.sent)

    def has_used(self, place: int) -> bool:
        """Whether a parameter is updated, or may be so at any moment."""
        return place in self.fired or place in self.sent

    def collects(self, place: int, joined: bool = True) -> bool:
        """Whether a gradient is to wait on the host; `joined` asks so in the last backward pass of the step."""
        chosen = self.host is not None and place in self.parameter_index.early
        return chosen and (not joined or (self.host is not None and place in self.host.joined))

    def open(self) -> None:
        """Fixes the hyper-parameters; they are those of now, if this is the first time."""
        if self._frozen is None:
            self.inner.open()
            self._frozen = Frozen(self.inner.optimizer.param_groups)

    def check_numbers(self) -> None:
        """RulecError where a number of the groups is not what the parameters so far were updated with."""
        key = self._frozen.changed(self.inner.optimizer.param_groups) if self._frozen else None
        if key is not None:
            raise RulecError(
                f"{key!r} of a parameter group was changed between the backward pass, which updates parameters, and "
                f"step(): change it before the backward pass, or after step() as schedulers do"
            )

    def check_once(self, places: Iterable[int]) -> None:
        """RulecError where one of these parameters was updated in this step."""
        again = [place for place in places if place in self.fired]
        if again:
            raise RulecError(
                f"{self.parameter_index.names[again[0]]} was updated in this step already, "
                "and its gradient came after that: "
                f"give it its whole gradient once, and whatever comes late to the next step"
            )

    def fire(self, places: Sequence[int], inside: bool = True) -> None:
        """Updates parameters with the gradients they have, and frees these; `inside` a backward pass or after it."""
        if not places and (inside or not self.inner.late):
            return
        if self.host is not None and (inside or self.gradients or self.host.joined):
            self._fire_on_host(self.host, places, inside)
            return
        update = self.inner.fire if inside else self.inner.fire_last
        params = [self.parameter_index.params[i] for i in places]
        grads = [p.grad for p in params if p.grad is not None]
        try:
            self._check_memory(places)
        except RulecError:
            if not inside:
                self.inner.refuse()
            raise
        if self.factor is not None and not self.factor.apply(grads):
            self.dropped.update(dict.fromkeys(places))
        else:
            self._write(tuple(places), lambda: update(tuple(places), grads))
            self._launches += 1
        for param in params:
            param.grad = None
        self.gradient_bytes.leave(places, inside)
        self._inside += len(places) if inside else 0

    def _fire_on_host(self, host: HostUpdates, places: Sequence[int], inside: bool) -> None:
        """The same on the host: inside of a backward pass, as the gradients come there; after it, together."""
        for place in places:
            if not inside or place in host.joined:
                self.collect(place, inside)
            else:
                self._send(host, place)
        if not inside:
            self.settle()
            host.wait_for_devices()
            mine = tuple(place for place in places if place in self.gradients)
            self._update_on_host(mine, [self.gradients.take(place) for place in mine], self.inner.fire_last)

    def _send(self, host: HostUpdates, place: int) -> None:
        """Has a parameter updated on the host; its gradient leaves the device."""
        grad = self._scaled(place)
        if grad is None:
            return
        self.open()
        self.sent[place] = None
        host.send(place, grad, self._arrived, lambda: self.gradient_bytes.leave([place]))
        self.parameter_index.params[place].grad = None
        self._inside += 1

    def collect(self, place: int, inside: bool = True, complete: bool = False) -> None:
        """Moves the gradient of a parameter to the host, and adds it to the earlier gradients there.

        If the sum is `complete` then, as far as is known, the step may begin with it.
        """
        assert self.host is not None
        grad = self._scaled(place)
        if grad is None:
            return
        work = self.gradients.complete if complete else self.gradients.add
        self.host.collect(place, grad, work, lambda: self.gradient_bytes.leave([place], inside))
        self.parameter_index.params[place].grad = None

    def _scaled(self, place: int) -> Tensor | None:
        """The gradient that a parameter has, after the factor of all; None where there is none, or no update."""
        self._check_memory([place])
        param = self.parameter_index.params[place]
        grad = param.grad
        if grad is not None and self.factor is not None and not self.factor.apply([grad]):
            self.dropped[place] = None
            self._inside += 1
            self.gradient_bytes.leave([place])
            param.grad = grad = None
        return grad

    def _arrived(self, places: Sequence[int], grads: Sequence[Tensor], arrived: bool) -> None:
        """Updates parameters with gradients on the host, added to the sums of earlier ones."""
        here = []
        for place, grad in zip(places, grads, strict=True):
            if place in self.gradients:
                self.gradients.add([place], [grad])
                grad, arrived = self.gradients.take(place), True
            here.append(grad)
        try:
            self._update_on_host(tuple(places), here, self.inner.fire, arrived)
        finally:
            for place in places:
                self.sent.pop(place, None)

    def _update_on_host(
        self, places: tuple[int, ...], grads: Sequence[Tensor], update: Callable[..., None], arrived: bool = True
    ) -> None:  # fmt: skip
        self._write(places, lambda: update(places, grads, arrived))
        self._launches += 1

    def settle(self) -> None:
        """Returns when all updates on the host are done; raises the error of one."""
        if self.host is not None:
            self.host.settle()

    def stop(self) -> None:
        """Drops the updates on the host that have not begun, and returns when none runs."""
        if self.host is not None:
            self.host.stop()
            self.inner.forget_early()
            self.sent.clear()

    def _check_memory(self, places: Sequence[int]) -> None:
        """TensorError or StateMismatch where memory lacks that is read or written before an update looks at it."""
        if self.factor is None and self.journal is None and not isinstance(self.inner, PartitionedInner):
            return
        for place in places:
            param, name = self.parameter_index.params[place], self.parameter_index.names[place]
            check_memory(param, name)
            if param.grad is not None:
                check_gradient_memory(param.grad, name)
            if self.journal is not None:
                self.journal.check_memory(place)

    def fold(self, place: int, inside: bool = True) -> None:
        """Adds the gradient that a parameter has to its states, and frees it."""
        param = self.parameter_index.params[place]
        assert param.grad is not None
        self.open()
        if self.journal is not None:
            self.journal.keep([place])
        first = place not in self.folded
        self.folded[place] = None
        fold(self.inner, place, param.grad, first)
        param.grad = None
        self.gradient_bytes.leave([place], inside)

    def fire_folded(self, places: Sequence[int], inside: bool = True) -> None:
        """Updates parameters whose gradients are folded into their states."""
        if not places:
            return
        params = [self.parameter_index.params[i] for i in places]
        self._write(tuple(places), lambda: update_folded(self.inner, tuple(places), params))
        self._launches += 1
        self._inside += len(places) if inside else 0

    def _write(self, places: tuple[int, ...], update: Callable[[], Written]) -> Written:
        self.open()
        if self.journal is not None:
            self.journal.keep(places)
        try:
            written = update()
        except BaseException as error:
            # Who interrupts the program may do so after the kernel ran.
            if isinstance(error, PartialUpdate) or not isinstance(error, Exception):
                self.fired.update(dict.fromkeys(places))
            raise
        self.fired.update(dict.fromkeys(places))
        return written

    def take(self, place: int, update: Callable[[], int]) -> None:
        """Updates a parameter without its gradient; `update` returns the bytes of a gradient that it held at once."""
        self.took(place, self._write((place,), update))

    def took(self, place: int, largest: int) -> None:
        """Counts a parameter updated elsewhere, with at most `largest` bytes of its gradient held at once."""
        self.gradient_bytes.lend(largest)
        self.gradient_bytes.leave([place])
        self.fired[place] = None
        self._inside += 1
        self._launches += 1

    def close(self) -> Report:
        """Ends the step."""
        if self._frozen is not None:
            self.inner.close()
        return self.report()

    def abandon(self) -> None:
        """Ends the step without updates, or after they were taken back."""
        if self._frozen is not None:
            self.inner.abandon()

    def report(self) -> Report:
        """The report of the step so far."""
        account = self.gradient_bytes
        done = len(self.fired) + len(self.dropped)
        return Report(
            fired=self._inside - len(self.dropped), deferred=done - self._inside,
            untouched=len(self.parameter_index.params) - done, dropped=len(self.dropped), launches=self._launches,
            bytes_freed=account.freed, peak_gradient_bytes=account.peak, largest_gradient_bytes=account.largest,
            journal_bytes=self.journal.bytes if self.journal else 0,
        )  # fmt: skip

    def check_whole(self, gradients: bool = True) -> None:
        """PartialUpdate where this step ended in its middle; RulecError where `gradients` are not complete."""
        if self.poisoned:
            raise self._partial()
        if self.broken and gradients:
            raise RulecError(
                "a backward pass ended in its middle, and the gradients of this step's micro-batches are not complete: "
                "call zero_grad() and begin the step again"
            )

    def _partial(self) -> PartialUpdate:
        """The error of a step that ended in its middle."""
        written = {**self.fired, **self.folded}
        updated = self.parameter_index.named(written)
        pending = self.parameter_index.named(i for i in range(len(self.parameter_index.params)) if i not in written)
        remedy = "rollback()" if self.journal else "accept_partial() (rollback() needs journal=True)"
        return PartialUpdate(
            f"a backward pass ended in its middle: {_listed(updated)} were updated and {_listed(pending)} were not; "
            f"call {remedy} before anything else",
            updated, pending,
        )  # fmt: skip


def _listed(names: Iterable[str]) -> str:
    """Names in words, the first few of many."""
    listed = [*names]
    rest = f" and {len(listed) - 4} more" if len(listed) > 5 else ""
    return ", ".join(listed[:4] if rest else listed) + rest or "no parameters"


@dataclass
class _Entry:
    param: Tensor
    held: Mapping[str, Any]


class Journal:
    """Copies of parameters and of what an optimizer remembers of them, taken before they fire."""

    def __init__(self, inner: Inner, parameter_index: ParameterIndex) -> None:
        self._inner, self._params, self._names = inner, parameter_index.params, parameter_index.names
        self._entries: dict[int, _Entry] = {}
        self.bytes = 0

    def keep(self, places: Iterable[int]) -> None:
        """Copies these parameters and their states before an update writes them.

        TensorError or StateMismatch where one lacks memory.
        """
        with plain_memory():
            for place in places:
                if place in self._entries:
                    continue
                self.check_memory(place)
                held = {key: _copy(value) for key, value in self._inner.buffers(place).items()}
                entry = self._entries[place] = _Entry(self._params[place].detach().clone(), held)
                self.bytes += sum(x.nbytes for x in (entry.param, *held.values()) if isinstance(x, Tensor))

    def check_memory(self, place: int) -> None:
        """TensorError or StateMismatch where a parameter or a state of it lacks memory."""
        name = self._names[place]
        check_memory(self._params[place], name)
        for key, value in self._inner.buffers(place).items():
            check_state_memory(value, f"{key} of {name}")

    def restore(self) -> None:
        """Writes everything back; what had no state before has none.

        TensorError or StateMismatch, and nothing written, where a parameter or a state lacks memory.
        """
        for place in self._entries:
            self.check_memory(place)
        with plain_memory():
            for place, entry in self._entries.items():
                self._params[place].copy_(entry.param)
                now = self._inner.buffers(place)
                for key, value in entry.held.items():
                    if isinstance(value, Tensor) and isinstance(now.get(key), Tensor):
                        now[key].copy_(value)
                    elif isinstance(now, dict):
                        now[key] = value
        for place, entry in self._entries.items():
            if not entry.held:
                self._inner.forget(self._params[place])


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def check_folds(inner: Inner) -> None:
    """RuleError where a gradient cannot be added to the states of a rule, part by part."""
    if isinstance(inner, ForeignInner):
        raise RuleError(
            f"what {type(inner.optimizer).__name__} does with a gradient is not known here: use accumulate='sum'"
        )
    if inner.late:
        raise RuleError(
            "gradients of DTensors are folded into states by rules of single elements alone: use accumulate='sum'"
        )
    for rule in rules_of(inner.optimizer):
        accumulates = rule.analysis.accumulates
        if not (accumulates and accumulates.adds):
            raise RuleError(f"{rule.name} cannot fold gradients into its states ({accumulates}): use accumulate='sum'")


def fold(inner: Inner, place: int, grad: Tensor, first: bool) -> None:
    """Adds a part of a parameter's gradient to its states; with the `first` they take the step's decay, once."""
    _run(inner, (place,), [grad], "first" if first else "more")


def update_folded(inner: Inner, places: tuple[int, ...], params: Sequence[Tensor]) -> None:
    """Steps parameters whose gradients are folded into their states."""
    _run(inner, places, [p.detach() for p in params], "last")  # stand-ins for gradients, which are not read


def _run(inner: Inner, places: tuple[int, ...], grads: Sequence[Tensor], phase: Phase) -> None:
    if isinstance(inner, RuleInner):
        inner.fire_part(places, grads, _way(phase), phase == "last")
    if isinstance(inner, PartitionedInner):
        for each, theirs, chosen in inner.split(places):
            _run(each, theirs, [grads[i] for i in chosen], phase)


@functools.cache
def _way(phase: Phase) -> Callable[[RuleData], RuleData]:
    return functools.partial(phase_rule, phase=phase)
