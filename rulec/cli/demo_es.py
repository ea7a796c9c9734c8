"""`rulec demo es`: training of a network by the losses of a population, with no backward pass."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rulec.cli.console import console, print_json, print_table, progress

if TYPE_CHECKING:
    from rulec.demo.training import Curve


def demo_es(out: Path, epochs: int, json: bool) -> None:
    """Trains with and without gradients, and draws the losses of both into the folder `out`."""
    from rulec.demo import digits, es
    from rulec.demo.training import plot

    data, kind = digits.load(), es.framework()
    if not json:
        _introduce(kind)
    curves, seconds = _train(data, epochs, kind)
    out.mkdir(parents=True, exist_ok=True)
    picture = out / "es_losses.png"
    plot(curves, picture, es.SETTING.widths)
    if json:
        print_json(_data(kind, curves, seconds, picture))
    else:
        _print(curves, seconds, picture)


def _introduce(kind: str) -> None:
    from rulec.demo import es

    p = es.SETTING.perturbation
    shape = "-".join(map(str, es.SETTING.widths))
    print(f"A perceptron {shape} on scikit-learn's handwritten digits, without a backward pass, in {kind}.")
    print(
        f"Each step is one forward of {p.members} members, {p.directions} antithetic pairs of noise of rank {p.rank};\n"
        f"its sum, weighted by their losses, is what {es.SETTING.rule} takes as the gradient."
    )


def _train(data: Any, epochs: int, kind: str) -> tuple[list[Curve], list[float]]:
    """The curves of both ways, and the seconds that each took."""
    from rulec.demo import es

    ways: dict[str, Callable[..., Curve]] = {
        "a population": partial(es.train, kind=kind), "gradients": es.train_by_gradients
    }  # fmt: skip
    curves, seconds = [], []
    with progress() as shown:
        for name, way in ways.items():
            task = shown.add_task(f"training by {name}", total=epochs)
            begin = time.perf_counter()
            curves.append(way(data, epochs, advance=partial(shown.advance, task)))
            seconds.append(time.perf_counter() - begin)
    return curves, seconds


def _print(curves: list[Curve], seconds: list[float], picture: Path) -> None:
    figures = ("training loss", "test loss", "test accuracy", "seconds")
    rows = [
        [c.rule, f"{c.training[-1]:.4f}", f"{c.test[-1]:.4f}", f"{c.accuracy:.1%}", f"{taken:.1f}"]
        for c, taken in zip(curves, seconds, strict=True)
    ]
    print_table(("trained by", *figures), rows, right=figures)
    console().print(f"The losses are drawn in {picture}")


def _data(kind: str, curves: list[Curve], seconds: list[float], picture: Path) -> dict[str, Any]:
    training = {
        curve.rule: {
            "training_loss": curve.training, "test_loss": curve.test, "test_accuracy": curve.accuracy, "seconds": taken
        }
        for curve, taken in zip(curves, seconds, strict=True)
    }  # fmt: skip
    return {"framework": kind, "picture": str(picture), "training": training}
