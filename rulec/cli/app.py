"""The application: the list of commands, and the treatment of errors.

Exit codes: 0 done, 1 the command's answer is no (two rules differ, a backend cannot run), 2 a mistake of the user, in
one sentence without a traceback. A defect of rulec ends in a traceback.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from rulec.cli import (
    bench,
    build,
    cache,
    check,
    demo,
    diff,
    doctor,
    editor,
    listing,
    memory,
    new,
    play,
    race,
    show,
    trace,
)
from rulec.cli import editor as lsp
from rulec.cli.console import MISTAKE, fail
from rulec.cli.examples import epilog
from rulec.errors import InternalError, RulecError


class Commands(TyperGroup):
    """The commands, with rulec's own errors as one sentence on stderr and exit code 2."""

    def invoke(self, ctx: Any) -> Any:
        if "" not in sys.path:
            sys.path.append("")  # modules of the folder one works in, after all that is installed
        try:
            return super().invoke(ctx)
        except InternalError:
            raise
        except RulecError as error:
            for each in (error, *getattr(error, "others", ())):
                fail(str(each))
            raise typer.Exit(MISTAKE) from None


app = typer.Typer(
    name="rulec",
    cls=Commands,
    help="Compile optimizer rules, written as their mathematics, into fused kernels.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    epilog=epilog(),
)

app.command("list", epilog=epilog("list"))(listing.list_rules)
app.command("show", epilog=epilog("show"))(show.show)
app.command("check", epilog=epilog("check"))(check.check)
app.command("new", epilog=epilog("new"))(new.new)
app.command("trace", epilog=epilog("trace"))(trace.trace)
app.command("diff", epilog=epilog("diff"))(diff.diff)
app.command("build", epilog=epilog("build"))(build.build)
app.command("bench", epilog=epilog("bench"), context_settings=bench.PASSED_ON)(bench.bench)
app.command("race", epilog=epilog("race"))(race.race)
app.command("play", epilog=epilog("play"))(play.play)
app.command("memory", epilog=epilog("memory"))(memory.memory)
app.command("demo", epilog=epilog("demo"))(demo.demo)
app.command("doctor", epilog=epilog("doctor"))(doctor.doctor)
app.command("schema", epilog=epilog("schema"))(editor.schema)
app.command("lsp", epilog=epilog("lsp"))(lsp.lsp)
app.add_typer(cache.app, name="cache", epilog=epilog("cache"))


def _version(asked: bool) -> None:
    if asked:
        from rulec import __version__

        typer.echo(f"rulec {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Compile optimizer rules, written as their mathematics, into fused kernels."""
