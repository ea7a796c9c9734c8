"""A rule as a notebook shows it: summary, formula, hyper-parameters and cost in Markdown."""

from __future__ import annotations

from rulec.errors import RuleError
from rulec.language.expr.node import Node
from rulec.language.expr.text import expression_text, number_text
from rulec.language.rule import Rule


def markdown_of(rule: Rule) -> str:
    """Markdown with LaTeX between `$$`."""
    parts = [f"**{rule.name}**", rule.summary, f"$$\n{rule.latex()}\n$$", _hyper(rule), _cost(rule), _paper(rule)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _hyper(rule: Rule) -> str:
    """Each hyper-parameter with its default."""
    defaults = {name: hyper.default for name, hyper in rule.all_hyper.items()}
    texts = [f"`{name}` = {_default(value)}" if value is not None else f"`{name}`" for name, value in defaults.items()]
    return ", ".join(texts)


def _default(value: Node | float) -> str:
    return f"`{expression_text(value)}`" if isinstance(value, Node) else number_text(value)


def _cost(rule: Rule) -> str:
    """Scope, bytes of state and bytes moved; for a wrapper its need of another rule."""
    if rule.wraps:
        return f"A wrapper of {len(rule.wraps)} rules." if len(rule.wraps) > 1 else "A wrapper of another rule."
    try:
        facts = rule.analysis
    except RuleError as error:
        return error.message
    cost = facts.cost
    stages = f"{cost.stages} stage{'' if cost.stages == 1 else 's'}"
    return (
        f"{facts.scope}, {stages}; bytes of state: {facts.state_text}; a step reads {cost.read} bytes and writes "
        f"{cost.written} for each float32 parameter"
    )


def _paper(rule: Rule) -> str:
    paper = rule.paper
    title = paper.get("title", "")
    linked = f"[{title}]({paper['url']})" if title and "url" in paper else title
    return ", ".join(str(part) for part in (linked, paper.get("authors"), paper.get("year")) if part)
