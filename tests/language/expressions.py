"""Random expressions of the rule language, as nodes that a text can give."""

from __future__ import annotations

import functools
from typing import Any

from hypothesis import strategies as st

from rulec.language.expr.arithmetic import NUMPY, ConstantError, constant, number_known
from rulec.language.expr.counts import Level
from rulec.language.expr.functions import FUNCTIONS, KINDS
from rulec.language.expr.newton_schulz import SCHEDULES
from rulec.language.expr.node import LEVELS, WAVES, Kind, Node, Op, const, name, node
from rulec.language.expr.ops import FUNCTIONS as ELEMENTWISE
from rulec.language.expr.ops import SPECS
from rulec.language.expr.static import BLOCKWISE

#: Names that the expressions may mention.
NAMES = ("g", "p", "t", "m", "beta1", "adam.v", "rows")

_BINARY = [op for op in Op if op.kind is Kind.ARITHMETIC and op is not Op.NEG] + [Op.MATMUL]
_COMPARE = [op for op in Op if op.kind is Kind.COMPARE]
_UNARY = [
    *(op for op in ELEMENTWISE if SPECS[op].arity == 1), Op.TRANSPOSE, Op.QR, Op.EIGH, Op.DIAG, Op.TRIU, Op.TRIL,
    Op.CHOLESKY,
]  # fmt: skip
_OF_TWO = [op for op in ELEMENTWISE if SPECS[op].arity == 2]
#: Functions of one number, in kernels too.
_OF_ANY = [op for op in _UNARY if op.kind is Kind.FUNCTION and op not in WAVES]
_REDUCE = [op for op in Op if op.kind is Kind.REDUCE]
_DTYPES = (None, *FUNCTIONS["newton_schulz"].choices["dtype"])

numbers = st.floats(allow_nan=False).map(const) | st.integers(-(10**18), 10**18).map(const)


def negated(value: Node) -> Node:
    """A minus before a value, as the parser reads it: before a number it is the number's own."""
    return const(-float(value.arg)) if value.op is Op.CONST else node(Op.NEG, value)  # type: ignore[arg-type]


#: Counts: what a call takes has to be possible where it is a number.
_counts = st.integers(1, 9).map(const) | st.sampled_from(NAMES).map(name)

_schedules = st.sampled_from([*SCHEDULES, ((3.0, -1.5, 0.25), (1.5, -0.5, 0.0))])
_iterations = st.tuples(st.sampled_from(_DTYPES), _schedules) | st.tuples(
    st.sampled_from(_DTYPES),
    _schedules,
    st.sampled_from(["none", 1.02, 3.0, "aol", ("schatten", 1.02), "spectral_bound"]),
)
_iterations |= st.tuples(st.sampled_from(_DTYPES), _schedules, st.sampled_from(["norm", "none", 1.02]), st.just("gram"))
_levels = st.tuples(st.sampled_from(FUNCTIONS["sort"].choices["per"]))
_quantiles = st.tuples(*(st.sampled_from(words) for words in FUNCTIONS["quantile"].choices.values()))


def _built(op: Op, *args: Any) -> Node:
    """The node, or one where no float64 would hold it."""
    operands = [number_known(a, {}) for a in args if isinstance(a, Node)]
    if op in NUMPY and None not in operands:
        try:
            constant(op, [x for x in operands if x is not None])
        except ConstantError:
            return const(1)
    return node(op, *args)


def _in_blocks(function: str, x: Node, rows: Node) -> Node:
    """A function of the blocks of a matrix, with 4 as its other operands."""
    called = FUNCTIONS[function]
    return called(x, *[const(4)] * (len(called.arguments) - 1), per=Level("block", rows))


def _larger(inner: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
    return st.one_of(
        st.builds(_built, st.sampled_from(_BINARY), inner, inner),
        st.builds(_built, st.sampled_from(_COMPARE), inner, inner),
        st.builds(_built, st.sampled_from([Op.AND, Op.OR]), inner, inner),
        st.builds(_built, st.just(Op.NOT), inner),
        inner.map(negated),
        st.builds(_built, st.sampled_from(_UNARY), inner),
        st.builds(_built, st.sampled_from(_OF_TWO), inner, inner),
        st.builds(_built, st.just(Op.SINGULAR_VECTORS), inner, _counts),
        st.builds(FUNCTIONS["inverse_root"], inner, inner, eps=inner),
        st.builds(_built, st.just(Op.WHERE), inner, inner, inner),
        st.builds(_built, st.sampled_from(_REDUCE), inner, st.sampled_from(LEVELS[1:])),
        st.builds(_built, st.sampled_from([Op.SORT, Op.ARGSORT]), inner, _levels),
        st.builds(_built, st.just(Op.TAKE), inner, st.sampled_from(NAMES).map(name), _levels),
        st.builds(_built, st.just(Op.QUANTILE), inner, st.sampled_from(NAMES).map(name), _quantiles),
        st.builds(_built, st.just(Op.NEWTON_SCHULZ), inner, _counts, _iterations),
        st.builds(
            _built, st.just(Op.SLICE), inner, st.just(const(0)), _counts, st.sampled_from([("rows",), ("cols",)])
        ),
        st.builds(_built, st.just(Op.SOLVE), inner, inner, st.sampled_from([(kind,) for kind in KINDS])),
        st.builds(_built, st.just(Op.CONCAT), inner, inner, st.sampled_from([(0,), (1,)])),
        st.builds(_built, st.just(Op.MODE_PRODUCT), inner, inner, _counts),
        st.builds(_built, st.just(Op.GRAM), inner, _counts),
        st.builds(_built, st.just(Op.EYE), _counts),
        st.builds(_in_blocks, st.sampled_from([*BLOCKWISE]), inner, _counts),
        st.builds(_built, st.sampled_from([Op.UNIFORM, Op.NORMAL]), inner, _counts, _counts, st.integers(0, 9)),
    )


#: Anything a step may say on the right of an equals sign.
expressions: st.SearchStrategy[Node] = st.recursive(numbers | st.sampled_from(NAMES).map(name), _larger, max_leaves=25)


@functools.cache
def arithmetic(names: tuple[str, ...], leaves: int = 12) -> st.SearchStrategy[Node]:
    """Elementwise expressions of numbers of ordinary size over these names."""
    ordinary = st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0, -1.0, 0.1, -0.25, 10.0]).map(const)

    def larger(inner: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
        truth = st.builds(_built, st.sampled_from(_COMPARE), inner, inner)
        return st.one_of(
            st.builds(_built, st.sampled_from([Op.ADD, Op.SUB, Op.MUL, Op.DIV]), inner, inner),
            st.builds(_built, st.sampled_from([Op.ADD, Op.SUB, Op.MUL]), inner, truth),
            st.builds(_built, st.just(Op.POW), inner, st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0, -1.0, 4.0]).map(const)),
            st.builds(_built, st.sampled_from([Op.MOD, Op.FLOORDIV]), inner, ordinary),
            st.builds(_built, st.sampled_from(_OF_ANY), inner),
            st.builds(_built, st.sampled_from(_OF_TWO), inner, inner),
            st.builds(_built, st.just(Op.WHERE), truth, inner, inner),
            st.builds(_built, st.sampled_from([Op.AND, Op.OR]), truth, truth),
            st.builds(_built, st.just(Op.NOT), truth),
            st.builds(_built, st.just(Op.WHERE), inner, truth, inner),
            inner.map(negated),
            truth,
        )

    return st.recursive(ordinary | st.sampled_from(names).map(name), larger, max_leaves=leaves)
