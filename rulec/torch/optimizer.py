"""The base of every class here: a `torch.optim.Optimizer` whose step is a few fused kernels."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain
from typing import Any, ClassVar, overload
from weakref import ref

import torch
from torch._compile import _disable_dynamo
from torch.autograd import _profiler_enabled  # type: ignore[attr-defined]
from torch.compiler import is_compiling
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT, _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from rulec.compiler.routing import Router
from rulec.errors import HyperError, RulecError, StateMismatch, TensorError
from rulec.language.eval_point import to_evaluation, to_training
from rulec.language.hyper import AT_START
from rulec.language.rule_data import RuleData
from rulec.locks import Lockable, synchronized
from rulec.runtime.buckets.scalar_table_device import Scaling
from rulec.runtime.distributed.process_group import Unreached
from rulec.runtime.statistics import StepStatistics
from rulec.runtime.storage.options import Storage
from rulec.torch.distributed.comparison import OtherOrder
from rulec.torch.distributed.consensus import Consensus
from rulec.torch.distributed.mesh import are_at_work, first_consensus_of
from rulec.torch.distributed.traffic import Communication
from rulec.torch.groups.engine import state_dtypes_of
from rulec.torch.groups.entries import GroupRule
from rulec.torch.groups.inputs import Inputs
from rulec.torch.groups.interface import SPLITTING, Interface
from rulec.torch.groups.options import options_of, plain_options, with_offload
from rulec.torch.groups.routes import Routes, names_of, routes_of, tag_all
from rulec.torch.groups.values import group_rules_of, note_start, seed_of
from rulec.torch.states.interop.arriving import arrived
from rulec.torch.states.interop.save import written
from rulec.torch.states.quantized import all_saved
from rulec.torch.states.saved import asks_for_states, at_rates, check_numbers, check_states
from rulec.torch.states.store import Store
from rulec.torch.step.checks import watch_of
from rulec.torch.step.evaluations import TorchEvaluations, check_evaluations, move_all
from rulec.torch.step.optimizer_step import OptimizerStep
from rulec.torch.step.ranks import with_ranks
from rulec.torch.tensors.dtensor import local_tensor
from rulec.torch.tensors.fake import frame_callback, without_compiler
from rulec.torch.tensors.memory import check_gradient_memory
from rulec.torch.tensors.tensors import check_parameters, dtype_name

#: The last gradient of a step, where there was none: nothing to refer to, and its version.
_NO_GRADIENT: tuple[Callable[[], Any], int] = (lambda: None, 0)


class _AsSaved:
    """A parameter's saved state on its way through torch's `load_state_dict`, which would cast it to other dtypes."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values


