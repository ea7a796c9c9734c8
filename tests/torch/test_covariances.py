"""Second moments of rows of layers: beside gradients of single examples by autograd, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.func import functional_call, grad, vmap
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import rulec.torch
from rulec.errors import HyperError, TensorError
from tests.torch.eager.processes import check_in_processes

LINEAR, IMAGES = (6, 5), (6, 3, 7, 6)


def made(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def net() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3, bias=False)).double()


def convolutions() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(
            nn.Conv2d(3, 4, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2)), nn.Tanh(),
            nn.Conv2d(4, 2, 3, padding="same", padding_mode="circular", bias=False), nn.Flatten(1),
            nn.Unflatten(1, (4, -1)), nn.Conv1d(4, 3, 2, stride=3), nn.Flatten(),
        ).double()  # fmt: skip


def loss_of(output: Tensor) -> Tensor:
    return output.square().flatten(1).sum(1).mean()


def weights(model: nn.Module) -> list[nn.Parameter]:
    return [layer.weight for layer in model.modules() if isinstance(layer, nn.Linear | nn.Conv2d | nn.Conv1d)]


def check_close(found: Tensor, wanted: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("make", "shape"), [(net, LINEAR), (convolutions, IMAGES)])
def test_moments_are_those_of_gradients_of_single_examples(make: Callable[[], nn.Module], shape: Any) -> None:
    """A row's gradient of the weight is y x^T: over one row of ones in or out, its product is that of a or b."""
    model, x = make(), made(2, *shape)
    with rulec.torch.covariances(model, mean_over="examples") as kept:
        loss_of(model(x)).backward()
        inputs = kept.inputs()
    seen: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def note(layer: nn.Module, args: Any, output: Tensor) -> None:
        output.retain_grad()
        seen[layer] = args[0].detach(), output

    layers = [layer for layer in model.modules() if hasattr(layer, "weight")]
    handles = [layer.register_forward_hook(note) for layer in layers]
    loss_of(model(x)).backward()
    for handle in handles:
        handle.remove()
    for layer in layers:
        x_in, output = seen[layer]
        gradients = output.grad * len(x)  # type: ignore[operator]
        positions = [*np.ndindex(len(x), *output.shape[2:])]
        a, b = 0, 0
        for n, *at in positions:
            place = (n, slice(None), *at)
            # The derivative of an output's sum over channels by the weight has the row that goes in, in each channel.
            weight = layer.weight.detach().requires_grad_()
            again = functional_call(layer, {"weight": weight}, (x_in,))
            (row,) = torch.autograd.grad(again[place][0], weight)
            row, y = row[0].reshape(-1), gradients[place]
            a, b = a + torch.outer(row, row), b + torch.outer(y, y)
        check_close(inputs["a"][layer.weight], a / len(positions))  # type: ignore[arg-type, operator]
        check_close(inputs["b"][layer.weight], b / len(positions))  # type: ignore[arg-type, operator]


def test_the_diagonal_of_their_product_is_that_of_the_gradients_of_one_example() -> None:
    """Of one example, the Fisher matrix of a layer is the Kronecker product of both: torch.func gives its diagonal."""
    model, x = net(), made(2, 1, 5)
    kept = rulec.torch.covariances(model)
    loss_of(model(x)).backward()
    inputs = kept.inputs()
    params = dict(model.named_parameters())
    each = vmap(grad(lambda p, row: loss_of(functional_call(model, p, (row[None],)))), (None, 0))(params, x)
    for name, p in (item for item in params.items() if item[1].dim() == 2):
        check_close(torch.outer(inputs["b"][p].diag(), inputs["a"][p].diag()), each[name][0] ** 2)


def test_micro_batches_add_up_and_each_call_begins_anew() -> None:
    model, x = net(), made(2, *LINEAR)
    kept = rulec.torch.covariances(model, mean_over="sum")
    loss_of(model(x)).backward()
    whole = kept.inputs()
    for part in x.chunk(3):
        (loss_of(model(part)) / 3).backward()
    parts = kept.inputs()
    assert kept.inputs() == {"a": {}, "b": {}}
    for name in ("a", "b"):
        for p in weights(model):
            check_close(parts[name][p], whole[name][p])
    kept.remove()
    loss_of(model(x)).backward()
    assert kept.inputs() == {"a": {}, "b": {}}


