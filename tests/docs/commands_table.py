"""The page of the command line: every command with its arguments and options, as `--help` has them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import typer

from rulec.cli.app import app
from tests.docs.table import table


def command_options() -> str:
    """A section for each command, in the order of `rulec --help`."""
    whole: Any = typer.main.get_command(app)
    return "\n".join(line for path, command in _commands(whole, ("rulec",)) for line in _section(path, command))


def _commands(group: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The commands of a group, and those of groups within it, with the words that call them."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, (*path, name))
        else:
            yield (*path, name), command


def _section(path: tuple[str, ...], command: Any) -> Iterator[str]:
    yield from (f"## {' '.join(path)}", "")
    context = typer.Context(command, info_name=" ".join(path))
    usage = " ".join([*path, *command.collect_usage_pieces(context)])
    yield from (f"    {usage}", "", *_text(command), "")
    rows = [_row(parameter) for parameter in command.params if not getattr(parameter, "hidden", False)]
    if rows:
        yield from (table(["argument or option", "meaning", "default"], rows), "")


def _text(command: Any) -> list[str]:
    """What a command says of itself; its examples are a block of the shell."""
    lines = inspect.cleandoc(command.help or "").replace("\f", "").splitlines()
    epilog = inspect.cleandoc(command.epilog or "").replace("\b", "").strip()
    return [*lines, "", *(f"    {line}".rstrip() for line in epilog.splitlines())]


def _row(parameter: Any) -> list[str]:
    """A parameter's words, meaning and default."""
    words = [*parameter.opts, *parameter.secondary_opts] if parameter.param_type_name == "option" else []
    name = ", ".join(f"`{word}`" for word in words) or f"`{parameter.metavar or parameter.name.upper()}`"
    return [name, str(parameter.help or "").replace("|", "\\|"), _default(parameter)]


def _default(parameter: Any) -> str:
    default = parameter.default
    if parameter.required or default is None or default is False or default in ((), "") or callable(default):
        return ""
    return "yes" if default is True else f"`{default}`"
