"""The server of the playground."""

from __future__ import annotations

import inspect
import json
import mimetypes
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from rulec import __version__
from rulec.language.library.folder import library_folder
from rulec.language.library.load import rules
from rulec.tools.display.kernels import TABS
from rulec.tools.display.path import FUNCTIONS
from rulec.tools.playground.guard import Guard
from rulec.tools.playground.process import Process, Reply
from rulec.tools.playground.questions import QUESTIONS
from rulec.tools.race.tasks import TASKS

mimetypes.add_type("text/javascript", ".js")  # which a system may hold for plain text

PAGE = Path(__file__).resolve().parent / "page"
KATEX = PAGE.parent.parent / "display" / "katex"
#: Bytes of a question, at most: a rule file has up to 100,000 characters.
LARGEST = 500_000
#: The processes: seconds that an answer may take, and their questions. A long answer keeps no other process waiting.
PROCESSES = {
    "text": (5.0, ("mistakes", "words", "meaning")), "rule": (20.0, ("look", "kernel", "path")),
    "race": (90.0, ("race",)),
}  # fmt: skip


@dataclass(frozen=True)
class Opening:
    """The rule that the page opens with: its text, the name of its file, and the folder of rules named by a path."""

    text: str
    file: str
    folder: Path


def make_app(opening: Opening, port: int, key: str) -> Starlette:
    """The server's application; it answers requests to the loopback address and this port alone, with the key."""
    command = (sys.executable, "-P", "-m", "rulec.tools.playground.worker", str(opening.folder))
    processes = {name: Process(command, seconds) for name, (seconds, _) in PROCESSES.items()}
    process_of = {question: processes[name] for name, (_, listed) in PROCESSES.items() for question in listed}

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        for process in processes.values():
            await process.close()

    async def ask(request: Request) -> Response:
        question = request.path_params["question"]
        arguments = await _arguments(request, question)
        messages = process_of[question].ask(question, arguments)
        return StreamingResponse(_lines(messages), media_type="application/jsonl")

    async def page(request: Request) -> Response:
        return FileResponse(PAGE / "index.html")

    async def start(request: Request) -> Response:
        return JSONResponse(_start(opening))

    return Starlette(
        routes=[
            Route("/", page), Route("/start", start), Route("/rule/{name:path}", _library_rule),
            Route("/ask/{question}", ask, methods=["POST"]),
            Mount("/page", StaticFiles(directory=PAGE)), Mount("/katex", StaticFiles(directory=KATEX)),
        ],
        middleware=[Middleware(Guard, port=port, key=key)], lifespan=lifespan,
    )  # fmt: skip


def _start(opening: Opening) -> dict[str, Any]:
    """The content of the page before anything is asked."""
    return {
        "text": opening.text, "file": opening.file, "version": __version__, "rules": rules(), "backends": TABS,
        "functions": [function.name for function in FUNCTIONS], "tasks": [*TASKS],
    }  # fmt: skip


async def _library_rule(request: Request) -> Response:
    """The text of a rule of the library."""
    name = request.path_params["name"]
    file = library_folder() / f"{name}.yaml"
    if name not in rules() or not os.path.isfile(file):
        raise HTTPException(404, f"{name!r} has no file in the library")
    return PlainTextResponse(file.read_text(encoding="utf-8"))


async def _arguments(request: Request, question: str) -> dict[str, Any]:
    """The arguments of a question, from the body of a request; HTTPException for a body that is none of the page's."""
    if question not in QUESTIONS:
        raise HTTPException(404, f"the page has no question {question!r}")
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > LARGEST:
            raise HTTPException(413, f"this is over {LARGEST} bytes: it is no rule file")
    try:
        arguments = json.loads(body)
    except (ValueError, RecursionError):
        raise HTTPException(400, "the body of a question is JSON") from None
    names = list(inspect.signature(QUESTIONS[question]).parameters)[2:]
    if not isinstance(arguments, dict) or sorted(arguments) != sorted(names):
        raise HTTPException(400, f"the question {question} has the arguments {', '.join(names)}")
    return arguments


async def _lines(messages: AsyncIterator[Reply]) -> AsyncIterator[str]:
    """Messages as lines of JSON."""
    async for message in messages:
        yield json.dumps(message) + "\n"
