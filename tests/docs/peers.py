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
from rulec.compiler.reference import ReferenceOptimizer
from tests.docs.markdown import ROOT

if TYPE_CHECKING:
    from tests.rules.inputs import InputPeer
    from tests.rules.measure import Shapes
    from tests.rules.passes import PassPeer
    from tests.rules.peer import Peer
    from tests.rules.wrapper_peer import WrapperPeer

    Row = Peer | WrapperPeer | InputPeer | PassPeer

FILE = ROOT / "docs" / "data" / "peers.json"

#: What runs our side: of elementwise rules, of those that reduce or use matrices, and of wrappers.
BACKEND, WIDE_BACKEND, WRAPPER_BACKEND = "cpu", "cpu", "reference"
STEPS = 25
PACKAGES = ("numpy", "numba", "torch", "pytorch_optimizer", "jax", "optax")


def rows() -> list[Row]:
    """Every comparison that is measured."""
    from tests.rules.inputs import INPUTS
    from tests.rules.matrices import MATRICES
    from tests.rules.passes import PASSES
    from tests.rules.peers import PEERS
    from tests.rules.reducing import REDUCING
    from tests.rules.wrappers import WRAPPERS

    return [*PEERS, *REDUCING, *MATRICES, *WRAPPERS, *INPUTS, *PASSES]


def digest(peer: Row) -> str:
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


def measured(peer: Row) -> dict[str, Any]:
    """One row: the largest differences over the trial's steps, in float64 and for elementwise rules in float32.

    Where the row changes their side, `called` has the figures of it as its users call it. `options` are set by the row.
    """
    from tests.docs.called import distances, options
    from tests.rules.measure import ALL_DIMENSIONS, SHAPES, against_peer
    from tests.rules.peer import Peer
    from tests.rules.peers import PEERS
    from tests.rules.wrapper_peer import WrapperPeer

    row: dict[str, Any] = {"rule": peer.composed, "peer": peer.theirs, "digest": digest(peer)}
    if not isinstance(peer, Peer):
        apart = _around(peer) if isinstance(peer, WrapperPeer) else _driven(peer)
        row |= {"backend": WRAPPER_BACKEND, "float64_relative": apart}
        if peer.note:
            row["remark"] = peer.note
        if isinstance(peer, WrapperPeer) and peer.called is not None:
            row["called"] = distances(peer, ALL_DIMENSIONS)
        return row
    if peer in PEERS:
        row |= {"backend": BACKEND, "float64_relative": _two_digits(against_peer(peer, "float64", BACKEND).relative)}
        row["float32_ulps"] = round(against_peer(peer, "float32", BACKEND).ulps, 1)
    else:
        row |= {"backend": WIDE_BACKEND, "float64_relative": _wide(peer)}
    if remark := "; ".join(filter(None, (peer.note, *peer.changes))):
        row["remark"] = remark
    if set_there := options(peer):
        row["options"] = set_there
    if peer.called is not None:
        row["called"] = distances(peer, SHAPES if peer in PEERS else _shapes(peer))
    return row


def _wide(peer: Peer) -> float:
    """How far a row is apart on tensors of up to four dimensions."""
    from tests.rules.measure import Trial, largest_difference
    from tests.rules.runs import our_run

    trial = Trial("float64", shapes=_shapes(peer))
    ours = our_run(peer.ours(), trial.params, peer.hyper, WIDE_BACKEND)
    theirs = peer.start(trial.params, peer.hyper)
    return _two_digits(largest_difference(ours, theirs, trial, peer.hyper).relative)


def _around(row: WrapperPeer) -> float:
    """How far a wrapper is apart."""
    from tests.rules.measure import Trial, largest_difference

    trial = Trial("float64", shapes=row.shapes)
    ours, theirs = row.ours(trial.params), row.start(trial.params, row.hyper)
    return _two_digits(largest_difference(ours, theirs, trial, row.hyper).relative)


def _driven(row: InputPeer | PassPeer) -> float:
    """The difference of a rule with the gradients of a function, at points of the rule's choice or with the loss."""
    from tests.rules.inputs import InputPeer, inputs_of
    from tests.rules.passes import gradient_of, start

    rule, gradient, largest = rulec.load(row.composed), gradient_of(), 0.0
    ours = ReferenceOptimizer(rule, start(), dict(row.hyper))
    theirs = row.make() if isinstance(row, InputPeer) else row.make(row.hyper)
    for _ in range(STEPS):
        ours.step(gradient(ours.params), gradient=gradient, inputs=inputs_of(rule, ours.params))
        theirs.step()
        for a, b in zip(ours.params, theirs.params(), strict=True):
            largest = max(largest, float(abs(a - b).max() / abs(b).max()))
    return _two_digits(largest)


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
    kept = {(row["rule"], row["peer"]): row for row in read()["rows"]} if starts else {}
    found = []
    for peer in rows():
        old = kept.get((peer.composed, peer.theirs))
        found.append(old if old and not peer.composed.startswith(tuple(starts)) else measured(peer))
    _say_what_moved(found)
    versions = {package: version(package) for package in PACKAGES}
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(json.dumps({"steps": STEPS, "versions": versions, "rows": found}, indent=1) + "\n")


def _say_what_moved(rows: list[dict[str, Any]]) -> None:
    """Prints the rows that are new, that are gone, and whose distances are others than before."""
    before = {(row["rule"], row["peer"]): row for row in read()["rows"]}
    now = {(row["rule"], row["peer"]): row for row in rows}
    for rule, peer in dict.fromkeys([*before, *now]):
        old, new = before.get((rule, peer)), now.get((rule, peer))
        if old is None or new is None:
            print(f"{rule} beside {peer}: {'new' if old is None else 'gone'}")
        elif any(old.get(key) != new.get(key) for key in ("float64_relative", "float32_ulps", "called")):
            shown = [f"{row['float64_relative']:.1e} {row.get('called', '')}".strip() for row in (old, new)]
            print(f"{rule} beside {peer}: {shown[0]} before, {shown[1]} now")


if __name__ == "__main__":
    main(sys.argv[1:])
