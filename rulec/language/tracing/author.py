"""Errors of a rule written in Python, at the author's lines."""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Iterator
from itertools import islice
from types import CodeType, FrameType, TracebackType

from rulec.errors import RuleError
from rulec.language.expr.functions import FUNCTIONS
from rulec.language.source import Source, Span, did_you_mean, rule_error


def author_error(message: str) -> RuleError:
    """The RuleError at the running line of the author's function."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] in ("rulec", "numpy"):
        frame = frame.f_back
    return (
        RuleError(message)
        if frame is None
        else rule_error(message, _place(frame.f_code, frame.f_lineno, frame.f_lasti))
    )


def foreign_error(error: Exception, function: CodeType) -> RuleError | None:
    """An error of Python or another library as a RuleError at the author's line.

    None where the error came through no line of the author's file.
    """
    places = [tb for tb in _tracebacks(error) if tb.tb_frame.f_code.co_filename == function.co_filename]
    if not places:
        return None
    last = places[-1]
    place = _place(last.tb_frame.f_code, last.tb_lineno, last.tb_lasti)
    if isinstance(error, RecursionError):
        return rule_error("this call leads to itself again and never ends: give the recursion an end, or loop", place)
    if isinstance(error, ArithmeticError):
        return rule_error(f"Python cannot work out this number ({error}): numbers of a rule fit into float64", place)
    if isinstance(error, AttributeError) and getattr(error.obj, "__name__", "") == "rulec.math":
        hint = did_you_mean(str(error.name), FUNCTIONS) or f": it has {', '.join(sorted(FUNCTIONS))}"
        return rule_error(f"rulec.math has no function {error.name!r}{hint}", place)
    marked = place.source.line(place.line)[place.column - 1 :][: place.width]
    called = re.match(r"[\w.]*?(\w+)\(", marked)
    if called is None:
        return rule_error(f"this line cannot be traced ({error}): {_HINT}", place)
    ours = f"use rulec.math.{called[1]}" if called[1] in FUNCTIONS else _HINT
    return rule_error(f"{called[0][:-1]} cannot be traced: {ours}", place)


_HINT = "use arithmetic and the functions of rulec.math"


def _tracebacks(error: Exception) -> Iterator[TracebackType]:
    """The tracebacks of an error, the deepest last."""
    tb = error.__traceback__
    while tb is not None:
        yield tb
        tb = tb.tb_next


def _place(code: CodeType, line: int, instruction: int) -> Span:
    """The place of an instruction in the author's line, or the whole line where Python does not say."""
    text = linecache.getline(code.co_filename, line).rstrip("\n")
    positions = next(islice(code.co_positions(), instruction // 2, None), (None, None, None, None))
    begin, end = len(text) - len(text.lstrip()), len(text)
    if positions[0] == line and positions[2] is not None and text:
        begin = len(text.encode()[: positions[2]].decode(errors="replace"))
        if positions[1] == line and positions[3] is not None:
            end = len(text.encode()[: positions[3]].decode(errors="replace"))
    # Only the one line is kept: the source of a function may come from a notebook or a shell.
    source = Source(code.co_filename, "\n" * (line - 1) + text)
    return Span(source, line, begin + 1, max(1, end - begin))


def running_frame(code: CodeType | None) -> FrameType | None:
    """The running frame of the function with this code; None where it is not running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame
