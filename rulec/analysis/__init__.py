"""Properties of a rule, proved from its expressions: `rule.analysis`; and a rule as notebooks show it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

from rulec.analysis.accumulate import Accumulation, accumulation
from rulec.analysis.flow import Fact, Flow, Line, flow_of
from rulec.analysis.linear import LinearForms
from rulec.analysis.report import Analysis
from rulec.analysis.scale import changing_scale, constant_scale
from rulec.analysis.storage import StateStorage, storage_of
from rulec.analysis.structure import (
    bytes_text,
    cost_of,
    is_random,
    reads_parameter,
    reads_step,
    scope_of,
    state_bytes,
    uses_matrices,
)  # fmt: skip
from rulec.analysis.witness import Witness
from rulec.analysis.zero import AtZero, Rest, at_zero
from rulec.errors import RuleError
from rulec.language.export.latex import rule_to_latex
from rulec.language.expr.node import Node
from rulec.language.expr.text import expression_text, number_text
from rulec.language.rule_data import RuleData

__all__ = ["Accumulation", "Analysis", "AtZero", "Fact", "Line", "Rest", "StateStorage", "analyse", "storage"]


def storage(rule: RuleData) -> dict[str, StateStorage]:
    """State -> how it may be stored, for every state of the rule; errors as of `analyse`."""
    return storage_of(flow_of(rule))


@functools.lru_cache(maxsize=256)
def analyse(rule: RuleData) -> Analysis:
    """The analysis of a rule; RuleError for a wrapper around no rule, and for a hyper-parameter without a default."""
    flow = flow_of(rule)
    forms, witness = LinearForms(), Witness(flow)
    proved = accumulation(flow, forms)
    exact = replace(proved, fact=_refuted(proved.fact, lambda: witness.accumulation_fails(proved.adds)))
    one, many = constant_scale(flow), changing_scale(flow)
    return Analysis(
        name=rule.name, scope=_scope(flow), matrices=uses_matrices(flow),
        linear={key: _linear(flow, forms, witness, key) for key in flow.rule.state}, accumulates=exact,
        constant_scale=_refuted(one, lambda: witness.scale_matters(changing=False)),
        changing_scale=_refuted(many, lambda: witness.scale_matters(changing=True)),
        at_zero=at_zero(flow, witness.changes_at_zero), reads_parameter=reads_parameter(flow),
        assigns_parameter=rule.assigns_parameter, reads_step=reads_step(flow), random=is_random(flow),
        inputs=tuple(rule.inputs), routes=rule.applies_to is not None, evaluates=rule.evaluate is not None,
        skips=rule.skip is not None, state_bytes=state_bytes(flow.rule), state_text=bytes_text(flow.rule),
        cost=cost_of(rule), storage=storage_of(flow),
    )  # fmt: skip


def _scope(flow: Flow) -> str:
    """The widest level in the update of one element, its passes included."""
    scopes = [scope_of(flow), *(scope_of(flow_of(move.rule)) for move in flow.rule.moves)]
    return max(scopes, key=["elementwise", "tensor", "group", "model"].index)


def _refuted(fact: Fact, counterexample: Callable[[], bool]) -> Fact:
    """The fact; an unknown one is refuted where a counterexample was seen."""
    return replace(fact, answer="no") if fact.answer == "unknown" and counterexample() else fact


def _linear(flow: Flow, forms: LinearForms, witness: Witness, key: str) -> Fact:
    form, line = forms.form(flow.taken[key]), flow.assigned.get(key)
    if form.free:
        return Fact("yes", "free of g", line=line)
    if form.broken is None:
        where = ("the step is not skipped",) if flow.rule.skip is not None else ()
        return Fact("yes", "homogeneous at" if form.homogeneous else "affine at", where, line)
    fact = Fact("unknown", "linearity ends at", line=flow.line(form.broken, key))
    return _refuted(fact, lambda: witness.nonlinear(key))


def markdown_of(rule: RuleData) -> str:
    """Markdown with LaTeX between `$$`."""
    formula = f"$$\n{rule_to_latex(rule)}\n$$"
    parts = [f"**{rule.name}**", rule.summary, formula, _hyper(rule), _cost(rule), _paper(rule)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _hyper(rule: RuleData) -> str:
    """Each hyper-parameter with its default."""
    defaults = {name: hyper.default for name, hyper in rule.all_hyper.items()}
    texts = [f"`{name}` = {_default(value)}" if value is not None else f"`{name}`" for name, value in defaults.items()]
    return ", ".join(texts)


def _default(value: Node | float) -> str:
    return f"`{expression_text(value)}`" if isinstance(value, Node) else number_text(value)


def _cost(rule: RuleData) -> str:
    """Scope, bytes of state and bytes moved; for a wrapper its need of another rule."""
    if rule.wraps:
        return f"A wrapper of {len(rule.wraps)} rules." if len(rule.wraps) > 1 else "A wrapper of another rule."
    try:
        facts = analyse(rule)
    except RuleError as error:
        return error.message
    cost = facts.cost
    stages = f"{cost.stages} stage{'' if cost.stages == 1 else 's'}"
    return (
        f"{facts.scope}, {stages}; bytes of state: {facts.state_text}; a step reads {cost.read} bytes and writes "
        f"{cost.written} for each float32 parameter"
    )


def _paper(rule: RuleData) -> str:
    paper = rule.paper
    title = paper.get("title", "")
    linked = f"[{title}]({paper['url']})" if title and "url" in paper else title
    return ", ".join(str(part) for part in (linked, paper.get("authors"), paper.get("year")) if part)
