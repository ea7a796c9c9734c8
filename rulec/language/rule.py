"""The Rule: hyper-parameters, states and the lines of one optimizer step."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from keyword import iskeyword
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rulec.errors import RuleError
from rulec.language.expr.node import Node, Op, name, names_in, node
from rulec.language.hyper import DEFAULT_LR, WELL_KNOWN, Hyper, Limits, well_known_range
from rulec.language.library.folder import library_folder
from rulec.language.source import Span

if TYPE_CHECKING:
    from rulec.analysis import Analysis
    from rulec.language.evaluations import Move
    from rulec.language.sizes import Sizes

__all__ = [
    "DEFAULT_LR", "RATE", "WELL_KNOWN", "Assign", "Branch", "Hyper", "Limits", "Pass", "Routing", "Rule", "State",
    "Statement",
    "assignments", "conditions", "well_known_range",
]  # fmt: skip


#: The learning rate of a rule that says nothing else.
RATE = name("lr")


@dataclass(frozen=True)
class State:
    """A value that a rule keeps between steps.

    `init`, its first value, is an expression of hyper-parameters and `p`. `per` is a level: one value is kept for each
    element, row, tensor and so on; `number` is that of a level with one, as in `axis(0)`. `shape` is rows and columns
    in place of the parameter's shape. `condition` is an expression of shape facts; tensors for which it is false have
    no such state. `storage` is `exact` for a state that stays float32, whatever format is chosen for the others.
    """

    init: Node
    per: str = "element"
    shape: tuple[Node, ...] | None = None
    condition: Node | None = None
    storage: str = ""
    number: Node | None = None
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
    """Every assignment of a step in order, also inside branches."""
    for line in step:
        if isinstance(line, Assign):
            yield line
        else:
            yield from assignments(line.then)
            yield from assignments(line.otherwise)


def conditions(step: tuple[Statement, ...]) -> Iterator[Branch]:
    """Every branch of a step in order, also inside branches."""
    for line in step:
        if isinstance(line, Branch):
            yield line
            yield from conditions(line.then)
            yield from conditions(line.otherwise)


@dataclass(frozen=True)
class Pass:
    """A point at which the model is evaluated again in a step, an expression; `when` has the steps, None for all.

    An expression of a point reads what a step reads: `g`, `p`, `t`, states, hyper-parameters, inputs, and gradients of
    earlier passes. `when` is known before a step.
    """

    point: Node
    when: Node | None = None
    span: Span | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Routing:
    """The rule for tensors outside a rule's `applies_to`.

    `rule` is None where a wrapper leaves these tensors to the rule it wraps; `text` is then its name for this rule.
    Otherwise `text` is the rule's name in a file, such as `adamw(lr=adamw_lr)`; empty for a composed rule without one.
    """

    rule: Rule | None
    text: str = ""


def _kinds(*values: Any) -> str:
    return " and ".join(f"a {type(value).__name__}" for value in values)


@dataclass(frozen=True, repr=False)
class Rule:
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
    rate: Node = RATE
    evaluate: Node | None = None
    skip: Node | None = None
    applies_to: Node | None = None
    otherwise: Routing | None = None
    view: Mapping[str, str] = field(default_factory=dict)
    wraps: tuple[str, ...] = ()
    wraps_shape: tuple[Node, ...] | None = None
    passes: Mapping[str, Pass] = field(default_factory=dict)
    moves: tuple[Move, ...] = ()
    interop: Mapping[str, Any] = field(default_factory=dict)
    path: Path | None = field(default=None, compare=False, repr=False)
    function: Any = field(default=None, compare=False, repr=False)
    sizes: Sizes | None = field(default=None, compare=False, repr=False)

    def __repr__(self) -> str:
        hyper = ", ".join(f"{k}={v.default!r}" for k, v in self.hyper.items())
        state = f", state {', '.join(self.state)}" if self.state else ""
        return f"<Rule {self.name}({hyper}){state}>"

    def __hash__(self) -> int:
        return hash((self.name, self.step))

    def __deepcopy__(self, memo: Any) -> Rule:
        return self

    def __getstate__(self) -> dict[str, Any]:
        # Its module knows the function of a Python rule by the rule's name, so that it cannot be pickled. Nor can the
        # way to other lengths.
        derived = ("names_read", "rest", "settings", "analysis")
        return {k: v for k, v in self.__dict__.items() if k not in derived} | {"function": None, "sizes": None}

    @property
    def key(self) -> str:
        """The name in lower snake case: the prefix of names in compositions, and the name of files."""
        spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z][a-z])", "_", self.name)
        key = re.sub(r"[^A-Za-z0-9]+", "_", spaced).strip("_").lower()[:40]
        return key if key.isidentifier() and not iskeyword(key) else f"rule_{key}"

    @property
    def called(self) -> str:
        """The rule's name in text: its name in the library, the name of its file, or else its key."""
        if self.path is None or self.path.suffix not in (".yaml", ".yml"):
            return self.key
        return self.path.stem if self.path.is_relative_to(library_folder()) else self.path.name

    @property
    def example(self) -> str:
        """A wrapper around rules, as it is written in text."""
        return f"{self.called}({', '.join(('adam', 'sgd', *self.wraps)[: len(self.wraps)])})"

    @property
    def assigns_parameter(self) -> bool:
        """Whether the step assigns `p` itself rather than a `direction`."""
        return any(line.target == "p" for line in assignments(self.step))

    @property
    def expressions(self) -> list[Node]:
        """Every expression of the rule: steps, conditions, initial values, defaults, evaluation point."""
        nodes = [line.value for line in assignments(self.step)]
        nodes += [branch.condition for branch in conditions(self.step)]
        for state in self.state.values():
            nodes += [state.init, *(state.shape or ()), *(x for x in (state.condition, state.number) if x is not None)]
        nodes += [h.default for h in self.hyper.values() if isinstance(h.default, Node)]
        nodes += [x for x in (self.rate, self.evaluate, self.skip, self.applies_to) if x is not None]
        nodes += self.wraps_shape or ()
        nodes += [x for each in self.passes.values() for x in (each.point, each.when) if x is not None]
        nodes += [x for move in self.moves for x in move.rule.expressions]
        return nodes

    @cached_property
    def names_read(self) -> frozenset[str]:
        """Every name read by a line or condition of the step."""
        values = [line.value for line in assignments(self.step)]
        return frozenset(names_in([*values, *(branch.condition for branch in conditions(self.step))]))

    def reads(self, identifier: str) -> bool:
        """Whether any line of the step reads this name."""
        return identifier in self.names_read

    def standalone(self) -> Rule:
        """The rule as it runs by itself: its step assigns `p`, and its learning rate has a default.

        Of a rule with passes it is the end of a step, after `moves`.

        Raises RuleError for a hyper-parameter without a default, and for a wrapper around no rule.
        """
        from rulec.language.evaluations import lowered

        return lowered(self._assigning())

    def in_one(self) -> Rule:
        """The rule as `standalone` has it, but with its passes as lines, and the gradients there as inputs."""
        from rulec.language.evaluations import unrolled

        return unrolled(self._assigning())

    def _assigning(self) -> Rule:
        rule = self.check_whole()
        if not self.assigns_parameter:
            rule = replace(self, hyper=self.hyper_with_rate, step=self.whole_step)
        for key, hyper_parameter in rule.hyper.items():
            if hyper_parameter.default is None:
                raise RuleError(f"hyper-parameter {key!r} of {self.name} has no default: bind it to a number")
        return rule

    def check_whole(self) -> Rule:
        """The same rule; RuleError for a wrapper around no rule."""
        if self.wraps:
            one = len(self.wraps) == 1
            count, others = ("another rule", "another rule") if one else (f"{len(self.wraps)} other rules", "others")
            raise RuleError(f"{self.name} wraps {count} and has none here: write {self.example}, or {others}")
        return self

    @property
    def hyper_with_rate(self) -> dict[str, Hyper]:
        """The hyper-parameters, with `lr` also where the rule does not declare it."""
        hyper = dict(self.hyper)
        if self.multiplies_lr and hyper.get("lr", Hyper(None)).default is None:
            hyper["lr"] = replace(hyper.get("lr", Hyper(None, **well_known_range("lr"))), default=DEFAULT_LR)
        return hyper

    @property
    def multiplies_lr(self) -> bool:
        """Whether the step ends in a line of its own with `lr` in it, `p = p - lr*direction`."""
        return not self.assigns_parameter and not self.wraps and "lr" in names_in([self.rate])

    @property
    def whole_step(self) -> tuple[Statement, ...]:
        """The lines of the step, ending in the line that assigns `p`: `p = p - lr*direction` where none does."""
        if self.assigns_parameter:
            return self.step
        return (*self.step, Assign("p", node(Op.SUB, name("p"), node(Op.MUL, self.rate, name("direction")))))

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
    def rest(self) -> Rule | None:
        """The rule for tensors outside `applies_to`, None without one: see `rest_rule`."""
        from rulec.language.traits import rest_rule

        return rest_rule(self)

    @property
    def all_hyper(self) -> dict[str, Hyper]:
        """The hyper-parameters of the rule and of its `otherwise`."""
        from rulec.language.traits import all_hyper

        return all_hyper(self)

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

    def renamed(self, new_name: str, summary: str | None = None) -> Rule:
        """The same rule under another name."""
        return replace(self, name=new_name, summary=self.summary if summary is None else summary)

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
        from rulec.analysis.report import markdown_of

        return markdown_of(self)

    def sympy(self) -> dict[str, Any]:
        """The new value of `direction` (or `p`) and of each state as sympy expressions of the old ones."""
        from rulec.language.export.sympy import rule_to_sympy

        return rule_to_sympy(self)

    def step_text(self) -> str:
        """The step in the rule language."""
        from rulec.language.parse.step import step_text

        return step_text(self.step)
