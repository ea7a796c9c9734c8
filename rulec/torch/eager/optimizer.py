"""`EagerUpdate`: an optimizer that runs inside the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from rulec.errors import HyperError, RulecError
from rulec.runtime.turns import Turns, in_turn
from rulec.torch.eager.arrivals import Arrivals
from rulec.torch.eager.distributed import Reducer
from rulec.torch.eager.epilogue import Epilogue
from rulec.torch.eager.epilogue_launch import Way
from rulec.torch.eager.factor import Factor
from rulec.torch.eager.fold import check_folds
from rulec.torch.eager.hooks import Hooks
from rulec.torch.eager.inner import Inner, Runs, inner_around, inner_of
from rulec.torch.eager.measure import Measuring
from rulec.torch.eager.open_step import OpenStep
from rulec.torch.eager.report import Report
from rulec.torch.eager.roster import Roster, parameters_of, patterns_of
from rulec.torch.eager.scope import Scope
from rulec.torch.eager.window import Accumulating, Finishing, Firing, Folding, Window


class EagerUpdate(Optimizer, Turns):
    """Updates each parameter inside the backward pass, as soon as its gradient is complete, and frees the gradient.

        opt = rulec.torch.EagerUpdate(model, "adamw", lr=3e-4)
        with opt.backward():
            loss.backward()
        opt.step()

    The result is that of the optimizer without it, bit for bit, or an error. `model` is a module or what torch.optim
    takes; `rule` a Rule, its name or path, a `rulec.partition`, or, with `scope`, a class of torch optimizers or
    whatever makes one of parameters. All keywords that are not these are the optimizer's:

    - `only`: patterns of the names of parameters that are updated early (`"layers.*"`); the others are in `step()`.
    - `contributions=1` says that every gradient arrives once in a step, so that the first step can be early already; by
      default the first step is watched.
    - `journal` keeps the old tensors of a step, so that `rollback()` can take it back.
    - `max_grad_norm` clips gradients as `clip_grad_norm_` does, in two passes: see `measure`.
    - `accumulate="fold"` adds the gradients of micro-batches to the optimizer's states, where its rule is proved to
      allow that, so that none is kept: equal but for rounding.
    - `epilogue` updates the weights of linear layers tile by tile as their gradients are computed, which are never
      there as a whole, where the rule is elementwise; `"kernel"` and `"tiles"` say how, `True` as is fastest. Where
      parameters or groups are given, it is the model.
    - `local=True` says that every one of several processes trains by itself; otherwise `model` must be a
      DistributedDataParallel, or a module after `fully_shard`, whose gradients are used once they are reduced.

    Groups, states, checkpoints and schedulers are those of the one optimizer inside, `inner`. Errors are RulecError:
    RuleError for a rule that needs all gradients at once, PartialUpdate where a backward pass ended in its middle.
    """

    def __init__(
        self, model: Any, rule: Runs, *, only: str | Sequence[str] | None = None, scope: Scope | None = None,
        contributions: int | None = None, journal: bool = False, max_grad_norm: float | None = None,
        accumulate: Literal["sum", "fold"] = "sum", epilogue: bool | Way | nn.Module = False, local: bool = False,
        **keywords: Any,
    ) -> None:  # fmt: skip
        self._complete = False
        if contributions is not None and (type(contributions) is not int or contributions < 1):
            raise HyperError(f"contributions={contributions!r} must be how often each gradient arrives, or None")
        self._options: dict[str, Any] = {"only": patterns_of(only), "scope": scope, "contributions": contributions}
        self._options |= {"journal": journal, "accumulate": accumulate, "local": local}
        self.max_grad_norm = max_grad_norm
        params, names = parameters_of(model)
        inner = inner_of(rule, params, names, scope, keywords)
        self._begin(inner, names, model)
        if epilogue is not False:
            self._reducer.check_epilogue()
            self._epilogue: Epilogue | None = Epilogue(self, inner, model, epilogue)

    def _begin(self, inner: Inner, names: dict[int, str], model: Any = None) -> None:
        """Sets up everything around the optimizer inside, at the beginning or from a copy."""
        self._complete = False
        self._inner, self._names = inner, names
        self._folds = _folds(self._options["accumulate"], self.max_grad_norm, inner)
        self._arrivals = Arrivals(self._options["contributions"])
        self._step: OpenStep | None = None
        self._window: Window | None = None
        self._epilogue = None
        self._last, self._closed, self._gave_up = Report(), False, False
        super().__init__(self.param_groups, self.inner.defaults)
        self._complete = True
        self._roster = Roster(self.param_groups, self._names, self._options["only"])
        self._reducer: Reducer = Reducer(model, self._options["local"])
        self._hooks = Hooks(self)
        self._reducer.attach(self)
        self._set_hooks()

    # What the optimizer inside has

    @property
    def inner(self) -> Any:
        """The optimizer that is run: the one that would be used without eager updates."""
        return self._inner.optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the optimizer inside."""
        found: list[dict[str, Any]] = self.inner.param_groups
        return found

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        if self._complete:
            self.inner.param_groups = groups

    @property
    def state(self) -> Any:
        """The states of the optimizer inside."""
        return self.inner.state

    @state.setter
    def state(self, state: Any) -> None:
        if self._complete:
            self.inner.state = state

    @in_turn
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group; the next step is watched for how often its gradients arrive."""
        if not self._complete:
            return
        self._check_between("add_param_group()")
        self._names.update(parameters_of([param_group])[1])
        self.inner.add_param_group(param_group)
        self._refresh()

    # Steps

    @contextmanager
    def backward(self, last_microbatch: bool = True) -> Iterator[None]:
        """The scope of a step's backward pass, in which parameters are updated.

        With `last_microbatch=False` gradients are added up and nothing is updated; the last backward pass of the step
        updates with the sum. In one scope there may be several backward passes, of parts of the model or of the loss.
        """
        step = self._begin_backward(last_microbatch)
        yield from self._run()
        if last_microbatch and step.factor is not None and not step.factor.finite:
            self._last, self._step, self._gave_up = step.close(), None, True

    @in_turn
    def _begin_backward(self, last_microbatch: bool) -> OpenStep:
        """Opens the scope of a backward pass."""
        step = self._enter()
        if self.max_grad_norm is not None and step.factor is None:
            raise RulecError(
                "max_grad_norm needs the norm of all gradients before the first update: run the backward pass in "
                "`with opt.measure():` first, with retain_graph=True, and then in `with opt.backward():`"
            )
        if last_microbatch:
            step.open()
            self._window = (Finishing if self._folds else Firing)(step, self._arrivals)
        else:
            self._window = Folding(step) if self._folds else Accumulating(step)
        return step

    @contextmanager
    def measure(self, scaler: GradScaler | None = None) -> Iterator[Factor]:
        """The scope of the first of two passes: gradients are looked at and freed, and nothing is updated.

            with opt.measure() as seen:
                loss.backward(retain_graph=True)
            with opt.backward():
                loss.backward()

        The second pass updates with gradients clipped to `max_grad_norm`, where that is set, and unscaled, where a
        `scaler` is given; it updates nothing where `seen.finite` is false, as after `scaler.step`. `seen.norm` is the
        norm before clipping. Afterwards come `opt.step()` and `scaler.update()`.
        """
        scaler = scaler if scaler is not None and scaler.is_enabled() else None
        if self.max_grad_norm is None and scaler is None:
            raise RulecError("there is nothing to measure: set max_grad_norm, or give a GradScaler that is enabled")
        factor = Factor(self.max_grad_norm, scaler)
        self._begin_measuring(factor)
        yield from self._run(factor)
        factor.all_taken(self)

    @in_turn
    def _begin_measuring(self, factor: Factor) -> None:
        step = self._enter()
        if step.factor is not None:
            raise RulecError("this step was measured already: run its second pass in opt.backward()")
        if any(p.grad is not None for p in self._roster.params):
            raise RulecError(
                "measure() needs whole gradients, and there are some of earlier backward passes: call zero_grad(), and "
                "accumulate with the sum of losses instead of micro-batches"
            )
        self._window = Measuring(step, self._arrivals, factor)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What torch's GradScaler asks before a step."""
        if self._gave_up or (self._step is not None and self._step.factor is not None and self._step.factor.scales):
            return False
        raise RulecError(
            "a GradScaler would unscale gradients after they were used: run the backward pass twice, first in "
            "`with opt.measure(scaler):` with retain_graph=True, then in `with opt.backward():`, and call opt.step()"
        )

    def _enter(self) -> OpenStep:
        """Begins a backward pass of the step that is open, or of a new one."""
        if self._closed:
            raise RulecError("this eager optimizer was closed: call loss.backward() and step() as without it")
        if self._window is not None:
            raise RulecError("opt.backward() is open already: it cannot be entered again inside itself")
        self._check_whole()
        if self._step is not None and self._step.over:
            raise RulecError(
                "this step's backward pass is over: call step() before the next, or give all but the last "
                "last_microbatch=False"
            )
        self._refresh()
        self._gave_up = False
        self._reducer.check(self._roster)
        if self._step is not None:
            self._step.check_numbers()
        else:
            self._step = OpenStep(self._inner, self._roster, self._options["journal"])
        return self._step

    def _run(self, shown: Any = None) -> Iterator[Any]:
        """The scope that was opened."""
        window = self._window
        assert window is not None
        try:
            yield shown
            window.check_complete()
            self._reducer.check_reduced(self._roster, window)
            with self._turn:
                window.end()
        except BaseException:
            self._fail()
            raise
        finally:
            self._window = None
            window.close()
            if self._epilogue is not None:
                self._epilogue.clear()

    def _fail(self) -> None:
        """A backward pass ended in its middle."""
        step = self._step
        assert step is not None
        if step.begun:
            step.poisoned = True
        elif step.accumulated:
            step.broken = True
        else:
            self._drop()
            self._step = None

    def _drop(self) -> None:
        """Leaves no gradient."""
        for param in self._roster.params:
            param.grad = None

    def _arrived(self, place: int) -> None:
        if self._window is None:
            raise RulecError(
                f"a gradient of {self._roster.names[place]} arrived outside of `with opt.backward():`, where it is not "
                f"known whether it is complete: put loss.backward() inside, and call zero_grad() to be rid of this one"
            )
        with self._turn:  # autograd has a thread for every device
            if self._hooks.put_last(place):
                self._window.postpone(place)
            if self._epilogue is None or not self._epilogue.arrived(self._window, place):
                self._window.arrive(place)

    @in_turn
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates the parameters that have a gradient still, and closes the step."""
        if closure is not None:
            raise RulecError(
                "step() of an eager optimizer takes no closure: the backward pass belongs in opt.backward()"
            )
        if self._window is not None:
            raise RulecError("step() was called inside of opt.backward(): call it after the scope")
        self._check_whole()
        self._refresh()
        self._roster.unrelease()
        rest = [i for i, p in enumerate(self._roster.params) if p.grad is not None]
        if self._step is None and not rest:
            return
        step = self._step or OpenStep(self._inner, self._roster, self._options["journal"])
        step.check_once(rest)
        step.check_numbers()
        step.open()
        try:
            self._update_rest(step, rest)
        except BaseException:
            self._step = step
            self._fail()
            raise
        self._last, self._step = step.close(), None

    def _update_rest(self, step: OpenStep, rest: Sequence[int]) -> None:
        """Updates the parameters that were not updated in the backward pass, and have gradients at these places."""
        if not self._folds:
            step.fire(rest, inside=False)
            return
        for place in rest:
            step.fold(place, inside=False)
        step.fire_folded([place for place in step.folded if place not in step.fired], inside=False)

    def _refresh(self) -> None:
        """Takes over which parameters there are, and which of them are trained."""
        if not self._roster.is_of(self.param_groups):
            self._check_between("another set of parameters")
            self._roster = Roster(self.param_groups, self._names, self._options["only"])
            self._arrivals = Arrivals(self._options["contributions"])
        if not self._closed:
            self._set_hooks()

    def _set_hooks(self) -> None:
        self._hooks.outside = self._reducer.outside(self._roster)
        self._hooks.set(self._roster.params)

    @in_turn
    def relearn(self) -> None:
        """Has the next step watched for how often gradients arrive, and deferred, as the first one was."""
        self._arrivals.forget()

    @in_turn
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Takes the gradients away, or makes them zero, where a backward pass has updated nothing yet."""
        if self._window is not None:
            raise RulecError(
                "zero_grad() was called inside of opt.backward(): gradients are freed there as they are used"
            )
        self._check_whole(gradients=False)
        if self._step is not None and self._step.begun:
            raise RulecError("zero_grad() was called between the backward pass and step(): call step() first")
        self._step = None
        self.inner.zero_grad(set_to_none)

    def report(self) -> Report:
        """What the step did, the one that is open or else the last."""
        return self._last if self._step is None else self._step.report()

    # A step that ended in its middle

    def _check_whole(self, gradients: bool = True) -> None:
        """PartialUpdate where a step ended in its middle; RulecError where gradients did."""
        step = self._step
        if step is not None and step.poisoned:
            raise step.partial()
        if step is not None and step.broken and gradients:
            raise RulecError(
                "a backward pass ended in its middle, and the gradients of this step's micro-batches are not complete: "
                "call zero_grad() and begin the step again"
            )

    def _check_between(self, what: str) -> None:
        """RulecError inside a step that has updated something."""
        self._check_whole(gradients=False)
        if self._window is not None or (self._step is not None and self._step.begun):
            raise RulecError(
                f"{what} in the middle of a step, of which parameters are updated already: call step() first"
            )

    @in_turn
    def rollback(self) -> None:
        """Puts parameters and states back to before the step that ended in its middle, and drops its gradients.

        RulecError without `journal=True`.
        """
        step = self._partial_step("rollback()")
        if step.journal is None:
            raise RulecError(
                "rollback() needs the old tensors, which are kept with journal=True: call accept_partial()"
            )
        step.journal.restore()
        self._end_partial()

    @in_turn
    def accept_partial(self) -> None:
        """Goes on with the parameters as they are: some have taken the step, and the others never will."""
        step = self._partial_step("accept_partial()")
        self._last = step.close()
        self._end_partial()

    def _partial_step(self, what: str) -> OpenStep:
        if self._step is None or not self._step.poisoned:
            raise RulecError(f"{what} is for a step that ended in its middle, and none did")
        return self._step

    def _end_partial(self) -> None:
        self._step = None
        self._drop()
        self._arrivals.forget()

    # Checkpoints

    @in_turn
    def state_dict(self) -> dict[str, Any]:
        """The state of the optimizer inside, as that saves it, in the order of parameters."""
        self._check_between("state_dict()")
        found: dict[str, Any] = self.inner.state_dict()
        states = found["state"]
        if all(type(key) is int for key in states):
            return {**found, "state": {key: states[key] for key in sorted(states)}}
        return found

    @in_turn
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from a `state_dict()`, of this or of the optimizer without eager updates."""
        self._check_between("load_state_dict()")
        self.inner.load_state_dict(state_dict)
        self._step = None

    @in_turn
    def __getstate__(self) -> dict[str, Any]:
        """What a copy is made of; it has hooks of its own, on its own parameters."""
        self._check_between("a copy")
        if self._epilogue is not None:
            raise RulecError("an eager optimizer with epilogue= belongs to its model: copy its state_dict() instead")
        kept = {"_options": self._options, "max_grad_norm": self.max_grad_norm}
        return {**kept, "inner": self.inner, "names": self._roster.names, "closed": self._closed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._options, self.max_grad_norm = state["_options"], state["max_grad_norm"]
        params = [p for group in state["inner"].param_groups for p in group["params"]]
        names = {id(p): name for p, name in zip(params, state["names"], strict=True)}
        self._begin(inner_around(state["inner"], self._options["scope"]), names)
        if state["closed"]:
            self.close()

    # The end

    @in_turn
    def close(self) -> None:
        """Takes the hooks away: from here on this is the optimizer inside, stepped after the backward pass."""
        self._check_between("close()")
        self._hooks.remove_all()
        if self._epilogue is not None:
            self._epilogue.close()
        self._closed = True


def _folds(accumulate: str, max_grad_norm: float | None, inner: Inner) -> bool:
    """Whether gradients are folded into states; HyperError or RuleError where they cannot be."""
    if accumulate not in ("sum", "fold"):
        raise HyperError(f"accumulate={accumulate!r} must be 'sum' or 'fold'")
    if accumulate == "fold" and max_grad_norm is not None:
        raise HyperError(
            "gradients that are folded into states cannot be clipped by the norm of their sum: leave one out"
        )
    if accumulate == "fold":
        check_folds(inner)
    return accumulate == "fold"
