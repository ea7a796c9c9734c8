"""skorch with Muon; other keywords of the class are `optimizer__NAME`."""

import torch
from skorch import NeuralNetRegressor
from skorch.callbacks import GradientNormClipping, LRScheduler
from torch import nn

import rulec.torch

torch.manual_seed(0)
x = torch.randn(256, 8)
net = NeuralNetRegressor(
    lambda: nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)),
    optimizer=rulec.torch.Muon, optimizer__auto=True, optimizer__adamw_lr=3e-3, lr=0.02, max_epochs=8, batch_size=16,
    train_split=None, verbose=0, callbacks=[GradientNormClipping(1.0), LRScheduler("CosineAnnealingLR", T_max=8)],
)  # fmt: skip
net.fit(x, x.sum(1, keepdim=True).sin())
losses = net.history[:, "train_loss"]
print(f"loss {losses[0]:.3f} {losses[-1]:.3f}")
