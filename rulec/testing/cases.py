"""The cases of the conformance suite: shapes, values, hyper-parameters, and rules, some of a single operation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

import rulec
from rulec.compiler.ir import Program
from rulec.compiler.layout import is_viewed
from rulec.compiler.pipeline import compile
from rulec.compiler.routing import Router
from rulec.compiler.view import view_of
from rulec.errors import HyperError, RuleError
from rulec.language.expr.node import WAVES, Kind, Op
from rulec.language.expr.ops import SPECS
from rulec.language.rule import Rule
from rulec.language.statistics import NORMS
from rulec.testing.interval import Array

#: A scalar, empty and one-element tensors, two alike, and some that end within a vector or a block.
SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (7,), (64, 3), (0,), (7,), (1000,), (33, 65))

#: More for rules with matrices: batches of them, tall and wide ones, and some without elements.
MATRIX_SHAPES: tuple[tuple[int, ...], ...] = (*SHAPES, (3, 5, 2), (4, 3, 2, 5), (0, 4), (3, 0), (2, 9, 40))

#: A tensor large enough for several chunks, and a small one after it.
LARGE_SHAPES: tuple[tuple[int, ...], ...] = ((301, 250), (7,))

#: Hard values for operations: zeros, infinities, NaN, the ends of the formats, halves, and ordinary numbers.
SPECIAL: tuple[float, ...] = (
    0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.0, 3.0, -3.0, 2.5, 0.3333333432674408, -10.699999809265137, 100.0, -88.0,
    1e-3, -1e-6, 1e30, -1e30, 3.4e38, -3.4e38, 1.2e-38, -1.2e-38, 1e-40, -1e-40, 1e-45, np.inf, -np.inf, np.nan,
)  # fmt: skip


#: Statistics with each reduction, of what a step reads and computes, for any rule.
STATISTICS: Mapping[str, str] = {
    **NORMS, "largest": "max(abs(update))", "least": 'min(g, per="row")', "means": 'mean(update*g, per="col")',
}  # fmt: skip


@dataclass(frozen=True)
class Bucket:
    """The tensors of one kernel: their rule, its program, and whether their matrices are transposed in memory."""

    rule: Rule
    program: Program
    transposed: bool
    shapes: list[tuple[int, ...]]


def loaded(name: str) -> Rule:
    """A rule of the library; a wrapper is put around Adam."""
    rule = rulec.load(name)
    return rule(*[rulec.load("adam")] * len(rule.wraps)) if rule.wraps else rule


def buckets_of(rule: Rule, shapes: Sequence[tuple[int, ...]]) -> list[Bucket]:
    """The buckets of a rule for tensors of these shapes, as far as the rule runs on them.

    A rule with branches decided before each step has two programs: with all of them taken, and with none.
    """
    router = Router(rule)
    buckets: dict[tuple[int, bool], Bucket] = {}
    for shape in shapes:
        try:
            routed = router.choose(shape, ())
            view = view_of(routed, shape)
            program = compile(routed, view.facts)
        except RuleError:
            continue
        for version in versions(program, view.facts):
            transposed = view.transposed and is_viewed(version)
            bucket = buckets.setdefault((id(version), transposed), Bucket(routed, version, transposed, []))
            bucket.shapes.append(shape)
    return list(buckets.values())


def versions(program: Program, facts: Mapping[str, float]) -> list[Program]:
    """The program; or with branches decided before a step, the two with all of them taken and with none."""
    if not program.predicates:
        return [program]
    outcomes = [{place: taken for place, _ in program.predicates} for taken in (True, False)]
    return [compile(program.rule, facts, assumed=outcome) for outcome in outcomes]


def parameters(shapes: Sequence[tuple[int, ...]], seed: int) -> list[Array]:
    """Parameters of ordinary size, in float64."""
    random = np.random.default_rng([seed, 1])
    return [np.asarray(random.standard_normal(shape)) for shape in shapes]


def gradients(shapes: Sequence[tuple[int, ...]], seed: int, special: bool = False) -> dict[int, Array]:
    """A gradient for each tensor, in float64: of its own size, with some zeros; if `special`, with NaN and infinity."""
    random = np.random.default_rng([seed, 2])
    drawn = {}
    for i, shape in enumerate(shapes):
        gradient = np.asarray(random.standard_normal(shape) * 10.0 ** random.uniform(-3, 1))
        flat = gradient.reshape(-1)
        flat[::11] = 0.0
        if special:
            flat[::5], flat[1::5], flat[2::5] = np.nan, np.inf, -np.inf
        drawn[i] = gradient
    return drawn


def hyper_values(rule: Rule, count: int) -> list[dict[str, float]]:
    """Hyper-parameters for each of `count` tensors: different learning rates, and 0.01 for a default of 0 if allowed.

    A value of 0 would hide a term of the rule.
    """
    hyper = rule.standalone().hyper
    common: dict[str, float] = {}
    for name, limits in hyper.items():
        if limits.default == 0.0:
            try:
                common[name] = limits.check(name, 0.01, rule.name)
            except HyperError:
                continue  # its range has no room: the default stands
    rate = hyper["lr"].default if "lr" in hyper else None
    if not isinstance(rate, float):
        return [dict(common) for _ in range(count)]
    return [{**common, "lr": rate * (1 + 0.25 * i)} for i in range(count)]


def operation_rules() -> list[Rule]:
    """A rule for each elementwise operation on `g` and `p`, named by its expression."""
    kinds = (Kind.ARITHMETIC, Kind.COMPARE, Kind.LOGIC, Kind.FUNCTION)
    expressions = [_expression(op) for op in Op if op.kind in kinds]
    # Powers with a special form in a backend, numbers of the compute dtype, and truth values from the table.
    expressions += ["g**0.5", "g**3", "g**-1", "g**-2", "g**-0.5", "abs(g)**0.3", "sqrt(where(g > p, 0.1, 0.3))"]
    expressions += ["sin(g*cos(p))"]
    expressions += ["where(t == 1 and g > p, g, p)", "where(g > p or t > 1, 1.1, p)", "g*where(t == 1, 0.7, p)"]
    return [rulec.parse(f"name: '{text}'\nstep: |\n  p = {text}\n") for text in expressions]


def hostile_rules() -> list[Rule]:
    """Hard rules for printers.

    One overwrites a value before its last use, one has names of printed sources, one stores in some steps only, one
    stores nothing, and one divides by numbers of the scalar table, of every size.
    """
    exchange = "name: Exchange\nstate: {a: p, b: 2}\nstep: |\n  old = p\n  p = p - 0.1*g*a\n  a = b\n  b = old\n"
    names = (
        "name: Names\nhyper: {lr: 0.1, step: 0.5, real: 0.3}\nstate: {i: 0, row: 0, xp: 0, p_stored: 0}\nstep: |\n"
        "  i = step*i + (1 - step)*g\n  row = row + i*i\n  xp = maximum(xp, g)\n  tl = where(xp > g, i + 1, g)\n"
        "  jnp = i/(sqrt(row) + real)\n  p_stored = p_stored*real + jnp\n  float32 = jnp*g\n  m_ = tl + float32\n"
        "  start = m_ - xp\n  self = start*0.5\n  out = self + p_stored\n  direction = self*out\n"
    )
    sometimes = "name: Sometimes\nstate: {m: 0}\nstep: |\n  if t % 2 == 0:\n    m = 0.5*m + g\n    p = p - 0.1*m\n"
    nothing = "name: Nothing\nstep: |\n  p = p\n"
    divisors = ("3", "0.0317", "1.9999998", "1e-5", "1e-9", "1e-37", "1e36", "3e37", "-0.7", "0")
    states, lines = ("a{0}: 0", "a{0} = (g + 0.5*p)*scale**{1}/d{0}")
    quotients = (
        f"name: Quotients\nhyper: {{scale: 1e-9, {', '.join(f'd{i}: {d}' for i, d in enumerate(divisors))}}}\n"
        f"state: {{{', '.join(states.format(i) for i in range(len(divisors)))}}}\nstep: |\n"
        + "".join(f"  {lines.format(i, i % 5)}\n" for i in range(len(divisors)))
        + "  p = sqrt(abs(p))/d0\n"
    )
    return [rulec.parse(text) for text in (exchange, names, sometimes, nothing, quotients)]


#: Steps with reductions of every level and kind, also of stored values; vectors of numbers and of truth values; scratch
#: for matrix functions; inputs, one of them read in a branch alone; and names of printed sources.
_STAGED = {
    "Tensors": """\
