"""Training a small network of PyTorch on the digits without a backward pass, by an evolution strategy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rulec.es import Perturbation
from rulec.tools.demo.digits import Digits

if TYPE_CHECKING:
    from torch import nn

#: Images that every member sees in a step.
BATCH = 64


@dataclass
class Progress:
    """A training run: the mean loss of each epoch, and the test accuracy after it."""

    losses: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)


def perceptron(seed: int = 0) -> nn.Module:
    """A multilayer perceptron of 64, 128 and 10 neurons."""
    import torch
    from torch import nn

    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def convolutional(seed: int = 0) -> nn.Module:
    """A network of two convolutions and a linear layer."""
    import torch
    from torch import nn

    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


def train(
    model: nn.Module, perturbation: Perturbation, optimizer: Callable[[Any], Any], digits: Digits, epochs: int,
    shaping: str | None = "centered_rank", batch: int = BATCH, advance: Callable[[Progress], object] = lambda _: None,
) -> Progress:  # fmt: skip
    """Trains the model in place; `optimizer` makes one of parameters, and `advance` is called after every epoch.

    In each step every member sees the same images, and its fitness is minus its mean cross entropy. The learning rate
    falls to zero as 1 less the square of the share of epochs that are done.
    """
    import torch
    from torch.nn.functional import cross_entropy

    from rulec.torch import perturb

    es = perturb(model, perturbation)
    opt = optimizer(es.parameters.values())
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda epoch: 1 - (epoch / epochs) ** 2)
    progress = Progress()
    for epoch in range(epochs):
        losses = []
        for images, labels in digits.batches(batch, epoch):
            outputs = es(es.member_batch(torch.from_numpy(images)))
            loss = cross_entropy(outputs, es.member_batch(torch.from_numpy(labels)), reduction="none")
            es.step(None, opt, loss=loss, shaping=shaping)
            losses.append(float(loss.mean()))
        schedule.step()
        progress.losses.append(sum(losses) / len(losses))
        progress.accuracies.append(accuracy(model, digits))
        advance(progress)
    return progress


def accuracy(model: nn.Module, digits: Digits) -> float:
    """The share of the test images whose largest output is their label's."""
    import torch

    with torch.no_grad():
        predicted = model(torch.from_numpy(digits.test_images)).argmax(1)
    return float((predicted == torch.from_numpy(digits.test_labels)).double().mean())
