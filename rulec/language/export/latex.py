"""The step of a rule as LaTeX, in the notation of papers."""

from __future__ import annotations

import math
import re
from collections.abc import Container, Mapping, Sequence
from typing import TypeGuard, cast

from rulec.language.evaluations import gradient_of
from rulec.language.expr.node import FACTS, Kind, Node, Op, const, name, node, walk
from rulec.language.expr.ops import SPECS
from rulec.language.expr.static import ALONG, LINEAR, ORDERS, settings
from rulec.language.expr.text import number_text
from rulec.language.rule_data import Assign, Branch, RuleData, Statement, assignments

_GREEK = frozenset(
    re.findall(
        r"\w+",
        "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma tau phi chi psi omega "
        "Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega",
    )
)
_SPELT = {"eps": "epsilon", "lambd": "lambda", "lamb": "lambda"}
_ACCENTS = {"hat": r"\hat", "bar": r"\bar", "tilde": r"\tilde"}

# How tightly a piece of LaTeX binds. Fractions and roots are tall; an atom needs no brackets anywhere.
_LOGIC, _COMPARE, _SUM, _SIGN, _ELEMENTS, _PRODUCT, _TALL, _ATOM = range(1, 9)

#: A piece of LaTeX and how tightly it binds.
_Piece = tuple[str, int]

_INFIX = {
    Op.OR: (r"\lor", _LOGIC), Op.AND: (r"\land", _LOGIC), Op.LT: ("<", _COMPARE), Op.LE: (r"\le", _COMPARE),
    Op.GT: (">", _COMPARE), Op.GE: (r"\ge", _COMPARE), Op.EQ: ("=", _COMPARE), Op.NE: (r"\ne", _COMPARE),
    Op.ADD: ("+", _SUM), Op.SUB: ("-", _SUM), Op.MUL: ("", _PRODUCT), Op.MOD: (r"\bmod", _PRODUCT),
    Op.MATMUL: (r"\,", _PRODUCT),
}  # fmt: skip

#: A comparison -> its opposite.
_OPPOSITE = {Op.LT: Op.GE, Op.LE: Op.GT, Op.GT: Op.LE, Op.GE: Op.LT, Op.EQ: Op.NE, Op.NE: Op.EQ}

#: The levels at which a value is one number for a tensor.
_NUMBERS = ("tensor", "model", "group")


def rule_to_latex(rule: RuleData) -> str:
    """The step as an aligned block: new states with subscript t, old states with t-1, and the update of p last.

    Each value that a branch changes is printed as cases. In a rule with products of matrices these have no sign, and
    products of elements have one.
    """
    printed = _Lines(rule)
    lines = [*printed.passes(), *printed.block(rule.whole_step, ())]
    if rule.evaluate is not None:
        last = {key: _name(key, "t") for key in (*rule.state, "p")}
        lines.append(rf"\text{{evaluated at}}\quad & {_Printer(last, printed.numbers).latex(rule.evaluate)}")
    return "\\begin{aligned}\n" + " \\\\\n".join(f"  {line}" for line in lines) + "\n\\end{aligned}"


