"""Estimates of the diagonal of the Hessian, for rules that read it as an input."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from rulec.errors import HyperError, TensorError

#: The kinds of random vectors.
DRAWS = ("rademacher", "normal")


def hutchinson(
    params: Any, loss: Tensor, *, samples: int = 1, draws: str = "rademacher", generator: torch.Generator | None = None
) -> dict[Tensor, Tensor]:
    """Parameter -> Hutchinson's estimate of its part of the diagonal of the Hessian of `loss`.

    It is the mean of z*(Hz) over `samples` random vectors z with elements of -1 and 1, or normal ones. `params` is a
    module, or tensors. A tensor without requires_grad is left out. If the second derivative is zero, so is the
    estimate. Each sample costs a backward pass through the gradient. The graph of `loss` stays, for `backward()` after
    it. The mapping is an input like `p`: `opt.step(inputs={"hessian": hutchinson(model, loss)})`.

    Raises TensorError where `loss` is not one number with a graph, HyperError for other options.
    """
    if draws not in DRAWS:
        raise HyperError(f"draws={draws!r} of hutchinson is none of {', '.join(DRAWS)}")
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
        raise HyperError(f"samples={samples!r} of hutchinson must be a whole number from 1 on")
    if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.grad_fn is None:
        raise TensorError("hutchinson differentiates a loss: one number with a graph, before backward() frees it")
    known = [*_parameters(params)]
    if not known:
        raise TensorError(
            "hutchinson has no parameter to differentiate by: give a module, or tensors with requires_grad"
        )
    with torch.enable_grad():
        grads = torch.autograd.grad(loss, known, create_graph=True, allow_unused=True)
    diagonal = {param: torch.zeros_like(param, requires_grad=False) for param in known}
    live = [(param, grad) for param, grad in zip(known, grads, strict=True) if grad is not None and grad.grad_fn]
    for _ in range(samples if live else 0):
        vectors = [_drawn(param, draws, generator) for param, _ in live]
        products = torch.autograd.grad(
            [grad for _, grad in live], [param for param, _ in live], vectors, retain_graph=True, allow_unused=True
        )
        with torch.no_grad():
            for (param, _), vector, product in zip(live, vectors, products, strict=True):
                if product is not None:
                    diagonal[param].addcmul_(vector, product, value=1 / samples)
    return diagonal


def _parameters(params: Any) -> Iterator[Tensor]:
    tensors = params.parameters() if isinstance(params, torch.nn.Module) else params
    if isinstance(tensors, Tensor):
        tensors = [tensors]
    if isinstance(tensors, Mapping) or not isinstance(tensors, Iterable):
        raise TensorError(f"hutchinson takes a module or tensors, not {type(params).__name__}")
    yield from (tensor for tensor in tensors if tensor.requires_grad)


def _drawn(param: Tensor, draws: str, generator: torch.Generator | None) -> Tensor:
    """One random vector of a parameter's shape, dtype and device."""
    normal = torch.empty_like(param, requires_grad=False).normal_(generator=generator)
    return normal if draws == "normal" else torch.where(normal < 0, -1.0, 1.0).to(param.dtype)
