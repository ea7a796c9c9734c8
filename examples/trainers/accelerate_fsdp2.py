"""accelerate with FSDP2 and Muon: torchrun --nproc-per-node 2 examples/trainers/accelerate_fsdp2.py"""

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch import nn

import rulec.torch

torch.manual_seed(0)
layers = [nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)]
model, x, losses = nn.Sequential(*layers), torch.randn(64, 8), []
optimizer = rulec.torch.Muon(model.named_parameters(), lr=0.02, adamw_lr=0.01, auto=True)
plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
accelerator = Accelerator(fsdp_plugin=plugin)
model, optimizer = accelerator.prepare(model, optimizer)
for _ in range(48):
    losses.append(nn.functional.mse_loss(model(x), x.sum(1, keepdim=True).sin()))
    accelerator.backward(losses[-1])
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
accelerator.print(f"loss {losses[0]:.3f} {losses[-1]:.3f}")