class RuleOptimizer(Optimizer, Lockable):
    """Runs a rule on parameter groups, as `torch.optim` runs its own.

    Groups, hooks, schedulers, closures and checkpoints are torch's. Beyond torch's keywords, `state_dtype` gives the
    storage dtype of states (`torch.bfloat16`, or `{"exp_avg_sq": torch.bfloat16}`; by default the parameter's),
    `weights` the kind of parameters of 16 bits in memory (`split`, `split24`, `master`, `kahan`, `stochastic`), and
    `backend` the backend by name (by default the device's). A group's `tags` are its parameters' words for the rules
    that ask for them. What a rule remembers of a group or of the model stands in the groups.

    Errors are RulecError, raised before anything is written: HyperError for a keyword or value, TensorError for a
    parameter or gradient, StateMismatch for a checkpoint, BackendUnavailable.
    """

    interface: ClassVar[Interface]

    def __init__(self, params: ParamsT, *args: Any, **keywords: Any) -> None:
        params = [*params] if isinstance(params, Iterator) else params
        self._take_interface(self.interface.with_words({*keywords, *_group_words(params)}))
        functions = self.interface.take_functions(keywords)
        values = self.interface.bind(args, keywords)
        if any(entry.rule.sizes for entry in self.interface.entries):
            params = params if isinstance(params, torch.Tensor) else [*iterable(params)]
            # All groups have lists of one length, and so have the defaults.
            values |= {key: value for key, value in _first_group(params).items() if key in self.interface.lists}
            self._size(values)
        self._options = options_of(self.interface, values)
        self._machine: OptimizerStep | None = None
        self._passes: TorchEvaluations | None = None
        self._complete = False
        #: Whether the optimizers of ranks were compared; and the messages of that, if it was in the last step.
        self._compared = False
        self._first: Consensus | None = None
        self._last_gradient = _NO_GRADIENT
        self._skipped = 0
        #: The learning rate of each group when it was added.
        self._rates: list[Any] = []
        defaults = {**values, **self.interface.fixed}
        group_rules_of(self.interface, [defaults])
        super().__init__(iterable(params), defaults)
        self._check_groups()
        plain = not self._options.weights
        self._lost = watch_of(self.interface.name, self.param_groups, names_of(self.param_groups)) if plain else None
        self._complete = True
        for function in functions:
            without_gradients = torch.no_grad()(function)
            without_gradients()
            self.register_step_post_hook(lambda *_, call=without_gradients: call())
        self.state = Store(self.state)
        if self.interface.full_at_once:
            self._build()

    def _size(self, values: Mapping[str, Any]) -> None:
        """Takes the lengths of lists from a group's keywords; those of all groups are the same."""
        self._take_interface(self.interface.sized(values))

    def _take_interface(self, interface: Interface) -> None:
        """Makes this the interface of this optimizer alone."""
        if interface is not self.interface:
            self.interface = interface  # type: ignore[misc]
            if "defaults" in self.__dict__:
                self.defaults.update(interface.completed(self.defaults))
                for group in self.param_groups:
                    group.update(interface.completed(group))

    @synchronized
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group, with hyper-parameters of its own; without them it has the optimizer's."""
        self._check_closed("add_param_group()")
        with self._in_words_of(param_group):
            self._add_group(param_group)

    @contextmanager
    def _in_words_of(self, group: Any) -> Iterator[None]:
        """Takes the interface with the words of a new group; the one before, where the group is refused."""
        interface, defaults = self.interface, {**self.defaults}
        try:
            self._take_interface(interface.with_words(group if isinstance(group, dict) else ()))
            yield
        except BaseException:
            self.interface = interface  # type: ignore[misc]
            for key in self.defaults.keys() - defaults.keys():
                for values in (self.defaults, *self.param_groups):
                    values.pop(key, None)
            raise

    def _add_group(self, param_group: dict[str, Any]) -> None:
        if isinstance(param_group, dict):
            self.interface.take_group(param_group, self.defaults)
        try:
            _add_param_group(self, param_group)
        except Exception:  # values come before parameters, so that the first mistake named is the same for both
            if isinstance(param_group, dict):
                group_rules_of(self.interface, [{**self.defaults, **param_group}])
            raise
        self._rates.append(param_group.get("lr"))
        note_start(self.interface, param_group)
        if not self._complete:
            return  # all groups are checked at once
        try:
            if self.interface.evaluates:
                param_group["train_mode"] = self.param_groups[0]["train_mode"]
            self._check_groups()
        except BaseException:
            self.param_groups.pop()
            self._rates.pop()
            raise
        self._compared = False

    def _check_groups(self) -> None:
        """HyperError or TensorError for groups that no step could be taken with."""
        plain_options(self.param_groups)
        tag_all(self.param_groups)
        group_rules = group_rules_of(self.interface, self.param_groups)
        seed_of(self.param_groups)
        for group_rule in dict.fromkeys(group_rules):
            self._storage(group_rule).check(Router(group_rule.rule).rules)
        params = [p for group in self.param_groups for p in group["params"]]
        check_parameters(params, names_of(self.param_groups))
        self._options = with_offload(self._options, self.interface, self.param_groups)
        for group_rule in group_rules[:1]:
            self._storage(group_rule).check_weights([dtype_name(p.dtype) for p in params])
        routes = routes_of(self.interface, group_rules, self.param_groups, self._options.across is not None)
        self._warn_of_no_matrix(routes)
        routed = [(route.param, route.rule) for route in routes]
        self._options = with_ranks(self._options, routed, self.param_groups, self.interface.name)

    def _warn_of_no_matrix(self, routes: Routes) -> None:
        """Warns where tags that nobody gave leave no parameter to the rule of the class."""
        if self.defaults.get("auto") and not self._complete and routes and all(route.routed for route in routes):
            warnings.warn(
                f"{self.interface.name}(auto=True) knows no hidden matrix among the parameters, and "
                f"{routes[0].rule.name} updates all of them: give named_parameters(), or groups with tags",
                stacklevel=4,
            )

    def _storage(self, group_rule: GroupRule) -> Storage:
        return Storage(state_dtypes_of(group_rule, self._options), self._options.weights)

    @synchronized
    def routing(self) -> Routes:
        """The rule that each parameter goes to, by its shape and its group's tags; printed, a table."""
        group_rules = group_rules_of(self.interface, self.param_groups)
        return routes_of(self.interface, group_rules, self.param_groups, self._options.across is not None)

    @synchronized
    def storage(self) -> dict[str, dict[str, str]]:
        """Parameter -> state -> its dtype, or its format with the block, as `{"0.weight": {"exp_avg": "int8/32"}}`.

        States that are not there before the first step are not listed. A state that a format is not safe for, and every
        state of a tensor of fewer than 4,096 elements, has a dtype of floats.
        """
        machine = self._current()
        return {route.name: machine.buffers.storage(i) for i, route in enumerate(machine.routes)}

    @synchronized
    def communication(self) -> Communication:
        """The messages of the last step to other ranks; printed, tables. RulecError before the first step.

        An optimizer of rules that look at one element at a time sends nothing.
        """
        first = [] if self._first is None else [self._first]
        records = [processes.traffic.record() for processes in [*first, *self._options.everyone]]
        reductions, exchanges = [r.reductions for r in records], [r.exchanges for r in records]
        return Communication(tuple(chain(*reductions)), tuple(chain(*exchanges)))

    @property
    def measures(self) -> bool:
        """Whether steps measure statistics."""
        return self._options.schedule is not None

    def count_steps_of(self, other: RuleOptimizer) -> None:
        """Measures statistics in the steps in which another optimizer does."""
        mine, theirs = self._options.schedule, other._options.schedule
        if mine is not None and theirs is not None:
            mine.follow(theirs)

    @synchronized
    def statistics(self) -> StepStatistics:
        """The statistics of the last step that measured them: name -> parameter's name -> value, on its device.

        Nothing waits for the device; `.numbers()` copies all numbers to the host at once, and `.table()` is a table.
        RulecError where the optimizer was made without `watch`, and where another process has measured statistics of
        other DTensors, or took no step.
        """
        if not self.measures:
            raise RulecError(
                f"{self.interface.name} measures no statistics: make it with watch='norms', or with expressions by name"
            )
        machine = self._machine if self._machine is not None else self._current()
        return machine.measurements.last()

    # Steps

    @overload
    def step(self, closure: None = None, *, inputs: Mapping[str, Any] | None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float], *, inputs: Mapping[str, Any] | None = None) -> float: ...

    def step(
        self, closure: Callable[[], float] | None = None, *, inputs: Mapping[str, Any] | None = None
    ) -> float | None:
        """One step of every parameter that has a gradient. Returns the loss of `closure`, called first, if given.

        `inputs` has what the rule names under `inputs`: a number or a tensor of one, or a tensor for each parameter, in
        a list or a dict by parameter. The loss of `closure` is the input `loss` of a rule that has one.
        """
        if is_compiling() or frame_callback() is not None:  # torch's compiler is not to look inside
            return _untraced_step(self, closure, inputs)
        machine = self._machine
        if machine is not None and machine.repeat is not None and closure is None and inputs is None:
            turn = self._lock
            turn.acquire()  # in half the time of a `with` block, which is more than 1 % of a small step
            try:
                plain = self._lost is None and "found_inf" not in self.__dict__ and not self._is_watched()
                schedule = self._options.schedule
                if schedule is not None and schedule.every > 1 and schedule.due:
                    plain = False
                if plain and machine.repeat is not None and machine.repeat.done(self.param_groups, self.state):
                    if schedule is not None:
                        schedule.advance()
                    return None
            finally:
                turn.release()
        return self._step(closure, inputs)

    #: Keeps torch from wrapping `step` in its own call of hooks, which costs more than a small kernel.
    step.hooked = True  # type: ignore[attr-defined]

    def _step(
        self, closure: Callable[[], float] | None = None, inputs: Mapping[str, Any] | None = None
    ) -> float | None:
        self._meets = False
        try:
            if self._is_watched():
                keywords = {"inputs": inputs} if inputs is not None else {}
                loss: float | None = _hooked_update(self, *([closure] if closure else []), **keywords)
                return loss
            return self._update(closure, inputs)
        except BaseException:
            if not self._meets:
                self.refuse_early()
            raise

    def _is_watched(self) -> bool:
        """Whether hooks are to be called at a step, or a profiler looks on."""
        return bool(
            self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks
            or _global_optimizer_pre_hooks or _global_optimizer_post_hooks or _profiler_enabled()
        )  # fmt: skip

    def _update(
        self, closure: Callable[[], float] | None = None, inputs: Mapping[str, Any] | None = None
    ) -> float | None:
        loss = None
        self._first = None
        if not self._compared:
            self._meets = True
            self._compare()
            self._meets = False
        if not self.state and closure is None and inputs is None and self._made_states():
            self._compared = False  # with the learning rates of that moment
            return None
        if closure is not None:
            self._check_closed("step(closure)")
            self._check_trained()
            with torch.enable_grad():
                loss = closure()
        if self.interface.passes.count:
            inputs = self._passed(closure, inputs, loss)
        step_inputs = None
        if self.interface.inputs or inputs:
            step_inputs = self._inputs(inputs, loss)
        turn = self._lock
        turn.acquire()  # see `step`
        try:
            self._meets = True
            if self._options.everyone:
                self._update_together(step_inputs)
            else:
                self._update_any(step_inputs)
        finally:
            turn.release()
        if closure is not None and self._options.coordinator is not None:
            grad = next((p.grad for p in self._params if p.grad is not None), None)
            self._last_gradient = (ref(grad), local_tensor(grad)._version) if grad is not None else _NO_GRADIENT
        return loss

    def asks_for_states(self) -> bool:
        """Whether a step now would make the first states and move nothing: see `rulec.torch.states.saved`."""
        return (
            not self.state and "found_inf" not in self.__dict__ and self._passes is None
            and asks_for_states(self.param_groups, self._options.across)
        )  # fmt: skip

    @synchronized
    def _made_states(self) -> bool:
        """Makes the first states where this step asks for them alone; else False, and nothing done."""
        if not self.asks_for_states():
            return False
        with at_rates(self.param_groups, self._rates):
            machine = self._looked()
            try:
                machine.make_states(self.param_groups)
            finally:
                machine.release()
        return True

    def _inputs(self, inputs: Mapping[str, Any] | None, loss: Any = None) -> Inputs:
        params = [p for group in self.param_groups for p in group["params"]]
        return Inputs(self.interface.inputs, inputs or {}, params, loss)

    # Passes

    def next_pass(self, *, inputs: Mapping[str, Any] | None = None) -> bool:
        """Moves the parameters to the next point of a rule that evaluates the model again in a step.

        The gradients are those where the parameters are now, and are taken away. True: compute them anew, and call it
        again. False: the parameters are back, and `step()` follows. Of any other rule, and in a step without passes,
        False at once. An error puts the parameters back, as `put_back()` does.
        """
        return bool(self.interface.passes.count) and bool(_untraced_pass(self, inputs))

    @synchronized
    def _next_pass(self, inputs: Mapping[str, Any] | None, loss: Any = None) -> bool:
        try:
            if self._passes is None or self._passes.closed:
                self._check_trained()
                check_evaluations(self._current(), self.interface.name)
                params = [p for group in self.param_groups for p in group["params"]]
                self._passes = TorchEvaluations(self.interface.name, params, names_of(self.param_groups))
            make = lambda values: self._inputs({**(inputs or {}), **values}, loss)  # noqa: E731
            return self._passes.next(self._current(), make, self._build)
        except BaseException:
            self.put_back()
            raise

    @synchronized
    def put_back(self) -> None:
        """Ends the passes of a step without it: the parameters are where they were before the first."""
        passes, self._passes = self._passes, None
        if passes is not None:
            passes.put_back(self.state)

    def _passed(
        self, closure: Callable[[], float] | None, inputs: Mapping[str, Any] | None, loss: Any
    ) -> Mapping[str, Any]:
        """The inputs of the end of a step, after its passes: with the gradients of earlier points."""
        if closure is not None:
            try:
                while self._next_pass(inputs, loss):
                    with torch.enable_grad():
                        closure()
            except BaseException:
                self.put_back()
                raise
        passes = self._passes
        if passes is None or not passes.closed:
            raise RulecError(
                f"{self.interface.name} evaluates the model again in a step: give step() a closure that does "
                f"zero_grad(), the forward and the backward pass, or call next_pass() before it until it is False"
            )
        passes.check([p for group in self.param_groups for p in group["params"] if p.grad is not None])
        self._passes = None
        return {**(inputs or {}), **passes.values}

    def _check_closed(self, wanted: str) -> None:
        if self._passes is not None and not self._passes.closed:
            raise RulecError(f"{wanted} between the passes of a step: call put_back(), or finish the step first")

    def _update_any(self, inputs: Inputs | None) -> None:
        """The update of what has a gradient. If nothing has one, no value is read, as in torch."""
        try:
            self._update_now(inputs)
        except HyperError:
            if any(p.grad is not None for group in self.param_groups for p in group["params"]):
                raise

    def _update_now(self, inputs: Inputs | None) -> None:
        self._check_trained()
        before = self._options.everyone
        machine = self._looked()
        try:
            scaling = self._scaling()
            # DTensors may have come in the place of whole parameters.
            if any(processes not in before for processes in self._options.everyone):
                self._update_together(inputs)
            elif self._lost is not None:
                self._lost.watched(lambda: self._step_of(machine, inputs, scaling))
                self._lost = None if self._lost.done else self._lost
            elif not machine.step(self.param_groups, inputs, scaling):
                self._build().step(self.param_groups, inputs, scaling)
        finally:
            machine.release()

    def _step_of(self, machine: OptimizerStep, inputs: Inputs | None, scaling: Scaling | None) -> None:
        if not machine.step(self.param_groups, inputs, scaling):
            self._build().step(self.param_groups, inputs, scaling)

    def _update_together(self, inputs: Inputs | None) -> None:
        """Takes a step together with other ranks: all of them take it, or all raise an error."""
        together = self._options.everyone
        for processes in together:
            processes.open(self._options.due)
        try:
            for processes in together:
                processes.check_even()
            try:
                self._update_now(inputs)
            except OtherOrder as other:  # in all ranks with shards of the same tensors
                self._take_order(other)
                assert self._options.coordinator is not None
                self._options.coordinator.open(self._options.due)
                self._update_now(inputs)
        except BaseException:
            for processes in together:
                processes.refuse()
            raise

    def _take_order(self, other: OtherOrder) -> bool:
        """Takes over the order of tensors in the first rank; False where the local order is the same."""
        if other.order:
            self._options = replace(self._options, order=other.order)
            self._build()
        return bool(other.order)

    @synchronized
    def _compare(self) -> None:
        """Compares this optimizer with the other ranks of its DTensors, before the first step.

        RulecError, in all of them, where something differs, or one of them takes no step.
        """
        first = first_consensus_of(self._params)
        if first is not None:
            first.open()
            try:
                alike = self._current().alike
                assert alike is not None
                first.compare(alike)
            except OtherOrder as other:
                self._take_order(other)
            except BaseException:
                for processes in self._options.processes:
                    processes.open(self._options.due)
                for processes in (first, *self._options.processes):
                    processes.refuse()
                raise
        self._first, self._compared = first, True

    @property
    def _params(self) -> list[torch.Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    @synchronized
    def check_memory(self) -> None:
        """An error where a step now would find parameters, gradients or states without some of their memory."""
        machine = self._machine
        if (machine is not None and machine.is_as_before()) or all(param.grad is None for param in self._params):
            return
        self._current()  # which looks at parameters and states
        for param, name in zip(self._params, names_of(self.param_groups), strict=True):
            if param.grad is not None:
                check_gradient_memory(param.grad, name)

    def refuse(self, waits: bool = True) -> None:
        """Refuses a step, to all ranks of `reduce_over` and of its DTensors, and `waits` for them.

        For an error before the step, that the others cannot know of; they would wait.
        """
        first = None if self._compared else first_consensus_of(self._params)
        # Before the optimizers are compared, no rank has sent statistics.
        others = self._options.everyone if self._compared else self._options.processes
        for processes in [*([] if first is None else [first]), *others]:
            processes.open(self._options.due)
            processes.refuse(waits)

    def refuse_early(self) -> None:
        """Refuses a step for an error in a closure, a hook or an argument: others may have got as far as the step.

        Does nothing while collectives of a sharded model are running: other ranks wait in them. It waits for no rank.
        """
        if not are_at_work(self._is_new_gradient()):
            with suppress(Unreached):
                self.refuse(waits=False)

    def _is_new_gradient(self) -> bool:
        """Whether the first gradient was computed since the last step with a closure."""
        grad = next((p.grad for p in self._params if p.grad is not None), None)
        last, version = self._last_gradient
        return grad is not None and (last() is not grad or local_tensor(grad)._version != version)

    def _check_trained(self) -> None:
        if self.interface.evaluates and not self.param_groups[0]["train_mode"]:
            raise RulecError(f"the parameters are where {self.interface.name} is evaluated: call train() before step()")

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What torch's GradScaler asks: whether it may leave unscaling, and skipping where there is an infinity, to
        the step. Else it does both itself, and waits for the device."""
        if self.interface.passes.count:
            raise RulecError(
                f"{self.interface.name} evaluates the model again in a step, and GradScaler scales one gradient: train "
                f"in bfloat16 without it"
            )
        return self._current().capture_mode.scales

    def _scaling(self) -> Scaling | None:
        """The scaling that GradScaler has set for this step."""
        found_inf = self.__dict__.get("found_inf")
        return Scaling(found_inf, self.__dict__.get("grad_scale")) if isinstance(found_inf, torch.Tensor) else None

    @property
    def skipped_steps(self) -> int:
        """In how many steps the rule's own condition (`skip`) left a parameter as it was."""
        return self._skipped + (self._machine.writer.skipped_steps if self._machine else 0)

    def _current(self) -> OptimizerStep:
        """The machine for the groups and states as they are now."""
        machine = self._looked()
        machine.release()
        return machine

    def _looked(self) -> OptimizerStep:
        """As `_current`; the caller must call `release()`."""
        machine, kept = self._machine, False
        if machine is None:
            return self._build()
        try:
            kept = not machine.stale(self.param_groups, self.state)
        finally:
            if not kept:
                machine.release()
        return machine if kept else self._build()

    def _build(self) -> OptimizerStep:
        """A new machine for the groups and states as they are now."""
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)
        plain_options(self.param_groups)
        tag_all(self.param_groups)
        machine = OptimizerStep(self.interface, self.param_groups, self.state, self._options)
        self._adopt(machine)
        return machine

    def _adopt(self, machine: OptimizerStep) -> None:
        self._skipped = self.skipped_steps
        if self._machine is not None:
            machine.measurements.keep(self._machine.measurements)
        if isinstance(self.state, Store):
            self.state.become(machine.buffers.store)
            machine.buffers.store = self.state
        self.state = machine.buffers.store
        self._options = replace(self._options, coordinator=machine.options.coordinator, reducer=machine.options.reducer)
        self._machine = machine

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Takes the gradients away, or makes them zero."""
        _zero_grad(self, set_to_none)

    # Checkpoints

    @synchronized
    def state_dict(self, layout: str = "") -> dict[str, Any]:
        """The state as torch.optim lays it out; its tensors are the optimizer's own, not copies.

        A state in codes is two tensors, `NAME::codes` and `NAME::scale`. If a file has a scale for less than a block
        (docs/small_states.md says when), scales are copies.

        `layout` is `bitsandbytes` or `torchao` for the state as that library lays it out, in copies: an optimizer there
        goes on from it, with the same codes where it has their format. StateMismatch where the library has no optimizer
        that computes the same.
        """
        self._check_closed("state_dict()")
        if self._machine is not None:
            self._machine.check_whole()
        plain_options(self.param_groups)
        if layout:
            machine = self._current()
            return written(layout, super().state_dict(), machine, self.param_groups)
        joined = self._current().buffers.joined() if self._splits(self.param_groups) else {}
        saved = super().state_dict()
        if isinstance(saved.get("state"), Mapping):
            saved = all_saved(saved, self.param_groups, joined)
        return saved

    @staticmethod
    def _splits(groups: Iterable[Mapping[str, Any]]) -> bool:
        """Whether a group has parameters with sections."""
        return any(group.get("split") is not None for group in groups)

    @synchronized
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from a `state_dict()`, of this class or of torch's of the same name.

        Values are copied into this optimizer's buffers, which keep their own dtypes.
        """
        self._check_closed("load_state_dict()")
        groups = saved_groups(state_dict)
        check_groups_match(self.param_groups, groups, "optimizer's", "groups")
        check_numbers(groups, {*self.defaults})
        handle = self.register_load_state_dict_pre_hook(_as_saved)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    @synchronized
    def __getstate__(self) -> dict[str, Any]:
        self._check_closed("a copy")
        if self._machine is not None:
            self._machine.check_whole()
        state = super().__getstate__()
        states = self.state.plain() if isinstance(self.state, Store) else self.state
        return {**state, "state": states, "_options": self._options, "_skipped": self.skipped_steps}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "defaults" in state:
            self._machine, self._complete, self._lost, self._passes = None, True, None, None
            self._compared, self._first, self._last_gradient = False, None, _NO_GRADIENT
            super().__setstate__(state)
            self._take_interface(self.interface.with_words(self.defaults))
            self._size({**self.defaults, **_first_group(self.param_groups)})
            self.state = Store(self.state)
            self._rates = [group.get("lr") for group in self.param_groups]
            return
        # From load_state_dict: everything is checked before anything is taken over.
        saved = {k: v.values if isinstance(v, _AsSaved) else v for k, v in state["state"].items()}
        kept: list[dict[str, Any]] = [
            {key: group[key] for key in ("tags", "param_tags") if key in group} for group in self.param_groups
        ]
        groups: list[dict[str, Any]] = []
        interface = self.interface.with_words({key for group in state["param_groups"] for key in group})
        for tags, packed, here in zip(kept, state["param_groups"], self.param_groups, strict=True):
            there = [saved.get(p, {}) for p in here["params"]]
            group, states = arrived(packed, there, interface, self.defaults)
            saved |= {p: state for p, state in zip(here["params"], states, strict=True) if state}
            groups.append(interface.completed({**self.defaults, **tags, **group}))
        for group, before in zip(groups, self.param_groups, strict=True):  # what is joined, parameters say, not states
            for key in SPLITTING:
                group.pop(key, None)
                group |= {key: before[key]} if key in before else {}
            if group.get(AT_START, 0) is None:  # saved by an optimizer that kept no rate of the start
                group[AT_START] = before.get(AT_START)
        plain_options(groups)
        tag_all(groups)
        machine = OptimizerStep(interface, groups, saved, self._options, strict=True)
        self._take_interface(interface)
        super().__setstate__({**state, "state": Store(), "param_groups": groups})
        self._rates = [group.get("lr") for group in groups]
        self._adopt(machine)
        self._compared = False
        for processes in self._options.everyone:
            processes.restore()
        if self._options.schedule is not None and self._options.reducer is not None:
            self._options.schedule.restart()  # ranks of which one failed measure in the same steps again


