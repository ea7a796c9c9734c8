"""Conversion between the language's expressions and sympy, in both directions.

This is the only module with sympy, imported when it is needed: no kernel depends on it. `rule_to_sympy` gives the new
values of a step as sympy expressions, for proofs.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from fractions import Fraction
from numbers import Real
from typing import Any

from rulec.errors import RuleError
from rulec.extras import needing
from rulec.language.expr.functions import FUNCTIONS, INTERPOLATIONS, KINDS, MAX_DRAWS, SIDES
from rulec.language.expr.names import BASE_NAMES, short
from rulec.language.expr.newton_schulz import SCHEDULES
from rulec.language.expr.node import LEVELS, PLACED, Kind, Node, Op, const, node, walk
from rulec.language.expr.ops import FUNCTIONS as ELEMENTWISE
from rulec.language.expr.ops import SPECS, having
from rulec.language.expr.static import BLOCKWISE, BOUNDS, GRAM, MUON, NORM, UNDIVIDED, inside
from rulec.language.expr.text import number_text
from rulec.language.rule_data import Assign, RuleData, Statement
from rulec.language.source import did_you_mean

#: Most bits of an exact power of numbers.
_MAX_BITS = 4096


#: The most operations of a condition that sympy may simplify.
_LONG = 100


def sympy_module() -> Any:
    """The module sympy; MissingExtra where it is not installed."""
    with needing("an expression of sympy", "sympy"):
        import sympy
    return sympy


def sympy_function(sp: Any, name: str) -> Any:
    """sympy's function of a name; those of C's library are in a module of their own."""
    return getattr(sp, name, None) or getattr(importlib.import_module("sympy.codegen.cfunctions"), name)


class ToSympy:
    """Makes sympy expressions of nodes."""

    def __init__(self) -> None:
        self.sp = sympy_module()
        #: The functions of the records, but for powers: these are limited.
        self.operations: dict[Op, Callable[..., Any]] = {
            op: sympy_function(self.sp, form) if isinstance(form, str) else functools.partial(form, self.sp)
            for op, form in having("sympy").items()
        }
        self.operations[Op.POW] = self._power

    def symbol(self, identifier: str) -> Any:
        """The symbol of a name: a positive integer for counts (`t`, `numel` and so on), real for all others."""
        if identifier in ("t", "ndim", "numel", "rows", "cols"):
            return self.sp.Symbol(identifier, integer=True, positive=True)
        return self.sp.Symbol(identifier, real=True)

    def either(self, condition: Any, a: Any, b: Any) -> Any:
        # Unevaluated: simplifying the branches may divide by zero under conditions that cannot hold. A condition on a
        # choice sympy simplifies even so: for minutes where it is long, or with t as 0, where sqrt(t - 1) is not real.
        if self.sp.count_ops(condition) <= _LONG:
            try:
                return self.sp.Piecewise((a, condition), (b, True), evaluate=False)
            except ValueError:
                pass
        return self.sp.Piecewise((a, self._spread(condition)), (b, True), evaluate=False)

    def _spread(self, condition: Any) -> Any:
        """The condition with each choice of values in it as a choice of conditions."""
        choice = min(condition.atoms(self.sp.Piecewise), key=self.sp.count_ops, default=None)
        if choice is None:
            return condition
        result, others = self.sp.false, self.sp.true
        for value, case in choice.args:
            part = self._spread(condition.xreplace({choice: value}))
            result, others = self.sp.Or(result, self.sp.And(others, case, part)), self.sp.And(others, self.sp.Not(case))
        return result

    def number(self, value: Any) -> Any:
        """A truth value as 1 or 0."""
        return self.either(value, self.sp.Integer(1), self.sp.Integer(0)) if self.is_truth(value) else value

    def truth(self, value: Any) -> Any:
        """A number as a truth value: whether it is not 0."""
        return value if self.is_truth(value) else self.sp.Ne(value, 0)

    def is_truth(self, value: Any) -> bool:
        """Whether a sympy value is a truth value. sympy counts symbols among them, and rules' symbols are numbers."""
        return isinstance(value, self.sp.logic.boolalg.Boolean) and not value.is_Symbol

    def expression(self, value: Node, values: Mapping[str, Any]) -> Any:
        """The sympy expression of a node over named values."""
        done: dict[Node, Any] = {}
        for part in walk([value]):
            done[part] = self._part(part, [done[a] for a in part.args], values)
        return done[value]

    def _part(self, part: Node, args: list[Any], values: Mapping[str, Any]) -> Any:
        if part.op is Op.CONST:
            return self._constant(float(part.arg))  # type: ignore[arg-type]
        if part.op.kind is Kind.LEAF:
            return values.get(str(part.arg), self.symbol(str(part.arg)))
        if part.op.kind is Kind.LOGIC:
            return self.operations[part.op](*map(self.truth, args))
        if part.op is Op.WHERE:
            return self.either(self.truth(args[0]), self.number(args[1]), self.number(args[2]))
        args = list(map(self.number, args))
        if part.op is Op.ISFINITE:
            return self.sp.Ne(self.sp.Function("isfinite")(*args), 0)
        function = self.operations.get(part.op)
        return function(*args) if function else self.sp.Function(_function_name(part))(*args)

    def _power(self, base: Any, exponent: Any) -> Any:
        """A power; of numbers it is exact up to `_MAX_BITS` bits, and beyond them has 50 digits."""
        if base.is_Rational and exponent.is_Rational:
            bits = max(abs(base.p).bit_length(), base.q.bit_length()) * abs(exponent)
            return base**exponent if bits <= _MAX_BITS else self.sp.Float(base, 50) ** exponent
        return base**exponent

    def _constant(self, value: float) -> Any:
        """The author's decimal, exactly: 0.999 is 999/1000."""
        if value in (float("inf"), float("-inf")):
            return self.sp.oo if value > 0 else -self.sp.oo
        exact = Fraction(number_text(value))
        return self.sp.Rational(exact.numerator, exact.denominator)


