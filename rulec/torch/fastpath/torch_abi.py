"""The ABI of torch and CPython: addresses of exported functions, and the layout of a tensor's words in memory.

Machine code asks these functions about tensors, lists and dicts. They are CPython's C API, the C functions that
compiled models of torch call (`aoti_torch_*`), and a few C++ functions of torch, whose names have the types of their
arguments. If a name is missing, the step asks tensors one by one.

A handle of these functions is an `at::Tensor *`, as torch's headers say. An `at::Tensor` is a pointer to a tensor's
implementation, as it is in every compiled extension; `Tensor._cdata` is that pointer, and is compared with it.

`layout` finds the words of a tensor, from its shape to its address, by tensors of known shapes, strides and addresses.
Every step looks at each tensor that a user can reach, so a look must cost less than a call of torch. If a word
changed, torch is asked.

The functions are worth it. On two cores of a Xeon, steps of 1, 30 and 1000 tensors of 1000 elements, and of 300 of
10,000, take 0.15, 0.19, 0.25 and 0.69 of torch's fused step. With RULEC_SURVEY=0 they take 0.74, 0.57, 0.40 and 0.78.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rulec.torch.tensors.fake import real_memory

Numbers = np.ndarray[Any, np.dtype[Any]]

#: CPython's functions, by our names.
_OF_PYTHON = {
    "list_size": "PyList_Size", "list_item": "PyList_GetItem", "dict_size": "PyDict_Size", "dict_next": "PyDict_Next",
    "attribute": "PyObject_GetAttr", "compare": "PyObject_RichCompareBool", "drop": "Py_DecRef",
    "forgive": "PyErr_Clear",
}  # fmt: skip

#: What `PyObject_RichCompareBool` takes for `==`, and the place of the class among the words of an object.
EQUAL, OBJECT_CLASS = 2, 1

#: torch's functions, by our names. `aoti_torch_get_data_ptr` refuses tensors of other layouts than torch.strided.
_OF_TORCH = {
    # bool pybind11::detail::type_caster<at::Tensor>::load(pybind11::handle, bool): takes the tensor of an object.
    "load": "_ZN8pybind116detail11type_casterIN2at6TensorEvE4loadENS_6handleEb",
    # const at::Tensor& c10::TensorImpl::grad() const
    "grad": "_ZNK3c1010TensorImpl4gradEv",
    # bool at::native::is_neg(const at::Tensor&)
    "is_neg": "_ZN2at6native6is_negERKNS_6TensorE",
    # void torch::autograd::impl::bump_version(const at::Tensor&)
    "bump_version": "_ZN5torch8autograd4impl12bump_versionERKN2at6TensorE",
    # const c10::VariableVersion& torch::autograd::impl::version_counter(const at::Tensor&)
    "version": "_ZN5torch8autograd4impl15version_counterERKN2at6TensorE",
    "dtype": "aoti_torch_get_dtype", "dim": "aoti_torch_get_dim", "sizes": "aoti_torch_get_sizes",
    "strides": "aoti_torch_get_strides", "device": "aoti_torch_get_device_type",
    "index": "aoti_torch_get_device_index",
    "data_ptr": "aoti_torch_get_data_ptr", "assign": "aoti_torch_assign_tensors",
    "make": "aoti_torch_new_uninitialized_tensor", "delete": "aoti_torch_delete_tensor_object",
}  # fmt: skip

#: The functions in a table of their addresses, in order.
NAMES = (*_OF_PYTHON, *_OF_TORCH)


@functools.cache
def exports() -> Numbers | None:
    """The addresses of the functions, in the order of `NAMES`.

    None where one is missing or does other things, without a global lock, and with RULEC_SURVEY=0.
    """
    if os.environ.get("RULEC_SURVEY") == "0" or not is_locked():
        return None
    try:
        of_torch = ctypes.CDLL(torch._C.__file__)  # a name is looked for in the libraries that it needs, too
        places = [_address(ctypes.pythonapi, name) for name in _OF_PYTHON.values()]
        places += [_address(of_torch, name) for name in _OF_TORCH.values()]
        table = np.array(places, np.int64)
        return table if _takes_tensors(table) else None
    except (AttributeError, OSError, RuntimeError, TypeError):
        return None


def is_locked() -> bool:
    """Whether Python has a global lock, and words of 64 bits: nothing else changes tensors while machine code looks."""
    return ctypes.sizeof(ctypes.c_void_p) == 8 and bool(getattr(sys, "_is_gil_enabled", lambda: True)())


def _takes_tensors(table: Numbers) -> bool:
    """Whether `load` writes one word, `Tensor._cdata`, and `grad` gives a handle of the gradient."""
    with torch.inference_mode(False):
        tensor, gradient = torch.zeros(2, requires_grad=True, device="cpu"), torch.zeros(2, device="cpu")
        tensor.grad = gradient
    handles = Handles(table, 1)
    none = _word(int(handles.all[0]))
    room = (ctypes.c_int64 * 8)(*[none] * 8)
    at = ctypes.addressof(room)
    _take(table, at, tensor)
    alone = [*room] == [tensor._cdata, *[none] * 7]
    grad = _function(table, "grad", ctypes.c_size_t, ctypes.c_size_t)
    right = alone and _word(grad(tensor._cdata)) == gradient._cdata
    _function(table, "assign", ctypes.c_int32, ctypes.c_size_t, ctypes.c_size_t)(int(handles.all[0]), at)
    return right and room[0] == none


def _word(address: int) -> int:
    return ctypes.c_int64.from_address(address).value


def _function(table: Numbers, name: str, result: Any, *arguments: Any) -> Any:
    """One of the functions, called with the global lock."""
    return ctypes.PYFUNCTYPE(result, *arguments)(int(table[NAMES.index(name)]))


def _take(table: Numbers, handle: int, tensor: torch.Tensor) -> None:
    load = _function(table, "load", ctypes.c_bool, ctypes.c_size_t, ctypes.py_object, ctypes.c_bool)
    if not load(handle, tensor, False):
        raise TypeError(f"{type(tensor).__name__} is not a tensor of torch's")


def _address(library: ctypes.CDLL, name: str) -> int:
    return int(ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0)


def number(table: Numbers, name: str, handle: int) -> int:
    """A number that torch has of a tensor, such as its `dtype`; RuntimeError where torch refuses."""
    value = ctypes.c_int64(0)
    if _function(table, name, ctypes.c_int32, ctypes.c_size_t, ctypes.c_size_t)(handle, ctypes.addressof(value)):
        raise RuntimeError(f"torch does not tell the {name} of a tensor")
    return value.value


def reads_of(table: Numbers, param: torch.Tensor, grad: torch.Tensor | None) -> tuple[int, int, int]:
    """Addresses that looks at a gradient read besides the tensors themselves: hints of memory to fetch, or zero.

    They are the place of a parameter's gradient, the parameter's count of versions, and the storage of the local
    gradient `grad`.
    """
    handles = Handles(table, 1)
    version = _function(table, "version", ctypes.c_size_t, ctypes.c_size_t)(handles.take(0, param))
    place = _function(table, "grad", ctypes.c_size_t, ctypes.c_size_t)(param._cdata)
    behind = 0 if grad is None else grad.untyped_storage()._cdata
    return place, _word(version), behind


class Handles:
    """Handles of torch's, each for one tensor or none, that live as long as this object. They begin with none."""

    def __init__(self, table: Numbers, count: int) -> None:
        make = _function(table, "make", ctypes.c_int32, ctypes.c_size_t)
        self.all = np.zeros(count, np.int64)
        first = int(self.all.__array_interface__["data"][0])
        if any(make(first + 8 * place) for place in range(count)):
            raise RuntimeError("torch makes no handle of a tensor")
        delete = _function(table, "delete", ctypes.c_int32, ctypes.c_size_t)
        self._table = table
        weakref.finalize(self, _delete_all, delete, self.all).atexit = False

    def take(self, place: int, tensor: torch.Tensor) -> int:
        """Has a handle stand for a tensor; returns the handle."""
        _take(self._table, int(self.all[place]), tensor)
        return int(self.all[place])


