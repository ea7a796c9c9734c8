"""rulec in the trainers that people use; each module imports its trainer when a function of it is called.

| module | trainer |
|---|---|
| `rulec.integrations.from_rule` | whatever takes the path of a class and keywords: LightningCLI, hydra, skorch |
| `rulec.integrations.huggingface` | Hugging Face's Trainer and trl |
| `rulec.integrations.timm` | timm's optimizer factory |
| `rulec.integrations.torchtitan` | torchtitan's `OptimizersContainer` |

Other trainers take the classes of `rulec.torch` as they are.
"""
