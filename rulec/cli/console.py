"""The output of commands: colour on a terminal, plain text in a pipe, JSON for scripts, progress on stderr."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rulec.errors import RulecError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

#: The exit code of a mistake of the user.
MISTAKE = 2


def console() -> Console:
    """The console of stdout."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=not sys.stdout.isatty())


def fail(message: str) -> None:
    """Prints an error on stderr: its first line is the sentence, the others show the place."""
    _say("error: ", "bold red", message)


def warn(message: str) -> None:
    """Prints a warning on stderr, as an error."""
    _say("warning: ", "bold yellow", message)


def _say(kind: str, style: str, message: str) -> None:
    from rich.console import Console
    from rich.text import Text

    first, _, rest = message.partition("\n")
    text = Text.assemble((kind, style), first, *([f"\n{rest}"] if rest else []))
    Console(stderr=True, highlight=False, soft_wrap=True).print(text)


def print_json(data: Any) -> None:
    """Data as JSON on stdout. Numbers that JSON does not have (infinities and NaN) become null."""
    print(json_text(data))


def json_text(data: Any) -> str:
    """Data as indented JSON; infinities and NaN become null."""
    return json.dumps(_finite(data), indent=2, ensure_ascii=False, allow_nan=False)


def _finite(data: Any) -> Any:
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, Mapping):
        return {str(k): _finite(v) for k, v in data.items()}
    if isinstance(data, Sequence) and not isinstance(data, str):
        return [_finite(v) for v in data]
    return data


def print_source(text: str, language: str) -> None:
    """Source text, coloured on a terminal and as it is in a pipe."""
    if not sys.stdout.isatty():
        print(text.rstrip("\n"))
        return
    from rich.syntax import Syntax

    console().print(Syntax(text, language, background_color="default", word_wrap=False))


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = (), one_line: bool = False
) -> None:
    """Rows under headings; the columns named in `right` are aligned right. A cell may hold rich markup.

    With `one_line` a row is one line of the terminal, where the end of its last cell is left out.
    """
    if not sys.stdout.isatty():
        _print_plain_table([columns, *rows], [column in right for column in columns])
        return
    from rich.table import Table

    shown = console()
    table = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
    widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
    rest = max(shown.width - sum(widths[:-1]) - 2 * (len(columns) - 1), 1)
    for column in columns:
        justify: Literal["left", "right"] = "right" if column in right else "left"
        cut = rest if one_line and column == columns[-1] else None
        table.add_column(
            column, justify=justify, overflow="ellipsis" if cut else "fold", no_wrap=one_line, max_width=cut
        )
    for row in rows:
        table.add_row(*row)
    shown.print(table)


def _print_plain_table(rows: Sequence[Sequence[str]], right: Sequence[bool]) -> None:
    """Every row on one line, however long: what a pipe's reader expects."""
    from rich.markup import render

    plain = [[render(cell).plain for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*plain, strict=True)]
    for row in plain:
        cells = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True))
        print("  ".join(cells).rstrip())


@contextmanager
def progress() -> Iterator[Progress]:
    """A progress bar on stderr, for work of more than a second; invisible where stderr is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    errors = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as shown:
        yield shown


def write_text(path: Path, text: str) -> None:
    """Writes a file, its folder too; RulecError, in one sentence, where that cannot be done."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RulecError(f"{path} cannot be written: {error.strerror or error}") from None
