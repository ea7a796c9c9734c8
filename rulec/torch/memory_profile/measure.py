"""`rulec.torch.account`: the memory of training steps of any model and optimizer, on the device and on the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from rulec.errors import RulecError
from rulec.memory.live import Account
from rulec.torch.memory_profile.meter import Meter, state_of
from rulec.torch.offload.link import host_of
from rulec.torch.optimizer import RuleOptimizer


class Measurement:
    """The memory of a block of `account`."""

    def __init__(self) -> None:
        self._peaks: Account | None = None

    @property
    def peaks(self) -> Account:
        """The peaks in bytes, by kind and place. RulecError in the block, whose peaks are not known yet."""
        if self._peaks is None:
            raise RulecError("the block of rulec.torch.account has not ended: ask for its peaks after it")
        return self._peaks

    def table(self) -> str:
        """The peaks as a table: one row a moment, one column a kind."""
        unit, rows = self.peaks.table()
        rows[0][0] = unit
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows]
        text = "\n".join("  ".join(line).rstrip() for line in lines)
        return f"{text}\n{self.peaks.moved}" if self.peaks.host_total else text

    def __str__(self) -> str:
        return "<memory of a block that has not ended>" if self._peaks is None else self.table()


@contextmanager
def account(model: nn.Module, optimizer: Any) -> Iterator[Measurement]:
    """Measures the memory of training steps taken in the block, storage by storage, on the device and on the host.

        with rulec.torch.account(model, optimizer) as account:
            train_step()
        print(account)
        account.peaks.beside["gradients"]

    `optimizer` is any of torch's or of this package. What is there before the block counts from its beginning: weights,
    gradients, states, and the transfer buffers of an offload. Other tensors count where they are made in the block. A
    first step makes states, and an eager optimizer's first step keeps all gradients: take it before the block, unless
    it is to be measured. Tensors on the CPU are on the host, unless the model is on the CPU too. Fake tensors are
    on the host where an offload makes them there. The block runs under a mode of torch's, and is slower for it.
    """
    params = [*model.parameters()]
    if not params:
        raise RulecError("the model of rulec.torch.account has no parameters: give it the module that is trained")
    measured = Measurement()
    meter = Meter(params, model.buffers(), host_of(params[0]).type)
    meter.know((p.grad for p in params if p.grad is not None), "gradients")
    meter.know(state_of(optimizer), "state")
    meter.know(_transfer_buffers(optimizer), "transfers")
    try:
        with meter:
            meter.begin()
            yield measured
    finally:
        measured._peaks = meter.account(state_of(optimizer))


def _transfer_buffers(optimizer: Any) -> list[Tensor]:
    """The buffers of an optimizer's offload, and of those inside of it."""
    inside = [*getattr(optimizer, "optimizers", ()), *filter(None, [getattr(optimizer, "inner", None)])]
    buffers = [buffer for each in inside for buffer in _transfer_buffers(each)]
    offload = optimizer._machine.offload if isinstance(optimizer, RuleOptimizer) and optimizer._machine else None
    return buffers if offload is None else [*buffers, *offload.buffers]
