"""The backward passes of an eager optimizer: the step they belong to, and the hooks that report gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from threading import RLock
from typing import Any

import torch

from rulec.errors import RulecError
from rulec.torch.eager.distributed import Reducer
from rulec.torch.eager.epilogue import Epilogue
from rulec.torch.eager.grad_norm import Factor
from rulec.torch.eager.hooks import Arrivals, Hooks
from rulec.torch.eager.inner import Inner
from rulec.torch.eager.on_gradient import Accumulating, BackwardHandler, Counting, Finishing, Firing, Folding
from rulec.torch.eager.on_host import HostUpdates
from rulec.torch.eager.open_step import OpenStep
from rulec.torch.eager.params import ParameterIndex, Report
from rulec.torch.tensors.memory import check_gradient_memory


@dataclass(frozen=True)
class EagerOptions:
    """The keywords of an `EagerUpdate` that hold for all its steps."""

    only: Sequence[str] | None
    scope: Any
    contributions: int | None
    journal: bool
    folds: bool
    local: bool


class Passes:
    """The passes over the parameters of an optimizer, whose `names` are by identity.

    `step` is the open step, and `handler` the running backward pass; None where there is none. `last` is the report of
    the last step. Callers have the `turn`, except where gradients arrive.
    """

    def __init__(self, inner: Inner, names: dict[int, str], options: EagerOptions, model: Any, turn: RLock) -> None:
        self.inner, self.names, self.options, self._lock = inner, names, options, turn
        self.step: OpenStep | None = None
        self.handler: BackwardHandler | None = None
        self.epilogue: Epilogue | None = None
        self.last, self.closed, self.gave_up = Report(), False, False
        self._reset()
        self.reducer = Reducer(model, options.local)
        self._hooks = Hooks(self)
        self.reducer.attach(self)
        self._set_hooks()

    # Parameters

    def _reset(self) -> None:
        """Begins anew with the parameters that the groups have now."""
        self.parameter_index = ParameterIndex(self._groups, self.names, self.options.only, self.inner.late)
        offloads = self.inner.offload is not None and not self.closed
        self.host = HostUpdates(self.inner, self.parameter_index.params) if offloads else None
        self.arrivals = Arrivals(self.options.contributions)

    @property
    def _groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self.inner.optimizer.param_groups
        return groups

    def refresh(self) -> None:
        """Takes over the parameters of the groups, and which of them are trained."""
        if not self.parameter_index.is_of(self._groups):
            self.check_between("another set of parameters")
            self._reset()
        if not self.closed:
            self._set_hooks()

    def _set_hooks(self) -> None:
        self._hooks.outside = self.reducer.outside(self.parameter_index)
        self._hooks.set(self.parameter_index.params)

    def close(self) -> None:
        """Takes the hooks away."""
        self.check_between("close()")
        self._hooks.remove_all()
        if self.epilogue is not None:
            self.epilogue.close()
        self.closed, self.host = True, None

    # Backward passes

    def enter(self) -> OpenStep:
        """Begins a backward pass of the step that is open, or of a new one."""
        if self.closed:
            raise RulecError("this eager optimizer was closed: call loss.backward() and step() as without it")
        if self.handler is not None:
            raise RulecError("opt.backward() is open already: it cannot be entered again inside itself")
        self.check_whole()
        if self.step is not None and self.step.over:
            raise RulecError(
                "this step's backward pass is over: call step() before the next, or give all but the last "
                "last_microbatch=False"
            )
        self.refresh()
        self.gave_up = False
        self.reducer.check(self.parameter_index)
        if self.step is not None:
            self.step.check_numbers()
        else:
            self.step = self._new_step()
        return self.step

    def _new_step(self) -> OpenStep:
        return OpenStep(self.inner, self.parameter_index, self.options.journal, self.host)

    def begin_backward(self, last_microbatch: bool, clips: bool) -> OpenStep:
        """Opens the handler of a backward pass; `clips` says that it needs the norm of all gradients."""
        step = self.enter()
        if clips and step.factor is None:
            raise RulecError(
                "max_grad_norm needs the norm of all gradients before the first update: run the backward pass in "
                "`with opt.measure():` first, with retain_graph=True, and then in `with opt.backward():`"
            )
        if last_microbatch:
            self.inner.compare()
            step.open()
            if self.host is not None:
                self.host.look()
            self.handler = (Finishing if self.options.folds else Firing)(step, self.arrivals)
        else:
            self.inner.prepare()
            if self.host is not None:
                self.host.look()
            self.handler = Folding(step) if self.options.folds else Accumulating(step)
        return step

    def begin_measuring(self, factor: Factor) -> None:
        """Opens the handler of the first of two backward passes."""
        step = self.enter()
        if step.factor is not None:
            raise RulecError("this step was measured already: run its second pass in opt.backward()")
        if step.gradients or any(p.grad is not None for p in self.parameter_index.params):
            raise RulecError(
                "measure() needs whole gradients, and there are some of earlier backward passes: call zero_grad(), and "
                "accumulate with the sum of losses instead of micro-batches"
            )
        self.handler = Measuring(step, self.arrivals, factor)

    def run(self, shown: Any = None) -> Iterator[Any]:
        """The scope of the handler that was opened."""
        handler = self.handler
        assert handler is not None
        try:
            yield shown
            handler.check_complete()
            self.reducer.check_reduced(self.parameter_index, handler)
            with self._lock:
                handler.end()
        except BaseException:
            self._fail()
            raise
        finally:
            self.handler = None
            handler.close()
            if self.epilogue is not None:
                self.epilogue.clear()

    def arrived(self, place: int) -> None:
        """The gradient of the parameter with this index arrived, all of it or a contribution."""
        if self.handler is None:
            raise RulecError(
                f"a gradient of {self.parameter_index.names[place]} arrived "
                "outside of `with opt.backward():`, where it is not "
                f"known whether it is complete: put loss.backward() inside, and call zero_grad() to be rid of this one"
            )
        with self._lock:  # autograd has a thread for every device
            if self._hooks.put_last(place):
                self.handler.postpone(place)
            if self.epilogue is None or not self.epilogue.arrived(self.handler, place):
                self.handler.arrive(place)

    # The end of a step

    def end_step(self) -> None:
        """Updates the parameters that have a gradient still, and closes the step."""
        try:
            ready = self._last_part()
        except BaseException:
            self.inner.refuse()
            raise
        if ready is None:
            return
        step, rest = ready
        try:
            self._update_rest(step, rest)
        except BaseException:
            self.step = step
            self._fail()
            raise
        self.last, self.step = step.close(), None

    def _last_part(self) -> tuple[OpenStep, list[int]] | None:
        """The step before its end, and the indices of gradients that are still held; None without any update."""
        if self.handler is not None:
            raise RulecError("step() was called inside of opt.backward(): call it after the scope")
        self.check_whole()
        self.refresh()
        self.parameter_index.unrelease()
        self.inner.compare()
        kept = () if self.step is None else self.step.gradients
        rest = [i for i, p in enumerate(self.parameter_index.params) if p.grad is not None or i in kept]
        if self.step is None and not rest and not self.inner.late:
            return None
        step = self.step or self._new_step()
        step.check_once(rest)
        step.check_numbers()
        step.open()
        return step, rest

    def _update_rest(self, step: OpenStep, rest: Sequence[int]) -> None:
        """Updates the parameters with these indices by the gradients of the backward pass."""
        if not self.options.folds:
            step.fire(rest, inside=False)
            return
        for place in rest:
            step.fold(place, inside=False)
        step.fire_folded([place for place in step.folded if place not in step.fired], inside=False)

    def give_up(self, step: OpenStep) -> None:
        """Closes a step whose gradients were infinite: it updates nothing."""
        self.last, self.step, self.gave_up = step.close(), None, True

    def forget_gradients(self) -> None:
        """Ends a step without updates; RulecError where there were some."""
        if self.handler is not None:
            raise RulecError(
                "zero_grad() was called inside of opt.backward(): gradients are freed there as they are used"
            )
        self.check_whole(gradients=False)
        if self.step is not None and self.step.begun:
            raise RulecError("zero_grad() was called between the backward pass and step(): call step() first")
        self.parameter_index.unrelease()
        if self.step is not None:
            self.step.stop()
            self.step.abandon()
        self.step = None

    # A step that ended in its middle

    def _fail(self) -> None:
        """Marks the step whose backward pass ended in its middle; without updates and sums it is forgotten."""
        step = self.step
        assert step is not None
        try:
            step.stop()
        finally:  # also where another interrupt comes
            if step.begun:
                step.poisoned = True
            elif step.accumulated:
                step.broken = True
            else:
                self._drop()
                self.step = None
                step.abandon()

    def _drop(self) -> None:
        """Leaves no gradient."""
        for param in self.parameter_index.params:
            param.grad = None

    def check_whole(self, gradients: bool = True) -> None:
        """PartialUpdate where a step ended in its middle; RulecError where gradients did."""
        if self.step is not None:
            self.step.check_whole(gradients)

    def check_between(self, action: str) -> None:
        """RulecError inside a step that has updated something."""
        self.check_whole(gradients=False)
        if self.handler is not None or (self.step is not None and self.step.begun):
            raise RulecError(
                f"{action} in the middle of a step, of which parameters are updated already: call step() first"
            )

    def partial_step(self, action: str) -> OpenStep:
        """The step that ended in its middle; RulecError where none did."""
        if self.step is None or not self.step.poisoned:
            raise RulecError(f"{action} is for a step that ended in its middle, and none did")
        return self.step

    def end_partial(self) -> None:
        """Ends a step that ended in its middle; the next one is watched."""
        self.step = None
        self._drop()
        self.arrivals.forget()


class Measuring(Counting):
    """The first of two passes: every gradient is looked at and freed."""

    def __init__(self, step: OpenStep, arrivals: Arrivals, factor: Factor) -> None:
        super().__init__(step, arrivals)
        self._factor = factor

    def _complete(self, place: int) -> None:
        param = self._index.params[place]
        if param.grad is not None:
            check_gradient_memory(param.grad, self._index.names[place])
            with torch.no_grad():
                self._factor.take(place, param.grad)
            param.grad = None
            self.step.gradient_bytes.leave([place], inside=False)

    def _again(self, place: int, count: int) -> None:
        raise RulecError(
            f"the gradient of {self._index.names[place]} arrived {count} times in opt.measure(), where {count - 1} "
            f"were expected: nothing was updated; call relearn() and measure again"
        )

    def end(self) -> None:
        """Looks at the gradients whose last arrival was not known."""
        for place in range(len(self._index.params)):
            self._complete(place)
        self.step.factor = self._factor
