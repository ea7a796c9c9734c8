"""Momenta as they are printed: the classes of `tests.rules.printed` continued."""

from __future__ import annotations

import math

import numpy as np

from tests.rules.printed import Printed
from tests.rules.printed_adaptive import Whole
from tests.rules.runs import Array, Hyper


class FSGDM(Printed):
    """Algorithm 1 of Li and others (2024), with the stages and the first step of their code."""

    def update(self, i: int, g: Array, h: Hyper) -> None:
        length = h["sigma"] // h["n_stages"]
        stage = self.t // length * length
        u = stage / (stage + h["c_scaling"] * h["sigma"])
        self.m[i] = u * self.m[i] + h["v_coefficient"] * g if self.t > 1 else g
        self.w[i] = self.w[i] - h["lr"] * self.m[i]


class GradPower(Printed):
    """Gradient descent with the powers of Wang and others (2025)."""

    def update(self, i: int, g: Array, h: Hyper) -> None:
        self.w[i] = self.w[i] - h["lr"] * np.copysign(np.abs(g) ** h["exponent"], g)


class SRSGD(Printed):
    """Scheduled restarts of Wang and others (2020), whose steps count from zero."""

    def update(self, i: int, g: Array, h: Hyper) -> None:
        if self.t == 1:
            self.v[i] = self.w[i]
        count = (self.t - 1) % h["restart"]
        after = self.w[i] - h["lr"] * g
        self.w[i] = after + count / (count + 3) * (after - self.v[i])
        self.v[i] = after


class NSGDM(Whole):
    """Algorithm 1 of Cutkosky and Mehta (2020)."""

    def update(self, i: int, g: Array, h: Hyper) -> None:
        self.m[0] = h["beta"] * self.m[0] + (1 - h["beta"]) * g if self.t > 1 else g
        size = float(np.linalg.norm(self.m[0]))
        self.w[0] = self.w[0] - h["lr"] * self.m[0] / (size or 1)


class SNGM(Whole):
    """Algorithm 1 of Zhao and others (2020)."""

    def update(self, i: int, g: Array, h: Hyper) -> None:
        self.m[0] = h["momentum"] * self.m[0] + g / (float(np.linalg.norm(g)) or 1)
        self.w[0] = self.w[0] - h["lr"] * self.m[0]


class SGDHD(Whole):
    """Algorithm 4 of Baydin and others (2017), SGD-HD."""

    def update(self, i: int, g: Array, h: Hyper) -> None:
        if self.t == 1:
            self.rate, self.direction = h["lr0"], np.zeros_like(g)
        self.rate = self.rate - h["hypergrad_lr"] * float(g @ -self.direction)
        self.direction = self.direction_of(g, h)
        self.w[0] = self.w[0] - self.rate * self.direction

    def direction_of(self, g: Array, h: Hyper) -> Array:
        """The step without its rate."""
        return g


class AdamHD(SGDHD):
    """Algorithm 5 of Baydin and others (2017), Adam-HD."""

    def direction_of(self, g: Array, h: Hyper) -> Array:
        beta1, beta2, t = h["beta1"], h["beta2"], self.t
        self.m[0] = beta1 * self.m[0] + (1 - beta1) * g
        self.v[0] = beta2 * self.v[0] + (1 - beta2) * g**2
        return np.asarray(self.m[0] / (1 - beta1**t) / (np.sqrt(self.v[0] / (1 - beta2**t)) + h["eps"]))


class Proximal(Printed):
    """Forward steps and backward steps of Duchi and Singer (2009): for each element alone, the minimum is known."""

    def update(self, i: int, g: Array, h: Hyper) -> None:
        rate = self.rate(i, g, h)
        half = self.w[i] - rate * g
        shrunk = np.where(half > rate * h["lambda1"], half - rate * h["lambda1"], 0)
        shrunk = np.where(half < -rate * h["lambda1"], half + rate * h["lambda1"], shrunk)
        self.w[i] = shrunk / (1 + rate * h["lambda2"])

    def rate(self, i: int, g: Array, h: Hyper) -> Array:
        """The learning rate of each element."""
        return np.asarray(h["lr"])


class ProximalAdagrad(Proximal):
    """TensorFlow's ProximalAdagrad."""

    def rate(self, i: int, g: Array, h: Hyper) -> Array:
        self.v[i] = (self.v[i] if self.t > 1 else h["initial"]) + g**2
        return np.asarray(h["lr"] / np.sqrt(self.v[i]))


class L2Init(Printed):
    """Gradient descent with the penalty of Kumar, Marklund and Van Roy (2023)."""

    def update(self, i: int, g: Array, h: Hyper) -> None:
        if self.t == 1:
            self.v[i] = self.w[i]
        self.w[i] = self.w[i] - h["lr"] * (g + h["pull"] * (self.w[i] - self.v[i]))


class UntunedWarmup(Printed):
    """The linear warmup of Ma and Yarats (2019), in front of gradient descent."""

    def update(self, i: int, g: Array, h: Hyper) -> None:
        self.w[i] = self.w[i] - h["lr"] * min(1, (1 - h["warmup_beta2"]) / 2 * self.t) * g


