"""timm's optimizer factory: the classes of rulec, and rules, under names of its own."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch.optim.optimizer import ParamsT

from rulec.errors import HyperError
from rulec.integrations.from_rule import Rules, class_and_keywords, class_of
from rulec.torch.classes import class_names
from rulec.torch.optimizer import RuleOptimizer


def register_timm(**rules: Rules) -> list[str]:
    """Registers every class of `rulec.torch` in timm's factory, and rules by names of your own; returns all names.

        register_timm(clipped="clip_by_global_norm >> adamw")
        create_optimizer_v2(model, opt="rulec-lion", lr=1e-4, weight_decay=0.05, layer_decay=0.75)
        create_optimizer_v2(model, opt="rulec-clipped", lr=1e-3)

    A name is `rulec-` and the class's in small letters: timm reads `_` as the end of a wrapper's name, and takes its
    own Lion for `rulec_lion`. Classes with the keyword `auto` are made with it. As in timm, `momentum` is 0.9 by
    default. HyperError for a name that timm would not find.
    """
    from timm.optim import OptimInfo, list_optimizers
    from timm.optim._optim_factory import default_registry

    kinds: dict[str, Rules] = {name.lower(): name for name in class_names()}
    for name in rules:
        if "_" in name or name != name.lower() or name in kinds:
            raise HyperError(
                f"{name!r} cannot be the name of a rule in timm: it takes small letters without '_', and no name of a "
                f"class of rulec.torch"
            )
    known = {*list_optimizers()}
    for name, rule in {**kinds, **rules}.items():
        if name in kinds and f"rulec-{name}" in known:
            continue
        factory = partial(_optimizer, class_of(rule) if name in rules else rule)
        described = f"{rule} of rulec" if isinstance(rule, str) else "a rule of rulec"
        default_registry.register(
            OptimInfo(f"rulec-{name}", factory, described, has_eps=True, has_momentum=True, has_betas=True)
        )
    return [f"rulec-{name}" for name in (*kinds, *rules)]


def _optimizer(rule: Rules, params: ParamsT, **keywords: Any) -> RuleOptimizer:
    """The optimizer. Keywords of timm's that the class lacks are left out where timm gives them to all."""
    known = class_of(rule).interface.signature.parameters
    if "momentum" not in known:
        keywords.pop("momentum", None)
    if "weight_decay" not in known and not keywords.get("weight_decay"):
        keywords.pop("weight_decay", None)
    kind, keywords = class_and_keywords(rule, keywords)
    return kind(params, **keywords)
