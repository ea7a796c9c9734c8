"""The picture of the demonstration: loss over epochs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rulec.demo.training import Curve
from rulec.errors import RulecError


def plot(curves: Sequence[Curve], path: Path, widths: Sequence[int]) -> None:
    """Writes a PNG with the training loss (full lines) and the test loss (dashed) of two curves of a network.

    RulecError where matplotlib is not installed or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise RulecError("the demonstration needs matplotlib: pip install 'rulec[demo]'") from None
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for curve, colour in zip(curves, ("tab:red", "tab:blue"), strict=True):
        epochs = range(1, len(curve.training) + 1)
        axes.plot(epochs, curve.training, color=colour, label=f"{curve.rule}, training")
        axes.plot(epochs, curve.test, color=colour, linestyle="--", label=f"{curve.rule}, test ({curve.accuracy:.1%})")
    title = f"Handwritten digits, {'-'.join(map(str, widths))}"
    axes.set(yscale="log", xlabel="epoch", ylabel="cross entropy (nats)", title=title)
    axes.grid(visible=True, which="both", alpha=0.25)
    axes.legend(frameon=False)
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise RulecError(f"{path} cannot be written: {error.strerror or error}") from None
