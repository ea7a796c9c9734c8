"""torchtitan's OptimizersContainer with Muon, states in bfloat16."""

import torch
from torch import nn
from torchtitan.components.optimizer import ParamGroupConfig

from rulec.integrations.torchtitan import optimizers_container

torch.manual_seed(0)
layers = [nn.Embedding(32, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 32)]
model = nn.ModuleDict(dict(zip(["tok_embeddings", "first", "second", "output"], layers, strict=True)))
muon = {"lr": 0.02, "adamw_lr": 0.01, "weight_decay": 0.1}
groups = [ParamGroupConfig(pattern=".*", optimizer_name="rulec:muon", optimizer_kwargs=muon)]
container = optimizers_container()
config = container.Config(param_groups=groups, implementation="fused_opt_states_bf16")
optimizers, tokens, losses = container(config, model_parts=[model]), torch.arange(32), []
for _ in range(32):
    hidden = model["second"](model["first"](model["tok_embeddings"](tokens)).tanh()).tanh()
    losses.append(nn.functional.cross_entropy(model["output"](hidden), tokens.flip(0)))
    losses[-1].backward()
    optimizers.step()
    optimizers.zero_grad()
print(f"loss {losses[0]:.3f} {losses[-1]:.3f}")
