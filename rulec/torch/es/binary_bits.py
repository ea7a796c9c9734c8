"""Bits as tensors: booleans as PyTorch has them, or packed in int64; and as the arrays of kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from rulec.errors import TensorError
from rulec.es.binary import pack, unpack, words_of
from rulec.torch.tensors.memory import resolved


def array_of(tensor: Tensor) -> Any:
    """The same memory as an array: NumPy's, or CuPy's on a GPU."""
    plain = resolved(tensor.detach().contiguous())
    if plain.device.type == "cpu":
        return plain.numpy()
    import cupy

    return cupy.from_dlpack(plain)


def tensor_of(array: Any) -> Tensor:
    """The same memory as a tensor, words as int64."""
    whole = array.view(np.int64) if array.dtype == np.uint64 else array
    return torch.from_numpy(whole) if isinstance(whole, np.ndarray) else from_dlpack(whole)


def packed(bits: Tensor, count: int, name: str) -> Any:
    """Words (rows..., words), uint64, of bits (rows..., count): booleans, or int64 that are packed already.

    TensorError where they are something else or have other sizes.
    """
    if bits.dtype == torch.bool:
        if bits.shape[-1] != count:
            raise TensorError(f"{name} takes {count} bits and was given {bits.shape[-1]}")
        return pack(array_of(bits))
    if bits.dtype != torch.int64:
        raise TensorError(f"{name} takes bits, torch.bool or packed in torch.int64, and was given {bits.dtype}")
    if bits.shape[-1] != words_of(count):
        raise TensorError(f"{name} takes {count} bits in {words_of(count)} words and was given {bits.shape[-1]} words")
    return array_of(bits).view(np.uint64)


def as_given(bits: Tensor, batch: Tensor) -> Tensor:
    """Booleans (rows..., count) in the form of the batch: as they are, or packed."""
    return bits if batch.dtype == torch.bool else pack_bits(bits)


def pack_bits(bits: Tensor) -> Tensor:
    """Booleans (..., n) packed along the last axis: int64 (..., words), the first bit in the lowest of the first."""
    return tensor_of(pack(array_of(bits)))


def unpack_bits(words: Tensor, count: int) -> Tensor:
    """The first `count` bits of packed lines, int64 (..., words), as booleans (..., count)."""
    return tensor_of(unpack(array_of(words).view(np.uint64), count))
