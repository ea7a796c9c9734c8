"""Lightning, accelerate and Hugging Face's Trainer with FSDP2, two processes: the weights of a loop by hand in one.

accelerate, and the Trainer through it, take FSDP2 for GPUs alone: here accelerate believes that processors are some.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import rulec
import rulec.torch
from tests.torch.eager.processes import COUNT, check_in_processes

Make = Callable[[Any], torch.optim.Optimizer]

#: The class of each optimizer, and its keywords.
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (rulec.torch.AdamW, {"lr": 0.01, "weight_decay": 0.1, "backend": "c"}),
    "muon": (rulec.torch.Muon, {"lr": 0.02, "weight_decay": 0.1, "backend": "c"}),
    "clip >> adamw": (
        rulec.torch.optimizer(rulec.load("clip_by_global_norm") >> rulec.load("adamw")),
        {"lr": 0.01, "weight_decay": 0.1, "max_norm": 0.1, "backend": "c"},
    ),
}
BATCH, BATCHES = 8, 5
DATA = torch.randn(BATCH * BATCHES, 16, generator=torch.Generator().manual_seed(1))


class Model(nn.Module):
    """Two matrices; the loss as the Trainer and the loops here take it."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.up, self.down = nn.Linear(16, 32, bias=False), nn.Linear(32, 8, bias=False)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.down(self.up(x).tanh()) - 1).square().mean()}


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    kind, keywords = OPTIMIZERS[name]
    return kind(model.parameters(), **keywords)  # type: ignore[no-any-return]


def by_hand(name: str, epochs: int) -> list[Tensor]:
    """The weights after a plain loop in one process."""
    model = Model()
    optimizer = optimizer_of(name, model)
    for _ in range(epochs):
        for x in DATA.split(BATCH):
            model(x)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
    return [p.data for p in model.parameters()]


