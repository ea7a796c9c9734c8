"""A state of one parameter on its way to another library: floats, or codes of a format with their scales."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from rulec.formats import Format, decode, encode


@dataclass(frozen=True)
class HeldState:
    """What the optimizer holds: floats in `shape`, or where there is a `form` codes and `scales`.

    All tensors that it gives are copies, on the device of the values.
    """

    values: Tensor
    scales: Tensor | None
    form: Format | None
    shape: tuple[int, ...]

    @cached_property
    def floats(self) -> Tensor:
        """The values in float32, in C order."""
        if self.form is None or self.scales is None:
            return self.values.detach().to(torch.float32, memory_format=torch.contiguous_format, copy=True)
        codes, scales = (tensor.detach().cpu().numpy() for tensor in (self.values, self.scales))
        return torch.from_numpy(decode(self.form, codes, scales, self.shape)).to(self.values.device)

    def coded(self, form: Format) -> tuple[Tensor, Tensor]:
        """Codes and float32 scales in a format: the same as here where the format here has the same meaning."""
        if self.scales is not None and self.has(form):
            return self.values.detach().clone(), self.scales.detach().clone()
        codes, scales = (torch.from_numpy(array) for array in encode(form, self.floats.cpu().numpy()))
        return codes.to(self.values.device), scales.to(self.values.device)

    def has(self, form: Format) -> bool:
        """Whether codes here mean the same in this format. A floor is of how values are encoded, not of codes."""
        here = self.form
        return here is not None and (here.text, here.signed) == (form.text, form.signed)
