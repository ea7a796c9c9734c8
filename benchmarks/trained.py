"""Small trainings with torch, for the distance between two of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

#: Examples in a batch of digits; sequences in a batch of letters, and the letters of one.
BATCH, SEQUENCES, LENGTH = 64, 16, 64


def digits(
    name: str, seed: int, epochs: int, scaled: bool, state_dtype: Any = None, weights: str | None = None
) -> Array:
    """The weights of a small network after some epochs on the handwritten digits, as one vector in float64.

    If `weights` are of a kind, the network is in bfloat16; an empty kind is a plain one.
    """
    import torch
    from sklearn.datasets import load_digits

    import rulec.torch

    images, labels = load_digits(return_X_y=True)
    images = (images - images.mean(0)) / (images.std(0) + 1e-6) if scaled else images / 16.0
    x, y = torch.tensor(images, dtype=torch.float32), torch.tensor(labels)
    torch.manual_seed(seed)
    net = torch.nn.Sequential(
        torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)
    )
    if weights is not None:
        net, x, state_dtype = net.bfloat16(), x.bfloat16(), "float32"
    optimizer = getattr(rulec.torch, name)(net.parameters(), lr=1e-3, state_dtype=state_dtype, weights=weights)
    order = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for batch in torch.split(torch.randperm(len(x), generator=order), BATCH):
            optimizer.zero_grad()
            loss: Any = torch.nn.functional.cross_entropy(net(x[batch]), y[batch])
            loss.backward()
            optimizer.step()
    return _vector(net)


def letters(steps: int, state_dtype: Any = None, changed: float = 0.0) -> Array:
    """The weights of a small transformer after some steps of AdamW on the manual's text, letter by letter.

    Its first weights are `changed` by random numbers of this size, in units of each weight.
    """
    return _vector(_trained(steps, state_dtype, changed))


def gradients(steps: int) -> list[Array]:
    """The last gradients of the transformer's matrices, its table and its end left out, after some steps."""
    layers = _trained(steps).layers.parameters()
    return [p.grad.numpy() for p in layers if p.ndim == 2]


def _trained(steps: int, state_dtype: Any = None, changed: float = 0.0) -> Any:
    """The transformer after some steps."""
    import torch

    import rulec.torch

    text = "".join(path.read_text() for path in sorted((Path(__file__).parents[1] / "docs").glob("*.md")))
    alphabet = {letter: number for number, letter in enumerate(sorted({*text}))}
    numbers = torch.tensor([alphabet[letter] for letter in text])
    net = _transformer(len(alphabet))
    draws = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in net.parameters():
            p *= 1 + changed * torch.randn(p.shape, generator=draws)
    optimizer = rulec.torch.AdamW(net.parameters(), lr=1e-3, state_dtype=state_dtype)
    starts = torch.Generator().manual_seed(2)
    for _ in range(steps):
        first = torch.randint(len(numbers) - LENGTH - 1, (SEQUENCES, 1), generator=starts)
        batch = numbers[first + torch.arange(LENGTH + 1)]
        optimizer.zero_grad()
        loss: Any = torch.nn.functional.cross_entropy(net(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
    return net


def _transformer(alphabet: int, width: int = 64) -> Any:
    """Two causal layers between a table of letters, with their places, and a linear layer."""
    import torch
    from torch import nn

    class Letters(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.places = nn.Embedding(alphabet, width), nn.Embedding(LENGTH, width)
            layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True)
            self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.end = nn.Linear(width, alphabet)

        def forward(self, batch: Any) -> Any:
            mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
            hidden = self.table(batch) + self.places(torch.arange(LENGTH))
            return self.end(self.layers(hidden, mask=mask, is_causal=True))

    torch.manual_seed(0)
    return Letters()


def _vector(net: Any) -> Array:
    """All weights of a network as one vector in float64."""
    return np.concatenate([p.detach().double().numpy().ravel() for p in net.parameters()])