def _function_name(part: Node) -> str:
    """The name of the undefined function for an operation that sympy lacks: `mean` per row is `mean_row`."""
    if part.op is Op.IN_BLOCKS:
        return f"{_function_name(inside(part))}_block"
    if isinstance(part.arg, tuple):
        return _opaque_name(part.op, part.arg)
    called = "matmul" if part.op is Op.MATMUL else part.op.symbol
    return called if part.arg is None else f"{called}_{part.arg}"


def _opaque_name(op: Op, constants: tuple[Any, ...]) -> str:
    """The name of an operation with constants, without defaults: `newton_schulz_float32`, `solve_upper`."""
    return "_".join([op.symbol, *(str(constant) for constant in constants if constant not in (None, MUON))])


#: Operations without a constant of their own that sympy lacks.
_PLAIN_OPAQUE = (
    Op.DIM, Op.INDEX, Op.TRANSPOSE, Op.EYE, Op.DIAG, Op.TRIU, Op.TRIL, Op.CHOLESKY, Op.TOPK, Op.QR, Op.EIGH,
    Op.SINGULAR_VECTORS, Op.INVERSE_ROOT, Op.GRAM,
    *(op for op in ELEMENTWISE if not SPECS[op].sympy and op is not Op.WHERE),
)  # fmt: skip

#: Operations that sympy lacks, with the constants that have a name there: others cannot be read back.
_NAMED_OPAQUE: tuple[tuple[Op, tuple[Any, ...]], ...] = (
    *(
        (Op.NEWTON_SCHULZ, (dtype, name, *divisor))
        for dtype in (None, *FUNCTIONS["newton_schulz"].choices["dtype"])
        for name in SCHEDULES
        for divisor in ((), (NORM, GRAM), *((word, *form) for word in (UNDIVIDED, *BOUNDS) for form in ((), (GRAM,))))
    ),
    *((Op.QUANTILE, (per, way)) for per in FUNCTIONS["quantile"].choices["per"] for way in INTERPOLATIONS),
    *((op, (per,)) for op in (Op.SORT, Op.ARGSORT, Op.TAKE) for per in FUNCTIONS["sort"].choices["per"]),
    *((Op.SOLVE, (kind,)) for kind in KINDS), *((Op.CONCAT, (axis,)) for axis in (0, 1)),
    *((Op.SLICE, (axis,)) for axis in ("rows", "cols")),
)  # fmt: skip


