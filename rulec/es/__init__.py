"""Evolution strategies: perturbations, their random streams and the estimates of gradients, without a framework.

A *direction* is one draw of noise, an antithetic *pair* its two signs, a *member* one network that is evaluated: a
direction and, where antithetic, a sign. A *layer* is one array of parameters, by its number among those perturbed.
"""

from rulec.es.perturbation import Perturbation

__all__ = ["Perturbation"]
