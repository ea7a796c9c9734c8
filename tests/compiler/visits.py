"""Rules whose values share parts deeply, and a count of the visits to nodes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

import rulec
from rulec.analysis.accumulate import accumulation
from rulec.analysis.flow import flow_of
from rulec.analysis.linear import LinearForms
from rulec.analysis.scale import constant_scale
from rulec.analysis.storage import storage_of
from rulec.analysis.zero import at_zero
from rulec.cli.show import _passes
from rulec.language.expr.node import Node
from rulec.language.rule import Rule
from rulec.runtime.storage.options import Storage
from rulec.standalone.prose import written
from rulec.tools.compare.lines import keep_lines
from rulec.tools.compare.sides import ReferenceSide
from rulec.tools.display.kernels import costs_of, kernel_source

_SQUARE = "({x} @ transpose({x}) + eye(rows))"

#: Function of the language -> an expression of it, of the shape of `x`.
USES: dict[str, str] = {
    **{f: f"{f}({{x}})" for f in (
        "sqrt", "rsqrt", "cbrt", "abs", "sign", "exp", "log", "log1p", "expm1", "tanh", "sigmoid", "erf", "floor",
        "sin", "cos", "atan",
        "round", "softplus", "sum", "mean", "norm", "rms", "min", "max", "count_nonzero", "variance", "std", "softmax",
        "triu", "tril", "newton_schulz", "qr",
    )},
    **{f: f"{f}({{x}}, 0.5*{{x}})" for f in ("minimum", "maximum", "atan2", "hypot")},
    "isfinite": "where(isfinite({x}), {x}, 0)", "where": "where({x} > 0, {x}, -{x})",
    "clip": "clip({x}, -{x}, {x})", "median": "median({x}, 0.5, {x}*{x})", "dim": "({x}*dim(0))",
    "gram": "matmul({x}, gram({x}, axis=0), axis=0)",
    "matmul": "matmul({x}, eye(cols))", "transpose": "transpose(transpose({x}))", "eye": "(eye(rows) @ {x})",
    "index": "({x}*(1 + index()))",
    "diag": f"(diag(diag({_SQUARE})) @ {{x}})", "concat": "concat({x}, {x})[:rows]",
    "solve": f"solve({_SQUARE}, {{x}})", "cholesky": f"(cholesky({_SQUARE}) @ {{x}})",
    "sort": "sort({x})", "argsort": "({x} + argsort({x}))", "take": "take({x}, argsort({x}))",
    "quantile": "quantile({x}, 0.3)", "topk": 'topk(sum({x}, per="row"), 2)', "eigh": f"(eigh({_SQUARE}) @ {{x}})",
    "singular_vectors": "(singular_vectors({x}, 2) @ transpose(singular_vectors({x}, 2)) @ {x})",
    "inverse_root": f"(inverse_root({_SQUARE}, 4) @ {{x}})", "uniform": "({x} + uniform([rows, cols]))",
    "normal": "({x} + normal([rows, cols]))",
}  # fmt: skip

#: Operator or statement -> an expression of it.
OPERATORS: dict[str, str] = {
    "%": "({x} % (1 + {x}))", "//": "({x} // (1 + {x}))", "**": "({x}**{x})", "slice": "concat({x}[:1], {x}[1:])",
    "logic": "where({x} > 0 and not ({x} < 2*{x} or {x} == 3), {x}, 1)", "per row": 'norm({x}, per="row")',
    "per col": 'mean({x}, per="col")', "per group": 'rms({x}, per="group")', "per model": 'sum({x}, per="model")',
}  # fmt: skip

#: Words of an expression that has a meaning for matrices alone.
_MATRICES = re.compile(r"@|rows|cols|matmul|transpose|tri[ul]|newton|qr\(|\[|dim\(|axis=|topk|per=.(row|col)")

_P, _G = np.ones((3, 4), np.float32), np.full((3, 4), 0.5, np.float32)


def shared_rule(use: str, count: int) -> Rule:
    """A rule of `count` lines that each read the value of the line before several times."""
    lines = ["a0 = g"]
    for k in range(count):
        x = f"a{k}"
        if use == "if":
            lines += [f"if mean({x}) > {k}:", f"  a{k + 1} = {x}*{x}", "else:", f"  a{k + 1} = {x} + {x}"]
        else:
            lines.append(f"a{k + 1} = {use.format(x=x)}*{x} + 0.5*{x}")
    lines += [f"m = 0.9*m + a{count}", f"direction = norm(a{count})*m"]
    of_matrices = "applies_to: ndim == 2\notherwise: sgd\n" if _MATRICES.search(use) else ""
    of_matrices += "view: {flatten: rest}\n" if "axis=0" in use else ""
    body = "".join(f"  {line}\n" for line in lines)
    return rulec.parse(f"name: F\n{of_matrices}state: {{m: 0}}\nstep: |\n{body}")


def _proofs(rule: Rule) -> object:
    flow = flow_of(rule)
    return constant_scale(flow), accumulation(flow, LinearForms()), storage_of(flow), at_zero(flow, lambda *_: False)


def _reference(digits: bool) -> Callable[[Rule], object]:
    def step(rule: Rule) -> object:
        side = ReferenceSide(rule, [_P.astype(float)], {}, *["mpmath"] * digits)
        side.step([_G.astype(float)], {})
        return side.values()

    return step


def _optimizer(rule: Rule) -> object:
    return rulec.array.Optimizer(rule, [_P.copy()], backend="numpy").step([_G])


def _jax(rule: Rule) -> object:
    import jax

    import rulec.jax

    transform: Any = rulec.jax.transform(rule)
    return jax.make_jaxpr(transform.update)(_G, transform.init(_P), _P)


def _source(backend: str) -> Callable[[Rule], object]:
    return lambda rule: kernel_source(rule, backend)


def _files(backend: str) -> Callable[[Rule], object]:
    return lambda rule: written(rule, backend)


#: The ways of a rule through the project.
PATHS: dict[str, Callable[[Rule], object]] = {
    "text": lambda rule: (rule.step_text(), repr(rule), rulec.parse(rule.to_yaml())),
    "latex": lambda rule: rule.latex(),
    "compose": lambda rule: (rule.bind(lr="2*rate"), rule + rulec.load("decay"), rulec.load("clip_by_norm") >> rule),
    "notebook": lambda rule: rule._repr_markdown_(),
    "proofs": _proofs,
    "analysis": lambda rule: str(rule.analysis),
    "passes": lambda rule: _passes(rule, "float32", ""),
    "costs": costs_of,
    "lines": lambda rule: keep_lines(rule, (3, 4)),
    "reference": _reference(False),
    "digits": _reference(True),
    "optimizer": _optimizer,
    "jax": _jax,
    "codes": lambda rule: kernel_source(rule, "cpu", storage=Storage({"m": "int8"})),
    **{f"source of {b}": _source(b) for b in ("cpu", "numpy", "c", "cupy", "triton", "jax", "mlx")},
    **{f"files of {b}": _files(b) for b in ("c", "numpy", "jax", "cupy", "triton")},
}


class TooMany(BaseException):
    """More visits than a test allows. No `except Exception` of the project takes it for an error of its own."""


class Visits:
    """Counts the reads of operands, in place of the attribute `args` of nodes."""

    def __init__(self) -> None:
        self.slot: Any = Node.__dict__["args"]
        self.count, self.most = 0, 0

    def __get__(self, value: Any, kind: Any = None) -> Any:
        self.count += 1
        if self.count > self.most:
            raise TooMany
        return self.slot.__get__(value, kind)

    def __set__(self, value: Any, operands: Any) -> None:
        self.slot.__set__(value, operands)


@contextmanager
def check_visits(most: int) -> Iterator[Visits]:
    """The count of visits within; TooMany where there are more than `most`."""
    visits = Visits()
    visits.most = most
    type.__setattr__(Node, "args", visits)
    try:
        yield visits
    finally:
        type.__setattr__(Node, "args", visits.slot)
