"""Whether the noise of a model's parameters is lost in their rounding."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from rulec.es import rounding
from rulec.es.perturbations import Perturbations
from rulec.torch.es.census import Perturbed
from rulec.torch.fake import is_fake
from rulec.torch.placed import part_of
from rulec.torch.tensors import dtype_name


def warn_of_lost_noise(perturbations: Perturbations, perturbed: Iterable[Perturbed]) -> None:
    """Warns the caller's caller where many weights round to themselves. To logits of bits no noise is added."""
    samples: dict[str, list[tuple[rounding.Floats, str]]] = {}
    for entry in perturbed:
        if not (entry.is_own or entry.param.is_meta or is_fake(entry.param)):
            samples.setdefault(entry.pattern, []).append((_sample(entry.param), dtype_name(entry.param.dtype)))
    for pattern, some in samples.items():
        rounding.warn_of_lost_noise(perturbations[pattern], some, stacklevel=3)


def _sample(param: torch.Tensor) -> rounding.Floats:
    """Elements of what is here of a parameter, in float64 on the host."""
    here = part_of(param).detach().reshape(-1)
    places = torch.from_numpy(rounding.places(here.numel())).to(here.device)
    found: rounding.Floats = here[places].double().cpu().numpy()
    return found