def _delete_all(delete: Any, handles: Numbers) -> None:
    for handle in handles.tolist():
        delete(handle)


#: The number of words that are searched in an implementation of a tensor, and in a storage.
_IMPL_WORDS, _STORAGE_WORDS = 23, 8


@dataclass(frozen=True)
class TensorLayout:
    """The indices of words, counted from the beginning of what has them.

    A tensor's object has its implementation at `object_impl`. The implementation has its storage at `impl_storage`, and
    its object at `impl_object`, which is -1 where it was not found;
    from `impl_first` on, `impl_words` words have its number of dimensions, sizes, strides, offset, number of elements,
    dtype, device and dispatch keys. The storage has its address and the owner of that memory in `data_words` words
    from `storage_data` on, and its bytes at `storage_size`.
    """

    object_impl: int
    impl_storage: int
    impl_object: int
    impl_first: int
    impl_words: int
    storage_data: int
    storage_size: int
    data_words: int = 3


#: The most dimensions whose sizes stand among the words of an implementation.
MOST_DIMS = 5


@functools.cache
def layout() -> TensorLayout | None:
    """The indices of the words; None where tensors of known answers disagree, or do not show a difference."""
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
    if not wanted <= {*after} or storage.data_ptr() not in of_storage or of_storage.count(storage.nbytes()) != 1:
        return None
    at_object, at_storage = of_object.index(tensor._cdata), of_impl.index(storage._cdata)
    objects = [i for i, each in enumerate(of_impl[: starts[0]]) if each & -2 == id(tensor)]
    impl_object = objects[0] if len(objects) == 1 else -1
    words = after.index(keys) + 1
    places = [of_storage.index(number) for number in (storage.data_ptr(), storage.nbytes())]
    return TensorLayout(at_object, at_storage, impl_object, starts[0], words, *places)


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
    differ = shared is not None and before != words_of(where, plain)
    inferred.untyped_storage().resize_(8)
    return len(of_impl) == len(alike) and differ and words_of(where, inferred)[-1] == 8


