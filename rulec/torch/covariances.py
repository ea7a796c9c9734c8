"""Second moments of the inputs and output gradients of layers, for rules that read them as inputs.

A layer multiplies its weight, a matrix, by rows of numbers: examples, and positions of a sequence or an image. `a` is
the mean of x x^T over input rows x, and `b` the mean of y y^T over gradients y of output rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from rulec.errors import HyperError, RulecError, TensorError
from rulec.torch.tensors.dtensor import is_dtensor

#: What can be collected, by the names of the inputs.
_NAMES = ("a", "b")

#: What a loss may be a mean over: the rows of a layer, its examples (the first dimension), or nothing for a sum.
_MEANS = ("rows", "examples", "sum")


def covariances(
    model: nn.Module, *, collect: Sequence[str] = _NAMES, mean_over: str = "rows", group: Any = None
) -> Covariances:
    """Collects second moments of linear layers and convolutions of a model in its backward passes.

    `inputs()` of the result has them for `optimizer.step(inputs=...)`: `a`, (cols, cols) for a weight that is a matrix
    of rows by cols, and `b`, (rows, rows). The weight of a convolution of one or two dimensions, without groups, is the
    matrix of its outputs by all others, as under `view: {flatten: rest}`. They are float64 for layers in float64, and
    float32 otherwise. All passes in training mode since the last `inputs()` count, those of micro-batches too; a
    forward pass counts when its backward pass reaches it, and one that is recomputed counts once. The uses of a shared
    weight are added up.

    `collect` names what is collected. `mean_over` says what the loss is a mean over, so that `b` is of the gradients
    of single terms: the `rows` of a layer, the `examples` of its first dimension, or none (`sum`). In several
    processes, `inputs()` is of the rows of all processes of `group`, by default all: each must call it.

    Raises HyperError for other options, TensorError for a model without such a layer.
    """
    return Covariances(model, collect, mean_over, group)


@dataclass
class _Sums:
    """The sums of a weight: of products of rows, by name, and of the rows counted."""

    products: dict[str, Tensor] = field(default_factory=dict)
    rows: float = 0.0

    def add(self, products: dict[str, Tensor], rows: int) -> None:
        for name, product in products.items():
            self.products[name] = self.products[name] + product if name in self.products else product
        self.rows += rows


class Covariances:
    """See `covariances`. As a context manager it stops collecting at the end."""

    def __init__(self, model: nn.Module, collect: Sequence[str], mean_over: str, group: Any) -> None:
        names = [collect] if isinstance(collect, str) else [*collect]
        if not names or not {*names} <= {*_NAMES}:
            raise HyperError(f"collect={collect!r} of covariances names none of {', '.join(_NAMES)}, or another")
        if mean_over not in _MEANS:
            raise HyperError(f"mean_over={mean_over!r} of covariances is none of {', '.join(_MEANS)}")
        self._names, self._mean_over, self._group = names, mean_over, group
        self._layers = [layer for layer in model.modules() if _is_matrix(layer)]
        if not self._layers:
            raise TensorError("covariances collects of linear layers and convolutions, and the model has none")
        self._sums: dict[nn.Module, _Sums] = {}
        self._handles = [layer.register_forward_hook(self._seen) for layer in self._layers]

    def __enter__(self) -> Covariances:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Stops collecting."""
        for handle in self._handles:
            handle.remove()

    def inputs(self, *, scale: float = 1.0) -> dict[str, dict[Tensor, Tensor]]:
        """The means since the last call, by input and weight, for `optimizer.step(inputs=...)`; counting begins anew.

        Weights without a backward pass have none. `scale` is the factor of gradients of a GradScaler.
        """
        sums = self._by_weight()
        self._sums = {}
        if _processes(self._group) > 1:
            _add_up(sums, self._names, self._group)
        scales = {"a": 1.0, "b": scale * scale}
        return {
            name: {p: each.products[name] / (each.rows * scales[name]) for p, each in sums.items() if each.rows}
            for name in self._names
        }

    def _by_weight(self) -> dict[Tensor, _Sums]:
        """The sums of each weight as the model has it now, in the order of the model; DTensors of FSDP too."""
        sums: dict[Tensor, _Sums] = {}
        for layer in self._layers:
            of_layer = self._sums.get(layer, _Sums())
            sums.setdefault(layer.weight, _Sums()).add(of_layer.products, of_layer.rows)  # type: ignore[arg-type]
        return sums

    def _seen(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Notes a forward pass, whose rows count when its output has a gradient."""
        if not (layer.training and isinstance(output, Tensor) and output.requires_grad and layer.weight.requires_grad):
            return
        if is_dtensor(output) or is_dtensor(args[0]):
            raise RulecError(
                "covariances reads rows of whole layers, and the inputs or outputs of a layer are DTensors: give it "
                "a part of the model without tensor parallelism"
            )
        products = {}
        with torch.no_grad(), torch.autocast(output.device.type, enabled=False):
            if "a" in self._names:
                products["a"] = _product(_rows_in(layer, args[0]))
        output.register_hook(partial(self._reached, layer, products))  # type: ignore[no-untyped-call]

    def _reached(self, layer: nn.Module, products: dict[str, Tensor], grad: Tensor) -> None:
        with torch.no_grad(), torch.autocast(grad.device.type, enabled=False):
            gradients = _rows_out(layer, grad)
            if "b" in self._names:
                terms = {"rows": len(gradients), "examples": len(grad) if grad.dim() > 1 else 1, "sum": 1}
                products = {**products, "b": _product(gradients * terms[self._mean_over])}
            self._sums.setdefault(layer, _Sums()).add(products, len(gradients))


def _is_matrix(layer: nn.Module) -> bool:
    """Whether the layer multiplies rows by one matrix."""
    if isinstance(layer, nn.Conv1d | nn.Conv2d):
        return layer.groups == 1
    return isinstance(layer, nn.Linear)


def _product(rows: Tensor) -> Tensor:
    """The sum of x x^T over rows."""
    return rows.T @ rows


def _wide(x: Tensor) -> Tensor:
    return x.detach() if x.dtype == torch.float64 else x.detach().float()


def _rows_in(layer: nn.Module, x: Tensor) -> Tensor:
    """The rows that the weight is multiplied by: of a convolution, the window at each position."""
    if isinstance(layer, nn.Linear):
        return _wide(x).reshape(-1, layer.in_features)
    assert isinstance(layer, nn.Conv1d | nn.Conv2d)
    flat = isinstance(layer, nn.Conv1d)
    image = _wide(x) if x.dim() == (3 if flat else 4) else _wide(x)[None]
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    image = functional.pad(image, layer._reversed_padding_repeated_twice, mode=mode)
    image = image[:, :, None] if flat else image
    kernel, dilation, stride = ((1, *s) if flat else s for s in (layer.kernel_size, layer.dilation, layer.stride))
    windows = functional.unfold(image, kernel, dilation, 0, stride)
    return windows.transpose(1, 2).reshape(-1, windows.shape[1])


def _rows_out(layer: nn.Module, grad: Tensor) -> Tensor:
    """The gradients of the rows that come out."""
    if isinstance(layer, nn.Linear):
        return _wide(grad).reshape(-1, layer.out_features)
    channels = grad.dim() - (2 if isinstance(layer, nn.Conv1d) else 3)
    return _wide(grad).movedim(channels, -1).reshape(-1, grad.shape[channels])


def _processes(group: Any) -> int:
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def _add_up(sums: dict[Tensor, _Sums], names: Sequence[str], group: Any) -> None:
    """Adds the sums of all processes, in one message for each dtype; a process without a pass has zeros."""
    for dtype in sorted({_dtype(weight) for weight in sums}, key=str):
        chosen = [(weight, each) for weight, each in sums.items() if _dtype(weight) == dtype]
        parts, device = [], chosen[0][0].device
        for weight, each in chosen:
            sides = {"a": weight.numel() // weight.shape[0], "b": weight.shape[0]}
            for name in names:
                empty = torch.zeros(sides[name], sides[name], dtype=dtype, device=device)
                each.products[name] = each.products.get(name, empty)
                parts.append(each.products[name].reshape(-1))
        counts = torch.tensor([each.rows for _, each in chosen], dtype=torch.float64, device=device)
        message = torch.cat(parts)
        dist.all_reduce(message, group=group)
        dist.all_reduce(counts, group=group)
        cuts = iter(torch.split(message, [len(part) for part in parts]))
        for (_, each), count in zip(chosen, counts.tolist(), strict=True):
            each.products = {name: next(cuts).view_as(each.products[name]) for name in names}
            each.rows = count


def _dtype(weight: Tensor) -> torch.dtype:
    return torch.float64 if weight.dtype == torch.float64 else torch.float32
