"""The named parts of `rulec bench gpu`, each of which ends within nine minutes."""

from __future__ import annotations

from collections.abc import Sequence

from rulec.errors import RulecError
from rulec.language.source import did_you_mean

#: Part -> a line about it, in the order in which they run: correctness, then what is short and has targets.
PARTS: dict[str, str] = {
    "correctness": "every rule and operation against the float64 reference",
    "large": "bits past 2**31 elements, and of 20,000 tensors, in float32 and float64",
    "fused": "AdamW against torch's fused step at every size; one large tensor against its compiled step and optimi",
    "host": "the host's time of a step, for few tensors and many, in a graph and without, and with many groups",
    "seed": "Adam against CuPy's broadcasts and operators",
    "rules": "elementwise rules on one large tensor, against a copy and torch",
    "reductions": "rules that reduce on one large matrix, against a copy and torch; on the 146 tensors of a Llama",
    "states": "AdamW with states in codes, 16-bit weights, and gradients that are not aligned",
    "watch": "steps of AdamW and LAMB that measure statistics, against steps that do not",
    "jax": "steps in JAX against optax: one large array, and 1000 leaves",
    "eager": "updates inside the backward pass of a stack of layers, and products with an epilogue",
    "llama": "training steps of a Llama of a billion weights: their memory and time, deferred and eager",
    "offload": "training steps of a Llama of a billion weights on the host, beside what they need",
    "lowrank": "low-rank members of a population against plain inference",
    "noise": "noise made in a rule's kernel",
    "ways": "a few rules in bfloat16, and on the cupy backend",
    "muon": "Muon on the matrices of GPT-2 XL, against its products and other libraries",
    "matrices": "SOAP, Shampoo, PSGD, Apollo and GaLore against other libraries",
    "peers": "AdamW, Lion and NAdam against other libraries at every size",
}


def check_parts(names: Sequence[str]) -> None:
    """RulecError for a name that is none of `PARTS`."""
    for name in names:
        if name not in PARTS:
            known = ", ".join(PARTS)
            raise RulecError(f"rulec bench gpu has no part {name!r}{did_you_mean(name, PARTS)}: its parts are {known}")
