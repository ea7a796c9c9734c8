"""The random stream: Philox4x32-10 as its authors publish it, and numbers distributed as they should be."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

import rulec
from rulec.array_api.random import normal, philox, stream, uniform
from rulec.compiler.reference import ReferenceOptimizer
from rulec.language.compose.combine import chain, plus
from rulec.language.expr.node import Kind, walk

#: counter, key, words: the known answers that come with Random123 (kat_vectors, philox4x32 10).
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]) -> None:
    a, b, c, d = counter
    assert tuple(int(w) for w in philox((a, b, c, d), key)) == words


def test_many_counters_at_once() -> None:
    columns = [np.array([known[0][i] for known in KNOWN[:1] * 3]) for i in range(4)]
    found = philox((columns[0], columns[1], columns[2], columns[3]), (0, 0))
    assert all((word == KNOWN[0][2][i]).all() for i, word in enumerate(found))
    assert all(word.dtype == np.uint32 for word in found)


def test_where_the_words_of_a_stream_come_from() -> None:
    """Element i takes word i%4 of the counter (i//4, its high half, draw, step) under the key (seed, tensor)."""
    words = stream(11, seed=7, tensor=5, draw=3, step=2)
    for i in range(11):
        assert words[i] == philox((i // 4, 0, 3, 2), (7, 5))[i % 4]
    np.testing.assert_array_equal(stream(4, seed=7, tensor=5, draw=3, step=2), words[:4])
    assert stream(0, seed=7, tensor=5, draw=3, step=2).shape == (0,)


def test_streams_differ_in_every_part_of_their_position() -> None:
    position = {"seed": 1, "tensor": 2, "draw": 3, "step": 4}
    first = stream(64, **position)
    for key in position:
        other = stream(64, **{**position, key: position[key] + 1})
        assert (first == other).mean() < 0.05


def test_counters_wrap_to_32_bits() -> None:
    np.testing.assert_array_equal(
        stream(8, seed=1 << 32, tensor=1 << 32, draw=0, step=1 << 32), stream(8, seed=0, tensor=0, draw=0, step=0)
    )


COUNT = 200_000


def test_uniform_numbers() -> None:
    found = uniform(stream(COUNT, seed=3, tensor=0, draw=0, step=1))
    assert 0 < found.min() < 1e-4
    assert 1 - 1e-4 < found.max() < 1
    np.testing.assert_array_equal(found, found.astype(np.float32))
    for power in range(1, 5):
        error = math.sqrt((1 / (2 * power + 1) - 1 / (power + 1) ** 2) / COUNT)
        assert abs((found**power).mean() - 1 / (power + 1)) < 5 * error
    counts = np.histogram(found, 64, (0, 1))[0]
    chi_squared = ((counts - COUNT / 64) ** 2 / (COUNT / 64)).sum()
    assert 63 - 5 * math.sqrt(126) < chi_squared < 63 + 5 * math.sqrt(126)


def test_uniform_numbers_reach_their_ends() -> None:
    ends = uniform(np.array([0, 0xFFFFFFFF], np.uint32))
    np.testing.assert_array_equal(ends, [2.0**-24, 1 - 2.0**-24])


def test_normal_numbers() -> None:
    found = normal(COUNT, seed=3, tensor=0, draw=0, step=1)
    wanted = {1: 0.0, 2: 1.0, 3: 0.0, 4: 3.0, 5: 0.0, 6: 15.0}
    variance = {1: 1.0, 2: 2.0, 3: 15.0, 4: 96.0, 5: 945.0, 6: 10170.0}
    for power, moment in wanted.items():
        assert abs((found**power).mean() - moment) < 5 * math.sqrt(variance[power] / COUNT)
    assert np.isfinite(found).all()
    below = np.array([-2.0, -1.0, 0.0, 1.0, 2.0])
    share = [(found < b).mean() for b in below]
    exact = [0.5 * (1 + math.erf(b / math.sqrt(2))) for b in below]
    np.testing.assert_allclose(share, exact, atol=5 * 0.5 / math.sqrt(COUNT))
    pairs = found.reshape(-1, 2)
    assert abs(np.corrcoef(pairs.T)[0, 1]) < 5 / math.sqrt(COUNT / 2)
    assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 5 / math.sqrt(COUNT)


def test_an_odd_count_is_the_beginning_of_an_even_one() -> None:
    position = {"seed": 0, "tensor": 0, "draw": 0, "step": 1}
    np.testing.assert_array_equal(normal(7, **position), normal(8, **position)[:7])


RULE = """
name: Drawing
state: {a: 0, b: 0, c: 0}
step: |
  a = normal([rows, cols])
  b = normal([rows, cols])
  c = uniform([rows, cols], at=floor((t - 1)/2))
  direction = a + b + c
"""


def test_draws_of_a_rule() -> None:
    params = [np.zeros((3, 4)), np.zeros((3, 4))]
    one, two = (ReferenceOptimizer(rulec.parse(RULE), params, seed=seed) for seed in (0, 0))
    seen = []
    for _ in range(3):
        for optimizer in (one, two):
            optimizer.step([np.zeros((3, 4))] * 2)
        seen.append([one.state(i) for i in range(2)])
        for i in range(2):  # the same seed draws the same
            np.testing.assert_array_equal(one.state(i)["a"], two.state(i)["a"])
    first = seen[0][0]
    assert not np.array_equal(first["a"], first["b"])  # each draw of a rule is its own
    assert not np.array_equal(first["a"], seen[0][1]["a"])  # each tensor too
    assert not np.array_equal(first["a"], seen[1][0]["a"])  # and each step
    np.testing.assert_array_equal(first["c"], seen[1][0]["c"])  # but for what is held
    assert not np.array_equal(first["c"], seen[2][0]["c"])
    other = ReferenceOptimizer(rulec.parse(RULE), params, seed=1)
    other.step([np.zeros((3, 4))] * 2)
    assert not np.array_equal(first["a"], other.state(0)["a"])


def draws_of(rule: rulec.Rule) -> list[int]:
    return sorted(n.arg for n in walk(rule.expressions) if n.op.kind is Kind.RANDOM)  # type: ignore[type-var,misc]


def test_composed_rules_draw_apart() -> None:
    noise = rulec.parse("name: Noise\nstep: |\n  direction = g + normal([rows, cols]) - uniform([rows, cols])\n")
    for rule in (noise + noise, noise >> noise, (noise + noise) >> noise):
        assert draws_of(rule) == list(range(len(draws_of(rule))))
        assert rulec.parse(rule.to_yaml()) == rule
    several = {plus([noise] * 3): 6, chain([noise] * 3): 6, rulec.load("transforms/graft")(noise, noise): 4}
    for rule, count in several.items():
        assert draws_of(rule) == list(range(count))
    twice = noise + noise
    p = np.zeros((2, 3))
    one, two = ReferenceOptimizer(noise, [p], {"lr": 1.0}), ReferenceOptimizer(twice, [p], {"lr": 1.0})
    one.step([p])
    two.step([p])
    assert not np.allclose(two.params[0], 2 * one.params[0])


def test_called_rules_draw_apart(tmp_path: Path) -> None:
    text = (
        "name: R\nuses: {{a: {0}, b: {0}}}\nstep: |\n  x = normal([rows, cols])\n"
        "  direction = a(x) + b(normal([rows, cols]))\n"
    )
    noise = "name: Noise\nstep: |\n  direction = g*uniform([rows, cols])\n"
    (tmp_path / "noise.yaml").write_text(noise)
    rule = rulec.parse(text.format("noise.yaml"), base=tmp_path)
    assert draws_of(rule) == [0, 1, 2, 3]
    assert rulec.parse(rule.to_yaml()) == rule
    parsed = rulec.parse(noise)

    @rulec.rule
    def called(g):  # type: ignore[no-untyped-def]
        return parsed(g) + parsed(2 * g)

    assert draws_of(called) == [0, 1]


def test_a_draw_can_be_named_again() -> None:
    rule = rulec.parse(
        "name: R\nstep: |\n  a = normal([rows, cols])\n  b = normal([rows, cols], draw=0)\n"
        "  c = normal([rows, cols], draw=7)\n  d = normal([rows, cols])\n  direction = a - b + 0*c + 0*d\n"
    )
    assert draws_of(rule) == [0, 7, 8]
    optimizer = ReferenceOptimizer(rule, [np.ones((2, 2))])
    optimizer.step([np.ones((2, 2))])
    np.testing.assert_array_equal(optimizer.params[0], 1)
    for wrong in ("-1", "0.5", "1000", "rows", "inf"):
        with pytest.raises(rulec.RuleError, match="draw of normal is a whole number below 1000"):
            rulec.parse(f"name: R\nstep: |\n  direction = normal([rows, cols], draw={wrong})\n")
