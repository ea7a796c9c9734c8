"""The protocol keeps the names that backends of other packages import."""

from __future__ import annotations

from rulec.backend import protocol


def test_names_of_earlier_versions_stay() -> None:
    names = ("Backend", "Call", "Kernel", "ReplayableCall", "Standing", "Written")
    assert [name for name in names if not hasattr(protocol, name)] == []
    assert protocol.Standing is protocol.ReplayableCall
