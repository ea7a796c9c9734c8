"""The formats in which each state of a rule may be stored, with or without a sign, and the loss in them.

Everything is proved from the expressions of a step. A state is stored without a sign where it is at least 0 at first
and every step keeps it so, for all gradients and all hyper-parameters in their ranges. The loss follows from the paths
on which a state reaches the parameter: through roots, denominators, differences, signs, decompositions.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, cast

from rulec.analysis.bounds import Bounds, Factor, clipped, factors, names_bounds, signed_step, toward
from rulec.analysis.flow import Line
from rulec.analysis.fold import Fold
from rulec.analysis.linear import LATE, SPACING, Pace, pace, weight
from rulec.formats import UNBIASED
from rulec.formats.format import SPECS
from rulec.language.expr.arithmetic import number_known
from rulec.language.expr.node import LEVELS, Kind, Node, Op, const, name, rewrite, walk
from rulec.language.expr.ops import POSITIVE, having
from rulec.language.expr.static import inside
from rulec.language.hyper import Hyper, resolve_hyper

#: Formats with equal distances between their codes, for a state that may be negative.
LINEAR = tuple(name for name, spec in SPECS.items() if spec.coding[0] == "number")

#: Operations of the sizes of their operands.
_OF_SIZES = having("of_sizes")

#: Formats of four bits.
FOUR_BITS = tuple(name for name, spec in SPECS.items() if spec.bits == 4)

#: The levels of states that are numbers, not arrays.
_NUMBERS = ("tensor", "group", "model")

_EPSILON = 2.0**-23


@dataclass(frozen=True)
class Warned:
    """A sentence about a state, and the formats that it is true of. `loss` names it in short."""

    loss: str
    formats: tuple[str, ...]
    sentence: str

    def __str__(self) -> str:
        others = [key for key in SPACING if key not in self.formats]
        few = len(self.formats) <= len(others)
        many = f"all but {', '.join(others)}" if others else "all formats"
        return f"{self.loss} lost in {', '.join(self.formats) if few else many}"


@dataclass(frozen=True)
class StateStorage:
    """How one state may be stored.

    If `allowed` is false the state stays float32, for the `reason`, a sentence. `unsigned`: the state is never
    below 0, for all inputs. `floor`: a denominator reads the state, so a value other than 0 must not get code zero.
    `refused` are formats that it cannot have besides. `proof` says in a sentence how the sign was proved. `exact` is
    the reason, a sentence, why it cannot be bfloat16 rounded at random either; empty where it can.
    """

    name: str
    allowed: bool
    unsigned: bool
    floor: bool
    refused: tuple[str, ...] = ()
    warned: tuple[Warned, ...] = ()
    reason: str = ""
    proof: str = ""
    exact: str = ""

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is lost in some formats, each a sentence that names them."""
        return tuple(warned.sentence for warned in self.warned)

    def warnings_of(self, format_name: str) -> tuple[str, ...]:
        """The sentences that are true of one format."""
        return tuple(warned.sentence for warned in self.warned if format_name in warned.formats)

    def __str__(self) -> str:
        if not self.allowed:
            return f"float32: {self.reason}"
        parts = ["unsigned" if self.unsigned else "signed"]
        parts += ["with a floor"] if self.floor else []
        parts += [f"not in {', '.join(self.refused)}"] if self.refused else []
        return "; ".join([", ".join(parts), *map(str, self.warned)])


class _State(Protocol):
    @property
    def init(self) -> Node: ...
    @property
    def per(self) -> str: ...
    @property
    def shape(self) -> tuple[Node, ...] | None: ...
    @property
    def storage(self) -> str: ...