class NagGs(Printed):
    """NAG-GS of Leplat and others (2022), in the order of their code."""

    def update(self, i: int, g: Array, h: Hyper) -> None:
        alpha, mu = h["lr"], h["mu"]
        if self.t == 1:
            self.v[i], self.m[i] = self.w[i], np.asarray(h["gamma"])
        b = alpha * mu / (alpha * mu + self.m[i])
        self.v[i] = self.v[i] + b * (self.w[i] - self.v[i] - g / mu)
        self.m[i] = (alpha * mu + self.m[i]) / (1 + alpha)
        self.w[i] = self.w[i] + alpha / (1 + alpha) * (self.v[i] - self.w[i])


class AdagradDA(Printed):
    """TensorFlow's AdagradDA, whose steps are counted from one."""

    def update(self, i: int, g: Array, h: Hyper) -> None:
        self.m[i] = self.m[i] + g
        self.v[i] = (self.v[i] if self.t > 1 else h["initial"]) + g**2
        rest = np.maximum(np.abs(self.m[i]) - h["lambda1"] * self.t, 0)
        self.w[i] = h["lr"] * -np.copysign(rest, self.m[i]) / (h["lambda2"] * self.t * h["lr"] + np.sqrt(self.v[i]))


class RDA(Printed):
    """Algorithm 1 of Xiao (2010) for the l1 norm, in closed form; the mean is that of the sum."""

    def update(self, i: int, g: Array, h: Hyper) -> None:
        self.m[i] = self.m[i] + g
        mean = self.m[i] / self.t
        small = np.abs(mean) <= h["lambda1"]
        self.w[i] = np.where(small, 0, -math.sqrt(self.t) / h["gamma"] * (mean - h["lambda1"] * np.sign(mean)))


class ExponentiatedGradient(Printed):
    """The unnormalized algorithm of Kivinen and Warmuth (1997), for the sizes of weights that keep their signs."""

    def update(self, i: int, g: Array, h: Hyper) -> None:
        signs, sizes = np.sign(self.w[i]), np.abs(self.w[i])
        self.w[i] = signs * (sizes * np.exp(-h["lr"] * (signs * g)))


class EFSignSGD(Printed):
    """Algorithm 1 of Karimireddy and others (2019), where the mean size is the 1-norm over the number of elements."""

    def update(self, i: int, g: Array, h: Hyper) -> None:
        corrected = h["lr"] * g + self.m[i]
        delta = np.abs(corrected).sum() / corrected.size * np.sign(corrected)
        self.w[i] = self.w[i] - delta
        self.m[i] = corrected - delta


class ZClip(Whole):
    """Gradient descent behind the algorithm of Kumar and others (2025), adaptive scaling, without a fixed bound."""

    def update(self, i: int, g: Array, h: Hyper) -> None:
        if self.t == 1:
            self.norms: list[float] = []
        size = float(np.linalg.norm(g))
        if self.t <= h["clip_after"]:
            self.norms.append(size)
            self.mean, self.var = float(np.mean(self.norms)), float(np.var(self.norms))
        else:
            z = (size - self.mean) / (math.sqrt(self.var) + h["z_eps"])
            bound = size
            if z > h["z_thresh"]:
                bound = self.mean + h["z_thresh"] * math.sqrt(self.var) / (z / h["z_thresh"])
                g = g * (bound / (size + 1e-6))
            self.mean = h["z_alpha"] * self.mean + (1 - h["z_alpha"]) * bound
            self.var = h["z_alpha"] * self.var + (1 - h["z_alpha"]) * (bound - self.mean) ** 2
        self.w[0] = self.w[0] - h["lr"] * g


class EqualBetas(Printed):
    """Adam of two equal betas without eps and corrections, which Orvieto and Gower (2025) rewrite."""

    def update(self, i: int, g: Array, h: Hyper) -> None:
        self.m[i] = h["momentum"] * self.m[i] + (1 - h["momentum"]) * g
        self.v[i] = h["momentum"] * self.v[i] + (1 - h["momentum"]) * g**2
        root = np.sqrt(self.v[i])
        self.w[i] = self.w[i] - h["lr"] * np.divide(self.m[i], root, out=np.zeros_like(root), where=root > 0)


class RelativeUpdate(Printed):
    """Gradient descent whose steps the hook of emerging-optimizers scales to the norm of the weights."""

    def update(self, i: int, g: Array, h: Hyper) -> None:
        size, slope = float(np.linalg.norm(self.w[i])), float(np.linalg.norm(g))
        scale = 0.0 if min(size, slope) < h["norm_floor"] else size / slope
        self.w[i] = self.w[i] - h["lr"] * scale * g


class SpectralNormDecay(Printed):
    """Gradient descent that shrinks the largest singular value, as Newhouse and others (2025) do, times the rate."""

    def update(self, i: int, g: Array, h: Hyper) -> None:
        before, self.w[i] = self.w[i], self.w[i] - h["lr"] * g
        if g.ndim > 1:
            left, sizes, right = np.linalg.svd(before.reshape(len(before), -1), full_matrices=False)
            part = sizes[0] * np.outer(left[:, 0], right[0])
            self.w[i] = self.w[i] - h["lr"] * h["spectral_rate"] * part.reshape(g.shape)
