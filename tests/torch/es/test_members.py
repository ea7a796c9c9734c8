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


@pytest.mark.parametrize("layer", LAYERS)
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
