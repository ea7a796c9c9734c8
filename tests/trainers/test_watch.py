"""The callbacks of docs/watch.md with the real packages: what TensorBoard's own writer has on disk after them."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from tests.docs.markdown import ROOT, blocks
from tests.docs.running import PageRun
from tests.docs.stand_ins import SummaryWriter as StandIn

pytestmark = pytest.mark.slow

PACKAGES = ("tensorboard", "transformers", "lightning")


@pytest.fixture(autouse=True)
def packages() -> None:
    for name in PACKAGES:
        pytest.importorskip(name, reason=f"{name} is not installed: make trainers")


def test_the_loop_of_the_manual_writes_numbers_that_tensorboard_reads(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    page = blocks((ROOT / "docs" / "watch.md").read_text())
    assert len([*PageRun("watch", tmp_path).run(page)]) > 10
    events = EventAccumulator(str(tmp_path / "runs" / "watched")).Reload()
    assert {"grad_norm/0.weight", "cosine/2.bias"} <= {*events.Tags()["scalars"]}
    assert [scalar.step for scalar in events.Scalars("update_ratio/0.weight")] == [0, 1, 2, 3]
    assert all(0 < scalar.value < 1 for scalar in events.Scalars("update_ratio/0.weight"))


@pytest.mark.parametrize("method", ["__init__", "add_scalar", "close"])
def test_the_stand_in_takes_what_the_real_writer_takes(method: str) -> None:
    from torch.utils.tensorboard import SummaryWriter

    ours, theirs = [[*inspect.signature(getattr(kind, method)).parameters] for kind in (StandIn, SummaryWriter)]
    assert ours == theirs[: len(ours)]
