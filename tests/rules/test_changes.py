"""A row that changes theirs, or what theirs is given, says so: the manual's table shows what a user's call would give.

The other side of every row is watched: whether shapes are others than ours, names of other modules are replaced, the
optimizer is prepared or derived, or shapes are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch

from tests.docs.peers import rows
from tests.rules import runs
from tests.rules.inputs import InputPeer
from tests.rules.matrices import MATRICES
from tests.rules.measure import ALL_DIMENSIONS, SHAPES, Trial
from tests.rules.passes import PassPeer
from tests.rules.peer import Peer, printed_peer, torch_peer
from tests.rules.peers import PEERS
from tests.rules.runs import Array, OptaxRun, TorchRun
from tests.rules.sides import flattened, inside, patched, transposed
from tests.rules.wrapper_peer import WrapperPeer

if TYPE_CHECKING:
    from tests.docs.peers import Row

pytestmark = pytest.mark.peer


@contextmanager
def watched(given: Sequence[tuple[int, ...]]) -> Iterator[set[str]]:
    """The changes that are made to theirs inside, where a row gives tensors of these shapes."""
    seen: set[str] = set()

    def torch_run(self: TorchRun, kind: Any, keywords: Any, params: Sequence[Array], *args: Any, **others: Any) -> None:
        _torch_run(self, kind, keywords, params, *args, **others)
        _shapes(params)
        if self.before_first or not self.shipped or type(self.optimizer).__module__.startswith("tests."):
            seen.add("another optimizer")

    def optax_run(self: OptaxRun, make: Any, params: Sequence[Array], *args: Any, prepare: Any = None) -> None:
        _optax_run(self, make, params, *args, prepare=prepare)
        _shapes(params)
        if prepare is not None:
            seen.add("another optimizer")

    def _shapes(params: Sequence[Array]) -> None:
        if [p.shape for p in params] != [*given]:
            seen.add("other shapes")

    def enter(self: Any) -> Any:
        seen.add("replaced names")
        return _enter(self)

    _torch_run, _optax_run, _enter = runs.TorchRun.__init__, runs.OptaxRun.__init__, mock._patch.__enter__
    with (
        mock.patch.object(runs.TorchRun, "__init__", torch_run),
        mock.patch.object(runs.OptaxRun, "__init__", optax_run),
        mock.patch.object(mock._patch, "__enter__", enter),
    ):
        yield seen


def changes(row: Row) -> set[str]:
    """What a row changes where its other side begins; rows with passes or inputs change names in their steps."""
    if isinstance(row, InputPeer | PassPeer):
        with watched([]) as seen:
            (row.make() if isinstance(row, InputPeer) else row.make(row.hyper)).step()
        return seen - {"other shapes"}
    trial = Trial("float64", 1, row.shapes if isinstance(row, WrapperPeer) else (*ALL_DIMENSIONS, (5, 5)))
    if row in PEERS:
        trial = Trial("float64", 1, SHAPES)
    with watched(trial.shapes) as seen:
        row.start(trial.params, row.hyper)
    if isinstance(row, WrapperPeer) and row.shapes != ALL_DIMENSIONS:
        seen.add("shapes left out")
    return seen


def unsaid(row: Row) -> set[str]:
    """What a row changes without a word of it."""
    said = (row.note, *(row.changes if isinstance(row, Peer) else ()))
    found = changes(row)
    if "other shapes" in found and not any("theirs has" in each or "given" in each for each in said):
        return {"other shapes"}
    if isinstance(row, Peer) and "replaced names" in found and not row.changes:
        return {"replaced names"}
    return set() if any(said) else found


@pytest.mark.parametrize("composed", ["soap", "kron", "muon", "adam_mini + decay", "sm3"])
def test_a_row_of_matrices_says_what_it_changes(composed: str) -> None:
    peer = next(peer for peer in MATRICES if peer.composed == composed)
    assert changes(peer)
    assert unsaid(peer) == set()
    assert unsaid(replace(peer, note="", changes=())) != set()


@pytest.mark.slow
def test_a_row_that_changes_theirs_says_so() -> None:
    assert {str(row): missing for row in rows() if (missing := unsaid(row))} == {}


@pytest.mark.slow
def test_a_row_that_changes_theirs_is_measured_without_the_change() -> None:
    """Where there is code of theirs to call: an algorithm from a page has none, nor has caution added by hand."""
    rows_of_rules = [row for row in rows() if isinstance(row, Peer)]
    without = [row for row in rows_of_rules if row.called is None and changes(row) - {"other shapes"}]
    assert [str(row) for row in without if "by hand" not in row.note and "clip_grad_norm_" not in row.note] == []


def _plain() -> Peer:
    return torch_peer("adam", torch.optim.Adam, lambda h: {"lr": h["lr"]}, {"lr": 0.1})


def test_every_kind_of_change_is_seen() -> None:
    """A row says so by itself where it is made of others; with its words taken away, it is found."""

    class Derived(torch.optim.Adam):
        pass

    assert unsaid(_plain()) == set()
    made = {
        "other shapes": [flattened(_plain()), transposed(_plain())],
        "replaced names": [inside(_plain(), patched(**{"torch.addmm": torch.addmm}), "with a name replaced")],
        "another optimizer": [
            torch_peer("adam", Derived, lambda h: {"lr": h["lr"]}, {"lr": 0.1}, "derived"),
            torch_peer("adam", torch.optim.Adam, lambda h: {"lr": h["lr"]}, {"lr": 0.1}, "prepared", prepare=str),
        ],
    }  # fmt: skip
    for kind, peers in made.items():
        for peer in peers:
            assert unsaid(peer) == set()
            assert kind in unsaid(replace(peer, note="", changes=()))
    printed = printed_peer("adam", "", lambda params: _plain().start(params, {"lr": 0.1}), {"lr": 0.1})
    assert unsaid(printed) == set()
