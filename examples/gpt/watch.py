"""Trains a small GPT with Lion at a rate that is too high and at a tenth of it, and says which curve shows it first.

python -m examples.gpt.watch --json docs/data/watch.json --chart docs/watch.png
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any

import torch
import typer
from rich.progress import track

import rulec.torch
from examples.gpt.chart import draw_watch
from examples.gpt.model import SIZES, loss_of, model
from examples.gpt.text import batches, corpus

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

#: Curve -> its values in nats or of a statistic, step by step.
Curves = Mapping[str, Sequence[float]]

#: The statistics that the optimizer measures, of all weights together.
WATCH = {
    "cosine": 'sum(update*grad, per="model")/(norm(update, per="model")*norm(grad, per="model"))',
    "largest_grad": 'max(abs(grad), per="model")',
    "grad_norm": 'norm(grad, per="model")',
}

#: The statistics that show a failure by becoming smaller, in absolute value; the others become larger.
FALLING = ("cosine",)

#: The rates of the two trainings.
RATES = (0.02, 0.003)

#: The seeds of the trainings at each rate; those from 0 to 4 served to choose the rates and the rule for a failure.
SEEDS = range(5, 10)

#: The size of the model, with more sequences in a batch, whose losses vary less then.
SIZE = replace(SIZES["tiny"], sequences=8, steps=700)

#: The steps in which the rate rises to its value, and whose median is the usual value of a statistic.
FIRST = 100

#: The steps that a point of every curve is the mean of.
SPAN = 20

#: By which factor a statistic must leave its usual value, and by how many nats the loss must rise.
TIMES, RISE = 2.0, 0.3


def means(values: Sequence[float]) -> list[float]:
    """The means of the last `SPAN` values, one for each step that has so many."""
    return [fmean(values[end - SPAN : end]) for end in range(SPAN, len(values) + 1)]


def usual(values: Sequence[float]) -> float:
    """The median of the means of the first steps."""
    return median(means(values[:FIRST]))


def step_of_loss(losses: Sequence[float]) -> int | None:
    """The first step after the first ones whose mean loss is `RISE` above the lowest before; None without one."""
    lowest = math.inf
    for step, mean in enumerate(means(losses), SPAN):
        if step > FIRST and mean > lowest + RISE:
            return step
        lowest = min(lowest, mean)
    return None


def step_of(values: Sequence[float], falling: bool) -> int | None:
    """The same of a statistic, whose mean is `TIMES` its usual value, or one such part where it is `falling`."""
    center = usual(values)
    for step, mean in enumerate(means(values), SPAN):
        times = mean / center
        if step > FIRST and (times < 1 / TIMES if falling else times > TIMES):
            return step
    return None


def shown(curves: Curves) -> dict[str, int | None]:
    """Curve -> the first step that shows that the training fails."""
    steps = {name: step_of(values, name in FALLING) for name, values in curves.items() if name != "loss"}
    return {"loss": step_of_loss(curves["loss"]), **steps}


def trained(rate: float, seed: int, steps: int) -> Curves:
    """The losses and the statistics of a training, rounded to five digits."""
    net = model(SIZE, seed)
    optimizer = rulec.torch.Lion(net.parameters(), lr=rate, watch=WATCH)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / FIRST, total_iters=FIRST - 1)
    curves: dict[str, list[float]] = {name: [] for name in ("loss", *WATCH)}
    for tokens, following in islice(batches(corpus(), SIZE.sequences, SIZE.length, seed=seed + 1), steps):
        optimizer.zero_grad()
        loss = loss_of(net, torch.from_numpy(tokens), torch.from_numpy(following))
        torch.autograd.backward(loss)
        optimizer.step()
        schedule.step()
        for name, value in {"loss": float(loss.detach()), **optimizer.statistics().numbers()}.items():
            curves[name].append(float(f"{value:.5g}"))
    return curves


@app.command()
def watch(
    steps: Annotated[int, typer.Option(min=FIRST + 1, help="Steps of each training.")] = SIZE.steps,
    seeds: Annotated[int, typer.Option(min=1, max=len(SEEDS), help="Trainings at each rate.")] = len(SEEDS),
    json_path: Annotated[Path | None, typer.Option("--json", metavar="PATH", help="Write the results here.")] = None,
    chart: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Draw the curves of one seed here, as a PNG.")
    ] = None,
) -> None:
    """Train a GPT at two rates, and print the steps at which loss and statistics show that the first is too high."""
    torch.set_num_threads(1)  # sums in one order
    turns = [(rate, seed) for seed in SEEDS[:seeds] for rate in RATES]
    runs = [(rate, seed, trained(rate, seed, steps)) for rate, seed in track(turns, description="training")]
    results: list[dict[str, Any]] = [
        {"rate": rate, "seed": seed, "shown": shown(curves), **({"curves": curves} if seed == SEEDS[0] else {})}
        for rate, seed, curves in runs
    ]
    for each in results:
        print(f"rate {each['rate']:g}, seed {each['seed']}:", ", ".join(f"{k} {n}" for k, n in each["shown"].items()))
    record = {"size": asdict(SIZE), "steps": steps, "watch": WATCH, "runs": results}
    if json_path is not None:
        json_path.write_text(json.dumps(record) + "\n")
    if chart is not None:
        draw_watch([each for each in results if "curves" in each], SPAN, chart)


if __name__ == "__main__":
    app()
