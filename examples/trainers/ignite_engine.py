"""ignite with AdamW behind a clipped norm, and a scheduler of ignite's."""

import torch
from ignite.engine import Events, create_supervised_trainer
from ignite.handlers import CosineAnnealingScheduler
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import rulec.torch

torch.manual_seed(0)
x, losses = torch.randn(256, 8), []
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = rulec.torch.optimizer("clip_by_global_norm >> adamw")(model.parameters(), lr=0.01, max_norm=1.0)
trainer = create_supervised_trainer(model, optimizer, nn.MSELoss())
trainer.add_event_handler(Events.ITERATION_STARTED, CosineAnnealingScheduler(optimizer, "lr", 0.01, 0.001, 128))
trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: losses.append(engine.state.output))
trainer.run(DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=16), max_epochs=8)
print(f"loss {losses[0]:.3f} {losses[-1]:.3f}")
