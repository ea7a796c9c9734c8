"""The places of a tensor's facts in torch's memory, learnt from tensors with one difference each.

Nothing here is assumed of a version of torch: in every trial, one word alone holds the fact.
Where one is not, or two tensors that differ look alike, there is no anatomy, and tensors are asked one by one.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

Words = Sequence[int]


@dataclass(frozen=True)
class Anatomy:
    """Places in memory, in words of eight bytes.

    `kind` and `impl` are in a tensor's object in Python: its class, and its implementation. In this, `steady` say what
    a tensor is, by some of their bits: its dtype, rank, device and keys. `extents` and `strides` are of the first of
    five dimensions. `storage`, `meta`, `version` and `owner` lead to others: its storage, autograd's, its count of
    writes and its object. `grad` is in autograd's; `data` and `shares` are in a storage: the address, and what changes
    where memory is shared until it is written. `count` is in a count of writes. `size` and `items` are in a list.
    `keys` is in a dict, and leads to its keys and values.
    """

    kind: int
    impl: int
    steady: tuple[tuple[int, int], ...]
    extents: int
    strides: int
    storage: int
    meta: int
    version: int
    owner: int
    grad: int
    data: int
    shares: tuple[int, ...]
    count: int
    size: int
    items: int
    keys: int

    @property
    def end(self) -> int:
        """The number of words in a tensor's implementation, as far as they are looked at."""
        places = (self.steady[-1][0], self.extents + DIMENSIONS - 1, self.strides + DIMENSIONS - 1)
        return 1 + max(*places, self.storage, self.meta, self.version, self.owner)

    @staticmethod
    def dict_bytes(mapping: dict[Any, Any]) -> int:
        """The length of the memory with the keys and values of a dict."""
        return sys.getsizeof(mapping) - sys.getsizeof({})


@functools.cache
def anatomy() -> Anatomy | None:
    """The places of this process; None where they cannot be learnt, and with RULEC_SURVEY=0."""
    locked = getattr(sys, "_is_gil_enabled", lambda: True)()
    if os.environ.get("RULEC_SURVEY") == "0" or not locked:
        return None
    if sys.byteorder != "little" or ctypes.sizeof(ctypes.c_void_p) != 8:
        return None
    for _ in range(_TRIALS):  # a word of freed memory may look like any other
        try:
            with torch.inference_mode(False), torch.enable_grad(), torch.device("cpu"):
                return _learnt()
        except _Unlike:
            continue
        except (AttributeError, RuntimeError, TypeError, NotImplementedError):
            break
    return None


_TRIALS = 8

#: The least pieces of memory that are allocated, filled and freed for the tensors of a trial.
_PIECES = 24

#: Shapes of more dimensions lie outside of a tensor.
DIMENSIONS = 5


class _Unlike(Exception):
    """A place that is not to be found, or not the only one."""


def _learnt() -> Anatomy:
    kind, impl = _place_in_object(lambda t: id(type(t))), _place_in_object(lambda t: t._cdata)
    plain, other = _made_on(0), _made_on(255)
    words, dirty = _read(plain), _read(other)
    unlike = {i for i, w in enumerate(words[0]) if any(w != each[i] for each in words)}
    storages = [t.untyped_storage()._cdata for t in plain]
    storage = _only(i for i in unlike if [w[i] for w in words] == storages)
    owner = _only(i for i in unlike if [w[i] for w in words] == [*map(id, plain)])
    version = _only(i for i in unlike - {storage, owner})
    count = _count_place(plain[0], words[0][version])
    # A tensor that is trained has something of autograd's, and one that is a gradient has one more reference.
    plain[0].requires_grad_()
    meta = _only(i for i, w in enumerate(_read(plain[:1])[0]) if w != words[0][i])
    grad = _grad_place(plain[0], plain[1:3], meta)
    unlike |= {meta, _only(i for i, w in enumerate(_read(plain[2:3])[0]) if w != words[2][i])}
    extents, strides = _dimension_places(len(words[0]))
    # What nothing was written to differs where memory was full of other things, as that behind the last dimension.
    unwritten = [functools.reduce(operator.or_, (w ^ each[i] for each in dirty)) for i, w in enumerate(words[0])]
    unlike |= {*range(extents, extents + DIMENSIONS), *range(strides, strides + DIMENSIONS)}
    bits = ((i, ctypes.c_int64(~other).value) for i, other in enumerate(unwritten) if i not in unlike)
    steady = tuple((i, mask) for i, mask in bits if mask)
    _check_telling((*steady, *((i, -1) for i in (extents, extents + 1, strides, strides + 1))))
    return Anatomy(
        kind, impl, steady, extents, strides, storage, meta, version, owner, grad, *_data_places(), count,
        *_list_places(), _dict_place(),
    )  # fmt: skip


