"""`rulec bench jax`: steps in JAX on the CPU against optax's, under jit with donated arrays."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence

import rulec
from benchmarks.jax import first as jax_first
from benchmarks.jax.steps import Step, called, ours, theirs, tree
from benchmarks.kernels import threads
from benchmarks.result import Result, Row
from rulec.extras import sentence
from rulec.language.library.load import interop_entries
from rulec.tools.compare.measure import interleaved

FULL, QUICK = 50_000_000, 20_000
ROUNDS, QUICK_ROUNDS = 7, 2

#: The targets, times as fast as optax: of every rule, of AdamW, and of many small leaves.
OF_OPTAX, OF_ADAMW, OF_MANY = 1.0, 1.2, 2.0

#: Many leaves: (leaves, elements of each), and rounds.
MANY = ((1000, 1000), (150, 84_000))
MANY_ROUNDS, FIRST_ROUNDS = 31, 5

STEP = "step, times as fast as optax"
PACKED, ALONE = "step with packed states, times as fast as optax", "step by XLA alone, times as fast as optax"


def missing() -> str | None:
    """A sentence about a missing package that this measurement needs; None where all are installed."""
    for package in ("jax", "optax"):
        if importlib.util.find_spec(package) is None:
            return sentence("rulec bench jax", "jax", package=package)
    return None


def plan(only: Sequence[str]) -> list[str]:
    """The rules that optax has too, restricted to `only`: elementwise rules first, then rules with reductions."""
    names = [n for n in rulec.rules() if not n.startswith("transforms/") and (not only or n in only)]
    shared = [name for name in names if interop_entries(rulec.load(name), "optax")]
    return sorted(shared, key=lambda name: not rulec.compile(rulec.load(name)).elementwise)


def parts(only: Sequence[str]) -> int:
    """The number of calls of `advance` in `measure`."""
    return len(plan(only)) + (len(MANY) + 1 if _adamw(only) else 0)


def _adamw(only: Sequence[str]) -> bool:
    """Whether the parts about AdamW alone are measured."""
    return not only or "adamw" in only


def measure(quick: bool, only: Sequence[str], advance: Callable[[], object] = lambda: None) -> Result:
    """The measurement; `only` restricts it to some rules."""
    elements = QUICK if quick else FULL
    notes = [f"one leaf of {elements:,} elements, or as a row says; float32"]
    rows: list[Row] = []
    for name in plan(only):
        rows += _rule(name, elements, QUICK_ROUNDS if quick else ROUNDS, notes)
        advance()
    if _adamw(only):
        for leaves, each in MANY:
            rows += _many(10 if quick else leaves, each, QUICK_ROUNDS if quick else MANY_ROUNDS)
            advance()
        rows += jax_first.rows(quick, 1 if quick else FIRST_ROUNDS)
        advance()
    return Result("jax", rows, quick, threads(), notes)


def _rule(name: str, elements: int, rounds: int, notes: list[str]) -> Iterator[Row]:
    """A rule on one large leaf: the step by default, and for AdamW by XLA alone."""
    grads = tree(1, elements, "gradient")
    try:
        contenders: dict[str, Step] = {"optax": theirs(name, grads, tree(1, elements, "parameter"))}
        contenders["optax"]()
    except Exception as error:  # noqa: BLE001 - what a rule of optax refuses is not ours to measure
        notes.append(f"{name}: optax.{called(name)} does not run here: {str(error).splitlines()[0]}")
        return
    contenders["step"] = ours(name, grads, tree(1, elements, "parameter"))
    if name == "adamw":
        contenders["alone"] = ours(name, grads, tree(1, elements, "parameter"), backend="jax")
    measures = {"step": (STEP, OF_ADAMW if name == "adamw" else OF_OPTAX), "alone": (ALONE, None)}
    yield from _rows(f"{name}, optax.{called(name)}", contenders, rounds, measures)


def _many(leaves: int, elements: int, rounds: int) -> Iterator[Row]:
    """AdamW on many leaves, with packed states and without; the arrays of each are in the cache, as in training."""
    grads = tree(leaves, elements, "gradient")
    contenders = {
        "optax": theirs("adamw", grads, tree(leaves, elements, "parameter")),
        "packed": ours("adamw", grads, tree(leaves, elements, "parameter"), packed=True),
        "step": ours("adamw", grads, tree(leaves, elements, "parameter")),
    }
    wanted = OF_MANY if elements == MANY[0][1] else None
    measures = {"packed": (PACKED, wanted), "step": (STEP, wanted)}
    yield from _rows(f"adamw, {leaves} leaves of {elements:,}", contenders, rounds, measures, settled=True)


def _rows(
    subject: str, contenders: dict[str, Step], rounds: int, measures: dict[str, tuple[str, float | None]],
    settled: bool = False,
) -> Iterator[Row]:  # fmt: skip
    times = interleaved(contenders, rounds, settled=settled)
    seconds = times.medians()
    for name, (measure, target) in measures.items():
        if name in contenders:
            detail = {**seconds, "scatter": times.quartiles("optax", name)}
            yield Row(subject, measure, times.ratio("optax", name), target, detail=detail)
