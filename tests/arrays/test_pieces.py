"""Arrays of tensors in common memory: what lies where."""

from __future__ import annotations

import numpy as np
import pytest

from rulec.array_api.slices import Cuts, Pieces, Stacks, Together
from rulec.kernel.multi_tensor.address import addresses_of, array_address

SHAPES = [(1, 2, 1), (1,), (3, 1), (2, 2)]


def pieces() -> Pieces:
    return Pieces(np.arange(10.0), Cuts.of(SHAPES))


def stacks() -> Stacks:
    """The arrays 2 and 0 in one stack, 1 and 3 in another."""
    stack = [np.arange(8.0).reshape(4, 1, 2), np.arange(6.0).reshape(2, 3, 1)]
    return Stacks(stack, [[2, 0], [1, 3]], np.split, [(4,), (3,), (2, 2), (1, 3)])


@pytest.mark.parametrize("arrays", [pieces(), stacks()])
def test_addresses_and_bytes_are_those_of_the_views(arrays: Together) -> None:
    assert addresses_of(arrays, array_address).tolist() == [array_address(x) for x in arrays]
    assert arrays.byte_counts.tolist() == [x.nbytes for x in arrays]
    assert len([*arrays]) == len(arrays)


def test_pieces_have_their_shapes_and_elements() -> None:
    arrays = pieces()
    assert [x.shape for x in arrays] == SHAPES
    assert arrays[3].tolist() == [[6, 7], [8, 9]]
    assert arrays[2].base is not None


def test_some_pieces_are_in_the_same_memory() -> None:
    arrays = pieces()
    some = arrays.chosen([3, 0])
    assert [x.tolist() for x in some] == [[[6, 7], [8, 9]], [[[0], [1]]]]
    assert addresses_of(some, array_address).tolist() == [array_address(arrays[3]), array_address(arrays[0])]


def test_parts_of_stacks_are_those_of_their_tensors() -> None:
    assert [x.tolist() for x in stacks()] == [[4, 5, 6, 7], [0, 1, 2], [[0, 1], [2, 3]], [[3, 4, 5]]]
