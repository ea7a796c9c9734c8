"""`EagerUpdate`: an optimizer that runs inside the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from rulec.errors import HyperError, RulecError
from rulec.locks import Lockable, synchronized
from rulec.runtime.statistics import StepStatistics
from rulec.torch.eager.backward import EagerOptions, Passes
from rulec.torch.eager.epilogue import Epilogue
from rulec.torch.eager.epilogue_tiles import Way
from rulec.torch.eager.grad_norm import Factor
from rulec.torch.eager.inner import Inner
from rulec.torch.eager.on_host import check_offload
from rulec.torch.eager.open_step import check_folds
from rulec.torch.eager.params import Report, parameters_of, patterns_of
from rulec.torch.eager.scope import Scope
from rulec.torch.eager.wrapped import Runs, inner_around, inner_of
from rulec.torch.groups.routes import names_of
from rulec.torch.optimizer import RuleOptimizer
from rulec.torch.partitioned import Partitioned


class EagerUpdate(Optimizer, Lockable):
    """Updates each parameter inside the backward pass, as soon as its gradient is complete, and frees the gradient.

        opt = rulec.torch.EagerUpdate(model, "adamw", lr=3e-4)
        with opt.backward():
            loss.backward()
        opt.step()

    The result is that of the optimizer without it, bit for bit, or an error. `model` is a module or what torch.optim
    takes; `rule` a Rule, its name or path, a `rulec.partition`, or, with `scope`, a class of torch optimizers or
    whatever makes one of parameters. All other keywords are the optimizer's:

    - `only`: patterns of the names of parameters that are updated early (`"layers.*"`); the others are in `step()`.
    - `contributions=1` says that every gradient arrives once in a step: the first step can be early already. By default
      the first step is watched.
    - `journal` keeps the old tensors of a step, so that `rollback()` can take it back.
    - `max_grad_norm` clips gradients as `clip_grad_norm_` does, in two passes: see `measure`.
    - `accumulate="fold"` adds the gradients of micro-batches to the optimizer's states, where its rule is proved to
      allow it, and keeps none: equal except rounding.
    - `epilogue` updates the weights of linear layers tile by tile as their gradients are computed, which are never
      there as a whole, where the rule is elementwise; `"kernel"` and `"tiles"` say how, `True` as is fastest. If
      parameters or groups are given, it is the model.
    - `local=True` says that each of several processes trains by itself; otherwise `model` must be a
      DistributedDataParallel, or a module after `fully_shard`, and gradients are used once they are reduced.
    - `offload="step"`, of rules, keeps states and the step on the host: gradients leave the device as they are
      complete. Rules that need all of them begin their step then, such as the norm of a clip, and end it in `step()`.
      It goes without `journal`, `accumulate="fold"` and `epilogue`.

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
        patterns = patterns_of(only)
        self.max_grad_norm = max_grad_norm
        params, names = parameters_of(model)
        inner = inner_of(rule, params, names, scope, keywords)
        folds = _folds(accumulate, max_grad_norm, inner)
        check_offload(inner, journal=journal, folds=folds, epilogue=epilogue is not False)
        self._begin(inner, names, EagerOptions(patterns, scope, contributions, journal, folds, local), model)
        if epilogue is not False:
            self._passes.reducer.check_epilogue()
            self._passes.epilogue = Epilogue(self._passes, inner, model, epilogue)

    def _begin(self, inner: Inner, names: dict[int, str], options: EagerOptions, model: Any = None) -> None:
        """Sets up everything around the optimizer inside, at the beginning or from a copy."""
        self._complete, self._inner = False, inner
        super().__init__(self.param_groups, self.inner.defaults)
        self._complete = True
        self._passes = Passes(inner, names, options, model, self._lock)

    # Of the wrapped optimizer

    @property
    def inner(self) -> Any:
        """The optimizer inside, as it would be without eager updates."""
        return self._inner.optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the optimizer inside."""
        groups: list[dict[str, Any]] = self.inner.param_groups
        return groups

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

    @synchronized
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group; the next step is watched for how often its gradients arrive."""
        if not self._complete:
            return
        self._passes.check_between("add_param_group()")
        self._passes.names.update(parameters_of([param_group])[1])
        self.inner.add_param_group(param_group)
        self._passes.refresh()

    @synchronized
    def statistics(self) -> StepStatistics:
        """The statistics of the last step, by the names of the model: see `RuleOptimizer.statistics`."""
        inner = self.inner
        if not isinstance(inner, RuleOptimizer | Partitioned):
            raise RulecError(f"{type(inner).__name__} is not of rulec, and measures no statistics")
        params = [param for group in inner.param_groups for param in group["params"]]
        pairs = zip(names_of(inner.param_groups), params, strict=True)
        return inner.statistics().renamed({name: self._passes.names.get(id(param), name) for name, param in pairs})

    # Steps

    @contextmanager
    def backward(self, last_microbatch: bool = True) -> Iterator[None]:
        """The scope of a step's backward pass, in which parameters are updated.

        With `last_microbatch=False` gradients are added up and nothing is updated; the last backward pass of the step
        updates with the sum. In one scope there may be several backward passes, of parts of the model or of the loss.
        """
        with self._lock:
            step = self._passes.begin_backward(last_microbatch, self.max_grad_norm is not None)
        yield from self._passes.run()
        if last_microbatch and step.factor is not None and not step.factor.finite:
            self._passes.give_up(step)

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
        with self._lock:
            self._passes.begin_measuring(factor)
        yield from self._passes.run(factor)
        factor.all_taken(self)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Answers torch's GradScaler before a step."""
        step = self._passes.step
        if self._passes.gave_up or (step is not None and step.factor is not None and step.factor.scales):
            return False
        raise RulecError(
            "a GradScaler would unscale gradients after they were used: run the backward pass twice, first in "
            "`with opt.measure(scaler):` with retain_graph=True, then in `with opt.backward():`, and call opt.step()"
        )

    @synchronized
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates the parameters that have a gradient still, and closes the step."""
        if closure is not None:
            raise RulecError(
                "step() of an eager optimizer takes no closure: the backward pass belongs in opt.backward()"
            )
        if self._passes.step is None:
            self._passes.inner.compare()
        if self._passes.step is None and asks_for_states(self.inner):
            self.inner.step()
            return
        self._passes.end_step()

    @synchronized
    def relearn(self) -> None:
        """Has the next step watched for how often gradients arrive, and deferred, as the first one was."""
        self._passes.arrivals.forget()

    @synchronized
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Takes the gradients away, or makes them zero, where a backward pass has updated nothing yet."""
        self._passes.forget_gradients()
        self.inner.zero_grad(set_to_none)

    def report(self) -> Report:
        """The report of the open step, or else of the last."""
        step = self._passes.step
        return self._passes.last if step is None else step.report()

    @synchronized
    def rollback(self) -> None:
        """Puts parameters and states back to before the step that ended in its middle, and drops its gradients.

        RulecError without `journal=True`.
        """
        step = self._passes.partial_step("rollback()")
        if step.journal is None:
            raise RulecError(
                "rollback() needs the old tensors, which are kept with journal=True: call accept_partial()"
            )
        step.journal.restore()
        step.abandon()
        self._passes.end_partial()

    @synchronized
    def accept_partial(self) -> None:
        """Goes on with the parameters as they are: some have taken the step, and the others never will."""
        self._passes.last = self._passes.partial_step("accept_partial()").close()
        self._passes.end_partial()

    # Checkpoints

    @synchronized
    def state_dict(self) -> dict[str, Any]:
        """The state of the optimizer inside, as that saves it, in the order of parameters."""
        self._passes.check_between("state_dict()")
        saved: dict[str, Any] = self.inner.state_dict()
        states = saved["state"]
        if all(type(key) is int for key in states):
            return {**saved, "state": {key: states[key] for key in sorted(states)}}
        return saved

    @synchronized
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from a `state_dict()`, of this or of the optimizer without eager updates."""
        self._passes.check_between("load_state_dict()")
        self.inner.load_state_dict(state_dict)
        self._passes.step = None

    @synchronized
    def __getstate__(self) -> dict[str, Any]:
        """The content of a copy; it has hooks of its own, on its own parameters."""
        self._passes.check_between("a copy")
        if self._passes.epilogue is not None:
            raise RulecError("an eager optimizer with epilogue= belongs to its model: copy its state_dict() instead")
        return {
            "options": self._passes.options, "max_grad_norm": self.max_grad_norm, "inner": self.inner,
            "names": self._passes.parameter_index.names, "closed": self._passes.closed,
        }  # fmt: skip

    def __setstate__(self, state: dict[str, Any]) -> None:
        options, self.max_grad_norm = state["options"], state["max_grad_norm"]
        params = [p for group in state["inner"].param_groups for p in group["params"]]
        names = {id(p): name for p, name in zip(params, state["names"], strict=True)}
        self._begin(inner_around(state["inner"], options.scope), names, options)
        if state["closed"]:
            self.close()

    @synchronized
    def close(self) -> None:
        """Takes the hooks away: from here on this is the optimizer inside, stepped after the backward pass."""
        self._passes.close()


def asks_for_states(inner: Any) -> bool:
    """Whether a step of the optimizer inside would make the first states and move nothing."""
    rules = inner.optimizers if isinstance(inner, Partitioned) else [inner]
    return all(isinstance(each, RuleOptimizer) and each.asks_for_states() for each in rules)


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
        if getattr(inner.optimizer, "measures", False):
            raise HyperError(
                "accumulate='fold' takes a step in parts, and statistics need it in one: leave watch out, or use "
                "accumulate='sum'"
            )
    return accumulate == "fold"
