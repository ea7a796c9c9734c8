"""The evaluations of the model in one step of a torch optimizer: moves to the points, and the way back.

`move_all` moves the parameters to where the model is evaluated in use, and back to where it is trained.
`Before` keeps the numbers of parameters before a move, and writes them back wherever the parameters' memory then is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from rulec.compiler.weights import is_part
from rulec.errors import HyperError, RulecError, TensorError
from rulec.language.rule_data import RuleData
from rulec.runtime.engine import run
from rulec.runtime.evaluations import Evaluations, move_at
from rulec.torch.groups.inputs import Inputs
from rulec.torch.offload.offload import Offload
from rulec.torch.step.gradients import check_shapes, is_sparse, real_gradients
from rulec.torch.step.optimizer_step import OptimizerStep
from rulec.torch.step.plan import part_launches_of, read_all, write_all
from rulec.torch.tensors.dtensor import check_gradient, is_dtensor
from rulec.torch.tensors.fake import plain_memory
from rulec.torch.tensors.memory import holds_all
from rulec.torch.tensors.tensors import OtherDtype

#: Makes the inputs of a move, from the gradients of earlier points by parameter.
MakeInputs = Callable[[Mapping[str, Mapping[Tensor, Any]]], Inputs]


class TorchEvaluations(Evaluations[Mapping[Tensor, Any]]):
    """The evaluations of the model in one step of the parameters with gradients."""

    def __init__(self, name: str, params: Sequence[Tensor], names: Sequence[str]) -> None:
        super().__init__()
        pairs = [(p, n) for p, n in zip(params, names, strict=True) if p.grad is not None]
        self._name, self._params, self._names = name, [p for p, _ in pairs], [n for _, n in pairs]
        self._before: Before | None = None

    def next(self, machine: OptimizerStep, inputs: MakeInputs, build: Callable[[], OptimizerStep]) -> bool:
        """Moves the parameters to the next point, by the gradients there are, and takes these away.

        False after the last point: the parameters are back.
        """
        self.check([p for p in machine.params if p.grad is not None])
        self.put_back(machine.buffers.store)
        maximized = _maximized(machine)

        def gradients() -> Mapping[Tensor, Any]:
            return {p: -p.grad if p in maximized else p.grad for p in self._params if p.grad is not None}

        def move(place: int) -> None:
            try:
                _move(machine, move_at(place), inputs(self.values), self._note)
            except OtherDtype:
                _move(build(), move_at(place), inputs(self.values), self._note)
            for param in self._params:
                param.grad = None

        return self.advance(machine.interface.passes, gradients, partial(_wants, machine, self._params), move)

    def check(self, params: list[Tensor]) -> None:
        """TensorError where other parameters have gradients than at the first point, or one has a sparse gradient."""
        if len(params) != len(self._params) or any(a is not b for a, b in zip(params, self._params, strict=True)):
            raise TensorError(
                f"the passes of a step of {self._name} gave gradients to different parameters: "
                f"{len(self._params)} in the first and {len(params)} now; every pass must reach all of them"
            )
        if any(is_sparse(p.grad) for p in params if p.grad is not None):
            raise TensorError(f"{self._name} cannot take sparse gradients: make the layer with sparse=False")

    def _note(self, state: Mapping[Any, Any]) -> None:
        self._before = Before(self._params, self._names, state)

    def put_back(self, state: Mapping[Any, Any]) -> None:
        """Gives the parameters the values of before the step; does nothing where they have them.

        `state` has the states by parameter. TensorError as of `Before.put_back`.
        """
        before, self._before = self._before, None
        if before is not None:
            before.put_back(state)
            increment_version(self._params)


def check_evaluations(machine: OptimizerStep, name: str) -> None:
    """HyperError or RulecError where a step cannot evaluate the model again: in a graph, or on sharded parameters."""
    if machine.capture_mode.asked:
        raise HyperError(
            f"{name} evaluates the model again in a step, and cannot be capturable or fused: leave both out"
        )
    if machine.options.across is not None or any(map(is_dtensor, machine.params)):
        raise RulecError(
            f"{name} evaluates the model again in a step, and cannot be split over processes: use "
            f"DistributedDataParallel, without reduce_over and DTensors"
        )


def _wants(machine: OptimizerStep, params: Collection[Tensor], place: int) -> bool:
    """Whether any of these parameters has the evaluation with this index in its next step."""
    chosen = {*params}
    ids: dict[int, list[int]] = {}
    for route, (engine, tensor_id) in zip(machine.routes, machine.tensor_refs, strict=True):
        if route.param in chosen:
            ids.setdefault(id(engine), []).append(tensor_id)
    return any(engine.wants(ids.get(id(engine), ()), place, engine.table) for engine in machine.engines)


def _maximized(machine: OptimizerStep) -> set[Tensor]:
    """The parameters whose gradient is gone up."""
    return {route.param for route in machine.routes if machine.group_rules[route.group].maximize}


def _move(
    machine: OptimizerStep, way: Callable[[RuleData], RuleData | None], inputs: Inputs,
    ready: Callable[[Mapping[Any, Any]], None],
) -> None:  # fmt: skip
    """Moves the parameters with gradients to the point of a pass: see `Engine.ready_part`.

    `ready` is called with the states by parameter, once these are there and before anything is written. OtherDtype,
    and nothing done, where a gradient's dtype is new.
    """
    grads = [p.grad for p in machine.params if p.grad is not None]
    places = tuple(i for i, p in enumerate(machine.params) if p.grad is not None)
    with machine.plain():
        plan = machine.plans.of(places, grads)
        for place in plan.converted:
            check_gradient(grads[place], plan.written[place], machine.names[plan.chosen[place]])
        check_shapes(plan, grads, machine.names)
        read_all(plan.copied)
        seen = plan.seen(real_gradients(plan, grads, machine.names))
        launches = part_launches_of(plan, seen, way, False, inputs)
        machine.buffers.show()
        ready(machine.buffers.store)
        machine.writer.write(launches, plan.written)
        write_all(plan.copied)


def move_all(machine: OptimizerStep, way: Callable[[RuleData], RuleData | None]) -> None:
    """One step of another rule on the same parameters and states; parameters without states stay as they are."""
    if machine.capture_mode.capturing:
        raise RulecError("eval() and train() cannot be captured in a CUDA graph: call them before or after it")
    written = [p for p in machine.params if machine.buffers.store.get(p)]
    if machine.offload is not None:
        _move_offloaded(machine, machine.offload, way, written)
        return
    copied = [(machine.routes[i], copy) for i, copy in machine.copies.items()]
    read_all(copied)
    increment_version(written)
    for engine in machine.engines:
        engine.change(way, engine.table)
    write_all(copied)


def _move_offloaded(
    machine: OptimizerStep, offload: Offload, way: Callable[[RuleData], RuleData | None], written: Sequence[Tensor]
) -> None:
    """The same where states lie on the host."""
    copied = [(machine.routes[i], copy) for i, copy in machine.copies.items()]
    with machine.plain():
        read_all(copied)
        changes = offload.changes(way)  # it tells by the versions what others have written
        increment_version(written)
        try:
            for launches in changes:
                run(launches)
        finally:
            offload.finish(range(len(machine.routes)))
        write_all(copied)


#: A parameter, and a name in its state: that of the memory beside a parameter of 16 bits, or None for the parameter.
Key = tuple[Tensor, str | None]


class Before:
    """Copies of parameters, and of the memory beside those of 16 bits in `state`, the states by parameter.

    Others may give a parameter other memory meanwhile, as by `param.data = ...`, or its state another tensor: the
    numbers go to where they are then. `names` are the parameters' in messages.
    """

    def __init__(self, params: Sequence[Tensor], names: Sequence[str], state: Mapping[Any, Any]) -> None:
        self._names = dict(zip(map(id, params), names, strict=True))
        keys: list[Key] = [(param, None) for param in params]
        keys += [(param, name) for param in params for name in state.get(param, ()) if is_part(name)]
        with plain_memory():
            self._copies = [(key, tensor.detach().clone()) for key, tensor in zip(keys, _now(keys, state), strict=True)]

    def put_back(self, state: Mapping[Any, Any]) -> None:
        """Gives the parameters, and the memory beside them, the numbers of before.

        These are the same bits, or in a parameter of another dtype the same numbers rounded to it. TensorError for a
        parameter of another shape, or without memory, after all others are back.
        """
        now = _now([key for key, _ in self._copies], state)
        fits = [_takes(tensor, copy) for tensor, (_, copy) in zip(now, self._copies, strict=True)]
        back = [(tensor.detach(), copy) for tensor, (_, copy), fit in zip(now, self._copies, fits, strict=True) if fit]
        with plain_memory():
            torch._foreach_copy_([tensor for tensor, _ in back], [copy for _, copy in back])
        if not all(fits):
            (param, _), _ = self._copies[fits.index(False)]
            raise TensorError(
                f"{self._names[id(param)]} was given another shape or device, or no memory, between two evaluations of "
                f"the model in one step, and cannot be put back where it was; all others are: change it between steps"
            )


def _now(keys: Sequence[Key], state: Mapping[Any, Any]) -> list[Any]:
    """The tensors of these keys as they are now; None where the state has none."""
    return [param if name is None else state.get(param, {}).get(name) for param, name in keys]


def _takes(tensor: Any, copy: Tensor) -> bool:
    """Whether a tensor has a place for all numbers of a copy."""
    return (
        isinstance(tensor, Tensor) and tensor.layout is torch.strided and tensor.shape == copy.shape
        and tensor.device == copy.device and holds_all(tensor)
    )  # fmt: skip
