"""The driver: a rule into a program, pass by pass."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from rulec.compiler.axes import infer_axes
from rulec.compiler.foreseen import check_counts, decide
from rulec.compiler.indices import view_key
from rulec.compiler.ir import PLAIN, Memory, Program, verify
from rulec.compiler.layout import Layout, scheduled
from rulec.compiler.lower import lower
from rulec.compiler.scalars import hoist_scalars, reduced_states
from rulec.compiler.stages import split_stages
from rulec.compiler.view import grouping, plain_facts, static_defaults
from rulec.environment import debug_level
from rulec.language.expr.node import NUMBERS, Node, names_in
from rulec.language.rule_data import RuleData, assignments, conditions, counts_dimensions
from rulec.language.statistics import Watched

Pass = Callable[[Program], Program]

#: The passes after lowering, in order; each takes a program and gives a program. After the last of `WHOLE` a program
#: is still one stage with reductions and matrix functions inside: the reference runs it.
WHOLE: tuple[tuple[str, Pass], ...] = (("infer_axes", infer_axes), ("hoist_scalars", hoist_scalars))
PASSES: tuple[tuple[str, Pass], ...] = (*WHOLE, ("split_stages", split_stages))

#: The shape facts of an ordinary matrix: the default of `compile`.
DEFAULT_FACTS: Mapping[str, float] = {**plain_facts((64, 64)), "rows": 64, "cols": 64}


def shape_conditions(rule: RuleData) -> list[Node]:
    """The conditions of branches and of states. By their truth one rule has several programs."""
    branches = [branch.condition for branch in conditions(rule.step)]
    return branches + [s.condition for s in rule.state.values() if s.condition is not None]


def compile(
    rule: RuleData, facts: Mapping[str, float] | None = None, static: Mapping[str, float] | None = None,
    assumed: Mapping[int, bool] | None = None, whole: bool = False, memory: Memory = PLAIN, watch: Watched = (),
) -> Program:  # fmt: skip
    """The program of `rule` for tensors with these shape facts (by default of a 64 by 64 matrix).

    `static` gives static hyper-parameters; other hyper-parameters are read when a step runs and never recompile
    anything. `assumed` maps places in `Program.predicates` to truth values: their branches are decided. `whole` leaves
    out the last pass. `memory` says how values are stored, beyond their dtypes. `watch` are the statistics to measure,
    from `rulec.language.statistics.watched`. Programs are shared: facts that decide every condition alike give the same
    object.

    Raises RuleError for a mistake in the rule as a whole, such as shapes that do not fit. Without facts, counts that
    depend on no shape are checked too; with facts, call `check_counts`.
    """
    shapeless = facts is None
    # Tensors of one program differ in their numbers: no condition is decided by them.
    facts = {key: fact for key, fact in (facts or DEFAULT_FACTS).items() if key not in NUMBERS}
    static = {k: float(v) for k, v in {**static_defaults(rule), **(static or {})}.items()}
    known = {**facts, **static}
    conditions = shape_conditions(rule)
    decisions: tuple[object, ...] = tuple(decide(c, known) for c in conditions)
    if {line.target for line in assignments(rule.step)}.intersection(names_in(conditions)):
        # A local may stand for a shape fact: conditions on it are decided only when the lines are walked.
        decisions += tuple(sorted(facts.items()))
    decisions += (*_rank(rule, known), *view_key(rule, known))
    key = id(rule), decisions, tuple(sorted(static.items())), tuple(sorted((assumed or {}).items())), whole
    program = _compile(_Request((*key, memory, watch), rule, facts, static, assumed, whole, memory, watch))
    return check_counts(program, static) if shapeless else program


def _rank(rule: RuleData, known: Mapping[str, float]) -> tuple[object, ...]:
    """What the levels of axes and blocks, and `dim(i)`, mean for a tensor."""
    if not counts_dimensions(rule):
        return ()
    grouped = grouping(rule, known)
    return known["ndim"], *(() if grouped is None else (grouped.letters, grouped.block > 0))


@dataclass(frozen=True)
class _Request:
    """The input of a compilation. Requests with equal keys share their program.

    `key` has the identity of the rule, so equal rules from two sources compile separately. In place of shape facts it
    has the decisions by them.
    """

    key: tuple[object, ...]
    rule: RuleData = field(compare=False)
    facts: Mapping[str, float] = field(compare=False)
    static: Mapping[str, float] = field(compare=False)
    assumed: Mapping[int, bool] | None = field(compare=False)
    whole: bool = field(compare=False)
    memory: Memory = field(compare=False)
    watch: Watched = field(compare=False)


@functools.lru_cache(maxsize=512)
def _compile(request: _Request) -> Program:
    program = None
    for name, program in passes(
        request.rule, request.facts, request.static, request.assumed, request.whole, memory=request.memory,
        watch=request.watch,
    ):  # fmt: skip
        if debug_level() >= 3:
            from rulec.compiler.text import program_text

            print(f"--- {name}\n{program_text(program)}", file=sys.stderr)
    assert program is not None
    return program


def passes(
    rule: RuleData, facts: Mapping[str, float], static: Mapping[str, float], assumed: Mapping[int, bool] | None = None,
    whole: bool = False, layout: Callable[[Program], Layout] | None = None, memory: Memory = PLAIN,
    watch: Watched = (),
) -> Iterator[tuple[str, Program]]:  # fmt: skip
    """The name of each pass and the program after it, as printed by `rulec show --passes`.

    `layout` chooses the layout of a program; without it, the pass that depends on the layout is left out.
    """
    undecided = lower(rule, facts, static, memory=memory, watch=watch)
    program = lower(rule, facts, static, assumed, memory, undecided.meant, watch) if assumed else undecided
    program = verify(program, "lower")
    if assumed:
        program = replace(program, reduced=reduced_states(infer_axes(undecided)))
    yield "lower", program
    for name, run in WHOLE if whole else PASSES:
        program = verify(run(program), name)
        yield name, program
    if layout is not None:
        yield "choose_rereads", scheduled(program, layout(program)).program
