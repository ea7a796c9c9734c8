"""Rows of the rules that pytorch_optimizer lists beside the well-known ones, and of their kin.

`LISTED` are rules for each element alone, `LISTED_REDUCING` those that reduce.
"""

from __future__ import annotations

from typing import Any

import pytorch_optimizer
import torch

from rulec.array_api import random
from tests.rules.peer import Peer, adam_like, printed_peer, same, torch_peer
from tests.rules.printed_adaptive import AdGD, PAdam, Swats
from tests.rules.runs import Hyper
from tests.rules.sides import Instead, flattened, inside, patched

_ADAM = {"lr": 0.03, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6}
_ADAM_DECAY = {**_ADAM, "weight_decay": 0.07}


def _bcos(mode: str) -> Any:
    return lambda h: {
        **same("lr", "beta", "eps", "weight_decay")(h), "mode": mode, "beta2": h.get("beta2"), "simple_cond": True,
    }  # fmt: skip


def _momentum_before(optimizer: Any) -> None:
    """pytorch_optimizer has overwritten the momentum when it reads the one before: that one is computed from it."""
    estimate = optimizer.compute_v

    def of_the_one_before(grad: torch.Tensor, m: torch.Tensor, beta: float, beta2: float | None) -> torch.Tensor:
        return estimate(grad, (m - (1 - beta) * grad) / beta, beta, beta2)

    optimizer.compute_v = of_the_one_before


def _our_first_velocity(optimizer: Any) -> None:
    """Gravity's first velocity is random: it is given the numbers of ours, which are Philox4x32-10."""
    group = optimizer.param_groups[0]
    optimizer.init_group(group)
    for i, p in enumerate(group["params"]):
        drawn = random.normal(p.numel(), seed=0, tensor=i, draw=0, step=1)
        optimizer.state[p]["v"] = torch.tensor(drawn, dtype=p.dtype).reshape(p.shape) * group["alpha"] / group["lr"]


