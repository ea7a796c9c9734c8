"""The programs of a rule for tensors of different shapes and for different steps, and the conditions on them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from rulec.compiler.foreseen import decide
from rulec.compiler.ir import Program
from rulec.compiler.layout import Layout, array_buffers, is_shaped, is_viewed, layout_for, scheduled
from rulec.compiler.pipeline import compile, shape_conditions
from rulec.compiler.simplify import fold_node
from rulec.compiler.view import static_defaults, view_of
from rulec.errors import RulecError
from rulec.formats import UNBIASED
from rulec.language.expr.node import FACTS, NUMBERS, WORDS, Kind, Node, Op, const, names_in, rewrite, walk
from rulec.language.expr.static import MUON, NORM, inside, settings
from rulec.language.expr.text import expression_text
from rulec.language.rule import Rule
from rulec.language.rule_data import RuleData, counts_dimensions, placed_level
from rulec.runtime.buckets.plan import Plan, needs_matrix
from rulec.runtime.storage.options import FEWEST_CODED, Storage

#: Most branches on `t` and hyper-parameters to write out, each outcome as a version of its own.
MOST_PREDICATES = 3

#: Nodes with a name as their argument, such as a tag's.
_NAMED = (Op.FACT, Op.NAME)

#: Facts that depend on the number of elements alone, or on no shape, as the words of random bits.
_OF_COUNT = frozenset({"numel", "machine_eps", *WORDS})


@dataclass(frozen=True)
class Version:
    """A program for one outcome of its predicates. With `turned`, the rule's rows are the columns in memory."""

    decided: tuple[bool, ...]
    turned: bool
    program: Program
    layout: Layout
    plan: Plan


@dataclass(frozen=True)
class Case:
    """A program for the shapes with one of `truths` as the values of the family's conditions."""

    truths: tuple[tuple[bool, ...], ...]
    program: Program
    facts: Mapping[str, float]
    versions: tuple[Version, ...]


@dataclass(frozen=True)
class Family:
    """A rule as programs. `shaped` is false where they depend on the number of a tensor's elements alone."""

    rule: Rule
    conditions: tuple[Node, ...]
    applies: Node | None
    cases: tuple[Case, ...]
    shaped: bool
    static: Mapping[str, float]

    @cached_property
    def seeded(self) -> bool:
        """Whether parameters or states are rounded at random, from a seed and the number of a tensor."""
        programs = [v.program for case in self.cases for v in case.versions]
        return any(value.op is Op.CHANCE for program in programs for value in values(program))


@dataclass(frozen=True)
class CheckedStorage(Storage):
    """The storage of a rule that was checked, for another rule with the same states: it refuses nothing."""

    def check(self, rules: Iterable[RuleData]) -> None:
        """Does nothing."""

    @staticmethod
    def of_layout(program: Program, layout: Layout, weights: str) -> CheckedStorage:
        """The words of all states of the parameter's shape, as they lie in a layout."""
        words = {}
        for b in program.states:
            form, plain = layout.format(b.name), layout.dtype(b.name) if b.axes.elementwise else ""
            words[b.name] = form.text if form else UNBIASED if b.name in program.memory.unbiased else plain
        return CheckedStorage({name: word for name, word in words.items() if word}, weights)


def family(
    rule: Rule, dtype: str, storage: Storage, form: str, written: frozenset[Op] = frozenset(), shares: bool = False
) -> Family:  # fmt: skip
    """All programs of a rule for tensors of this dtype; CannotBuild where `form`, a kind of file, cannot have them.

    `written` are the matrix functions of the form. A form that `shares` has reductions over several tensors.
    """
    rule = rule.standalone()
    static = static_defaults(rule)
    if counts_dimensions(rule):
        read = {n.op for n in walk(rule.expressions)}
        level = placed_level(rule) or ("dim(i)" if Op.DIM in read else "index")
        raise CannotBuild(
            rule.name, form, f"{level} depends on the number of dimensions, and what is written sees matrices: "
            f"write per row and per column",
        )  # fmt: skip
    known = [n for n in walk(rule.expressions) if n.op is Op.NAME and n.arg in NUMBERS]
    if known:
        why = f"it reads {known[0].arg}, and what is written sees one tensor, and no group or layer"
        raise CannotBuild(rule.name, form, why)
    storage.check([rule])
    storage.check_weights([dtype])
    conditions, groups = _fewest(
        _conditions(rule, static), _by_truth(rule, static, storage, dtype, form, written, shares)
    )
    cases = tuple(
        Case(tuple(truths), program, facts, tuple(versions(rule, program, facts, static, dtype, storage)))
        for program, facts, truths in groups
    )
    applies = None if rule.applies_to is None else _untagged(rule.applies_to)
    programs = [v.program for case in cases for v in case.versions]
    shaped = bool(conditions) or applies is not None or any(_sees_shape(p) for p in programs)
    return Family(rule, conditions, applies, cases, shaped, static)


