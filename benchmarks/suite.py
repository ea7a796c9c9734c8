"""The measurements by name, as `rulec bench` runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from benchmarks.gpu.asked import Asked
from benchmarks.result import Result
from rulec.errors import RulecError
from rulec.language.source import did_you_mean

#: Measurement -> one line about it, in the order of the manual's page.
MEASUREMENTS: dict[str, str] = {
    "rules": "every elementwise rule on one large tensor, against the memory's limit and torch",
    "reductions": "every rule that reduces on one large matrix, against its stages' limit and other libraries",
    "matrices": "Muon and other rules for matrices, against their products and torch, and what they keep",
    "orthogonal": "how far Newton-Schulz in 16 bits is from its polynomials in float64, in both of its forms",
    "many": "many tensors at once, and many groups, with all that a step does around its kernel",
    "watch": "what the statistics of a step cost, in the pass that computes it, and by torch's operations after it",
    "offload": "the step on the host of weights and states that lie there, against the memory's limit and others",
    "start": "what importing costs, the first step of a process, and compiling",
    "memory": "what a step allocates, and what training keeps, by kind, with eager updates and without",
    "mesh": "what a step of Muon costs on 8 to 10,240 GPUs, counted on paper",
    "states": "states in codes of eight and four bits: how far a run ends from one in floats, and what steps cost",
    "es": "evolution strategies: perturbed layers in one batch, steps without a gradient, and how near they come",
    "race": "a race's learning rates and seeds as one batch, against the same runs one by one",
    "jax": "steps in JAX against optax under jit: large leaves, many leaves, and the first call",
    "gpu": "correctness, bandwidth, memory, other libraries and the host's time on one GPU, in parts of nine minutes",
}


@dataclass(frozen=True)
class Measurement:
    """A measurement ready to run: `run(advance)` calls `advance` after each of its `parts`."""

    name: str
    parts: int
    run: Callable[[Callable[[], object]], Result]


def usual() -> list[str]:
    """The names of the measurements that can run here: without a GPU all but `gpu`, and without JAX all but `jax`."""
    from benchmarks.gpu import device as gpu_device
    from benchmarks.jax import measure as jax

    needs = {"gpu": gpu_device.missing, "jax": jax.missing}
    return [name for name in MEASUREMENTS if name not in needs or needs[name]() is None]


def measurement(
    name: str, quick: bool, only: Sequence[str] = (), keep: Callable[[Result], object] = lambda _: None,
    asked: Asked | None = None,
) -> Measurement:  # fmt: skip
    """The measurement of that name. `quick` takes sizes too small to count, `only` restricts it to some rules.

    A measurement that may be interrupted gives its results so far to `keep`, part by part. `asked` is of the one on a
    GPU.

    RulecError for a name that is none of `MEASUREMENTS`, and for an unknown part.
    """
    if name == "rules":
        from benchmarks import rules

        parts = len(rules.plan(only)) + len(rules.half_width(only))
        return _restricted(name, parts, only, lambda advance: rules.measure(quick, only, advance))
    if name == "reductions":
        from benchmarks import reductions

        parts = reductions.parts(only)
        return _restricted(name, parts, only, lambda advance: reductions.measure(quick, only, advance))
    if name == "matrices":
        from benchmarks import matrices

        parts = matrices.parts(quick, only)
        return _restricted(name, parts, only, lambda advance: matrices.measure(quick, only, advance))
    if name == "orthogonal":
        from benchmarks import orthogonal

        return Measurement(name, len(orthogonal.SCHEDULES), lambda advance: orthogonal.measure(quick, advance))
    if name == "many":
        from benchmarks import many

        return Measurement(name, many.PARTS, lambda advance: many.measure(quick, advance))
    if name == "watch":
        from benchmarks import watch

        return Measurement(name, watch.PARTS, lambda advance: watch.measure(quick, advance))
    if name == "offload":
        from benchmarks import offload

        return Measurement(name, offload.PARTS, lambda advance: offload.measure(quick, advance))
    if name == "start":
        from benchmarks import start

        return Measurement(name, start.parts(), lambda advance: start.measure(quick, advance))
    if name == "memory":
        from benchmarks.memory import measure as memory

        return _restricted(name, memory.parts(only), only, lambda advance: memory.measure(quick, only, advance))
    if name == "mesh":
        from benchmarks import mesh

        return Measurement(name, len(mesh.meshes(quick)), lambda advance: mesh.measure(quick, advance))
    if name == "states":
        from benchmarks import states

        return Measurement(name, states.PARTS, lambda advance: states.measure(quick, advance))
    if name == "es":
        from benchmarks.es import measure as es

        return _restricted(name, es.parts(quick, only), only, lambda advance: es.measure(quick, only, advance))
    if name == "race":
        from benchmarks import race

        return _restricted(name, race.parts(only), only, lambda advance: race.measure(quick, only, advance))
    if name == "jax":
        from benchmarks.jax import measure as jax

        return _restricted(name, jax.parts(only), only, lambda advance: jax.measure(quick, only, advance))
    if name == "gpu":
        from benchmarks.gpu import measure as gpu

        parts = gpu.parts(only, asked)
        return Measurement(name, parts, lambda advance: gpu.measure(quick, only, advance, keep, asked))
    known = ", ".join(MEASUREMENTS)
    raise RulecError(f"there is no measurement {name!r}{did_you_mean(name, MEASUREMENTS)}: there are {known}")


def _restricted(
    name: str, parts: int, only: Sequence[str], run: Callable[[Callable[[], object]], Result]
) -> Measurement:
    """A measurement restricted to some rules, with a note where it measures none of them."""

    def noted(advance: Callable[[], object]) -> Result:
        result = run(advance)
        return replace(result, notes=[*result.notes, f"nothing here is about {', '.join(only)}"])

    return Measurement(name, parts, run if parts else noted)
