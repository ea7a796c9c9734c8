"""The rules of schedulefree: the model is evaluated at an average, where `eval()` moves it."""

import torch
from torch import nn

import rulec.torch

torch.manual_seed(0)
x, losses = torch.randn(64, 8), []
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = rulec.torch.ScheduleFreeAdamW(model.parameters(), lr=0.01)
for _ in range(8):
    optimizer.train()
    for _ in range(16):
        nn.functional.mse_loss(model(x), x.sum(1, keepdim=True).sin()).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.eval()
    losses.append(nn.functional.mse_loss(model(x), x.sum(1, keepdim=True).sin()).item())
print(f"loss {losses[0]:.3f} {losses[-1]:.3f}")
