"""A few training steps under the meter, the gradients kept until the step or each used as soon as it is there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from rulec.memory.live import Account
from rulec.torch.account.meter import Meter, state_of
from rulec.torch.classes import optimizer
from rulec.torch.tensors import DTYPES

#: How weights are updated: in the step, in the backward pass, or in the products that would make their gradients.
Way = Literal["deferred", "eager", "epilogue"]
WAYS: tuple[Way, ...] = ("deferred", "eager", "epilogue")

#: Steps before the one that counts: states are made in the first, and the second may do what the first has learned.
BEFORE = 2


@dataclass(frozen=True)
class Training:
    """A training to account for: `model` makes the model in a dtype, and `batch` its arguments; then the rule (its name
    or itself), its hyper-parameters, and the dtype of its states (by default the weights')."""

    model: Callable[..., nn.Module]
    batch: Callable[[str], tuple[Tensor, ...]]
    rule: Any
    hyper: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    state_dtype: str | None = None


def account(training: Training, way: Way, fake: bool = True, before: int = BEFORE) -> Account:
    """The memory kept by one training step, after `before` other steps.

    Fake tensors are not computed and take no memory. The work between the kernels of a rule then counts as torch's
    operations on a device; on the CPU it would be NumPy's, and no meter of torch's sees NumPy.
    """
    with ExitStack() as stack:
        if fake:
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        model = training.model(dtype=DTYPES[training.dtype], device="cpu")
        meter = stack.enter_context(Meter(model.parameters(), model.buffers()))
        opt, step = stepping(model, training, way)
        for number in range(before + 1):
            if number == before:
                meter.begin()
            step()
        peaks: Account = meter.account(state_of(opt))
        return peaks


def stepping(model: nn.Module, training: Training, way: Way) -> tuple[Any, Callable[[], None]]:
    """An optimizer of the model, and what takes one training step."""
    state = {} if training.state_dtype is None else {"state_dtype": training.state_dtype}
    if way == "deferred":
        plain = optimizer(training.rule)(model.parameters(), **training.hyper, **state)

        def deferred() -> None:
            model(*training.batch(training.dtype)).backward()
            plain.step()
            plain.zero_grad()

        return plain, deferred
    from rulec.torch.eager import EagerUpdate

    keywords: dict[str, Any] = {**training.hyper, **state}
    opt = EagerUpdate(model, training.rule, epilogue=way == "epilogue", **keywords)

    def eager() -> None:
        loss = model(*training.batch(training.dtype))
        with opt.backward():
            loss.backward()
        opt.step()
        opt.zero_grad()

    return opt, eager


def tokens(batch: int, length: int) -> Callable[[str], tuple[Tensor, ...]]:
    """Tokens for a language model, of `(batch, length)`."""
    return lambda dtype: (torch.zeros(batch, length, dtype=torch.int64),)


def rows(batch: int, width: int) -> Callable[[str], tuple[Tensor, ...]]:
    """Inputs of `(batch, width)`."""
    return lambda dtype: (torch.ones(batch, width, dtype=DTYPES[dtype]),)
