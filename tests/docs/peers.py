"""How far every rule is from an implementation that is not ours: measured once, kept in docs/data/peers.json.

`python -m tests.docs.peers` measures again (some minutes: every rule is compiled twice), or, with the beginnings of
compositions after it, those rows alone. A row knows the rule and the values it was measured with, so that a test
notices when it is out of date without measuring.
"""

from __future__ import annotations

import hashlib
import json
import sys
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import rulec
from tests.docs.markdown import ROOT

if TYPE_CHECKING:
    from tests.rules.measure import Shapes
    from tests.rules.peer import Peer
    from tests.rules.wrappers import WrapperPeer

FILE = ROOT / "docs" / "data" / "peers.json"

#: What runs our side: of elementwise rules, of those that reduce or use matrices, and of wrappers.
BACKEND, WIDE_BACKEND, WRAPPER_BACKEND = "cpu", "cpu", "reference"
PACKAGES = ("numpy", "numba", "torch", "pytorch_optimizer", "jax", "optax")


def rows() -> list[Peer | WrapperPeer]:
    """Every comparison that is measured."""
    from tests.rules.matrices import MATRICES
    from tests.rules.peers import PEERS
    from tests.rules.reducing import REDUCING
    from tests.rules.wrappers import WRAPPERS

    return [*PEERS, *REDUCING, *MATRICES, *WRAPPERS]


def digest(peer: Peer | WrapperPeer) -> str:
    """What a measured row depends on, beside the packages: the rules and the values compared."""
    from tests.rules.peer import Peer

    found: rulec.Rule | None = peer.ours() if isinstance(peer, Peer) else rulec.load(peer.composed)
    parts = []
    while found is not None:
        rule = found.standalone()
        parts += [rule.step_text(), *(f"{k}={s.init!r}" for k, s in rule.state.items())]
        found = found.rest
    parts.append(json.dumps(dict(peer.hyper)))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def measured(peer: Peer | WrapperPeer) -> dict[str, Any]:
    """One row: the largest differences over the trial's steps, in float64 and for elementwise rules in float32."""
    from tests.rules.measure import against_peer
    from tests.rules.peer import Peer
    from tests.rules.peers import PEERS

    row: dict[str, Any] = {"rule": peer.composed, "peer": peer.theirs, "digest": digest(peer)}
    if not isinstance(peer, Peer):
        return {**row, "backend": WRAPPER_BACKEND, "float64_relative": _around(peer)}
    if peer in PEERS:
        row |= {"backend": BACKEND, "float64_relative": _two_digits(against_peer(peer, "float64", BACKEND).relative)}
        row["float32_ulps"] = round(against_peer(peer, "float32", BACKEND).ulps, 1)
        shipped = against_peer(peer, "float64", BACKEND, shipped=True).relative if peer.rounds else None
    else:
        row |= {"backend": WIDE_BACKEND, "float64_relative": _wide(peer)}
        shipped = _wide(peer, shipped=True) if peer.rounds else None
    if shipped is not None:
        row["as_shipped"] = _two_digits(shipped)
    if peer.note:
        row["remark"] = peer.note
    return row


def _wide(peer: Peer, *, shipped: bool = False) -> float:
    """How far a row is apart on tensors of up to four dimensions."""
    from tests.rules.measure import Trial, largest_difference
    from tests.rules.runs import our_run

    trial = Trial("float64", shapes=_shapes(peer))
    ours = our_run(peer.ours(), trial.params, peer.hyper, WIDE_BACKEND)
    theirs = peer.start(trial.params, peer.hyper, shipped=shipped)
    return _two_digits(largest_difference(ours, theirs, trial, peer.hyper).relative)


def _around(row: WrapperPeer) -> float:
    """How far a wrapper is apart."""
    from tests.rules.measure import Trial, largest_difference

    trial = Trial("float64", shapes=row.shapes)
    ours, theirs = row.ours(trial.params), row.start(trial.params, row.hyper)
    return _two_digits(largest_difference(ours, theirs, trial, row.hyper).relative)


def _shapes(peer: Peer) -> Shapes:
    from tests.rules.matrices import MATRICES
    from tests.rules.measure import ALL_DIMENSIONS
    from tests.rules.test_matrices import SHAPES

    return SHAPES if peer in MATRICES else ALL_DIMENSIONS


def _two_digits(value: float) -> float:
    return float(f"{value:.1e}")


def read() -> dict[str, Any]:
    """What was measured: the steps, the packages' versions, and the rows."""
    found: dict[str, Any] = json.loads(FILE.read_text())
    return found


def main(starts: list[str]) -> None:
    """Measures every comparison, or those of the compositions that begin so, and writes the file."""
    from tests.rules.measure import STEPS

    kept = {(row["rule"], row["peer"]): row for row in read()["rows"]} if starts else {}
    found = []
    for peer in rows():
        old = kept.get((peer.composed, peer.theirs))
        found.append(old if old and not peer.composed.startswith(tuple(starts)) else measured(peer))
    versions = {package: version(package) for package in PACKAGES}
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(json.dumps({"steps": STEPS, "versions": versions, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
