"""Rule files: YAML text into a Rule."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from rulec.errors import RuleError
from rulec.language import compose
from rulec.language.bind import Binding, bind
from rulec.language.check import (
    check_defaults,
    check_direction_free_of_lr,
    check_elementwise,
    check_names,
    check_rule,
    level_problem,
    storage_problem,
    title_problem,
    with_storage,
)
from rulec.language.composition import compose_text, is_composition
from rulec.language.document import Document, read_document
from rulec.language.document import Path as Place
from rulec.language.evaluation import check_evaluation
from rulec.language.expression import parse_expression
from rulec.language.functions import FUNCTIONS
from rulec.language.hyper import Hyper, Limits, well_known_range
from rulec.language.located import Text
from rulec.language.names import declared_problem, short
from rulec.language.node import Node, Op, const, node
from rulec.language.rule import Routing, Rule, State
from rulec.language.schema import HyperEntry, RuleFile, StateEntry, is_rule_file, validated
from rulec.language.source import Span, did_you_mean, rule_error
from rulec.language.step import Scope, StepParser
from rulec.language.text import number_text

#: The rule of a name in a file. The loader supplies it, so that files can name library rules and paths.
Resolve = Callable[[str], Rule]

#: The shape facts that are known where tensors are routed and states are allocated.
_SHAPE = ("ndim", "numel", "rows", "cols")


def parse_rule(text: str, name: str, resolve: Resolve, path: Path | None = None) -> Rule:
    """The rule of a YAML text. `name` stands for it in errors, and `resolve` loads the rules named in it.

    Raises RuleError at the place of a mistake.
    """
    return _RuleReader(read_document(text, name), resolve, path).rule()


class _RuleReader:
    """Reads the parts of one rule file."""

    def __init__(self, document: Document, resolve: Resolve, path: Path | None) -> None:
        self.document, self.resolve, self.path = document, resolve, path
        self.file = validated(document)
        self.hyper_names: list[str] = list(self.file.hyper)

    def rule(self) -> Rule:
        file = self.file
        self._check_keys()
        body = self._step_rule() if file.step is not None else self._composed_rule()
        attributes = _plain_attributes(file)
        rule = replace(body, name=file.name, path=self.path, **attributes, **self._expressions(body))
        rule = self._stored(rule)
        rule = self._placed(lambda: compose.with_inputs_of_rest(rule), self.document.span(("otherwise",)))
        return check_evaluation(check_rule(rule), self.document.span(("evaluate",)))

    def _check_keys(self) -> None:
        """RuleError at the first key that cannot be a name."""
        if problem := title_problem(self.file.name):
            raise rule_error(problem, self.document.span(("name",)))
        for section in ("hyper", "state", "inputs"):
            for key in getattr(self.file, section):
                problem = declared_problem(key)
                if problem:
                    raise rule_error(problem, self.document.span((section, key), key=True))

    def _composed_rule(self) -> Rule:
        key, join = ("plus", compose.plus) if self.file.plus is not None else ("chain", compose.chain)
        parts = [self._component((key, i)) for i in range(len(self.document.data[key]))]
        rule = self._placed(lambda: join(parts, self.file.name), self.document.span((key,), key=True))
        for hyper in self.file.hyper:
            rule = self._rebound(rule, hyper)
        return rule

    def _rebound(self, rule: Rule, key: str) -> Rule:
        """The composed rule with one hyper-parameter as in the file: its default, expression or range."""
        entry, span = self.file.hyper[key], self.document.span(("hyper", key), key=True)
        if not isinstance(entry, HyperEntry):
            return self._with_default(rule, key, ("hyper", key))
        if key in rule.hyper:
            # The range first: the default belongs to it.
            declared = rule.hyper[key]
            limits = _limits(entry) or declared.limits
            static, whole = entry.static or declared.static, entry.whole or declared.whole
            changed = Hyper(declared.default, **limits, static=static, whole=whole, span=span)
            rule = replace(rule, hyper={**rule.hyper, key: changed})
        if entry.default is not None:
            rule = self._with_default(rule, key, ("hyper", key, "default"))
        if key not in rule.hyper:
            raise rule_error(f"{short(key)} is bound to an expression, so it has no range", span)
        return rule

    def _with_default(self, rule: Rule, key: str, place: Place) -> Rule:
        """The composed rule with the default or the expression at `place` for one hyper-parameter."""
        value, span = self._binding(place), self.document.span(("hyper", key), key=True)
        if key in rule.hyper and isinstance(value, int | float):
            check_defaults(replace(rule, hyper={key: replace(rule.hyper[key], default=float(value), span=span)}))
        return self._placed(lambda: bind(rule, {key: value}), span)

    @staticmethod
    def _placed(make: Callable[[], Rule], span: Span) -> Rule:
        """The rule from `make`; an error of it without a place gets `span`."""
        try:
            return make()
        except RuleError as error:
            if error.place:
                raise
            raise rule_error(error.message, span) from None

    def _component(self, place: Place) -> Rule:
        """The rule of a name, of a composition, or of `name: {hyper: binding}`."""
        entry, span = self.document.at(place), self.document.span(place)
        if isinstance(entry, str):
            text = self.document.text(place)
            return self._placed(lambda: self._named(text), span)
        component = next(iter(entry))
        rule = self._placed(lambda: self._named(self.document.key_text((*place, component))), span)
        bindings = {key: self._binding((*place, component, key)) for key in entry[component]}
        for key, bound in bindings.items():
            # One by one first, so that each mistake is an error at its own place.
            self._placed(partial(bind, rule, {key: bound}), self.document.span((*place, component, key), key=True))
        bound_rule = self._placed(lambda: bind(rule, bindings), span)
        # A hyper-parameter bound to one of this file has the default from the file.
        named = set(self.file.hyper) & (set(bound_rule.hyper) - set(rule.hyper))
        ours = {key: replace(h, default=None) if key in named else h for key, h in bound_rule.hyper.items()}
        return replace(bound_rule, hyper=ours)

    def _named(self, text: Text) -> Rule:
        return compose_text(text, self.resolve) if is_composition(text.text) else self.resolve(text.text)

    def _binding(self, place: Place) -> Binding:
        value = self.document.at(place)
        return self.document.text(place) if isinstance(value, str) else cast(float, value)

    def _step_rule(self) -> Rule:
        uses = self._uses()
        self.hyper_names = list(dict.fromkeys([*self.file.hyper, *(key for r in uses.values() for key in r.hyper)]))
        wraps, shape = self._wraps()
        declared = Rule(
            self.file.name, (), hyper={key: self._hyper(key) for key in self.file.hyper}, inputs=dict(self.file.inputs),
            view=_view(self.file), wraps=wraps, wraps_shape=shape,
        )  # fmt: skip
        declared = self._placed(lambda: _with_called(declared, uses), self.document.span(("uses",), key=True))
        declared = replace(declared, state={**{key: self._state(key) for key in self.file.state}, **declared.state})
        places = {key: self.document.span(("inputs", key), key=True) for key in self.file.inputs}
        check_names(declared, places)
        scope = Scope(declared, uses)
        step = self._step(scope)
        unused = [key for key in uses if key not in scope.called]
        if unused:
            message = f"{unused[0]} is named under uses but never called: write {unused[0]}(g) in the step"
            raise rule_error(message, self.document.span(("uses",), key=True))
        return check_direction_free_of_lr(check_rule(replace(declared, step=step)))

    def _step(self, scope: Scope) -> Any:
        at = self.document.places[("step",)]
        span, style = self.document.span(("step",)), getattr(at, "style", None)
        if style != "|" and at.start_mark and at.end_mark and at.start_mark.line != at.end_mark.line:
            raise rule_error("the lines of this step are joined into one: begin it with step: |", span)
        try:
            return StepParser(self.document.text(("step",)), scope).parse()
        except RuleError as error:
            if error.place:
                raise
            raise rule_error(error.message, span) from None

    def _wraps(self) -> tuple[str, tuple[Node, ...] | None]:
        """A wrapper's name for the rule it wraps, and the extents of the call's input; None for the parameter's."""
        entry = self.file.wraps
        if entry is None:
            return "", None
        key = entry if isinstance(entry, str) else next(iter(entry))
        problem = declared_problem(key)
        if not problem and (key in FUNCTIONS or key == "tagged" or "." in key):
            why = "has a dot" if "." in key else "is also a function"
            problem = f"{short(key)} {why}: choose another name, such as inner"
        if problem:
            plain = isinstance(entry, str)
            raise rule_error(problem, self.document.span(("wraps",) if plain else ("wraps", key), key=not plain))
        if isinstance(entry, str):
            return key, None
        known = [*self.file.hyper, *_SHAPE]
        extents = [("wraps", key, "shape", i) for i in range(2)]
        return key, tuple(self._expression(extent, known, "an extent") for extent in extents)

    def _uses(self) -> dict[str, Rule]:
        entries = self.document.data.get("uses") or []
        rules: dict[str, Rule] = {}
        for index, entry in enumerate(entries):
            place: Place = ("uses", entry if isinstance(entries, dict) else index)
            named = entry if isinstance(entry, str) else next(iter(entry))
            key = named if isinstance(entries, dict) else Path(named).stem
            span = self.document.span(place, key=isinstance(entries, dict))
            if problem := _call_problem(key, rules):
                raise rule_error(problem, span)
            rule = self._component(place)
            rules[key] = self._placed(partial(compose.check_callable, rule), span)
        return rules

    def _expression(self, place: Place, known: Iterable[str], what: str = "", tags: bool = False) -> Node:
        """The number or expression at `place`. With `what`, its name in errors, it must be elementwise."""
        value = self.document.at(place)
        if isinstance(value, int | float):
            return const(value)
        names = list(known)

        def explain(identifier: str) -> str:
            near = did_you_mean(identifier, names) or f": known here are {', '.join(names[:12])}"
            return f"unknown name {short(identifier)}{near}"

        parsed = parse_expression(self.document.text(place), names, _tagged if tags else None, explain)
        return check_elementwise(parsed, what, self.document.span(place)) if what else parsed

    def _hyper(self, key: str) -> Hyper:
        place: Place = ("hyper", key)
        entry = self.file.hyper[key]
        span = self.document.span(place, key=True)
        if not isinstance(entry, HyperEntry):
            return Hyper(self._default(place), **well_known_range(key), span=span)
        limits = _limits(entry) or well_known_range(key)
        if any(value != value for value in limits.values()):
            raise rule_error(f"a range ends in a number, and one end of that of {key} is none", span)
        default = None if entry.default is None else self._default((*place, "default"))
        return Hyper(default, **limits, static=entry.static, whole=entry.whole, span=span)

    def _default(self, place: Place) -> float | Node:
        value = self._expression(place, [*self.hyper_names, "machine_eps"], "a default")
        return float(value.arg) if value.op is Op.CONST else value  # type: ignore[arg-type]

    def _state(self, key: str) -> State:
        place: Place = ("state", key)
        entry, span = self.file.state[key], self.document.span(place, key=True)
        known = [*self.hyper_names, *_SHAPE, "machine_eps"]
        if not isinstance(entry, StateEntry):
            return State(self._expression(place, [*known, "p"], "an initial value"), span=span)
        data, shape = self.document.at(place), None
        if problem := level_problem(key, entry.per):
            raise rule_error(problem, self.document.span((*place, "per")))
        if entry.shape is not None:
            extents = [(*place, "shape", i) for i in range(len(entry.shape))]
            shape = tuple(self._expression(extent, known, "an extent") for extent in extents)
        init = self._expression((*place, "init"), [*known, "p"], "an initial value") if "init" in data else const(0)
        condition = None
        if entry.condition is not None:
            condition = self._expression((*place, "if"), [*_SHAPE, *self._static()], "a condition")
        return State(init, entry.per, shape, condition, span=span)

    def _stored(self, rule: Rule) -> Rule:
        """The rule with the states under `storage` marked."""
        for key, word in self.file.storage.items():
            if problem := storage_problem(rule, key, word):
                raise rule_error(problem, self.document.span(("storage", key), key=True))
            rule = with_storage(rule, key, word)
        return rule

    def _static(self) -> list[str]:
        return [key for key, entry in self.file.hyper.items() if isinstance(entry, HyperEntry) and entry.static]

    def _expressions(self, body: Rule) -> dict[str, Any]:
        expressions: dict[str, Any] = {}
        if self.file.evaluate is not None:
            known = ["p", *_SHAPE, "machine_eps", *body.hyper, *body.state]
            expressions["evaluate"] = self._expression(("evaluate",), known, "an evaluation point")
        if self.file.skip is not None:
            known = ["p", "t", "g", "grad", *_SHAPE, "machine_eps", *body.hyper, *body.state, *body.inputs]
            expressions["skip"] = self._expression(("skip",), known)
        if self.file.applies_to is not None:
            expressions["applies_to"] = self._expression(("applies_to",), _SHAPE, "a condition", tags=True)
        if self.file.otherwise is not None:
            expressions["otherwise"] = self._routing()
        return expressions

    def _routing(self) -> Routing:
        """The entry under `otherwise`: the rule for tensors outside `applies_to`."""
        entry = self.document.data["otherwise"]
        if is_rule_file(entry):
            return Routing(_RuleReader(self.document.below(("otherwise",)), self.resolve, self.path).rule())
        wraps, _ = self._wraps()
        if wraps and entry == wraps:
            return Routing(None, wraps)
        rule = self._component(("otherwise",))
        text, bindings = (entry, {}) if isinstance(entry, str) else next(iter(entry.items()))
        if rule.wraps and not wraps:
            raise rule_error(f"{rule.name} wraps another rule: write {text}(adam)", self.document.span(("otherwise",)))
        if bindings:
            arguments = ", ".join(
                f"{key}={value if isinstance(value, str) else number_text(value)}" for key, value in bindings.items()
            )
            text = f"({text})({arguments})" if is_composition(text) else f"{text}({arguments})"
        # A file's path means something only beside the file that names it.
        return Routing(rule, "" if re.search(r"\.ya?ml\b", text) else text)


