"""Whether noise is lost in the rounding of parameters of half precision."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
from torch import Tensor

from rulec.es.perturbation import Perturbation
from rulec.es.streams import NOISE
from rulec.torch.es.census import Perturbed
from rulec.torch.es.draws import Draws

#: Elements of each parameter that are looked at, and the share of lost ones from which there is a warning.
_SAMPLE, _SHARE = 4096, 0.1


def warn_of_lost_noise(perturbation: Perturbation, perturbed: Iterable[Perturbed]) -> None:
    """Warns where adding the noise to many weights of half precision gives the same weights again."""
    if perturbation.family == "dropout":
        return
    half = [entry for entry in perturbed if entry.param.dtype in (torch.bfloat16, torch.float16)]
    lost = [_lost(perturbation, entry) for entry in half if entry.param.numel()]
    share = float(torch.cat(lost).double().mean()) if lost else 0.0
    if share > _SHARE:
        warnings.warn(
            f"sigma={perturbation.sigma} is too small for {half[0].param.dtype}: {share:.0%} of weights (of a sample) "
            f"round to themselves when noise is added; give a larger sigma or keep parameters in float32",
            RuntimeWarning, stacklevel=4,
        )  # fmt: skip


def _lost(perturbation: Perturbation, entry: Perturbed) -> Tensor:
    """For a sample of a parameter's elements, whether noise that is not zero leaves them as they are."""
    p, param = perturbation, entry.param.detach()
    step = max(1, param.numel() // _SAMPLE)
    sample = param.reshape(-1)[::step][:_SAMPLE].float()
    noise = Draws(p.seed, entry.number, 0, p.values, param.device).values(NOISE, [0], sample.numel(), torch.float32)[0]
    moved = torch.add(sample, noise, alpha=p.sigma).to(param.dtype).float()
    return (moved == sample)[noise != 0]
