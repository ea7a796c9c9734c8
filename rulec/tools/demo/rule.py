"""The rule that the demonstration authors, and the same update as one would write it in NumPy without rulec."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rulec.tools.demo.digits import Array

TEXT = """\
name: WaryAdam
summary: AdamW that takes a shorter step where momentum and gradient disagree.
hyper:
  lr: 1e-3
  beta1: 0.9
  beta2: 0.99
  eps: 1e-8
  weight_decay: 1e-2
  damping: {default: 0.3, min: 0, max: 1}
state: {m: 0, v: 0}
step: |
  m = beta1*m + (1 - beta1)*g
  v = beta2*v + (1 - beta2)*g*g
  m_hat = m / (1 - beta1**t)
  sigma = sqrt(v) / sqrt(1 - beta2**t)
  trust = where(m*g > 0, 1, damping)
  direction = trust*m_hat/(sigma + eps) + weight_decay*p
"""


class Unfused:
    """The same rule in plain NumPy: every operation reads its operands from memory and writes its result there."""

    def __init__(self, params: Sequence[Array], hyper: Mapping[str, float]) -> None:
        self.params, self.hyper = list(params), hyper
        self.m = [np.zeros_like(p) for p in params]
        self.v = [np.zeros_like(p) for p in params]
        self.t = 0

    def step(self, grads: Sequence[Array]) -> None:
        """One update in place, in the parameters' float32."""
        self.t += 1
        h = {name: np.float32(value) for name, value in self.hyper.items()}
        left1 = np.float32(1 - self.hyper["beta1"] ** self.t)
        left2 = np.float32(np.sqrt(1 - self.hyper["beta2"] ** self.t))
        for i, (p, g) in enumerate(zip(self.params, grads, strict=True)):
            self.m[i] = h["beta1"] * self.m[i] + (1 - h["beta1"]) * g
            self.v[i] = h["beta2"] * self.v[i] + (1 - h["beta2"]) * g * g
            m_hat, sigma = self.m[i] / left1, np.sqrt(self.v[i]) / left2
            trust = np.where(self.m[i] * g > 0, np.float32(1), h["damping"])
            direction = trust * m_hat / (sigma + h["eps"]) + h["weight_decay"] * p
            p[...] = p - h["lr"] * direction
