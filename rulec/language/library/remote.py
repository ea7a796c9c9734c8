"""Remote rules: at addresses of the web, pinned by the SHA-256 of their file, `https://host/rule.yaml@sha256:HEX`.

A file is kept in the cache by its hash, and fetched if the cache has it not. Its hash is checked before it is parsed.
Files are fetched by https only, within a size and a time, with every redirect checked.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urljoin, urlsplit

from rulec.errors import RuleError
from rulec.files import wanted_folder, written_whole
from rulec.language.expr.names import short
from rulec.language.source import MAX_DOCUMENT

if TYPE_CHECKING:
    from urllib.request import OpenerDirector


#: The most bytes of a file: a character takes at most four.
MAX_BYTES = 4 * MAX_DOCUMENT

#: A pinned address in a composition. One with brackets stands in quotes there.
PATTERN = r"""https?://[^\s()"']+@sha256:\w*"""

_HOW = "rulec.load(..., allow_url=True) or --allow-url on the command line fetches it"


@dataclass(frozen=True)
class Address:
    """The address of a rule file, and the SHA-256 of the file in hexadecimal digits."""

    url: str
    digest: str


def is_address(name: str) -> bool:
    """Whether a name stands for a rule on the web, pinned or not."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", name) is not None


def read_address(name: str, allow_url: bool) -> Address:
    """The parts of a pinned address. RuleError for another scheme, without a pin, and without `allow_url`."""
    url, pinned, digest = name.strip().partition("@sha256:")
    check_url(url)
    if not pinned or not re.fullmatch(r"[0-9a-fA-F]{64}", digest):
        raise RuleError(
            f"the address {short(url)} is not pinned: end it in @sha256: and the 64 digits that `sha256sum` prints for "
            "the file"
        )
    if not allow_url:
        raise RuleError(f"the rule {short(url)} is on the web: {_HOW}")
    return Address(url, digest.lower())


def shown(text: str) -> str:
    """A name or composition for tables: each pinned address is the last part of its path, with eight digits."""
    return re.sub(PATTERN, lambda match: _shown_address(match[0]), text)


def _shown_address(name: str) -> str:
    url, _, digest = name.partition("@sha256:")
    try:
        parts = urlsplit(url)
    except ValueError:  # no address
        return short(name)
    return f"{parts.path.rpartition('/')[2] or parts.hostname}@{digest[:8]}"


def text_at(address: Address) -> str:
    """The text of a rule file, from the cache or else from the web.

    RuleError where it cannot be fetched, and for a file with another hash or that is not UTF-8.
    """
    content = _kept(address.digest)
    if content is None:
        content = download(address.url, MAX_BYTES)
        digest = hashlib.sha256(content).hexdigest()
        if digest != address.digest:
            raise RuleError(
                f"{address.url} is not the file that was pinned: its SHA-256 is {digest}, not {address.digest}; "
                "read it, and pin it anew if you want it"
            )
        _keep(address.digest, content)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RuleError(f"{address.url} is not UTF-8 text: its byte {error.start} is wrong") from None


def _file(digest: str) -> Path:
    return wanted_folder() / "rules" / f"{digest}.yaml"


def _kept(digest: str) -> bytes | None:
    """The file of this hash in the cache; None where there is none, or one with another hash."""
    file = _file(digest)
    try:
        if not os.path.isfile(file) or file.stat().st_size > MAX_BYTES:
            return None
        content = file.read_bytes()
    except OSError:
        return None
    return content if hashlib.sha256(content).hexdigest() == digest else None


def _keep(digest: str, content: bytes) -> None:
    """Writes a file into the cache. If that fails, the next load fetches the file again."""
    file = _file(digest)
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with written_whole(file, 0o600, durable=False) as opened:
            opened.write(content)


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
