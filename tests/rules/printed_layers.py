"""Rules that see the layers of a model, in which every tensor is a layer: what others do by groups and by freezing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rulec.array_api import random
from tests.rules.peer import Peer, printed_peer
from tests.rules.runs import Array, Hyper
from tests.rules.wrapper_peer import WrapperPeer


class Layers:
    """Tensors of torch, each a layer."""

    def __init__(self, params: Sequence[Array], hyper: Hyper | None = None) -> None:
        self.tensors = [torch.tensor(p, requires_grad=True) for p in params]
        self.t = 0
        self.optimizer: torch.optim.Optimizer | None = None

    def step(self, grads: Sequence[Array], hyper: Hyper) -> None:
        """One step of the layers that have a gradient."""
        self.t += 1
        active = self.active(hyper)
        for i, (tensor, grad) in enumerate(zip(self.tensors, grads, strict=True)):
            tensor.grad = torch.tensor(grad) if i in active else None
        assert self.optimizer is not None
        for group in self.optimizer.param_groups:
            group["lr"] = hyper["lr"] * group.get("scale", 1)
        self.optimizer.step()

    def active(self, hyper: Hyper) -> set[int]:
        """The layers that are updated."""
        return {*range(len(self.tensors))}

    def params(self) -> list[Array]:
        """The parameters now."""
        return [tensor.detach().numpy().copy() for tensor in self.tensors]


class LayerRates(Layers):
    """torch's AdamW with a group for each layer, with timm's learning rate for it."""

    def active(self, hyper: Hyper) -> set[int]:
        if self.optimizer is None:
            scales = [hyper["layer_decay"] ** (len(self.tensors) - i) for i in range(len(self.tensors))]
            groups = [{"params": [p], "scale": s} for p, s in zip(self.tensors, scales, strict=True)]
            self.optimizer = _adamw(groups, hyper)
        return super().active(hyper)


class Blocks(Layers):
    """Algorithm 1 of Luo and others (2024), from the last layer on: torch's AdamW, made anew for each layer."""

    def active(self, hyper: Hyper) -> set[int]:
        place, begins = divmod(self.t - 1, int(hyper["switch_every"]))
        layer = len(self.tensors) - 1 - place % len(self.tensors)
        if not begins:
            self.optimizer = _adamw([self.tensors[layer]], hyper)
        return {layer}


class Sampled(Layers):
    """Algorithm 1 of Pan and others (2024) around torch's Adam, whose frozen layers have no gradient.

    The draws are our random numbers: of the sum over tensors, each counted once for each of its matrices, the fraction.
    """

    def __init__(self, params: Sequence[Array], hyper: Hyper) -> None:
        super().__init__(params)
        self._layers: set[int] = set()
        self.optimizer = torch.optim.Adam(
            self.tensors, hyper["lr"], (hyper["beta1"], hyper["beta2"]), hyper["eps"], foreach=False
        )

    def active(self, hyper: Hyper) -> set[int]:
        if (self.t - 1) % int(hyper["lisa_every"]) == 0:
            self._layers = set()
            for draw in range(2):
                below = len(self.tensors) - 2 + draw
                chosen = int(self._uniform(draw) * (below + 1))
                self._layers.add(below if chosen in self._layers else chosen)
            assert len(self._layers) == 2
        return self._layers

    def _uniform(self, draw: int) -> float:
        counts = [int(np.prod(tensor.shape[:-2])) for tensor in self.tensors]
        words = [random.stream(1, seed=0, tensor=i, draw=draw, step=self.t) for i in range(len(counts))]
        total = sum(count * random.uniform(word)[0] for count, word in zip(counts, words, strict=True))
        return float(total % 1)


def _adamw(params: Sequence[object], hyper: Hyper) -> torch.optim.Optimizer:
    betas = hyper["beta1"], hyper["beta2"]
    return torch.optim.AdamW(
        params,
        hyper["lr"],
        betas,
        hyper["eps"],
        hyper["weight_decay"],
        foreach=False,  # type: ignore[arg-type]
    )


_ADAMW = {"lr": 0.03, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.07}

LAYERED: tuple[Peer, ...] = (
    printed_peer(
        "adamw >> transforms/layerwise_rate", "torch.optim.AdamW with a group for each layer", LayerRates,
        {**_ADAMW, "layer_decay": 0.7},
    ),
)  # fmt: skip

LAYERED_WRAPPERS: tuple[WrapperPeer, ...] = (
    WrapperPeer(
        "lisa(adam)", "torch.optim.Adam of layers that are drawn",
        {"lr": 0.03, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6, "lisa_every": 4}, Sampled,
        note="theirs has our random numbers",
    ),
)  # fmt: skip
