"""The length of one list: a number, or an expression of numbers, static hyper-parameters and the lengths of others."""

from __future__ import annotations

from collections.abc import Mapping

from rulec.language.expr.arithmetic import number_known
from rulec.language.expr.names import short
from rulec.language.expr.node import names_in
from rulec.language.parse.expression import ExpressionParser, parse_whole
from rulec.language.parse.located import Text
from rulec.language.sizes import MAX_LENGTH
from rulec.language.source import Span, did_you_mean, rule_error


def length_of(
    value: float | Text, what: str, lists: Mapping[str, int], counts: Mapping[str, float], span: Span | None = None
) -> tuple[int, list[str]]:
    """The length by a number or an expression, and the names of the counts in it.

    RuleError for any other value, with `what` as the length's name.
    """
    number: float | Text | None = value
    names: list[str] = []
    if isinstance(value, Text):

        def explain(identifier: str) -> str:
            near = did_you_mean(identifier, counts) or ": it is made of numbers, static hyper-parameters and len()"
            return f"{short(identifier)} has no place in {what}{near}"

        parser = ExpressionParser(value.joined(), counts, None, explain)
        parser.lists = dict(lists)
        parsed = parse_whole(parser)
        number, names = number_known(parsed, counts), names_in([parsed])
    if not isinstance(number, int | float) or not float(number).is_integer() or not 1 <= number <= MAX_LENGTH:
        text = f"{number:g}" if isinstance(number, int | float) else repr(number)
        raise rule_error(f"{what} must be a whole number from 1 to {MAX_LENGTH}, not {text}", span)
    return int(number), names
