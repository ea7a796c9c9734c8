"""Hugging Face's Trainer, and trl's: the pair that they take, groups with tags, and steps inside the backward pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rulec.errors import HyperError
from rulec.integrations.from_rule import Rules, class_and_keywords
from rulec.torch.eager import EagerUpdate
from rulec.torch.optimizer import RuleOptimizer
from rulec.torch.tags import tagged_groups

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from transformers import Trainer as _Trainer
else:
    _Trainer = object


def optimizer_cls_and_kwargs(rule: Rules, **keywords: Any) -> tuple[type[RuleOptimizer], dict[str, Any]]:
    """The argument of that name of `transformers.Trainer`, and of trl's trainers.

        Trainer(model, args, train_dataset=data, optimizer_cls_and_kwargs=optimizer_cls_and_kwargs("muon", lr=0.02))

    The learning rate is given here: the Trainer does not read `args.learning_rate` beside this argument. Weight decay
    is `args.weight_decay`, for the parameters that the Trainer decays.
    """
    if "weight_decay" in keywords:
        raise HyperError("the Trainer sets the weight decay of every group: give it as TrainingArguments.weight_decay")
    return class_and_keywords(rule, keywords)


class TaggedGroups(_Trainer):
    """Before `Trainer` among the bases of a class: its groups have the tags of the model's modules, and names.

        class MuonTrainer(TaggedGroups, Trainer): ...

    Weight decay is for the parameters that the Trainer decays (`get_decay_parameter_names`). `tags` has tag ->
    patterns of names, as the argument of `tagged_groups`.
    """

    tags: Mapping[str, Any] | None = None

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """The optimizer of `optimizer_cls_and_kwargs`, made at first use."""
        if self.optimizer is None:
            kind, keywords = self._kind()
            self.optimizer = kind(self._groups(model), **keywords)
        return self.optimizer

    def _kind(self) -> tuple[Any, dict[str, Any]]:
        if self.optimizer_cls_and_kwargs is None:
            raise HyperError(f"{type(self).__name__} makes a rule's optimizer: give it optimizer_cls_and_kwargs")
        kind, keywords = self.optimizer_cls_and_kwargs
        return kind, keywords

    def _groups(self, model: nn.Module | None) -> list[dict[str, Any]]:
        """The tagged groups, each in two: of parameters that decay, and of the others."""
        model = self.model if model is None else model
        assert model is not None
        decaying = {*self.get_decay_parameter_names(model)}
        groups = []
        for group in tagged_groups(model, self.tags):
            params = [(name, param) for name, param in group["params"] if param.requires_grad]
            for decays, amount in ((True, self.args.weight_decay), (False, 0.0)):
                members = [(name, param) for name, param in params if (name in decaying) is decays]
                groups += [{**group, "params": members, "weight_decay": amount}] if members else []
        return groups


class EagerSteps(TaggedGroups):
    """Before `Trainer` among the bases of a class: parameters are updated inside the backward pass, by `EagerUpdate`.

    Gradients are freed as they are used, so `TrainingArguments.max_grad_norm` is to be 0. `eager` has keywords of
    `EagerUpdate`.
    """

    eager: Mapping[str, Any] = {}

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """The `EagerUpdate` of `optimizer_cls_and_kwargs`, made at first use."""
        if self.args.max_grad_norm:
            raise HyperError(
                f"max_grad_norm={self.args.max_grad_norm} clips gradients after the backward pass, and they are used "
                f"in it: set max_grad_norm=0 in TrainingArguments"
            )
        if self.optimizer is None:
            kind, keywords = self._kind()
            self.optimizer = EagerUpdate(self._groups(model), kind, **{**self.eager, **keywords})
        return self.optimizer

    def training_step(self, *args: Any, **keywords: Any) -> Tensor:
        """The Trainer's, in the scope of a backward pass; the last micro-batch of a step updates."""
        eager: Any = getattr(self.optimizer, "optimizer", self.optimizer)
        with eager.backward(last_microbatch=self.accelerator.sync_gradients):
            loss: Tensor = super().training_step(*args, **keywords)
        return loss

    def _get_grad_norm(self, model: nn.Module, grad_norm: float | None = None) -> float | None:
        """Returns the norm that is logged: none, for gradients were freed as they were used."""
        return grad_norm
