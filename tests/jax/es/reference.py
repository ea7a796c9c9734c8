"""What members and estimates of a tree have to be, from the noise that the framework-free definition gives."""

from __future__ import annotations

from typing import Any

import numpy as np

from rulec.es import Perturbation, dense
from rulec.es.fitness import weights
from rulec.es.perturbation import of_members

#: Each family and each of its variants, with few directions.
CASES = {
    "independent": Perturbation("independent", 3, 0.3, seed=0),
    "one_sided": Perturbation("independent", 3, 0.3, antithetic=False, values="popcount", seed=0),
    "sparse": Perturbation("sparse", 3, 0.3, sparsity=3, seed=5),
    "permuted_rows": Perturbation("permuted", 3, 0.3, sides="rows", out_sparsity=3, values="rademacher", seed=0),
    "permuted_columns": Perturbation("permuted", 3, 0.3, sides="columns", in_sparsity=0.5, seed=0),
    "permuted_both": Perturbation("permuted", 3, 0.3, in_sparsity=6, out_sparsity=0.7, seed=0),
    "permuted_one_sided": Perturbation("permuted", 5, 0.3, antithetic=False, out_sparsity=3, seed=0),
    "permuted_both_one_sided": Perturbation("permuted", 4, 0.3, antithetic=False, sides="both", in_sparsity=6, seed=0),
    "signflip_rows": Perturbation("signflip", 3, 0.3, sides="rows", values="popcount", seed=0),
    "signflip_columns": Perturbation("signflip", 3, 0.3, sides="columns", seed=0),
    "signflip_both": Perturbation("signflip", 3, 0.3, sides="both", values="rademacher", seed=0),
    "lowrank": Perturbation("lowrank", 3, 0.3, rank=2, seed=2**32 - 1),
    "dropout": Perturbation("dropout", 3, seed=0),
    "dropout_one_sided": Perturbation("dropout", 5, antithetic=False, keep=0.3, seed=0),
}


def _turned(perturbation: Perturbation, array: Any, back: bool = False) -> Any:
    """A weight (*window, inputs, outputs) as (outputs, inputs, *window), or back; where noise is numbered so."""
    if array.ndim < 2 or perturbation.family == "independent":
        return array
    last = array.ndim - 1
    return array.transpose(*range(2, array.ndim), 1, 0) if back else array.transpose(last, last - 1, *range(last - 1))


def member(perturbation: Perturbation, weight: Any, layer: int, step: int, index: int) -> Any:
    """One member's array, in float64."""
    weight = np.asarray(weight, np.float64)
    direction, sign = index % perturbation.directions, 1 if index < perturbation.directions else -1
    noise = dense.noise(perturbation, _turned(perturbation, weight).shape, layer, step, direction)
    noise = _turned(perturbation, noise, back=True)
    return weight + sign * (noise * weight if perturbation.family == "dropout" else perturbation.sigma * noise)


def estimate(perturbation: Perturbation, weight: Any, layer: int, step: int, fitness: Any) -> Any:
    """The estimate of one array's gradient, in float64."""
    weighed = weights(of_members(fitness, perturbation), perturbation).values
    turned = _turned(perturbation, np.asarray(weight, np.float64))
    return _turned(perturbation, dense.estimate(perturbation, turned, layer, step, weighed), back=True)


def members_of_rows(perturbation: Perturbation, rows: int) -> Any:
    """The member that each row of a batch belongs to."""
    directions = perturbation.directions
    row = np.arange(rows)
    negative = row >= rows // perturbation.signs
    return row % directions + directions * negative
