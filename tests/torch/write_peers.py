"""Writes peers.npz: runs of other libraries' optimizers with small states, in their middle.

    pip install torch==2.13.0 bitsandbytes==0.50.2 torchao==0.18.0
    python -m tests.torch.write_peers

The libraries are in an environment of their own, and the tests read the file. Nothing here imports rulec. Each
optimizer takes three steps from `weights()`. Then the weights are `weights()` again, and it takes one step more. The
arrays are CASE.WORD for the state after the third step, in the library's words, CASE.group for the group as JSON, and
CASE.updated for the first weights after the fourth step.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

FILE = Path(__file__).with_name("peers.npz")

#: Whole blocks of every library, and no more elements than they keep in codes.
SHAPE = (64, 72)
KEPT = 512


@dataclass(frozen=True)
class Case:
    """An optimizer of a library, and the class and keywords of ours that compute the same."""

    library: str
    peer: str
    keywords: Mapping[str, Any]
    ours: str
    own: Mapping[str, Any] = field(default_factory=dict)
    format: str = "dynamic8"

    def make(self, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        """The library's optimizer."""
        module = importlib.import_module(f"{self.library}.optim")
        optimizer: torch.optim.Optimizer = getattr(module, self.peer)(params, **self.keywords)
        return optimizer


_ADAM = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1}
_LION = {"lr": 1e-3, "betas": (0.9, 0.98), "weight_decay": 0.1}
_MEANS = {"lr": 1e-2, "betas": (0.9, 0.99, 0.999), "alpha": 4.0, "weight_decay": 0.1}
_PLAIN = {"lr": 1e-2, "weight_decay": 0.1}
CASES: Mapping[str, Case] = {
    "bitsandbytes.adamw": Case("bitsandbytes", "AdamW8bit", _ADAM, "AdamW", _ADAM),
    "bitsandbytes.adam": Case("bitsandbytes", "Adam8bit", {"lr": 1e-2}, "Adam", {"lr": 1e-2}),
    "bitsandbytes.lion": Case("bitsandbytes", "Lion8bit", _LION, "Lion", _LION),
    "bitsandbytes.ademamix": Case("bitsandbytes", "AdEMAMix8bit", _MEANS, "AdEMAMix", _MEANS),
    "bitsandbytes.sgd": Case(
        "bitsandbytes", "SGD8bit", {**_PLAIN, "momentum": 0.9}, "SGD", {**_PLAIN, "momentum": 0.9}
    ),
    "bitsandbytes.rmsprop": Case("bitsandbytes", "RMSprop8bit", _PLAIN, "RMSprop", _PLAIN),
    "bitsandbytes.adagrad": Case("bitsandbytes", "Adagrad8bit", _PLAIN, "Adagrad", _PLAIN),
    "torchao.adamw8": Case("torchao", "AdamW8bit", _ADAM, "AdamW", _ADAM),
    "torchao.adamw4": Case("torchao", "AdamW4bit", _ADAM, "AdamW", _ADAM, "dynamic4"),
    "torchao.adamw_fp8": Case("torchao", "AdamWFp8", _ADAM, "AdamW", _ADAM, "float8_e4m3"),
}  # fmt: skip


def weights() -> nn.Parameter:
    """float32 of `SHAPE`."""
    return nn.Parameter(_normal(1))


def gradient(step: int) -> Tensor:
    """float32 of `SHAPE`: rows of magnitudes from 0.1 to 10."""
    return _normal(2 + step) * torch.logspace(-1, 1, SHAPE[0])[:, None]


def _normal(seed: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(SHAPE).astype(np.float32))


def uncompiled() -> None:
    """torchao's steps run as they are written: it compiles them, which takes half a minute on a CPU."""
    importlib.import_module("torchao.optim.adam").torch.compile = lambda function, **_: function


def run(optimizer: torch.optim.Optimizer, param: nn.Parameter, steps: range) -> None:
    """Steps with the gradients of these numbers."""
    for step in steps:
        param.grad = gradient(step)
        optimizer.step()


def _arrays(case: Case) -> dict[str, np.ndarray]:
    param = weights()
    optimizer = case.make([param])
    run(optimizer, param, range(3))
    saved = optimizer.state_dict()
    state = saved["state"][0]
    flat = {**state, **state.get("__bnb_optimizer_quant_state__", {})}
    arrays: dict[str, Any] = {}
    for name, value in flat.items():
        if hasattr(value, "codes"):
            arrays |= {f"{name}.codes": value.codes, f"{name}.scale": value.scale}
            arrays |= {f"{name}.qmap": value.qmap} if hasattr(value, "qmap") else {}
        elif not isinstance(value, dict):
            arrays[name] = value
    arrays = {name: _bytes(value) for name, value in arrays.items()}
    group = {key: float(v) if isinstance(v, Tensor) else v for key, v in saved["param_groups"][0].items()}
    with torch.no_grad():
        param.copy_(weights())
    run(optimizer, param, range(3, 4))
    return {**arrays, "group": np.array(json.dumps(group)), "updated": param.detach().numpy().reshape(-1)[:KEPT]}


def _bytes(value: Any) -> np.ndarray:
    value = torch.as_tensor(value).detach()
    return (value.view(torch.uint8) if value.dtype is torch.float8_e4m3fn else value).clone().numpy()


def main() -> None:
    """Writes the file."""
    uncompiled()
    arrays = {f"{name}.{word}": array for name, case in CASES.items() for word, array in _arrays(case).items()}
    np.savez_compressed(FILE, **arrays)  # type: ignore[arg-type]
    print(f"{FILE.name}: {len(arrays)} arrays, {FILE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