class _Rule(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def hyper(self) -> Mapping[str, Hyper]: ...
    @property
    def state(self) -> Mapping[str, _State]: ...
    @property
    def evaluate(self) -> Node | None: ...
    @property
    def skip(self) -> Node | None: ...


class _Flow(Protocol):
    @property
    def rule(self) -> _Rule: ...
    @property
    def taken(self) -> Mapping[str, Node]: ...
    @property
    def assigned(self) -> Mapping[str, Line]: ...


def storage_of(flow: _Flow) -> dict[str, StateStorage]:
    """The storage of every state of a flow, in the order of the rule's states."""
    rule = flow.rule
    unsigned, bounds = not_negative(flow)
    reached = ways(flow, [x for x in (rule.evaluate, rule.skip) if x is not None], bounds)
    hyper = resolve_hyper(rule.hyper, {}, _EPSILON, rule.name)
    return {key: _judged(flow, key, key in unsigned, reached[key], hyper) for key in rule.state}


def not_negative(flow: _Flow) -> tuple[set[str], Bounds]:
    """The states that are at least 0 in every step, by induction, and the bounds of values over them.

    All states with such a first value are assumed at least 0. Those for which a step gives less are taken out, until
    none is.
    """
    names = names_bounds(flow.rule.hyper)
    first = Bounds(names)
    states = {key for key, state in flow.rule.state.items() if first.not_negative(state.init)}
    while True:
        bounds = Bounds({**names, **dict.fromkeys(states, POSITIVE)})
        kept = {key for key in states if bounds.not_negative(flow.taken[key])}
        if kept == states:
            return states, bounds
        states = kept


def _judged(
    flow: _Flow, key: str, unsigned: bool, reached: set[Way], hyper: Mapping[str, float]
) -> StateStorage:  # fmt: skip
    floor = any(INVERSE in way and SIGN not in way for way in reached)
    exact = _exact(flow, key, hyper) or _read_exactly(key, reached)
    reason = exact or _narrow(flow, key)
    warned = () if reason else tuple(_warned(key, unsigned, reached, pace(key, flow.taken[key], hyper)))
    refused = LINEAR if floor and not unsigned else ()
    return StateStorage(key, not reason, unsigned, floor, refused, warned, reason, _proof(flow, key, unsigned), exact)


def _proof(flow: _Flow, key: str, unsigned: bool) -> str:
    if not unsigned:
        return f"{key} was not proved at least 0"
    line = flow.assigned.get(key)
    return f"{key} is at least 0 at first, and {line} keeps it so" if line else f"{key} stays as it is at first"


def _exact(flow: _Flow, key: str, hyper: Mapping[str, float]) -> str:
    """Why a state is kept exactly whatever reads it, as a sentence; empty where it need not be."""
    state = flow.rule.state[key]
    if state.storage:
        return f"the rule says storage: {{{key}: {state.storage}}}"
    if state.shape is None and state.per in _NUMBERS:
        return _per(flow, key)
    if _follows_parameter(flow, key, hyper):
        return f"{key} is a copy or a mean of the parameter, and small steps of it would be lost"
    return f"{key} counts in whole numbers" if _is_count(flow, key) else ""


def _narrow(flow: _Flow, key: str) -> str:
    """Why a state of rows or columns, or of a shape of its own, has no codes, as a sentence; empty for others."""
    if flow.rule.state[key].shape is not None:
        return f"{key} has a shape of its own, not the parameter's"
    return "" if flow.rule.state[key].per == "element" else _per(flow, key)


def _per(flow: _Flow, key: str) -> str:
    level = flow.rule.state[key].per
    return f"{key} is one number for {'the whole model' if level == 'model' else f'each {level}'}"


def _read_exactly(key: str, reached: set[Way]) -> str:
    """Why a state must be exact for the values computed from it, as a sentence; empty where it need not be."""
    words = frozenset().union(*reached)
    if DECOMPOSED in words:
        return f"{key} goes into a matrix decomposition, where a small error becomes a large one"
    if NEGATIVE in words:
        return f"{key} is under a root of a value that was not proved at least 0"
    if DIFFERENCE in words:
        return f"{key} is in a difference in a denominator, and rounded it may make the difference 0"
    return ""


def _follows_parameter(flow: _Flow, key: str, hyper: Mapping[str, float]) -> bool:
    """Whether a state begins as the parameter, has it as a term, or is a mean of it: so it stays where both agree."""
    p = name("p")
    if p in walk([flow.rule.state[key].init]):
        return True
    value = rewrite([flow.taken[key]], lambda part: part, {flow.taken["p"]: p, p: p})[0]
    if weight(value, "p") is const(1) or Fold({key: p}, {}, flow.rule.hyper).fold(value) is p:
        return True
    parts = [weight(value, part) for part in ("p", key)]
    of_parameter, of_state = (None if part is None else number_known(part, {**hyper, "t": LATE}) for part in parts)
    if of_parameter is None or of_state is None or of_parameter == 0:
        return False
    return math.isclose(of_parameter + of_state, 1)


_WHOLE = (Op.ADD, Op.SUB, Op.MUL, Op.NEG, Op.ABS, Op.MINIMUM, Op.MAXIMUM)


def _is_count(flow: _Flow, key: str) -> bool:
    """Whether a state begins as a whole number and every step makes a whole number of it."""
    old, new, init = name(key), flow.taken[key], flow.rule.state[key].init
    return new is not old and old in walk([new]) and _is_whole(init, old) and _is_whole(new, old)


def _is_whole(value: Node, old: Node) -> bool:
    whole: dict[Node, bool] = {}
    for part in walk([value]):
        args = [whole[a] for a in part.args]
        if part.op is Op.CONST:
            whole[part] = isinstance(part.arg, float) and part.arg.is_integer()
        elif part.op is Op.WHERE:
            whole[part] = args[1] and args[2]
        else:
            steady = part.op in (Op.SIGN, Op.FLOOR, Op.COUNT_NONZERO) or part.op.kind in (Kind.COMPARE, Kind.LOGIC)
            whole[part] = part in (old, name("t")) or steady or (part.op in _WHOLE and all(args))
    return whole[value]


def _warned(key: str, unsigned: bool, reached: set[Way], moves: Pace | None) -> Iterable[Warned]:
    slow = moves.too_slow(unsigned) if moves else ()
    if moves and slow:
        what = "adds without decay" if moves.kept == 1 else f"moves by {1 - moves.kept:.2g} of the way at a step"
        yield Warned("small changes", slow, f"{key} {what}, and a change below half of the spacing of codes is lost in "
                           f"{', '.join(slow)}: take {UNBIASED}")  # fmt: skip
    if reached and all(SIGN in way for way in reached):
        yield Warned(
            "sign", FOUR_BITS, f"only the sign of {key} is used, and small values lose it in {', '.join(FOUR_BITS)}"
        )


#: The operations between a value and the parameter, as words: see `ways`.
Way = frozenset[str]

INVERSE, ROOT, SQUARE, DIFFERENCE = "inverse", "root", "square", "difference"
NEGATIVE, SIGN, DECOMPOSED = "negative", "sign", "decomposed"

_DECOMPOSITIONS = (Op.NEWTON_SCHULZ, Op.QR, Op.EIGH, Op.SINGULAR_VECTORS, Op.INVERSE_ROOT, Op.SOLVE, Op.CHOLESKY)
_WIDE = LEVELS[LEVELS.index("tensor") :]


class Step(Protocol):
    """The values after a step: `taken` has them for `p` and every state, over the values before the step."""

    @property
    def taken(self) -> Mapping[str, Node]: ...


def ways(step: Step, read: Iterable[Node], bounds: Bounds) -> dict[str, set[Way]]:
    """State -> the ways on which its stored value reaches the parameter, also through other states.

    `read` are values read besides the parameter's. Each way is a set of words. `inverse`: a denominator. `root`: a
    root, a logarithm or a broken power. `square`: an even power or an absolute value. `difference`: a sum in a
    denominator whose terms may cancel. `negative`: a root of a value that was not proved at least 0. `sign`: a sign or
    a comparison. `decomposed`: a matrix decomposition. A sum over a whole tensor ends denominators and differences, and
    a clip to bounds without a state ends differences.
    """
    states = {key: name(key) for key in step.taken if key != "p"}
    reached = _Reach(bounds, states.values())
    reached.seeds = {value: {Way()} for value in (step.taken["p"], *read)}
    while True:
        modes = reached.walked()
        before = sum(map(len, reached.seeds.values()))
        for key, old in states.items():
            passed = {way - {DIFFERENCE} for way in modes.get(old, ())}
            reached.seeds.setdefault(step.taken[key], set()).update(passed)
        if sum(map(len, reached.seeds.values())) == before:
            return {key: modes.get(old, set()) for key, old in states.items()}


class _Reach:
    """One walk from the results down to the names."""

    def __init__(self, bounds: Bounds, states: Iterable[Node]) -> None:
        self.bounds, self.states = bounds, frozenset(states)
        self.seeds: dict[Node, set[Way]] = {}
        self.products: dict[Node, Counter[Factor]] = {}

    def free(self, values: Iterable[Node]) -> bool:
        """Whether no state stands in the values."""
        return not any(part in self.states for part in walk(values))

    def walked(self) -> dict[Node, set[Way]]:
        """Value -> the ways from it to the seeds."""
        modes = {value: set(ways) for value, ways in self.seeds.items()}
        for value in reversed([*walk(self.seeds)]):
            for way in modes.get(value, ()):
                for part, further in self._parts(value, way):
                    modes.setdefault(part, set()).add(further)
        return modes

    def _parts(self, value: Node, way: Way) -> Iterator[tuple[Node, Way]]:
        """The operands of a value, and the way of each."""
        op, args = value.op, value.args
        if op in (Op.MUL, Op.DIV):
            yield from self._factors(value, way)
        elif op in (Op.ADD, Op.SUB):
            yield from self._terms(value, way)
        elif op is Op.WHERE:
            yield from ((args[0], Way({SIGN})), (args[1], way), (args[2], way))
        elif DIFFERENCE in way and (inside := clipped(value)) and self.free(inside[1:]):
            # The bounds of the rule hold the difference away from 0, also for rounded states.
            yield inside[0], way - {DIFFERENCE}
        elif op is Op.POW:
            yield from ((args[0], way | self._power(*args)), (args[1], way))
        elif op.kind is Kind.REDUCE and op is not Op.MIN and value.arg in _WIDE:
            yield args[0], way & {SIGN, NEGATIVE, DECOMPOSED}
        else:
            further = way | self._words(value)
            yield from ((part, further) for part in args)

    def _words(self, value: Node) -> Way:
        """The words of an operation with one operand, or of a comparison."""
        op = inside(value).op
        if op in _DECOMPOSITIONS:
            return Way({DECOMPOSED})
        if op in (Op.SIGN, Op.ISFINITE, Op.TOPK, Op.ARGSORT) or op.kind is Kind.COMPARE:
            return Way({SIGN})
        if op in (Op.SQRT, Op.RSQRT, Op.LOG):
            undefined = set() if self.bounds.not_negative(value.args[0]) else {NEGATIVE}
            return Way({ROOT, *undefined, *([] if op is Op.SQRT else [INVERSE])})
        return Way({ROOT} if op is Op.CBRT else {SQUARE} if op in _OF_SIZES else ())

    def _power(self, base: Node, exponent: Node) -> Way:
        """The words of a power."""
        below = set() if self.bounds.not_negative(exponent) else {INVERSE}
        number = cast(float, exponent.arg) if exponent.op is Op.CONST else 0.5
        if number.is_integer():
            return Way({*below, *({SQUARE} if number % 2 == 0 else ())})
        return Way({ROOT, *below, *(() if self.bounds.not_negative(base) else {NEGATIVE})})

    def _factors(self, value: Node, way: Way) -> Iterator[tuple[Node, Way]]:
        if value not in self.products:
            self.products[value] = factors(value)
        for (part, below), count in self.products[value].items():
            yield part, way | ({INVERSE} if below else set()) | ({SQUARE} if count > 1 else set())

    def _terms(self, value: Node, way: Way) -> Iterator[tuple[Node, Way]]:
        move = toward(value)
        if move is not None and self.bounds.is_fraction(move.weights):
            yield from ((part, way) for part in (move.base, move.target, *(part for part, _ in move.weights)))
            return
        step = signed_step(value)
        if step is not None and self.bounds.not_negative(value):
            yield from ((part, way) for part in (step.base, *(part for part, _ in step.length)))
            yield step.target, Way({SIGN})
            return
        if INVERSE in way and not way & {SQUARE, SIGN} and self._cancels(value):
            way = (way - {INVERSE, ROOT}) | {DIFFERENCE}
        yield from ((part, way) for part in value.args)

    def _cancels(self, value: Node) -> bool:
        """Whether the terms of a sum may have opposite signs."""
        left, right = value.args
        of = self.bounds
        same = of.not_negative(left) and (of.not_negative if value.op is Op.ADD else of.not_positive)(right)
        return not same and not (
            of.not_positive(left) and (of.not_positive if value.op is Op.ADD else of.not_negative)(right)
        )
