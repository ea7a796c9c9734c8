"""The words of a tensor in memory, from its shape to its address: whether it is as it was, without a call.

`layout` finds the words by tensors of known shapes, strides and addresses. Every step looks at each tensor
that a user can reach, so a look must cost less than a call of torch's. Where a word changed, torch is asked.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rulec.torch.tensors.fake import real_memory

Numbers = np.ndarray[Any, np.dtype[Any]]

#: The number of words that are searched in an implementation of a tensor, and in a storage.
_IMPL_WORDS, _STORAGE_WORDS = 23, 8


@dataclass(frozen=True)
class TensorLayout:
    """The places of words, counted from the beginning of what has them.

    A tensor's object has its implementation at `object_impl`. The implementation has its storage at `impl_storage`;
    from `impl_first` on, `impl_words` words have its number of dimensions, sizes, strides, offset, number of elements,
    dtype, device and dispatch keys. The storage has its address and the owner of that memory in `data_words` words
    from `storage_data` on.
    """

    object_impl: int
    impl_storage: int
    impl_first: int
    impl_words: int
    storage_data: int
    data_words: int = 3


#: The most dimensions whose sizes stand among the words of an implementation.
MOST_DIMS = 5


@functools.cache
def layout() -> TensorLayout | None:
    """The places of the words; None where tensors of known answers disagree, or do not show a difference."""
    with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"), real_memory():
        long = torch.zeros(99991).as_strided((3, 5, 7, 11, 13), (7211, 1237, 102, 17, 2), 41)
        flat = torch.zeros(1009, dtype=torch.bfloat16).as_strided((13, 17), (29, 31), 19)
        probed = _layout_of(long)
        right = probed is not None and probed == _layout_of(flat) and _shows_differences(probed)
    return probed if right else None


def _layout_of(tensor: Tensor) -> TensorLayout | None:
    """The places where the known answers of a tensor stand; None where one stands nowhere, or not once."""
    storage, keys = tensor.untyped_storage(), torch._C._dispatch_keys(tensor).raw_repr()
    of_object = _words(id(tensor), type(tensor).__basicsize__ // 8)
    of_impl, of_storage = _words(tensor._cdata, _IMPL_WORDS), _words(storage._cdata, _STORAGE_WORDS)
    sizes = [tensor.dim(), *tensor.shape]
    starts = [i for i in range(_IMPL_WORDS) if of_impl[i : i + len(sizes)] == sizes]
    if len(starts) != 1 or of_object.count(tensor._cdata) != 1 or of_impl.count(storage._cdata) != 1:
        return None
    after = of_impl[starts[0] :]
    wanted = {*tensor.stride(), tensor.storage_offset(), tensor.numel(), keys}
    if not wanted <= {*after} or storage.data_ptr() not in of_storage:
        return None
    at_object, at_storage = of_object.index(tensor._cdata), of_impl.index(storage._cdata)
    return TensorLayout(at_object, at_storage, starts[0], after.index(keys) + 1, of_storage.index(storage.data_ptr()))


def _shows_differences(where: TensorLayout) -> bool:
    """Whether tensors that differ in one thing have other words, and a storage has others once it is shared."""
    plain = torch.zeros(12)
    with torch.inference_mode():
        inferred = torch.zeros(12)
    alike = [
        plain, torch.zeros(12, dtype=torch.int32), torch._neg_view(plain), plain.view(3, 4), plain.view(4, 3),
        plain[:6], plain[6:], plain.as_strided((12,), (0,)), inferred, torch.zeros(12, device="meta"),
    ]  # fmt: skip
    of_impl = {tuple(words_of(where, t)[3 : 3 + where.impl_words]) for t in alike}
    before = words_of(where, plain)
    shared = torch._lazy_clone(plain)
    return len(of_impl) == len(alike) and shared is not None and tuple(before) != tuple(words_of(where, plain))


def words_of(where: TensorLayout, tensor: Tensor) -> list[int]:
    """A tensor's object, its implementation and its storage, and the words of the last two that may change."""
    storage = tensor.untyped_storage()._cdata
    of_storage = _words(storage + 8 * where.storage_data, where.data_words)
    return [id(tensor), tensor._cdata, storage, *impl_words_of(where, tensor), *of_storage]


def impl_words_of(where: TensorLayout, tensor: Tensor) -> list[int]:
    """The words of a tensor's implementation, from its shape on."""
    return _words(tensor._cdata + 8 * where.impl_first, where.impl_words)


def _words(address: int, count: int) -> list[int]:
    return [*_array_of(count).from_address(address)]


@functools.cache
def _array_of(count: int) -> Any:
    return ctypes.c_int64 * count
