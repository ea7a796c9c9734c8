"""PEFT's LoRA+: the matrices B learn sixteen times as fast as A, by Lion."""

import torch
from peft import LoraConfig, get_peft_model
from peft.optimizers import create_loraplus_optimizer
from transformers import GPT2Config, GPT2LMHeadModel

import rulec.torch

torch.manual_seed(0)
config = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=16, bos_token_id=1, eos_token_id=1)
model = get_peft_model(GPT2LMHeadModel(config), LoraConfig(r=8, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True))
optimizer = create_loraplus_optimizer(
    model, rulec.torch.Lion, lr=1e-3, loraplus_lr_ratio=16, loraplus_weight_decay=0.01
)  # fmt: skip
rows, losses = torch.randint(0, 8, (16, 12), generator=torch.Generator().manual_seed(0)), []
for _ in range(48):
    losses.append(model(input_ids=rows, labels=rows).loss)
    losses[-1].backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"loss {losses[0]:.3f} {losses[-1]:.3f}")
