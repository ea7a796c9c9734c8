"""`rulec demo`: a new rule, from its text to a trained model; `rulec demo es`: training without a backward pass."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rulec.cli.arguments import JsonFlag
from rulec.cli.console import console, print_json, print_source, print_table, progress, write_text
from rulec.errors import RulecError
from rulec.language.source import did_you_mean

if TYPE_CHECKING:
    from rulec.demo.training import Curve, Update
    from rulec.language.rule import Rule

#: What both rules train with, and for how many epochs there is training.
_LR, EPOCHS, ES_EPOCHS = 1e-3, 15, 20


def demo(
    what: Annotated[
        str, typer.Argument(metavar="[WHAT]", help="rule; or es, which trains without a backward pass.")
    ] = "rule",
    out: Annotated[Path, typer.Option(help="The folder for rule, kernel and picture.")] = Path("rulec-demo"),
    epochs: Annotated[
        int | None, typer.Option(min=1, help=f"Epochs of training; {EPOCHS}, of es {ES_EPOCHS}.", show_default=False)
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Author a new rule, compile it, train a network with it.

    On handwritten digits, beside AdamW; compares accuracy and the time of an update, and draws the losses. `es` trains
    by the losses of a population, beside gradients.
    """
    if what == "rule":
        _rule(out, epochs or EPOCHS, json)
    elif what == "es":
        from rulec.cli.demo_es import demo_es

        demo_es(out, epochs or ES_EPOCHS, json)
    else:
        raise RulecError(
            f"there is no demonstration {what!r}{did_you_mean(what, ('rule', 'es'))}: there are rule and es"
        )


def _rule(out: Path, epochs: int, json: bool) -> None:
    """The demonstration of a rule."""
    from rulec.demo import digits
    from rulec.demo.rule import TEXT
    from rulec.demo.training import compare_update

    data = digits.load()
    path = out / "wary_adam.yaml"
    write_text(path, TEXT)
    rule, source, seconds = _compile(path)
    write_text(out / "wary_adam_kernel.py", source)
    if not json:
        _show(path, source, seconds)
    curves = _train(rule, data, epochs)
    update = compare_update(rule, {"lr": _LR}, rounds=21)
    picture = _plot(curves, out)
    if json:
        print_json(_data(path, picture, seconds, curves, update))
    else:
        _print(curves, update, picture)


def _compile(path: Path) -> tuple[Rule, str, float]:
    """The rule, its kernel's source, and the seconds until the kernel is ready: compiled, or from the cache."""
    from rulec.backend import registry
    from rulec.compiler.layout import kernel_for
    from rulec.compiler.pipeline import compile
    from rulec.language.library import load

    backend = registry.usable("cpu")
    begin = time.perf_counter()
    rule = load(path)
    kernel = kernel_for(compile(rule), "float32")
    source = backend.emit(*kernel)
    backend.build(*kernel, source)
    return rule, source, time.perf_counter() - begin


def _train(rule: Rule, data: Any, epochs: int) -> list[Curve]:
    from rulec.demo.training import WIDTHS, Descent, train
    from rulec.language.library import load

    curves = []
    with progress() as shown:
        for chosen in (rule, load("adamw")):
            task = shown.add_task(f"training with {chosen.name}", total=epochs)
            descent = Descent(chosen, WIDTHS, {"lr": _LR})
            curves.append(train(chosen.name, descent, data, epochs, advance=partial(shown.advance, task)))
    return curves


def _plot(curves: list[Curve], out: Path) -> Path:
    from rulec.demo.training import WIDTHS, plot

    picture = out / "losses.png"
    plot(curves, picture, WIDTHS)
    return picture


def _show(path: Path, source: str, seconds: float) -> None:
    out = console()
    out.print(f"A rule that is not in the library, {path}:", style="bold")
    print_source(path.read_text(encoding="utf-8"), "yaml")
    out.print(f"\nIts kernel for float32 on the cpu, ready after {seconds:.2f} s:", style="bold")
    print_source(source, "python")


def _print(curves: list[Curve], update: Update, picture: Path) -> None:
    out = console()
    out.print("\nA multilayer perceptron on scikit-learn's handwritten digits:", style="bold")
    rows = [[c.rule, f"{c.training[-1]:.4f}", f"{c.test[-1]:.4f}", f"{c.accuracy:.1%}"] for c in curves]
    figures = ("training loss", "test loss", "test accuracy")
    print_table(("rule", *figures), rows, right=figures)
    out.print(f"\nOne update of its {update.parameters:,} parameters, medians by turns in this run:", style="bold")
    out.print(f"  rulec          {update.fused * 1e6:8.0f} us")
    out.print(f"  unfused NumPy  {update.unfused * 1e6:8.0f} us, {update.unfused / update.fused:.1f} times as long")
    out.print(f"  largest difference between them after 10 steps: {update.largest_difference:.1e}")
    out.print(f"\nThe losses are drawn in {picture}")


def _data(path: Path, picture: Path, seconds: float, curves: list[Curve], update: Update) -> dict[str, Any]:
    return {
        "rule_file": str(path), "picture": str(picture), "compile_seconds": seconds,
        "training": {
            c.rule: {"training_loss": c.training, "test_loss": c.test, "test_accuracy": c.accuracy} for c in curves
        },
        "update": vars(update),
    }  # fmt: skip
