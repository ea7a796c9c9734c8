"""The timeline of docs/offload.md shows what the optimizer does: the host steps while other groups travel."""

from __future__ import annotations

from pathlib import Path

import pytest

import rulec.torch
from tests.docs.offload_picture import FOR_STEP, HOST, LINK, draw, timeline


def test_copies_hide_behind_the_steps_of_the_host(tmp_path: Path) -> None:
    count = 6
    bars = timeline(rulec.torch.AdamW, count)
    down, host, up = ([bar for bar in bars if bar.row == row] for row in ("copy down", "host", "copy up"))
    assert [*map(len, (down, host, up))] == [count] * 3
    copy, step = (64 << 20) / LINK, (32 << 20) * FOR_STEP / HOST
    assert max(bar.end for bar in bars) == pytest.approx(copy + count * step + copy)
    for number in range(1, count):
        assert down[number].end <= host[number].start == host[number - 1].end
        assert up[number - 1].start == host[number].start
    draw(tmp_path / "offload.png")
    assert (tmp_path / "offload.png").stat().st_size > 10_000
