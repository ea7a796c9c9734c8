"""What an optimizer step asks of an offload, and the offload of each kind."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from rulec.language.expr.node import Kind, Op, walk
from rulec.language.rule_data import RuleData
from rulec.runtime.buckets.launch import Launch
from rulec.torch.groups.engine import TensorRef
from rulec.torch.groups.options import OffloadOptions
from rulec.torch.groups.routes import Route
from rulec.torch.offload.host_step import HostStep
from rulec.torch.offload.states import StreamedStates
from rulec.torch.tensors.tensors import TorchArrays


class Offload(Protocol):
    """The transfers of steps of the parameters on some routes."""

    @property
    def mirrors(self) -> list[Tensor]:
        """The tensors that kernels read and write for each route."""

    @property
    def arrays(self) -> TorchArrays:
        """The arrays of engines: they allocate states on the host."""

    @property
    def buffers(self) -> list[Tensor]:
        """The transfer buffers."""

    @property
    def in_place(self) -> bool:
        """Whether kernels read and write the parameters themselves."""

    def attach(self, tensor_refs: Sequence[TensorRef]) -> None:
        """Takes the engines' tensors of `mirrors`."""

    def launches(
        self, places: Sequence[int], grads: Sequence[Tensor], inputs: Mapping[str, Any] | None = None
    ) -> list[Launch]:
        """The launches for the tensors at these indices of the routes. All is checked, and nothing is written."""

    def parts(
        self, places: Sequence[int], grads: Sequence[Tensor], way: Callable[[RuleData], RuleData | None], counts: bool
    ) -> list[Launch]:
        """The launches for one part of a step of the tensors at these indices: see `Engine.ready_part`."""

    def changes(self, way: Callable[[RuleData], RuleData | None]) -> list[list[Launch]]:
        """The launches of a step of another rule without gradients, for each engine: see `Engine.change`."""

    def finish(self, places: Sequence[int]) -> None:
        """Ends a step of the tensors at these indices, whole or not."""


def offload_of(routes: Sequence[Route], options: OffloadOptions, weights: str) -> Offload:
    """The offload of parameters on some routes; `weights` is their kind in memory."""
    if options.kind == "states":
        return StreamedStates(routes, options)
    warn_of_matrix_functions(routes)
    return HostStep(routes, options, weights)


def warn_of_matrix_functions(routes: Sequence[Route]) -> None:
    """Warns where the processor would compute the matrix functions of a rule for parameters of another device."""
    for route in routes:
        cheap = (Op.TRANSPOSE, Op.INDEX)
        functions = [n.op for n in walk(route.rule.expressions) if n.op.kind is Kind.MATRIX and n.op not in cheap]
        if functions and route.here.device.type != "cpu":
            warnings.warn(
                f"{route.rule.name} computes {functions[0].symbol}, which offload='step' leaves to the processor: give "
                f"offload='states', where {route.here.device} computes it",
                RuntimeWarning, stacklevel=2,
            )  # fmt: skip
            return
