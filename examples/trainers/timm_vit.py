"""timm's factory with Muon, its groups for weight decay and for layers, and its scheduler."""

import timm
import torch
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler

from rulec.integrations.timm import register_timm

torch.manual_seed(0)
register_timm()
size = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 4}
model = timm.create_model("vit_tiny_patch16_224", **size)
optimizer = create_optimizer_v2(model, opt="rulec-muon", lr=0.02, weight_decay=0.05, layer_decay=0.75, adamw_lr=3e-3)
scheduler = CosineLRScheduler(optimizer, t_initial=16, warmup_t=2, warmup_lr_init=1e-4)
images, labels, losses = torch.randn(16, 3, 16, 16), torch.arange(16) % 4, []
for step in range(16):
    losses.append(torch.nn.functional.cross_entropy(model(images), labels))
    losses[-1].backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step(step + 1)
print(f"loss {losses[0]:.3f} {losses[-1]:.3f}")
