"""`rulec demo`: a new rule, from its text to a trained model; `rulec demo es`: training without a backward pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rulec.cli.arguments import JsonFlag
from rulec.cli.console import console, print_json, print_source, print_table, progress, write_text
from rulec.errors import RulecError
from rulec.language.source import did_you_mean

if TYPE_CHECKING:
    from rulec.language.rule import Rule
    from rulec.tools.demo.training import Curve, Update

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
        _es(out, epochs or ES_EPOCHS, json)
    else:
        raise RulecError(
            f"there is no demonstration {what!r}{did_you_mean(what, ('rule', 'es'))}: there are rule and es"
        )


def _rule(out: Path, epochs: int, json: bool) -> None:
    """The demonstration of a rule."""
    from rulec.language.library.load import load
    from rulec.tools.demo import digits
    from rulec.tools.demo.training import TEXT, WIDTHS, Descent, compare_update, plot, train

    data = digits.load("rulec demo", "demo")
    path = out / "wary_adam.yaml"
    write_text(path, TEXT)
    rule, source, seconds = _compile(path)
    write_text(out / "wary_adam_kernel.py", source)
    if not json:
        _show(path, source, seconds)
    learners = {one.name: Descent(one, WIDTHS, {"lr": _LR}) for one in (rule, load("adamw"))}
    ways = {name: partial(train, name, learner, data, epochs) for name, learner in learners.items()}
    curves = _train("with", ways, epochs)
    update = compare_update(rule, {"lr": _LR}, rounds=21)
    picture = out / "losses.png"
    plot(curves, picture, WIDTHS)
    if json:
        facts = {"rule_file": str(path), "picture": str(picture), "compile_seconds": seconds}
        print_json({**facts, "training": _data(curves), "update": vars(update)})
    else:
        _print(curves, update, picture)


def _compile(path: Path) -> tuple[Rule, str, float]:
    """The rule, its kernel's source, and the seconds until the kernel is ready: compiled, or from the cache."""
    from rulec.backend import registry
    from rulec.compiler.layout import kernel_for
    from rulec.compiler.pipeline import compile
    from rulec.language.library.load import load

    backend = registry.usable("cpu")
    begin = time.perf_counter()
    rule = load(path)
    kernel = kernel_for(compile(rule), "float32")
    source = backend.emit(*kernel)
    backend.build(*kernel, source)
    return rule, source, time.perf_counter() - begin


def _es(out: Path, epochs: int, json: bool) -> None:
    """The demonstration without a backward pass: trains with and without gradients, and draws the losses of both."""
    from rulec.tools.demo import digits, es
    from rulec.tools.demo.training import plot

    data, kind = digits.load("rulec demo", "demo"), es.framework()
    if not json:
        _introduce(kind)
    ways = {
        "a population": partial(es.train, data, epochs, kind),
        "gradients": partial(es.train_by_gradients, data, epochs),
    }
    curves = _train("by", ways, epochs)
    out.mkdir(parents=True, exist_ok=True)
    picture = out / "es_losses.png"
    plot(curves, picture, es.SETTING.widths)
    if json:
        print_json({"framework": kind, "picture": str(picture), "training": _data(curves)})
        return
    _print_curves("trained by", curves, timed=True)
    console().print(f"The losses are drawn in {picture}")


def _introduce(kind: str) -> None:
    from rulec.tools.demo import es

    p = es.SETTING.perturbation
    shape = "-".join(map(str, es.SETTING.widths))
    print(f"A perceptron {shape} on scikit-learn's handwritten digits, without a backward pass, in {kind}.")
    print(
        f"Each step is one forward of {p.members} members, {p.directions} antithetic pairs of noise of rank {p.rank};\n"
        f"its sum, weighted by their losses, is what {es.SETTING.rule} takes as the gradient."
    )


def _train(how: str, ways: Mapping[str, Callable[..., Curve]], epochs: int) -> list[Curve]:
    """The curve of each way, one after the other."""
    curves = []
    with progress() as shown:
        for name, way in ways.items():
            task = shown.add_task(f"training {how} {name}", total=epochs)
            curves.append(way(advance=partial(shown.advance, task)))
    return curves


def _show(path: Path, source: str, seconds: float) -> None:
    out = console()
    out.print(f"A rule that is not in the library, {path}:", style="bold")
    print_source(path.read_text(encoding="utf-8"), "yaml")
    out.print(f"\nIts kernel for float32 on the cpu, ready after {seconds:.2f} s:", style="bold")
    print_source(source, "python")


def _print(curves: list[Curve], update: Update, picture: Path) -> None:
    out = console()
    out.print("\nA multilayer perceptron on scikit-learn's handwritten digits:", style="bold")
    _print_curves("rule", curves, timed=False)
    out.print(f"\nOne update of its {update.parameters:,} parameters, medians by turns in this run:", style="bold")
    out.print(f"  rulec          {update.fused * 1e6:8.0f} us")
    out.print(f"  unfused NumPy  {update.unfused * 1e6:8.0f} us, {update.unfused / update.fused:.1f} times as long")
    out.print(f"  largest difference between them after 10 steps: {update.largest_difference:.1e}")
    out.print(f"\nThe losses are drawn in {picture}")


def _print_curves(title: str, curves: Sequence[Curve], timed: bool) -> None:
    rows = [
        [c.rule, f"{c.training[-1]:.4f}", f"{c.test[-1]:.4f}", f"{c.accuracy:.1%}", f"{c.seconds:.1f}"] for c in curves
    ]
    figures = ("training loss", "test loss", "test accuracy", "seconds")[: 4 if timed else 3]
    print_table((title, *figures), [row[: 1 + len(figures)] for row in rows], right=figures)


def _data(curves: Sequence[Curve]) -> dict[str, Any]:
    return {
        c.rule: {
            "training_loss": c.training, "test_loss": c.test, "test_accuracy": c.accuracy, "seconds": c.seconds
        }
        for c in curves
    }  # fmt: skip
