"""The ways on which a state reaches the parameter: through roots, denominators, differences, signs, decompositions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol, cast

from rulec.analysis.bounds import Bounds
from rulec.analysis.products import Factor, clipped, factors, signed_step, toward
from rulec.language.expr.node import LEVELS, Kind, Node, Op, name, walk

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
        op = value.op
        if op in _DECOMPOSITIONS:
            return Way({DECOMPOSED})
        if op in (Op.SIGN, Op.ISFINITE, Op.TOPK) or op.kind is Kind.COMPARE:
            return Way({SIGN})
        if op in (Op.SQRT, Op.RSQRT, Op.LOG):
            undefined = set() if self.bounds.not_negative(value.args[0]) else {NEGATIVE}
            return Way({ROOT, *undefined, *([] if op is Op.SQRT else [INVERSE])})
        return Way({ROOT} if op is Op.CBRT else {SQUARE} if op is Op.ABS else ())

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
