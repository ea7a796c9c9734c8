"""`Rule`: the data of a rule, with everything computed from it as methods."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rulec.errors import RuleError
from rulec.language.hyper import Hyper
from rulec.language.rule_data import RuleData

if TYPE_CHECKING:
    from rulec.analysis import Analysis


def _kinds(*values: Any) -> str:
    return " and ".join(f"a {type(value).__name__}" for value in values)


class Rule(RuleData):
    """One optimizer step as mathematics, composable and immutable.

    A step reads `g` (the gradient, or the input it was composed onto), `grad` (always the raw gradient), `p` (the
    parameter), `t` (this tensor's count of updates, from 1), hyper-parameters, states and inputs. It assigns
    states, locals and either `direction` (then the step ends `p = p - lr*direction`) or `p` itself. `rate` is the
    learning rate where this is not `lr`: an expression of hyper-parameters, such as `2*lr` or `adamw_lr`.

    A rule with `wraps` is a wrapper, and `wraps` has its name for each rule to wrap, such as `inner`. A line of its
    step assigns an `Op.CALL` to `inner`; later lines read `inner.direction` and `inner.p`. `wraps_shape` is rows and
    columns of the input of a wrapper's only call; None for the parameter's shape.

    `passes` are points at which the model is evaluated again; at a pass `climb` the gradient is `climb.g`. The rule as
    it runs by itself has `moves` in their place: see `rulec.language.evaluations`.

    `variants` are values of hyper-parameters that `rulec.variants` gives the rule with; a composed rule has none. Rules
    that differ in them alone are equal.

    Rules are made by `rulec.load`, `rulec.parse`, `@rulec.rule` and by composing others: `a + b`, `a >> b`,
    `wrapper(a)`, `.bind`.
    """

    def standalone(self) -> Rule:
        """The rule as it runs by itself: its step assigns `p`, and its learning rate has a default.

        Of a rule with passes it is the end of a step, after `moves`.

        Raises RuleError for a hyper-parameter without a default, and for a wrapper around no rule.
        """
        from rulec.language.evaluations import standalone

        return standalone(self)

    def in_one(self) -> Rule:
        """The rule as `standalone` has it, but with its passes as lines, and the gradients there as inputs."""
        from rulec.language.evaluations import in_one

        return in_one(self)

    def __add__(self, other: Rule) -> Rule:
        from rulec.language.compose.combine import plus

        return plus([self, other]) if isinstance(other, Rule) else NotImplemented

    def __rshift__(self, other: Rule) -> Rule:
        from rulec.language.compose.combine import chain

        return chain([self, other]) if isinstance(other, Rule) else NotImplemented

    def __call__(self, value: Any, /, *more: Any, **bindings: float | str) -> Any:
        """`wrapper(rule)`: the rule wrapped by this wrapper. `rule(g)` in a Python rule: this rule's direction for `g`.

        A wrapper of several rules takes as many. `bindings` are bound first. Raises RuleError where the rules do not
        fit, or where no rule is traced.
        """
        from rulec.language.compose.wrap import wrap
        from rulec.language.tracing.trace import call_rule

        rule = self.bind(**bindings) if bindings else self
        if isinstance(value, str | Path) and self.wraps:
            raise RuleError(f"{self.name} wraps a rule, not a text: write rulec.load({f'{self.called}({value})'!r})")
        if isinstance(value, Rule) and all(isinstance(other, Rule) for other in more):
            return wrap(rule, value, *more)
        if more:
            raise RuleError(f"{self.name} is called with {_kinds(value, *more)}: give it rules, or one traced value")
        return call_rule(rule, value)

    @cached_property
    def settings(self) -> Mapping[str, Hyper]:
        """The hyper-parameters of an optimizer of the rule: `all_hyper` of the rule as it runs by itself."""
        return self.standalone().all_hyper

    @cached_property
    def analysis(self) -> Analysis:
        """Properties of the rule, proved from its expressions: see `rulec.analysis`."""
        from rulec.analysis import analyse

        return analyse(self)

    def bind(self, /, **bindings: float | str) -> Rule:
        """The rule with hyper-parameters bound: a number sets the default, an expression takes the parameter's place.

        An expression is text over hyper-parameters, such as `"2*lr"`; a new name alone renames. Raises RuleError for an
        unknown name, a number outside the range, and any other text.
        """
        from rulec.language.compose.bind import bind

        return bind(self, bindings)

    def in_form(self, form: str) -> Rule:
        """The rule with every `newton_schulz` in this form, "direct" or "gram".

        The library's entries of peers are not the new rule's. Raises RuleError for another word, and where there is no
        `newton_schulz`.
        """
        from rulec.language.compose.wrap import in_form

        return in_form(self, form)

    def to_yaml(self) -> str:
        """The rule as a YAML rule file; `rulec.parse` of it gives an equal rule."""
        from rulec.language.yaml.write import rule_to_yaml

        return rule_to_yaml(self)

    def latex(self) -> str:
        """The step as an aligned LaTeX block."""
        from rulec.language.export.latex import rule_to_latex

        return rule_to_latex(self)

    def _repr_markdown_(self) -> str:
        """The rule as notebooks show it: formula and cost."""
        from rulec.analysis import markdown_of

        return markdown_of(self)

    def sympy(self) -> dict[str, Any]:
        """The new value of `direction` (or `p`) and of each state as sympy expressions of the old ones."""
        from rulec.language.export.sympy import rule_to_sympy

        return rule_to_sympy(self)

    def step_text(self) -> str:
        """The step in the rule language."""
        from rulec.language.parse.step import step_text

        return step_text(self.step)
