"""What a command is doing: one line on stderr for work of more than a second, nothing for shorter work."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

#: Work up to this many seconds says nothing. Afterwards a line appears at most as often.
QUIET = 1.0


class Working:
    """The line of a command's present work. `tick` writes it once the work has taken more than `QUIET` seconds.

    On a terminal (`live`) the line replaces itself and is erased at the end. In plain text every change is a line.
    `clock` gives seconds.
    """

    def __init__(self, out: TextIO, live: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._out, self._live, self._clock = out, live, clock
        self._begin = clock()
        self._said = ""
        self._label = ""
        self._place = ""
        self._step, self._steps, self._kernels = 0, 0, 0
        self._compiling: list[str] = []
        self._lock = threading.Lock()

    def begin(self, label: str, steps: int = 0, place: int = 1, places: int = 1) -> None:
        """A piece of work begins, the one at `place` of `places`; it takes `steps` calls of `advance`."""
        self._label, self._step, self._steps = label, 0, steps
        self._place = f"{place} of {places}: " if places > 1 else ""

    def advance(self) -> None:
        """A step of the work is done."""
        self._step += 1

    @contextmanager
    def compiling(self, backend: str, name: str) -> Iterator[None]:
        """A kernel is compiled within the block."""
        self._kernels += 1
        text = f"compiling kernel {self._kernels}, {name} by {backend}, for "
        self._compiling.append(text)
        try:
            yield
        finally:
            self._compiling.remove(text)

    def line(self) -> str:
        """What the command is doing at this moment."""
        step = f", step {self._step + 1} of {self._steps}" if self._step < self._steps else ""
        compiling = self._compiling[-1:]
        return f"{self._place}{compiling[0] if compiling else ''}{self._label}{'' if compiling else step}"

    def tick(self) -> None:
        """Writes the line where the work has taken long enough and the line is another than before."""
        with self._lock:
            line = self.line()
            if self._clock() - self._begin <= QUIET or line == self._said:
                return
            self._write(f"\r\x1b[2K{line}" if self._live else f"{line}\n")
            self._said = line

    def close(self) -> None:
        """Erases the line from a terminal."""
        with self._lock:
            if self._live and self._said:
                self._write("\r\x1b[2K")

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


@contextmanager
def working() -> Iterator[Working]:
    """Within the block, the present work of a command is shown on stderr: see `Working`.

    With RULEC_QUIET=1 nothing is shown.
    """
    from rulec.backend.cache import observed
    from rulec.environment import whole_number

    if whole_number("RULEC_QUIET", "1 for commands that do not say what they are doing", 1):
        yield Working(sys.stderr, False)
        return
    shown, ended = Working(sys.stderr, sys.stderr.isatty()), threading.Event()

    def tell() -> None:
        while not ended.wait(QUIET):
            shown.tick()

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        with observed(shown.compiling):
            yield shown
    finally:
        ended.set()
        teller.join()
        shown.close()


def shapes_text(shapes: Sequence[Sequence[int]]) -> str:
    """Shapes as `4x6 and 5`."""
    return " and ".join("x".join(map(str, shape)) or "a number" for shape in shapes)