state: {m: 0, low: {init: 0, per: tensor}}
step: |
  m = 0.9*m + g
  size = norm(m)
  low = min(m*p) + 0.5*low
  high = max(p)
  bold = where(size > high, m/size, g*low)
  direction = bold*(1 + sum(abs(bold)))
""",
    "Rows": """\
state: {r: {init: 0, per: row}, w: 0}
step: |
  r = 0.5*r + sum(g*p, per="row")
  c = max(g, per="col") - min(p*p, per="col")
  w = w*min(p, per="row") + r
  u = g*sum(g, per="col") - max(g - p, per="row") + c
  wide = r > mean(u, per="matrix")
  direction = where(wide, u, p) + w*rms(u, per="row")
""",
    "Matrices": """\
state: {m: 0}
inputs: {h: like p}
applies_to: ndim >= 2
otherwise: sgd
step: |
  m = 0.5*m + g*h
  o = newton_schulz(m + p, steps=5, dtype="float64")
  noise = normal([rows, cols], at=t)
  direction = o*max(o, per="row") + noise*h
""",
    "Linear": """\
state: {s: {init: 0, shape: [rows, rows]}}
applies_to: ndim >= 2
otherwise: sgd
step: |
  s = s + 0.5*(g @ transpose(g)) + eye(rows)
  l = cholesky(s)
  x = solve(transpose(l), solve(l, g, kind="lower"), kind="upper")
  q, r = qr(s + tril(s))
  y = concat(x[:, :1], g[:, 1:], axis=1)
  rows_alone = newton_schulz(g, steps=3, dtype="float64", per=block(1))
  sizes = matmul(g, transpose(g, per=block(1)), per=block(1))
  direction = solve(s, y + g) + q @ r @ g*diag(s) + sum(sizes, per="row")*rows_alone
