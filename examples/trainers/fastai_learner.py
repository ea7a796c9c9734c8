"""fastai's Learner with Lion in its OptimWrapper, one-cycle rates and its `wd`."""

from functools import partial

import torch
from fastai.basics import DataLoader, DataLoaders, Learner, OptimWrapper
from fastai.callback.schedule import fit_one_cycle  # noqa: F401 - a method of Learner
from torch import nn

import rulec.torch

torch.manual_seed(0)
x = torch.randn(256, 8)
rows = [*zip(x, x.sum(1, keepdim=True).sin(), strict=True)]
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
learner = Learner(
    DataLoaders(DataLoader(rows, bs=16), DataLoader(rows, bs=16)), model, loss_func=nn.MSELoss(),
    opt_func=partial(OptimWrapper, opt=rulec.torch.Lion),
)  # fmt: skip
with learner.no_bar():
    learner.fit_one_cycle(12, lr_max=0.02, wd=0.01)
losses = [float(loss) for loss in learner.recorder.losses]
print(f"loss {losses[0]:.3f} {losses[-1]:.3f}")