class _Lines:
    """Walks the lines of a step. `names` has the LaTeX of every name at the current line.

    `numbers` has the names that stand for one number, in a rule with products of matrices; None in any other rule.
    """

    def __init__(self, rule: RuleData) -> None:
        self.names = {key: _name(key, "t-1") for key in (*rule.state, "p")}
        self.names |= {"g": "g_{t}", "grad": r"\nabla_{t}"}
        self.names |= {gradient_of(key): rf"g_{{t}}^{{({_escaped(key)})}}" for key in rule.passes}
        self.count: dict[str, int] = {}
        self.rule = rule
        self.numbers: set[str] | None = None
        if any(part.op in (Op.MATMUL, *ALONG) for part in walk(rule.expressions)):
            states = (key for key, state in rule.state.items() if state.per in _NUMBERS)
            inputs = (key for key, kind in rule.inputs.items() if kind == "scalar")
            self.numbers = {"t", "lr", *FACTS, *rule.hyper, *states, *inputs}

    def passes(self) -> list[str]:
        """A line for each point at which the model is evaluated again."""
        lines = []
        for key, each in self.rule.passes.items():
            point = rf"p_{{t}}^{{({_escaped(key)})}} &= {self._printer.latex(each.point)}"
            lines.append(point + _if(() if each.when is None else (self._printer.piece(each.when),)))
        return lines

    def block(self, step: Sequence[Statement], after: Sequence[Statement], guard: tuple[_Piece, ...] = ()) -> list[str]:
        """The LaTeX lines of `step`, which runs where all of `guard` is true; the statements `after` come behind it."""
        lines: list[str] = []
        for index, line in enumerate(step):
            later = (*step[index + 1 :], *after)
            if isinstance(line, Branch):
                lines += self._branch(line, later, guard)
            elif line.value.op is Op.CALL:
                called = rf"{_name(f'{line.target}.direction')}, {_name(f'{line.target}.p')} &="
                lines.append(f"{called} {self._printer.latex(line.value)}{_if(guard)}")
            else:
                lines.append(self._assign(line.target, [(line.value, guard)], later))
        return lines

    @property
    def _printer(self) -> _Printer:
        return _Printer(self.names, self.numbers)

    def _branch(self, branch: Branch, later: tuple[Statement, ...], guard: tuple[_Piece, ...]) -> list[str]:
        """The lines of a branch: together where its arms assign the same names, and else one arm after the other."""
        arms = _arms(branch)
        conditions = [() if when is None else (self._printer.piece(when),) for _, when in arms]
        targets = {tuple(line.target if _is_plain(line) else "" for line in arm) for arm, _ in arms}
        names = next(iter(targets))
        if len(targets) == 1 and all(names) and len({*names}) == len(names):
            together = zip(*(cast(Sequence[Assign], arm) for arm, _ in arms), strict=True)
            rows = [[(x.value, (*guard, *when)) for x, when in zip(same, conditions, strict=True)] for same in together]
            return [self._assign(name, row, later) for name, row in zip(names, rows, strict=True)]
        opposites = [self._printer.piece(_opposite(when)) for _, when in arms if when is not None]
        lines: list[str] = []
        for index, (arm, _) in enumerate(arms):
            rest = [line for other, _ in arms[index + 1 :] for line in other]
            lines += self.block(arm, (*rest, *later), (*guard, *opposites[:index], *conditions[index]))
        return lines

    def _assign(self, target: str, rows: Sequence[tuple[Node, tuple[_Piece, ...]]], later: Sequence[Statement]) -> str:
        """The line of a value: its expressions, each with its conditions behind those above, and else its old value."""
        texts = [(self._printer.latex(value), when) for value, when in rows]
        old = self.names.get(target)
        if self.numbers is not None:
            is_number = all(_is_number(value, self.numbers) for value, _ in rows)
            (self.numbers.add if is_number else self.numbers.discard)(target)
        self.count[target] = number = self.count.get(target, 0) + 1
        final = all(other.target != target for other in assignments(tuple(later)))
        self.names[target] = name = _name(target, "t", 0 if final else number)
        if old is not None and texts[-1][1]:
            texts.append((old, ()))
        if len(texts) == 1:
            return f"{name} &= {texts[0][0]}{_if(texts[0][1])}"
        return f"{name} &= {_cases([(text, _all(when)) for text, when in texts])}"


def _arms(branch: Branch) -> list[tuple[tuple[Statement, ...], Node | None]]:
    """The arms of `if`, `elif` and `else`, each with its condition, which is None for `else`."""
    arms: list[tuple[tuple[Statement, ...], Node | None]] = [(branch.then, branch.condition)]
    if len(branch.otherwise) == 1 and isinstance(branch.otherwise[0], Branch):
        return arms + _arms(branch.otherwise[0])
    return [*arms, (branch.otherwise, None)] if branch.otherwise else arms


def _is_plain(line: Statement) -> TypeGuard[Assign]:
    return isinstance(line, Assign) and line.value.op is not Op.CALL


def _opposite(condition: Node) -> Node:
    """The condition that is true where this one is false."""
    if condition.op in _OPPOSITE:
        return node(_OPPOSITE[condition.op], *condition.args)
    return condition.args[0] if condition.op is Op.NOT else node(Op.NOT, condition)


def _is_number(value: Node, numbers: Container[str]) -> bool:
    """Whether an expression is one number for a tensor, where the names of `numbers` are."""
    return all(
        part.arg in numbers if part.op is Op.NAME else part.op.kind not in (Kind.MATRIX, Kind.RANDOM)
        for part in walk([value], {part for part in walk([value]) if _remaining(part) in _NUMBERS})
    )


def _all(pieces: Sequence[_Piece]) -> str:
    """All of these conditions; empty where there is none."""
    if len(pieces) == 1:
        return pieces[0][0]
    return r" \land ".join(text if level >= _COMPARE else rf"\left({text}\right)" for text, level in pieces)


def _if(pieces: Sequence[_Piece]) -> str:
    return rf"\quad\text{{if }} {_all(pieces)}" if pieces else ""


def _cases(rows: Sequence[tuple[str, str]]) -> str:
    """Values, each with its condition; the one without a condition is the value otherwise."""
    lines = [rf"{text} & \text{{if }} {when}" if when else rf"{text} & \text{{otherwise}}" for text, when in rows]
    return r"\begin{cases} " + r" \\ ".join(lines) + r" \end{cases}"


