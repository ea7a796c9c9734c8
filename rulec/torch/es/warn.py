"""Warnings about a perturbed model: noise that is lost in rounding, and layers left alone."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch

from rulec.es import rounding
from rulec.es.perturbations import Perturbations
from rulec.torch.es.model import FROZEN, Census, Perturbed
from rulec.torch.tensors.dtensor import part_of
from rulec.torch.tensors.fake import is_fake
from rulec.torch.tensors.tensors import dtype_name

#: Layers of one reason that are named.
_NAMED = 6


def warn_of_lost_noise(perturbations: Perturbations, perturbed: Iterable[Perturbed], stacklevel: int) -> None:
    """Warns where many weights round to themselves; `stacklevel` 1 is the caller. Logits of bits have no noise."""
    samples: dict[str, list[tuple[rounding.Floats, str]]] = {}
    for entry in perturbed:
        if not (entry.is_self_estimated or entry.param.is_meta or is_fake(entry.param)):
            samples.setdefault(entry.pattern, []).append((_sample(entry.param), dtype_name(entry.param.dtype)))
    for pattern, some in samples.items():
        rounding.warn_of_lost_noise(perturbations[pattern], some, stacklevel + 1)


def warn_of_left_alone(census: Census) -> None:
    """Warns the caller's caller of trained layers without a perturbed parameter."""
    there = set(census.replaced)
    reasons: dict[str, list[str]] = {}
    for name, reason in census.left_alone.items():
        layer = name.rpartition(".")[0]
        if layer not in there and reason != FROZEN:
            layers = reasons.setdefault(reason, [])
            if layer not in layers:
                layers.append(layer)
    if reasons:
        each = "; ".join(f"{_some(layers)} ({reason})" for reason, layers in reasons.items())
        warnings.warn(
            f"layers with parameters that are left alone, and have no gradient: {each}", RuntimeWarning, stacklevel=3
        )


def _some(layers: list[str]) -> str:
    named = ", ".join(layer or "the model itself" for layer in layers[:_NAMED])
    return named if len(layers) <= _NAMED else f"{named} and {len(layers) - _NAMED} more"


def _sample(param: torch.Tensor) -> rounding.Floats:
    """Elements of what is here of a parameter, in float64 on the host."""
    here = part_of(param).detach().reshape(-1)
    places = torch.from_numpy(rounding.places(here.numel())).to(here.device)
    sample: rounding.Floats = here[places].double().cpu().numpy()
    return sample