def batches() -> DataLoader[Any]:
    """The share of this process of each batch."""
    data: TensorDataset = TensorDataset(DATA)
    sampler: DistributedSampler[Any] = DistributedSampler(data, COUNT, dist.get_rank(), shuffle=False)
    return DataLoader(data, batch_size=BATCH // COUNT, sampler=sampler)


def is_as_by_hand(model: nn.Module, name: str, epochs: int) -> None:
    parts = [p.data for p in model.parameters()]
    assert all(type(part).__name__ == "DTensor" and part.to_local().numel() < part.numel() for part in parts)  # type: ignore[attr-defined]
    # Gradients of halves of a batch, added: another rounding, which an orthogonalized matrix in bfloat16 shows.
    bound = 3e-3 if name == "muon" else 1e-6
    for part, weight in zip(parts, by_hand(name, epochs), strict=True):
        torch.testing.assert_close(part.full_tensor(), weight, rtol=0, atol=bound)  # type: ignore[attr-defined]


def as_launched(rank: int) -> None:
    """The environment that torchrun gives a process."""
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": COUNT, "LOCAL_WORLD_SIZE": COUNT, "MASTER_PORT": 1}
    os.environ.update({key: str(value) for key, value in here.items()}, MASTER_ADDR="127.0.0.1")
    os.environ.update(TORCHELASTIC_RUN_ID="here", ACCELERATE_USE_CPU="true", HF_HUB_OFFLINE="1")


# Lightning


def fitted(name: str, epochs: int, resume: str | None = None, save: str | None = None) -> nn.Module:
    import lightning.pytorch as lightning
    from lightning.pytorch.strategies import ModelParallelStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def configure_model(self) -> None:
            fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(name, self)

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            return self.model(batch[0])["loss"]  # type: ignore[no-any-return]

    module = Module()
    trainer = lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", devices=COUNT, strategy=ModelParallelStrategy(COUNT, 1), logger=False,
        use_distributed_sampler=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(module, batches(), ckpt_path=resume, weights_only=False)
    if save is not None:
        trainer.save_checkpoint(save)
    return module.model


def lightning_runs(folder: str, rank: int) -> None:
    as_launched(rank)
    for name in OPTIMIZERS:
        saved = str(Path(folder, name[:4]))
        fitted(name, 1, save=saved)
        whole = fitted(name, 2)
        is_as_by_hand(whole, name, 2)
        # A checkpoint of Lightning's, with states as parts: the same bits as without the break.
        resumed = fitted(name, 2, resume=saved)
        for one, other in zip(whole.parameters(), resumed.parameters(), strict=True):
            assert torch.equal(one.data.full_tensor(), other.data.full_tensor())  # type: ignore[attr-defined]


# accelerate, and the Trainer


def with_processors_for_gpus() -> None:
    """Lets accelerate choose FSDP for processors; what it then trains is looked at."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)
    PartialState.set_device = lambda self: setattr(self, "device", torch.device("cpu"))


def accelerate_runs(rank: int) -> None:
    as_launched(rank)
    with_processors_for_gpus()
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    for name in OPTIMIZERS:
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="NO_WRAP")
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        model = Model()
        model, optimizer = accelerator.prepare(model, optimizer_of(name, model))
        for _ in range(2):
            for (x,) in batches():
                accelerator.backward(model(x)["loss"])
                optimizer.step()
                optimizer.zero_grad()
        is_as_by_hand(model, name, 2)


class Rows(Dataset[dict[str, Tensor]]):
    """The data as the Trainer takes them, a dict for each row."""

    def __len__(self) -> int:
        return len(DATA)

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        return {"x": DATA[place]}


def trainer_runs(folder: str, rank: int) -> None:
    as_launched(rank)
    with_processors_for_gpus()
    from transformers import Trainer, TrainingArguments

    for name, choice in OPTIMIZERS.items():
        arguments = TrainingArguments(
            folder, use_cpu=True, per_device_train_batch_size=BATCH // COUNT, num_train_epochs=2, fsdp=True,
            fsdp_config={"version": 2, "auto_wrap_policy": "NO_WRAP"}, report_to="none", save_strategy="no",
            lr_scheduler_type="constant", max_grad_norm=0, disable_tqdm=True, train_sampling_strategy="sequential",
            learning_rate=choice[1]["lr"], weight_decay=choice[1]["weight_decay"],
        )  # fmt: skip
        trainer = Trainer(Model(), arguments, train_dataset=Rows(), optimizer_cls_and_kwargs=choice)
        trainer.train()
        is_as_by_hand(trainer.model_wrapped, name, 2)


# torchtitan


def flat_states_load(rank: int) -> None:
    """States in the layout of torchtitan's checkpoints: `state.NAME.exp_avg` and `param_groups.NAME.lr`."""
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    mesh = init_device_mesh("cpu", (COUNT,))
    for name in OPTIMIZERS:
        trained, loaded = (fully_shard(Model(), mesh=mesh) for _ in range(2))
        optimizer, other = optimizer_of(name, trained), optimizer_of(name, loaded)
        steps = [(trained, optimizer), (loaded, other)]
        _step(*steps[0])
        states = get_optimizer_state_dict(trained, optimizer, options=flat)
        assert all(key.startswith(("state.up.weight", "state.down.weight", "param_groups.")) for key in states)
        set_model_state_dict(loaded, get_model_state_dict(trained))
        set_optimizer_state_dict(loaded, other, states, options=flat)
        for model, its in steps:
            _step(model, its)
        for one, same in zip(trained.parameters(), loaded.parameters(), strict=True):
            assert torch.equal(one.data.full_tensor(), same.data.full_tensor())  # type: ignore[attr-defined]


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(DATA)["loss"].backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.slow
def test_flat_states_load() -> None:
    check_in_processes(flat_states_load)


@pytest.mark.slow
def test_lightning_trains_and_goes_on() -> None:
    with tempfile.TemporaryDirectory() as folder:
        check_in_processes(partial(lightning_runs, folder))


@pytest.mark.slow
def test_accelerate_trains() -> None:
    check_in_processes(accelerate_runs)


@pytest.mark.slow
def test_the_trainer_trains() -> None:
    with tempfile.TemporaryDirectory() as folder:
        check_in_processes(partial(trainer_runs, folder))
