"""Muon and Adafactor of mlx.optimizers, whose lines differ from the rules of the library.

Each is a text of the rule language with the lines that a class's flags choose.
"""

from __future__ import annotations

import functools
from typing import Any

from rulec.language.library.load import parse
from rulec.language.rule import Rule

#: The decay is in the gradient, any parameter of two axes or more is a matrix of the first axis by the others, and the
#: step grows with the last axis but one against the last.
_MUON = """
name: Muon
hyper:
  lr: {{default: 1e-3, min: 0}}
  momentum: {{default: 0.95, min: 0}}
  weight_decay: {{default: 0.01, min: 0}}
  ns_steps: {{default: 5, static: true, whole: true, min: 1, below: 100}}
view: {{flatten: rest}}
state: {{m: 0}}
step: |
  d = g + weight_decay*p
  m = momentum*m + (1 - momentum)*d
  u = {u}
  if ndim >= 2:
    o = newton_schulz(u/(norm(u, per="matrix") + 1e-7), steps=ns_steps, normalize="none")
    direction = sqrt(maximum(1, dim(-2)/dim(-1)))*o
  else:
    direction = u
"""

#: The moments are those of the paper. The rate is chosen by flags, and the momentum is of the steps.
_ADAFACTOR = """
name: Adafactor
hyper:
  {lr}
  eps1: {{default: 1e-30, min: 0}}
  eps2: {{default: 1e-3, min: 0}}
  clip_threshold: {{default: 1, above: 0}}
  decay_rate: {{default: -0.8, max: 0}}
  {beta_1}
  weight_decay: {{default: 0, min: 0}}
state:
  r: {{init: 0, per: row, if: ndim >= 2}}
  c: {{init: 0, per: col, if: ndim >= 2}}
  v: {{init: 0, if: ndim < 2}}
  {m}
step: |
  rho = t**decay_rate
  s = g**2 + eps1
  if ndim >= 2:
    r = r + rho*(mean(s, per="row") - r)
    c = c + rho*(mean(s, per="col") - c)
    a = rsqrt(r/mean(r, per="matrix"))
    u = a*rsqrt(c)*g
  else:
    v = v + rho*(s - v)
    u = rsqrt(v)*g
  alpha = {alpha}
  moved = alpha*u/maximum(1, rms(u)/clip_threshold)
  {step}
  p = p - weight_decay*alpha*p - {moved}
"""


@functools.cache
def muon(nesterov: bool) -> Rule:
    """Muon, with Nesterov's momentum or the plain one."""
    return _parsed(_MUON, u="(1 - momentum)*d + momentum*m" if nesterov else "m")


@functools.cache
def adafactor(first_moment: bool, scale_parameter: bool, relative_step: bool, warmup_init: bool) -> Rule:
    """Adafactor by its flags; without `relative_step` it has a learning rate."""
    bound = "1e-6*t" if warmup_init else "1e-2"
    rate = f"minimum({bound}, 1/sqrt(t))" if relative_step else "lr"
    return _parsed(
        _ADAFACTOR,
        lr="" if relative_step else "lr: {default: 1e-2, min: 0}",
        beta_1="beta_1: {default: 0.9, min: 0, max: 1}" if first_moment else "",
        m="m: 0" if first_moment else "",
        alpha=f"maximum(eps2, rms(p))*{rate}" if scale_parameter else rate,
        step="m = beta_1*m + (1 - beta_1)*moved" if first_moment else "",
        moved="m" if first_moment else "moved",
    )


def _parsed(text: str, **lines: Any) -> Rule:
    """The rule of a text with these lines, without the empty ones."""
    filled = text.format(**lines)
    return parse("\n".join(line for line in filled.splitlines() if line.strip()))
