"""Repeated steps of DTensors look at memory alone, notice every change, and call little more than other steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import rulec
import rulec.torch
from rulec.errors import RulecError, StateMismatch, TensorError
from rulec.torch.fastpath import addresses
from rulec.torch.step import plan
from tests.calls import profiled
from tests.torch.eager.processes import check_in_processes
from tests.torch.shrinking import shrink

#: Uneven parts, an empty one, a vector.
SHAPES = ((7, 5), (6,), (4, 4), (1, 3), (3, 4, 6), (4, 4))

#: The steps before a change, and after it.
BEFORE, AFTER = 6, 3

RULES = ("adamw", "lamb", "clip >> adamw")


def rule_of(name: str) -> rulec.Rule:
    return rulec.load("clip_by_global_norm") >> rulec.load("adamw") if ">>" in name else rulec.load(name)


def draws(seed: int) -> list[Tensor]:
    made = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=made) for shape in SHAPES]


class Run:
    """Steps of a rule: of DTensors where there is a mesh."""

    def __init__(self, name: str, mesh: Any) -> None:
        self.mesh = mesh
        self.params: list[Any] = [nn.Parameter(self.place(x)) for x in draws(0)]
        self.optimizer: Any = rulec.torch.optimizer(rule_of(name))(self.params, lr=0.05)

    def place(self, tensor: Tensor) -> Tensor:
        return tensor if self.mesh is None else distribute_tensor(tensor.clone(), self.mesh, [Shard(0)])

    def give(self, seed: int) -> None:
        for param, grad in zip(self.params, draws(seed), strict=True):
            param.grad = self.place(grad)

    def steps(self, seeds: range) -> None:
        for seed in seeds:
            self.give(seed)
            self.optimizer.step()

    @property
    def is_surveyed(self) -> bool:
        """Whether the next step looks at memory alone, if nothing changes."""
        survey = self.optimizer._machine.plans.survey
        seen = survey is not None and survey.look(survey.lists)
        if seen:
            survey.release()
        return bool(seen)

    @property
    def machine(self) -> Any:
        return self.optimizer._machine

    def end(self) -> list[Tensor]:
        states = [v for p in self.params for v in self.optimizer.state[p].values() if isinstance(v, Tensor)]
        with torch.no_grad():
            return [x.full_tensor() if isinstance(x, DTensor) else x.clone() for x in [*self.params, *states]]


def local(tensor: Any) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _leave_out(run: Run) -> None:
    run.params[2].grad = None


def _replace(run: Run) -> None:
    old = run.params[0]
    new = nn.Parameter(old.detach().clone())
    new.grad = old.grad
    run.optimizer.state.pop(old)
    run.optimizer.param_groups[0]["params"][0] = run.params[0] = new


def _other_local(run: Run) -> None:
    if isinstance(run.params[0], DTensor):
        run.params[0]._local_tensor = run.params[0]._local_tensor.clone()


def _moved(run: Run) -> None:
    here = local(run.params[0])
    here.data = here.detach().clone()


def _other_order(run: Run) -> None:
    here = local(run.params[2])
    here.data = here.detach().t().contiguous().t()


def _freed_and_back(run: Run) -> None:
    """As FSDP2 frees and allocates memory."""
    here = local(run.params[0]).detach()
    values, storage = here.clone(), here.untyped_storage()
    size = storage.nbytes()
    if storage.resizable():
        storage.resize_(0)
        run.held = torch.zeros(size, dtype=torch.uint8)  # type: ignore[attr-defined]
        storage.resize_(size)
        here.copy_(values)


def _freeze(run: Run) -> None:
    run.params[1].requires_grad_(False)


def _gradient_in_other_order(run: Run) -> None:
    here = local(run.params[2].grad)
    here.data = here.t().contiguous().t()


def _equal_spec(run: Run) -> None:
    for param in run.params:
        if isinstance(param, DTensor):
            param.grad = DTensor.from_local(
                local(param.grad), run.mesh, [Shard(0)], shape=param.shape, stride=param.stride()
            )


def _rate(run: Run) -> None:
    run.optimizer.param_groups[0]["lr"] = 0.01


def _edit(run: Run) -> None:
    entry = run.optimizer.state[run.params[0]]
    entry[next(k for k, v in entry.items() if v.dim())].mul_(0.5)


def _replace_state(run: Run) -> None:
    entry = run.optimizer.state[run.params[0]]
    name = next(k for k, v in entry.items() if v.dim())
    entry[name] = entry[name] * 0.5


def _move_state(run: Run) -> None:
    for value in run.optimizer.state[run.params[0]].values():
        here = local(value)
        if here.dim():
            here.data = here.detach().clone()


def _other_local_state(run: Run) -> None:
    for value in run.optimizer.state[run.params[0]].values():
        if isinstance(value, DTensor):
            value._local_tensor = value._local_tensor.clone()


def _reload(run: Run) -> None:
    saved = run.optimizer.state_dict()
    saved["param_groups"][0]["lr"] = 0.02
    run.optimizer.load_state_dict(saved)


def _swap(run: Run) -> None:
    torch.utils.swap_tensors(run.params[2], run.params[5])


def _swap_alias(run: Run) -> None:
    """Another implementation with the same local tensor and spec; the one before is freed."""
    param = run.params[2]
    if isinstance(param, DTensor):
        alias: Any = DTensor(param._local_tensor, param._spec, requires_grad=True)
        alias.grad = param.grad
        torch.utils.swap_tensors(param, alias)


CHANGES: dict[str, Callable[[Run], None]] = {
    "nothing": lambda _: None,
    "no gradient": _leave_out,
    "another parameter": _replace,
    "another local tensor": _other_local,
    "other memory": _moved,
    "another memory order": _other_order,
    "memory freed and allocated": _freed_and_back,
    "frozen": _freeze,
    "a gradient in another order": _gradient_in_other_order,
    "gradients with equal specs": _equal_spec,
    "a learning rate": _rate,
    "a state edited": _edit,
    "another state": _replace_state,
    "a state in other memory": _move_state,
    "a state with another local tensor": _other_local_state,
    "a checkpoint": _reload,
    "parameters in each other's place": _swap,
    "another implementation": _swap_alias,
}

#: Changes after which all tensors are where they were; the groups and the states notice theirs by themselves.
STAYING = ("nothing", "frozen", "gradients with equal specs", "a learning rate", "a state edited", "another state")


@contextmanager
def asked() -> Iterator[None]:
    """A block in which every step asks each tensor."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "survey_of", lambda *_: None)
        patch.setattr(addresses, "look_of", lambda _: None)
        yield