""",
    "Indices": """\
state: {m: 0, k: {init: 0, per: tensor}}
applies_to: ndim >= 2
otherwise: sgd
step: |
  even = index(per="row") % 2 == 0
  m = 0.5*m + where(even, g, p)*index(-1)
  k = k + sum(where(index() > t, g, 0))
  wave = cos(pi*(2*index(per="row", n=cols) + 1)*index(per="col", n=cols)/(2*cols))
  turned = m @ wave
  direction = turned*(index()/numel) + max(even + t, per="row")
""",
    "Given": """\
inputs: {c: {shape: [cols, cols]}, b: {shape: [rows, 2]}}
state: {m: 0}
applies_to: ndim >= 2
otherwise: sgd
step: |
  m = 0.5*m + g
  s = b @ transpose(b)
  direction = transpose(solve(c + 0.1*eye(cols), transpose(m))) + s @ p*diag(s) + mean(b, per="row")
""",
    "Last": """\
state: {n: {init: 0, per: tensor}, r: {init: 0, per: row}, a: p}
step: |
  old = p
  p = p - 0.1*g*n - a*r
  a = old
  n = norm(p)
  r = max(abs(p), per="row")
""",
    "Axes": """\
state: {r: {init: 0, per: axis(0)}, c: {init: 0, per: axis(-1)}, b: {init: 0, per: axis(1), if: ndim > 2}}
applies_to: ndim >= 1
otherwise: sgd
step: |
  r = 0.5*r + mean(g*p, per=axis(0))
  c = max(g, per=axis(-1)) - 0.5*c
  s = r*c
  if ndim > 2:
    b = b + norm(g, per=axis(1))
    s = s + b
  direction = s + g*dim(-1) + max(abs(r))
""",
    "Blocks": """\
