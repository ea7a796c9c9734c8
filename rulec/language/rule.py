"""What a rule is: hyper-parameters, states and the lines of one optimizer step."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from keyword import iskeyword
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rulec.errors import RuleError
from rulec.language.hyper import DEFAULT_LR, WELL_KNOWN, Hyper, Limits, well_known_range
from rulec.language.node import Node, Op, name, names_in, node
from rulec.language.source import Span

if TYPE_CHECKING:
    from rulec.analysis import Analysis

__all__ = [
    "DEFAULT_LR", "WELL_KNOWN", "Assign", "Branch", "Hyper", "Limits", "Routing", "Rule", "State", "Statement",
    "assignments", "conditions", "well_known_range",
]  # fmt: skip


@dataclass(frozen=True)
class State:
    """What a rule remembers between steps.

    `init` is an expression of hyper-parameters and `p`; `per` the level one value is kept for; `shape` extents of
    its own in place of the parameter's; `condition` an expression of shape facts: where false there is no such state.
    """

    init: Node
    per: str = "element"
    shape: tuple[Node, ...] | None = None
    condition: Node | None = None
    span: Span | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Assign:
    """One line of a step: `target = value`."""

    target: str
    value: Node
    span: Span | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Branch:
    """`if condition: ... else: ...` over lines of a step."""

    condition: Node
    then: tuple[Statement, ...]
    otherwise: tuple[Statement, ...] = ()
    span: Span | None = field(default=None, compare=False, repr=False)


Statement = Assign | Branch


def assignments(step: tuple[Statement, ...]) -> Iterator[Assign]:
    """Every assignment of a step, those in branches too, in order."""
    for line in step:
        if isinstance(line, Assign):
            yield line
        else:
            yield from assignments(line.then)
            yield from assignments(line.otherwise)


def conditions(step: tuple[Statement, ...]) -> Iterator[Branch]:
    """Every branch of a step, nested ones too."""
    for line in step:
        if isinstance(line, Branch):
            yield line
            yield from conditions(line.then)
            yield from conditions(line.otherwise)


@dataclass(frozen=True)
class Routing:
    """Where tensors go that a rule does not apply to.

    `rule` is the rule they go to, or None where a wrapper leaves them to the rule that it wraps. `text` is what a file
    calls it, such as `adamw(lr=adamw_lr)`; empty where it was composed and only the rule itself says it.
    """

    rule: Rule | None
    text: str = ""


@dataclass(frozen=True, repr=False)
class Rule:
    """One optimizer step as mathematics, composable and immutable.

    A step reads `g` (the gradient, or the input it was composed onto), `grad` (always the raw gradient), `p` (the
    parameter), `t` (this tensor's count of updates, from 1), hyper-parameters, states and inputs. It assigns
    states, locals and either `direction` (then the step ends `p = p - lr*direction`) or `p` itself.

    A rule with `wraps` is a wrapper: its step calls the rule it will wrap by that name, as a line with `Op.CALL` that
    assigns the name, and reads `inner.direction` and `inner.p` after it. `wraps_shape` are rows and columns of what it
    calls that rule with, where they are not the parameter's.

    Rules are made by `rulec.load`, `rulec.parse`, `@rulec.rule` and by composing others: `a + b`, `a >> b`,
    `wrapper(a)`, `.bind`.
    """

    name: str
    step: tuple[Statement, ...]
    hyper: Mapping[str, Hyper] = field(default_factory=dict)
    state: Mapping[str, State] = field(default_factory=dict)
    inputs: Mapping[str, str] = field(default_factory=dict)
    summary: str = ""
    paper: Mapping[str, Any] = field(default_factory=dict)
    evaluate: Node | None = None
    skip: Node | None = None
    applies_to: Node | None = None
    otherwise: Routing | None = None
    view: Mapping[str, str] = field(default_factory=dict)
    wraps: str = ""
    wraps_shape: tuple[Node, ...] | None = None
    interop: Mapping[str, Any] = field(default_factory=dict)
    path: Path | None = field(default=None, compare=False, repr=False)
    function: Any = field(default=None, compare=False, repr=False)

    def __repr__(self) -> str:
        hyper = ", ".join(f"{k}={v.default!r}" for k, v in self.hyper.items())
        state = f", state {', '.join(self.state)}" if self.state else ""
        return f"<Rule {self.name}({hyper}){state}>"

    def __hash__(self) -> int:
        return hash((self.name, self.step))

    def __deepcopy__(self, memo: Any) -> Rule:
        return self

    def __getstate__(self) -> dict[str, Any]:
        # The function of a Python rule cannot be pickled: its module knows it by the rule's name.
        derived = ("names_read", "rest", "settings", "analysis")
        return {k: v for k, v in self.__dict__.items() if k not in derived} | {"function": None}

    @property
    def key(self) -> str:
        """The name in lower snake case: what composed names are prefixed by, and files are called."""
        spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z][a-z])", "_", self.name)
        key = re.sub(r"[^A-Za-z0-9]+", "_", spaced).strip("_").lower()[:40]
        return key if key.isidentifier() and not iskeyword(key) else f"rule_{key}"

    @property
    def called(self) -> str:
        """What text calls the rule: its name in the library, the name of its file, or else its key."""
        from rulec.language.library import library_folder

        if self.path is None or self.path.suffix not in (".yaml", ".yml"):
            return self.key
        return self.path.stem if self.path.is_relative_to(library_folder()) else self.path.name

    @property
    def assigns_parameter(self) -> bool:
        """Whether the step assigns `p` itself rather than a `direction`."""
        return any(line.target == "p" for line in assignments(self.step))

    @property
    def expressions(self) -> list[Node]:
        """Every expression of the rule: steps, conditions, initial values, defaults, evaluation point."""
        found = [line.value for line in assignments(self.step)]
        found += [branch.condition for branch in conditions(self.step)]
        for state in self.state.values():
            found += [state.init, *(state.shape or ()), *([state.condition] if state.condition else [])]
        found += [h.default for h in self.hyper.values() if isinstance(h.default, Node)]
        found += [x for x in (self.evaluate, self.skip, self.applies_to) if x is not None]
        found += self.wraps_shape or ()
        return found

    @cached_property
    def names_read(self) -> frozenset[str]:
        """Every name that a line or condition of the step reads."""
        values = [line.value for line in assignments(self.step)]
        return frozenset(names_in([*values, *(branch.condition for branch in conditions(self.step))]))

    def reads(self, identifier: str) -> bool:
        """Whether any line of the step reads this name."""
        return identifier in self.names_read

    def standalone(self) -> Rule:
        """The rule as it runs by itself: `p` is assigned and the learning rate exists.

        Raises RuleError where a hyper-parameter has no default because another rule was to supply it, and for a
        wrapper that wraps nothing.
        """
        rule = self.check_whole()
        if not self.assigns_parameter:
            rule = replace(self, hyper=self.hyper_with_rate, step=self.whole_step)
        for key, hyper_parameter in rule.hyper.items():
            if hyper_parameter.default is None:
                raise RuleError(f"hyper-parameter {key!r} of {self.name} has no default: bind it to a number")
        return rule

    def check_whole(self) -> Rule:
        """The same rule, where it is no wrapper that still wraps nothing; RuleError otherwise."""
        if self.wraps:
            raise RuleError(
                f"{self.name} wraps another rule and has none here: write {self.called}(adam), or another rule"
            )
        return self

    @property
    def hyper_with_rate(self) -> dict[str, Hyper]:
        """The hyper-parameters, and the learning rate that the rule has without saying so."""
        hyper = dict(self.hyper)
        if not self.assigns_parameter and not self.wraps and hyper.get("lr", Hyper(None)).default is None:
            hyper["lr"] = replace(hyper.get("lr", Hyper(None, **well_known_range("lr"))), default=DEFAULT_LR)
        return hyper

    @property
    def whole_step(self) -> tuple[Statement, ...]:
        """The lines of the step, and the one that moves the parameter along the direction."""
        if self.assigns_parameter:
            return self.step
        return (*self.step, Assign("p", node(Op.SUB, name("p"), node(Op.MUL, name("lr"), name("direction")))))

    def __add__(self, other: Rule) -> Rule:
        from rulec.language.compose import plus

        return plus([self, other]) if isinstance(other, Rule) else NotImplemented

    def __rshift__(self, other: Rule) -> Rule:
        from rulec.language.compose import chain

        return chain([self, other]) if isinstance(other, Rule) else NotImplemented

    def __call__(self, value: Any, /, **bindings: float | str) -> Any:
        """Around a rule, `wrapper(rule)`: the rule that the wrapper makes of it.

        Inside the step of a Python rule, `rule(g)`: this rule's direction for the input. `bindings` are bound first.
        """
        from rulec.language.python import call_rule
        from rulec.language.wrap import wrap

        rule = self.bind(**bindings) if bindings else self
        if isinstance(value, str | Path) and self.wraps:
            raise RuleError(f"{self.name} wraps a rule, not a text: write rulec.load({f'{self.called}({value})'!r})")
        return wrap(rule, value) if isinstance(value, Rule) else call_rule(rule, value)

    @cached_property
    def rest(self) -> Rule | None:
        """The rule of the tensors that `applies_to` leaves out: see `rest_rule`."""
        from rulec.language.routing import rest_rule

        return rest_rule(self)

    @property
    def all_hyper(self) -> dict[str, Hyper]:
        """The hyper-parameters of the rule and of the rule for the tensors it leaves out."""
        from rulec.language.routing import all_hyper

        return all_hyper(self)

    @cached_property
    def settings(self) -> Mapping[str, Hyper]:
        """What an optimizer of the rule may be given: `all_hyper` of the rule as it runs by itself."""
        return self.standalone().all_hyper

    @cached_property
    def analysis(self) -> Analysis:
        """What the rule does, proved from its expressions: see `rulec.analysis`."""
        from rulec.analysis import analyse

        return analyse(self)

    def bind(self, /, **bindings: float | str) -> Rule:
        """The rule with hyper-parameters bound: a number sets the default, an expression takes the parameter's place.

        An expression is text over hyper-parameters, such as `"2*lr"`; a new name alone renames. Raises RuleError for a
        name the rule does not have, a number outside the range, and text that is no such expression.
        """
        from rulec.language.bind import bind

        return bind(self, bindings)

    def renamed(self, new_name: str, summary: str | None = None) -> Rule:
        """The same rule under another name."""
        return replace(self, name=new_name, summary=self.summary if summary is None else summary)

    def to_yaml(self) -> str:
        """The rule as a YAML rule file; `rulec.parse` of it gives an equal rule."""
        from rulec.language.writer import rule_to_yaml

        return rule_to_yaml(self)

    def latex(self) -> str:
        """The step as an aligned LaTeX block."""
        from rulec.language.symbolic import rule_to_latex

        return rule_to_latex(self)

    def sympy(self) -> dict[str, Any]:
        """The new value of `direction` (or `p`) and of each state as sympy expressions of the old ones."""
        from rulec.language.symbolic import rule_to_sympy

        return rule_to_sympy(self)

    def step_text(self) -> str:
        """The step in the rule language."""
        from rulec.language.step import step_text

        return step_text(self.step)