def changed(name: str, mesh: Any, change: Callable[[Run], None]) -> tuple[Run, bool]:
    """The run with a change before a step, and whether that step could look at memory alone."""
    run = Run(name, mesh)
    run.steps(range(1, BEFORE))
    run.give(BEFORE)
    assert run.is_surveyed is (plan.survey_of is SURVEY_OF), "no look at memory before the change"
    change(run)
    surveyed = run.is_surveyed if run.machine.plans.survey is not None else False
    run.optimizer.step()
    run.steps(range(BEFORE + 1, BEFORE + 1 + AFTER))
    return run, surveyed


SURVEY_OF = plan.survey_of


def check_change(name: str, mesh: Any, what: str) -> None:
    run, surveyed = changed(name, mesh, CHANGES[what])
    assert surveyed is (what in STAYING), (name, what)
    ours, versions = run.end(), [p._version for p in run.params]
    with asked():
        other, _ = changed(name, mesh, CHANGES[what])
        assert all(map(torch.equal, ours, other.end())), (name, what)
        assert versions == [p._version for p in other.params], (name, what)
    alone, _ = changed(name, None, CHANGES[what])
    check_close(ours, alone.end(), f"{name}, {what}")


def check_close(ours: list[Tensor], theirs: list[Tensor], what: str) -> None:
    for one, two in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5, msg=lambda text: f"{what}: {text}")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A mesh of this process alone."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("what", CHANGES)
def test_every_change_is_noticed(what: str, alone: Any) -> None:
    check_change("adamw", alone, what)


def _gradient_as(placement: Any) -> Callable[[Run], None]:
    def change(run: Run) -> None:
        grad = run.params[0].grad
        run.params[0].grad = DTensor.from_local(local(grad), run.mesh, [placement], shape=grad.shape, stride=(5, 1))

    return change


def _partial(run: Run) -> None:
    """The spec of summands, for a parameter and its gradient."""
    spec = DTensor.from_local(local(run.params[0]).detach(), run.mesh, [Partial()])._spec
    run.params[0]._spec = run.params[0].grad._spec = spec


def _partial_alone(run: Run) -> None:
    run.params[0]._spec = DTensor.from_local(local(run.params[0]).detach(), run.mesh, [Partial()])._spec


def _freed(run: Run) -> None:
    local(run.params[0]).untyped_storage().resize_(0)


def _freed_gradient(run: Run) -> None:
    local(run.params[0].grad).untyped_storage().resize_(0)


def _freed_state(run: Run) -> None:
    local(run.optimizer.state[run.params[0]]["exp_avg"]).untyped_storage().resize_(0)


def _shrunk(run: Run) -> None:
    shrink(local(run.params[0]))


