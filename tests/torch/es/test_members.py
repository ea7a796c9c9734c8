"""All members in one forward, against each of them as a plain network with the noise as a whole array."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rulec.errors import HyperError
from rulec.torch.es import perturb
from tests.torch.es.families import FAMILIES, perturbation_of
from tests.torch.es.oracle import member_outputs

LAYERS = {
    "linear": (lambda: nn.Linear(6, 8), (6,)),
    "linear without bias": (lambda: nn.Linear(6, 40, bias=False), (6,)),
    "linear of sequences": (lambda: nn.Linear(6, 5), (3, 6)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1), (4, 9)),
    "conv2d": (lambda: nn.Conv2d(4, 6, (3, 2), padding="same", dilation=(1, 2), padding_mode="circular"), (4, 5, 6)),
    "conv2d in groups": (lambda: nn.Conv2d(8, 12, 3, groups=2, bias=False), (8, 4, 5)),
    "depthwise": (lambda: nn.Conv2d(4, 8, 3, groups=4, stride=(2, 1)), (4, 5, 5)),
    "conv2d of a point": (lambda: nn.Conv2d(6, 8, 1), (6, 1, 1)),
}


#: Layers that are looked at every day.
_OFTEN = ("linear", "conv2d in groups")


@pytest.mark.parametrize("layer", [x if x in _OFTEN else pytest.param(x, marks=pytest.mark.slow) for x in LAYERS])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer(family: str, layer: str) -> None:
    make, shape = LAYERS[layer]
    torch.manual_seed(1)
    model = make().double()
    if (family, layer) == ("dropout", "depthwise"):
        with pytest.raises(HyperError, match="1 inputs have no halves"):
            perturb(model, perturbation_of(family))
        return
    es = perturb(model, perturbation_of(family))
    x = torch.randn(3, *shape, dtype=torch.float64)
    batch = es.member_batch(x)
    expected = member_outputs(es, x)
    torch.testing.assert_close(es(batch), expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(es(batch.clone()), expected, rtol=0, atol=1e-10)


class _Twice(nn.Module):
    """A layer used twice, and a weight that an embedding and a linear layer share."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 6, padding_idx=2)
        self.mixing = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.out = nn.Linear(6, 9, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(index)
        hidden = torch.tanh(self.mixing(torch.relu(self.mixing(hidden))))
        return self.out(self.norm(hidden)).mean(1)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "dropout"])
def test_tied_weights_embeddings_and_layers_used_twice(family: str) -> None:
    torch.manual_seed(2)
    model = _Twice().double()
    model.embedding.padding_idx = None
    es = perturb(model, perturbation_of(family))
    assert es.replaced == ("embedding", "out", "mixing")
    assert set(es.left_alone) == {"norm.weight", "norm.bias"}
    index = torch.randint(0, 9, (3, 4))
    torch.testing.assert_close(es(es.member_batch(index)), member_outputs(es, index), rtol=0, atol=1e-10)


def test_padding_stays_as_it_is() -> None:
    model = nn.Embedding(5, 3, padding_idx=1)
    es = perturb(model, perturbation_of("lowrank"))
    out = es(es.member_batch(torch.tensor([1, 2])))
    assert not out[:4].any()
    assert out[4:8].any()
    es.update(torch.arange(8.0))
    assert model.weight.grad is not None
    assert not model.weight.grad[1].any()
    assert model.weight.grad[0].any()


@pytest.mark.parametrize(
    ("dtype", "error"), [pytest.param(torch.float32, 1e-5, marks=pytest.mark.slow), (torch.bfloat16, 0.05)]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_dtypes(family: str, dtype: torch.dtype, error: float) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)).to(dtype)
    es = perturb(model, perturbation_of(family))
    x = torch.randn(3, 6, dtype=dtype)
    out = es(es.member_batch(x))
    assert out.dtype is dtype
    exact = member_outputs(es, x).float()
    assert float((out.float() - exact).abs().max() / exact.abs().max()) < error


@pytest.mark.parametrize("family", [*FAMILIES, "spsa"])
def test_members_one_after_the_other(family: str) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv1d(4, 6, 3), nn.Flatten(), nn.Linear(12, 4)).double()
    before = [p.clone() for p in model.parameters()]
    es = perturb(model, perturbation_of(family, antithetic=True))
    x = torch.randn(2, 4, 4, dtype=torch.float64)
    found = es.evaluate(lambda: model(x).square().sum())
    expected = member_outputs(es, x).square().view(2, 2, 4, -1).sum((1, 3)).flatten()
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=0)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_unshared_rows_and_one_sign() -> None:
    torch.manual_seed(1)
    model = nn.Linear(6, 8).double()
    for family in FAMILIES:
        es = perturb(model, perturbation_of(family, antithetic=False))
        x = torch.randn(8, 6, dtype=torch.float64)
        every = member_outputs(es, x).view(8, 4, 8)
        expected = torch.stack([every[row, row % 4] for row in range(8)])
        torch.testing.assert_close(es(es.member_batch(x, shared=False)), expected, rtol=0, atol=1e-10)


def test_a_written_batch_is_not_taken_for_the_same_samples() -> None:
    model = nn.Linear(6, 8, bias=False).double()
    es = perturb(model, perturbation_of("signflip"))
    batch = es.member_batch(torch.randn(3, 6, dtype=torch.float64))
    batch[5] = 0.0
    out = es(batch)
    assert not out[5].any()
    assert out[4].any()
