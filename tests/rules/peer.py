"""One row of the comparisons: a rule of ours beside an implementation that is not."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import rulec
from tests.rules.runs import Array, Hyper, OptaxRun, Run, TorchRun


class Start(Protocol):
    """Makes their side: as shipped, or where `shipped` is false without the rounding of their scalars to float32."""

    def __call__(self, params: Sequence[Array], hyper: Hyper, *, shipped: bool = False) -> Run: ...


@dataclass(frozen=True)
class Peer:
    """One row of the table: rules of ours, and who else computes them.

    `composed` is our side, where `l2` or `decay` stands for their `weight_decay`: `l2 >> adam`. `hyper` are the values
    compared. `note` says what the two sides do differently; `rounds` that their scalars are float32, which shows in
    float64 as shipped.

    Where the row changes theirs, or what theirs is given, `changes` say so, or `note` does, and `called` makes theirs
    as its users call it. `keywords` are the arguments of their class.
    """

    composed: str
    theirs: str
    hyper: Hyper
    start: Start
    note: str = ""
    rounds: bool = False
    changes: tuple[str, ...] = ()
    called: Start | None = None
    keywords: Callable[[Hyper], dict[str, Any]] | None = None

    @property
    def parts(self) -> list[str]:
        """The rules composed, with what is bound in them."""
        return re.split(r" >> | \+ ", self.composed)

    @property
    def names(self) -> list[str]:
        """The library names of the rules composed."""
        return [part.partition("(")[0] for part in self.parts]

    @property
    def rule(self) -> str:
        """The rule this row is about: the first that is no weight decay."""
        return next(name for name in self.names if name not in ("l2", "decay"))

    def ours(self) -> rulec.Rule:
        """Our side as a rule."""
        first, *others = map(rulec.load, self.parts)
        for other in others:
            first = first >> other if ">>" in self.composed else first + other
        return first

    def __str__(self) -> str:
        return f"{self.composed} = {self.theirs}"


def torch_peer(
    composed: str, kind: Any, keywords: Callable[[Hyper], dict[str, Any]], hyper: Hyper, note: str = "", *,
    prepare: Callable[[Any], None] | None = None, widen: Callable[[Any], None] | None = None, rounds: bool = False,
    usual: bool = False,
) -> Peer:  # fmt: skip
    """A row whose other side is a class of torch.optim or pytorch_optimizer, or one derived from it in the tests.

    Its users do what `prepare` does, where that is `usual`.
    """
    theirs = _theirs(kind)
    package = "torch.optim" if theirs.__module__.startswith("torch.") else "pytorch_optimizer"

    def start(params: Sequence[Array], hyper: Hyper, *, shipped: bool = False) -> Run:
        plain = shipped or not (rounds or widen)
        return TorchRun(kind, keywords, params, hyper, prepare=prepare, widen=widen, shipped=plain)

    def called(params: Sequence[Array], hyper: Hyper, *, shipped: bool = False) -> Run:
        return TorchRun(theirs, keywords, params, hyper, shipped=True)

    changed = not usual and bool(prepare or widen or rounds or kind is not theirs)
    name = f"{package}.{theirs.__name__}"
    return Peer(composed, name, hyper, start, note, rounds, called=called if changed else None, keywords=keywords)


def _theirs(kind: Any) -> Any:
    """The class of their package that a class of the tests is derived from; any other callable as it is."""
    classes = getattr(kind, "__mro__", (kind,))
    return next((each for each in classes if not each.__module__.startswith("tests.")), kind)


def optax_peer(
    composed: str, theirs: str, make: Callable[[Hyper], Any], hyper: Hyper, note: str = "", *,
    prepare: Callable[[Any], Any] | None = None,
) -> Peer:  # fmt: skip
    """A row whose other side is an optax transformation."""

    def start(params: Sequence[Array], hyper: Hyper, *, shipped: bool = False) -> Run:
        return OptaxRun(make, params, hyper, prepare=prepare)

    def called(params: Sequence[Array], hyper: Hyper, *, shipped: bool = False) -> Run:
        return OptaxRun(make, params, hyper)

    return Peer(composed, theirs, hyper, start, note, called=called if prepare else None)


def printed_peer(
    composed: str, theirs: str, kind: Callable[[Sequence[Array]], Run], hyper: Hyper, note: str = ""
) -> Peer:
    """A row whose other side is an algorithm as it is printed."""

    def start(params: Sequence[Array], hyper: Hyper, *, shipped: bool = False) -> Run:
        return kind(params)

    return Peer(composed, theirs, hyper, start, note)


def adam_like(h: Hyper) -> dict[str, Any]:
    """The keywords that Adam and most of its kin share."""
    return {"lr": h["lr"], "betas": (h["beta1"], h["beta2"]), "eps": h["eps"], "weight_decay": h.get("weight_decay", 0)}


def same(*names: str, **fixed: Any) -> Callable[[Hyper], dict[str, Any]]:
    """Keywords of the same names, and fixed ones."""
    return lambda h: {**{name: h[name] for name in names}, **fixed}