def _opaque() -> dict[str, Callable[..., Node]]:
    """Name of an undefined function -> a function of its arguments' nodes to its node."""
    functions: dict[str, Callable[..., Node]] = {}
    for op in Op:
        if op.kind is Kind.REDUCE:
            for level in LEVELS[1:]:
                functions[f"{op.symbol}_{level}"] = lambda x, *, op=op, level=level: node(op, x, level)
            for level in PLACED:
                functions[f"{op.symbol}_{level}"] = lambda x, i, *, op=op, level=level: node(op, x, i, level)
        elif op in _PLAIN_OPAQUE:
            functions[op.symbol] = lambda *args, op=op: node(op, *args)
    functions |= {f"index_{side}": lambda n, *, side=side: node(Op.INDEX, n, side) for side in SIDES}
    for op in (Op.UNIFORM, Op.NORMAL):
        for draw in range(MAX_DRAWS):
            functions[f"{op.symbol}_{draw}"] = lambda at, i, j, *, op=op, draw=draw: node(op, at, i, j, draw)
    for op, constants in _NAMED_OPAQUE:
        functions[_opaque_name(op, constants)] = lambda *args, op=op, constants=constants: node(op, *args, constants)
    functions["matmul"] = lambda a, b, *axis: node(Op.MODE_PRODUCT if axis else Op.MATMUL, a, b, *axis)
    return functions | {f"{key}_block": _in_blocks(function) for key, function in functions.items()}


def _in_blocks(function: Callable[..., Node]) -> Callable[..., Node]:
    """The function of blocks of rows, of the function of a matrix; a name without one is an unknown function."""

    def called(*args: Node) -> Node:
        whole = function(*args[:-1])
        names = [key for key, op in BLOCKWISE.items() if op is whole.op]
        if not names:
            raise RuleError(f"{whole.op.symbol} takes no blocks of a matrix")
        return node(Op.IN_BLOCKS, *args, (names[0], whole.arg))

    return called


