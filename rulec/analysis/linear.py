"""Linearity of values in the gradient of this step, with everything else held fixed."""

from __future__ import annotations

from dataclasses import dataclass

from rulec.language.expr.node import Node, Op, const, name, node, walk

G = name("g")

#: Operations of one operand that are linear in it.
_LINEAR = (Op.NEG, Op.SUM, Op.MEAN, Op.TRANSPOSE)


@dataclass(frozen=True)
class Form:
    """A value as a function of `g`: its value at `g = 0` plus `part`, where it is affine.

    `part` is linear and homogeneous in `g`, and None where the value is free of `g`. `homogeneous` is true where the
    value at `g = 0` is 0. `broken` is the first operation that is not linear, and None for an affine value.
    """

    part: Node | None = None
    homogeneous: bool = False
    broken: Node | None = None

    @property
    def free(self) -> bool:
        """Whether the value does not depend on `g`."""
        return self.part is None and self.broken is None


class LinearForms:
    """Computes the forms of values, each value once."""

    def __init__(self) -> None:
        self.known: dict[Node, Form] = {G: Form(G, homogeneous=True)}

    def form(self, value: Node) -> Form:
        """The form of `value`."""
        for part in walk([value], self.known):
            self.known[part] = self._form(part, [self.known[a] for a in part.args])
        return self.known[value]

    def _form(self, value: Node, args: list[Form]) -> Form:
        broken = next((a.broken for a in args if a.broken is not None), None)
        if broken is not None:
            return Form(broken=broken)
        if all(a.free for a in args):
            return Form(homogeneous=value.op is Op.CONST and value.arg == 0)
        if value.op in (Op.ADD, Op.SUB):
            return _sum(value, args[0], args[1])
        if value.op in _LINEAR:
            return Form(node(value.op, args[0].part, *value.args[1:], value.arg), args[0].homogeneous)
        if value.op in (Op.MUL, Op.MATMUL) and any(a.free for a in args):
            return _product(value, args[0], args[1])
        if value.op is Op.DIV and args[1].free:
            return Form(node(Op.DIV, args[0].part, value.args[1]), args[0].homogeneous)
        if value.op is Op.WHERE and args[0].free:
            arms = [a.part or const(0) for a in args[1:]]
            return Form(node(Op.WHERE, value.args[0], *arms), args[1].homogeneous and args[2].homogeneous)
        return Form(broken=value)


def _sum(value: Node, left: Form, right: Form) -> Form:
    homogeneous = left.homogeneous and right.homogeneous
    if right.part is None:
        return Form(left.part, homogeneous)
    if left.part is None:
        return Form(right.part if value.op is Op.ADD else node(Op.NEG, right.part), homogeneous)
    return Form(node(value.op, left.part, right.part), homogeneous)


def _product(value: Node, left: Form, right: Form) -> Form:
    parts = [form.part or operand for form, operand in zip((left, right), value.args, strict=True)]
    return Form(node(value.op, *parts), left.homogeneous or right.homogeneous)
