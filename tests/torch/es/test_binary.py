"""Binary layers in PyTorch: what they compute, that members never mix, and what they estimate."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rulec.errors import HyperError, TensorError
from rulec.es.streams import BITS, NOISE, Stream
from rulec.torch.es.binary import (
    BinaryConv2d,
    BinaryLinear,
    BinaryMaxPool2d,
    BinaryThreshold,
    pack_bits,
    unpack_bits,
)
from rulec.torch.es.self_estimator import Draw, SelfEstimator
from tests.torch.es.binary_driver import Driver


def bits(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(len(shape))) < 0.5


def signs(of: Tensor) -> Tensor:
    return of.double() * 2 - 1


def seeded(module: nn.Module) -> Any:
    """The module with parameters that no other test has changed, thresholds too."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * (1.0 if p.dim() > 1 else 0.5))
    return module


def member_weights_of(module: Any, draw: Draw) -> Tensor:
    """Each member's weights as 1 and -1, from the definition."""
    theta = module.weight.detach().double().numpy()
    p = 1 / (1 + np.exp(-5 * theta / (np.abs(theta).mean() + 1e-5)))
    found = []
    for member in range(draw.members):
        words = Stream(draw.seed, draw.layers["weight"], draw.step, member % draw.directions, BITS).words(theta.size)
        words = words if member < draw.directions else 2**32 - 1 - words
        found.append(np.where(words.reshape(theta.shape) < p * 2**32, 1.0, -1.0))
    return torch.from_numpy(np.stack(found))


def member_thresholds_of(module: Any, draw: Draw) -> Tensor:
    """Each member's thresholds, in the units of the module's."""
    found = []
    for member in range(draw.members):
        stream = Stream(draw.seed, draw.layers["bias"], draw.step, member % draw.directions, NOISE)
        noise = stream.values("normal", module.features) * (1 if member < draw.directions else -1)
        found.append(module.bias.detach().double() + module.sigma * torch.from_numpy(noise))
    return torch.stack(found)


def by_members(rows: Tensor, draw: Draw) -> Tensor:
    """Rows of a batch as (members, rows of each, ...), from the definition."""
    repeats = len(rows) // draw.directions
    half = repeats // draw.signs
    return torch.stack([
        torch.stack([rows[(sign * half + r) * draw.directions + d] for r in range(half)])
        for sign in range(draw.signs) for d in range(draw.directions)
    ])  # fmt: skip


def draw_of(antithetic: bool) -> Draw:
    return Draw(seed=7, step=2, directions=3, antithetic=antithetic, layers={"weight": 4, "bias": 5})


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("threshold", [False, True])
def test_the_plain_linear_layer_has_the_most_likely_weights(packing: bool, threshold: bool) -> None:
    layer = seeded(BinaryLinear(70, 9, threshold=threshold))
    x = bits(5, 70)
    numbers = signs(x) @ signs(layer.weight > 0).T
    found = layer(pack_bits(x) if packing else x)
    if not threshold:
        assert found.dtype == torch.int32
        assert (found == numbers).all()
    else:
        found = unpack_bits(found, 9) if packing else found
        assert (found == (numbers > layer.bias.double() * 70**0.5)).all()


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("threshold", [False, True])
def test_the_plain_convolution(packing: bool, threshold: bool) -> None:
    layer = seeded(BinaryConv2d(5, 66, (3, 2), stride=(2, 1), padding=1, threshold=threshold))
    x = bits(4, 5, 6, 7)
    weight = signs(layer.weight > 0).permute(0, 3, 1, 2)
    numbers = nn.functional.conv2d(signs(x), weight, stride=(2, 1), padding=1)
    found = layer(pack_bits(x.movedim(1, -1)) if packing else x)
    if threshold and packing:
        found = unpack_bits(found, 66)
    found = found.movedim(-1, 1) if packing else found
    expected = numbers > layer.bias.double().view(-1, 1, 1) * 30**0.5 if threshold else numbers
    assert found.dtype == (torch.bool if threshold else torch.int32)
    assert (found == expected).all()


@pytest.mark.parametrize("antithetic", [False, True])
@pytest.mark.parametrize("threshold", [False, True])
@pytest.mark.parametrize("centre", [False, True])
def test_members_of_a_linear_layer_have_weights_of_their_own(antithetic: bool, threshold: bool, centre: bool) -> None:
    if centre and not threshold:
        return
    layer, draw = seeded(BinaryLinear(70, 9, threshold=threshold, centre=centre)), draw_of(antithetic)
    x = bits(4 * draw.members, 70)
    numbers = torch.einsum("mri,moi->mro", signs(by_members(x, draw)), member_weights_of(layer, draw))
    found = by_members(layer.members(x, draw), draw)
    if not threshold:
        assert (found == numbers).all()
        return
    limits = member_thresholds_of(layer, draw).unsqueeze(1) * 70**0.5
    limits = limits + numbers.mean(dim=1, keepdim=True) if centre else limits
    assert (found == (numbers > limits)).all()