def _is_squared(value: Node) -> bool:
    """Whether a value is `c*x*x`: papers write `c` times the square of `x`."""
    return value.op is Op.MUL and value.args[0].op is Op.MUL and value.args[0].args[1] is value.args[1]


def _name(identifier: str, time: str = "", version: int = 0) -> str:
    """A name of the rule as LaTeX at a time: `beta1` is `\\beta_{1}`, `m_hat` at `t` is `\\hat{m}_{t}`.

    `version` counts the assignments of a name that is assigned more than once in one step.
    """
    owner, _, base = identifier.rpartition(".")
    if base == "direction":
        letter, index = r"\Delta", ""
    else:
        *parts, last = base.split("_")
        accent = _ACCENTS.get(last, "") if parts else ""
        letter, index = _letter("_".join(parts) if accent else base)
        letter = f"{accent}{{{letter}}}" if accent else letter
    above = [rf"\mathrm{{{_escaped(owner)}}}"] if owner else []
    above += [f"({version})"] if version else []
    below = [part for part in (index, time) if part]
    return letter + (f"_{{{','.join(below)}}}" if below else "") + (f"^{{{','.join(above)}}}" if above else "")


def _letter(base: str) -> tuple[str, str]:
    """A name as a letter and its index: `mu_next` is mu with the index next."""
    match = re.fullmatch(r"([A-Za-z]+?)(?:_?(\d+)|_(\w+))?", base)
    word = _SPELT.get(match[1], match[1]) if match else ""
    if not match or not (len(word) == 1 or word in _GREEK):
        return rf"\mathrm{{{_escaped(base)}}}", ""
    index = match[2] or (rf"\mathrm{{{_escaped(match[3])}}}" if match[3] else "")
    return rf"\{word}" if word in _GREEK else word, index


def _escaped(text: str) -> str:
    return text.replace("_", r"\_")


