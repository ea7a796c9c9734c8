"""Tables that go to a device while a step runs: what is copied, when it is waited for, and what a graph keeps."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

from rulec.kernel.multi_tensor.uploads import Ring, Uploads

Words = np.ndarray[Any, np.dtype[np.int64]]


class Copies:
    """A GPU that says which pieces of memory were copied from, and has ended the first copies: `ended` of them."""

    def __init__(self, spares: int = 0) -> None:
        self.copied: list[int] = []
        self.ended = 0
        self.made = 0
        self.uploads = Uploads(Ring(self), 3, spares)

    def pinned(self, count: int) -> Any:
        copies, number = self, self.made
        self.made += 1

        class Piece:
            words: Words = np.zeros(count, np.int64)
            event: int | None = None

            def arrived(self) -> bool:
                return self.event is None or self.event < copies.ended

            def copy(self, target: Words, count: int, stream: Any, captured: bool) -> None:
                assert self.arrived(), "the words of a copy under way were written"
                self.event = None if captured else len(copies.copied)
                copies.copied.append(number)
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


def test_a_call_never_waits_for_a_copy_and_uses_pieces_again_after_it() -> None:
    copies = Copies()
    for i in range(100):
        copies.put(i, 0, 0)
    assert copies.copied == [*range(100)], "all are under way"
    copies.ended = 2
    for i in range(3):
        copies.put(i, 1, 0)
    assert copies.copied[100:] == [0, 1, 100], "the two that have arrived, and one more"
    copies.ended = 103
    for i in range(200):
        copies.put(i, 2, 0)
        copies.ended += 1
    assert copies.made == 101, "no more than were under way at once"


def test_what_a_graph_reads_is_never_used_again() -> None:
    copies = Copies(spares=2)
    copies.put(1, 2, 3)
    before = copies.made
    captured = [copies.uploads.put(np.array(table), None, "", True) for table in ([1, 2, 3], [7, 8, 9])]
    assert copies.made == before, "nothing is allocated while a graph is captured"
    reserved = copies.copied[1:]
    copies.ended = 3
    for i in range(50):
        copies.put(i, i, i)
        copies.ended += i % 2
    assert not set(reserved) & set(copies.copied[3:])
    assert len(set(copies.copied[3:])) < 50, "pieces were used again"
    assert [table.tolist() for table in captured] == [[1, 2, 3], [7, 8, 9]]
    assert len(set(reserved)) == 2
    assert copies.made == before + 2 + len({*copies.copied[3:]} - {copies.copied[0]}), "new spares, and the ring"


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
