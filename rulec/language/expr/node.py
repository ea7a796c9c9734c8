"""The closed set of operations of the rule language, and the interned nodes of expressions.

Nodes are shared by construction: building the same expression twice gives the same object, so common
subexpressions need no pass of their own, and identity is equality.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Callable, Container, Hashable, Iterable, Iterator
from enum import Enum, auto
from typing import Any


class Kind(Enum):
    """The kind of an operation. Passes and tables of the backends distinguish operations by it."""

    LEAF = auto()
    ARITHMETIC = auto()
    COMPARE = auto()
    LOGIC = auto()
    FUNCTION = auto()
    REDUCE = auto()
    MATRIX = auto()
    RANDOM = auto()
    BITS = auto()
    SHAPE = auto()
    CALL = auto()


class Op(Enum):
    """One operation: its name as written in a rule, and its kind."""

    CONST = ("const", Kind.LEAF)  # arg: the float
    NAME = ("name", Kind.LEAF)  # arg: an identifier of the rule's text; gone after lowering
    HYPER = ("hyper", Kind.LEAF)  # arg: the hyper-parameter's name
    MODEL_HYPER = ("model_hyper", Kind.LEAF)  # arg: a hyper-parameter that must be the same in every group
    STEP = ("t", Kind.LEAF)  # this tensor's own count of updates, from 1; arg: None, "group" or "model"
    FACT = ("fact", Kind.LEAF)  # arg: ndim | numel | rows | cols | machine_eps; of no rule: those of `WORDS` and `ROWS`
    LOAD = ("load", Kind.LEAF)  # arg: a buffer's name; its value before this step
    SCALAR = ("scalar", Kind.LEAF)  # arg: a column of the scalar program's table
    RESULT = ("result", Kind.LEAF)  # arg: the name of a finished reduction or matrix function

    ADD = ("+", Kind.ARITHMETIC)
    SUB = ("-", Kind.ARITHMETIC)
    MUL = ("*", Kind.ARITHMETIC)
    DIV = ("/", Kind.ARITHMETIC)
    POW = ("**", Kind.ARITHMETIC)
    MOD = ("%", Kind.ARITHMETIC)
    FLOORDIV = ("//", Kind.ARITHMETIC)
    NEG = ("neg", Kind.ARITHMETIC)

    LT = ("<", Kind.COMPARE)
    LE = ("<=", Kind.COMPARE)
    GT = (">", Kind.COMPARE)
    GE = (">=", Kind.COMPARE)
    EQ = ("==", Kind.COMPARE)
    NE = ("!=", Kind.COMPARE)

    AND = ("and", Kind.LOGIC)
    OR = ("or", Kind.LOGIC)
    NOT = ("not", Kind.LOGIC)

    WHERE = ("where", Kind.FUNCTION)
    SQRT = ("sqrt", Kind.FUNCTION)
    RSQRT = ("rsqrt", Kind.FUNCTION)
    CBRT = ("cbrt", Kind.FUNCTION)
    ABS = ("abs", Kind.FUNCTION)
    SIGN = ("sign", Kind.FUNCTION)
    EXP = ("exp", Kind.FUNCTION)
    LOG = ("log", Kind.FUNCTION)
    TANH = ("tanh", Kind.FUNCTION)
    SIGMOID = ("sigmoid", Kind.FUNCTION)
    ERF = ("erf", Kind.FUNCTION)
    SIN = ("sin", Kind.FUNCTION)  # lowered to other operations but for values known before a step, as COS
    COS = ("cos", Kind.FUNCTION)
    ATAN2 = ("atan2", Kind.FUNCTION)  # args: y, x; lowered to other operations
    FLOOR = ("floor", Kind.FUNCTION)
    ISFINITE = ("isfinite", Kind.FUNCTION)
    MINIMUM = ("minimum", Kind.FUNCTION)
    MAXIMUM = ("maximum", Kind.FUNCTION)

    # arg: the level that remains. In a rule's text, a level of `PLACED` has its number as a second operand.
    SUM = ("sum", Kind.REDUCE)
    MEAN = ("mean", Kind.REDUCE)
    NORM = ("norm", Kind.REDUCE)
    RMS = ("rms", Kind.REDUCE)
    MIN = ("min", Kind.REDUCE)
    MAX = ("max", Kind.REDUCE)
    COUNT_NONZERO = ("count_nonzero", Kind.REDUCE)

    MATMUL = ("@", Kind.MATRIX)
    TRANSPOSE = ("transpose", Kind.MATRIX)
    EYE = ("eye", Kind.MATRIX)  # args: n; the constants of operations are in `rulec.language.expr.static`
    DIAG = ("diag", Kind.MATRIX)  # the diagonal of a square matrix, per row; the diagonal matrix of a vector
    TRIU = ("triu", Kind.MATRIX)
    TRIL = ("tril", Kind.MATRIX)
    SLICE = ("slice", Kind.MATRIX)  # args: x, start, stop (infinity for the end); arg: "rows" or "cols"
    CONCAT = ("concat", Kind.MATRIX)  # args: a, b; arg: the axis, 0 or 1
    SOLVE = ("solve", Kind.MATRIX)  # args: a, b; arg: the kind of a
    CHOLESKY = ("cholesky", Kind.MATRIX)  # the lower factor
    TOPK = (
        "topk",
        Kind.MATRIX,
    )  # args: a vector of rows or columns, k; 1 where a value is one of the k largest, else 0
    NEWTON_SCHULZ = ("newton_schulz", Kind.MATRIX)  # args: x, steps; arg: the dtype it is computed in, coefficients
    QR = ("qr", Kind.MATRIX)  # the orthogonal factor
    EIGH = ("eigh", Kind.MATRIX)  # the eigenvectors, by ascending eigenvalue
    SINGULAR_VECTORS = ("singular_vectors", Kind.MATRIX)  # args: x, rank; left ones, by descending singular value
    INVERSE_ROOT = ("inverse_root", Kind.MATRIX)  # args: x, order, and an optional addend of each eigenvalue

    # args: at, extents...; arg: the number of the draw in the rule. Lowered, args: at; arg: the number, extents...
    UNIFORM = ("uniform", Kind.RANDOM)
    NORMAL = ("normal", Kind.RANDOM)

    # Of float32 numbers, for values kept in fewer bits: no rule can write these. `count` is of ulps, away from zero.
    AWAY = ("away", Kind.BITS)  # args: x, count; x moved by so many ulps
    ULPS = ("ulps", Kind.BITS)  # args: x, y; the count from y to x, of one sign; 0 where x is NaN
    COARSE = ("coarse", Kind.BITS)  # args: x, count; x moved, and its lowest 16 bits cleared; x where it is not finite
    # args: a buffer, then words that are numbers: those of `WORDS`, the step, the number of the draw, and for a part of
    # a tensor those of `RANGE` or `ROWS`; a random whole number below 2**16 for each element, that depends on the first
    # five words and the element's place in the whole tensor alone
    CHANCE = ("chance", Kind.BITS)

    DIM = ("dim", Kind.SHAPE)  # args: a dimension, counted from the end where negative; gone after lowering
    SPREAD = ("spread", Kind.SHAPE)  # arg: an axis of the batch, see `PARTS`; of no rule: a value of it for the batch
    WIDEN = ("widen", Kind.SHAPE)  # arg: `Axes`; of no rule: a value of fewer axes, for each index of these

    CALL = ("call", Kind.CALL)  # args: input, t; arg: a wrapper's name for the inner rule; gone once there is one

    def __init__(self, symbol: str, kind: Kind) -> None:
        self.symbol = symbol
        self.kind = kind

    def __repr__(self) -> str:
        return f"Op.{self.name}"


#: A reduction `per=` a level leaves one value for each element, row, ...; a state `per:` a level has one for each.
LEVELS = ("element", "row", "col", "matrix", "tensor", "group", "model")

#: Levels with a number: `axis(i)` leaves one value for each index of axis i, `block(n)` one for each block of n.
PLACED = ("axis", "block")

#: Facts of a tensor, known when a kernel is made: its dimensions, its elements, the sides of its matrix view.
FACTS = ("ndim", "numel", "rows", "cols", "machine_eps")


def extent(dimension: int) -> str:
    """The fact of a tensor's extent along a dimension: no rule can write it, but as `dim(i)`."""
    return f"dim{dimension}"


