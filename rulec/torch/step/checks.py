"""Checks of parameters against the storage options of an optimizer, and the warning about stagnation in bfloat16.

Updates of bfloat16 parameters may round away: such weights stand still, and nothing else reports it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rulec.compiler.layout import PLAIN_STORAGE
from rulec.errors import TensorError
from rulec.formats import UNBIASED
from rulec.torch.groups.options import Options
from rulec.torch.groups.routes import Route
from rulec.torch.tensors.dtensor import (
    flat_start,
    is_dtensor,
    is_flat,
    is_split,
    local_tensor,
    place_of,
    placement_of,
)
from rulec.torch.tensors.fake import is_fake
from rulec.torch.tensors.memory import holds_all
from rulec.torch.tensors.tensors import is_dense, real_view


def check_parts(options: Options, routes: Sequence[Route]) -> None:
    """TensorError where a parameter is a shard, and the storage or statistics asked for need its global tensor.

    Codes, random bits and statistics of a shard depend on its global tensor, which a DTensor knows.
    """
    words = options.state_dtypes.values()
    coded = [f"state_dtype={word!r}" for word in words if word not in PLAIN_STORAGE]
    drawn = {"weights='stochastic'": "weights='split'"} if options.weights == "stochastic" else {}
    drawn |= {f"state_dtype={word!r}": "state_dtype='float32'" for word in words if word == UNBIASED}
    for route in routes:
        param, name = route.param, route.name
        if is_flat(param) and flat_start(param) is None and (wanted := [*coded, *drawn]):
            raise TensorError(
                f"{name} is a part of a flat parameter of FullyShardedDataParallel that torch does not tell the place "
                f"of, for {wanted[0]}: give FullyShardedDataParallel use_orig_params=False, or use fully_shard, "
                f"whose parameters are DTensors"
            )
        if is_flat(param) and options.watch:
            raise TensorError(
                f"{name} is a part of a flat parameter of FullyShardedDataParallel, whose statistics would be those of "
                f"the part: use fully_shard, whose parameters are DTensors, or leave watch out"
            )
        for what, advice in drawn.items():
            if is_split(param) and place_of(param, route.section) is None:
                raise TensorError(
                    f"{name} is placed as {param.placements}, and {what} is for parts that are a range or equal rows "  # type: ignore[attr-defined]
                    f"of the whole: shard another dimension, or give {advice}"
                )


def check_real(options: Options, params: Sequence[Tensor], names: Sequence[str]) -> None:
    """TensorError where a parameter is complex, and a state would be bfloat16: torch has no complex numbers of it."""
    words = [word for word in options.state_dtypes.values() if word in ("bfloat16", UNBIASED)]
    for param, name in zip(params, names, strict=True):
        if words and param.is_complex():
            raise TensorError(f"{name} is complex, and a state of it cannot be {words[0]}: give state_dtype='float32'")


#: The numbers of the steps that are looked at, and the elements of a parameter that are compared.
_STEPS, _ELEMENTS = (10, 100, 1000), 4096


class LostUpdates:
    """Looks at a few steps of plain bfloat16 parameters; afterwards `done`.

    A look compares the first elements of the largest parameter before and after the step. It waits for the device.
    Each rank looks at its shards of DTensors by itself, and sends nothing.
    """

    def __init__(self, title: str, names: Sequence[str], params: Sequence[Tensor]) -> None:
        self._title, self._names, self._params = title, names, params
        self._count = 0
        self.done = False

    def watched(self, step: Callable[[], None]) -> None:
        """Takes one step. Warns where more than half of the elements with a gradient did not move."""
        self._count += 1
        chosen = self._chosen() if self._count in _STEPS else None
        if chosen is None:
            step()
        else:
            self._look(step, chosen)
        self.done = self.done or self._count >= _STEPS[-1]

    def _chosen(self) -> int | None:
        """The index of the parameter with the most elements on this rank; None if no parameter can be looked at."""
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return None
        having = [i for i, p in enumerate(self._params) if p.dtype is torch.bfloat16 and _is_seen(p)]
        return max(having, key=lambda i: local_tensor(self._params[i]).numel(), default=None)

    def _look(self, step: Callable[[], None], place: int) -> None:
        param = self._params[place]
        moving = _sample(param.grad) != 0
        before = _sample(param).clone()
        step()
        share = float(((_sample(param) == before) & moving).sum() / moving.sum().clamp(min=1))
        if share > 0.5:
            self.done = True
            warnings.warn(
                f"{self._title} left {share:.0%} of the elements of {self._names[place]} with a gradient as they were "
                f"in step {self._count}: their updates are below half of the last place of bfloat16. Give "
                f"weights='split' (two bytes more for each, exact) or weights='stochastic'",
                RuntimeWarning, stacklevel=6,
            )  # fmt: skip


def _is_seen(param: Tensor) -> bool:
    """Whether this rank has elements of a parameter, and its gradient has the same elements in the same order."""
    grad = param.grad
    if grad is None or is_fake(param) or grad.layout is not torch.strided:
        return False
    if is_dtensor(param) and placement_of(grad) != placement_of(param):  # the step refuses it
        return False
    here, slope = local_tensor(param), local_tensor(grad)
    complete = holds_all(here) and holds_all(slope)
    return bool(complete and here.numel() and is_dense(here) and slope.stride() == here.stride())


def _sample(tensor: Any) -> Tensor:
    """The first local elements in memory."""
    flat = real_view(tensor)
    return flat.as_strided((min(flat.numel(), _ELEMENTS),), (1,))


def watch_of(title: str, groups: Sequence[Mapping[str, Any]], names: Sequence[str]) -> LostUpdates | None:
    """The watch over the parameters of these groups; None without bfloat16 ones."""
    params = [p for group in groups for p in group["params"]]
    return LostUpdates(title, names, params) if any(p.dtype is torch.bfloat16 for p in params) else None
