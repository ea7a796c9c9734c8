"""How the members of a population lie in a batch: rows are (repeats, directions), the first half of them positive."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from rulec.errors import HyperError, TensorError
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
        array = np.asarray(fitness)
        if array.dtype.kind in "OcSUmM":
            raise TypeError(f"there is an array of {array.dtype}")
        return array.astype(np.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TensorError(f"fitness or loss must be an array of real numbers: {error}") from error


def fitness_of(
    fitness: Any, loss: Any, perturbation: Perturbation, rows: Collection[int]
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Fitness by (sign, direction), from either the fitness or the loss, by member or by row of a batch.

    `rows` are the lengths of the batches that were evaluated. HyperError where neither or both are given, TensorError
    for numbers of neither members nor rows: a number's place would not tell its member.
    """
    if (fitness is None) == (loss is None):
        raise HyperError("an update needs either fitness= or loss=, and not both")
    values = numbers(fitness) if loss is None else -numbers(loss)
    members = perturbation.members
    if values.ndim == 1 and values.size not in {members, *rows}:
        batches = " or ".join(map(str, sorted(rows)))
        raise TensorError(
            f"fitness has {values.size} numbers, where there are {members} members and batches of {batches} rows: take "
            f"the mean over what a row has more of, such as tokens, and over several batches by member"
        )
    return of_members(values, perturbation)


def of_members(fitness: Any, perturbation: Perturbation) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Fitness by (sign, direction), in float64: of (members,), or the means over each member's rows of a batch.

    Raises TensorError for another length.
    """
    values = numbers(fitness)
    members, shape = perturbation.members, (perturbation.signs, perturbation.directions)
    if values.shape == shape:
        return values
    if values.ndim != 1 or values.size == 0 or values.size % members:
        raise TensorError(
            f"fitness of shape {values.shape} must have one number for each of {members} members, "
            f"or for each row of their batch"
        )
    by_row = values.reshape(shape[0], values.size // members, shape[1])
    return np.asarray(by_row.mean(axis=1))
