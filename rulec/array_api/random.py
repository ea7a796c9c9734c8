"""The random stream of the language: Philox4x32-10 (Salmon, Moraes, Dror, Shaw, SC 2011).

Key: (seed, tensor id). Counter: (element//4 as two words, draw of the rule, step). The 32-bit words are the same on
every backend; an element's value depends on nothing but these numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rulec.errors import RuleError

Words = np.ndarray[Any, np.dtype[np.uint32]]

#: The generator's constants: multipliers of words, and increments of the key after each round.
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)

#: The number of rounds.
ROUNDS = 10

#: The words, and so the numbers, of a block.
BLOCK = 4

#: All bits of a word.
WORD = 0xFFFFFFFF


def _multiply(word: Any, factor: int) -> tuple[Any, Any]:
    # A product of signed integers may wrap, and is shifted with its sign: the mask removes the sign's bits.
    product = word * factor
    return (product >> 32) & WORD, product & WORD


def _add(word: Any, term: int) -> Any:
    return (word + term) & WORD


def rounds(
    counter: Sequence[Any], key: Sequence[Any], multiply: Callable[[Any, int], tuple[Any, Any]] = _multiply,
    add: Callable[[Any, int], Any] = _add,
) -> list[Any]:  # fmt: skip
    """The ten rounds on four words, each in an array of 64-bit integers of any library, signed or not.

    Arrays of other integers need their own `multiply` (a word by a number, to an upper and a lower word) and `add`.
    """
    c, k = list(counter), list(key)
    for _ in range(ROUNDS):
        c, k = one_round(c, k, multiply, add)
    return c


def one_round(
    c: Sequence[Any], k: Sequence[Any], multiply: Callable[[Any, int], tuple[Any, Any]], add: Callable[[Any, int], Any]
) -> tuple[list[Any], list[Any]]:
    """One round on the four words of the counter and the two of the key."""
    high0, low0 = multiply(c[0], MULTIPLIERS[0])
    high1, low1 = multiply(c[2], MULTIPLIERS[1])
    mixed = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
    return mixed, [add(word, term) for word, term in zip(k, WEYL, strict=True)]


def philox(counter: tuple[Any, Any, Any, Any], key: tuple[int, int]) -> tuple[Words, Words, Words, Words]:
    """Four random 32-bit words for each counter (four broadcastable arrays of 32-bit words)."""
    words = rounds([np.asarray(x, np.uint64) for x in counter], key)
    a, b, c, d = (np.asarray(x, np.uint32) for x in np.broadcast_arrays(*words))
    return a, b, c, d


def draw_number(at: Any) -> int:
    """The number of a draw from its `at`, rounded towards zero; RuleError where it is infinite or NaN."""
    if not math.isfinite(at):
        raise RuleError(f"what a random draw is named by must be a finite number, not at = {float(at):g}")
    return int(at)


def stream(count: int, *, seed: int, tensor: int, draw: int, step: int, block: int = 0) -> Words:
    """`count` words of one tensor's draw at one step, from the first word of block `block` on."""
    blocks = np.arange(block, block + (count + 3) // 4, dtype=np.uint64)
    counter = (blocks & np.uint64(0xFFFFFFFF), blocks >> np.uint64(32), draw, step & 0xFFFFFFFF)
    return np.stack(philox(counter, (seed & 0xFFFFFFFF, tensor & 0xFFFFFFFF)), axis=-1).reshape(-1)[:count]


def uniform(words: Words) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Words as numbers strictly between 0 and 1, exact in float32: the top 23 bits, in the middle of their cell."""
    return ((words >> np.uint32(9)).astype(np.float64) + 0.5) * 2.0**-23


def normal(count: int, **position: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """`count` standard normal numbers by Box and Muller's method, two from each pair of words."""
    u = uniform(stream(count + count % 2, **position)).reshape(-1, 2)
    radius, angle = np.sqrt(-2.0 * np.log(u[:, 0])), 2.0 * math.pi * u[:, 1]
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=-1).reshape(-1)[:count]