def test_what_a_loss_is_a_mean_over_scales_the_gradients() -> None:
    model, x = net(), made(2, 2, 3, 5)
    found = {}
    for mean in ("rows", "examples", "sum"):
        kept = rulec.torch.covariances(model, mean_over=mean)
        model(x).square().mean().backward()
        found[mean] = kept.inputs(scale=2.0)["b"][model[0].weight]
        kept.remove()
    check_close(found["rows"], found["sum"] * 36)
    check_close(found["examples"], found["sum"] * 4)
    kept = rulec.torch.covariances(model, collect="b", mean_over="sum")
    (model(x).square().mean() * 2).backward()
    check_close(kept.inputs(scale=2.0)["b"][model[0].weight] / 4, found["sum"])


def test_passes_without_training_and_recomputed_ones_do_not_count() -> None:
    model, x = net(), made(2, *LINEAR)
    kept = rulec.torch.covariances(model)
    loss_of(model(x)).backward()
    wanted = kept.inputs()
    for reentrant in (False, True):
        with torch.no_grad():
            model(x * 2)
        loss_of(model.eval()(x * 3)).backward()
        loss_of(model.train()(x * 4))
        loss_of(checkpoint(model, x.clone().requires_grad_(), use_reentrant=reentrant)).backward()
        found = kept.inputs()
        for name in ("a", "b"):
            for p in weights(model):
                check_close(found[name][p], wanted[name][p])


def test_a_shared_weight_has_the_rows_of_all_its_uses() -> None:
    first, second = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
    second.weight = first.weight
    model, x = nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), first), made(2, 6, 4)
    kept = rulec.torch.covariances(model)
    loss_of(model(x)).backward()
    between = second(torch.tanh(first(x)))
    rows = torch.cat([x, torch.tanh(first(x)), torch.tanh(between)]).detach()
    found = kept.inputs()["a"]
    assert [*found] == [first.weight]
    check_close(found[first.weight], rows.T @ rows / 18)


def test_rows_of_16_bits_are_added_in_float32() -> None:
    model = nn.Linear(300, 2)
    kept, x = rulec.torch.covariances(model), torch.full((4096, 300), 0.1)
    with torch.autocast("cpu", torch.bfloat16):
        model(x).float().mean().backward()
    moment = kept.inputs()["a"][model.weight]
    assert moment.dtype == torch.float32
    check_close(moment, torch.full((300, 300), 0.1**2), 1e-5)
    narrow = nn.Linear(3, 2).bfloat16()
    kept = rulec.torch.covariances(narrow)
    narrow(torch.ones(4096, 3, dtype=torch.bfloat16)).float().mean().backward()
    assert torch.equal(kept.inputs()["a"][narrow.weight], torch.ones(3, 3))


def test_other_options_and_models_without_such_layers_are_refused() -> None:
    with pytest.raises(HyperError, match="collect='c' of covariances"):
        rulec.torch.covariances(net(), collect="c")
    with pytest.raises(HyperError, match="mean_over='tokens' of covariances is none of rows, examples, sum"):
        rulec.torch.covariances(net(), mean_over="tokens")
    with pytest.raises(TensorError, match="the model has none"):
        rulec.torch.covariances(nn.Conv2d(4, 4, 3, groups=2))


def _processes(rank: int) -> None:
    x = made(2, 8, 5)
    alone = net()
    kept = rulec.torch.covariances(alone, group=dist.new_group([rank], use_local_synchronization=True))
    loss_of(alone(x)).backward()
    wanted = kept.inputs()
    mine = x.chunk(dist.get_world_size())[rank]
    for wrap in (DistributedDataParallel, fully_shard):
        model = net()
        wrapped = wrap(model)
        kept = rulec.torch.covariances(model)
        loss_of(wrapped(mine)).backward()
        found = kept.inputs()
        for ours, theirs in zip(weights(model), weights(alone), strict=True):
            assert isinstance(ours, DTensor) == (wrap is fully_shard)
            for name in ("a", "b"):
                check_close(found[name][ours], wanted[name][theirs])
        rule = rulec.load("kfac")
        steps = [rulec.torch.optimizer(rule)(each.parameters(), lr=0.1) for each in (model, alone)]
        before = [p.detach().clone() for p in alone.parameters()]
        steps[0].step(inputs=found)
        steps[1].step(inputs=wanted)
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            check_close(p.full_tensor() if isinstance(p, DTensor) else p, q, 1e-10)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for p, old in zip(alone.parameters(), before, strict=True):
                p.copy_(old)
    idle = rulec.torch.covariances(net())
    assert idle.inputs() == {"a": {}, "b": {}}


def test_moments_of_several_processes_are_of_all_rows() -> None:
    check_in_processes(_processes)
