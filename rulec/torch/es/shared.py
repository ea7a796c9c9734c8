"""The batch of all members on the same samples: the first layer computes the shared product once."""

from __future__ import annotations

from weakref import ref

from torch import Tensor


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
