"""Capture mode of an optimizer: whether a step's numbers are on the host, or on the device so that CUDA graphs work.

With `capturable=True`, or torch's `fused=True`, step counts and all scalars of a step are kept on the device.
Hyper-parameters that are tensors on the device are read at every step. So a step can be captured and replayed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rulec.backend import registry
from rulec.backend.capabilities import capabilities_of
from rulec.errors import RulecError
from rulec.torch.groups.interface import ASKING
from rulec.torch.groups.options import Options
from rulec.torch.tensors.tensors import TorchArrays


@dataclass(frozen=True)
class CaptureMode:
    """The capture mode of an optimizer: whether steps of all its parameters can be captured in a CUDA graph.

    `asked` says that the groups ask for numbers on the device. `on_device` says that a backend on the device updates
    some parameters; `everywhere` is for all of them. `types` are the types of the parameters' devices.
    """

    asked: bool
    on_device: bool
    everywhere: bool
    types: frozenset[str]

    @property
    def scales(self) -> bool:
        """Whether a step can be given scaled gradients and be skipped without the host knowing."""
        return self.asked and self.everywhere

    def is_live(self, value: Any) -> bool:
        """Whether a hyper-parameter is read on the device at every step, rather than on the host."""
        return isinstance(value, Tensor) and self.scales and {value.device.type} == self.types

    @property
    def capturing(self) -> bool:
        """Whether a CUDA graph is being captured."""
        return "cuda" in self.types and torch.cuda.is_current_stream_capturing()

    def check_capture(self, first: str = "") -> None:
        """RulecError where a captured CUDA graph, run again, would differ from a step.

        `first` is the reason, in words, why this step does more than later ones: it allocates memory, or copies numbers
        from the host to the device.
        """
        if not self.capturing:
            return
        if not self.asked:
            raise RulecError("a step with capturable=False cannot be captured in a CUDA graph: give capturable=True")
        if not self.everywhere:
            raise RulecError(
                "a step of parameters on the CPU cannot be captured in a CUDA graph: give those on the GPU an "
                "optimizer of their own"
            )
        if first:
            raise RulecError(f"the first step {first} cannot be captured in a CUDA graph: take it before the capture")


#: The reasons that a first step does more than later steps.
NEW_TENSORS = "with these parameters and gradients"
NEW_NUMBERS = "after a number in param_groups changed, as a tensor on the CPU may at any time,"
NEW_SCALING = "with gradients scaled in this way"


def is_asked(groups: Sequence[Mapping[str, Any]], options: Options) -> bool:
    """Whether groups, or the whole optimizer, ask for numbers on the device."""
    return options.capturable or any(group.get(keyword) for group in groups for keyword in ASKING)


def capture_mode_of(params: Sequence[Tensor], groups: Sequence[Mapping[str, Any]], options: Options) -> CaptureMode:
    """The capture mode of these groups."""
    asked, backend = is_asked(groups, options), options.backend
    steps_here = options.offload is not None and options.offload.kind == "step"
    devices = {"cpu"} if steps_here else {str(p.device) for p in params}
    chosen = [backend or TorchArrays().backend(d) for d in sorted(devices)]
    on_device = [capabilities_of(registry.get(b) if isinstance(b, str) else b).on_device for b in chosen]
    types = frozenset({"cpu"} if steps_here else {p.device.type for p in params})
    return CaptureMode(asked, any(on_device), bool(on_device) and all(on_device), types)
