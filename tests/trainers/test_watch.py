"""The callbacks of docs/watch.md with the real packages: what TensorBoard's own writer has on disk after them."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.docs.markdown import ROOT, blocks
from tests.docs.running import Outcome, PageRun
from tests.docs.stand_ins import SummaryWriter as StandIn

pytestmark = pytest.mark.slow

PACKAGES = ("tensorboard", "transformers", "lightning")


@pytest.fixture(autouse=True)
def packages() -> None:
    for name in PACKAGES:
        pytest.importorskip(name, reason=f"{name} is not installed: make trainers")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> tuple[PageRun, list[Outcome]]:
    """The page after a run, with its names."""
    run = PageRun("watch", tmp_path_factory.mktemp("watch"))
    return run, [*run.run(blocks((ROOT / "docs" / "watch.md").read_text()))]


def scalars(folder: Path) -> dict[str, list[Any]]:
    """The numbers that a writer left in a folder, by name."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return {name: events.Scalars(name) for name in events.Tags()["scalars"]}


def check_norms(written: dict[str, list[Any]], prefix: str, before: nn.Module, after: nn.Module) -> None:
    """The numbers are the norms of the change of each parameter in the only step."""
    for (name, old), new in zip(before.named_parameters(), after.parameters(), strict=True):
        wanted = float((new.detach().double() - old.detach().double()).norm())
        values = [scalar.value for scalar in written[f"{prefix}update/{name}"]]
        assert values == [pytest.approx(wanted, rel=1e-4)] * len(values)
        assert wanted > 0


def test_the_page_prints_what_it_shows_and_writes_numbers_that_tensorboard_reads(
    page: tuple[PageRun, list[Outcome]],
) -> None:
    run, outcomes = page
    assert len(outcomes) > 10
    assert [outcome.printed for outcome in outcomes if not outcome.agrees] == []
    written = scalars(run.folder / "runs" / "watched")
    assert {"grad_norm/0.weight", "cosine/2.bias"} <= {*written}
    assert [scalar.step for scalar in written["update_ratio/0.weight"]] == [0, 1, 2, 3]
    assert all(0 < scalar.value < 1 for scalar in written["update_ratio/0.weight"])


def test_the_trainer_of_hugging_face_hands_statistics_to_tensorboard(
    page: tuple[PageRun, list[Outcome]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import TrainingArguments

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    names = vars(page[0].module)
    model = names["GPT2LMHeadModel"](names["tiny"])
    before = copy.deepcopy(model)
    trainer = names["WatchedTrainer"](
        model,
        TrainingArguments(
            str(tmp_path), max_steps=1, logging_steps=1, report_to=["tensorboard"], save_strategy="no", use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in names["rows"]],
        optimizer_cls_and_kwargs=names["optimizer_cls_and_kwargs"]("adamw", lr=1e-3, watch={"update": "norm(update)"}),
    )  # fmt: skip
    trainer.train()
    check_norms(scalars(tmp_path / "events"), "train/", before, model)


def test_lightning_hands_statistics_to_tensorboard(page: tuple[PageRun, list[Outcome]], tmp_path: Path) -> None:
    import lightning.pytorch as lightning
    from lightning.pytorch.loggers import TensorBoardLogger

    names = vars(page[0].module)
    net = names["Net"]()
    before, logger = copy.deepcopy(net), TensorBoardLogger(str(tmp_path))
    trainer = lightning.Trainer(
        max_steps=1, log_every_n_steps=1, accelerator="cpu", callbacks=[names["Watch"]()], logger=logger,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(net, torch.utils.data.DataLoader(torch.randn(32, 8), 8))
    check_norms(scalars(Path(logger.log_dir)), "", before, net)


@pytest.mark.parametrize("method", ["__init__", "add_scalar", "close"])
def test_the_stand_in_takes_what_the_real_writer_takes(method: str) -> None:
    from torch.utils.tensorboard import SummaryWriter

    ours, theirs = [[*inspect.signature(getattr(kind, method)).parameters] for kind in (StandIn, SummaryWriter)]
    assert ours == theirs[: len(ours)]
