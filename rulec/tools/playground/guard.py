"""The guard of a server on the loopback address: other sites in the same browser get nothing from it.

A name of another site may lead to this address (DNS rebinding), so the Host header must be ours. A page of another site
may send requests here, so the Origin header must be ours too. Other users of the machine do not know the key.
"""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
