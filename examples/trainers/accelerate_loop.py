"""accelerate with Lion, gradient accumulation, clipping and a scheduler."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import rulec.torch

torch.manual_seed(0)
x = torch.randn(256, 8)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision="bf16")
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = rulec.torch.Lion(model.parameters(), lr=3e-3, weight_decay=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 64)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=16)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
losses = []
for inputs, targets in [batch for _ in range(8) for batch in loader]:
    with accelerator.accumulate(model):
        losses.append(nn.functional.mse_loss(model(inputs), targets))
        accelerator.backward(losses[-1])
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        [step() for step in (optimizer.step, scheduler.step, optimizer.zero_grad)]
print(f"loss {losses[0]:.3f} {losses[-1]:.3f}")