def _call_problem(key: str, rules: dict[str, Rule]) -> str:
    """Why a rule under `uses` cannot have this name, as a sentence; empty where it can."""
    other = "name it under uses, as {other: ...}"
    if key in FUNCTIONS or key == "tagged":
        return f"{key!r} is also a function: {other.replace('other', key + '_rule')}"
    if key in rules:
        return f"{key!r} is named twice: {other.replace('other', key + '2')}"
    problem = declared_problem(key)
    return f"{problem.partition(':')[0]}: {other}" if problem else ""


def _with_called(caller: Rule, uses: dict[str, Rule]) -> Rule:
    """`caller` with the hyper-parameters, states, inputs and view of the rules under its `uses`."""
    views = [view for view in [caller.view, *(rule.view for rule in uses.values())] if view]
    if any(view != views[0] for view in views):
        raise RuleError(f"{caller.name} and the rules it uses see tensors differently: their view must be the same")
    return replace(
        caller,
        hyper=compose.unify_hyper([(caller.name, caller.hyper), *((r.name, r.hyper) for r in uses.values())]),
        state={k: s for prefix, rule in uses.items() for k, s in compose.called_states(rule, prefix).items()},
        inputs=compose.unify_inputs([caller, *uses.values()]),
        view=views[0] if views else {},
    )


def _limits(entry: HyperEntry) -> Limits:
    limits = {k: float(v) for k in Limits.__annotations__ if (v := getattr(entry, k)) is not None}
    return cast(Limits, limits)


def _view(file: RuleFile) -> dict[str, str]:
    return file.view.model_dump(exclude_none=True) if file.view else {}


def _plain_attributes(file: RuleFile) -> dict[str, Any]:
    """The attributes of a rule that need no parsing: summary, paper, interop and view."""
    paper = file.paper.model_dump(exclude_none=True) if file.paper else {}
    attributes: dict[str, Any] = {"summary": file.summary.strip(), "paper": paper, "interop": file.interop}
    return attributes | ({"view": view} if (view := _view(file)) else {})


def _tagged(called: str, args: list[Any], span: Span, _: dict[str, Node]) -> Node | None:
    if called != "tagged":
        return None
    if len(args) != 1 or not isinstance(args[0], str) or not re.fullmatch(r"[\w .:/-]+", args[0]):
        raise rule_error('tagged takes one word in quotes: tagged("embedding")', span)
    return node(Op.FACT, f'tagged("{args[0]}")')
