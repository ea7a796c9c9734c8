"""Lightning with a composed rule: the norm of all gradients is clipped in the step itself."""

import lightning.pytorch as lightning
import torch
from torch import nn

import rulec.torch


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.losses = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)), []

    def training_step(self, batch, _):
        self.losses.append(loss := nn.functional.mse_loss(self.net(batch), batch.sum(1, keepdim=True).sin()))
        return loss

    def configure_optimizers(self):
        return rulec.torch.optimizer("clip_by_global_norm >> adamw")(self.parameters(), lr=0.01, max_norm=1.0)


batches = torch.utils.data.DataLoader(torch.randn(256, 8, generator=torch.manual_seed(0)), 32)
lightning.Trainer(max_epochs=8, accelerator="cpu", logger=False).fit(net := Net(), batches)
print(f"loss {net.losses[0]:.3f} {net.losses[-1]:.3f}")
