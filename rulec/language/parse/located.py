"""Pieces of rule text with the position of each character, parsed by Python's grammar."""

from __future__ import annotations

import ast
import keyword
import re
import warnings
from collections.abc import Sequence
from functools import cached_property
from threading import Lock
from typing import Any

from rulec.errors import RuleError
from rulec.language.expr.names import character_problem, short
from rulec.language.source import Source, Span, rule_error

#: Longest text, in characters: a step is some lines of mathematics.
MAX_TEXT = 80_000

#: 1-based line and column of a character in its source.
Position = tuple[int, int]

#: Pattern of the message of Python's parser -> our message.
_SAID = (
    (r"was never closed", "this bracket is never closed"),
    (r"does not match opening", "this bracket does not match the one it closes"),
    (r"unmatched", "this bracket closes nothing"),
    (r"unexpected indent", "this line is indented more than the one above it: align it, or write if above it"),
    (r"expected an indented block", "a line indented under the if or else is missing"),
    (r"unindent does not match", "this indentation matches no line above it"),
    (r"unterminated", "this quote is never closed"),
    (r"expected ':'", "a colon is missing here"),
    (r"too many|maximum recursion", "this is nested too deeply: split it into named lines"),
    (r"Missing parentheses", "this line assigns nothing: write name = expression"),
    (r"positional argument follows keyword", "a value stands behind name=value: write == to compare"),
    (r"line continuation", "a backslash is not part of the rule language: leave it out"),
    (r"Exceeds the limit", "this number is longer than a float64 can hold"),
    (r"decimal literal", "this is neither a number nor a name: write * to multiply"),
    (r"leading zeros", "a number does not begin with 0: leave the zeros out"),
    (r"cannot assign|cannot delete|assignment expression|illegal target", "only a name can stand before ="),
)

#: Words of Python outside the rule language. A refused line with one of them is refused for it.
_WORDS = frozenset(keyword.kwlist) - {"and", "or", "not", "if", "elif", "else", "True", "False", "None"}


def default_positions(text: str) -> list[Position]:
    """The place of each character, then of the end, of a text that is the whole source."""
    positions, line, column = [], 1, 1
    for character in text:
        positions.append((line, column))
        line, column = (line + 1, 1) if character == "\n" else (line, column + 1)
    return [*positions, (line, column)]


