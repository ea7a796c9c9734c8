"""Models that `fully_shard` has split: the names of their parameters, and whether they are at work."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

#: torch's register of modules that were split, or replicated: all processes have the same.
_REGISTER = "torch.distributed._composable_state", "_module_state_mapping"

#: What wrappers put into names, in some processes perhaps.
_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "module"})


def split_names(params: Sequence[Tensor]) -> dict[int, str]:
    """The names of parameters in split models, by identity.

    A model is a module that no other split one contains. The names in a second model begin with its number.
    """
    modules = _split_modules()
    wanted, inner = {id(param) for param in params}, {id(child) for m in modules for child in _below(m)}
    names: dict[int, str] = {}
    models = 0
    for model in modules:
        if id(model) in inner:
            continue
        paths = {id(param): _plain(path) for path, param in model.named_parameters() if id(param) in wanted}
        for key, path in paths.items():
            names.setdefault(key, f"{models}/{path}" if models else path)
        models += bool(paths)
    return names


def are_at_work(backward_done: bool) -> bool:
    """Whether other processes wait for this one in messages of a split model, between two steps.

    It is between the beginning of a forward pass and the end of a backward pass. Or it has run before, and not since
    the last step: `backward_done` says that there are gradients of a backward pass since then.
    """
    for module in _split_modules():
        state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
        context = getattr(state, "_state_ctx", None)
        if any(getattr(context, name, None) for name in ("iter_forward_root", "post_backward_final_callback_queued")):
            return True
        if getattr(state, "_is_root", None) is not None and not backward_done:
            return True
        if any(getattr(group, "is_unsharded", False) for group in getattr(state, "_fsdp_param_groups", ())):
            return True
    return False


def _split_modules() -> list[Any]:
    module, name = _REGISTER
    return [m for m in list(getattr(sys.modules.get(module), name, ())) if isinstance(m, nn.Module)]


def _below(module: nn.Module) -> Any:
    """The modules inside a module."""
    return (child for child in module.modules() if child is not module)


def _plain(path: str) -> str:
    """A name without those of wrappers."""
    return ".".join(word for word in path.split(".") if word not in _WRAPPERS)
