"""The server of the playground, its worker process, and its guard against requests of other sites and users.

The worker process answers questions one by one, each within a time limit. The server listens on the loopback address,
and other sites in the same browser get nothing from it. A name of another site may lead to this address (DNS
rebinding), so the Host header must be ours. A page of another site may send requests here, so the Origin header must be
ours too. Other users of the machine do not know the key.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import inspect
import json
import mimetypes
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rulec import __version__
from rulec.language.library.folder import library_folder
from rulec.language.library.load import rules
from rulec.tools.display.assembly import MACHINES
from rulec.tools.display.kernels import TABS
from rulec.tools.display.path import FUNCTIONS
from rulec.tools.playground.questions import QUESTIONS
from rulec.tools.race.tasks import TASKS

mimetypes.add_type("text/javascript", ".js")  # which a system may hold for plain text

PAGE = Path(__file__).resolve().parent / "page"
KATEX = PAGE.parent.parent / "display" / "katex"
#: Bytes of a question, at most: a rule file has up to 100,000 characters.
LARGEST = 500_000
#: The processes: seconds that an answer may take, and their questions. A long answer keeps no other process waiting.
PROCESSES = {
    "text": (5.0, ("mistakes", "words", "meaning")), "rule": (20.0, ("look", "kernel", "assembly", "path")),
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
        "machines": MACHINES, "functions": [function.name for function in FUNCTIONS], "tasks": [*TASKS],
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
    kinds = _kinds(question)
    if not isinstance(arguments, dict) or sorted(arguments) != sorted(kinds):
        raise HTTPException(400, f"the question {question} has the arguments {', '.join(kinds)}")
    for name, kind in kinds.items():
        try:
            kind.validate_python(arguments[name], strict=True)
        except ValidationError:
            raise HTTPException(400, f"the argument {name} of the question {question} is of another type") from None
    return arguments


@functools.cache
def _kinds(question: str) -> dict[str, TypeAdapter[Any]]:
    """The types of a question's arguments by name, those of its function behind the folder and `tell`."""
    hints = get_type_hints(QUESTIONS[question])
    names = list(inspect.signature(QUESTIONS[question]).parameters)[2:]
    return {name: TypeAdapter(hints[name]) for name in names}


async def _lines(messages: AsyncIterator[Reply]) -> AsyncIterator[str]:
    """Messages as lines of JSON."""
    async for message in messages:
        yield json.dumps(message) + "\n"


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


#: The page asks nothing of anyone but its server, and no other page shows it in a frame.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "font-src 'self'; img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


#: Paths of files that hold nothing of the user: they need no key.
OPEN = ("/page/", "/katex/")
#: The header that has the key.
KEY = "x-rulec-key"


class Guard:
    """Refuses requests of other sites, and without the key; adds `HEADERS` to the answers of all others."""

    def __init__(self, app: ASGIApp, port: int, key: str) -> None:
        self._app, self._key = app, key
        self._hosts = {f"{name}:{port}" for name in ("127.0.0.1", "localhost")}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or answers 403."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        sentence = self._refusal(scope, Headers(scope=scope)) if scope["type"] == "http" else "only HTTP"
        if sentence:
            await PlainTextResponse(f"Refused: {sentence}.\n", 403)(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await self._app(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope, headers: Headers) -> str:
        """Why a request is refused, as part of a sentence; empty where it is not."""
        method, path = scope["method"], scope["path"]
        host, origin = headers.getlist("host"), headers.getlist("origin")
        if len(host) != 1 or host[0] not in self._hosts:
            return "the Host header is not the address that rulec play printed"
        if origin != [f"http://{host[0]}"] and (origin or method not in ("GET", "HEAD")):
            return "the request comes from another site"
        site, kind = headers.get("sec-fetch-site", "none"), headers.get("sec-fetch-mode", "")
        if site not in ("same-origin", "none") and not (method == "GET" and kind == "navigate"):
            return "the request comes from another site"
        if path == "/" or path.startswith(OPEN):
            return ""
        key = headers.get(KEY, "").encode()
        return "" if hmac.compare_digest(key, self._key.encode()) else "open the whole address that rulec play printed"
