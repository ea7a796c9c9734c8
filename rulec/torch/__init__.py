"""Optimizers for PyTorch: `rulec.torch.AdamW` and the like, one class for each rule, with torch's names and keywords.

They are made when first asked for; `tests.torch.stubs` generates `__init__.pyi`, which describes them.
"""

from __future__ import annotations

from rulec.extras import needing

with needing("rulec.torch", "torch"):
    import torch  # noqa: F401

from rulec.language.library.load import installed_titles, no_title
from rulec.torch.checkpoint import load, save
from rulec.torch.classes import class_named, class_names, optimizer
from rulec.torch.covariances import covariances
from rulec.torch.curvature import hutchinson
from rulec.torch.eager import EagerUpdate, GradStore
from rulec.torch.es import perturb
from rulec.torch.lbfgs import LBFGS
from rulec.torch.memory_profile.measure import account
from rulec.torch.optimizer import EvaluatedOptimizer, RuleOptimizer
from rulec.torch.partitioned import Partitioned, partitioned_groups
from rulec.torch.tags import tagged_groups

__all__ = [
    "EagerUpdate", "EvaluatedOptimizer", "GradStore", "LBFGS", "Partitioned", "RuleOptimizer", "account", "covariances",
    "hutchinson", "load", "optimizer", "partitioned_groups", "perturb", "save", "tagged_groups", *class_names(),
]  # fmt: skip


def __getattr__(name: str) -> type[RuleOptimizer]:
    if name in __all__:
        return class_named(name)
    if name.startswith("_"):
        raise AttributeError(f"module 'rulec.torch' has no attribute {name!r}")
    if name in installed_titles():
        return optimizer(installed_titles()[name])
    raise AttributeError(no_title("rulec.torch", name))


def __dir__() -> list[str]:
    return sorted([*__all__, *installed_titles()])