def _read(tensors: Sequence[Tensor]) -> list[Words]:
    return [words_at(t._cdata) for t in tensors]


def _made_on(fill: int) -> list[Tensor]:
    """Three tensors of two rows of three numbers, made on memory that was full of one byte.

    An allocator with many free pieces keeps a few at hand and takes up to seven more of them at once. Only where none
    is at hand are the pieces freed here the next to be taken, so another number of them is tried.
    """
    library = ctypes.CDLL(None)
    allocate, free = library.malloc, library.free
    size = min(_usable(t._cdata) for t in [torch.zeros(2, 3) for _ in range(_PIECES)])
    allocate.restype, free.argtypes, free.restype = ctypes.c_void_p, [ctypes.c_void_p], None
    for count in range(_PIECES, 2 * _PIECES):
        pieces = [allocate(ctypes.c_size_t(size)) for _ in range(count)]
        for piece in pieces:
            ctypes.memset(piece, fill, size)
        for piece in pieces:
            free(piece)
        tensors = [t for t in [torch.zeros(2, 3) for _ in pieces] if t._cdata in pieces]
        if len(tensors) >= 3:
            return tensors[:3]
    raise _Unlike


def words_at(address: int) -> Words:
    """The words of a piece of memory that was allocated for one thing."""
    length = int(_usable(address)) // 8
    if length < 3:
        raise _Unlike
    return [*(ctypes.c_uint64 * length).from_address(address)]


def _usable(address: int) -> int:
    ask = ctypes.CDLL(None).malloc_usable_size
    ask.argtypes, ask.restype = [ctypes.c_void_p], ctypes.c_size_t
    return int(ask(address))


def _only(places: Iterator[int]) -> int:
    (place, *others) = [*places] or [-1]
    if others or place < 0:
        raise _Unlike
    return place


def _object_words(thing: Any, count: int) -> Words:
    return [*(ctypes.c_uint64 * count).from_address(id(thing))]


def _place_in_object(value: Callable[[Tensor], int]) -> int:
    trials = [torch.zeros(1), torch.zeros(2), torch.nn.Parameter(torch.zeros(1))]
    count = Tensor.__basicsize__ // 8
    return _only(i for i in range(count) if all(_object_words(t, count)[i] == value(t) for t in trials))


def _dimension_places(end: int) -> tuple[int, int]:
    """The first place of a shape, and the first of strides, in tensors with room for them."""
    shape = torch.zeros(2, 3, 5, 7, 11)
    words = words_at(shape._cdata)
    places = [
        _only(i for i in range(end) if [*words[i : i + DIMENSIONS]] == [*numbers])
        for numbers in (shape.shape, shape.stride())
    ]
    return places[0], places[1]


def _grad_place(trained: Tensor, grads: Sequence[Tensor], meta: int) -> int:
    seen = []
    for grad in grads:
        trained.grad = grad
        seen.append(words_at(words_at(trained._cdata)[meta]))
    places = range(len(seen[0]))
    return _only(i for i in places if all(w[i] == g._cdata for w, g in zip(seen, grads, strict=True)))


def _count_place(tensor: Tensor, at: int) -> int:
    """The place of the number in a tensor's count of writes, which lies at an address."""
    before = words_at(at)
    increment_version(tensor)
    once = words_at(at)
    increment_version([tensor, tensor])
    twice = words_at(at)
    return _only(i for i, w in enumerate(before) if (once[i] - w, twice[i] - w) == (1, 3))


