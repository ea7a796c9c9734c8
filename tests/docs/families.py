"""The families of the library's rules: read off their expressions, but for the rules that `NAMED` names."""

from __future__ import annotations

import rulec
from rulec.analysis.flow import flow_of
from rulec.analysis.structure import uses_matrices
from rulec.language.compose.wrap import iterates
from rulec.language.expr.node import Node, Op, walk
from rulec.language.rule import Rule
from rulec.language.rule_data import assignments

#: The families in the order of the page, each with a sentence.
FAMILIES = {
    "Gradient descent and momentum": "No element of the step is divided by a state.",
    "Adaptive": "The step is divided by a root of squares of gradients, element by element.",
    "Sign": "The step has the sign of the gradient or of a mean of it.",
    "Factored": "Second moments are kept for rows, columns or tensors, and not for elements.",
    "Learning-rate-free": "The path, the loss or a bet decides the size of the step.",
    "Matrix, orthogonalized": "The step of a matrix is made orthogonal by an iteration of products.",
    "Matrix, decomposed": "The step of a matrix is whitened, rotated or projected by a decomposition.",
    "Clipping and normalization": "Transforms that bound or rescale what comes in.",
    "Other transforms": "Parts to be composed with rules.",
    "Wrappers": "They are put around another rule.",
}

#: Rules whose expressions do not tell their family.
NAMED = {
    "Gradient descent and momentum": (
        "cautious_sgdw", "exponentiated_gradient", "larc", "lars", "nag_gs", "nsgdm", "proximal_sgd", "scion_col",
        "scion_row",
    ),
    "Adaptive": ("ftrl", "rda", "rmsprop_tf"),
    "Sign": ("cautious_lion", "emofact", "emolynx", "sign_laprop"),
    "Factored": ("sm3", "sm3_axes"),
    "Learning-rate-free": (
        "adaptive_sgd", "adgd", "alig", "cocob", "dadapt_adagrad", "dadapt_adam", "dadapt_adan", "dadapt_lion",
        "dadapt_sgd", "dog", "dowg", "ldog", "momo", "momo_adam", "polyak_sgd", "prodigy",
    ),
}  # fmt: skip

#: The words of names of transforms that bound or rescale.
_RESCALES = ("clip", "norm", "trust_ratio", "centralize", "rms")

_SMALL = ("row", "col", "tensor", "axis", "block", "matrix")


def families() -> dict[str, list[str]]:
    """Family -> the names of its rules, for the families that have any."""
    found: dict[str, list[str]] = {family: [] for family in FAMILIES}
    for name in rulec.rules():
        found[family_of(name)].append(name)
    return {family: names for family, names in found.items() if names}


def family_of(name: str) -> str:
    """The family of a rule of the library."""
    rule = rulec.load(name)
    named = next((family for family, names in NAMED.items() if name in names), None)
    if named is not None:
        return named
    if rule.wraps:
        return "Wrappers"
    folder, _, stem = name.rpartition("/")
    if folder:
        return "Clipping and normalization" if any(word in stem for word in _RESCALES) else "Other transforms"
    if uses_matrices(flow_of(rule)):
        return "Matrix, orthogonalized" if iterates(rule) else "Matrix, decomposed"
    return _of_elements(rule)


def _of_elements(rule: Rule) -> str:
    squares = [key for key, state in rule.state.items() if state.per != "element" and _squared(rule, key)]
    whole = [key for key, state in rule.state.items() if state.per == "element" and _squared(rule, key)]
    if squares and (not whole or all(rule.state[key].condition is not None for key in whole)):
        return "Factored"
    if whole or squares:
        return "Adaptive"
    return "Sign" if _has(_values(rule), Op.SIGN) else "Gradient descent and momentum"


def _squared(rule: Rule, key: str) -> bool:
    """Whether a state takes in squares, which the step reads as a divisor or under a root."""
    lines = [line.value for line in assignments(rule.step) if line.target == key]
    squares = _has(lines, Op.MUL, Op.POW, Op.MAXIMUM, Op.ABS)
    return squares and any(_reads(divisor, key, rule) for divisor in _divisors(rule))


def _divisors(rule: Rule) -> list[Node]:
    parts = [*walk(_values(rule))]
    return [part.args[1] for part in parts if part.op is Op.DIV] + [
        part.args[0] for part in parts if part.op is Op.SQRT
    ]


def _reads(value: Node, key: str, rule: Rule) -> bool:
    """Whether a value reads a state, also through the lines of the step."""
    lines = {line.target: line.value for line in assignments(rule.step) if line.target not in rule.state}
    seen, pending = set[str](), [value]
    while pending:
        for part in walk([pending.pop()]):
            name = str(part.arg) if part.op is Op.NAME else ""
            if name == key:
                return True
            if name in lines and name not in seen:
                seen.add(name)
                pending.append(lines[name])
    return False


def _values(rule: Rule) -> list[Node]:
    return [line.value for line in assignments(rule.step)]


def _has(values: list[Node], *ops: Op) -> bool:
    return any(part.op in ops for part in walk(values))