class EvaluatedOptimizer(RuleOptimizer):
    """Of a rule that says where the model is to be evaluated: elsewhere than where it is trained, at an average."""

    def eval(self) -> None:
        """Moves the parameters to where the model is to be evaluated; once there, does nothing.

        Until `train()` no step can be taken. A checkpoint says where the parameters were.
        """
        self._move(to_evaluation, training=False)

    def train(self) -> None:
        """Moves the parameters back to where they are trained; once there, does nothing."""
        self._move(to_training, training=True)

    @synchronized
    def _move(self, way: Callable[[RuleData], RuleData | None], training: bool) -> None:
        self._check_closed("train()" if training else "eval()")
        if self.param_groups[0]["train_mode"] is training:
            return
        move_all(self._current(), way)
        for group in self.param_groups:
            group["train_mode"] = training


def iterable(params: Any) -> Any:
    """The parameters of an optimizer, as something to iterate; TensorError for None, a model and the like."""
    if isinstance(params, Iterable):
        return params
    hint = "give it model.parameters()" if isinstance(params, torch.nn.Module) else "give tensors or groups of them"
    raise TensorError(f"an optimizer cannot be made of {type(params).__name__} {params!r:.40}: {hint}")


def _group_words(params: Any) -> set[str]:
    """The keys of all groups that an optimizer is to be made of."""
    groups = () if isinstance(params, torch.Tensor) or not isinstance(params, Iterable) else params
    return {key for group in groups if isinstance(group, Mapping) for key in group}


