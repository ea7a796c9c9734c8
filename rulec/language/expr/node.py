"""The interned nodes of expressions, and the words of levels and facts in them.

Nodes are shared by construction: building the same expression twice gives the same object, so common
subexpressions need no pass of their own, and identity is equality.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Callable, Container, Hashable, Iterable, Iterator
from typing import Any

from rulec.language.expr.ops import WAVES as WAVES
from rulec.language.expr.ops import Kind as Kind
from rulec.language.expr.ops import Op as Op

#: A reduction `per=` a level leaves one value for each element, row, ...; a state `per:` a level has one for each.
LEVELS = ("element", "row", "col", "matrix", "tensor", "group", "model")

#: Levels with a number: `axis(i)` leaves one value for each index of axis i, `block(n)` one for each block of n.
PLACED = ("axis", "block")

#: Numbers of a tensor in its group: its number, from 0, and the group's count.
IN_GROUP = ("tensor", "tensors")

#: Numbers of a tensor in its model: the number of its layer, and the count of layers.
IN_MODEL = ("depth", "depths")

#: Numbers of a tensor, known before a step and to no kernel.
NUMBERS = (*IN_GROUP, *IN_MODEL)

#: Facts of a tensor: its dimensions, its elements, the sides of its matrix view, its dtype, and its numbers.
FACTS = ("ndim", "numel", "rows", "cols", "machine_eps", *NUMBERS)


def extent(dimension: int) -> str:
    """The fact of a tensor's extent along a dimension: no rule can write it, but as `dim(i)`."""
    return f"dim{dimension}"


def dimension_of(fact: object) -> int | None:
    """The dimension of a fact of `extent`; None for any other fact."""
    digits = fact.removeprefix("dim") if isinstance(fact, str) and fact.startswith("dim") else ""
    return int(digits) if digits.isdigit() else None


#: Facts of a tensor that its random bits follow from: the halves of the seed, of 16 bits, and the tensor's number.
WORDS = ("seed_low", "seed_high", "number")

#: Facts of a part of a tensor: where its elements lie in the whole tensor, if they are one range, or equal rows. See
#: `rulec.array_api.slices`.
RANGE = ("start_low", "start_high")
ROWS = (*RANGE, "width_low", "width_high", "gap_low", "gap_high")

#: Where counting the size of an expression stops: written out in full, shared parts can double it line by line.
MAX_SIZE = 1 << 40

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