class Text:
    """A piece of rule text with its places in a file. Turns positions of `ast` into places for messages."""

    def __init__(self, text: str, source: Source, positions: Sequence[Position] | None = None) -> None:
        """`positions` has the place of each character in the source, and last that of the text's end."""
        self.text, self.source = text, source
        self.positions = default_positions(text) if positions is None else positions

    @cached_property
    def _starts(self) -> list[int]:
        return [0, *(i + 1 for i, character in enumerate(self.text) if character == "\n")]

    @property
    def start(self) -> Span:
        """The place of the first character that is not blank."""
        return self._place(len(self.text) - len(self.text.lstrip()), len(self.text.rstrip()))

    def joined(self) -> Text:
        """The text without blanks before and after it, its lines joined into one unless it has a comment."""
        begin, end = len(self.text) - len(self.text.lstrip()), len(self.text.rstrip())
        text = self.text[begin:end] if "#" in self.text else self.text[begin:end].replace("\n", " ")
        return Text(text, self.source, self.positions[begin : max(begin, end) + 1])

    def span(self, at: ast.AST) -> Span:
        """The place of a parsed construct."""
        return self._place(*self._range(at))

    def piece(self, at: ast.AST) -> str:
        """The text of a parsed construct."""
        begin, end = self._range(at)
        return self.text[begin:end]

    def part(self, at: ast.AST) -> Text:
        """The text of a parsed construct, with its place."""
        begin, end = self._range(at)
        return Text(self.text[begin:end], self.source, self.positions[begin : end + 1])

    def excerpt_of(self, at: ast.AST, most: int = 40) -> str:
        """The text of a parsed construct for a message, cut where it is long."""
        piece = " ".join(self.piece(at).split())
        return piece if len(piece) <= most else piece[: most - 3] + "..."

    def _range(self, at: ast.AST) -> tuple[int, int]:
        begin = self._index(at.lineno, at.col_offset)  # type: ignore[attr-defined]
        end = self._index(at.end_lineno, at.end_col_offset)  # type: ignore[attr-defined]
        return begin, end

    def _index(self, line: int, byte_offset: int) -> int:
        """The index of 1-based `line` and 0-based UTF-8 offset within the text."""
        begin = self._starts[line - 1]
        content = self.text[begin : begin + byte_offset]
        return begin + (byte_offset if content.isascii() else len(content.encode()[:byte_offset].decode()))

    def _place(self, begin: int, end: int) -> Span:
        begin = min(begin, len(self.positions) - 1)
        line, column = self.positions[begin]
        last_line, last_column = self.positions[max(begin, min(end, len(self.positions)) - 1)]
        width = last_column - column + 1 if last_line == line else len(self.source.line(line)) - column + 1
        return Span(self.source, line, column, max(1, width))

    def parse(self) -> list[ast.stmt]:
        """The statements of the text; RuleError at the place where Python's grammar refuses it."""
        if len(self.text) > MAX_TEXT:
            message = f"this text has {len(self.text)} characters, over the limit of {MAX_TEXT}"
            raise rule_error(message, self._place(0, 1))
        for index, character in enumerate(self.text):
            if character == "\t":
                raise rule_error("a tab: indent and separate with spaces", self._place(index, index + 1))
            if character < " " and character != "\n":
                raise rule_error(f"the character U+{ord(character):04X}: remove it", self._place(index, index + 1))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SyntaxWarning)
                body: list[ast.stmt] = syntax_tree(self.text).body
                return body
        except SyntaxError as error:
            raise self._refused(error) from None
        except (RecursionError, MemoryError, UnicodeEncodeError) as error:
            broken = isinstance(error, UnicodeEncodeError)
            message = "this is not Unicode text" if broken else "this is nested too deeply: split it into named lines"
            raise rule_error(message, self.start) from None

    def _refused(self, error: SyntaxError) -> RuleError:
        """The error for text that Python's grammar refuses."""
        line = min(error.lineno or 1, len(self._starts))
        first = self._starts[line - 1]
        content = self.text[first:].partition("\n")[0]
        begin = first + min(max(0, (error.offset or 1) - 1), len(content))
        said = str(error.msg)
        if isinstance(error, IndentationError):
            begin = first + len(content) - len(content.lstrip())
        elif number := re.search(r"\d{1000,}", self.text) if "Exceeds the limit" in said else None:
            begin = number.start()
        elif word := next((w for w in re.finditer(r"[A-Za-z]+", content) if w[0] in _WORDS), None):
            message = f"{word[0]!r} is a word of Python and not part of the rule language"
            return rule_error(message, self._place(first + word.start(), first + word.end()))
        ours = next((ours for theirs, ours in _SAID if re.search(theirs, said)), "")
        word_here = re.match(r"\w*", self.text[begin:])
        width = max(1, len(word_here[0]) if word_here else 1)
        return rule_error(ours or self._unreadable(begin, begin + width), self._place(begin, begin + width))

    def _unreadable(self, begin: int, end: int) -> str:
        """The likely mistake in a refused text, as a sentence."""
        here, before = self.text[begin:end], self.text[:begin].rstrip(" ")[-1:]
        if not here.strip():
            return "something is missing at the end of this line"
        if here in ("else", "elif"):
            return f"there is no if above this {here}"
        if problem := character_problem(here[0]):
            return problem
        if re.match(r"\w", here) and re.match(r"[\w)]", before):
            return f"an operator is missing before {short(here)}: write * to multiply"
        return "this cannot be read"


#: Python 3.11 raises SystemError where two threads make trees at once and the collector of garbage calls back.
_LOCK = Lock()


def syntax_tree(text: str, mode: str = "exec") -> Any:
    """The tree of a Python text, by `ast.parse` and with its errors."""
    with _LOCK:
        return ast.parse(text, mode=mode)
