"""The step of a rule as LaTeX, in the notation of papers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import cast

from rulec.language.node import Kind, Node, Op, const, name, node
from rulec.language.passes import gradient_of
from rulec.language.rule import Assign, Branch, Rule, Statement, assignments
from rulec.language.text import number_text

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
_LOGIC, _COMPARE, _SUM, _SIGN, _PRODUCT, _TALL, _ATOM = range(1, 8)

#: A piece of LaTeX and how tightly it binds.
_Piece = tuple[str, int]

_INFIX = {
    Op.OR: (r"\lor", _LOGIC), Op.AND: (r"\land", _LOGIC), Op.LT: ("<", _COMPARE), Op.LE: (r"\le", _COMPARE),
    Op.GT: (">", _COMPARE), Op.GE: (r"\ge", _COMPARE), Op.EQ: ("=", _COMPARE), Op.NE: (r"\ne", _COMPARE),
    Op.ADD: ("+", _SUM), Op.SUB: ("-", _SUM), Op.MUL: ("", _PRODUCT), Op.MOD: (r"\bmod", _PRODUCT),
    Op.MATMUL: (r"\,@\,", _PRODUCT),
}  # fmt: skip

_AROUND = {
    Op.SQRT: r"\sqrt{%s}", Op.CBRT: r"\sqrt[3]{%s}", Op.ABS: r"\left|%s\right|",
    Op.FLOOR: r"\left\lfloor %s\right\rfloor",
}  # fmt: skip

_CALLED = {
    Op.EXP: r"\exp", Op.LOG: r"\log", Op.TANH: r"\tanh", Op.SIGMOID: r"\sigma", Op.MINIMUM: r"\min",
    Op.MAXIMUM: r"\max", Op.SIN: r"\sin", Op.COS: r"\cos", Op.ATAN2: r"\operatorname{atan2}",
}  # fmt: skip


def rule_to_latex(rule: Rule) -> str:
    """The step as an aligned block: new states with subscript t, old states with t-1, and the update of p last."""
    printed = _Lines(rule)
    lines = [*printed.passes(), *printed.block(rule.whole_step, ())]
    if rule.evaluate is not None:
        last = {key: _name(key, "t") for key in (*rule.state, "p")}
        lines.append(rf"\text{{evaluated at}}\quad & {_Printer(last).latex(rule.evaluate)}")
    return "\\begin{aligned}\n" + " \\\\\n".join(f"  {line}" for line in lines) + "\n\\end{aligned}"


class _Lines:
    """Walks the lines of a step. `names` has the LaTeX of every name at the current line."""

    def __init__(self, rule: Rule) -> None:
        self.names = {key: _name(key, "t-1") for key in (*rule.state, "p")}
        self.names |= {"g": "g_{t}", "grad": r"\nabla_{t}"}
        self.names |= {gradient_of(key): rf"g_{{t}}^{{({_escaped(key)})}}" for key in rule.passes}
        self.count: dict[str, int] = {}
        self.rule = rule

    def passes(self) -> list[str]:
        """A line for each point at which the model is evaluated again."""
        lines = []
        for key, each in self.rule.passes.items():
            point = rf"p_{{t}}^{{({_escaped(key)})}} &= {_Printer(self.names).latex(each.point)}"
            when = "" if each.when is None else rf"\quad\text{{if }} {_Printer(self.names).latex(each.when)}"
            lines.append(point + when)
        return lines

    def block(self, step: Sequence[Statement], after: Sequence[Statement]) -> list[str]:
        """The LaTeX lines of `step`; the statements `after` come behind it."""
        lines: list[str] = []
        for index, line in enumerate(step):
            later = (*step[index + 1 :], *after)
            if isinstance(line, Assign):
                lines.append(self._assign(line, later))
                continue
            lines.append(rf"\text{{if }} & {_Printer(self.names).latex(line.condition)}\text{{:}}")
            lines += self._arms(line, later)
        return lines

    def _arms(self, line: Branch, later: tuple[Statement, ...]) -> list[str]:
        """The lines of both arms. What either arm assigns has its new name behind them."""
        before, count = dict(self.names), dict(self.count)
        lines = [_indented(text) for text in self.block(line.then, later)]
        if line.otherwise:
            lines.append(r"\text{else:} &")
            then, then_count = self.names, self.count
            self.names, self.count = before.copy(), count
            lines += [_indented(text) for text in self.block(line.otherwise, later)]
            self.names |= {key: text for key, text in then.items() if text != before.get(key)}
            self.count |= then_count
        return lines

    def _assign(self, line: Assign, later: tuple[Statement, ...]) -> str:
        value = _Printer(self.names).latex(line.value)
        if line.value.op is Op.CALL:
            return rf"{_name(f'{line.target}.direction')}, {_name(f'{line.target}.p')} &= {value}"
        self.count[line.target] = number = self.count.get(line.target, 0) + 1
        final = all(other.target != line.target for other in assignments(later))
        self.names[line.target] = _name(line.target, "t", 0 if final else number)
        return f"{self.names[line.target]} &= {value}"


def _is_squared(value: Node) -> bool:
    """Whether a value is `c*x*x`: papers write `c` times the square of `x`."""
    return value.op is Op.MUL and value.args[0].op is Op.MUL and value.args[0].args[1] is value.args[1]


def _indented(line: str) -> str:
    return rf"\quad {line}"


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
    """Prints expressions. `names` has the LaTeX of each name in them."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = names

    def latex(self, value: Node) -> str:
        """The expression as LaTeX."""
        return self._piece(value)[0]

    def _piece(self, value: Node) -> _Piece:
        if value.op is Op.CONST:
            return _number(cast(float, value.arg))
        if value.op.kind is Kind.LEAF:
            identifier = str(value.arg)
            known = self.names.get(identifier) or ("t" if identifier == "t" else _name(identifier))
            return known, _ATOM if "^" not in known else _TALL
        if value.op in _INFIX:
            return self._infix(value)
        if value.op is Op.WHERE:
            return self._cases(value), _TALL
        if value.op.kind in (Kind.ARITHMETIC, Kind.LOGIC):
            return self._arithmetic(value)
        return self._call(value)

    def _in(self, value: Node, least: int) -> str:
        """The expression in brackets where it binds less tightly than `least`."""
        text, level = self._piece(value)
        return text if level >= least else rf"\left({text}\right)"

    def _infix(self, value: Node) -> _Piece:
        if _is_squared(value):
            value = node(Op.MUL, value.args[0].args[0], node(Op.POW, value.args[1], const(2)))
        symbol, level = _INFIX[value.op]
        left = self._in(value.args[0], _SIGN if value.op is Op.MOD else level)
        right = self._in(value.args[1], level if value.op in (Op.ADD, Op.AND, Op.OR, Op.MUL) else level + 1)
        if self._piece(value.args[1])[1] == _SIGN and level >= _SUM:
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
        return rf"{self._in(first, _ATOM)}^{{{self.latex(second)}}}", _TALL

    def _cases(self, value: Node) -> str:
        rows = []
        while value.op is Op.WHERE:
            condition, then, value = value.args
            rows.append(rf"{self.latex(then)} & \text{{if }} {self.latex(condition)}")
        rows.append(rf"{self.latex(value)} & \text{{otherwise}}")
        return r"\begin{cases} " + r" \\ ".join(rows) + r" \end{cases}"

    def _call(self, value: Node) -> _Piece:
        args = [self.latex(a) for a in value.args]
        if value.op is Op.CALL:
            plain = (None, name("t"), name("p"))
            arguments = [text for text, of, same in zip(args, value.args, plain, strict=True) if of is not same]
            return rf"\operatorname{{{_escaped(str(value.arg))}}}\left({', '.join(arguments)}\right)", _ATOM
        if value.op in _AROUND:
            return _AROUND[value.op] % args[0], _ATOM
        if value.op is Op.RSQRT:
            return rf"\frac{{1}}{{\sqrt{{{args[0]}}}}}", _TALL
        if value.op is Op.TRANSPOSE:
            return rf"{self._in(value.args[0], _ATOM)}^{{\top}}", _TALL
        if value.op is Op.NORM:
            level = "" if value.arg == "tensor" else f",{_level(value, args)}"
            return rf"\left\lVert {args[0]}\right\rVert_{{2{level}}}", _ATOM
        called = _CALLED.get(value.op, rf"\operatorname{{{_escaped(value.op.symbol)}}}")
        if value.op.kind is Kind.REDUCE:
            called, args = f"{called}_{{{_level(value, args)}}}", args[:1]
        return rf"{called}\left({', '.join(args)}\right)", _ATOM


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
