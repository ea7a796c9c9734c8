"""The perturbation of a population's members: the family, size and seed of noise, and members' rows in a batch.

Rows of a batch are (repeats, directions), the first half of them positive. A warning is given where noise is lost as it
is added: a weight of few bits, or a large one, rounds to itself.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

import numpy as np

from rulec.errors import HyperError, TensorError
from rulec.es.streams import Stream
from rulec.language.hyper import checked_seed
from rulec.language.source import did_you_mean

Family = Literal["independent", "spsa", "sparse", "permuted", "signflip", "dropout", "lowrank"]
Values = Literal["normal", "rademacher", "popcount"]
Sides = Literal["auto", "rows", "columns", "both"]

FAMILIES: tuple[str, ...] = get_args(Family)
VALUES: tuple[str, ...] = get_args(Values)

#: Families whose noise is one array for all directions, with sides that differ between directions.
SHARED_NOISE = ("permuted", "signflip")


@dataclass(frozen=True)
class Perturbation:
    """How the members of a population differ.

    `directions` draws of noise are made in each step; where `antithetic`, each is taken with both signs. The noise of
    an element has mean 0 and variance 1 and is multiplied by `sigma`. It is a function of `seed`, layer, direction,
    step and element, and of nothing else. Without a seed each strategy has one of its own, shown by its `perturbation`;
    the functions of `rulec.jax.es` take 0.

    Families, by a direction's noise of a weight with `rows` outputs and `columns` inputs:

    - `independent`: a number of its own for each element. `spsa`: the same, but members are evaluated one by one.
    - `sparse`: of its own for each element in `sparsity` of the columns, and zero elsewhere.
    - `permuted`: the same for all, its rows and/or columns (`sides`) in another order, and without antithetic pairs
      with a sign of each direction's own. `in_sparsity` and `out_sparsity` are how many columns and rows it has (a
      whole number, or a share), which must then be among `sides`: the others are zero.
    - `signflip`: the same for all, with the signs of rows and/or columns (`sides`) flipped.
    - `lowrank`: the product of two factors of `rank`, over its root (Sarkar et al., EGGROLL, arXiv 2511.16652).
    - `dropout`: each sees a share `keep` of the inputs, scaled by its inverse; `sigma` means nothing.

    `values` is the distribution of noise: `normal`, `rademacher` (1 and -1) or `popcount` (set bits of a byte,
    centred and scaled: a binomial); the last two are equal bit for bit on every backend.

    Raises HyperError for a family, a number or a combination that there is not.
    """

    family: Family
    directions: int
    sigma: float = 0.01
    antithetic: bool = True
    seed: int | None = None
    rank: int = 1
    sparsity: int | None = None
    values: Values = "normal"
    sides: Sides = "auto"
    in_sparsity: float | None = None
    out_sparsity: float | None = None
    keep: float = 0.5

    def __post_init__(self) -> None:
        _check_word("family", self.family, FAMILIES)
        _check_word("values", self.values, VALUES)
        _check_word("sides", self.sides, get_args(Sides))
        _check_count("directions", self.directions)
        _check_count("rank", self.rank)
        if self.seed is not None:
            object.__setattr__(self, "seed", checked_seed(self.seed))
        if not _is_number(self.sigma) or not 0.0 < self.sigma < math.inf:
            raise HyperError(f"sigma={self.sigma!r} must be a finite number above 0: without noise nothing is learnt")
        if not _is_number(self.keep) or not 0.0 < self.keep < 1.0:
            raise HyperError(f"keep={self.keep!r} must lie between 0 and 1: the share of neurons that stay")
        self._check_belonging()
        self._check_sparsity()
        if not self.antithetic and self.directions < 2:
            raise HyperError("directions=1 without antithetic pairs has nothing to compare: give 2 or more directions")
        if self.family == "dropout" and self.antithetic and self.keep != 0.5:
            raise HyperError(
                f"antithetic pairs of dropout are complements, which needs keep=0.5, not {self.keep}: "
                f"give antithetic=False"
            )

    def _check_sparsity(self) -> None:
        if self.family == "sparse" and self.sparsity is None:
            raise HyperError("the sparse family needs sparsity=, the number of inputs that each direction perturbs")
        if self.sparsity is not None:
            _check_count("sparsity", self.sparsity)
        for name in ("in_sparsity", "out_sparsity"):
            value = getattr(self, name)
            if value is None:
                continue
            if not _is_number(value) or value <= 0 or (value > 1 and value != int(value)):
                raise HyperError(f"{name}={value!r} must be a share of at most 1.0 or a whole number of lines")
            lines = "columns" if name == "in_sparsity" else "rows"
            if self.sides not in ("auto", lines, "both"):
                raise HyperError(
                    f"{name}= with sides={self.sides!r} would leave the same {lines} without noise for ever: "
                    f"give sides={lines!r}, 'both' or 'auto'"
                )

    def _check_belonging(self) -> None:
        """Raises for what another family takes."""
        default = {f.name: f.default for f in fields(self)}
        for name, families in _BELONGS.items():
            if self.family not in families and getattr(self, name) != default[name]:
                raise HyperError(f"{name}= is for the families {' and '.join(families)}, not for {self.family!r}")

    @property
    def seed_or_0(self) -> int:
        """The seed, and 0 where none is given."""
        return self.seed or 0

    @property
    def size(self) -> float:
        """The factor of noise under the positive sign: `sigma`, and 1 for dropout."""
        return 1.0 if self.family == "dropout" else self.sigma

    def with_sigma(self, sigma: float) -> Perturbation:
        """The same with more or less noise; HyperError for a bad sigma, and for dropout, which has none."""
        if self.family == "dropout":
            raise HyperError("sigma means nothing to dropout: change keep, in a perturbation of its own")
        return replace(self, sigma=sigma)

    @property
    def members(self) -> int:
        """How many networks are evaluated in a step."""
        return 2 * self.directions if self.antithetic else self.directions

    @property
    def signs(self) -> int:
        """How many signs each direction is taken with: 2 or 1."""
        return 2 if self.antithetic else 1

    def sides_of(self, rows: int, columns: int) -> tuple[bool, bool]:
        """Whether the rows, and whether the columns of a weight differ between directions; permuted and signflip."""
        if self.sides != "auto":
            return self.sides in ("rows", "both"), self.sides in ("columns", "both")
        if self.in_sparsity is not None or self.out_sparsity is not None:
            return self.out_sparsity is not None, self.in_sparsity is not None
        if rows == 1 or columns == 1:
            # Of a single line nothing differs: the other side must.
            return rows > 1 or columns == 1, columns > 1
        return True, self.family == "signflip" or max(rows, columns) < _FEW

    def lines_of(self, rows: int, columns: int) -> tuple[int, int]:
        """How many rows and columns the noise of a weight has; fewer than these in permuted and sparse alone."""
        if self.sparsity is not None:
            return rows, min(columns, self.sparsity)
        return _lines(self.out_sparsity, rows), _lines(self.in_sparsity, columns)

    def scale_of(self, rows: int, columns: int) -> float:
        """What noise of so few lines is multiplied by, for a variance of 1 on the average over all of them."""
        high, wide = self.lines_of(rows, columns)
        return math.sqrt(rows / high * columns / wide)

    def kept_of(self, columns: int) -> int:
        """How many inputs each direction of dropout keeps, at least one; raises HyperError for pairs without halves."""
        kept = max(1, round(self.keep * columns))
        if self.antithetic and 2 * kept != columns:
            raise HyperError(
                f"antithetic pairs of dropout are complements, and {columns} inputs have no halves: "
                f"give antithetic=False"
            )
        return kept

    def as_dict(self) -> dict[str, Any]:
        """Its fields, for a saved state."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


