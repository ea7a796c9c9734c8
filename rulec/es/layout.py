"""How the members of a population lie in a batch: rows are (repeats, directions), the first half of them positive."""

from __future__ import annotations

from typing import Any

import numpy as np

from rulec.errors import TensorError
from rulec.es.perturbation import Perturbation


def repeats_of(rows: int, perturbation: Perturbation) -> int:
    """How often each direction occurs in a batch of so many rows; raises TensorError where it does not divide."""
    members = perturbation.members
    if rows == 0 or rows % members:
        what = f"{members} members ({perturbation.directions} directions, {perturbation.signs} signs)"
        raise TensorError(
            f"a batch of {rows} rows cannot be dealt to {what}: its first dimension must be a multiple of {members}"
        )
    return rows // perturbation.directions


def tiled(samples: int, perturbation: Perturbation) -> np.ndarray[Any, np.dtype[np.int64]]:
    """For each row of a batch in which every member sees the same samples, the number of its sample."""
    one_sign = np.repeat(np.arange(samples), perturbation.directions)
    return np.tile(one_sign, perturbation.signs)


def numbers(fitness: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Fitness in float64; TensorError for what is no array of real numbers."""
    try:
        found = np.asarray(fitness)
        if found.dtype.kind in "OcSUmM":
            raise TypeError(f"there is an array of {found.dtype}")
        return found.astype(np.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TensorError(f"fitness or loss must be an array of real numbers: {error}") from error


def of_members(fitness: Any, perturbation: Perturbation) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Fitness by (sign, direction), in float64: of (members,), or the means over each member's rows of a batch.

    Raises TensorError for another length.
    """
    found = numbers(fitness)
    members, shape = perturbation.members, (perturbation.signs, perturbation.directions)
    if found.shape == shape:
        return found
    if found.ndim != 1 or found.size == 0 or found.size % members:
        raise TensorError(
            f"fitness of shape {found.shape} must have one number for each of {members} members, "
            f"or for each row of their batch"
        )
    by_row = found.reshape(shape[0], found.size // members, shape[1])
    return np.asarray(by_row.mean(axis=1))
