"""How far every rule is from an implementation that is not ours: measured once, kept in docs/data/peers.json.

`python -m tests.docs.peers` measures again (some minutes: every rule is compiled twice). A row knows the rule and the
values it was measured with, so that a test notices when it is out of date without measuring.
"""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from tests.docs.markdown import ROOT

if TYPE_CHECKING:
    from tests.rules.peers import Peer

FILE = ROOT / "docs" / "data" / "peers.json"
BACKEND = "cpu"
PACKAGES = ("numpy", "numba", "torch", "pytorch_optimizer", "jax", "optax")


def digest(peer: Peer) -> str:
    """What a measured row depends on, beside the packages: the rule and the values compared."""
    rule = peer.ours().standalone()
    parts = [rule.step_text(), *(f"{k}={s.init!r}" for k, s in rule.state.items()), json.dumps(dict(peer.hyper))]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def measured(peer: Peer) -> dict[str, Any]:
    """One row: the largest differences over the trial's steps, in float64 and float32."""
    from tests.rules.measure import against_peer

    row: dict[str, Any] = {"rule": peer.composed, "peer": peer.theirs, "digest": digest(peer)}
    row["float64_relative"] = float(f"{against_peer(peer, 'float64', BACKEND).relative:.1e}")
    row["float32_ulps"] = round(against_peer(peer, "float32", BACKEND).ulps, 1)
    if peer.rounds:
        row["as_shipped"] = float(f"{against_peer(peer, 'float64', BACKEND, shipped=True).relative:.1e}")
    if peer.note:
        row["remark"] = peer.note
    return row


def read() -> dict[str, Any]:
    """What was measured: the steps, the packages' versions, and the rows."""
    found: dict[str, Any] = json.loads(FILE.read_text())
    return found


def main() -> None:
    """Measures every peer and writes the file."""
    from tests.rules.measure import STEPS
    from tests.rules.peers import PEERS

    rows = [measured(peer) for peer in PEERS]
    versions = {package: version(package) for package in PACKAGES}
    FILE.parent.mkdir(exist_ok=True)
    found = {"steps": STEPS, "backend": BACKEND, "versions": versions, "rows": rows}
    FILE.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
