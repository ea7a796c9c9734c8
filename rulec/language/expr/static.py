"""The constants of operations: words and numbers of a node, and operands that are known for each shape.

A static operand is an extent, a rank or a bound: an expression of shape facts and static hyper-parameters. A rule's
text has it among the operands. Lowering moves it into the node's constant, so that no table of scalars has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from rulec.language.expr.node import Node, Op, node, walk

#: Operation -> the keywords that its constant has values for, in their order.
SETTINGS: Mapping[Op, tuple[str, ...]] = {
    Op.NEWTON_SCHULZ: ("dtype", "coefficients", "normalize", "form"), Op.SOLVE: ("kind",), Op.CONCAT: ("axis",),
    Op.SLICE: ("axis",), Op.UNIFORM: ("draw",), Op.NORMAL: ("draw",), Op.IN_BLOCKS: ("function", "constant"),
    Op.INDEX: ("template",),
    Op.QUANTILE: ("per", "interpolation"), **dict.fromkeys((Op.SORT, Op.ARGSORT, Op.TAKE), ("per",)),
}  # fmt: skip

#: Operation with static operands -> the place of the first of them among its operands, as in a slice.
STATIC: Mapping[Op, int] = {
    Op.UNIFORM: 1, Op.NORMAL: 1, Op.EYE: 0, Op.SLICE: 1, Op.SINGULAR_VECTORS: 1, Op.IN_BLOCKS: -1,
    Op.MODE_PRODUCT: 2, Op.GRAM: 1,
}  # fmt: skip

#: Function that takes a matrix or each block of its rows -> its operation on one of them.
BLOCKWISE: Mapping[str, Op] = {
    "matmul": Op.MATMUL, "transpose": Op.TRANSPOSE, "solve": Op.SOLVE, "cholesky": Op.CHOLESKY,
    "newton_schulz": Op.NEWTON_SCHULZ, "qr": Op.QR, "eigh": Op.EIGH, "inverse_root": Op.INVERSE_ROOT,
}  # fmt: skip

#: The value of `quantile` between two elements that a rule need not name.
LINEAR = "linear"

#: Functions of the order of elements. Each has a level, of rows, columns, matrices or whole tensors.
ORDERS = frozenset({Op.QUANTILE, Op.SORT, Op.ARGSORT, Op.TAKE})

#: Axis of a matrix -> the level whose elements lie along it.
ALONG_AXIS = {0: "col", 1: "row"}

#: Matrix functions along one dimension of a tensor. In a rule's text their static operand is the dimension; lowered,
#: they have its extent and the numbers of elements before it and after it.
ALONG = frozenset({Op.MODE_PRODUCT, Op.GRAM})

#: The coefficients of `newton_schulz` that a rule need not name: those of Muon.
MUON = "muon"

#: What `newton_schulz` divides its matrix by, where a rule does not say: its norm. The node has no constant for it.
NORM, UNDIVIDED = "norm", "none"

#: Upper bounds of the largest singular value of a matrix over its norm, to divide it by before the iteration. `aol` has
#: one divisor for each row of a wide matrix: the root of the sum of the sizes in its row of the Gram matrix. `schatten`
#: is the root of the norm of the Gram matrix, and `spectral_bound` the geometric mean of the largest row sum and the
#: largest column sum of sizes.
AOL, SCHATTEN, SPECTRAL_BOUND = "aol", "schatten", "spectral_bound"
BOUNDS = (AOL, SCHATTEN, SPECTRAL_BOUND)

#: What a matrix is divided by: a word, a number times its norm, or a word of `BOUNDS` and a number times this bound.
Normalize = str | float | tuple[str, float]

#: How `newton_schulz` is computed: by products with its matrix, which a rule need not name, or with its Gram matrix.
DIRECT, GRAM = "direct", "gram"


def settings(value: Node) -> dict[str, Any]:
    """The keywords of an operation, as its node has them; of one on blocks the function's name and its keywords."""
    constants = dict(zip(SETTINGS.get(value.op, ()), _constants(value), strict=False))
    return {"function": constants["function"], **settings(inside(value))} if value.op is Op.IN_BLOCKS else constants


def _constants(value: Node) -> tuple[Any, ...]:
    """The constants of a node before its static operands."""
    arg = value.arg if isinstance(value.arg, tuple) else (value.arg,)
    return arg[: len(SETTINGS.get(value.op, ()))]


def inside(value: Node) -> Node:
    """The operation on one block, of one on blocks of rows, with the operands as a whole; any other node as it is."""
    if value.op is not Op.IN_BLOCKS:
        return value
    function, constant = _constants(value)
    operands = value.args if is_lowered(value) else value.args[:-1]
    return node(BLOCKWISE[function], *operands, constant)


def matrix_operands(value: Node, count: int) -> int:
    """The number of matrices among the operands: `count`, or for a function of blocks the number of its function."""
    return count if value.op is not Op.IN_BLOCKS else 2 if inside(value).op in (Op.MATMUL, Op.SOLVE) else 1


def letters_of(template: Node) -> str:
    """The letters of the template of an index, in the order of an array's axes: see `rulec.array_api.indices`."""
    names = {str(n.arg) for n in walk([template]) if n.op is Op.NAME}
    return "".join(letter for letter in "bij" if letter in names)


def statics(value: Node) -> tuple[Node, ...]:
    """The static operands of an operation, before and after lowering."""
    if value.op is Op.INDEX:
        return cast(tuple[Node, ...], value.arg)[1:] if is_lowered(value) else ()
    if value.op not in STATIC:
        return ()
    if is_lowered(value):
        return cast(tuple[Node, ...], value.arg)[len(SETTINGS.get(value.op, ())) :]
    return value.args[STATIC[value.op] :]


def is_lowered(value: Node) -> bool:
    """Whether the static operands are in the node's constant."""
    if value.op is Op.INDEX:
        return isinstance(value.arg, tuple)
    arg = value.arg if isinstance(value.arg, tuple) else ()
    return value.op in STATIC and len(arg) > len(SETTINGS.get(value.op, ()))


def lowered(value: Node) -> Node:
    """The operation with its static operands in its constant; any other node as it is."""
    if value.op not in STATIC or is_lowered(value):
        return value
    count = STATIC[value.op]
    return node(value.op, *value.args[:count], (*_constants(value), *value.args[count:]))
