"""The batch of a population: rows as signs, repeats and directions, and noise added to what all members share.

Tensors of a population are (signs, repeats, directions, *rest). An axis of length 1 in signs or directions says that
all members have the same values along it. If all members have the same samples, the first layer computes the shared
product once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from weakref import ref

from torch import Tensor, add, addcmul

from rulec.errors import TensorError
from rulec.es.perturbation import Perturbation, repeats_of


@dataclass(frozen=True)
class Population:
    """How a batch is dealt out: so many signs, repeats under each of them, and directions.

    `scales` is what each sign's noise is multiplied by `under` a layer's perturbation: sigma, and minus sigma where
    antithetic.
    """

    signs: int
    repeats: int
    directions: int
    scales: tuple[float, ...] = ()

    @property
    def rows(self) -> int:
        """Rows of the batch."""
        return self.signs * self.repeats * self.directions

    @property
    def lead(self) -> tuple[int, int, int]:
        """The axes in the place of the rows."""
        return self.signs, self.repeats, self.directions

    def under(self, perturbation: Perturbation) -> Population:
        """The same members under the perturbation of one layer."""
        return replace(self, scales=(perturbation.size, -perturbation.size)[: self.signs])

    def split(self, tensor: Tensor, name: str) -> Tensor:
        """The tensor with signs, repeats and directions in the place of its rows; TensorError where it has others."""
        if tensor.shape[0] != self.rows:
            raise TensorError(
                f"{name} sees {tensor.shape[0]} rows of a batch of {self.rows}: the first dimension of everything "
                f"that goes through a perturbed layer must be the batch"
            )
        return tensor.reshape(*self.lead, *tensor.shape[1:])


def population_of(rows: int, perturbation: Perturbation) -> Population:
    """The population of a batch of so many rows; TensorError where the rows cannot be dealt out."""
    signs = perturbation.signs
    repeats = repeats_of(rows, perturbation) // signs
    return Population(signs, repeats, perturbation.directions)


def combined(base: Tensor, noise: Tensor, who: Population, factor: Tensor | None = None) -> Tensor:
    """base + scale*noise*factor for each sign: in place where `base` differs between members, else a new tensor.

    `factor` is (directions, ...), as it meets the rest.
    """
    full = tuple(base.shape[:3]) == who.lead
    out = base if full else base.new_empty(*who.lead, *base.shape[3:])
    for sign, scale in zip(range(who.signs), who.scales, strict=True):
        old, new = _of_sign(base, sign), _of_sign(noise, sign)
        if factor is None:
            add(old, new, alpha=scale, out=out[sign])
        else:
            addcmul(old, new, factor, value=scale, out=out[sign])
    return out


def added(base: Tensor, noise: Tensor, who: Population) -> Tensor:
    """base + noise, where `noise` is (signs, 1, directions, ...): in place where `base` differs between members."""
    return base.add_(noise) if tuple(base.shape[:3]) == who.lead else base + noise


def whole(base: Tensor, who: Population) -> Tensor:
    """What members share, once for each of them, if it is not so yet."""
    return base if tuple(base.shape[:3]) == who.lead else base.expand(*who.lead, *base.shape[3:]).contiguous()


def _of_sign(tensor: Tensor, sign: int) -> Tensor:
    return tensor[sign if tensor.shape[0] > 1 else 0]


def blocks(count: int, size: int) -> Sequence[range]:
    """0 to `count` in runs of at most `size`."""
    return [range(start, min(start + size, count)) for start in range(0, count, size)]


class Marked:
    """A batch made of samples that were dealt to all members, as long as it is there and nobody has written to it."""

    def __init__(self, batch: Tensor) -> None:
        self._batch = ref(batch)
        self._version = _version(batch)

    @property
    def lives(self) -> bool:
        """Whether somebody still has the batch."""
        return self._batch() is not None

    def is_batch(self, batch: Tensor) -> bool:
        """Whether a batch is this one, unchanged."""
        return self._batch() is batch and self.has(batch)

    def has(self, x: Tensor) -> bool:
        """Whether a tensor has the same rows: it is the batch, or the same memory in another shape of its rows."""
        batch = self._batch()
        if batch is None or _version(batch) != self._version or self._version is None:
            return False
        return x is batch or (
            x.data_ptr() == batch.data_ptr() and x.numel() == batch.numel() and x.dtype == batch.dtype
            and x.shape[0] == batch.shape[0] and x.is_contiguous() and x._is_view()
        )  # fmt: skip


def _version(tensor: Tensor) -> int | None:
    """How often torch has written to a tensor; None where it does not count."""
    return None if tensor.is_inference() else tensor._version
