"""The names of parameters in the models that `fully_shard` has split, for optimizers that were given none."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

#: torch's register of modules that were split, or replicated: all processes have the same.
_REGISTER = "torch.distributed._composable_state", "_module_state_mapping"

#: What wrappers put into names, in some processes perhaps.
_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "module"})


def fsdp_names(params: Sequence[Tensor]) -> dict[int, str]:
    """The names of those parameters that are of a split model, by identity.

    A model is one that no other split one contains. The names in a second model begin with its number.
    """
    module, name = _REGISTER
    modules = [m for m in list(getattr(sys.modules.get(module), name, ())) if isinstance(m, nn.Module)]
    wanted, inner = {id(param) for param in params}, {id(child) for m in modules for child in _below(m)}
    names: dict[int, str] = {}
    models = 0
    for model in modules:
        if id(model) in inner:
            continue
        own = {id(param): _plain(path) for path, param in model.named_parameters() if id(param) in wanted}
        for key, path in own.items():
            names.setdefault(key, f"{models}/{path}" if models else path)
        models += bool(own)
    return names


def _below(module: nn.Module) -> Any:
    """The modules inside a module."""
    return (child for child in module.modules() if child is not module)


def _plain(path: str) -> str:
    """A name without those of wrappers."""
    return ".".join(word for word in path.split(".") if word not in _WRAPPERS)
