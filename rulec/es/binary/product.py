"""The product and the convolution of packed bits: equal bits less different ones, each member with its own weights.

Pooling is here too: the largest of bits is their union.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from rulec.backend.capabilities import Window, words_of
from rulec.errors import TensorError
from rulec.es.binary.kernels import contiguous, is_padded, kernels_of

Array = np.ndarray[Any, Any]
Pair = int | tuple[int, int]


def product(a: Any, b: Any, n: int, *, backend: str | None = None) -> Any:
    """The products of every line of `a` with every line of `b`, bits standing for 1 and -1.

    `a` (batch..., rows, words) and `b` (batch..., columns, words) are uint64 arrays as `pack` makes them of `n` bits,
    NumPy's or CuPy's; their batch dimensions are broadcast. Gives int32 (batch..., rows, columns), which is
    2*(equal bits) - n: n less twice the set bits of the exclusive or (Rastegari et al., XNOR-Net, arXiv 1603.05279).

    `backend` is "cpu" (Numba; the default for NumPy's arrays), "c", "cupy" (for CuPy's) or "numpy". Raises TensorError
    for other dtypes, other shapes and bits set behind the n-th, BackendUnavailable for a backend that cannot run.
    """
    _check_words("a", a, n, 2)
    _check_words("b", b, n, 2)
    try:
        batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except ValueError:
        raise TensorError(
            f"a of shape {a.shape} and b of shape {b.shape} must have batch dimensions that broadcast"
        ) from None
    rows, columns, members = a.shape[-2], b.shape[-2], math.prod(batch)
    window = Window(members, rows, (1, 1), n, columns)
    inputs = np.broadcast_to(a, (*batch, *a.shape[-2:])).reshape(members, rows, 1, 1, window.words)
    weights = np.broadcast_to(b, (*batch, *b.shape[-2:])).reshape(members, columns, 1, 1, window.words)
    return _convolved(inputs, weights, window, backend).reshape(*batch, rows, columns)


def convolve(
    inputs: Any, weights: Any, n: int, *, stride: Pair = 1, padding: Pair = 0, backend: str | None = None
) -> Any:
    """The convolution (without flipping, as in networks) of packed bits, each member with its own weights.

    `inputs` (members, samples, height, width, words) and `weights` (members, outputs, kernel height, kernel width,
    words) are uint64, the last axis being the `n` channels as `pack` makes them. Gives int32 (members, samples,
    height, width, outputs): 2*(equal bits) - (all bits) over the places of the kernel that lie inside the inputs.
    Places in the `padding` around them count for nothing: there is no bit for zero. `backend` as for `product`.

    Raises TensorError as `product` does, and where the kernel is larger than the padded inputs.
    """
    _check_words("inputs", inputs, n, 5, exactly=True)
    _check_words("weights", weights, n, 5, exactly=True)
    if inputs.shape[0] != weights.shape[0]:
        raise TensorError(f"inputs of {inputs.shape[0]} members and weights of {weights.shape[0]} do not fit together")
    window = window_of(inputs.shape, n, weights.shape, stride, padding)
    return _convolved(inputs, weights, window, backend)


def window_of(inputs: Any, n: int, weights: Any, stride: Pair, padding: Pair) -> Window:
    """The sizes of a convolution from the shapes of its arrays; TensorError where there are none."""
    strides, paddings = pair("stride", stride, 1), pair("padding", padding, 0)
    size, kernel = (inputs[2], inputs[3]), (weights[2], weights[3])
    if any(k > s + 2 * p for k, s, p in zip(kernel, size, paddings, strict=True)):
        raise TensorError(f"a kernel of {kernel} is larger than inputs of {size} with padding {paddings}")
    return Window(inputs[0], inputs[1], size, n, weights[1], kernel, strides, paddings)


def pair(name: str, value: Pair, least: int) -> tuple[int, int]:
    """A number for both axes, or one for each; TensorError where one is less than `least` or none."""
    values = (value, value) if isinstance(value, int) else tuple(value)
    if len(values) != 2 or any(not isinstance(x, int) or isinstance(x, bool) or x < least for x in values):
        raise TensorError(f"{name}={value!r} must be a whole number of at least {least}, or two")
    return values[0], values[1]


def _convolved(inputs: Any, weights: Any, window: Window, backend: str | None) -> Any:
    return kernels_of(inputs, backend).convolve(contiguous(inputs), contiguous(weights), window)


def _check_words(name: str, words: Any, n: int, dimensions: int, exactly: bool = False) -> None:
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise TensorError(f"n={n!r} must be a whole number of at least 1: the bits of a line")
    if words.dtype != np.uint64:
        raise TensorError(f"{name} is {words.dtype} and must be uint64 words: use rulec.es.binary.pack")
    if words.ndim < dimensions or (exactly and words.ndim != dimensions):
        asked = f"{dimensions} dimensions" if exactly else f"{dimensions} dimensions or more"
        raise TensorError(f"{name} of shape {words.shape} must have {asked}")
    if words.shape[-1] != words_of(n):
        raise TensorError(f"{name} has {words.shape[-1]} words in a line, and {n} bits are {words_of(n)}")
    if isinstance(words, np.ndarray) and not is_padded(words, n):
        raise TensorError(f"{name} has bits set behind the first {n} of a line: they must be zero, as pack leaves them")


def max_pool(words: Any, kernel: Pair, *, stride: Pair | None = None) -> Any:
    """The union of bits in windows of height and width `kernel`, every `stride` (the kernel's own size by default).

    `words` (..., height, width, words), of any library and integer dtype, give (..., height, width, words) of as many
    windows as fit whole. TensorError where none does.
    """
    size = pair("kernel", kernel, 1)
    steps = size if stride is None else pair("stride", stride, 1)
    height, width = words.shape[-3], words.shape[-2]
    rows, columns = (height - size[0]) // steps[0] + 1, (width - size[1]) // steps[1] + 1
    if height < size[0] or width < size[1]:
        raise TensorError(f"a window of {size} is larger than inputs of {(height, width)}")
    union = None
    for y, x in itertools.product(range(size[0]), range(size[1])):
        lines = slice(y, y + (rows - 1) * steps[0] + 1, steps[0])
        shifted = words[..., lines, slice(x, x + (columns - 1) * steps[1] + 1, steps[1]), :]
        union = shifted if union is None else union | shifted
    return union