def _sees_shape(program: Program) -> bool:
    narrow = any(not b.axes.elementwise for b in array_buffers(program))
    viewed = is_shaped(program) or narrow or (is_viewed(program) and bool(program.vectors))
    return viewed or any(v.op is Op.FACT and v.arg not in _OF_COUNT for v in values(program))


def _conditions(rule: Rule, static: Mapping[str, float]) -> list[Node]:
    """The conditions of a rule on the shape alone."""
    facts = {**dict.fromkeys(FACTS, 1.0), **static}
    return [c for c in dict.fromkeys(shape_conditions(rule)) if decide(c, facts) is not None]


def _by_truth(
    rule: Rule, static: Mapping[str, float], storage: Storage, dtype: str, form: str, written: frozenset[Op],
    shares: bool,
) -> dict[tuple[bool, ...], tuple[Program, Mapping[str, float]]]:  # fmt: skip
    """Values of the conditions -> the program for a shape with these values, and the facts of one such shape."""
    conditions = _conditions(rule, static)
    _refuse_locals(rule, conditions, form)
    programs: dict[tuple[bool, ...], tuple[Program, Mapping[str, float]]] = {}
    applies = None if rule.applies_to is None else _untagged(rule.applies_to)
    for shape in _shapes([*conditions, *([] if applies is None else [applies])]):
        facts = view_of(rule, shape, static).facts
        if applies is not None and not decide(applies, facts):
            continue
        truths = tuple(bool(decide(c, {**facts, **static})) for c in conditions)
        if truths not in programs:
            program = compile(rule, facts, memory=storage.memory_of(rule, dtype))
            if not shares:
                refuse_shared(program, form)
            refuse_unwritten(program, form, written)
            refuse_predicates(program, form, MOST_PREDICATES)
            programs[truths] = program, facts
    if rule.applies_to is not None and not programs:
        tagged = any(str(n.arg).startswith("tagged(") for n in walk([rule.applies_to]) if n.op in _NAMED)
        why = "what is written is told of no tags" if tagged else "no shape was found for which that is true"
        raise CannotBuild(rule.name, form, f"it applies to {expression_text(rule.applies_to)} alone, and {why}")
    return programs


def _refuse_locals(rule: Rule, conditions: Sequence[Node], form: str) -> None:
    """CannotBuild for a local in a condition: it may stand for a shape fact, decided only when the lines are walked."""
    others = [c for c in shape_conditions(rule) if c not in conditions]
    known = {*FACTS, *rule.hyper, "t"}
    local = next((n for n in names_in(others) if n not in known and n not in rule.state and n not in rule.inputs), None)
    if local is not None:
        raise CannotBuild(
            rule.name, form, f"its branch on {local} may be one on the shape: write the shape fact itself"
        )


def _shapes(conditions: Sequence[Node]) -> list[tuple[int, ...]]:
    """Shapes for every possible outcome of the conditions: around each number in a comparison."""
    constants = [float(n.arg) for n in walk(conditions) if n.op is Op.CONST]  # type: ignore[arg-type]
    numbers = {int(x) for x in constants if abs(x) < 2**31}
    sides = sorted({1, 2, 3, 5, 64, *(n + d for n in numbers for d in (-1, 0, 1) if n + d > 0)})
    shapes: list[tuple[int, ...]] = [()]
    for ndim in (1, 2):
        shapes += itertools.product(sides, repeat=ndim)
    return shapes + [(2,) * (n - 2) + tail for n in (3, 4, 5) for tail in itertools.product(sides, repeat=2)]


def _fewest(
    conditions: Sequence[Node], programs: Mapping[tuple[bool, ...], tuple[Program, Mapping[str, float]]]
) -> tuple[tuple[Node, ...], list[tuple[Program, Mapping[str, float], list[tuple[bool, ...]]]]]:
    """The fewest conditions to distinguish the programs, and each program with its values of these conditions."""
    for size in range(len(conditions) + 1):
        for places in itertools.combinations(range(len(conditions)), size):
            groups: dict[tuple[bool, ...], Program] = {}
            for truths, (program, _) in programs.items():
                if groups.setdefault(tuple(truths[i] for i in places), program) is not program:
                    break
            else:
                merged: dict[int, tuple[Program, Mapping[str, float], list[tuple[bool, ...]]]] = {}
                facts = {id(program): facts for program, facts in programs.values()}
                for chosen, program in groups.items():
                    merged.setdefault(id(program), (program, facts[id(program)], []))[2].append(chosen)
                return tuple(conditions[i] for i in places), list(merged.values())
    raise AssertionError("all conditions together tell all programs apart")