#: Facts of a tensor that its random bits follow from: the halves of the seed, of 16 bits, and the tensor's number.
WORDS = ("seed_low", "seed_high", "number")

#: Facts of a part of a tensor: where its elements lie in the whole tensor, if they are one range, or equal rows. See
#: `rulec.array_api.slices`.
RANGE = ("start_low", "start_high")
ROWS = (*RANGE, "width_low", "width_high", "gap_low", "gap_high")

#: Where counting the size of an expression stops: written out in full, shared parts can double it line by line.
MAX_SIZE = 1 << 40

#: Functions that kernels have of values known before a step alone: of hyper-parameters, `t` and shape facts.
WAVES = (Op.SIN, Op.COS)

BOOLEAN_OPS = frozenset({op for op in Op if op.kind in (Kind.COMPARE, Kind.LOGIC)} | {Op.ISFINITE})


class Node:
    """One interned expression: an operation, its operands, and a constant of its own.

    Build nodes with `node(...)`; never change one. Two nodes are equal exactly when they are the same object. `depth`
    and `size` are of the expression written out in full: a shared part counts each time it is written, up to MAX_SIZE.
    `boolean` tells truth values from numbers.
    """

    __slots__ = ("__weakref__", "arg", "args", "boolean", "depth", "op", "size")

    op: Op
    args: tuple[Node, ...]
    arg: Hashable
    boolean: bool
    depth: int
    size: int

    def __repr__(self) -> str:
        from rulec.language.expr.text import short_text

        return f"<{short_text(self)}>"

    def __copy__(self) -> Node:
        return self

    def __deepcopy__(self, memo: Any) -> Node:
        return self

    def __reduce__(self) -> tuple[Callable[..., Node], tuple[Any, ...]]:
        return node, (self.op, *self.args, self.arg)


