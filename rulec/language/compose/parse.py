"""Rules composed in text, as `clip_by_global_norm >> lookahead(adamw, k=5)`, with the meaning of the same Python."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import NoReturn

from rulec.errors import RuleError
from rulec.language.compose.bind import Binding, bind
from rulec.language.compose.wrap import wrap
from rulec.language.expr.names import short
from rulec.language.library.remote import PATTERN
from rulec.language.parse.located import Text
from rulec.language.rule import Rule
from rulec.language.source import Source, rule_error

#: Most parts of one text: names, operators and calls.
MAX_PARTS = 300

#: Names of rules that are no names of Python: pinned addresses, files, with or without a rule in
#: them, modules with a rule in them, and transforms by their folder.
_PATH = re.compile(PATTERN + r"""|[^\s()+,=>"']*\.(?:ya?ml|py)\b(?::\w+)?|\b[A-Za-z_][\w.]*:\w+|\btransforms/\w+""")

_FILE = re.compile(rf"{PATTERN}|[^\s>]+\.(?:ya?ml|py)(?::\w+)?")

_HOW = "join rules with + and >>, and write wrapper(rule) or rule(lr=0.1)"


def is_composition(text: str) -> bool:
    """Whether a text composes rules; other texts are names of rules or files."""
    return bool(re.search(r">>|[+(]", text)) and not _FILE.fullmatch(text.strip())


def compose_text(text: str | Text, resolve: Callable[[str], Rule]) -> Rule:
    """The rule composed by a text. `resolve` gives the rule of each name in it.

    `a + b` and `a >> b` bind as tightly as in Python; `wrapper(a)` wraps, and keywords bind hyper-parameters.
    Raises RuleError at the place of a mistake.
    """
    located = text if isinstance(text, Text) else Text(text, Source("<rule>", text))
    return _Reader(located.joined(), resolve).rule()


class _Reader:
    """Reads one text, through Python's grammar."""

    def __init__(self, text: Text, resolve: Callable[[str], Rule]) -> None:
        self.text, self.resolve = text, resolve

    def rule(self) -> Rule:
        plain = _PATH.sub(lambda match: "_" * len(match[0]), self.text.text)
        body = Text(plain, self.text.source, self.text.positions).parse()
        if len(body) != 1 or not isinstance(body[0], ast.Expr):
            raise rule_error(f"this is no rule: {_HOW}", self.text.start)
        if sum(1 for _ in ast.walk(body[0])) > MAX_PARTS:
            raise rule_error("this composes too many rules: name parts of it in rule files", self.text.start)
        return self._rule(body[0].value)

    def _fail(self, message: str, at: ast.AST) -> NoReturn:
        raise rule_error(message, self.text.span(at))

    def _rule(self, tree: ast.expr) -> Rule:
        try:
            return self._read(tree)
        except RuleError as error:
            if error.place:
                raise
            raise rule_error(error.message, self.text.span(tree)) from None

    def _read(self, tree: ast.expr) -> Rule:
        if isinstance(tree, ast.Name):
            return self.resolve(self.text.piece(tree))
        if isinstance(tree, ast.Constant) and isinstance(tree.value, str):
            # As it stands between its quotes: a path is no place for escapes.
            return self.resolve(self.text.piece(tree)[1:-1])
        if isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.Add):
            return self._rule(tree.left) + self._rule(tree.right)
        if isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.RShift):
            return self._rule(tree.left) >> self._rule(tree.right)
        if isinstance(tree, ast.Call):
            return self._call(tree)
        self._fail(f"{short(self.text.excerpt_of(tree))} is no rule: {_HOW}", tree)

    def _call(self, tree: ast.Call) -> Rule:
        rule = self._rule(tree.func)
        bindings: dict[str, Binding] = {}
        for keyword in tree.keywords:
            if keyword.arg is None:
                self._fail(f"** has no place here: {_HOW}", keyword)
            if keyword.arg in bindings:
                self._fail(f"{keyword.arg} is bound twice", keyword)
            bindings[keyword.arg] = self.text.part(keyword.value)
        if bindings:
            rule = bind(rule, bindings)
        if len(tree.args) > 1 and len(rule.wraps) == 1:
            self._fail(f"{rule.name} wraps one rule, not {len(tree.args)}: {_HOW}", tree.args[1])
        if tree.args:
            return wrap(rule, *map(self._rule, tree.args))
        return rule if bindings else self._fail(f"there is nothing between these brackets: {_HOW}", tree)
