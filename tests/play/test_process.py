"""A question to a process: its answer, and what becomes of a process that takes too long or ends."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from typing import Any

from rulec.tools.playground.server import Process, Reply

#: Says where it runs; sleeps, ends or tells progress where it is asked to.
WORKER = """
import json, os, sys, time
print('{"ready": true}', flush=True)
for line in sys.stdin:
    question, arguments = json.loads(line)
    if question == "sleep":
        time.sleep(60)
    if question == "end":
        os._exit(1)
    if question == "slow":
        print('{"progress": 0.5}', flush=True)
    print(json.dumps({"answer": [os.getpid(), arguments]}), flush=True)
"""


async def messages(process: Process, question: str) -> list[Reply]:
    return [message async for message in process.ask(question, {"text": "é\\n"})]


def run(test: Callable[[Process], Coroutine[Any, Any, None]], seconds: float = 30) -> None:
    async def whole() -> None:
        process = Process((sys.executable, "-S", "-c", WORKER), seconds)
        await test(process)
        await process.close()

    asyncio.run(whole())


def test_answers_come_from_one_process_one_after_the_other() -> None:
    async def test(process: Process) -> None:
        first, second = await asyncio.gather(messages(process, "quick"), messages(process, "slow"))
        assert first == [{"answer": [first[0]["answer"][0], {"text": "é\\n"}]}]
        assert second == [{"progress": 0.5}, *first]

    run(test)


def test_a_process_that_ends_is_started_again() -> None:
    async def test(process: Process) -> None:
        assert "ended: the rule may need too much memory" in (await messages(process, "end"))[-1]["error"]
        assert "answer" in (await messages(process, "quick"))[-1]

    run(test)


def test_an_answer_that_takes_too_long_is_stopped() -> None:
    async def test(process: Process) -> None:
        (stopped,) = await messages(process, "sleep")
        assert stopped == {"error": "This took over 0.5 seconds, and was stopped."}
        assert "answer" in (await messages(process, "quick"))[-1]

    run(test, 0.5)


def test_a_reader_who_leaves_ends_the_process() -> None:
    async def test(process: Process) -> None:
        (first,) = await messages(process, "quick")
        asked: AsyncIterator[Reply]
        async with aclosing(process.ask("slow", {})) as asked:
            assert await anext(asked) == {"progress": 0.5}
        (second,) = await messages(process, "quick")
        assert second["answer"][0] != first["answer"][0]

    run(test)
