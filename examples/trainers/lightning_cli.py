"""LightningCLI: the rule comes from the command line; `--optimizer rulec.torch.Muon --optimizer.auto true` does too."""

import lightning.pytorch as lightning
import torch
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.utils.data import DataLoader


class Net(lightning.LightningModule):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.net, self.losses = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 1)), []

    def training_step(self, batch, _):
        self.losses += [nn.functional.mse_loss(self.net(batch), batch.sum(1, keepdim=True).sin())]
        return self.losses[-1]


path = ["--optimizer", "rulec.integrations.from_rule.from_rule", "--optimizer.rule", "clip_by_global_norm >> lion"]
keywords = ["--optimizer.lr", "0.01", "--optimizer.hyper", "{max_norm: 1.0}", "--lr_scheduler", "ConstantLR"]
trainer = ["--trainer.max_epochs", "8", "--trainer.accelerator", "cpu", "--trainer.logger", "false"]
cli = LightningCLI(Net, run=False, save_config_callback=None, args=[*path, *keywords, *trainer])
cli.trainer.fit(cli.model, DataLoader(torch.randn(256, 8), batch_size=32))
print(f"loss {cli.model.losses[0]:.3f} {cli.model.losses[-1]:.3f}")
