"""`rulec schema`: the JSON Schema of rule files, for editors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rulec.cli.console import json_text, write_text


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
