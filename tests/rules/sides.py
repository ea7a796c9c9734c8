"""Sides of a comparison made of others: by the tensors' shapes, on flattened tensors, inside a context."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from tests.rules.peer import Peer, Start
from tests.rules.runs import Array, Hyper, Run

Context = Callable[[], AbstractContextManager[Any]]


class Routed:
    """Two sides: one has tensors of those numbers of dimensions, the other has the rest."""

    def __init__(
        self, matrices: Start, rest: Start, params: Sequence[Array], hyper: Hyper, dimensions: Collection[int] = (2,)
    ) -> None:
        self.count = len(params)
        self.parts: list[tuple[list[int], Run]] = []
        for start, wanted in ((matrices, True), (rest, False)):
            indices = [i for i, p in enumerate(params) if (p.ndim in dimensions) is wanted]
            if indices:
                self.parts.append((indices, start([params[i] for i in indices], hyper)))

    def step(self, grads: Sequence[Array], hyper: Hyper) -> None:
        """One update of both."""
        for indices, run in self.parts:
            run.step([grads[i] for i in indices], hyper)

    def params(self) -> list[Array]:
        """The parameters of both, in their order."""
        found = {i: p for indices, run in self.parts for i, p in zip(indices, run.params(), strict=True)}
        return [found[i] for i in range(self.count)]


class Flattened:
    """A side that sees a tensor of more than two dimensions as the matrix of its first dimension and the rest."""

    def __init__(self, start: Start, params: Sequence[Array], hyper: Hyper) -> None:
        self.shapes = [p.shape for p in params]
        self.run = start([_matrix(p) for p in params], hyper)

    def step(self, grads: Sequence[Array], hyper: Hyper) -> None:
        """One update."""
        self.run.step([_matrix(g) for g in grads], hyper)

    def params(self) -> list[Array]:
        """The parameters in their own shapes."""
        return [p.reshape(shape) for p, shape in zip(self.run.params(), self.shapes, strict=True)]


def _matrix(array: Array) -> Array:
    return array.reshape(array.shape[0], -1) if array.ndim > 2 else array


class Transposed:
    """A side that sees matrices transposed."""

    def __init__(self, start: Start, params: Sequence[Array], hyper: Hyper) -> None:
        self.run = start([p.T.copy() for p in params], hyper)

    def step(self, grads: Sequence[Array], hyper: Hyper) -> None:
        """One update."""
        self.run.step([g.T.copy() for g in grads], hyper)

    def params(self) -> list[Array]:
        """The parameters as they were given."""
        return [p.T for p in self.run.params()]


class Inside:
    """A side that is made, and steps, inside a context of its own."""

    def __init__(self, start: Start, context: Context, params: Sequence[Array], hyper: Hyper) -> None:
        self.context = context
        with context():
            self.run = start(params, hyper)

    def step(self, grads: Sequence[Array], hyper: Hyper) -> None:
        """One update."""
        with self.context():
            self.run.step(grads, hyper)

    def params(self) -> list[Array]:
        """The parameters now."""
        return self.run.params()


def routed(peer: Peer, other: Peer, *, batches: bool = False) -> Peer:
    """The row whose other side takes what is no matrix, or no batch of matrices, to that of another row."""
    dimensions = (2, 3, 4, 5) if batches else (2,)

    def start(params: Sequence[Array], hyper: Hyper, *, shipped: bool = False) -> Run:
        return Routed(peer.start, other.start, params, hyper, dimensions)

    which = "tensors of two dimensions or more" if batches else "matrices"
    changed = _changed(peer, f"theirs has {which} alone, and {other.theirs} the rest")
    return replace(changed, theirs=f"{peer.theirs}, {other.theirs}", start=start)


def flattened(peer: Peer) -> Peer:
    """The row whose other side sees no more than two dimensions."""

    def start(params: Sequence[Array], hyper: Hyper, *, shipped: bool = False) -> Run:
        return Flattened(peer.start, params, hyper)

    changed = _changed(peer, "theirs has the matrix of the first dimension and the rest for a tensor of more than two")
    return replace(changed, start=start)


def transposed(peer: Peer) -> Peer:
    """The row whose other side sees matrices transposed."""

    def start(params: Sequence[Array], hyper: Hyper, *, shipped: bool = False) -> Run:
        return Transposed(peer.start, params, hyper)

    return replace(_changed(peer, "theirs has matrices transposed"), start=start)


def inside(peer: Peer, context: Context, what: str) -> Peer:
    """The row whose other side steps inside a context, which does `what`; not as shipped, where nothing is changed."""

    def start(params: Sequence[Array], hyper: Hyper, *, shipped: bool = False) -> Run:
        return peer.start(params, hyper, shipped=True) if shipped else Inside(peer.start, context, params, hyper)

    return replace(_changed(peer, what), start=start)


def _changed(peer: Peer, what: str) -> Peer:
    """The row with one more change; without changes before it, theirs as it is now is as its users call it."""
    return replace(peer, changes=(*peer.changes, what), called=peer.called or peer.start)


def patched(**values: Any) -> Context:
    """A context in which names hold other values: `patched(**{"module.name": value})`."""

    @contextmanager
    def context() -> Iterator[None]:
        with ExitStack() as stack:
            for target, value in values.items():
                stack.enter_context(mock.patch(target, value))
            yield

    return context


class Instead:
    """A module with some of its names replaced, for what is a parameter's default or a dtype written in code."""

    def __init__(self, module: Any, **names: Any) -> None:
        self._module, self._names = module, names

    def __getattr__(self, name: str) -> Any:
        return self._names[name] if name in self._names else getattr(self._module, name)


def nothing_under_the_root(optimizer: Any) -> None:
    """pytorch_optimizer adds 1e-15 to some second moments: it adds nothing now."""
    optimizer.apply_ams_bound = functools.partial(optimizer.apply_ams_bound, exp_avg_sq_eps=0)