@pytest.mark.parametrize("centre", [False, True])
def test_members_of_a_convolution(centre: bool) -> None:
    layer, draw = seeded(BinaryConv2d(5, 4, 3, padding=1, centre=centre)), draw_of(True)
    x = bits(2 * draw.members, 5, 4, 6)
    weights = member_weights_of(layer, draw).permute(0, 1, 4, 2, 3)
    limits = member_thresholds_of(layer, draw).view(-1, 4, 1, 1) * 45**0.5
    found = by_members(layer.members(x, draw), draw)
    packed = layer.members(pack_bits(x.movedim(1, -1)), draw)
    assert (by_members(unpack_bits(packed, 4).movedim(-1, 1), draw) == found).all()
    for member, rows in enumerate(by_members(x, draw)):
        numbers = nn.functional.conv2d(signs(rows), weights[member], padding=1)
        mean = numbers.mean(dim=(0, 2, 3), keepdim=True)[0] if centre else 0.0
        assert (found[member] == (numbers > limits[member] + mean)).all()


def test_members_never_mix() -> None:
    """Other rows for one member change nothing of the others, with centred layers too."""
    layers = [BinaryConv2d(3, 8, 3, centre=True), BinaryMaxPool2d(2), nn.Flatten(), BinaryLinear(32, 6, centre=True)]
    driver = Driver(seeded(nn.Sequential(*layers)), 3)
    rows, member = bits(24, 3, 6, 6), torch.arange(24) % 3 + torch.arange(24) // 12 * 3
    found = driver.forward(rows)
    changed = rows.clone()
    changed[member == 4] = ~changed[member == 4]
    other = driver.forward(changed)
    assert (other[member != 4] == found[member != 4]).all()
    assert (other[member == 4] != found[member == 4]).any()


@pytest.mark.parametrize("antithetic", [False, True])
def test_estimates_are_sums_of_scores(antithetic: bool) -> None:
    layer, draw = seeded(BinaryLinear(6, 5)), draw_of(antithetic)
    layer.sharpness = None
    layer.members(bits(2 * draw.members, 6), draw)
    weights = np.random.default_rng(0).normal(size=draw.members)
    found = layer.estimate(draw, weights)
    own = unpack_bits(torch.from_numpy(layer._weights(draw).view(np.int64)), 6).double()
    scores = own - torch.sigmoid(layer.weight.detach().double())
    by_bits = torch.einsum("m,moi->oi", torch.from_numpy(weights), scores)
    noise = (member_thresholds_of(layer, draw) - layer.bias.detach().double()) / layer.sigma
    by_noise = torch.from_numpy(weights) @ noise / layer.sigma
    assert set(found) == set(layer.own_parameters()) == {"weight", "bias"}
    torch.testing.assert_close(found["weight"].double(), by_bits, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found["bias"].double(), by_noise, rtol=1e-6, atol=1e-6)


def test_the_estimate_of_a_network_has_no_bias() -> None:
    """Two layers: the mean of 100 estimates against all choices of bits, within six standard errors."""
    net = seeded(nn.Sequential(BinaryLinear(3, 2, sigma=0.4), BinaryLinear(2, 1, threshold=False)))
    x = torch.tensor(list(itertools.product([False, True], repeat=3)))
    target = torch.tensor([1.0, 2.0, -1.0, 0.5, 0.0, 1.0, -2.0, 3.0], dtype=torch.float64)
    driver = Driver(net, 64)
    found = []
    for _ in range(100):
        out = driver(x)
        driver.update((out[..., 0].double() * target[None, :, None]).sum(dim=1))
        found.append(torch.cat([net[0].bias.grad, net[1].weight.grad.flatten()]))
    estimates = torch.stack(found)
    error = estimates.std(dim=0) / len(estimates) ** 0.5
    exact = exact_gradient(net, x, target)
    assert ((estimates.mean(dim=0) - exact).abs() < 6 * error).all()
    assert (exact.abs() > 6 * error).any()


def exact_gradient(net: Any, x: Tensor, target: Tensor) -> Tensor:
    """Of minus the expected fitness, by the thresholds and the second weights: all bits, and normal probabilities."""
    first, second = net[0], net[1]
    bias = first.bias.detach().double().requires_grad_()
    theta = second.weight.detach().double().requires_grad_()
    z = 5 * theta / (theta.abs().mean() + 1e-5)
    p = torch.sigmoid(5 * first.weight.detach().double() / (first.weight.detach().double().abs().mean() + 1e-5))
    total = torch.zeros((), dtype=torch.float64)
    for choice in itertools.product([0.0, 1.0], repeat=6):
        own = torch.tensor(choice, dtype=torch.float64).view(2, 3)
        chance = torch.where(own > 0, p, 1 - p).prod()
        numbers = signs(x) @ (2 * own - 1).T
        on = torch.distributions.Normal(0, 1).cdf((numbers / 3**0.5 - bias) / first.sigma)
        total = total + chance * (((2 * on - 1) @ (2 * torch.sigmoid(z) - 1).T)[:, 0] * target).sum()
    gradients = torch.autograd.grad(-total, [bias, theta])
    return torch.cat([g.flatten() for g in gradients]).float()


