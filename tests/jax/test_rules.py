"""Every rule of the library in JAX, by `step` or `transform`, beside the reference, which tests.rules ties to peers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rulec
import rulec.jax
from rulec.array_api import random
from rulec.jax.compiled import is_wide
from rulec.language.expr.node import Op, walk
from rulec.language.rule_data import reads_layers
from rulec.testing.cases import loaded
from tests.jax.runs import WAYS, JaxRun
from tests.library import single
from tests.rules.matrices import MATRICES
from tests.rules.measure import Shapes, Trial, largest_difference
from tests.rules.peer import Peer
from tests.rules.peers import PEERS
from tests.rules.reducing import REDUCING
from tests.rules.runs import Array, OracleRun, OurRun
from tests.rules.wrapper_peer import StateRun, WrapperPeer
from tests.rules.wrappers import WRAPPERS

Row = Peer | WrapperPeer

ROWS: tuple[Row, ...] = (*PEERS, *REDUCING, *MATRICES, *WRAPPERS)

#: Rows of every kind, which the everyday run compares: elementwise rules, those with reductions to every level, random
#: numbers, skipped steps, factored moments, matrix functions, and wrappers.
EVERYDAY = (
    "l2 >> nesterov = torch.optim.SGD", "rprop = torch.optim.Rprop", "l2 >> dog = optax.contrib.dog",
    "schedule_free_adamw = pytorch_optimizer.ScheduleFreeAdamW",
    "transforms/clip_by_global_norm >> adamw = torch.optim.AdamW", "transforms/noise >> sgd = the paper's formula",
    "transforms/skip_not_finite >> adam = optax.apply_if_finite", "sm3 = pytorch_optimizer.SM3",
    "muon = torch.optim.Muon, torch.optim.AdamW", "galore = pytorch_optimizer.GaLore, torch.optim.Adam",
    "ema(adam) = torch.optim.swa_utils.AveragedModel", "accumulate(adamw) = torch.optim.AdamW",
)  # fmt: skip

#: What leaves singular vectors open in float32, where rounding fills the null space of a matrix.
DECOMPOSING = {Op.EIGH, Op.INVERSE_ROOT}

RELATIVE_FLOAT64 = 1e-12

#: An ulp a step.
STEPS = 6
ULPS_FLOAT32 = STEPS


def shapes_of(row: Row) -> Shapes:
    """Tensors of all dimensions, and of these few: no two of one shape have a function of their own in JAX."""
    if isinstance(row, WrapperPeer):
        return row.shapes[:3]
    return ((5,), (6, 4), (4, 6), (2, 4, 3)) if row in MATRICES else ((5,), (), (3, 4), (4, 2, 3, 2))


def rule_of(row: Row) -> rulec.Rule:
    return rulec.load(row.composed) if isinstance(row, WrapperPeer) else row.ours()


def names_of(row: Row) -> set[str]:
    return set(row.composed.partition("(")[0].split(" >> ")) if isinstance(row, WrapperPeer) else set(row.names)


def in_float64(row: Row) -> rulec.Rule:
    """The rule of a row, with the iteration that it asks for in bfloat16 made in float64."""
    if not isinstance(row, Peer):
        return rule_of(row)
    path = Path(rule_of(replace(row, composed=row.rule)).path or "")
    text = path.read_text() if path.is_file() else ""
    if 'dtype="bfloat16"' not in text:
        return rule_of(row)
    wide = rulec.parse(text.replace('"bfloat16"', '"float64"'), str(path), path.parent)
    return wide if row.composed == row.rule else wide >> rulec.load(row.names[-1])


def decomposing() -> list[Peer]:
    return [row for row in MATRICES if DECOMPOSING & {n.op for n in walk(loaded(row.rule).expressions)}]


def unnamed(rows: Iterable[Row], named: set[str]) -> Iterator[Row]:
    """Rows until every rule is named in one."""
    for row in rows:
        if names_of(row) - named:
            named |= names_of(row)
            yield row


def compared() -> list[Any]:
    """Each rule in one row, and by one way, which are taken by turns."""
    today = [row for row in ROWS if str(row) in EVERYDAY]
    assert len(today) == len(EVERYDAY)
    later = list(unnamed(ROWS, set[str]().union(*map(names_of, today))))
    ways = cycle(WAYS)
    made = [pytest.param(row, way, id=f"{row} by {way}") for row, way in zip(today, ways, strict=False)]
    return made + [
        pytest.param(row, way, marks=pytest.mark.another, id=f"{row} by {way}")
        for row, way in zip(later, ways, strict=False)
    ]


def test_every_rule_is_compared() -> None:
    named = set().union(*(names_of(param.values[0]) for param in compared()))
    layered = [name for name in rulec.rules() if reads_layers(rulec.load(name))]
    assert {n.removeprefix("transforms/") for n in named} == {
        n.removeprefix("transforms/") for n in (*single(), *layered)
    }


@pytest.mark.parametrize(("row", "way"), compared())
def test_float64(row: Row, way: str) -> None:
    trial, rule = Trial("float64", STEPS, shapes_of(row)), in_float64(row)
    if isinstance(row, WrapperPeer):
        ours, theirs = JaxRun(rule, trial.params, way, row.state), StateRun(rule, trial.params, row.state)
    else:
        ours, theirs = JaxRun(rule, trial.params, way), OracleRun(rule, trial.params, "float64", row.hyper)
    assert largest_difference(ours, theirs, trial, row.hyper).relative <= RELATIVE_FLOAT64


def by_kind(*composed: str) -> list[Any]:
    """Rows with a way, by turns: the first is for the everyday run, the others are slow."""
    rows = [next(row for row in ROWS if row.composed == name) for name in composed]
    return [
        pytest.param(row, way, marks=pytest.mark.slow if i else [], id=f"{row} by {way}")
        for i, (row, way) in enumerate(zip(rows, cycle(WAYS), strict=False))
    ]


@pytest.mark.peer
@pytest.mark.parametrize(
    ("row", "way"),
    by_kind("rprop", "adamw", "adafactor", "lamb", "transforms/noise >> sgd", "sm3", "galore", "prodigy"),
)
def test_float32_where_jax_is_kept_to_32_bits(row: Peer, way: str) -> None:
    assert not is_wide()
    trial = Trial("float32", STEPS, shapes_of(row))
    ours, theirs = JaxRun(rule_of(row), trial.params, way), row.start(trial.params, row.hyper)
    # GaLore's singular vectors are as exact as LAPACK's, which is asked by another library in another way.
    allowed = ULPS_FLOAT32 * (2 if row.rule == "galore" else 1)
    assert largest_difference(ours, theirs, trial, row.hyper).ulps <= allowed


@pytest.mark.parametrize(
    ("row", "way"), by_kind("larc", "adamw", "adafactor", "lion", "schedule_free_adamw", "l2 >> nadam")
)
def test_bfloat16_is_rounded_where_numpy_rounds_it(row: Row, way: str) -> None:
    """Computed in float32 and rounded when it is stored, so that the bits differ where sums in float32 do, if at all.

    One unit in the last place is allowed; with `transform`, where the change is rounded and then the sum, two for each
    step. After five steps Lion's average of one element is zero but for rounding, and its sign is anything.
    """
    trial = Trial("bfloat16", steps=5, shapes=shapes_of(row))
    theirs = OurRun(rule_of(row), trial.params, row.hyper, "numpy")
    found = largest_difference(JaxRun(rule_of(row), trial.params, way), theirs, trial, row.hyper)
    assert found.ulps <= (1 if way == "step" else 2 * trial.steps)


@pytest.mark.slow
@pytest.mark.peer
@pytest.mark.parametrize("row", decomposing(), ids=str)
def test_decompositions_in_float32(row: Peer) -> None:
    """On square matrices, whose first gradients have full rank: roots and eigenvectors multiply rounding errors."""
    trial = Trial("float32", STEPS, shapes=((5,), (5, 5), (4, 4)))
    ours, theirs = JaxRun(rule_of(row), trial.params), row.start(trial.params, row.hyper)
    assert largest_difference(ours, theirs, trial, row.hyper).relative <= 1e-4


@pytest.mark.slow
@pytest.mark.peer
@pytest.mark.parametrize("row", [row for row in MATRICES if row.rule in ("muon", "normuon")], ids=str)
def test_orthogonalized_in_bfloat16_as_shipped(row: Peer) -> None:
    """Rounded where torch rounds, so nearer to it than what rounds every product and every sum: that is at 1e-3."""
    trial = Trial("float32", steps=3, shapes=((64, 32), (32, 48), (8,)))
    ours, theirs = JaxRun(rule_of(row), trial.params), row.start(trial.params, row.hyper, shipped=True)
    assert largest_difference(ours, theirs, trial, row.hyper).relative <= 3e-4


# Random numbers

DRAWN = """
name: Drawn
hyper: {lr: 1}
view: {flatten: rest}
state: {u: 0, n: 0, held: 0}
step: |
  u = uniform([rows, cols])
  n = normal([rows, cols])
  held = normal([rows, cols], at=floor((t - 1)/3))
  direction = u + n + held
