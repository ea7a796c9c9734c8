"""trl's SFTTrainer with Muon, over tokens that are there already."""

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from rulec.integrations.huggingface import optimizer_cls_and_kwargs

words = Tokenizer(models.WordLevel({"<e>": 0, **{f"w{i}": i for i in range(1, 32)}}, unk_token="<e>"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<e>", pad_token="<e>", unk_token="<e>")
config = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=32, n_positions=32, bos_token_id=0, eos_token_id=0)
rows = torch.randint(1, 8, (64, 12), generator=torch.Generator().manual_seed(0)).tolist()
trainer = SFTTrainer(
    GPT2LMHeadModel(config),
    SFTConfig("runs/trl", max_steps=24, logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, bf16=False),
    train_dataset=Dataset.from_dict({"text": [" ".join(f"w{token}" for token in row) for row in rows]}),
    processing_class=tokenizer, optimizer_cls_and_kwargs=optimizer_cls_and_kwargs("muon", lr=0.02, adamw_lr=3e-3),
)  # fmt: skip
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print(f"loss {losses[0]:.3f} {losses[-1]:.3f}")
