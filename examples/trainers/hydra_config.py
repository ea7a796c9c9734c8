"""hydra: the optimizer of a configuration, a class's path or a rule's text."""

import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import nn

torch.manual_seed(0)
config = OmegaConf.create("""
optimizer:
  _target_: rulec.integrations.from_rule.from_rule
  rule: clip_by_global_norm >> adamw
  lr: 0.01
  hyper: {max_norm: 1.0, betas: [0.9, 0.99]}
""")
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = instantiate(config.optimizer, params=model.parameters())
x, losses = torch.randn(64, 8), []
for _ in range(64):
    losses.append(nn.functional.mse_loss(model(x), x.sum(1, keepdim=True).sin()))
    losses[-1].backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"loss {losses[0]:.3f} {losses[-1]:.3f}")