def _shrunk_gradient(run: Run) -> None:
    shrink(local(run.params[0].grad))


def _shrunk_state(run: Run) -> None:
    shrink(local(run.optimizer.state[run.params[0]]["exp_avg"]))


def _other_shards(run: Run) -> None:
    """Other placements in the same object, as an operation of torch's in place."""
    other = run.params[2].detach().redistribute(placements=[Replicate()])
    grad = run.params[2].grad.redistribute(placements=[Replicate()])
    run.params[2]._local_tensor, run.params[2]._spec = other._local_tensor, other._spec
    run.params[2].grad._local_tensor, run.params[2].grad._spec = grad._local_tensor, grad._spec


REFUSED: dict[str, tuple[Callable[[Run], None], type[RulecError], str]] = {
    "a whole gradient": (_gradient_as(Replicate()), TensorError, "is placed as"),
    "a gradient of summands": (_gradient_as(Partial()), TensorError, "is placed as"),
    "a gradient cut elsewhere": (_gradient_as(Shard(1)), TensorError, "is placed as"),
    "a parameter of summands": (_partial, TensorError, "summands that were not added"),
    "a parameter of summands alone": (_partial_alone, TensorError, "summands that were not added"),
    "freed memory": (_freed, TensorError, "memory"),
    "the freed memory of a gradient": (_freed_gradient, TensorError, "the gradient of .* memory of 0 bytes"),
    "the freed memory of a state": (_freed_state, StateMismatch, "exp_avg .* has .*memory of 0 bytes"),
    "shrunk memory": (_shrunk, TensorError, "memory of 8 bytes, where it needs"),
    "the shrunk memory of a gradient": (_shrunk_gradient, TensorError, "the gradient of .* memory of 8 bytes"),
    "the shrunk memory of a state": (_shrunk_state, StateMismatch, "exp_avg .* has .*memory of 8 bytes"),
    "other shards": (_other_shards, StateMismatch, "is placed as"),
}


def check_refusal(name: str, mesh: Any, what: str) -> None:
    """An error, before anything is written, with looks at memory and without."""
    change, kind, words = REFUSED[what]
    run = Run(name, mesh)
    run.steps(range(1, BEFORE))
    run.give(BEFORE)
    assert run.is_surveyed is (plan.survey_of is SURVEY_OF)
    change(run)
    before = [local(p).detach().clone() for p in run.params if local(p).untyped_storage().nbytes()]
    versions = [p._version for p in run.params]
    for _ in range(2):
        with pytest.raises(kind, match=words):
            run.optimizer.step()
    after = [local(p).detach() for p in run.params if local(p).untyped_storage().nbytes()]
    assert all(map(torch.equal, before, after))
    assert versions == [p._version for p in run.params]


@pytest.mark.parametrize("what", REFUSED)
def test_what_no_step_can_use_is_refused(what: str, alone: Any) -> None:
    check_refusal("adamw", alone, what)
    with asked():
        check_refusal("adamw", alone, what)


def one_without(rank: int) -> None:
    """A gradient is missing in one process: elements need no other process, sums need all."""
    mesh = init_device_mesh("cpu", (2,))
    change = _leave_out if rank else CHANGES["nothing"]
    run, _ = changed("adamw", mesh, change)
    with asked():
        other, _ = changed("adamw", mesh, change)
    assert all(map(torch.equal, run.end(), other.end()))
    for name in RULES[1:]:
        run = Run(name, mesh)
        run.steps(range(1, BEFORE))
        run.give(BEFORE)
        assert run.is_surveyed
        before = run.end()
        change(run)
        with pytest.raises(RulecError, match="gradients of other tensors"):
            run.optimizer.step()
        assert all(map(torch.equal, before, run.end()))
        run.steps(range(BEFORE, BEFORE + 3))
        assert run.is_surveyed


