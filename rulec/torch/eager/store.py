"""`rulec.torch.GradStore`: gradients of several backward passes, summed until the one step that uses them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks

from rulec.errors import RulecError, TensorError
from rulec.locks import lock_of, synchronized
from rulec.torch.eager.backward import Passes
from rulec.torch.eager.inner import Inner, PartitionedInner, RuleInner
from rulec.torch.eager.on_host import TorchSums
from rulec.torch.eager.open_step import OpenStep
from rulec.torch.eager.optimizer import EagerUpdate
from rulec.torch.eager.params import ParameterIndex
from rulec.torch.eager.wrapped import ForeignInner
from rulec.torch.optimizer import RuleOptimizer
from rulec.torch.partitioned import Partitioned
from rulec.torch.tensors.fake import is_fake, plain_memory
from rulec.torch.tensors.memory import check_holds, memory_of

Gradients = Mapping[Tensor, Any] | Iterable[tuple[Tensor, Any]]

#: The attribute of an optimizer for a step that was begun with a part of its parameters.
_BEGUN = "_rulec_begun"


class GradStore(TorchSums):
    """Gradients by tensor, from backward passes over parts of a network.

        cut = body(x).detach().requires_grad_()
        grads = rulec.torch.GradStore()
        grads.backward(loss(head(cut)), [*head.parameters(), cut])
        grads.step(opt, head.parameters())
        grads.backward(body(x), body.parameters(), grads.pop(cut))
        grads.step(opt)

    If two passes give one tensor a gradient, as with shared weights, the store has the sum, and the optimizer takes
    one step from it. `step` with parameters updates these and lets their gradients go; without any it updates the rest
    and ends the step. `opt` is an optimizer of rulec.torch, an `EagerUpdate`, or one of torch.optim's.
    """

    def __init__(self, grads: Gradients = ()) -> None:
        super().__init__()
        self.extend(grads)

    # Gradients come

    def backward(self, outputs: Any, inputs: Tensor | Iterable[Tensor], grad_outputs: Any = None) -> None:
        """Adds the gradients of `outputs`, a tensor or several, with respect to `inputs`, as `torch.autograd.grad`.

        Frozen parameters get none, nor do those without influence on `outputs`. `.grad` stays as it is.
        """
        wanted = [inputs] if isinstance(inputs, Tensor) else [*inputs]
        for tensor in wanted:
            if not tensor.requires_grad and not isinstance(tensor, nn.Parameter):
                raise TensorError(f"a tensor of shape {tuple(tensor.shape)} gets no gradient: call requires_grad_()")
        trained = list(dict.fromkeys(tensor for tensor in wanted if tensor.requires_grad))
        gradients = [*torch.autograd.grad(outputs, trained, grad_outputs, allow_unused=True)]
        self._take(trained, gradients, lambda grad: True)

    @synchronized
    def collect(self, params: Iterable[Tensor]) -> None:
        """Takes over the gradients in `.grad` of these tensors; it is None afterwards."""
        taken = [tensor for tensor in dict.fromkeys(params) if tensor.grad is not None]
        for tensor in taken:
            _check_fits(tensor, tensor.grad)
        gradients = [tensor.grad for tensor in taken]
        for tensor in taken:
            tensor.grad = None
        # A view may be of a bucket, into which DistributedDataParallel writes again.
        self._take(taken, gradients, lambda grad: not grad._is_view())

    @synchronized
    def _take(self, tensors: Sequence[Tensor], gradients: list[Any], keeps: Callable[[Tensor], bool]) -> None:
        """Moves gradients of torch out of the list, and adds them. Memory with another user is copied."""
        uses = Counter(map(_memory, gradients))
        with plain_memory():
            for place, tensor in enumerate(tensors):
                if gradients[place] is None:
                    continue
                alone = _references(gradients, place) <= _ALONE
                grad, gradients[place] = gradients[place], None
                self._add(tensor, grad.detach(), grad.dtype, shared=alone and uses[_memory(grad)] == 1 and keeps(grad))
        self._note_peak()

    @synchronized
    def extend(self, grads: Gradients) -> None:
        """Adds gradients by tensor, or another store's, to what is there.

        None adds nothing. Gradients are copied, so they may be written to afterwards. Those of 16 bits are summed in
        float32, and the sum is rounded once as it is read. TensorError, and nothing added, where one does not fit its
        tensor.
        """
        sums = grads if isinstance(grads, GradStore) else None
        pairs = (grads.items() if isinstance(grads, Mapping) else grads) if sums is None else sums._held.items()
        new = [(tensor, grad) for tensor, grad in pairs if grad is not None]
        for tensor, grad in new:
            _check_fits(tensor, grad, None if sums is None else sums._dtype(tensor))
        with plain_memory():
            for tensor, grad in new:
                self._add(tensor, grad.detach(), grad.dtype if sums is None else sums._dtype(tensor))
        self._note_peak()

    # Gradients go

    @synchronized
    def step(self, opt: Optimizer, params: Tensor | Iterable[Tensor] | None = None) -> None:
        """Updates `params`, or all that is left and then ends the step; used gradients are let go.

        A step of parts is the same as a whole one: hyper-parameters are those of its first part, step counts advance
        once, and `opt.step()` itself, with its hooks, is called at the end. RuleError where the rule needs all
        gradients at once; RulecError where a parameter is updated a second time, or has a gradient in `.grad` too.
        """
        with lock_of(opt):
            self._step(opt, params)

    def _step(self, opt: Optimizer, params: Tensor | Iterable[Tensor] | None) -> None:
        names = {id(p): name for p, name in zip(*_roll(opt), strict=True)}
        if params is None:
            self._end(opt, [tensor for tensor in self._held if id(tensor) in names], names)
            return
        tensors = [params] if isinstance(params, Tensor) else [*params]
        for tensor in tensors:
            if id(tensor) not in names:
                raise TensorError(f"a tensor of shape {tuple(tensor.shape)} is no parameter of the optimizer")
        part = [tensor for tensor in dict.fromkeys(tensors) if tensor in self._held]
        step = _step_of(opt)
        step.check_numbers()
        self._fire(step, part, names)

    def _fire(self, step: OpenStep, part: Sequence[Tensor], names: Mapping[int, str]) -> None:
        places = [step.parameter_index.places[id(tensor)] for tensor in part]
        _check_once(step, places)
        step.open()
        with self._lent(part, names):
            step.fire(places)
            step.settle()

    def _end(self, opt: Optimizer, rest: Sequence[Tensor], names: Mapping[int, str]) -> None:
        """Updates the rest, by the optimizer's own step where none was begun, and ends the step."""
        step: OpenStep | None = opt.__dict__.get(_BEGUN)
        if step is not None:
            step.check_numbers()
            self._fire(step, rest, names)
            rest = []
            step.close()
            del opt.__dict__[_BEGUN]
        opened = opt._passes.step if isinstance(opt, EagerUpdate) else None
        if opened is not None:
            _check_once(opened, [opened.parameter_index.places[id(tensor)] for tensor in rest])
        with self._lent(rest, names):
            opt.step()

    @contextmanager
    def _lent(self, part: Sequence[Tensor], names: Mapping[int, str]) -> Iterator[None]:
        """A block in which gradients are in `.grad`; they leave the store, unless the block fails."""
        for tensor in part:
            if tensor.grad is not None:
                raise RulecError(f"{names[id(tensor)]} has a gradient in .grad beside the store's: collect() adds both")
        try:
            for tensor in part:
                tensor.grad = self[tensor]
            yield
            for tensor in part:
                self._drop(tensor)
        finally:
            for tensor in part:
                tensor.grad = None

    @staticmethod
    def accept_partial(opt: Optimizer) -> None:
        """Ends a step without its missing parts: updated parameters stay so."""
        with lock_of(opt):
            step = opt.__dict__.pop(_BEGUN, None)
            if step is None:
                raise RulecError("accept_partial() is for a step that was begun in parts and not ended, and none was")
            step.close()

    # The held gradients

    def items(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Each tensor with its gradient."""
        return iter([(tensor, self[tensor]) for tensor in self._held])

    def _bytes(self, grad: Tensor) -> int:
        if grad.is_sparse:
            return grad._values().nbytes + grad._indices().nbytes
        return grad.nbytes


def _roll(opt: Optimizer) -> tuple[list[Tensor], list[str]]:
    """The parameters of an optimizer, and their names."""
    parameter_index = ParameterIndex(opt.param_groups, {}, None)
    return parameter_index.params, parameter_index.names


def _step_of(opt: Optimizer) -> OpenStep:
    """The step of an optimizer that is open, or a new one."""
    if isinstance(opt, EagerUpdate):
        return _eager_step(opt._passes)
    if opt._optimizer_step_pre_hooks or _global_optimizer_pre_hooks:
        raise RulecError(
            "the optimizer has hooks that run before a step, and see all gradients: update all at once, with step(opt)"
        )
    if _BEGUN not in opt.__dict__:
        opt.__dict__[_BEGUN] = OpenStep(_inner(opt), ParameterIndex(opt.param_groups, {}, None), False)
    step: OpenStep = opt.__dict__[_BEGUN]
    return step


def _eager_step(passes: Passes) -> OpenStep:
    if passes.handler is not None:
        raise RulecError("a store's step(opt, params) belongs between backward passes, not inside of opt.backward()")
    if passes.step is None:
        return passes.enter()
    passes.check_whole()
    return passes.step


def _inner(opt: Optimizer) -> Inner:
    """An optimizer, run in parts; RulecError where the result would not be that of a whole run."""
    if isinstance(opt, RuleOptimizer):
        return RuleInner(opt)
    if isinstance(opt, Partitioned):
        return PartitionedInner(opt)
    return ForeignInner(opt, "tensor" if type(opt).__module__.startswith("torch.optim.") else None)


def _check_once(step: OpenStep, places: Iterable[int]) -> None:
    again = [place for place in places if place in step.fired]
    if again:
        raise RulecError(
            f"{step.parameter_index.names[again[0]]} was updated in this step already, "
            "and its gradient came after that: give "
            f"it its whole gradient once, update it last, or, where an earlier step broke off, call accept_partial(opt)"
        )


def _references(gradients: list[Tensor], place: int) -> int:
    """The number of references to a gradient in a list."""
    return sys.getrefcount(gradients[place])


def _memory(grad: Tensor | None) -> int:
    """The address of a gradient's memory; for a gradient without memory of its own, its identity."""
    plain = type(grad) is Tensor and grad.layout is torch.strided and not is_fake(grad)
    return grad.untyped_storage().data_ptr() if plain and grad is not None else id(grad)


#: As many as there are where nobody else has it.
_ALONE = _references([torch.empty(0)], 0)


def _check_fits(tensor: Any, grad: Any, dtype: torch.dtype | None = None) -> None:
    """TensorError where something is no gradient of a tensor. `dtype` is that of the parts of a wider sum."""
    if not isinstance(tensor, Tensor) or not isinstance(grad, Tensor):
        raise TensorError(
            f"a store has gradients by their tensors, not a {type(grad).__name__} by a {type(tensor).__name__}"
        )
    for fact in ("shape", "dtype", "device"):
        wanted: Any = getattr(tensor, fact)
        actual: Any = getattr(grad, fact)
        actual = dtype if fact == "dtype" and dtype is not None else actual
        if wanted != actual:
            shown = [tuple(x) if fact == "shape" else x for x in (actual, wanted)]
            raise TensorError(f"a gradient has {fact} {shown[0]}, and its tensor {shown[1]}")
    for part in memory_of(grad):
        check_holds(part, "a gradient", "compute it again")
