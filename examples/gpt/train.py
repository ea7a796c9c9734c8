"""Trains a GPT with every contender by turns, and writes losses, times and memory as JSON and as a picture.

python -m examples.gpt.train --size small --json docs/data/gpt.json --chart docs/gpt.png
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import track

from benchmarks.resident import peak_growth
from examples.gpt import in_jax
from examples.gpt.chart import draw
from examples.gpt.contenders import CONTENDERS, PAIRS, Trainer
from examples.gpt.model import GPT, SIZES, Size, loss_of, model
from examples.gpt.text import batches, corpus
from rulec.tools.compare.measure import facts

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

#: The first steps, which compile and fill caches, are in the losses but not in the times.
WARM = 5


class Run:
    """A contender in torch with its model, trained batch by batch."""

    def __init__(self, name: str, size: Size, device: str) -> None:
        self.net: GPT = model(size).to(device)
        self.trainer: Trainer = CONTENDERS[name](self.net, size.lr)
        self.device = device
        self.shares: list[float] = []

    def train(self, tokens: Any, following: Any) -> float:
        """Takes a step; the loss before it."""
        start = time.perf_counter()
        loss = loss_of(self.net, *(torch.from_numpy(a).to(self.device) for a in (tokens, following)))
        seconds = self.trainer.train(loss)
        self.shares.append(seconds / (time.perf_counter() - start))
        return float(loss.detach())


def trained(size: Size, device: str, jax: bool, steps: int) -> dict[str, Any]:
    """Contender -> its losses in nats, its seconds for each step, and the optimizer's share of them.

    All contenders take each batch one after the other, so that other work of the machine slows all of them alike.
    """
    runs: dict[str, Any] = {name: Run(name, size, device) for name in CONTENDERS}
    if jax:
        runs |= in_jax.runs(size, model(size))
    results: dict[str, Any] = {name: {"losses": [], "seconds": []} for name in runs}
    source = batches(corpus(), size.sequences, size.length, seed=1)
    for _ in track(range(steps), description="training"):
        tokens, following = next(source)
        for name, run in runs.items():
            start = time.perf_counter()
            results[name]["losses"].append(run.train(tokens, following))
            results[name]["seconds"].append(time.perf_counter() - start)
    for name, run in runs.items():
        if isinstance(run, Run):
            results[name]["share of the optimizer"] = statistics.median(run.shares[WARM:] or run.shares)
    return results


def figures(results: dict[str, Any], size: Size) -> dict[str, Any]:
    """What is read off the runs: tokens a second, and how far each pair of the same formulas is apart."""
    tokens = size.sequences * size.length
    for result in results.values():
        result["tokens a second"] = tokens / statistics.median(result["seconds"][WARM:] or result["seconds"])
    pairs = PAIRS | {name: "optax adamw" for name in results if name.startswith("rulec.jax")}
    for name, peer in pairs.items():
        if name in results:
            ours, theirs = results[name], results[peer]
            steps = [a / b for a, b in zip(theirs["seconds"], ours["seconds"], strict=True)][WARM:]
            ours["peer"] = peer
            ours["times as fast as its peer"] = statistics.median(steps or [1.0])
            ours["largest difference of losses in 100 steps"] = max(
                abs(a - b) for a, b in list(zip(ours["losses"], theirs["losses"], strict=True))[:100]
            )
    return results


def peak(name: str, size: str, device: str) -> int:
    """The most bytes that a model with three steps takes at once, in a process of its own.

    On a CPU: what the process grows by. Its libraries are loaded and a first model was trained before.
    """
    command = [sys.executable, "-m", "examples.gpt.train", "--memory-of", name, "--size", size, "--device", device]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def _peak_here(name: str, size: Size, device: str) -> int:
    def work(extents: Size) -> None:
        run = Run(name, extents, device)
        for tokens, following in islice(batches(corpus(), extents.sequences, extents.length, seed=1), 3):
            run.train(tokens, following)

    if device != "cpu":
        work(size)
        return torch.cuda.max_memory_allocated()
    work(SIZES["tiny"])
    return peak_growth(lambda: work(size))


@app.command()
def train(
    size: Annotated[str, typer.Option(help="tiny, small (10 million weights) or large (86 million).")] = "small",
    steps: Annotated[int | None, typer.Option(min=1, help="Steps; without it as many as the size says.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    jax: Annotated[bool, typer.Option(help="Train in JAX as well.")] = True,
    json_path: Annotated[Path | None, typer.Option("--json", metavar="PATH", help="Write the results here.")] = None,
    chart: Annotated[Path | None, typer.Option(metavar="PATH", help="Draw the losses here, as a PNG.")] = None,
    memory_of: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Train a GPT on the standard library's sources with optimizers of torch, optax and rulec, by turns."""
    if size not in SIZES:
        raise typer.BadParameter(f"--size {size} is none of {', '.join(SIZES)}")
    extents = SIZES[size]
    if memory_of is not None:
        print(_peak_here(memory_of, extents, device))
        return
    steps = steps or extents.steps
    results = figures(trained(extents, device, jax, steps), extents)
    for name in CONTENDERS:
        results[name]["peak bytes"] = peak(name, size, device)
    sizes = {"name": size, **asdict(extents)}
    record = {"size": sizes, "steps": steps, "device": device, "machine": facts(), "runs": results}
    _report(results)
    if json_path is not None:
        json_path.write_text(json.dumps(_rounded(record), indent=1) + "\n")
    if chart is not None:
        draw(record, chart)


def _rounded(value: Any) -> Any:
    """Numbers with seven digits: more of a loss in float32 says nothing."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.7g}") if isinstance(value, float) else value


def _report(results: dict[str, Any]) -> None:
    for name, result in results.items():
        line = f"{name:22} last loss {result['losses'][-1]:.4f}   {result['tokens a second']:8.0f} tokens a second"
        if "peer" in result:
            line += f"   {result['times as fast as its peer']:.2f} times as fast as {result['peer']}"
            line += f"   losses apart by {result['largest difference of losses in 100 steps']:.1e}"
        print(line)


if __name__ == "__main__":
    app()
