"""The wrappers beside implementations that are not ours: who computes the same as `wrapper(rule)`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax
import pytorch_optimizer
import torch
from pytorch_optimizer.optimizer.utils.galore import GaLoreProjector
from pytorch_optimizer.optimizer.utils.graft import LayerWiseGrafting
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from rulec.array_api import random
from tests.rules.constraints import CONSTRAINED
from tests.rules.decays import DECAYS
from tests.rules.printed_layers import LAYERED_WRAPPERS
from tests.rules.runs import Array, Hyper, OptaxRun, Run, TorchRun
from tests.rules.wrapper_peer import Start, WrapperPeer


class OptaxLookahead:
    """optax.lookahead around Adam: its parameters are pairs of fast and slow ones, its gradients those of the fast."""

    def __init__(self, params: Sequence[Array], hyper: Hyper) -> None:
        with jax.enable_x64(True):
            self.now = optax.LookaheadParams.init_synced([jax.numpy.asarray(p) for p in params])
            self.optax_state = self.transformation(hyper).init(self.now)

    @staticmethod
    def transformation(h: Hyper) -> Any:
        """The transformation with these hyper-parameters."""
        adam = optax.adam(h["lr"], b1=h["beta1"], b2=h["beta2"], eps=h["eps"])
        return optax.lookahead(adam, sync_period=int(h["k"]), slow_step_size=h["alpha"])

    def step(self, grads: Sequence[Array], hyper: Hyper) -> None:
        with jax.enable_x64(True):
            given = [jax.numpy.asarray(g) for g in grads]
            updates, self.optax_state = self.transformation(hyper).update(given, self.optax_state, self.now)
            self.now = optax.apply_updates(self.now, updates)

    def params(self) -> list[Array]:
        return [np.array(p) for p in self.now.fast]


class TorchAverage(TorchRun):
    """torch's Adam with torch's exponential moving average of its parameters, which is what is compared."""

    def __init__(self, params: Sequence[Array], hyper: Hyper) -> None:
        super().__init__(torch.optim.Adam, _torch_adam, params, hyper)
        model = torch.nn.ParameterList([torch.nn.Parameter(t) for t in self.tensors])
        self.tensors = list(model)
        self.optimizer = torch.optim.Adam(self.tensors, foreach=False, **_torch_adam(hyper))
        self.model = model
        average: Any = get_ema_multi_avg_fn(hyper["ema_decay"])  # type: ignore[no-untyped-call]
        self.average = AveragedModel(model, multi_avg_fn=average)

    def step(self, grads: Sequence[Array], hyper: Hyper) -> None:
        super().step(grads, hyper)
        self.average.update_parameters(self.model)

    def params(self) -> list[Array]:
        return [p.detach().numpy().copy() for p in self.average.module.parameters()]


class TorchAccumulation(TorchRun):
    """torch's AdamW fed as accumulation is written by hand: gradients divided and added up, a step once in a while."""

    def __init__(self, params: Sequence[Array], hyper: Hyper) -> None:
        super().__init__(torch.optim.AdamW, _torch_adam, params, hyper)
        self.count, self.sum = 0, [np.zeros_like(p) for p in params]

    def step(self, grads: Sequence[Array], hyper: Hyper) -> None:
        self.count += 1
        self.sum = [a + g / hyper["every"] for a, g in zip(self.sum, grads, strict=True)]
        if self.count % hyper["every"] == 0:
            super().step(self.sum, hyper)
            self.sum = [np.zeros_like(a) for a in self.sum]


class ScheduleFreeRun(TorchRun):
    """pytorch_optimizer's schedule-free wrapper around torch's Adam; compared is the point it evaluates at."""

    def __init__(self, params: Sequence[Array], hyper: Hyper) -> None:
        super().__init__(_schedule_free_adam, _torch_schedule_free, params, hyper)
        self.optimizer.train()

    def params(self) -> list[Array]:
        self.optimizer.eval()
        found = super().params()
        self.optimizer.train()
        return found


class GaLoreRun(TorchRun):
    """pytorch_optimizer's GaLore with random projections: ours of the same numbers, at the steps ours are drawn anew.

    Its eps is added to a root without bias correction, so it has one that is next to nothing.
    """

    def __init__(self, params: Sequence[Array], hyper: Hyper) -> None:
        super().__init__(_galore, _torch_galore, params, hyper)
        for index, tensor in enumerate(self.tensors):
            if tensor.ndim == 2:
                self.optimizer.state[tensor]["projector"] = _OurProjector(index, hyper)


