"""Drawings of paths as SVG, over the level lines of their functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cache

from rulec.tools.display.path import ANGLE, RATES, ROSENBROCK, STEEP, STEPS, VALLEY, Path, Surface, Vector

#: Sides of a drawing, in its own units.
SIZE = 240
#: Points on each half of a level line.
HALF = 28
#: Function -> left, bottom, and side of the square that is drawn.
FRAMES = {ROSENBROCK.name: (-2.0, -1.0, 4.0), VALLEY.name: (-2.0, -2.0, 4.0)}


def figure(function: Surface, path: Path) -> str:
    """A drawing with its caption."""
    rate = "" if path.rate is None else f"; learning rate {path.rate:g}, the best of {_listed(RATES)}"
    caption = f"{function.name}: {STEPS} steps{rate}. The last value is {path.value:.2g}."
    return f"<figure>{picture(function, path)}<figcaption>{caption}</figcaption></figure>"


def picture(function: Surface, path: Path) -> str:
    """A drawing: level lines, the minimum, and the path."""
    label = f"The path on {function.name[0].lower() if function is VALLEY else 'R'}{function.name[1:]}"
    return (
        f'<svg viewBox="0 0 {SIZE} {SIZE}" role="img" aria-label="{label}">{levels(function.name)}'
        f"{_marks(function)}{line(function, path.points)}</svg>"
    )


def thumbnail(path: Path) -> str:
    """The path on Rosenbrock's function for a card, over the level lines that the page of cards has once."""
    drawn = line(ROSENBROCK, path.points[::2])
    return f'<svg viewBox="0 0 {SIZE} {SIZE}" aria-hidden="true"><use href="#rosenbrock"/>{drawn}</svg>'


def symbol() -> str:
    """The level lines of Rosenbrock's function, for thumbnails."""
    return f'<svg class="rule-symbol"><g id="rosenbrock">{levels(ROSENBROCK.name)}{_marks(ROSENBROCK)}</g></svg>'


@cache
def levels(name: str) -> str:
    """The level lines of a function."""
    lines = _rosenbrock_levels() if name == ROSENBROCK.name else _valley_levels()
    return f'<path class="levels" d="{" ".join(lines)}"/>'


def line(function: Surface, points: Vector) -> str:
    """A path as a line with its two ends; it ends where it leaves the surroundings of the frame."""
    place = _placing(function.name)
    placed: list[tuple[int, int]] = []
    for x, y in points:
        if not (math.isfinite(x) and math.isfinite(y)):
            break
        at = place(x, y)
        if placed and at == placed[-1]:
            continue
        placed.append(at)
        if max(map(abs, at)) > 3 * SIZE:
            break
    (sx, sy), (ex, ey) = placed[0], placed[-1]
    drawn = " ".join(f"{x},{y}" for x, y in placed)
    ends = f'<circle class="start" cx="{sx}" cy="{sy}" r="4"/><circle class="end" cx="{ex}" cy="{ey}" r="4"/>'
    return f'<polyline class="track" points="{drawn}"/>{ends}'


def _marks(function: Surface) -> str:
    x, y = _placing(function.name)(*function.minimum)
    return f'<path class="minimum" d="M{x - 5} {y}h10M{x} {y - 5}v10"/>'


def _placing(name: str) -> Callable[[float, float], tuple[int, int]]:
    left, bottom, side = FRAMES[name]
    scale = SIZE / side
    return lambda x, y: (round((x - left) * scale), round(SIZE - (y - bottom) * scale))


def _closed(name: str, points: Iterable[tuple[float, float]]) -> str:
    place = _placing(name)
    placed = [place(x, y) for x, y in points]
    return "M" + "L".join(f"{x} {y}" for x, y in placed) + "Z"


def _rosenbrock_levels() -> list[str]:
    """`(1 - x)**2 + 100*(y - x**2)**2 = c` solved for `y`: its lower half to the right, its upper half back."""
    lines = []
    for level in (0.3, 2.0, 8.0, 30.0, 100.0, 400.0):
        reach = math.sqrt(level)
        low, high = max(1 - reach, -2.3), min(1 + reach, 2.3)  # a little more than the frame
        turns = [math.pi * k / HALF for k in range(HALF + 1)]
        xs = [(low + high) / 2 - (high - low) / 2 * math.cos(turn) for turn in turns]
        halves = [math.sqrt(max(level - (1 - x) ** 2, 0)) / 10 for x in xs]
        below = [(x, x * x - half) for x, half in zip(xs, halves, strict=True)]
        above = [(x, x * x + half) for x, half in zip(xs, halves, strict=True)]
        lines.append(_closed(ROSENBROCK.name, [*below, *reversed(above)]))
    return lines


def _valley_levels() -> list[str]:
    """Ellipses, turned."""
    lines = []
    for level in (0.1, 0.5, 1.5, 4.0, 10.0, 25.0):
        along, across = math.sqrt(2 * level), math.sqrt(2 * level / STEEP)
        turns = [math.pi * k / HALF for k in range(2 * HALF)]
        uv = [(along * math.cos(turn), across * math.sin(turn)) for turn in turns]
        cos, sin = math.cos(ANGLE), math.sin(ANGLE)
        lines.append(_closed(VALLEY.name, ((cos * u - sin * v, sin * u + cos * v) for u, v in uv)))
    return lines


def _listed(numbers: Iterable[float]) -> str:
    *first, last = (f"{number:g}" for number in numbers)
    return f"{', '.join(first)} and {last}"
