"""The factor of all gradients, known once each of them was looked at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState

from rulec.errors import RulecError


class Factor:
    """The factor of all gradients: of torch's `clip_grad_norm_`, after the factor of a GradScaler.

    `norm` is the norm of all gradients, unscaled, where they are clipped, and `finite` is false where the scaler found
    an infinite one; both are known once all gradients were taken.
    """

    def __init__(self, max_norm: float | None, scaler: GradScaler | None) -> None:
        self._max_norm, self._scaler = max_norm, scaler
        self._inverse: Tensor | None = None
        self._infinite: dict[torch.device, Tensor] = {}
        self._norms: dict[int, Tensor] = {}
        self._clip: Any = None
        self.norm: Tensor | None = None
        self.finite = True

    @property
    def scales(self) -> bool:
        """Whether a GradScaler's factor is among it."""
        return self._scaler is not None

    def take(self, place: int, grad: Tensor) -> None:
        """Looks at a gradient, and leaves it unscaled."""
        self._unscale([grad])
        if self._max_norm is not None:
            self._norms[place] = _norm(grad)

    def all_taken(self, optimizer: Any) -> None:
        """Works out the norm of all; the scaler hears of infinite gradients, as from `unscale_` of this optimizer."""
        if self._max_norm is not None:
            self._total([self._norms[place] for place in sorted(self._norms)], self._max_norm)
        if self._scaler is not None:
            state = self._scaler._per_optimizer_states[id(optimizer)]
            device = next(iter(self._infinite), torch.device("cpu"))
            state["found_inf_per_device"] = self._infinite or {device: torch.zeros((), device=device)}
            state["stage"] = OptState.UNSCALED
            self.finite = not any(infinite.item() for infinite in self._infinite.values())

    def apply(self, grads: Sequence[Tensor]) -> bool:
        """Scales gradients in place; False where the step is given up."""
        if not self.finite:
            return False
        with torch.no_grad():
            self._unscale(grads)
            for grad in grads if self._clip is not None else ():
                grad.mul_(self._clip.to(grad.device))
        return True

    def _total(self, norms: Sequence[Tensor], max_norm: float) -> None:
        """The clip factor of torch's `clip_grad_norm_`, from the norms of all gradients in its order."""
        if norms:
            first = norms[0].device
            self.norm = torch.linalg.vector_norm(torch.stack([norm.to(first) for norm in norms]))
            self._clip = torch.clamp(max_norm / (self.norm + 1e-6), max=1.0)

    def _unscale(self, grads: Sequence[Tensor]) -> None:
        if self._scaler is None:
            return
        if self._inverse is None:
            self._inverse = _inverse_scale(self._scaler)
        for grad in grads:
            if grad.dtype == torch.float16:
                raise RulecError("a GradScaler cannot unscale gradients of float16: keep the parameters in float32")
            if grad.device not in self._infinite:
                self._infinite[grad.device] = torch.zeros((), dtype=torch.float32, device=grad.device)
            inverse = self._inverse.to(grad.device)
            torch._amp_foreach_non_finite_check_and_unscale_([grad], self._infinite[grad.device], inverse)


def _norm(grad: Tensor) -> Tensor:
    """The norm of a gradient, by the function that torch's `clip_grad_norm_` takes on its device."""
    return torch._foreach_norm([grad])[0] if grad.is_cuda else torch.linalg.vector_norm(grad)


def _inverse_scale(scaler: GradScaler) -> Tensor:
    """One over the scale, rounded as torch rounds it."""
    if scaler._scale is None:
        raise RulecError("the GradScaler has scaled no loss yet: measure scaler.scale(loss).backward()")
    return scaler._scale.double().reciprocal().float()
