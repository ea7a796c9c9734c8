"""Products, convolutions and pools of packed bits against those of numbers that are 1 and -1."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rulec.errors import BackendUnavailable, TensorError
from rulec.es.binary import convolve, max_pool, pack, product, unpack

Array = np.ndarray[Any, Any]

#: Bits in a line: less than a word, a word, more, and several of the kernel's groups of four words with a rest.
LINES = [1, 5, 63, 64, 65, 130, 256, 260, 700]

BACKENDS = ["numpy", "cpu", "c"]


def bits(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng([seed, *shape]).random(shape) < 0.5


def signs(of: Array) -> Array:
    return np.where(of, 1, -1).astype(np.float64)


@pytest.mark.parametrize("count", LINES)
def test_bits_come_back_and_nothing_is_behind_them(count: int) -> None:
    given = bits(3, 2, count)
    words = pack(given)
    assert (words.shape, words.dtype) == ((3, 2, -(-count // 64)), np.uint64)
    assert (unpack(words, count) == given).all()
    for line, packed in zip(given.reshape(6, -1), words.reshape(6, -1), strict=True):
        value = sum(int(bit) << i for i, bit in enumerate(line))
        assert sum(int(word) << 64 * i for i, word in enumerate(packed)) == value


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("count", LINES)
def test_a_product_is_that_of_signs(backend: str, count: int) -> None:
    a, b = bits(4, 7, count), bits(4, 70, count, seed=1)
    found = product(pack(a), pack(b), count, backend=backend)
    assert (found.dtype, found.shape) == (np.int32, (4, 7, 70))
    assert (found == signs(a) @ signs(b).swapaxes(-1, -2)).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_batches_are_broadcast(backend: str) -> None:
    a, b = bits(2, 1, 5, 100), bits(3, 6, 100, seed=1)
    found = product(pack(a), pack(b), 100, backend=backend)
    assert (found == np.einsum("adrn,dcn->adrc", signs(np.broadcast_to(a, (2, 3, 5, 100))), signs(b))).all()
    single = product(pack(a[0, 0]), pack(b[0]), 100, backend=backend)
    assert (single == found[0, 0]).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_products_of_nothing(backend: str, shape: tuple[int, int, int]) -> None:
    members, rows, columns = shape
    found = product(pack(bits(members, rows, 9)), pack(bits(members, columns, 9)), 9, backend=backend)
    assert found.shape == shape


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_product_of_many_parts_and_blocks(backend: str) -> None:
    """More outputs than are multiplied at once, and more rows than a span has."""
    a, b = bits(1, 130, 6000), bits(1, 300, 6000, seed=1)
    found = product(pack(a), pack(b), 6000, backend=backend)
    assert (found == signs(a) @ signs(b).swapaxes(-1, -2)).all()


CONVOLUTIONS = [
    (3, (6, 5), 4, (3, 3), (1, 1), (1, 1)),
    (70, (5, 7), 3, (3, 2), (2, 1), (0, 1)),
    (64, (4, 4), 66, (1, 1), (1, 1), (0, 0)),
    (9, (4, 3), 2, (4, 3), (1, 1), (0, 0)),
    (130, (3, 3), 2, (5, 5), (2, 3), (2, 4)),
    (5, (2, 2), 3, (1, 1), (1, 1), (2, 2)),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CONVOLUTIONS, ids=str)
def test_a_convolution_is_that_of_signs_among_zeros(backend: str, case: Any) -> None:
    """Torch's, whose padding is zeros: it counts for nothing."""
    count, size, outputs, kernel, stride, padding = case
    x, w = bits(2, 3, *size, count), bits(2, outputs, *kernel, count, seed=1)
    found = convolve(pack(x), pack(w), count, stride=stride, padding=padding, backend=backend)
    for member in range(2):
        inputs = torch.from_numpy(signs(x[member])).permute(0, 3, 1, 2)
        weights = torch.from_numpy(signs(w[member])).permute(0, 3, 1, 2)
        expected = torch.nn.functional.conv2d(inputs, weights, stride=stride, padding=padding)
        assert (found[member] == expected.permute(0, 2, 3, 1).numpy()).all()


@pytest.mark.parametrize(("kernel", "stride"), [(2, None), (3, 1), ((1, 2), (2, 1)), ((3, 2), 2)])
def test_a_pool_is_the_largest_of_each_bit(kernel: Any, stride: Any) -> None:
    x = bits(2, 3, 7, 6, 70)
    found = unpack(max_pool(pack(x), kernel, stride=stride), 70)
    images = torch.from_numpy(x.astype(np.float64)).reshape(6, 7, 6, 70).permute(0, 3, 1, 2)
    expected = torch.nn.functional.max_pool2d(images, kernel, stride)
    assert (found.reshape(6, *found.shape[2:]) == (expected.permute(0, 2, 3, 1).numpy() > 0)).all()


def test_what_cannot_be_multiplied() -> None:
    a, b = pack(bits(2, 3, 70)), pack(bits(2, 4, 70))
    with pytest.raises(TensorError, match="a has 2 words in a line, and 64 bits are 1"):
        product(a, b, 64)
    with pytest.raises(TensorError, match="b has bits set behind the first 65"):
        product(pack(bits(2, 3, 65)), b, 65)
    with pytest.raises(TensorError, match="a is int64 and must be uint64 words"):
        product(a.view(np.int64), b, 70)
    with pytest.raises(TensorError, match="must have batch dimensions that broadcast"):
        product(a, b[[0, 1, 0]], 70)
    with pytest.raises(TensorError, match="n=0 must be a whole number of at least 1"):
        product(a, b, 0)
    with pytest.raises(TensorError, match="must have 2 dimensions or more"):
        product(a[0, 0], b, 70)


def test_what_cannot_be_convolved() -> None:
    x, w = pack(bits(2, 3, 4, 4, 9)), pack(bits(2, 5, 3, 3, 9))
    with pytest.raises(TensorError, match="stride=0 must be a whole number of at least 1"):
        convolve(x, w, 9, stride=0)
    with pytest.raises(TensorError, match=r"a kernel of \(3, 3\) is larger than inputs of \(2, 2\)"):
        convolve(x[:, :, :2, :2], w, 9)
    with pytest.raises(TensorError, match="inputs of 2 members and weights of 1 do not fit together"):
        convolve(x, w[:1], 9)
    with pytest.raises(TensorError, match=r"a window of \(5, 5\) is larger than inputs of \(4, 4\)"):
        max_pool(x, 5)


def test_a_backend_without_kernels_says_so() -> None:
    words = pack(bits(1, 1, 9))
    with pytest.raises(BackendUnavailable, match=r"has no kernels for packed bits|cannot run here"):
        product(words, words, 9, backend="jax")