def _squared_once() -> Any:
    """pytorch_optimizer's DAdaptAdan takes the fourth power of what it should square: one root of the two is taken.

    It calls `to_real` for three squares of each tensor, of which this is the first.
    """
    calls = 0

    def to_real(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return x.sqrt() if calls % 3 == 1 else x

    return to_real


def squares(groups: list[dict[str, Any]], *_: Any) -> torch.Tensor:
    """The sum of all squared gradients, which pytorch_optimizer takes in float32."""
    return torch.stack([(p.grad**2).sum() for group in groups for p in group["params"]]).sum()


LISTED: tuple[Peer, ...] = (
    torch_peer(
        "bcos + decay", pytorch_optimizer.BCOS, _bcos("c"),
        {"lr": 0.03, "beta": 0.8, "beta2": 0.9, "eps": 1e-4, "weight_decay": 0.07},
        "pytorch_optimizer reads the momentum of this step where the authors' code reads the one before: it is given "
        "that", prepare=_momentum_before,
    ),
    torch_peer(
        "spam", pytorch_optimizer.SPAM,
        lambda h: {
            **adam_like(h), "threshold": h["spike"], "grad_accu_steps": int(h["quiet"]),
            "warmup_epoch": int(h["warm"]), "update_proj_gap": int(h["gap"]),
        },
        {**_ADAM_DECAY, "spike": 4, "quiet": 3, "warm": 5, "gap": 9},
    ),
    torch_peer(
        "bcos_m + decay", pytorch_optimizer.BCOS, _bcos("m"),
        {"lr": 0.03, "beta": 0.8, "beta2": 0.9, "eps": 1e-4, "weight_decay": 0.07},
    ),
    torch_peer(
        "bcos_g + decay", pytorch_optimizer.BCOS, _bcos("g"),
        {"lr": 0.03, "beta": 0.8, "eps": 1e-4, "weight_decay": 0.07},
    ),
    torch_peer(
        "l2 >> adasmooth", pytorch_optimizer.AdaSmooth, adam_like,
        {"lr": 0.05, "beta1": 0.4, "beta2": 0.9, "eps": 1e-4, "weight_decay": 0.07},
    ),
    torch_peer(
        "l2 >> dualadam", pytorch_optimizer.DualAdam,
        lambda h: {**adam_like(h), "switch_rate": h["switch_rate"]}, {**_ADAM_DECAY, "switch_rate": 0.06},
    ),
    printed_peer("padam", "the paper's algorithm 1", PAdam, {**_ADAM, "partial": 0.2}),
    torch_peer(
        "srmm", pytorch_optimizer.SRMM, lambda h: {**same("lr", "beta")(h), "memory_length": int(h["memory"])},
        {"lr": 0.05, "beta": 0.6, "memory": 9},
    ),
    torch_peer(
        "sara", pytorch_optimizer.SaRA,
        lambda h: {**adam_like(h), "threshold": h["cutoff"], "progressive_iter": int(h["progressive"])},
        {**_ADAM_DECAY, "cutoff": 0.9, "progressive": 7},
    ),
)  # fmt: skip

_A2GRAD = {"lips": 7, "beta": 0.6}


def _a2grad(variant: str) -> Any:
    return lambda h: {**same("lips", "beta")(h), "rho": h.get("rho"), "variant": variant}


def _ranger21(h: Hyper) -> dict[str, Any]:
    return {
        **adam_like(h), "num_iterations": 100, "disable_lr_scheduler": True, "beta0": h["beta0"],
        "beta_softplus": h["softness"], "agc_clipping_value": h["clipping"], "agc_eps": h["min_norm"],
        "norm_loss_factor": h["norm_loss"], "lookahead_merge_time": int(h["k"]), "lookahead_blending_alpha": h["alpha"],
    }  # fmt: skip


LISTED_REDUCING: tuple[Peer, ...] = (
    torch_peer("a2grad", pytorch_optimizer.A2Grad, lambda h: {**_A2GRAD, "variant": "uni"}, _A2GRAD),
    torch_peer("a2grad_inc", pytorch_optimizer.A2Grad, lambda h: {**_A2GRAD, "variant": "inc"}, _A2GRAD),
    torch_peer(
        "a2grad_exp", pytorch_optimizer.A2Grad, same("lips", "beta", "rho", variant="exp"), {**_A2GRAD, "rho": 0.7},
    ),
    torch_peer("avagrad + decay", pytorch_optimizer.AvaGrad, adam_like, {**_ADAM_DECAY, "eps": 0.03}),
    torch_peer(
        "tam + decay", pytorch_optimizer.TAM,
        lambda h: {**same("lr", "momentum", "eps", "weight_decay")(h), "decay_rate": h["gamma"]},
        {"lr": 0.02, "momentum": 0.8, "gamma": 0.7, "eps": 1e-3, "weight_decay": 0.07},
    ),
    torch_peer(
        "adatam + decay", pytorch_optimizer.AdaTAM,
        lambda h: {**adam_like(h), "decay_rate": h["gamma"]}, {**_ADAM_DECAY, "gamma": 0.7, "eps": 1e-3},
    ),
    flattened(
        torch_peer(
            "ranger21", pytorch_optimizer.Ranger21, _ranger21,
            {
                "lr": 0.03, "beta0": 0.7, "beta1": 0.8, "beta2": 0.9, "eps": 1e-4, "weight_decay": 0.07, "k": 4,
                "norm_loss": 0.1, "softness": 5, "clipping": 0.3, "min_norm": 0.01, "alpha": 0.3,
            },
            "without its schedule of the learning rate",
        )
    ),
    torch_peer("l2 >> rose", pytorch_optimizer.ROSE, same("lr", "weight_decay"), {"lr": 0.02, "weight_decay": 0.07}),
    torch_peer(
        "gravity", pytorch_optimizer.Gravity, same("lr", "alpha", "beta"), {"lr": 0.05, "alpha": 0.03, "beta": 0.8},
        "of the same random numbers, which are Philox4x32-10", prepare=_our_first_velocity,
    ),
    inside(
        torch_peer(
            "dadapt_adan", pytorch_optimizer.DAdaptAdan,
            lambda h: {
                "lr": h["lr"], "betas": (h["beta1"], h["beta2"], h["beta3"]), "eps": h["eps"], "d0": h["d0"],
                "weight_decay": h["weight_decay"],
            },
            {"lr": 0.7, "beta1": 0.9, "beta2": 0.8, "beta3": 0.95, "eps": 1e-3, "d0": 0.01, "weight_decay": 0.07},
            "pytorch_optimizer, unlike the authors' code, takes the fourth power where Adan has a square, and sums in "
            "float32", rounds=True,
        ),
        patched(**{"pytorch_optimizer.optimizer.dadapt.to_real": _squared_once()}),
        "theirs takes one root more",
    ),
    inside(
        torch_peer(
            "adaptive_sgd", pytorch_optimizer.ASGD, same("amplifier", "dampening", "eps"),
            {"amplifier": 0.3, "dampening": 0.9, "eps": 1e-4}, "theirs takes norms in float32",
        ),
        patched(
            **{
                "pytorch_optimizer.optimizer.sgd.torch": Instead(torch, float32=torch.float64),
                "pytorch_optimizer.optimizer.sgd.get_global_gradient_norm": squares,
            }
        ),
        "theirs takes norms in float64",
    ),
    printed_peer("adgd", "the paper's algorithm 1", AdGD, {"lr0": 0.01}),
    printed_peer("swats", "the paper's algorithm 1", Swats, {**_ADAM, "tolerance": 0.4}),
)  # fmt: skip
