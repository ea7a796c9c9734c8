"""A question to a process: its answer, and what becomes of a process that takes too long or ends, or of its server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from rulec.tools.demo.training import TEXT
from rulec.tools.playground.server import KEY, Process, Reply
from rulec.tools.playground.worker import watched

#: Seconds in which processes have to start, to answer and to end.
PATIENCE = 60.0

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


def test_a_process_ends_with_its_stream_while_it_works() -> None:
    """A server that is killed closes the stream, and a race of a minute would hold the process until then."""
    reading, writing = os.pipe()
    ended = threading.Event()
    with os.fdopen(reading) as stream:
        lines = watched(stream, ended.set)
        os.write(writing, b"first\nsecond\n")
        assert next(lines) == "first\n"
        assert not ended.is_set()
        os.close(writing)
        assert ended.wait(PATIENCE)
        assert next(lines) == "second\n"


#: A process of the page that has one more question, whose answer takes an hour.
HOUR = """
import sys, time
from rulec.tools.playground import worker

worker.QUESTIONS["hour"] = lambda folder, tell: (tell(0.5), time.sleep(3600))
sys.argv = ["worker", "."]
worker.main()
"""


@pytest.mark.slow
def test_a_process_of_the_page_ends_amid_an_answer() -> None:
    command = [sys.executable, "-c", HOUR]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert json.loads(process.stdout.readline()) == {"ready": True}
        process.stdin.write('["hour", {}]\n')
        process.stdin.flush()
        assert json.loads(process.stdout.readline()) == {"progress": 0.5}
        process.stdin.close()
        try:
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()


def children(parent: int) -> set[int]:
    """The processes of a process that have not ended."""
    living = set()
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, above = file.read_text().rpartition(")")[2].split()[:2]
        except OSError:  # it has just ended
            continue
        if int(above) == parent and state != "Z":
            living.add(int(file.parent.name))
    return living


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def ask(address: str, question: str, **arguments: object) -> Any:
    """The lines of an answer, as they come."""
    page, _, key = address.partition("#")
    headers = {KEY: key, "Origin": page.rstrip("/"), "Content-Type": "application/json"}
    body = json.dumps(arguments).encode()
    return urllib.request.urlopen(urllib.request.Request(f"{page}ask/{question}", body, headers), timeout=PATIENCE)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are counted in /proc")
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_processes_end_with_the_server_amid_a_race(end: signal.Signals) -> None:
    command = [sys.executable, "-m", "rulec", "play", "--no-browser", "--port", "0"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = server.stdout.readline().split()[4]
        with ask(address, "mistakes", text=TEXT) as answer:
            assert json.loads(answer.read())["answer"] == []
        with ask(address, "race", text=TEXT, task="digits", rivals=["muon"]) as racing:
            assert "progress" in json.loads(racing.readline())
            workers = children(server.pid)
            assert len(workers) == 2
            server.send_signal(end)
            server.wait(PATIENCE)
    until = time.monotonic() + PATIENCE
    while running := [worker for worker in workers if is_running(worker)]:
        assert time.monotonic() < until, f"{running} run on after their server"
        time.sleep(0.05)