_interned: weakref.WeakValueDictionary[Hashable, Node] = weakref.WeakValueDictionary()


def node(op: Op, *args: Any) -> Node:
    """The one node `op(args..., arg)`: leading nodes are operands, a last non-node value is the constant."""
    operands = tuple(a for a in args if isinstance(a, Node))
    rest = [a for a in args if not isinstance(a, Node)]
    arg = rest[0] if rest else None
    # Constants are keyed by their bits: 0.0 and -0.0 differ, and a NaN equals itself.
    key = (op, operands, struct.pack("<d", arg) if isinstance(arg, float) else arg)
    interned = _interned.get(key)
    if interned is None:
        interned = Node()
        interned.op, interned.args, interned.arg = op, operands, arg
        interned.boolean = _boolean(op, operands)
        interned.depth = 1 + max((a.depth for a in operands), default=0)
        interned.size = min(1 + sum(a.size for a in operands), MAX_SIZE)
        interned = _interned.setdefault(key, interned)
    return interned


def const(value: float) -> Node:
    """The constant `value` (a float64)."""
    return node(Op.CONST, float(value))


def name(identifier: str) -> Node:
    """A name of the rule's text, not yet resolved."""
    return node(Op.NAME, identifier)


def is_boolean(value: Node) -> bool:
    """Whether the value is true or false rather than a number."""
    return value.boolean


def _boolean(op: Op, operands: tuple[Node, ...]) -> bool:
    if op is Op.WHERE:
        return operands[1].boolean and operands[2].boolean
    return operands[0].boolean if op is Op.WIDEN else op in BOOLEAN_OPS


def walk(roots: Iterable[Node], ends: Container[Node] = ()) -> Iterator[Node]:
    """Every node under `roots` once, operands before the nodes that use them, in a fixed order.

    The nodes in `ends` are left out, and so are the nodes that stand only under them.
    """
    seen: set[Node] = set()
    for root in roots:
        stack = [(root, False)]
        while stack:
            current, expanded = stack.pop()
            if current in seen or current in ends:
                continue
            if expanded or not current.args:
                seen.add(current)
                yield current
            else:
                stack.append((current, True))
                stack.extend((child, False) for child in reversed(current.args))


def rewrite(roots: Iterable[Node], change: Callable[[Node], Node], memo: dict[Node, Node] | None = None) -> list[Node]:
    """`roots` with `change` applied to every node, operands first; `change` sees rewritten operands.

    `memo` maps nodes to their rewritten forms: these are taken from it, and new ones are added to it.
    """
    roots = list(roots)
    done: dict[Node, Node] = {} if memo is None else memo
    for current in walk(roots, done):
        args = tuple(done[a] for a in current.args)
        same = all(a is b for a, b in zip(args, current.args, strict=True))
        done[current] = change(current if same else node(current.op, *args, current.arg))
    return [done[root] for root in roots]


def names_in(roots: Iterable[Node]) -> list[str]:
    """The names of the rule's text that occur under `roots`, each once, in order."""
    return [str(n.arg) for n in walk(roots) if n.op is Op.NAME]
