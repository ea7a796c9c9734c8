"""Sums of statistics in Triton: neighbouring elements of a thread in float32, and their packs in float64.

A block has an accumulator for each pack, not for each element, and few additions in float64. The order of a pack's
elements does not depend on how threads share a block.
"""

from __future__ import annotations

from collections.abc import Mapping

_IN_PACKS = '''\
@triton.jit
def in_packs(x, inside):
    """The elements of a block or tile as a vector, zeros for those that are not `inside`."""
    if inside is not None:
        x = tl.where(inside, x, 0.0)
    return tl.ravel(x)
'''

_IN_PAIRS = '''\
@triton.jit
def in_pairs(x):
    """The elements at even places of a vector, and those at odd places."""
    return tl.split(tl.reshape(x, (x.shape[0] // 2, 2)))
'''

_PACK_SUMS = '''\
@triton.jit
def pack_sums(x, PACK: tl.constexpr):
    """The sums of PACK neighbouring elements each."""
    if PACK == 1:
        return x
    else:
        even, odd = in_pairs(x)
        return pack_sums(even, PACK // 2) + pack_sums(odd, PACK // 2)
'''

_PACK_PRODUCTS = '''\
@triton.jit
def pack_products(x, y, total, PACK: tl.constexpr):
    """The sums of the products of PACK neighbouring elements each, added to a total."""
    if PACK == 1:
        return x * y if total is None else tl.fma(x, y, total)
    else:
        even, odd = in_pairs(x)
        other_even, other_odd = in_pairs(y)
        total = pack_products(even, other_even, total, PACK // 2)
        return pack_products(odd, other_odd, total, PACK // 2)
'''

#: The text of each function by name, after the functions it calls.
PACKS: Mapping[str, str] = {
    "in_packs": _IN_PACKS, "in_pairs": _IN_PAIRS, "pack_sums": _PACK_SUMS, "pack_products": _PACK_PRODUCTS,
}  # fmt: skip

#: The most elements of a pack: with more of them, some kernels keep values in local memory.
MOST = 4