def _variants() -> Iterator[Tensor]:
    """Tensors that differ from two rows of three numbers of float32 in one thing each."""
    zeros = torch.zeros(2, 3)
    yield from (zeros.double(), zeros.half(), zeros.bfloat16(), zeros.int(), zeros.to("meta"), zeros.to_sparse())
    yield from (torch.zeros(6), torch.zeros(3, 2), torch.zeros(2, 3, 1), torch.zeros(3, 2).t(), torch.zeros(()))
    yield from (torch.zeros(7)[1:].view(2, 3), torch.zeros(1, 3).expand(2, 3), torch.zeros(2, 6)[:, ::2])
    yield from (torch._neg_view(zeros), torch._efficientzerotensor((2, 3)))
    yield torch.Tensor._make_wrapper_subclass(_Wrapper, (2, 3))


class _Wrapper(Tensor):
    @classmethod
    def __torch_dispatch__(cls, *_: Any, **__: Any) -> Any:
        raise NotImplementedError


def _check_telling(steady: Sequence[tuple[int, int]]) -> None:
    """_Unlike where two tensors that differ look alike."""
    complexes = torch.zeros(2, 3, dtype=torch.complex64)
    pairs = [(torch.zeros(2, 3), other) for other in _variants()] + [(complexes, complexes.conj())]
    looks = [[[w[i] & mask for i, mask in steady] for w in _read(pair)] for pair in pairs]
    if any(one == other for one, other in looks):
        raise _Unlike


def _data_places() -> tuple[int, tuple[int, ...]]:
    """The place of the address in a storage, and the places that change where its memory is shared until written."""
    foreign = torch.frombuffer(bytearray(64), dtype=torch.float32)
    storages = [torch.zeros(8).untyped_storage(), foreign.untyped_storage()]
    words = [words_at(s._cdata) for s in storages]
    lengths = range(min(map(len, words)))
    data = _only(i for i in lengths if all(w[i] == s.data_ptr() for w, s in zip(words, storages, strict=True)))
    lazy = getattr(torch, "_lazy_clone", None)
    if lazy is None:
        return data, ()
    trials = [_changed_by(lazy) - _changed_by(lambda t: t.view(-1)) for _ in range(4)]
    shares = tuple(sorted(set.intersection(*trials) - {data}))
    if not shares:
        raise _Unlike
    return data, shares


def _changed_by(act: Callable[[Tensor], Tensor]) -> set[int]:
    """The places in a tensor's storage that change where something is done with the tensor."""
    tensor = torch.zeros(8)
    before = words_at(tensor.untyped_storage()._cdata)
    kept = act(tensor)
    after = words_at(tensor.untyped_storage()._cdata)
    del kept
    return {i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b}


def _list_places() -> tuple[int, int]:
    """The places of a list's length and of its entries."""
    count = list.__basicsize__ // 8
    lists = [[object() for _ in range(n)] for n in (3, 5)]
    words = [_object_words(each, count) for each in lists]
    size = min(i for i in range(count) if [w[i] for w in words] == [3, 5])
    places = [i for i in range(count) if words[0][i] != words[1][i] and min(w[i] for w in words) > 1 << 16]
    items = _only(iter(places))
    for each, word in zip(lists, words, strict=True):
        if [*(ctypes.c_uint64 * len(each)).from_address(word[items])] != [*map(id, each)]:
            raise _Unlike
    return size, items


def _dict_place() -> int:
    """The place in a dict of the address of its keys and values."""
    dicts: list[dict[str, object]] = [{f"key {i}": object() for i in range(n)} for n in (3, 7, 30)]
    count = dict.__basicsize__ // 8
    many = [_object_words(each, count) for each in dicts]
    places = [i for i in range(count) if len({w[i] for w in many}) == 3 and min(w[i] for w in many) > 1 << 32]
    place = _only(iter(places))
    for each, words in zip(dicts, many, strict=True):
        inside = {*(ctypes.c_uint64 * (Anatomy.dict_bytes(each) // 8)).from_address(words[place])}
        if not inside.issuperset(map(id, (*each, *each.values()))):
            raise _Unlike
    return place
