"""Evolution strategies for JAX: pure functions over a tree of parameters, traced, mapped and sharded as any other.

perturbation = Perturbation("lowrank", directions=256, sigma=0.02)
state = es.init(params, perturbation)

@jax.jit
def train(params, opt_state, state, x, y):
    logits = network(es.batched(params, state, perturbation), es.member_batch(x, perturbation))
    fitness = -losses(logits, es.member_batch(y, perturbation))
    return es.update(params, opt_state, tx, state, perturbation, fitness)
"""

from __future__ import annotations

from rulec.es.perturbation import Perturbation
from rulec.jax.es.members import Perturbed, batched, conv, dot, evaluate, member, member_batch, take
from rulec.jax.es.state import Report, State, init, report, set_sigma
from rulec.jax.es.update import estimate, update

__all__ = [
    "Perturbation",
    "Perturbed",
    "Report",
    "State",
    "batched",
    "conv",
    "dot",
    "estimate",
    "evaluate",
    "init",
    "member",
    "member_batch",
    "report",
    "set_sigma",
    "take",
    "update",
]
