"""What each family computes, once for NumPy, CuPy and JAX: noise, products with it, and its weighted sum.

A weight lies here as (*window, inputs, outputs): `x @ W`, and kernels of convolutions as HWIO. Its noise is the noise
of a weight of (outputs, inputs, *window) in `rulec.es.dense`, transposed. Only independent noise, with a number of its
own for each element, is numbered as the weight lies in memory.

Rows of a batch are (repeats, directions, ..., inputs), the first half of the repeats of positive sign where antithetic.
"""

from __future__ import annotations

from typing import Any

from rulec.es.families.base import Draws, Family, SharedNoise
from rulec.es.families.simple import Dropout, Independent, LowRank, Permuted, SignFlip, Sparse
from rulec.es.perturbation import Perturbation

__all__ = [
    "Draws", "Dropout", "Family", "Independent", "LowRank", "Permuted", "SharedNoise", "SignFlip", "Sparse",
    "family", "is_plain",
]  # fmt: skip

_FAMILIES: dict[str, type[Family]] = {
    "independent": Independent, "spsa": Independent, "sparse": Sparse, "permuted": Permuted, "signflip": SignFlip,
    "lowrank": LowRank, "dropout": Dropout,
}  # fmt: skip


def family(perturbation: Perturbation, shape: tuple[int, ...], draws: Draws, size: Any = None) -> Family:
    """The noise of a weight (*window, inputs, outputs); that of a vector is of its own for each element.

    It is multiplied by `size`, which may be an array of one number, and by default by the perturbation's.
    """
    noise = _kind(perturbation, shape)(perturbation, shape, draws)
    if size is not None:
        noise.size = size
    return noise


def is_plain(perturbation: Perturbation, shape: tuple[int, ...]) -> bool:
    """Whether noise is of its own for each element, numbered as the array lies in memory: `Draws.summed` of it."""
    return _kind(perturbation, shape) is Independent


def _kind(perturbation: Perturbation, shape: tuple[int, ...]) -> type[Family]:
    return _FAMILIES[perturbation.family] if len(shape) > 1 else Independent