def test_pools_take_bits_as_they_come() -> None:
    x = bits(3, 70, 6, 5)
    pool = BinaryMaxPool2d((2, 3), stride=1)
    expected = nn.functional.max_pool2d(x.double(), (2, 3), 1) > 0
    assert (pool(x) == expected).all()
    assert (unpack_bits(pool(pack_bits(x.movedim(1, -1))), 70).movedim(-1, 1) == expected).all()


def test_thresholds_of_sums() -> None:
    module = seeded(BinaryThreshold(4, scale=3.0))
    numbers = torch.randint(-9, 9, (6, 4, 2, 2), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    assert (module(numbers) == (numbers > 3 * module.bias.double().view(4, 1, 1))).all()
    draw = draw_of(True)
    limits = 3 * member_thresholds_of(module, draw).view(6, 1, 4, 1, 1)
    assert (by_members(module.members(numbers, draw), draw) == (by_members(numbers, draw) > limits)).all()
    assert module.own_parameters() == ("bias",)


def test_the_plain_network_keeps_the_mean_of_its_last_batch_in_training_mode() -> None:
    layer = seeded(BinaryLinear(20, 3, centre=True))
    x = bits(16, 20)
    numbers = signs(x) @ signs(layer.weight > 0).T
    limits = numbers.mean(dim=0) + layer.bias.double() * 20**0.5
    assert (layer(x) == (numbers > limits)).all()
    layer.eval()
    assert (layer(x[:1]) == (numbers[:1] > limits)).all()
    assert "mean" in layer.state_dict()


def test_a_centred_network_of_no_rows_is_finite() -> None:
    layer = BinaryLinear(20, 3, centre=True)
    assert layer(bits(0, 20)).shape == (0, 3)
    assert layer.mean.isfinite().all()


def test_half_precision_has_finite_gradients() -> None:
    """Next to zero, a gradient is larger than float16 has numbers."""
    layer = BinaryLinear(8, 2).half()
    with torch.no_grad():
        layer.weight.fill_(1e-7)
    draw = draw_of(True)
    layer.members(bits(draw.members, 8), draw)
    found = layer.estimate(draw, np.array([1.0, 0.5, 0.25, -1.0, -0.5, -0.25]))
    assert all(g.isfinite().all() and g.dtype == torch.float16 for g in found.values())


def test_drawn_weights_are_kept_until_they_are_freed_and_made_again() -> None:
    layer, draw = seeded(BinaryLinear(70, 9)), draw_of(True)
    assert isinstance(layer, SelfEstimator)
    x = bits(draw.members, 70)
    found = layer.members(x, draw)
    assert layer.noise_bytes(draw) == layer._drawn[1].nbytes == 6 * 9 * 2 * 8
    layer.free_memory()
    assert layer._drawn is None
    assert (layer.members(x, draw) == found).all()
    copied = copy.deepcopy(layer)
    assert (copied.members(x, draw) == found).all()


def test_mistakes() -> None:
    layer = BinaryLinear(70, 9)
    with pytest.raises(TensorError, match="BinaryLinear takes 70 bits and was given 69"):
        layer(bits(2, 69))
    with pytest.raises(
        TensorError, match=r"takes bits, torch.bool or packed in torch.int64, and was given torch.float32"
    ):
        layer(torch.zeros(2, 70))
    with pytest.raises(TensorError, match="takes 70 bits in 2 words and was given 1 words"):
        layer(torch.zeros(2, 1, dtype=torch.int64))
    with pytest.raises(TensorError, match="a batch of 7 rows cannot be dealt to 6 members"):
        layer.members(bits(7, 70), draw_of(True))
    with pytest.raises(TensorError, match=r"BinaryMaxPool2d takes torch.bool"):
        BinaryMaxPool2d(2)(torch.zeros(1, 2, 4, 4))
    with pytest.raises(TensorError, match=r"BinaryLinear takes bits \(rows, inputs\)"):
        layer(bits(2, 3, 70))
    with pytest.raises(HyperError, match="must have at least one of each"):
        BinaryLinear(0, 9)
    with pytest.raises(HyperError, match="sharpness=-1 must be"):
        BinaryLinear(3, 9, sharpness=-1)
    with pytest.raises(HyperError, match="sigma=0 must be"):
        BinaryLinear(3, 9, sigma=0)
    with pytest.raises(HyperError, match="centre=True is for layers with thresholds"):
        BinaryLinear(3, 9, threshold=False, centre=True)
