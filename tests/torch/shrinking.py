"""Storages that say they have fewer bytes than they have: a step that reads beyond them fails a test, and no more."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from rulec.torch.fastpath import torch_abi


def say_bytes(tensor: Tensor, size: int) -> None:
    """Has a tensor's storage say that it has `size` bytes. Its memory stays as it is, at the same address."""
    where = torch_abi.layout()
    assert where is not None
    storage = tensor.untyped_storage()
    ctypes.c_int64.from_address(storage._cdata + 8 * where.storage_size).value = size
    assert storage.nbytes() == size


def shrink(tensor: Tensor, size: int = 8) -> None:
    """Has a tensor's storage say that it has fewer bytes than before."""
    assert size < tensor.untyped_storage().nbytes()
    say_bytes(tensor, size)


def shrunk(tensor: Tensor, size: int = 8) -> Tensor:
    """A copy of a tensor in its memory order, whose storage says that it has `size` bytes."""
    copy = torch.empty_like(tensor).copy_(tensor)
    shrink(copy, size)
    return copy
