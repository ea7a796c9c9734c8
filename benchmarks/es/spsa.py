"""Training by two forwards: the bytes written in a step and its time, against MeZO as published."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks.es.layers import kept_bytes
from benchmarks.es.mezo import MeZO
from benchmarks.es.turns import Turn, by_turns
from benchmarks.result import Row
from rulec.es import Perturbation

if TYPE_CHECKING:
    import torch

#: Linear layers of this width, and rows of a batch: few, so that most of a step is what is done to the weights.
DEPTH, WIDTH, ROWS = 16, 1536, 4
QUICK_DEPTH, QUICK_WIDTH = 2, 64

VALUES = ("normal", "popcount", "rademacher")

ROUNDS, QUICK_ROUNDS, SECONDS = 9, 1, 6.0

#: Sweeps of writes over the parameters that a step may take: the published code takes four.
SWEEPS = 2.0

#: What rows say.
WRITTEN = "sweeps of writes over the parameters in a step"
ALL = "bytes written in a step beside the forwards', over the parameters'"
TIME = "step, of the time of MeZO's in torch"
KEPT = "bytes kept between two forwards and their update"


@dataclass
class Trained:
    """A deep linear network with its inputs, for one way of training."""

    model: torch.nn.Module
    inputs: torch.Tensor
    params: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.params = list(self.model.parameters())

    def loss(self) -> torch.Tensor:
        """The mean square of the network's outputs."""
        loss: torch.Tensor = self.model(self.inputs).square().mean()
        return loss

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters."""
        return sum(param.nbytes for param in self.params)


def trained(quick: bool) -> Trained:
    """The network with its first weights, the same in every call."""
    import torch

    depth, width = (QUICK_DEPTH, QUICK_WIDTH) if quick else (DEPTH, WIDTH)
    torch.manual_seed(0)
    layers = [torch.nn.Linear(width, width, bias=False) for _ in range(depth)]
    return Trained(torch.nn.Sequential(*layers), torch.randn(ROWS, width))


def mezo_step(of: Trained) -> Callable[[], None]:
    """A step of MeZO as published."""
    theirs = MeZO(of.params)
    return lambda: theirs.step(of.loss)


def our_step(of: Trained, values: str) -> Callable[[], None]:
    """A step of the spsa family; rulec's sgd draws the noise again in its kernel."""
    import rulec.torch

    perturbation = Perturbation("spsa", directions=1, sigma=1e-3, seed=0, values=values)  # type: ignore[arg-type]
    es = rulec.torch.perturb(of.model, perturbation)
    opt = rulec.torch.SGD(of.params, lr=1e-3)

    def step() -> None:
        es.step(es.evaluate(lambda: -of.loss()), opt)

    return step


def parts() -> int:
    """The number of parts: one for writes, and one for each kind of values."""
    return 1 + len(VALUES)


def rows(quick: bool, advance: Callable[[], object] = lambda: None) -> Iterator[Row]:
    """The rows of both ways; `advance` is called after each part."""
    yield from writes(quick)
    yield _kept(quick)
    advance()
    for values in VALUES:
        yield _time(values, quick)
        advance()


def writes(quick: bool) -> Iterator[Row]:
    """The rows about the bytes written in a step, counted while it runs."""
    ways: dict[str, tuple[Callable[[Trained], Callable[[], None]], float | None]] = {
        "MeZO in torch": (mezo_step, None), "spsa, normal": (lambda of: our_step(of, "normal"), SWEEPS)
    }  # fmt: skip
    for name, (make, bar) in ways.items():
        of = trained(quick)
        step = make(of)
        step()  # states and kernels are there from the second step on
        yield from _counted(name, of, step, bar)


def _counted(name: str, of: Trained, step: Callable[[], None], bar: float | None) -> Iterator[Row]:
    from benchmarks.es.writes import counted

    with counted(of.params) as forward:
        _forward(of)
    with counted(of.params) as written:
        step()
    detail = {"bytes": written.watched, "all": written.all, "of_one_forward": forward.all, "parameters": of.nbytes}
    yield Row(name, WRITTEN, written.watched / of.nbytes, bar, "at most", detail=detail)
    yield Row(name, ALL, (written.all - 2 * forward.all) / of.nbytes, detail=detail)


def _forward(of: Trained) -> None:
    import torch

    with torch.no_grad():
        of.loss()


def _kept(quick: bool) -> Row:
    """The bytes kept between two forwards and their update: no noise may be among them."""
    import rulec.torch

    of = trained(quick)
    es = rulec.torch.perturb(of.model, Perturbation("spsa", directions=1, sigma=1e-3, seed=0))
    fitness: Any = es.evaluate(lambda: -of.loss())
    kept = kept_bytes(lambda: es.evaluate(lambda: -of.loss()))
    es.update(fitness)
    return Row("spsa, normal", KEPT, float(kept), 0.0, "at most", "B")


def _time(values: str, quick: bool) -> Row:
    theirs, ours = trained(quick), trained(quick)
    steps = {"ours": Turn(our_step(ours, values)), "mezo": Turn(mezo_step(theirs))}
    times = by_turns(steps, QUICK_ROUNDS if quick else ROUNDS, SECONDS)
    detail = times.medians()
    scatter = {"scatter": times.quartiles("ours", "mezo"), "parameters": sum(p.numel() for p in ours.params)}
    return Row(f"spsa, {values}", TIME, times.ratio("ours", "mezo"), 1.0, "at most", detail={**detail, **scatter})
