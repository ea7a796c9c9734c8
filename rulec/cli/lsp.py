"""`rulec lsp`: a language server for rule files."""

from __future__ import annotations

from rulec.errors import RulecError


def lsp() -> None:
    """Serve an editor: mistakes as one types, completion, and what a word means.

    The editor starts this command, and speaks the language server protocol with it on stdin and stdout.
    """
    try:
        from rulec.tools.language_server.server import make_server
    except ImportError:
        raise RulecError("rulec lsp needs pygls: pip install 'rulec[lsp]'") from None
    make_server().start_io()
