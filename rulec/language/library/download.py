"""Small files of the web: by https only, within a size and a time, with every redirect checked."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from http.client import HTTPException
from typing import TYPE_CHECKING
from urllib.parse import urljoin, urlsplit

from rulec.errors import RuleError
from rulec.language.expr.names import short

if TYPE_CHECKING:
    from urllib.request import OpenerDirector

#: The longest time of a whole download, and of a wait for the server within it, in seconds.
SECONDS = 30.0

#: The most redirects of a download.
REDIRECTS = 5


def check_url(url: str) -> None:
    """RuleError for an address that is not https, or has a name or password of a user in it."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # is a number
    except ValueError as error:
        raise RuleError(f"{short(url)} is no address: {error}") from None
    if parts.scheme.lower() != "https" or not parts.hostname:
        raise RuleError(f"rules are fetched by https only: {short(url)} is not https://host/...")
    if "@" in parts.netloc or re.search(r"[^!-~]", url):
        raise RuleError(f"{short(url)} is no plain address: it has a user, a space or a letter outside ASCII in it")


def download(url: str, most: int) -> bytes:
    """The file at an https address. Certificates are checked as Python's `ssl` does by default.

    RuleError, with the reason, for a file over `most` bytes, a redirect to anything but https, more than REDIRECTS
    redirects, another answer than a file, and after SECONDS.
    """
    return _within(SECONDS, url, lambda: _download(url, most))


def _within(seconds: float, url: str, work: Callable[[], bytes]) -> bytes:
    """The result of a function, which runs in a thread: a server may keep any single wait alive by single bytes."""
    results: list[bytes | Exception] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:  # noqa: BLE001 - raised below, in the thread that asked
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not results:
        raise _late(url, seconds)
    if isinstance(results[0], Exception):
        raise results[0]
    return results[0]


def _late(url: str, seconds: float) -> RuleError:
    return RuleError(f"{url} was not fetched within {seconds:g} seconds: try again, or load the rule from a file")


def _download(url: str, most: int) -> bytes:
    from urllib.error import HTTPError, URLError

    opener, at = _opener(), url
    for _ in range(REDIRECTS + 1):
        check_url(at)
        try:
            with opener.open(at, timeout=SECONDS) as answer:
                content: bytes = answer.read(most + 1)
        except HTTPError as error:
            error.close()
            to = error.headers.get("Location") if 300 <= error.code < 400 else None
            if to is None:
                raise RuleError(f"{at} cannot be fetched: the server answers {error.code} {error.reason}") from None
            at = _redirected(at, to)
        except (URLError, HTTPException, OSError, UnicodeError) as error:  # of a name that has no bytes, the last
            reason = getattr(error, "reason", None) or error
            if isinstance(reason, TimeoutError):
                raise _late(at, SECONDS) from None
            raise RuleError(f"{at} cannot be fetched: {reason}") from None
        else:
            if len(content) > most:
                raise RuleError(f"{at} has more than {most} bytes: it is no rule file")
            return content
    raise RuleError(f"{url} redirects more than {REDIRECTS} times: use the address of the file itself")


def _redirected(url: str, to: str) -> str:
    """Where an address leads; RuleError where that is no address."""
    try:
        return urljoin(url, to)
    except ValueError as error:
        raise RuleError(f"{url} redirects to {short(to)}, which is no address: {error}") from None


def _opener() -> OpenerDirector:
    """Opens https addresses, through the proxy of the environment; all other answers than a file are HTTPErrors."""
    from urllib.request import (
        HTTPDefaultErrorHandler,
        HTTPErrorProcessor,
        HTTPSHandler,
        OpenerDirector,
        ProxyHandler,
        UnknownHandler,
    )

    opener = OpenerDirector()
    for handler in (
        ProxyHandler, UnknownHandler, HTTPSHandler, HTTPDefaultErrorHandler, HTTPErrorProcessor,
    ):  # fmt: skip
        opener.add_handler(handler())
    opener.addheaders = [("User-Agent", "rulec")]
    return opener
