"""Steps in Python for comparison with ours: of other libraries, where they are installed, and of torch's functions."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from typing import Any

Step = Callable[[], object]

#: Makes a step of parameters that have gradients.
Maker = Callable[[list[Any]], Step]

#: The number of steps from one decomposition to the next, theirs and by default ours.
EVERY = 10

#: Optimizers of other libraries by rule: module, class and keywords with which it does what the rule does.
_CLASSES: Mapping[str, tuple[tuple[str, str, Mapping[str, Any]], ...]] = {
    "lamb": (
        ("pytorch_optimizer", "Lamb", {"weight_decay": 0.01, "adam_debias": True, "foreach": True}),
        ("pytorch_optimizer", "Lamb", {"weight_decay": 0.01, "adam_debias": True, "foreach": False}),
        ("timm.optim", "Lamb", {"weight_decay": 0.01, "max_grad_norm": None, "foreach": True}),
        ("timm.optim", "Lamb", {"weight_decay": 0.01, "max_grad_norm": None, "foreach": False}),
    ),
    "cautious_adamw": (
        ("timm.optim", "AdamWLegacy", {"caution": True, "foreach": True}),
        ("timm.optim", "AdamWLegacy", {"caution": True, "foreach": False}),
    ),
    "soap": (("pytorch_optimizer", "SOAP", {"weight_decay": 0.0, "precondition_frequency": EVERY}),),
    "shampoo": (("pytorch_optimizer", "Shampoo", {"preconditioning_compute_steps": EVERY}),),
}


def makers(name: str) -> dict[str, Maker]:
    """Name -> maker of a step, for every step to compare with this rule's."""
    choices: dict[str, Maker] = {}
    for module, kind, keywords in _CLASSES.get(name, ()):
        maker = _optimizer(module, kind, keywords)
        if maker is not None:
            shown = ", ".join(f"{key}={keywords[key]}" for key in ("caution", "foreach") if key in keywords)
            choices[f"{module}.{kind}" + (f"({shown})" if shown else "")] = maker
    if name == "cautious_adamw":
        choices["torch's foreach functions"] = _cautious_adamw
    if name == "clip_by_global_norm >> adamw":
        for way in ("fused", "foreach"):
            choices[f"clip_grad_norm_ and torch.optim.AdamW({way}=True)"] = _clipped_adamw({way: True})
    return choices


def host_makers() -> dict[str, Maker]:
    """Name -> maker of AdamW's step on the host, for libraries that keep weights and states there.

    torchao's CPUOffloadOptimizer needs a GPU. On the host it steps torch's fused AdamW, one for each tensor.
    """

    def torchao(params: list[Any]) -> Step:
        import torch

        steps = [torch.optim.AdamW([param], lr=1e-3, weight_decay=0.01, fused=True).step for param in params]

        def step() -> None:
            for one in steps:
                one()

        return step

    theirs = _optimizer("deepspeed.ops.adam", "DeepSpeedCPUAdam", {"lr": 1e-3, "weight_decay": 0.01})
    return {"torchao": torchao, **({} if theirs is None else {"DeepSpeed": theirs})}


def _optimizer(module: str, kind: str, keywords: Mapping[str, Any]) -> Maker | None:
    try:
        theirs = getattr(importlib.import_module(module), kind)
    except (ImportError, AttributeError):
        return None

    def maker(params: list[Any]) -> Step:
        step: Step = theirs(params, **keywords).step
        return step

    return maker


def _clipped_adamw(keywords: Mapping[str, Any]) -> Maker:
    """Clips the gradients in place before each step.

    They are within the bound from the second step on; torch scales them all the same, by a number close to 1.
    """

    def maker(params: list[Any]) -> Step:
        import torch

        optimizer = torch.optim.AdamW(params, **keywords)

        def step() -> None:
            torch.nn.utils.clip_grad_norm_(params, 1.0)
            optimizer.step()

        return step

    return maker


def _cautious_adamw(params: list[Any]) -> Step:
    """AdamW with the paper's mask, written with torch's foreach functions."""
    import torch

    lr, beta1, beta2, eps, decay = 1e-3, 0.9, 0.999, 1e-8, 0.01
    grads, m, v = [p.grad for p in params], [torch.zeros_like(p) for p in params], [torch.zeros_like(p) for p in params]
    t = 0

    @torch.no_grad()
    def step() -> None:
        nonlocal t
        t += 1
        torch._foreach_mul_(params, 1 - lr * decay)
        torch._foreach_lerp_(m, grads, 1 - beta1)
        torch._foreach_mul_(v, beta2)
        torch._foreach_addcmul_(v, grads, grads, 1 - beta2)
        denominator = torch._foreach_sqrt(v)
        torch._foreach_div_(denominator, math.sqrt(1 - beta2**t))
        torch._foreach_add_(denominator, eps)
        kept = [(a * g > 0).to(g.dtype) for a, g in zip(m, grads, strict=True)]
        torch._foreach_mul_(kept, [1 / k.mean().clamp_(min=1e-3) for k in kept])
        torch._foreach_mul_(kept, m)
        torch._foreach_addcdiv_(params, kept, denominator, -lr / (1 - beta1**t))

    return step
