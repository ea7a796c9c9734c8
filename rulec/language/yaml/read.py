"""Rule files: YAML text into a Rule."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from rulec.errors import RuleError
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
from rulec.language.compose import combine
from rulec.language.compose.bind import Binding, bind
from rulec.language.compose.cases import (
    cases_of,
    check_routed_call,
    composed,
    unify_inputs,
    with_inputs_of_rest,
    with_rate_of_rest,
)
from rulec.language.compose.combine import with_beginnings
from rulec.language.compose.parse import compose_text, is_composition
from rulec.language.dimensions import both
from rulec.language.eval_point import check_evaluation
from rulec.language.evaluations import check_point, gradient_of
from rulec.language.expr.functions import FUNCTIONS
from rulec.language.expr.names import declared_problem, is_rule_text, short
from rulec.language.expr.node import Node, Op, const
from rulec.language.expr.text import number_text
from rulec.language.hyper import Hyper, Limits, well_known_range
from rulec.language.inputs import InputKind, kind_of
from rulec.language.parse.expression import parse_expression, parse_level, tagged
from rulec.language.parse.located import Text
from rulec.language.parse.step import Scope, StepParser
from rulec.language.rule import Rule
from rulec.language.rule_data import AnyRule, Make, Pass, Routing, Sizes, State, Statistic
from rulec.language.sizes import entries, resized
from rulec.language.source import Mistakes, Span, did_you_mean, of_kind, rule_error
from rulec.language.statistics import parsed as parsed_statistic
from rulec.language.variants import with_variants
from rulec.language.yaml.document import Document, read_document
from rulec.language.yaml.document import Path as Place
from rulec.language.yaml.lengths import Lengths
from rulec.language.yaml.schema import HyperEntry, InputEntry, PassEntry, RuleFile, StateEntry, is_rule_file, validated

#: The rule of a name in a file. The loader supplies it, so that files can name library rules and paths.
Resolve = Callable[[str], Rule]

#: The shape facts that are known where tensors are routed and states are allocated.
_SHAPE = ("ndim", "numel", "rows", "cols")


def parse_rule(
    text: str, name: str, resolve: Resolve, path: Path | None = None, values: Mapping[str, Any] | None = None
) -> Rule:
    """The rule of a YAML text. `name` stands for it in errors, and `resolve` loads the rules named in it.

    `values` has other lists and counts than the text. Raises RuleError at the place of a mistake.
    """

    def make(values: Mapping[str, Any]) -> Rule:
        return parse_rule(text, name, resolve, path, values)

    with of_kind("yaml"):
        document = read_document(text, name)
    return _RuleReader(document, resolve, path, values or {}, make).rule()


class _RuleReader:
    """Reads the parts of one rule file."""

    def __init__(
        self, document: Document, resolve: Resolve, path: Path | None, values: Mapping[str, Any], make: Make
    ) -> None:
        self.document, self.resolve, self.path, self.make = document, resolve, path, make
        with of_kind("key"):
            self.file = validated(document)
        self.lengths = Lengths(document, self.file, values)
        self.hyper_names: list[str] = self.lengths.hyper_names()
        self.mistakes = Mistakes()

    def rule(self) -> Rule:
        self._check_keys()
        return self._with_variants(self._of_body())

    def _with_variants(self, rule: Rule) -> Rule:
        """The rule with the variants of the file; it is `make` that asks for other lengths, and leaves them out."""
        if self.lengths.values:
            return rule
        places = {key: ("variants", key) for key in self.file.variants}
        values = {key: [self._binding((*place, i)) for i in range(len(self.file.variants[key]))]
                  for key, place in places.items()}  # fmt: skip

        def placed(key: str, index: int | None, make: Callable[[], Any]) -> Any:
            place: Place = places[key] if index is None else (*places[key], index)
            return self._placed(make, self.document.span(place, key=index is None))

        return with_variants(rule, values, placed) if values else rule

    def _of_body(self) -> Rule:
        uses = self._uses() if self.file.step is not None else {}
        routed = [rule for rule in uses.values() if rule.applies_to is not None]
        if not routed:
            return self._whole(uses)
        span = self.document.span(("uses",), key=True)
        self._placed(partial(check_routed_call, self.file.name, routed[0], self.file.applies_to), span)

        def of_cases(cases: Sequence[Rule]) -> Rule:
            return with_rate_of_rest(self._whole(dict(zip(uses, cases, strict=True))), [*uses.values()], cases)

        return self._placed(lambda: composed([*uses.values()], of_cases), span)

    def _whole(self, uses: dict[str, Rule]) -> Rule:
        """The rule of the file. Its step calls these rules for all tensors."""
        file = self.file
        body = self._step_rule(uses) if file.step is not None else self._composed_rule()
        attributes = _plain_attributes(file)
        rule = replace(body, name=file.name, path=self.path, **attributes, **self._expressions(body))
        rule = self._stored(self._sized(rule))
        rule = self._placed(lambda: with_inputs_of_rest(rule), self.document.span(("otherwise",)))
        if file.rate is not None and file.step is not None:
            check_direction_free_of_lr(rule)
        return check_evaluation(check_rule(rule), self.document.span(("evaluate",)))

    def _sized(self, rule: Rule) -> Rule:
        """The rule with its lengths: those of its parts, and its own."""
        lists, counts = self.lengths.hyper_lists(), self.lengths.counts_read
        if rule.sizes is not None:
            lists, counts = {**rule.sizes.lists, **lists}, {**rule.sizes.counts, **counts}
        if not lists and not counts:
            return rule
        hyper = {key: replace(h, decides=h.decides or key in counts) for key, h in rule.hyper.items()}
        make = None if self.lengths.fixed else self.make
        return replace(rule, hyper=hyper, sizes=Sizes(lists, {k: int(v) for k, v in counts.items()}, make))

    @of_kind("key")
    def _check_keys(self) -> None:
        """RuleError at the first key that cannot be a name."""
        if problem := title_problem(self.file.name):
            raise rule_error(problem, self.document.span(("name",)))
        for section in ("hyper", "state", "inputs", "passes", "statistics"):
            for key in getattr(self.file, section):
                problem = declared_problem(key)
                if problem:
                    raise rule_error(problem, self.document.span((section, key), key=True))

    def _composed_rule(self) -> Rule:
        key, join = ("plus", combine.plus) if self.file.plus is not None else ("chain", combine.chain)
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
            follows = entry.follows or declared.follows
            flags = {"static": static, "whole": whole, "decides": declared.decides, "follows": follows}
            changed = Hyper(declared.default, **limits, **flags, span=span)
            rule = replace(rule, hyper={**rule.hyper, key: changed})
        if entry.default is not None:
            rule = self._with_default(rule, key, ("hyper", key, "default"))
        if isinstance(entry.default, list):
            if _limits(entry) or entry.static or entry.whole:
                message = f"the range of the list {key} belongs into the rule's own file: give a list alone"
                raise rule_error(message, span)
            return rule
        if key not in rule.hyper:
            raise rule_error(f"{short(key)} is bound to an expression, so it has no range", span)
        return rule

    def _with_default(self, rule: Rule, key: str, place: Place) -> Rule:
        """The composed rule with the default or the expression at `place` for one hyper-parameter."""
        value: Binding = self._binding(place)
        span = self.document.span(("hyper", key), key=True)
        if isinstance(value, list):
            value = self.lengths.chosen(key) or value
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
            raise rule_error(error.message, span, error.code) from None

    @of_kind("component")
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
        return _without_defaults(
            bound_rule, self.file.hyper.keys() & (bound_rule.all_hyper.keys() - rule.all_hyper.keys())
        )

    def _named(self, text: Text) -> Rule:
        rule = compose_text(text, self.resolve) if is_composition(text.text) else self.resolve(text.text)
        return resized(rule, self.lengths.values)

    def _binding(self, place: Place) -> Binding:
        value = self.document.at(place)
        if isinstance(value, list):
            return [self._binding((*place, index)) for index in range(len(value))]
        return self.document.text(place) if isinstance(value, str) else cast(float, value)

    def _step_rule(self, uses: dict[str, Rule]) -> Rule:
        names = self.lengths.hyper_names()
        self.hyper_names = list(dict.fromkeys([*names, *(key for r in uses.values() for key in r.hyper)]))
        wraps, shape = self._wraps()
        hyper = self.mistakes.read(self.file.hyper, self._hyper, Hyper(None))
        declared = Rule(
            self.file.name, (), hyper=hyper, inputs=self.mistakes.read(self.file.inputs, self._inputs, "scalar"),
            view=_view(self.file), wraps=wraps, wraps_shape=shape,
        )  # fmt: skip
        declared = self._placed(lambda: _with_called(declared, uses), self.document.span(("uses",), key=True))
        states = self.mistakes.read(self.file.state, self._states, State(const(0)))
        declared = replace(declared, state={**states, **declared.state})
        places = {key: self.document.span(("inputs", key), key=True) for key in self.file.inputs}
        declared = replace(declared, passes=self._passes(declared))
        check_names(declared, places)
        lengths = self.lengths
        scope = Scope(declared, uses, lengths.lists, lengths.histories, lengths.counts, lambda: lengths.dimensions)
        step = self._step(scope)
        unused = [key for key in uses if key not in scope.called]
        if unused:
            message = f"{unused[0]} is named under uses but never called: write {unused[0]}(g) in the step"
            raise rule_error(message, self.document.span(("uses",), key=True))
        return check_direction_free_of_lr(
            check_rule(with_beginnings(replace(declared, step=step, statistics=scope.statistics)))
        )

    @of_kind("expression")
    def _step(self, scope: Scope) -> Any:
        at = self.document.places[("step",)]
        span, style = self.document.span(("step",)), getattr(at, "style", None)
        if style != "|" and at.start_mark and at.end_mark and at.start_mark.line != at.end_mark.line:
            raise rule_error("the lines of this step are joined into one: begin it with step: |", span)
        parser = StepParser(self.document.text(("step",)), scope, self.mistakes)
        try:
            step = parser.parse()
            self.lengths.read(parser.expressions.counts_read)
            return step
        except RuleError as error:
            if error.place:
                raise
            raise rule_error(error.message, span, error.code) from None

    @of_kind("component")
    def _wraps(self) -> tuple[tuple[str, ...], tuple[Node, ...] | None]:
        """A wrapper's names for what it wraps, and the extents of the call's input; None for the parameter's."""
        entry = self.file.wraps
        if entry is None:
            return (), None
        keys = (entry,) if isinstance(entry, str) else tuple(entry)
        for index, key in enumerate(keys):
            if problem := _wrapped_problem(key, keys[:index]):
                place: Place = ("wraps",) if isinstance(entry, str) else ("wraps", index)
                in_key = isinstance(entry, dict)
                raise rule_error(problem, self.document.span(("wraps", key) if in_key else place, key=in_key))
        if not isinstance(entry, dict):
            return keys, None
        known = [*self.file.hyper, *_SHAPE]
        extents = [("wraps", keys[0], "shape", i) for i in range(2)]
        return keys, tuple(self._expression(extent, known, "an extent") for extent in extents)

    def _passes(self, declared: Rule) -> dict[str, Pass]:
        """The passes, in order: a point may be made of the gradients of earlier ones."""
        passes: dict[str, Pass] = {}
        numbers = ["t", *_SHAPE, "machine_eps", *declared.hyper]
        for key, entry in self.file.passes.items():
            place: Place = ("passes", key)
            known = ["g", "grad", "p", *numbers, *declared.state, *declared.inputs, *map(gradient_of, passes)]
            at: Place = (*place, "point") if isinstance(entry, PassEntry) else place
            point = check_point(self._expression(at, known), self.document.span(at))
            when = None
            if isinstance(entry, PassEntry) and entry.when is not None:
                when = self._expression((*place, "when"), numbers, "a condition")
            passes[key] = Pass(point, when, self.document.span(place, key=True))
        return passes

    @of_kind("component")
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
            for case in cases_of(rule):
                self._placed(partial(combine.check_callable, case.rule), span)
            rules[key] = rule
        return rules

    @of_kind("expression")
    def _expression(
        self, place: Place, known: Iterable[str], what: str = "", tags: bool = False,
        variables: Mapping[str, int] | None = None,
    ) -> Node:  # fmt: skip
        """The number or expression at `place`. With `what`, its name in errors, it must be elementwise."""
        value = self.document.at(place)
        if isinstance(value, int | float):
            return const(value)
        names = list(known)

        def explain(identifier: str) -> str:
            near = did_you_mean(identifier, names) or f": known here are {', '.join(names[:12])}"
            return f"unknown name {short(identifier)}{near}"

        parsed = parse_expression(self.document.text(place), names, tagged if tags else None, explain, variables)
        return check_elementwise(parsed, what, self.document.span(place)) if what else parsed

    def _hyper(self, key: str) -> dict[str, Hyper]:
        """A hyper-parameter, or the entries of a list, by name."""
        place: Place = ("hyper", key)
        entry = self.file.hyper[key]
        span = self.document.span(place, key=True)
        limits, static, whole, decides, follows = well_known_range(key), False, False, False, False
        if isinstance(entry, HyperEntry):
            limits, static, whole = _limits(entry) or limits, entry.static, entry.whole
            decides, follows = entry.decides, entry.follows
            place = place if entry.default is None else (*place, "default")
        if any(value != value for value in limits.values()):
            raise rule_error(f"a range ends in a number, and one end of that of {key} is none", span)
        without = isinstance(entry, HyperEntry) and entry.default is None
        listed = isinstance(self.document.at(place), list)
        places = [(*place, index) for index in range(len(self.document.at(place)))] if listed else [place]
        defaults: Sequence[float | Node | None] = [None]
        if not without:
            defaults = self.lengths.chosen(key) or [self._default(place) for place in places]
        names = entries(key, len(defaults)) if listed else [key]
        values = zip(names, defaults, strict=True)
        flags = {"static": static, "whole": whole, "decides": decides, "follows": follows}
        return {name: Hyper(value, **limits, **flags, span=span) for name, value in values}

    def _default(self, place: Place) -> float | Node:
        value = self._expression(place, [*self.hyper_names, "machine_eps"], "a default")
        return float(value.arg) if value.op is Op.CONST else value  # type: ignore[arg-type]

    def _states(self, key: str) -> dict[str, State]:
        """A state, or the entries of a list or history, by name."""
        length, axes = self.lengths.lists.get(key), self.lengths.each.get(key)
        if axes is not None:
            states = [self._state(key, variables, condition) for variables, condition in axes]
            return dict(zip(entries(key, len(states)), states, strict=True))
        state = self._state(key)
        return {key: state} if length is None else dict.fromkeys(entries(key, length), state)

    def _state(self, key: str, variables: Mapping[str, int] | None = None, where: Node | None = None) -> State:
        """A state, with values of variables in its expressions; tensors outside the condition `where` lack it."""
        place: Place = ("state", key)
        entry, span = self.file.state[key], self.document.span(place, key=True)
        known = [*self.hyper_names, *_SHAPE, "machine_eps"]
        if not isinstance(entry, StateEntry):
            return State(self._expression(place, [*known, "p"]), span=span)
        data, shape = self.document.at(place), None
        level = parse_level(self.document.text((*place, "per")), known, variables) if "per" in data else None
        if level is None and (problem := level_problem(key, entry.per)):
            raise rule_error(problem, self.document.span((*place, "per")))
        if entry.shape is not None:
            extents = [(*place, "shape", i) for i in range(len(entry.shape))]
            shape = tuple(self._expression(x, known, "an extent", variables=variables) for x in extents)
        init = const(0)
        if "init" in data:
            init = self._expression((*place, "init"), [*known, "p"], variables=variables)
        condition = where
        if entry.condition is not None:
            asked = self._expression((*place, "if"), [*_SHAPE, *self._static()], "a condition", variables=variables)
            condition = both(where, asked)
        per, number = (entry.per, None) if level is None else (level.word, level.number)
        return State(init, per, shape, condition, span=span, number=number)

    def _inputs(self, key: str) -> dict[str, InputKind]:
        """An input by its name, with its kind."""
        entry = self.file.inputs[key]
        if not isinstance(entry, InputEntry):
            return {key: entry}
        extents = [("inputs", key, "shape", i) for i in range(2)]
        known = [*self.hyper_names, *_SHAPE]
        span = self.document.span(("inputs", key), key=True)
        return {key: kind_of(tuple(self._expression(extent, known, "an extent") for extent in extents), span)}

    def _stored(self, rule: Rule) -> Rule:
        """The rule with the states under `storage` marked."""
        for key, word in self.file.storage.items():
            for name in entries(key, self.lengths.lists[key]) if key in self.lengths.lists else [key]:
                if problem := storage_problem(rule, name, word):
                    raise rule_error(problem, self.document.span(("storage", key), key=True))
                rule = with_storage(rule, name, word)
        return rule

    def _static(self) -> list[str]:
        return [key for key, entry in self.file.hyper.items() if isinstance(entry, HyperEntry) and entry.static]

    def _expressions(self, body: Rule) -> dict[str, Any]:
        expressions: dict[str, Any] = {}
        if self.file.rate is not None:
            expressions["rate"] = self._rate(body)
        if self.file.evaluate is not None:
            known = ["p", *_SHAPE, "machine_eps", *body.hyper, *body.state]
            expressions["evaluate"] = self._expression(("evaluate",), known, "an evaluation point")
        if self.file.skip is not None:
            known = ["p", "t", "g", "grad", *_SHAPE, "machine_eps", *body.hyper, *body.state, *body.inputs]
            expressions["skip"] = self._expression(("skip",), known)
        if self.file.applies_to is not None:
            expressions["applies_to"] = self._expression(("applies_to",), _SHAPE, "a condition", tags=True)
        if self.file.statistics:
            expressions["statistics"] = {**body.statistics, **self._statistics(body)}
        if self.file.otherwise is not None:
            expressions["otherwise"] = self._routing()
        return expressions

    @of_kind("expression")
    def _statistics(self, body: Rule) -> dict[str, Statistic]:
        texts = {key: self.document.text(("statistics", key)) for key in self.file.statistics}
        return {key: parsed_statistic(body, key, text) for key, text in texts.items()}

    def _rate(self, body: Rule) -> Node:
        """The learning rate of a rule with a direction."""
        span = self.document.span(("rate",), key=True)
        if body.wraps:
            raise rule_error(f"{self.file.name} has the learning rate of the rule it wraps: leave rate out", span)
        if body.assigns_parameter:
            raise rule_error(f"{self.file.name} assigns p itself, so its rate has no meaning: leave it out", span)
        return self._expression(("rate",), [*body.hyper, "lr"], "a learning rate")

    def _routing(self) -> Routing:
        """The entry under `otherwise`: the rule for tensors outside `applies_to`."""
        entry = self.document.data["otherwise"]
        if is_rule_file(entry):
            if "variants" in entry:
                message = "variants are of the whole rule: move them to its own keys"
                raise rule_error(message, self.document.span(("otherwise", "variants"), key=True))
            below, values = self.document.below(("otherwise",)), self.lengths.values
            return Routing(_RuleReader(below, self.resolve, self.path, values, self.make).rule())
        if isinstance(entry, str) and is_rule_text(entry):
            message = "this rule is one text: leave out the | after otherwise, and indent its lines below it"
            raise rule_error(message, self.document.span(("otherwise",)), "component")
        wraps, _ = self._wraps()
        if isinstance(entry, str) and entry in wraps:
            return Routing(None, entry)
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


