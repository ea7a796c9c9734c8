"""The registers that a thread may take in a stage with rows and columns, on NVIDIA's GPUs.

Each of its programs waits for a tile and then computes with it, so that how fast such a stage reads follows from how
many programs share a multiprocessor, and this from their registers. The compiler alone takes as many as are good for a
single program.
"""

from __future__ import annotations

#: The registers of a multiprocessor, from Ampere on.
ALL = 1 << 16


def most_registers(moved: int, vector: int, reduces: bool, threads: int) -> int:
    """The most registers of a thread, in a stage that moves `moved` bytes for an element, reads and writes together.

    `vector` elements of the narrowest array are 16 bytes. Whole tiles fit into these registers; tiles that are not
    whole may keep some of their many addresses in local memory.
    """
    return ALL // (_programs(moved * vector // 16, vector, reduces) * threads) // 8 * 8


def _programs(accesses: int, vector: int, reduces: bool) -> int:
    """How many programs should share a multiprocessor, by the accesses of 16 bytes of a thread to a tile."""
    if vector > 4:
        return 2
    most = 3 if vector < 4 else 5 if reduces else 4
    return min(most, max(2, (6 if reduces else 7) - accesses))
