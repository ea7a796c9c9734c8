"""Commands for editors: `rulec schema`, the JSON Schema of rule files, and `rulec lsp`, a language server for them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rulec.cli.console import json_text, write_text
from rulec.extras import needing


def schema(
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write it to this file instead.")] = None,
) -> None:
    """Print the JSON Schema of rule files, for editors."""
    from rulec.language.yaml.schema import json_schema

    text = json_text(json_schema())
    if output is None:
        print(text)
    else:
        write_text(output, text + "\n")


def lsp() -> None:
    """Serve an editor: mistakes as one types, completion, and what a word means.

    The editor starts this command, and speaks the language server protocol with it on stdin and stdout.
    """
    with needing("rulec lsp", "lsp"):
        from rulec.tools.language_server.server import make_server
    make_server().start_io()
