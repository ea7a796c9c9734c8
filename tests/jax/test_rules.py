"""Every rule of the library in JAX, by `step` and by `transform`, beside implementations that are not ours."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rulec
import rulec.jax
from rulec.compiler import random
from rulec.jax.machine import is_wide
from tests.jax.runs import WAYS, JaxRun
from tests.rules.matrices import MATRICES
from tests.rules.measure import ALL_DIMENSIONS, Difference, Shapes, Trial, largest_difference
from tests.rules.peers import PEERS, Peer
from tests.rules.reducing import REDUCING
from tests.rules.runs import Array, OurRun
from tests.rules.test_matrices import SHAPES as MATRIX_SHAPES
from tests.rules.wrappers import WRAPPERS, WrapperPeer

pytestmark = pytest.mark.peer

Row = Peer | WrapperPeer

ROWS: tuple[Row, ...] = (*PEERS, *REDUCING, *MATRICES, *WRAPPERS)

#: Rows of every kind, which the everyday run compares one way each: elementwise rules, those with reductions to every
#: level, random numbers, skipped steps, factored moments, matrix functions, and wrappers.
EVERYDAY = (
    "l2 >> nesterov = torch.optim.SGD", "adamw = torch.optim.AdamW", "l2 >> nadam = torch.optim.NAdam",
    "rprop = torch.optim.Rprop", "lion = pytorch_optimizer.Lion", "adopt = optax.contrib.adopt",
    "lamb = optax.lamb", "l2 >> dog = optax.contrib.dog", "prodigy = optax.contrib.prodigy",
    "schedule_free_adamw = pytorch_optimizer.ScheduleFreeAdamW", "adamp = pytorch_optimizer.AdamP",
    "transforms/clip_by_global_norm >> adamw = torch.optim.AdamW",
    "transforms/noise >> sgd = the paper's formula", "transforms/skip_not_finite >> adam = optax.apply_if_finite",
    "adafactor = torch.optim.Adafactor", "came + decay = pytorch_optimizer.CAME", "sm3 = pytorch_optimizer.SM3",
    "adam_mini + decay = pytorch_optimizer.AdamMini", "muon = torch.optim.Muon, torch.optim.AdamW",
    "soap = pytorch_optimizer.SOAP, torch.optim.Adam", "apollo = its Algorithm 1",
    "lookahead(adam) = pytorch_optimizer.Lookahead", "ema(adam) = torch.optim.swa_utils.AveragedModel",
    "accumulate(adamw) = torch.optim.AdamW", "schedule_free(adam) = optax.contrib.schedule_free",
    "low_rank(adam) = the same by hand", "mechanic(adam) = optax.contrib.mechanize",
)  # fmt: skip

#: In which the iteration of the authors is made in bfloat16; what it decides is compared in `float64` here.
ORTHOGONALIZING = ("muon", "normuon", "transforms/orthogonalize")

#: Of whose matrices some have no definite singular vectors in float32, where rounding fills the null space.
DECOMPOSING = ("soap", "shampoo")

RELATIVE_FLOAT64 = 1e-12

#: Half an ulp a step, as in tests.rules.test_peers.
STEPS, EVERYDAY_STEPS = 25, 8
ULPS_FLOAT32 = STEPS / 2


def shapes_of(row: Row, everyday: bool = False) -> Shapes:
    """Tensors of all dimensions, matrices among them that are tall, wide and square; some of these every day."""
    if isinstance(row, WrapperPeer):
        return row.shapes[:3] if everyday else row.shapes
    if row in MATRICES:
        return ((5,), (6, 4), (4, 6), (2, 4, 3)) if everyday else MATRIX_SHAPES
    return ((5,), (3, 4), (4, 2, 3, 2)) if everyday else ALL_DIMENSIONS


def rule_of(row: Row) -> rulec.Rule:
    return rulec.load(row.composed) if isinstance(row, WrapperPeer) else row.ours()


def in_float64(row: Row) -> rulec.Rule:
    """The rule of a row, with the iteration that it asks for in bfloat16 made in float64."""
    if not isinstance(row, Peer) or row.rule not in ORTHOGONALIZING:
        return rule_of(row)
    path = Path(rule_of(replace(row, composed=row.rule)).path or "")
    text = path.read_text()
    assert text.count('"bfloat16"') == 1
    wide = rulec.parse(text.replace('"bfloat16"', '"float64"'), str(path), path.parent)
    return wide if row.composed == row.rule else wide >> rulec.load(row.names[-1])


def against_theirs(row: Row, dtype: str, way: str, everyday: bool) -> Difference:
    """How far a rule in JAX and its peer part."""
    trial = Trial(dtype, EVERYDAY_STEPS if everyday else STEPS, shapes_of(row, everyday))
    rule = in_float64(row) if dtype == "float64" else rule_of(row)
    ours = JaxRun(rule, trial.params, way, row.state if isinstance(row, WrapperPeer) else "")
    return largest_difference(ours, row.start(trial.params, row.hyper), trial, row.hyper)


def compared(rows: Sequence[Row], everyday: Sequence[str], both: bool) -> list[Any]:
    """Rows with a way and whether they are for the everyday run: those named, one way; slow are the others.

    Ways are taken by turns, or for the slow run `both` of each row.
    """
    assert set(everyday) <= {str(row) for row in rows}
    chosen = {(name, WAYS[i % 2]) for i, name in enumerate(everyday)}
    made = []
    for i, (row, way) in enumerate(itertools.product(rows, WAYS)):
        today = (str(row), way) in chosen
        if today or both or i % 4 in (0, 3):
            made.append(pytest.param(row, way, today, marks=[] if today else pytest.mark.slow, id=f"{row} by {way}"))
    return made


def test_every_rule_is_compared() -> None:
    named = {row.composed.partition("(")[0] for row in WRAPPERS}
    named |= {name for row in ROWS if isinstance(row, Peer) for name in row.names}
    assert {name.removeprefix("transforms/") for name in named} == {
        n.removeprefix("transforms/") for n in rulec.rules()
    }


@pytest.mark.parametrize(("row", "way", "everyday"), compared(ROWS, EVERYDAY, both=True))
def test_float64(row: Row, way: str, everyday: bool) -> None:
    assert against_theirs(row, "float64", way, everyday).relative <= RELATIVE_FLOAT64


NARROW = [row for row in ROWS if isinstance(row, Peer) and row.rule not in (*ORTHOGONALIZING, *DECOMPOSING)]


FEW = ("adamw = torch.optim.AdamW", "larc = NVIDIA's formula", "adafactor = torch.optim.Adafactor")


@pytest.mark.parametrize(("row", "way", "everyday"), compared(NARROW, FEW, both=False))
def test_float32_where_jax_is_kept_to_32_bits(row: Row, way: str, everyday: bool) -> None:
    assert not is_wide()
    found = against_theirs(row, "float32", way, everyday)
    # GaLore's singular vectors are as exact as LAPACK's, which is asked by another library in another way.
    assert found.ulps <= ULPS_FLOAT32 * (2 if row.rule == "galore" else 1)


@pytest.mark.parametrize(("row", "way", "everyday"), compared(NARROW, FEW, both=False))
def test_bfloat16_is_rounded_where_numpy_rounds_it(row: Row, way: str, everyday: bool) -> None:
    """Computed in float32 and rounded when it is stored, so that the bits differ where sums in float32 do, if at all.

    One unit in the last place is allowed; with `transform`, where the change is rounded and then the sum, two for each
    step. After five steps Lion's average of one element is zero but for rounding, and its sign is anything.
    """
    trial = Trial("bfloat16", steps=5, shapes=shapes_of(row, everyday))
    theirs = OurRun(rule_of(row), trial.params, row.hyper, "numpy")
    found = largest_difference(JaxRun(rule_of(row), trial.params, way), theirs, trial, row.hyper)
    assert found.ulps <= (1 if way == "step" else 2 * trial.steps)


@pytest.mark.parametrize("row", [row for row in MATRICES if row.rule in DECOMPOSING], ids=str)
def test_decompositions_in_float32(row: Peer) -> None:
    """On square matrices, whose first gradients have full rank: roots and eigenvectors multiply rounding errors."""
    trial = Trial("float32", shapes=((5,), (5, 5), (4, 4)))
    ours, theirs = JaxRun(rule_of(row), trial.params), row.start(trial.params, row.hyper)
    assert largest_difference(ours, theirs, trial, row.hyper).relative <= 1e-4


SHIPPED = [
    pytest.param(row, marks=[] if row.rule == "muon" else pytest.mark.slow, id=row.rule)
    for row in MATRICES
    if row.rule in ("muon", "normuon")
]


@pytest.mark.parametrize("row", SHIPPED)
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


@pytest.mark.parametrize(("wide", "seed"), [(True, 2**32 - 1), (False, 0)], ids=["x64", "x32"])
def test_the_random_numbers_are_those_of_the_language(wide: bool, seed: int) -> None:
    """Philox's words, for every tensor, draw and step: counts beyond 32 bits of a sign are none."""
    rule = rulec.parse(DRAWN)
    with jax.enable_x64(wide):
        params = [jnp.zeros(shape) for shape in DRAWN_SHAPES]
        start = rulec.jax.init(rule, params)
        for before in (0, 1, 5, 2**31 - 2):
            state = start._replace(count=jnp.int32(before))
            _, found = rulec.jax.step(rule, params, params, state, seed=seed, donate=False)
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
