"""Refusals of parameters for the storage that an optimizer was asked for."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from rulec.compiler.layout import PLAIN_STORAGE
from rulec.errors import TensorError
from rulec.formats import UNBIASED
from rulec.torch.groups.options import Options
from rulec.torch.groups.routes import Route
from rulec.torch.tensors.dtensor import flat_start, is_flat, is_split, place_of


def check_parts(options: Options, routes: Sequence[Route]) -> None:
    """TensorError where a parameter is a part of a tensor of which the storage asked for needs to know more.

    Codes and random bits of a part need to know its tensor, as a DTensor does.
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
