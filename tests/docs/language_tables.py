"""Tables of the rule language and of the command line."""

from __future__ import annotations

import rulec.math
from rulec.cli.app import app
from rulec.language.expr.functions import FUNCTIONS
from rulec.language.hyper import WELL_KNOWN, Hyper
from tests.docs.table import table


def functions() -> str:
    """Every function of the language, with what it does."""
    rows = []
    for name, function in FUNCTIONS.items():
        words = getattr(rulec.math, name).__doc__.partition("\n")[0]
        rows.append([f"`{function.signature()}`", words])
    return table(["function", "value"], rows)


def well_known_ranges() -> str:
    """The ranges that some hyper-parameters have by their names."""
    rows = [[f"`{pattern}`", Hyper(0, **limits).range_text()] for pattern, limits in WELL_KNOWN]
    return table(["name (a regular expression)", "range"], rows)


def commands() -> str:
    """The commands of the command line, by the first line of what they say of themselves."""
    found = [(c.name, c.callback.__doc__) for c in app.registered_commands if c.callback is not None]
    found += [(g.name, g.typer_instance.info.help) for g in app.registered_groups if g.typer_instance is not None]
    return table(["command", "does"], [[f"`rulec {name}`", str(text).partition("\n")[0]] for name, text in found])
