"""Rules at addresses of the web, pinned by the SHA-256 of their file: `https://host/rule.yaml@sha256:HEX`.

A file is kept in the cache by its hash, and fetched where it is not there. Its hash is checked before it is parsed.
"""

from __future__ import annotations

import hashlib
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from rulec.errors import RuleError
from rulec.files import wanted_folder, written_whole
from rulec.language.expr.names import short
from rulec.language.library.download import check_url, download
from rulec.language.source import MAX_DOCUMENT

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