"""

DRAWN_SHAPES = ((), (1, 1001), (2, 3, 1, 2))


@pytest.mark.parametrize(
    ("wide", "seed"),
    [pytest.param(True, 2**32 - 1, id="x64", marks=pytest.mark.slow), pytest.param(False, 0, id="x32")],
)
def test_the_random_numbers_are_those_of_the_language(wide: bool, seed: int) -> None:
    """Philox's words, for every tensor, draw and step: counts beyond 32 bits of a sign are none."""
    rule = rulec.parse(DRAWN)
    with jax.enable_x64(wide):
        params = [jnp.zeros(shape) for shape in DRAWN_SHAPES]
        start = rulec.jax.init(rule, params, tags={})
        for before in (0, 1, 5, 2**31 - 2):
            state = start._replace(count=jnp.int32(before))
            _, found = rulec.jax.step(rule, params, params, state, seed=seed, donate=False, tags={})
            for tensor, shape in enumerate(DRAWN_SHAPES):
                place = {"seed": seed, "tensor": tensor, "step": before + 1}
                numbers = int(np.prod(shape))
                uniform = random.uniform(random.stream(numbers, draw=0, **place)).reshape(shape)
                np.testing.assert_array_equal(found.u[tensor], uniform)
                held = {**place, "step": before // 3}
                _near(found.n[tensor], random.normal(numbers, draw=1, **place).reshape(shape))
                _near(found.held[tensor], random.normal(numbers, draw=2, **held).reshape(shape))


def _near(found: jax.Array, expected: Array) -> None:
    """To the accuracy of logarithms and cosines in float64, and once rounded."""
    close = 1e-15 if found.dtype == jnp.float64 else 6e-8
    np.testing.assert_allclose(found, expected, rtol=10 * close, atol=close)
