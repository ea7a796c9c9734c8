"""The stages of the cpu backend against NumPy: what they store bit for bit, what they reduce to in float64."""

from __future__ import annotations

import pytest

from tests.backends.cpu_stages import bucket_of, program_of

SHAPES = [
    (),
    (1,),
    (7,),
    (40_001,),
    (0,),
    (3, 5),
    (0, 4),
    (4, 0),
    (1, 33_000),
    (700, 3),
    (130, 257),
    (2, 3, 4),
    (5, 0, 3),
    (64, 16, 3, 3),
]

EVERY_REDUCTION = """
x = g*g - p
y = g + 0.5*p
by_row = sum(x, per="row") + max(y, per="row") - min(x, per="row")
by_col = sum(y, per="col") + max(x, per="col") - min(y, per="col")
whole = sum(x) + max(y) - min(x)
direction = y*by_row*by_col/(whole + mean(x, per="matrix"))
""".strip()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_reduction_of_every_shape(dtype: str) -> None:
    bucket = bucket_of(program_of(EVERY_REDUCTION), SHAPES, dtype=dtype)
    for stage in range(len(bucket.program.stages)):
        bucket.check(stage)