def words_of(where: TensorLayout, tensor: Tensor) -> list[int]:
    """A tensor's object, its implementation and its storage, and the words of the last two that may change."""
    storage = tensor.untyped_storage()._cdata
    of_storage = _words(storage + 8 * where.storage_data, where.data_words)
    size = _word(storage + 8 * where.storage_size)
    return [id(tensor), tensor._cdata, storage, *impl_words_of(where, tensor), *of_storage, size]


def words_of_dtensors(tensors: Sequence[Any]) -> list[int] | None:
    """The words about all DTensors, as `survey_source.PLACED` has them, from some; zeros without one.

    None where these differ, or a local tensor is of another class than torch's own.
    """
    if not tensors:
        return [0] * 6
    rows = {_words_of_dtensor(tensor) for tensor in tensors}
    row = rows.pop() if len(rows) == 1 else None
    return None if row is None else [*row, id(_MESH), id(_PLACEMENTS)]


#: The names of attributes of a DTensor's spec.
_MESH, _PLACEMENTS = map(sys.intern, ("mesh", "placements"))


def _words_of_dtensor(tensor: Any) -> tuple[int, ...] | None:
    """The classes of a DTensor and its local tensor, and the places of that and the spec; None where one is not once.

    A subclass may have its local tensor elsewhere.
    """
    kind, local = type(tensor), tensor._local_tensor
    words, of_local = (_words(id(x), type(x).__basicsize__ // 8) for x in (tensor, local))
    wanted = id(local), id(tensor._spec)
    known = kind.__base__ is Tensor and words[OBJECT_CLASS] == id(kind) and of_local[OBJECT_CLASS] == id(Tensor)
    if not known or any(words.count(word) != 1 for word in wanted):
        return None
    return id(kind), id(Tensor), *map(words.index, wanted)


def impl_words_of(where: TensorLayout, tensor: Tensor) -> list[int]:
    """The words of a tensor's implementation, from its shape on."""
    return _words(tensor._cdata + 8 * where.impl_first, where.impl_words)


def _words(address: int, count: int) -> list[int]:
    return [*_array_of(count).from_address(address)]


@functools.cache
def _array_of(count: int) -> Any:
    return ctypes.c_int64 * count