#: Fields that some families alone take.
_BELONGS: dict[str, tuple[str, ...]] = {
    "rank": ("lowrank",), "sparsity": ("sparse",), "sides": SHARED_NOISE, "keep": ("dropout",),
    "in_sparsity": ("permuted",), "out_sparsity": ("permuted",),
}  # fmt: skip

#: Permuted noise of weights with fewer lines than this on both sides differs on both: there are too few orders of one.
_FEW = 32


def _lines(asked: float | None, there: int) -> int:
    if asked is None:
        return there
    share = asked <= 1 and not (isinstance(asked, int) and not isinstance(asked, bool))
    return min(there, max(1, int(asked * there) if share else int(asked)))


def _check_word(name: str, value: Any, known: tuple[str, ...]) -> None:
    if value not in known:
        raise HyperError(f"{name}={value!r} is none of {', '.join(known)}{did_you_mean(str(value), known)}")


def _check_count(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise HyperError(f"{name}={value!r} must be a whole number of at least 1")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


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


Floats = np.ndarray[Any, np.dtype[np.float64]]

#: Elements of each array that are looked at, and the share of lost ones from which there is a warning.
SAMPLE, _SHARE = 4096, 0.1

#: Significant bits by dtype, and the exponent of the smallest number that has them all.
_BITS = {"float64": (53, -1022), "float32": (24, -126), "bfloat16": (8, -126), "float16": (11, -14)}


def places(size: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The elements of an array of `size` that are looked at, by number."""
    return np.arange(0, size, max(1, size // SAMPLE))[:SAMPLE]


def rounded(numbers: Floats, dtype: str) -> Floats:
    """Numbers rounded to the nearest of a dtype, in float64; those too large for it stay finite."""
    if dtype == "float64":
        return numbers
    bits, least = _BITS[dtype]
    exponent = np.maximum(np.frexp(numbers)[1], least + 1) - bits
    return np.asarray(np.ldexp(np.rint(np.ldexp(numbers, -exponent)), exponent))


def warn_of_lost_noise(perturbation: Perturbation, samples: Sequence[tuple[Floats, str]], stacklevel: int = 2) -> None:
    """Warns where adding noise to many weights gives the same weights again.

    `samples` are elements of each array, at `places`, with its dtype. Only floating-point numbers of 16 to 64 bits are
    looked at. Dropout is not: its noise is as large as the weights.
    """
    if perturbation.family == "dropout":
        return
    noise = Stream(perturbation.seed_or_0, 0, 0, 0).values(perturbation.values, SAMPLE)
    lost = [(_lost(sample, perturbation.sigma * noise, dtype), dtype) for sample, dtype in samples if dtype in _BITS]
    share = sum(mask.sum() for mask, _ in lost) / max(1, sum(mask.size for mask, _ in lost))
    if share > _SHARE:
        worst = max(lost, key=lambda each: int(each[0].sum()))[1]
        outputs = "" if perturbation.family == "spsa" else ", and outputs of layers about as often"
        warnings.warn(
            f"sigma={perturbation.sigma} is too small for {worst}: {share:.0%} of weights (of a sample) round to "
            f"themselves when noise is added{outputs}; give a larger sigma, or parameters of more bits",
            RuntimeWarning, stacklevel=stacklevel + 1,
        )  # fmt: skip


def _lost(weights: Floats, noise: Floats, dtype: str) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Whether each weight stays as it is, among the weights with noise other than zero."""
    noise = noise[: weights.size]
    return np.asarray((rounded(weights + noise, dtype) == weights)[noise != 0])