def versions(
    rule: Rule, program: Program, facts: Mapping[str, float], static: Mapping[str, float], dtype: str, storage: Storage
) -> list[Version]:
    """A version for each outcome of a program's predicates, and for both orientations where the rule turns matrices."""
    outcomes = []
    for decided in itertools.product((True, False), repeat=len(program.predicates)):
        assumed = {place: truth for (place, _), truth in zip(program.predicates, decided, strict=True)}
        chosen = compile(rule, facts, static, assumed, memory=program.memory) if assumed else program
        outcomes += oriented(rule, chosen, decided, dtype, storage)
    return outcomes


def oriented(
    rule: Rule, program: Program, decided: tuple[bool, ...], dtype: str, storage: Storage
) -> list[Version]:  # fmt: skip
    """A program as a version for each orientation: one, or two where the rule turns matrices."""
    turnable = rule.view.get("short") == "first" and (is_shaped(program) or needs_matrix(program) is not None)
    outcomes = []
    for turned in (False, True)[: 1 + turnable]:
        states, formats = storage.of(program, dtype, FEWEST_CODED)
        last, layout = scheduled(program, layout_for(program, dtype, None, states, False, turned, formats))
        outcomes.append(Version(decided, turned, last, layout, Plan(last)))
    return outcomes


def _untagged(condition: Node) -> Node:
    """The condition for a tensor without tags: a written file has no tags."""

    def change(n: Node) -> Node:
        tagged = n.op in _NAMED and str(n.arg).startswith("tagged(")
        return const(0) if tagged else _folded(n)

    return rewrite([condition], change)[0]


def _folded(n: Node) -> Node:
    if n.op in (Op.AND, Op.OR, Op.NOT):
        known = [a.op is Op.CONST for a in n.args]
        if n.op is Op.NOT:
            return const(float(not n.args[0].arg)) if known[0] else n
        for i in (0, 1):
            if known[i]:
                decides = bool(n.args[i].arg) == (n.op is Op.OR)
                return n.args[i] if decides else n.args[1 - i]
    return fold_node(n)


class CannotBuild(RulecError, NotImplementedError):
    """A rule without a form as a file of its own for a backend. The message has the reason."""

    def __init__(self, rule: str, form: str, why: str) -> None:
        super().__init__(f"rulec build cannot write {rule} as {form}: {why}")


def values(program: Program) -> list[Node]:
    """Every value of a program: in stages, in the scalar program, and between and after the stages."""
    roots = [root for stage in program.stages for root in stage.roots]
    roots += [c.value for c in program.scalars.columns] + [s.value for s in program.scalars.stores]
    roots += [] if program.skip is None else [program.skip]
    return list(walk([*roots, *program.between]))


def refuse_shared(program: Program, form: str) -> None:
    """CannotBuild for a rule with reductions over several tensors."""
    if program.joins:
        value = program.joins[0]
        why = f"it takes a {value.op.symbol} over all tensors of the {value.arg}, and what is written updates one alone"
        raise CannotBuild(program.name, form, why)


def refuse_unwritten(program: Program, form: str, written: frozenset[Op] = frozenset()) -> None:
    """CannotBuild for a rule with random numbers, or with matrix functions other than `written`."""
    for value in values(program):
        if value.op.kind is Kind.MATRIX and value.op not in written:
            blocks = " of blocks" if value.op is Op.IN_BLOCKS else ""
            raise CannotBuild(program.name, form, f"it needs the matrix function {inside(value).op.symbol}{blocks}")
        if value.op is Op.NEWTON_SCHULZ and settings(value)["coefficients"] != MUON:
            raise CannotBuild(program.name, form, "it iterates newton_schulz with other coefficients than Muon's")
        if value.op is Op.NEWTON_SCHULZ and settings(value).get("normalize", NORM) != NORM:
            raise CannotBuild(program.name, form, "its newton_schulz divides by something else than the norm")
        if value.op.kind is Kind.RANDOM:
            raise CannotBuild(program.name, form, f"it draws random numbers ({value.op.symbol})")


def refuse_predicates(program: Program, form: str, most: int) -> None:
    """CannotBuild for a rule with more than `most` branches on `t` or hyper-parameters."""
    if len(program.predicates) > most:
        why = f"it has {len(program.predicates)} branches on t or hyper-parameters, and at most {most} are written out"
        raise CannotBuild(program.name, form, why)