class _OurProjector(GaLoreProjector):
    """Theirs, with its matrix made of the random numbers that our rule draws for that tensor."""

    def __init__(self, index: int, hyper: Hyper) -> None:
        super().__init__(rank=int(hyper["rank"]), update_proj_gap=1)
        self.index, self.gap, self.t = index, hyper["gap"], 0

    def update_ortho_matrix(self, x: Any, from_random_matrix: bool) -> None:
        """Called at every step, before the gradient `x` is projected."""
        self.t += 1
        projection = random_projection(self.index, min(x.shape), self.rank or 0, int((self.t - 1) // self.gap))
        # Of a tall matrix theirs shortens the columns.
        self.ortho_matrix = torch.tensor(projection if x.shape[0] >= x.shape[1] else projection.T)


def random_projection(index: int, rows: int, rank: int, at: int) -> Array:
    """The projection of one matrix with that many rows, by the numbers that are drawn for it at that count."""
    rank = min(rank, rows)
    numbers = random.normal(rank * rows, seed=0, tensor=index, draw=0, step=at)
    return np.asarray(numbers.reshape(rank, rows) / np.sqrt(rank))


class ProjectedAdam:
    """Adam on randomly projected gradients of matrices, written out by hand; Adam as it is on anything else."""

    def __init__(self, params: Sequence[Array], hyper: Hyper) -> None:
        self.now = [p.copy() for p in params]
        self.t = 0
        self.moments: list[list[Any]] = [[0.0, 0.0] for _ in params]

    def step(self, grads: Sequence[Array], hyper: Hyper) -> None:
        self.t += 1
        for index, g in enumerate(grads):
            if g.ndim < 2:
                self.now[index] = self.now[index] - hyper["lr"] * self.direction(index, g, hyper)
                continue
            tall = g.shape[-2] > g.shape[-1]
            short = np.swapaxes(g, -1, -2) if tall else g
            drawn = int((self.t - 1) // hyper["gap"])
            projection = random_projection(index, short.shape[-2], int(hyper["rank"]), drawn)
            back = projection.T @ self.direction(index, projection @ short, hyper)
            self.now[index] = self.now[index] - hyper["lr"] * (np.swapaxes(back, -1, -2) if tall else back)

    def direction(self, index: int, g: Array, h: Hyper) -> Array:
        """Adam's direction for a gradient, from the moments kept under that index."""
        m, v = self.moments[index]
        m, v = h["beta1"] * m + (1 - h["beta1"]) * g, h["beta2"] * v + (1 - h["beta2"]) * g**2
        self.moments[index] = [m, v]
        unbiased = v / (1 - h["beta2"] ** self.t)
        return np.asarray(m / (1 - h["beta1"] ** self.t) / (np.sqrt(unbiased) + h["eps"]))

    def params(self) -> list[Array]:
        return [p.copy() for p in self.now]


def _grafted_shampoo(graft: LayerWiseGrafting) -> Start:
    """pytorch_optimizer's Shampoo with grafts, its statistics sums: its own check of betas allows means alone."""

    def kind(tensors: Any, foreach: bool, **keywords: Any) -> Any:
        made = pytorch_optimizer.ScalableShampoo(
            tensors, betas=(0.0, 0.9), graft_type=graft, start_preconditioning_step=1, preconditioning_compute_steps=1,
            nesterov=False, use_svd=True, shape_interpretation=False, foreach=foreach, **keywords,
        )  # fmt: skip
        made.param_groups[0]["betas"] = (0.0, 1.0)
        return made

    def keywords(h: Hyper) -> dict[str, Any]:
        return {"lr": h["lr"], "matrix_eps": h["shampoo_eps"], "diagonal_eps": h.get("eps", 0.0)}

    return lambda params, hyper: TorchRun(kind, keywords, params, hyper)


def _torch_adam(h: Hyper) -> dict[str, Any]:
    decay = {"weight_decay": h["weight_decay"]} if "weight_decay" in h else {}
    return {"lr": h["lr"], "betas": (h["beta1"], h["beta2"]), "eps": h["eps"], **decay}


def _torch_schedule_free(h: Hyper) -> dict[str, Any]:
    own = {"momentum": h["beta"], "r": h["r"], "weight_lr_power": h["weight_lr_power"]}
    return {**_torch_adam(h), **own}


def _torch_galore(h: Hyper) -> dict[str, Any]:
    own = {"rank": int(h["rank"]), "update_proj_gap": 1, "scale": 1.0, "projection_type": "std"}
    return {**_torch_adam(h), **own}


def _galore(tensors: Any, foreach: bool, **keywords: Any) -> Any:
    own = {key: keywords.pop(key) for key in ("rank", "update_proj_gap", "scale", "projection_type")}
    return pytorch_optimizer.GaLore([{"params": tensors, **own}], foreach=foreach, **keywords)


def _schedule_free_adam(tensors: Any, foreach: bool, **keywords: Any) -> Any:
    own = {key: keywords.pop(key) for key in ("momentum", "r", "weight_lr_power")}
    return pytorch_optimizer.ScheduleFreeWrapper(torch.optim.Adam(tensors, foreach=foreach, **keywords), **own)


def _lookahead_adam(tensors: Any, foreach: bool, k: int, alpha: float, **keywords: Any) -> Any:
    return pytorch_optimizer.Lookahead(torch.optim.Adam(tensors, foreach=foreach, **keywords), k=k, alpha=alpha)


def _torch_lookahead(params: Sequence[Array], hyper: Hyper) -> Run:
    def keywords(h: Hyper) -> dict[str, Any]:
        return {**_torch_adam(h), "k": int(h["k"]), "alpha": h["alpha"]}

    return TorchRun(_lookahead_adam, keywords, params, hyper)


def _optax_adam(h: Hyper) -> Any:
    return optax.adam(h["lr"], b1=h["beta1"], b2=h["beta2"], eps=h["eps"])


def _optax(make: Callable[[Hyper], Any]) -> Start:
    return lambda params, hyper: OptaxRun(make, params, hyper)


def _multi_steps(h: Hyper) -> Any:
    wide = jax.numpy.float64
    return optax.MultiSteps(_optax_adam(h), int(h["every"]), accumulator_dtype=wide).gradient_transformation()


def _schedule_free(h: Hyper) -> Any:
    return optax.contrib.schedule_free(_optax_adam(h), h["lr"], b1=h["beta"], weight_lr_power=h["weight_lr_power"])


def _mechanize(h: Hyper) -> Any:
    return optax.contrib.mechanize(_optax_adam(h), h["s_decay"], h["tiny"], h["s_init"], 6)


_ADAM = {"lr": 0.03, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6}
_LOOKAHEAD = {**_ADAM, "k": 4, "alpha": 0.3}
_FREE = {"lr": 0.03, "beta1": 0, "beta2": 0.95, "eps": 1e-6, "beta": 0.85, "weight_lr_power": 1.5}
_MECHANIC = {**_ADAM, "lr": 1.0, "s_init": 0.01, "s_decay": 0.02, "tiny": 1e-6}
_LOW_RANK = {**_ADAM, "rank": 2, "gap": 7}

_GRAFTED = (
    "theirs sums its statistics, which its own check of betas forbids, from the first step on and with exact roots; "
    "square matrices alone"
)

#: Every wrapper of the library, each beside at least one other implementation.
WRAPPERS: tuple[WrapperPeer, ...] = (
    WrapperPeer("lookahead(adam)", "optax.lookahead", _LOOKAHEAD, OptaxLookahead),
    WrapperPeer("lookahead(adam)", "pytorch_optimizer.Lookahead", _LOOKAHEAD, _torch_lookahead),
    WrapperPeer(
        "ema(adam)", "torch.optim.swa_utils.AveragedModel", {**_ADAM, "ema_decay": 0.9}, TorchAverage, "average"
    ),
    WrapperPeer(
        "accumulate(adam)",
        "optax.MultiSteps",
        {**_ADAM, "every": 3},
        _optax(_multi_steps),
        note="its sum is kept in float64",
    ),
    WrapperPeer(
        "accumulate(adamw)",
        "torch.optim.AdamW",
        {**_ADAM, "weight_decay": 0.07, "every": 3},
        TorchAccumulation,
        note="gradients are summed by hand",
    ),
    WrapperPeer("schedule_free(adam)", "optax.contrib.schedule_free", _FREE, _optax(_schedule_free)),
    WrapperPeer("low_rank(adam)", "the same by hand", _LOW_RANK, ProjectedAdam),
    WrapperPeer(
        "low_rank(adam)",
        "pytorch_optimizer.GaLore",
        {**_LOW_RANK, "eps": 1e-300},
        GaLoreRun,
        shapes=((5,), (3, 4), (), (6, 2)),
        note="theirs has our random numbers, at the steps at which ours are drawn; its eps is beside another root, and "
        "next to nothing here; without batches of matrices",
    ),
    WrapperPeer(
        "graft(shampoo(every=1, eps=shampoo_eps), sgd)",
        "pytorch_optimizer.ScalableShampoo",
        {"lr": 0.03, "shampoo_eps": 1e-3},
        _grafted_shampoo(LayerWiseGrafting.SGD),
        shapes=((5, 5), (3, 3)),
        note=_GRAFTED,
    ),
    WrapperPeer(
        "graft(shampoo(every=1), adagrad)",
        "pytorch_optimizer.ScalableShampoo",
        {"lr": 0.03, "shampoo_eps": 1e-3, "eps": 1e-6},
        _grafted_shampoo(LayerWiseGrafting.ADAGRAD),
        shapes=((5, 5), (3, 3)),
        note=_GRAFTED,
    ),
    WrapperPeer("mechanic(adam)", "optax.contrib.mechanize", _MECHANIC, _optax(_mechanize)),
    *DECAYS,
    *CONSTRAINED,
    *LAYERED_WRAPPERS,
)