def _first_group(params: Any) -> Mapping[str, Any]:
    """The first parameter group; empty where there are parameters alone."""
    first = params[0] if isinstance(params, list) and params else {}
    return first if isinstance(first, Mapping) else {}


def saved_groups(saved: Any) -> Sequence[Mapping[str, Any]]:
    """The groups of a `state_dict()`; StateMismatch for what is none."""
    if not isinstance(saved, Mapping):
        raise StateMismatch(f"the saved state is a {type(saved).__name__}: give the dict that state_dict() returned")
    states, groups = saved.get("state"), saved.get("param_groups")
    if isinstance(states, Mapping) and isinstance(groups, list | tuple):
        known = [group for group in groups if isinstance(group, Mapping) and "params" in group]
        if len(known) == len(groups):
            check_states(states, known)
            return known
    raise StateMismatch("the saved state lacks its state or param_groups: give all that state_dict() returned")


def check_groups_match(
    groups: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]], whose: str, same: str
) -> None:
    """StateMismatch where saved groups have other numbers of parameters than these: make it with the `same` things."""
    counts = [[len(group["params"]) for group in side] for side in (groups, saved)]
    if counts[0] != counts[1]:
        raise StateMismatch(
            f"the saved groups have {', '.join(map(str, counts[1]))} parameters, where the {whose} have "
            f"{', '.join(map(str, counts[0]))}: make it with the same {same}"
        )


_add_param_group = without_compiler(Optimizer.add_param_group)
_zero_grad = without_compiler(Optimizer.zero_grad)
_untraced_step = _disable_dynamo(RuleOptimizer._step)
_untraced_pass = _disable_dynamo(RuleOptimizer._next_pass)
_hooked_update: Any = Optimizer.profile_hook_step(RuleOptimizer._update)


def _as_saved(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    states = {k: _AsSaved(v) if isinstance(v, Mapping) else v for k, v in state_dict["state"].items()}
    return {**state_dict, "state": states}
