"""The page of a rule, and its card."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from gallery.compared import comparisons, measured, remark_of, unchanged
from gallery.kernels import fenced, kernels
from gallery.subject import Subject
from gallery.usage import programs
from rulec.errors import RulecError
from rulec.language.expr.node import Node
from rulec.language.expr.text import expression_text, number_text
from rulec.language.hyper import Hyper
from rulec.tools.display.drawing import figure, thumbnail
from rulec.tools.display.path import FUNCTIONS, Path, paths, refusal


@dataclass(frozen=True)
class Entry:
    """What the gallery has of a rule: the text of its page, and the HTML of its card."""

    slug: str
    page: str
    card: str


def entry(name: str) -> Entry:
    """The page and the card of a rule."""
    subject = Subject(name)
    drawn, sentence = _drawn(subject)
    return Entry(subject.slug, _page(subject, drawn, sentence), _card(subject, drawn))


def _drawn(subject: Subject) -> tuple[list[Path], str]:
    """The paths of the rule, or why it has none."""
    sentence = refusal(subject.whole)
    if sentence:
        return [], sentence
    try:
        return paths(subject.whole), ""
    except RulecError as error:
        return [], str(error)


def _page(subject: Subject, drawn: list[Path], sentence: str) -> str:
    rule = subject.rule
    text = _composition(subject)
    sections = {
        f"# {rule.name}": f"{rule.summary}\n\n{_paper(subject)}\n\n{_formula(subject)}",
        "## Its path": _figures(drawn, sentence),
        "## The rule file": f"`rules/{subject.name}.yaml`\n\n{fenced(subject.file_text, 'yaml')}",
        "## Hyper-parameters": _hyper(subject),
        "## What is proved": _proved(subject),
        "## Use it": programs(subject, text),
        "## Compared with": _compared(subject),
        "## The kernel { data-search-exclude }": f"{_around(subject)}{kernels(subject.whole, subject.text)}",
    }
    body = "\n\n".join(f"{head}\n\n{section}" for head, section in sections.items())
    return f"---\ntitle: {rule.name}\n---\n\n{body}\n\n{_scripts()}\n"


def _paper(subject: Subject) -> str:
    paper, parts = subject.rule.paper, ["[All rules](../gallery.md)", subject.family]
    if paper:
        parts.append(f"{paper['authors']}, [{paper['title']}]({paper['url']}), {paper['year']}")
    return " · ".join(parts)


def _formula(subject: Subject) -> str:
    """The formula as text, which docs/javascripts/gallery.js sets with KaTeX."""
    text = " ".join(subject.rule.latex().split("\n"))
    return f'<div class="rule-formula">{escape(text)}</div>'


def _scripts() -> str:
    return (
        '<link rel="stylesheet" href="../katex/katex.min.css">'
        '<script src="../katex/katex.min.js"></script><script src="../javascripts/gallery.js"></script>'
    )


def _figures(drawn: list[Path], sentence: str) -> str:
    if not drawn:
        return f"No path is drawn. {sentence}"
    figures = "".join(figure(function, path) for function, path in zip(FUNCTIONS, drawn, strict=True))
    return f'<div class="rule-paths">{figures}</div>'


def _around(subject: Subject) -> str:
    """Which rule is shown, where the page's rule is a wrapper."""
    return f"The kernel of `{subject.text}`, in float32.\n\n" if subject.rule.wraps else ""


def _hyper(subject: Subject) -> str:
    settings = subject.whole.settings
    if not settings:
        return "The rule has none."
    rows = [(f"`{key}`", _default(hyper), hyper.range_text() or "any number") for key, hyper in settings.items()]
    return _table(("name", "default", "range"), rows)


def _default(hyper: Hyper) -> str:
    if isinstance(hyper.default, Node):
        return f"`{expression_text(hyper.default)}`"
    return "" if hyper.default is None else number_text(hyper.default)


def _proved(subject: Subject) -> str:
    of = f"Facts about `{subject.text}`:\n\n" if subject.rule.wraps else ""
    return of + _table(("fact", "proved"), subject.whole.analysis.lines)


def _compared(subject: Subject) -> str:
    rows = [
        (f"`{row['rule']}`", row["peer"], _distance(row.get("float64_relative"), ".1e"),
         _distance(row.get("float32_ulps"), ".1f"), unchanged(row), remark_of(row))
        for row in comparisons(subject.name)
    ]  # fmt: skip
    if not rows:
        return "No comparison is recorded."
    head = ("rule", "implementation", "float64: relative", "float32: ulps", "as it is called", "remark")
    return f"{_table(head, rows)}\n\nThe largest differences in {measured()['steps']} steps."


def _distance(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}" if value else "0"


def _composition(subject: Subject) -> str:
    """The composition in which a rule was compared: a transform needs a rule beside it."""
    if not (subject.rule.wraps or subject.name.startswith("transforms/")) or subject.whole.inputs:
        return subject.text
    composed = (row["rule"] for row in comparisons(subject.name))
    return next(composed, subject.text)


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def _card(subject: Subject, drawn: list[Path]) -> str:
    rule = subject.rule
    year = str(rule.paper.get("year", ""))
    words = escape(f"{subject.name} {rule.name} {rule.summary} {rule.paper.get('authors', '')}".lower(), quote=True)
    size = f"{round(subject.state_bytes, 2):g}"  # numbers for each tensor or the model are 0
    picture = thumbnail(drawn[0]) if drawn else '<div class="no-path"></div>'
    facts = " · ".join(part for part in (year, subject.family, f"{size} bytes of state") if part)
    return (
        f'<a class="rule-card" href="gallery/{subject.slug}.html" data-words="{words}" data-name="{subject.slug}" '
        f'data-year="{year}" data-family="{subject.family}" data-bytes="{size}">{picture}'
        f"<strong>{escape(rule.name)}</strong><span>{escape(rule.summary)}</span><small>{facts}</small></a>"
    )