class _Printer:
    """Prints expressions. `names` has the LaTeX of each name in them, and `numbers` is as that of `_Lines`."""

    def __init__(self, names: Mapping[str, str], numbers: Container[str] | None = None) -> None:
        self.names, self.numbers = names, numbers
        self.pieces: dict[Node, _Piece] = {}

    def latex(self, value: Node) -> str:
        """The expression as LaTeX."""
        return self.piece(value)[0]

    def piece(self, value: Node) -> _Piece:
        """The expression as LaTeX, and how tightly it binds. Each part is printed once."""
        for part in walk([value], self.pieces):
            self.pieces[part] = self._printed(part)
        return self.pieces[value]

    def _printed(self, value: Node) -> _Piece:
        if value.op is Op.CONST:
            return _number(cast(float, value.arg))
        if value.op.kind is Kind.LEAF:
            identifier = str(value.arg)
            known = self.names.get(identifier) or ("t" if identifier == "t" else _name(identifier))
            return known, _ATOM if "^" not in known else _TALL
        if value.op in _INFIX:
            return self._infix(value)
        if value.op is Op.WHERE:
            return self._where(value), _TALL
        if value.op.kind in (Kind.ARITHMETIC, Kind.LOGIC):
            return self._arithmetic(value)
        return self._call(value)

    def _in(self, value: Node, least: int) -> str:
        """The expression in brackets where it binds less tightly than `least`."""
        text, level = self.piece(value)
        return text if level >= least else rf"\left({text}\right)"

    def _infix(self, value: Node) -> _Piece:
        if _is_squared(value):
            value = node(Op.MUL, value.args[0].args[0], node(Op.POW, value.args[1], const(2)))
        symbol, level = _INFIX[value.op]
        if value.op is Op.MUL and self._is_of_elements(*value.args):
            return rf"{self._in(value.args[0], _ELEMENTS)} \odot {self._in(value.args[1], _ELEMENTS)}", _ELEMENTS
        left = self._in(value.args[0], _SIGN if value.op is Op.MOD else level)
        right = self._in(value.args[1], level if value.op in (Op.ADD, Op.AND, Op.OR, Op.MUL) else level + 1)
        if self.piece(value.args[1])[1] == _SIGN and level >= _SUM:
            right = rf"\left({self.latex(value.args[1])}\right)"
        if value.op is Op.MUL:
            symbol = r"\cdot" if right[:1].isdigit() else r"\,"
        return f"{left} {symbol} {right}", level

    def _arithmetic(self, value: Node) -> _Piece:
        first = value.args[0]
        if value.op is Op.NEG:
            return f"-{self._in(first, _PRODUCT)}", _SIGN
        if value.op is Op.NOT:
            return rf"\lnot {self._in(first, _ATOM)}", _PRODUCT
        second = value.args[1]
        fraction = rf"\frac{{{self.latex(first)}}}{{{self.latex(second)}}}"
        if value.op is Op.FLOORDIV:
            return rf"\left\lfloor {fraction}\right\rfloor", _ATOM
        if value.op is Op.DIV:
            return fraction, _TALL
        power = (r"\odot " if self._is_of_elements(first) else "") + self.latex(second)
        return rf"{self._in(first, _ATOM)}^{{{power}}}", _TALL

    def _is_of_elements(self, *values: Node) -> bool:
        """Whether a product of these operands is elementwise, in a rule with products of matrices."""
        return self.numbers is not None and not any(_is_number(value, self.numbers) for value in values)

    def _where(self, value: Node) -> str:
        rows = []
        while value.op is Op.WHERE:
            condition, then, value = value.args
            rows.append((self.latex(then), self.latex(condition)))
        return _cases([*rows, (self.latex(value), "")])

    def _call(self, value: Node) -> _Piece:
        args = [self.latex(a) for a in value.args]
        if value.op is Op.CALL:
            plain = (None, name("t"), name("p"))
            arguments = [text for text, of, same in zip(args, value.args, plain, strict=True) if of is not same]
            return rf"\operatorname{{{_escaped(str(value.arg))}}}\left({', '.join(arguments)}\right)", _ATOM
        notation = SPECS[value.op].latex if value.op in SPECS else ""
        if "%s" in notation:
            return notation % args[0], _TALL if notation.startswith(r"\frac") else _ATOM
        if value.op is Op.TRANSPOSE:
            return rf"{self._in(value.args[0], _ATOM)}^{{\top}}", _TALL
        if value.op is Op.MODE_PRODUCT:
            # Kolda and Bader's product of a mode multiplies by the columns of a matrix.
            x, q = self._in(value.args[0], _PRODUCT), self._in(value.args[1], _ATOM)
            return rf"{x} \times_{{{args[2]}}} {q}^{{\top}}", _PRODUCT
        if value.op is Op.GRAM:
            x = rf"{{{self._in(value.args[0], _ATOM)}}}_{{({args[1]})}}"
            return rf"{x} \, {x}^{{\top}}", _PRODUCT
        if value.op is Op.NORM:
            level = "" if value.arg == "tensor" else f",{_level(value, args)}"
            return rf"\left\lVert {args[0]}\right\rVert_{{2{level}}}", _ATOM
        if value.op is Op.IN_BLOCKS:
            *args, size = args
            called = rf"\operatorname{{{_escaped(settings(value)['function'])}}}_{{\mathrm{{block}}\,{size}}}"
            return rf"{called}\left({', '.join(args)}\right)", _ATOM
        called = notation or rf"\operatorname{{{_escaped(value.op.symbol)}}}"
        if value.op is Op.INDEX and value.arg is not None:
            called += rf"_{{\mathrm{{{value.arg}}}}}"
        if value.op.kind is Kind.REDUCE:
            called, args = f"{called}_{{{_level(value, args)}}}", args[:1]
        if value.op is Op.QUANTILE:
            level, way = settings(value).values()
            words = "" if way == LINEAR else rf",\mathrm{{{way}}}"
            called, args = rf"Q_{{{args[1]},\mathrm{{{level}}}{words}}}", args[:1]
        elif value.op in ORDERS:
            called += rf"_{{\mathrm{{{settings(value)['per']}}}}}"
        return rf"{called}\left({', '.join(args)}\right)", _ATOM


def _remaining(value: Node) -> str:
    """The level of a reduction or of ordered elements; empty for any other value."""
    if value.op in ORDERS:
        return str(settings(value)["per"])
    return str(value.arg) if value.op.kind is Kind.REDUCE else ""


def _level(value: Node, args: Sequence[str]) -> str:
    """The level of a reduction, with its number."""
    number = f"\\,{args[1]}" if len(args) > 1 else ""
    return rf"\mathrm{{{value.arg}}}{number}"


def _number(value: float) -> _Piece:
    if math.isinf(value):
        return (r"\infty", _ATOM) if value > 0 else (r"-\infty", _SIGN)
    if abs(value) == math.pi:
        return (r"\pi", _ATOM) if value > 0 else (r"-\pi", _SIGN)
    text = number_text(value)
    digits, _, exponent = text.partition("e")
    if exponent:
        power = f"10^{{{int(exponent)}}}"
        scaled = {"1": power, "-1": f"-{power}"}.get(digits, rf"{digits} \cdot {power}")
        return scaled, _SIGN if value < 0 else _TALL if digits == "1" else _PRODUCT
    return text, _SIGN if text.startswith("-") else _ATOM
