"""Links to the playground that hold a rule, `http://127.0.0.1:8710/#rule=TEXT`, as the page writes them.

TEXT is the rule in UTF-8, compressed by deflate without a header, in base64 for addresses without padding.
"""

from __future__ import annotations

import base64
import binascii
import re
import zlib

from rulec.errors import RulecError
from rulec.language.source import MAX_DOCUMENT

_LINK = re.compile(r"(?:https?://[\w.:\[\]-]+/)?#(?:[\w-]+&)?rule=(.*)")

#: Bytes of a character in UTF-8, at most.
_WIDEST = 4


def is_link(text: str) -> bool:
    """Whether a text is such a link, or its end from # on."""
    return _LINK.fullmatch(text.strip()) is not None


def link_text(text: str) -> str:
    """The end of a link to the page with this rule: `#rule=TEXT`."""
    pressed = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    packed = pressed.compress(text.encode()) + pressed.flush()
    return f"#rule={base64.urlsafe_b64encode(packed).decode().rstrip('=')}"


def linked_text(link: str) -> str:
    """The text of the rule in a link; RulecError where it holds none."""
    match = _LINK.fullmatch(link.strip())
    letters = match[1] if match else ""
    expanded = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        packed = base64.b64decode(letters + "=" * (-len(letters) % 4), altchars=b"-_", validate=True)
        text = expanded.decompress(packed, _WIDEST * MAX_DOCUMENT).decode()
    except (binascii.Error, zlib.error, UnicodeDecodeError):
        text = ""
    if not text or not expanded.eof:
        raise RulecError("the link holds no whole rule: copy it again, all of it behind #rule=, and set it in quotes")
    return text
