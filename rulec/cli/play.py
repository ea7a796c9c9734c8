"""`rulec play`: a local page to write a rule in, with its formula, costs, kernels, path and races."""

from __future__ import annotations

import os
import secrets
import socket
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rulec.cli.arguments import RULE_HELP, AllowUrlFlag, find_rule, rule_words
from rulec.errors import RulecError
from rulec.extras import needing

if TYPE_CHECKING:
    from rulec.tools.playground.server import Opening

#: The port where no other is named.
PORT = 8710


def play(
    rule: Annotated[
        str,
        typer.Argument(
            metavar="[RULE]",
            autocompletion=rule_words,
            help=f"{RULE_HELP} Or a link of the page, '#rule=...'. Without one, a rule to begin with.",
        ),
    ] = "",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port of the page; 0 for any that is free.")] = PORT,
    allow_url: AllowUrlFlag = False,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in the browser.")] = True,
) -> None:
    """Open a page to write a rule in: its mistakes as you type, its formula, costs, kernels, path and races.

    The page is served to this machine alone, until Ctrl-C. Nothing is written to the rule's file.
    """
    import threading
    import webbrowser

    with needing("rulec play", "play"):
        import uvicorn

        from rulec.tools.playground.server import make_app
    opening, listening, key = opening_of(rule, allow_url), listen(port), secrets.token_urlsafe(12)
    port = listening.getsockname()[1]
    address = f"http://127.0.0.1:{port}/#{key}"  # what stands behind # stays in the browser
    app = make_app(opening, port, key)
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=1)
    shown = rule if os.path.isfile(rule) else opening.file
    print(f"{shown} is open at {address} - Ctrl-C ends it", flush=True)
    if browser:
        threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
    with suppress(KeyboardInterrupt), listening:
        uvicorn.Server(config).run(sockets=[listening])


def opening_of(rule: str, allow_url: bool = False) -> Opening:
    """The text of a rule, that of the demonstration by default; a file's may have mistakes. RulecError for no rule."""
    from rulec.language.library.folder import library_folder
    from rulec.language.library.load import rules
    from rulec.language.source import MAX_DOCUMENT
    from rulec.tools.demo.training import TEXT
    from rulec.tools.playground.link import is_link, linked_text
    from rulec.tools.playground.server import Opening

    if not rule:
        return Opening(TEXT, "wary_adam.yaml", Path.cwd())
    if is_link(rule):
        return Opening(linked_text(rule), "linked.yaml", Path.cwd())
    library = library_folder() / f"{rule}.yaml"
    if rule in rules() and os.path.isfile(library):
        return Opening(library.read_text(encoding="utf-8"), f"{rule}.yaml", Path.cwd())
    path = Path(rule)
    if path.suffix not in (".yaml", ".yml") or not os.path.isfile(path):
        loaded = find_rule(rule, allow_url)
        return Opening(loaded.to_yaml(), f"{loaded.name}.yaml", Path.cwd())
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RulecError(f"{path} cannot be read: {getattr(error, 'strerror', None) or 'it is not UTF-8'}") from None
    if len(text) > MAX_DOCUMENT:
        raise RulecError(f"{path} has {len(text)} characters, over the limit of {MAX_DOCUMENT}: it is no rule file")
    return Opening(text, path.name, path.resolve().parent)


def listen(port: int) -> socket.socket:
    """A socket that listens on the loopback address; RulecError where the port is taken."""
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    if os.name == "posix":
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(("127.0.0.1", port))
        listening.listen()
    except OSError as error:
        listening.close()
        why = "is taken" if not isinstance(error, PermissionError) else "may not be used by you"
        raise RulecError(f"port {port} {why}: name another one, or --port 0 for any that is free") from None
    return listening