class FromSympy:
    """Reads sympy expressions through a closed table. `names` has the node of each symbol."""

    def __init__(self, names: Mapping[str, Node]) -> None:
        self.sp = sympy_module()
        self.names = names
        self.opaque = _opaque()
        forms = having("sympy").items()
        self.operations = {sympy_function(self.sp, form): op for op, form in forms if isinstance(form, str)}
        self.done: dict[Any, Node] = {}

    def node(self, value: Any) -> Node:
        """The node of an expression; RuleError for a part outside the rule language."""
        whole = self._sympy(value)
        for part in self.sp.postorder_traversal(whole):
            if part not in self.done and not isinstance(
                part, self.sp.Tuple | self.sp.functions.elementary.piecewise.ExprCondPair
            ):
                self.done[part] = self._part(part)
        return self.done[whole]

    def _sympy(self, value: Any) -> Any:
        """The value as a sympy expression or truth value; RuleError for text and all else but plain numbers."""
        sp = self.sp
        plain = isinstance(value, Real) and not isinstance(value, bool)
        expression = sp.sympify(value, strict=True) if plain else value
        if not isinstance(expression, sp.Expr | sp.logic.boolalg.Boolean):
            raise RuleError(f"a rule is made of sympy's expressions and of numbers, not of {short(str(value))}")
        return expression

    def _part(self, part: Any) -> Node:
        sp = self.sp
        if part.is_Symbol:
            return self._symbol(part.name)
        if part in (sp.oo, -sp.oo) or (part.is_number and part.is_Atom and part.is_real):
            return const(float(part))
        if part in (sp.true, sp.false):
            return node(Op.EQ, const(0), const(0 if part == sp.true else 1))
        if isinstance(part, sp.Piecewise):
            return self._piecewise(part)
        if part.is_Add:
            return self._sum(part)
        if part.is_Mul:
            return self._product(part)
        if part.is_Pow:
            return self._power(part)
        op = self.operations.get(part.func)
        build = self.opaque.get(part.func.__name__) if isinstance(part, sp.core.function.AppliedUndef) else None
        if op is None and build is None:
            raise RuleError(f"sympy's {short(str(part.func.__name__))} is not part of the rule language")
        args = [self.done[a] for a in part.args]
        if op is not None:
            result = node(op, *args[: 2 if len(args) > 1 else 1])
            for arg in args[2:]:
                result = node(op, result, arg)
            return result
        assert build is not None
        try:
            return build(*args)
        except TypeError:
            raise RuleError(f"{part.func.__name__} is given {len(args)} arguments: its number is another") from None

    def _symbol(self, identifier: str) -> Node:
        if identifier not in self.names:
            hint = did_you_mean(identifier, self.names) or ": declare it under state or hyper"
            raise RuleError(f"unknown symbol {short(identifier)}{hint}")
        return self.names[identifier]

    def _piecewise(self, part: Any) -> Node:
        *cases, (last, otherwise) = part.args
        if otherwise != self.sp.true:
            raise RuleError("a Piecewise of a rule has a value everywhere: end it with (value, True)")
        result = self.done[last]
        for value, condition in reversed(cases):
            result = node(Op.WHERE, self.done[condition], self.done[value], result)
        return result

    def _sum(self, part: Any) -> Node:
        """The sum of the terms in sympy's printing order; terms with a minus are subtracted."""
        result: Node | None = None
        for term in sorted(part.as_ordered_terms(), key=lambda x: x.could_extract_minus_sign()):
            negative = bool(term.could_extract_minus_sign())
            value = self._again(-term if negative else term)
            if result is None:
                result = node(Op.NEG, value) if negative else value
            else:
                result = node(Op.SUB if negative else Op.ADD, result, value)
        assert result is not None
        return result

    def _again(self, value: Any) -> Node:
        """The node of an expression that may be new: not a part of the expression being read."""
        return self.done[value] if value in self.done else self.node(value)

    def _product(self, part: Any) -> Node:
        """The product of the factors in sympy's printing order; factors to a negative power are divisors."""
        coefficient, rest = part.as_coeff_Mul()
        if coefficient == -1:
            return node(Op.NEG, self._again(rest))
        factors = ([] if coefficient == 1 else [coefficient]) + list(rest.as_ordered_factors())
        below = [f for f in factors if _is_divisor(f)]
        above = [f for f in factors if not _is_divisor(f)]
        top = self._times([self._again(f) for f in above]) if above else const(1)
        return node(Op.DIV, top, self._times([self._again(1 / f) for f in below])) if below else top

    @staticmethod
    def _times(factors: list[Node]) -> Node:
        result = factors[0]
        for factor in factors[1:]:
            result = node(Op.MUL, result, factor)
        return result

    def _power(self, part: Any) -> Node:
        base, exponent = part.args
        if base == self.sp.E:
            return node(Op.EXP, self._again(exponent))
        if exponent == self.sp.Rational(1, 2):
            return node(Op.SQRT, self._again(base))
        if _is_divisor(part):
            return node(Op.DIV, const(1), self._again(1 / part))
        return node(Op.POW, self._again(base), self._again(exponent))


def _is_divisor(factor: Any) -> bool:
    """Whether a factor is a power with a negative number as exponent."""
    return bool(factor.is_Pow and factor.exp.is_number and factor.exp.is_negative)


def rule_to_sympy(rule: RuleData) -> dict[str, Any]:
    """The new value of each state, and of `direction` or `p`, in symbols of the values before the step.

    Every symbol is real, and `t` is a positive integer. Operations without a sympy function (reductions, matrix
    functions, cbrt, isfinite) are undefined functions, such as `norm_tensor(x)`; `where` is a Piecewise. The
    expressions of a wrapper also have the symbols `inner.direction` and `inner.p`.
    """
    walker = ToSympy()
    values = {key: walker.symbol(key) for key in (*BASE_NAMES, *rule.hyper, *rule.state, *rule.inputs)}
    _run(walker, rule.step, values)
    ends = ("p",) if rule.assigns_parameter else ("direction",)
    return {key: values[key] for key in (*rule.state, *ends)}


def _run(walker: ToSympy, step: tuple[Statement, ...], values: dict[str, Any]) -> None:
    """Runs the lines: `values` gets the new value of each name."""
    for line in step:
        if isinstance(line, Assign):
            values[line.target] = walker.number(walker.expression(line.value, values))
            continue
        condition = walker.truth(walker.expression(line.condition, values))
        then, otherwise = dict(values), dict(values)
        _run(walker, line.then, then)
        _run(walker, line.otherwise, otherwise)
        for key in then.keys() & otherwise.keys():
            same = then[key] == otherwise[key]
            values[key] = then[key] if same else walker.either(condition, then[key], otherwise[key])
