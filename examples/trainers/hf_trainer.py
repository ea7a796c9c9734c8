"""Hugging Face's Trainer with Muon; AdamW for embeddings, norms and biases."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from rulec.integrations.huggingface import optimizer_cls_and_kwargs

config = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=16, bos_token_id=1, eos_token_id=1)
rows = torch.randint(0, 8, (64, 12), generator=torch.Generator().manual_seed(0))
trainer = Trainer(
    GPT2LMHeadModel(config),
    TrainingArguments(
        "runs/hf", max_steps=24, logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
        weight_decay=0.1, lr_scheduler_type="cosine", logging_strategy="steps",
    ),
    train_dataset=[{"input_ids": row, "labels": row} for row in rows],
    optimizer_cls_and_kwargs=optimizer_cls_and_kwargs("muon", lr=0.02, adamw_lr=3e-3),
)  # fmt: skip
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print(f"loss {losses[0]:.3f} {losses[-1]:.3f}")
