"""How chunks are shared out among threads: whatever fires together is, alone or not."""

from __future__ import annotations

import pytest

from rulec.kernel.multi_tensor.chunks import flat_chunks
from rulec_backends.common import threads as cpu_threads
from rulec_backends.common.threads import POLICY, SPANS_PER_THREAD

CHUNK = POLICY.chunk


def test_a_tensor_that_fires_alone_is_work_for_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_threads, "thread_count", lambda: 4)
    chunks = flat_chunks([CHUNK * 16, *[CHUNK * 400] * 8], POLICY)
    alone, together = chunks.spans([0]), chunks.spans(range(9))
    assert len(alone) == 16, "as many spans as there are chunks"
    assert SPANS_PER_THREAD * 4 - 9 <= len(together) <= SPANS_PER_THREAD * 4 + 9
    for spans, first, last in ((alone, 0, 16), (together, 0, 16 + 8 * 400)):
        covered = [chunk for start, stop in spans.tolist() for chunk in range(start, stop)]
        assert covered == [*range(first, last)]


def test_spans_are_remembered_by_the_tensors_they_are_of() -> None:
    chunks = flat_chunks([10, 20, CHUNK + 1], POLICY)
    assert chunks.spans([0, 1]) is chunks.spans([0, 1])
    assert chunks.spans([2]).tolist() == [[2, 3], [3, 4]]
    assert chunks.spans([0, 2])[0].tolist() == [0, 1]
    assert chunks.spans([]).shape == (0, 2)
