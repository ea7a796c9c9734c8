"""Tables that go to a device while a step runs: what is copied, when it is waited for, and what a graph keeps."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

from rulec.kernel.bucket.uploads import TURNS, Ring, Uploads

Words = np.ndarray[Any, np.dtype[np.int64]]


class Copies:
    """A GPU that says which pieces of memory were copied from, and which were waited for."""

    def __init__(self, spares: int = 0) -> None:
        self.copied: list[int] = []
        self.waited: list[int] = []
        self.made = 0
        self.uploads = Uploads(Ring(self), 3, spares)

    def pinned(self, count: int) -> Any:
        copies, number = self, self.made
        self.made += 1

        class Piece:
            words: Words = np.zeros(count, np.int64)
            used = False

            def ready(self) -> Words:
                if self.used:
                    copies.waited.append(number)
                return self.words

            def copy(self, target: Words, count: int, stream: Any, captured: bool) -> None:
                copies.copied.append(number)
                self.used = not captured
                target[:count] = self.words[:count]

        return Piece()

    def memory(self, count: int) -> Words:
        return np.full(count, -1, np.int64)

    def put(self, *values: int, stream: str = "", capturing: bool = False) -> list[int]:
        """What lies on the device then."""
        return self.uploads.put(np.array(values), stream, stream, capturing)[: len(values)].tolist()  # type: ignore[no-any-return]


def test_a_table_that_did_not_change_is_not_copied() -> None:
    copies = Copies()
    table = np.array([1, 2, 3])
    first = copies.uploads.put(table, None, "", False)
    table[:] = 0  # the table that was given may be filled anew: what counts is what was copied
    assert copies.put(1, 2, 3) == [1, 2, 3]
    assert copies.uploads.put(np.array([1, 2, 3]), None, "", False) is first
    assert len(copies.copied) == 1
    assert copies.put(1, 2, 4) == [1, 2, 4]
    assert len(copies.copied) == 2


def test_another_stream_has_a_copy_of_its_own() -> None:
    """What was copied in one may not have arrived when another goes on."""
    copies = Copies()
    copies.put(1, 2, 3, stream="one")
    copies.put(1, 2, 3, stream="another")
    assert len(copies.copied) == 2


def test_pieces_are_used_in_turns_and_waited_for_only_then() -> None:
    copies = Copies()
    for i in range(TURNS):
        copies.put(i, 0, 0)
    assert copies.waited == []
    assert len(set(copies.copied)) == TURNS
    copies.put(99, 0, 0)
    assert copies.waited == [copies.copied[0]]


def test_what_a_graph_reads_is_never_used_again() -> None:
    copies = Copies(spares=2)
    copies.put(1, 2, 3)
    before = copies.made
    captured = [copies.uploads.put(np.array(table), None, "", True) for table in ([1, 2, 3], [7, 8, 9])]
    assert copies.made == before, "nothing is allocated while a graph is captured"
    reserved = copies.copied[1:]
    for i in range(3 * TURNS):
        copies.put(i, i, i)
    assert copies.waited  # the ring went round
    assert not set(reserved) & set(copies.copied[3:])
    assert [table.tolist() for table in captured] == [[1, 2, 3], [7, 8, 9]]
    assert len(set(reserved)) == 2
    assert copies.made == before + 2 + TURNS - 1, "new spares, and the rest of the ring"


def test_a_longer_table_gets_longer_memory() -> None:
    copies = Copies(spares=1)
    copies.put(1, 2, 3)
    assert copies.put(*range(50)) == list(range(50))
    assert copies.put(*range(60), capturing=True) == list(range(60))
    assert copies.put(4, 5) == [4, 5]


def test_what_a_graph_writes_to_is_kept_where_tables_grow() -> None:
    copies = Copies(spares=1)
    copies.put(1)
    kept = weakref.ref(copies.uploads.put(np.array([1]), None, "", True))
    copies.put(*range(100))
    assert kept() is not None