def of_two(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for name in RULES:
        for what in CHANGES:
            check_change(name, mesh, what)
    for what in REFUSED:
        check_refusal("adamw", mesh, what)
    one_without(rank)


@pytest.mark.slow
def test_every_change_is_noticed_in_two_processes() -> None:
    check_in_processes(of_two)


# Models after fully_shard


class Block(nn.Module):
    """A layer with a normalization, whose vectors leave one process without elements, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(6), nn.Linear(6, 9), nn.Linear(9, 6)
        self.gate = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * self.outer(torch.tanh(self.inner(self.norm(x))))


def model_of(sharded: bool) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 6), Block(), Block(), nn.Linear(6, 11))
    if sharded:
        for layer in model[1:3]:
            fully_shard(layer)
        fully_shard(model)
    return model


def _again(model: nn.Module, _: Any) -> None:
    """Gathers all parameters and frees them again."""
    for module in (model, *model[1:3]):  # type: ignore[index]
        module.unshard()
        module.reshard()


def _load_model(model: nn.Module, _: Any) -> None:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=False)


def _assign_model(model: nn.Module, optimizer: Any) -> None:
    """New parameters, which the groups take over as their owner must; the states begin anew."""
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    optimizer.param_groups[0]["params"] = [*model.parameters()]
    optimizer.state.clear()


def _scale(model: nn.Module, _: Any) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.9)


OF_MODELS: dict[str, Callable[[nn.Module, Any], None]] = {
    "nothing": lambda *_: None,
    "unshard and reshard": _again,
    "a loaded model": _load_model,
    "an assigned model": _assign_model,
    "scaled weights": _scale,
}


def trained(name: str, sharded: bool, what: str) -> tuple[list[Tensor], int]:
    """The parameters after some steps with a change between two of them, and the steps that looked at memory alone."""
    model = model_of(sharded)
    optimizer: Any = rulec.torch.optimizer(rule_of(name))(model.parameters(), lr=0.02)
    looked = 0
    for seed in range(2 * BEFORE):
        if seed == BEFORE:
            (OF_MODELS[what] if sharded or "shard" not in what else OF_MODELS["nothing"])(model, optimizer)
        words = torch.randint(0, 11, (8, 5), generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(words).flatten(0, 1), words.flatten()).backward()
        machine = optimizer._machine
        survey = machine and machine.plans.survey
        looked += bool(survey and survey.look(survey.lists))
        optimizer.step()
    ends = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return [x.detach() for x in ends], looked


def of_models(rank: int) -> None:
    for name in RULES:
        for what in OF_MODELS:
            ours, looked = trained(name, True, what)
            assert looked >= (2 * BEFORE - 6 if "assigned" in what else 2 * BEFORE - 3), (name, what, looked)
            alone, _ = trained(name, False, what)
            check_close(ours, alone, f"{name}, {what}")
            with asked():
                other, none = trained(name, True, what)
            assert none == 0
            assert all(map(torch.equal, ours, other)), (name, what)


@pytest.mark.slow
def test_models_of_shards_are_looked_at_in_memory_alone() -> None:
    check_in_processes(of_models)


# Calls

#: The calls of a step of DTensors over those of other tensors: at most.
MOST = {"adamw": 1.5, "lamb": 2.0, "clip >> adamw": 2.0}


def calls_of(name: str, mesh: Any, count: int, fresh: bool) -> Counter[str]:
    """The Python and C calls of a repeated step with gradients in new memory; they have new specs if `fresh`."""
    params: list[Any] = [nn.Parameter(_placed(torch.ones(6, 2), mesh)) for _ in range(count)]
    optimizer: Any = rulec.torch.optimizer(rule_of(name))(params, lr=0.01)
    seen: Counter[str] = Counter()
    for step in range(7):
        for param in params:
            grad = _placed(torch.full((6, 2), 0.1 + step), mesh)
            param.grad = grad if fresh or mesh is None else DTensor(local(grad), param._spec, requires_grad=False)
        seen.clear()
        profiled(optimizer.step, lambda _, event, __: seen.update([event]) if event.endswith("call") else None)
    return seen


def _placed(tensor: Tensor, mesh: Any) -> Tensor:
    return tensor if mesh is None else DTensor.from_local(tensor.chunk(mesh.size())[mesh.get_rank()], mesh, [Shard(0)])


def check_calls(mesh: Any, fresh: bool, names: Sequence[str] = RULES) -> None:
    for name, most in ((name, MOST[name]) for name in names):
        plain, few, many = (calls_of(name, *how, fresh) for how in ((None, 20), (mesh, 20), (mesh, 60)))
        for event in ("call", "c_call"):
            assert few[event] <= most * plain[event], (name, event, few, plain)
            assert many[event] - few[event] <= 8, f"{event}: a step of {name} calls something for each tensor"


def test_a_step_of_elements_calls_little_more_than_one_of_other_tensors(alone: Any) -> None:
    check_calls(alone, fresh=True, names=RULES[:1])


@pytest.mark.slow
@pytest.mark.parametrize("fresh", [False, True], ids=["shared specs", "equal specs"])
def test_a_step_calls_little_more_than_one_of_other_tensors(fresh: bool, alone: Any) -> None:
    check_calls(alone, fresh)


def calls_of_two(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for fresh in (False, True):
        check_calls(mesh, fresh)


def test_a_step_among_two_processes_calls_little_more_than_one_of_other_tensors() -> None:
    check_in_processes(calls_of_two)