def _without_defaults(rule: AnyRule, named: Collection[str]) -> AnyRule:
    """The rule, and the one for the tensors that it leaves out, with no default for the hyper-parameters named."""
    hyper = {key: replace(h, default=None) if key in named else h for key, h in rule.hyper.items()}
    if rule.otherwise is None or rule.otherwise.rule is None:
        return replace(rule, hyper=hyper)
    rest = _without_defaults(rule.otherwise.rule, named)
    return replace(rule, hyper=hyper, otherwise=replace(rule.otherwise, rule=rest))


def _wrapped_problem(key: str, before: Sequence[str]) -> str:
    """Why a wrapper cannot call a rule it wraps by this name, as a sentence; empty where it can."""
    if problem := declared_problem(key):
        return problem
    if key in before:
        return f"{short(key)} is named twice: choose a name for each rule"
    if key in FUNCTIONS or key == "tagged" or "." in key:
        why = "has a dot" if "." in key else "is also a function"
        return f"{short(key)} {why}: choose another name, such as inner"
    return ""


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
        hyper=combine.unify_hyper([(caller.name, caller.hyper), *((r.name, r.hyper) for r in uses.values())]),
        state={k: s for prefix, rule in uses.items() for k, s in combine.called_states(rule, prefix).items()},
        inputs=unify_inputs([caller, *uses.values()]),
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
