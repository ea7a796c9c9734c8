"""The timeline of docs/offload.md: `python -m tests.docs.offload_picture` draws it into docs/offload.png.

The optimizer takes a step by a link with a clock of its own: each copy lasts as its bytes over the rate of the link,
and the host steps at the rate of its memory. The order of all work is the optimizer's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch

import rulec.torch
from benchmarks.picture import figure_of, save
from rulec.torch.offload.link import Event, HostLink, Pairs
from rulec.torch.offload.ring import bytes_of
from tests.docs.markdown import ROOT

#: Bytes a millisecond: of one direction of the link (PCIe 5), and of the memory of the host.
LINK, HOST = 50e6, 200e6

#: The bytes that the host's step of AdamW reads and writes for each weight.
FOR_STEP = 28

#: The picture is of groups of 64 MiB; the tensors here are smaller by this factor.
SCALE = 1024

ROWS = ("copy down", "host", "copy up")
COLOURS = ("#5e81ac", "#bf616a", "#a3be8c")


@dataclass(frozen=True)
class Bar:
    """Some work: its row, and its beginning and end in milliseconds."""

    row: str
    start: float
    end: float


class TimedLink(HostLink):
    """A link whose copies take time by a clock of its own; `bars` has all work of it and of the host."""

    bars: ClassVar[list[Bar]] = []
    clock: ClassVar[dict[str, float]] = dict.fromkeys(ROWS, 0.0)

    @classmethod
    def begin(cls) -> None:
        """Forgets all work, and waits for its end."""
        cls.bars.clear()
        cls.clock.update(dict.fromkeys(ROWS, max(cls.clock.values(), default=0.0)))

    def down(self, pairs: Pairs) -> Event:
        super().down(pairs)
        return self._copy("copy down", pairs)

    def up(self, pairs: Pairs, after: Event | None = None) -> Event:
        """Copies new weights, after the step of them on the host."""
        super().up(pairs, after)
        self._work("host", self.clock["host"], FOR_STEP / 2 * _bytes(pairs) / HOST)
        return self._copy("copy up", pairs)

    def _copy(self, row: str, pairs: Pairs) -> Event:
        start = max(self.clock[row], self.clock["host"])
        return _End(self._work(row, start, _bytes(pairs) / LINK))

    def _work(self, row: str, start: float, time: float) -> float:
        self.bars.append(Bar(row, start, start + time))
        self.clock[row] = start + time
        return start + time


@dataclass(frozen=True)
class _End:
    """The end of a copy."""

    time: float

    def wait(self) -> None:
        """Has the host wait for it."""
        TimedLink.clock["host"] = max(TimedLink.clock["host"], self.time)


def _bytes(pairs: Pairs) -> int:
    return SCALE * sum(bytes_of(tensor) for _, tensor in pairs)


def timeline(made: Any, count: int = 8, **keywords: Any) -> list[Bar]:
    """The work of one step of an optimizer of `count` groups of 64 MiB."""
    size = (64 << 20) // SCALE // 2
    params = [torch.ones(size, dtype=torch.bfloat16, requires_grad=True) for _ in range(count)]
    with mock.patch("rulec.torch.offload.host_step.link_of", TimedLink):
        optimizer = made(params, offload="step", offload_buffer=2 * size, **keywords)
        for _ in range(2):
            for param in params:
                param.grad = torch.ones_like(param)
            TimedLink.begin()
            begin = TimedLink.clock["host"]
            optimizer.step()
    return [Bar(bar.row, bar.start - begin, bar.end - begin) for bar in TimedLink.bars]


def draw(path: Path) -> None:
    """Draws the step of AdamW."""
    figure = figure_of(10, 2.2)
    axes = figure.subplots()
    bars = timeline(rulec.torch.AdamW)
    for row, colour in zip(ROWS, COLOURS, strict=True):
        mine = [bar for bar in bars if bar.row == row]
        spans = [(bar.start, bar.end - bar.start) for bar in mine]
        axes.broken_barh(spans, (-ROWS.index(row) - 0.4, 0.8), facecolors=colour, edgecolor="white")
        for number, (start, time) in enumerate(spans):
            axes.text(
                start + time / 2, -ROWS.index(row), str(number), ha="center", va="center", fontsize=7, color="white"
            )
    axes.set_yticks([-i for i in range(len(ROWS))], ROWS, fontsize=9)
    axes.set_xlabel("milliseconds from the beginning of step()", fontsize=8)
    axes.tick_params(axis="x", labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, path)


if __name__ == "__main__":
    draw(ROOT / "docs" / "offload.png")
