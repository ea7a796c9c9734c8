"""Properties of a rule, proved from its expressions: `rule.analysis`."""

from __future__ import annotations

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
from rulec.language.rule import Rule

__all__ = ["Accumulation", "Analysis", "AtZero", "Fact", "Line", "Rest", "StateStorage", "analyse", "storage"]


def storage(rule: Rule) -> dict[str, StateStorage]:
    """State -> how it may be stored, for every state of the rule; errors as of `analyse`."""
    return storage_of(flow_of(rule))


def analyse(rule: Rule) -> Analysis:
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
