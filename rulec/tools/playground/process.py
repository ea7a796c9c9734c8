"""A process that answers questions one by one, each within a time limit."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

#: The longest answer, in bytes.
LONGEST = 2**26
#: Seconds in which a process has to start.
START = 120.0

Reply = dict[str, Any]


class Process:
    """Starts its command for the first question, and again after one that took over `seconds` or ended it."""

    def __init__(self, command: Sequence[str], seconds: float) -> None:
        self._command, self._seconds = command, seconds
        self._lock = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None

    async def ask(self, question: str, arguments: Mapping[str, Any]) -> AsyncIterator[Reply]:
        """Messages with `progress`, and last one with `answer` or `error`. Closed before that, the process ends."""
        async with self._lock:
            complete = False
            try:
                process = await self._started()
                assert process.stdin is not None
                process.stdin.write(json.dumps([question, arguments]).encode() + b"\n")
                until = asyncio.get_running_loop().time() + self._seconds
                message: Reply = {"progress": 0.0}
                while "progress" in message:
                    message = await _line(process, until - asyncio.get_running_loop().time())
                    complete = "progress" not in message
                    yield message
            except TimeoutError:
                yield {"error": f"This took over {self._seconds:g} seconds, and was stopped."}
            except EOFError:
                yield {"error": "The process that reads the rule ended: the rule may need too much memory."}
            finally:
                if not complete:
                    await self.close()

    async def close(self) -> None:
        """Ends the process."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()

    async def _started(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                *self._command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=LONGEST,
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"}, start_new_session=True,
            )  # fmt: skip
            await _line(self._process, START)
        return self._process


async def _line(process: asyncio.subprocess.Process, seconds: float) -> Reply:
    """The next message; TimeoutError after so many seconds, EOFError where the process has ended."""
    assert process.stdout is not None
    line = await asyncio.wait_for(process.stdout.readline(), max(seconds, 0))
    if not line:
        raise EOFError
    message: Reply = json.loads(line)
    return message