state: {v: {init: 0, per: block(dim(-1))}, m: 0}
applies_to: ndim >= 1 and numel > 0
otherwise: sgd
step: |
  v = 0.5*v + norm(g, per=block(dim(-1)))
  m = 0.5*m + g/(1 + v)
  direction = m + min(p, per=block(dim(-1)))
""",
    "Ranks": """\
hyper: {lr: 0.1, share: 0.8}
state: {m: 0, q: {init: 0, per: tensor}, r: {init: 0, per: row}}
applies_to: numel > 0
otherwise: sgd
step: |
  m = 0.5*m + g
  q = quantile(abs(m), share)
  r = 0.5*r + median(g - p, per="row")
  low = quantile(p, 0.3, per="col", interpolation="lower")
  direction = clip(m, -q, q) + r*low + median(norm(g, per="row")) + quantile(g, 1, per="matrix")
""",
    "Orders": """\
state: {m: 0, r: {init: 0, per: row}, c: {init: 0, per: tensor}}
applies_to: numel > 0
otherwise: sgd
step: |
  m = 0.5*m + g
  i = argsort(max(p, per="row"), per="matrix")
  r = 0.5*r + take(max(p, per="row"), i, axis=0)
  c = c + take(p, numel//2)
  taken = take(g, i, axis=0) + take(p, argsort(g, per="row"), axis=1) + take(g, argsort(abs(p)))
  direction = sort(m, per="col") + taken + sort(p)*take(g, rows - 1, axis=0) + r*c + argsort(g, per="matrix")
""",
    "Words": """\
hyper: {lr: 0.1, xp: 2}
state: {least: 0}
step: |
  axis = sum(g)
  real = min(p - axis)
  greatest = max(g*real, per="row")
  keepdims = greatest*xp + least
  least = least + keepdims*g
  direction = least - axis
""",
    "Branches": """\
hyper: {h: 0.3}
state: {m: 0, c: 0, r: {init: 0, per: row}}
step: |
  m = 0.5*m + g
  if t % 2 == 0:
    a = 3
    b = max(g, per="row")
    c = 2
    r = 0.5
  else:
    a = m
    b = 0.5
    c = c + min(p, per="col")
    r = r + norm(g, per="row")
  if h > 0.2:
    d = sum(a)
  else:
    d = count_nonzero(b + c)
  direction = m*(1 + d)/numel + mean(a, per="col")*sum(b, per="matrix") + sum(c + 1, per="row")*r*g
""",
    "Seldom": """\
state: {h: 0}
inputs: {c: like p}
step: |
  if t % 2 == 0:
    h = 0.5*h + c
  direction = g/(1 + h*h)
""",
}

#: The rules among them without matrices, or whose matrices need one view.
_PLAIN = ("Tensors", "Axes", "Blocks", "Ranks", "Orders", "Words", "Branches", "Seldom", "Linear")

_VIEWS = ("", "view: {flatten: rest}\n", "view: {short: first}\n")


def staged_rules() -> list[Rule]:
    """Rules of several stages; rules with rows and columns come under every view."""
    viewed = [name for name in _STAGED if name not in _PLAIN]
    texts = [f"name: {name}\n{_STAGED[name]}" for name in _PLAIN]
    texts += [f"name: {name}{i}\n{view}{_STAGED[name]}" for name in viewed for i, view in enumerate(_VIEWS)]
    return [rulec.parse(text) for text in texts]


def _expression(op: Op) -> str:
    """An operation on `g` and `p` as text, with numbers for truth values."""
    if op.kind is Kind.COMPARE:
        return f"where(g {op.symbol} p, g, p)"
    if op is Op.NOT:
        return "where(not g > p, g, p)"
    if op.kind is Kind.LOGIC:
        return f"where(g > p {op.symbol} g > 1, g, p)"
    special = {Op.NEG: "-g", Op.WHERE: "where(g, p, 2*p)", Op.ISFINITE: "where(isfinite(g), p, 1)"}
    if op in WAVES:
        return f"g*{op.symbol}(t) + p"
    if op in special:
        return special[op]
    if op.kind is Kind.ARITHMETIC:
        return f"g {op.symbol} p"
    return f"{op.symbol}(g, p)" if SPECS[op].arity == 2 else f"{op.symbol}(g)"
