"""Storages that others shrank or freed: a sentence before anything is read or written, wherever a step comes by."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rulec
import rulec.torch
from rulec.errors import RulecError, StateMismatch, TensorError
from rulec.torch.eager import epilogue
from rulec.torch.eager.grad_norm import Factor
from rulec.torch.fastpath import torch_abi
from rulec.torch.fastpath.survey import look_of
from rulec.torch.fastpath.survey_source import KIND, RECORD
from rulec.torch.step import plan
from rulec.torch.step.checks import _STEPS
from tests.backends.triton_process import in_a_process
from tests.torch.moving import CLASSES, Run
from tests.torch.shrinking import say_bytes, shrink, shrunk
from tests.torch.twins import give_gradients

SHAPE = (2, 3)


def _in_memory(grad: Tensor, size: int) -> Tensor:
    """A gradient at the end of larger memory that says it has `size` of 160 bytes; the gradient ends at 104."""
    base = torch.zeros(40)
    part = base[20:26].view(SHAPE).copy_(grad)
    say_bytes(base, size)
    return part


def _set(grad: Tensor) -> Tensor:
    storage = grad.clone()
    grad.set_(storage.untyped_storage(), 0, SHAPE, (3, 1))  # type: ignore[call-overload]
    shrink(storage)
    return grad


def _data(grad: Tensor) -> Tensor:
    grad.data = shrunk(grad)
    return grad


def _resized(grad: Tensor) -> Tensor:
    """Really: an allocator gives 24 bytes for 8, so that a step which reads on reads nobody else's."""
    grad.untyped_storage().resize_(8)
    return grad


def _expanded(grad: Tensor) -> Tensor:
    one = grad[:1].clone()
    part = one.expand(SHAPE)
    say_bytes(one, 8)
    return part


#: Gradients of shape (2, 3) without all their memory, with their bytes and the bytes needed.
GRADIENTS: dict[str, tuple[Callable[[Tensor], Tensor], int, int]] = {
    "shrunk": (shrunk, 8, 24), "resized": (_resized, 8, 24), "set_": (_set, 8, 24), "data": (_data, 8, 24),
    "one byte less": (lambda grad: shrunk(grad, 23), 23, 24),
    "an offset in a shrunk base": (lambda grad: _in_memory(grad, 103), 103, 104),
    "an offset behind the end": (lambda grad: _in_memory(grad, 40), 40, 104),
    "an offset in a freed base": (lambda grad: _in_memory(grad, 0), 0, 104),
    "another order": (lambda grad: shrunk(grad.t().contiguous().t()), 8, 24),
    "expanded": (_expanded, 8, 12),
}  # fmt: skip


def _parameters() -> list[Tensor]:
    return [nn.Parameter(torch.ones(shape)) for shape in ((4,), SHAPE, (5, 2))]


def _stepped(make: Callable[[list[Tensor]], Any], steps: int, params: list[Tensor] | None = None) -> Any:
    """Parameters with gradients and their optimizer, after some steps."""
    params = params or _parameters()
    optimizer = make(params)
    for number in range(steps):
        give_gradients(params, number)
        optimizer.step()
    give_gradients(params, steps)
    return params, optimizer


@contextmanager
def _unchanged(optimizer: Any, params: list[Tensor]) -> Iterator[None]:
    """Asserts that parameters and states are as before."""

    def numbers() -> list[Tensor]:
        states = [x for p in params for x in optimizer.state.get(p, {}).values() if isinstance(x, Tensor)]
        return [x.detach().clone() for x in (*params, *states)]

    before = numbers()
    yield
    assert all(map(torch.equal, numbers(), before))


@pytest.fixture(params=[True, False], ids=["surveyed", "asked"])
def surveys(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that look at memory alone, and steps that ask torch."""
    if not request.param:
        monkeypatch.setattr(plan, "survey_of", lambda *_: None)


@pytest.mark.usefixtures("surveys")
@pytest.mark.parametrize("steps", [0, 1, 5])
@pytest.mark.parametrize("what", GRADIENTS)
def test_a_gradient_that_lacks_memory_is_refused(what: str, steps: int) -> None:
    params, optimizer = _stepped(rulec.torch.AdamW, steps)
    change, held, needed = GRADIENTS[what]
    params[1].grad = change(params[1].grad)
    sentence = f"the gradient of parameter 1 has shape .2, 3. and memory of {held} bytes, where it needs {needed}: "
    with _unchanged(optimizer, params):
        for _ in range(2):
            with pytest.raises(TensorError, match=sentence):
                optimizer.step()
    give_gradients(params, steps)
    optimizer.step()


@pytest.mark.usefixtures("surveys")
@pytest.mark.parametrize("steps", [0, 1, 5])
@pytest.mark.parametrize("size", [104, 160])
def test_a_gradient_in_larger_memory_is_taken(steps: int, size: int) -> None:
    ends = []
    for place in (False, True):
        params, optimizer = _stepped(rulec.torch.AdamW, steps)
        if place:
            params[1].grad = _in_memory(params[1].grad, size)
        optimizer.step()
        ends.append(params)
    assert all(map(torch.equal, *ends))


@pytest.mark.usefixtures("surveys")
@pytest.mark.parametrize("steps", [0, 1, 5])
@pytest.mark.parametrize("name", ["AdamW", "LAMB", "Adafactor"])
def test_a_parameter_whose_storage_shrank_at_its_address_is_refused(name: str, steps: int) -> None:
    params, optimizer = _stepped(getattr(rulec.torch, name), steps)
    shrink(params[1])
    sentence = "parameter 1 has shape .2, 3. and memory of 8 bytes, where it needs 24: its storage was freed or resized"
    with _unchanged(optimizer, params):
        for _ in range(2):
            with pytest.raises(TensorError, match=sentence):
                optimizer.step()
    say_bytes(params[1], 24)
    optimizer.step()


@pytest.mark.parametrize("surveyed", [True, False])
@pytest.mark.parametrize("kind", [kind for kind in CLASSES if "DTensors" not in kind])
def test_a_state_whose_storage_shrank_at_its_address_is_refused(
    kind: str, surveyed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each reachable state in turn: elements, codes and scales, halves of weights, histories, step counts."""
    if not surveyed:
        monkeypatch.setattr(plan, "survey_of", lambda *_: None)
    run = Run(kind)
    for number in range(4):
        run.step(number)
    reached = [x for _, _, x in run.reached() if x.untyped_storage().nbytes() > 3]
    assert reached
    for state in reached[:: 1 if surveyed else 3]:
        size = state.untyped_storage().nbytes()
        shrink(state, 3)
        before = [p.detach().clone() for p in run.params]
        with pytest.raises(StateMismatch, match=r"of parameter \d.* has .* memory of 3 bytes, where it"):
            run.step(4)
        assert all(map(torch.equal, before, run.params))
        say_bytes(state, size)
    run.step(4)


@pytest.mark.parametrize("part", ["values", "indices"])
@pytest.mark.parametrize("steps", [0, 3])
def test_a_sparse_gradient_that_lacks_memory_is_refused(part: str, steps: int) -> None:
    table = nn.Embedding(5, 3, sparse=True)
    other = nn.Parameter(torch.ones(2))
    optimizer = rulec.torch.SparseAdam([other, table.weight], lr=0.1)
    for number in range(steps + 1):
        optimizer.zero_grad()
        (table(torch.tensor([1, 4])).sum() + other.sum()).backward()
        if number < steps:
            optimizer.step()
    grad = table.weight.grad
    assert grad is not None
    shrink(grad._values() if part == "values" else grad._indices())
    sentence = "the gradient of parameter 1 has shape .* and memory of 8 bytes"
    with _unchanged(optimizer, [other, table.weight]), pytest.raises(TensorError, match=sentence):
        optimizer.step()


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_a_conjugate_gradient_is_looked_at_before_it_is_read(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    params, optimizer = _stepped(rulec.torch.AdamW, steps, [nn.Parameter(torch.ones(SHAPE, dtype=torch.complex64))])
    params[0].grad = shrunk(params[0].grad).conj()
    monkeypatch.setattr(Tensor, "resolve_conj", _looked_at)
    with pytest.raises(TensorError, match=r"the gradient of parameter 0 has .* memory of 8 bytes, where it needs 48"):
        optimizer.step()


def _looked_at(tensor: Tensor) -> Tensor:
    assert tensor.untyped_storage().nbytes() > 8, "memory was read that may not be there"
    return tensor


def _unread(*_: Any, **__: Any) -> Any:
    raise AssertionError("memory was read that may not be there")


@pytest.mark.parametrize("which", ["gradient", "parameter"])
def test_the_look_for_lost_updates_reads_no_more_than_there_is(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    params, optimizer = _stepped(rulec.torch.AdamW, _STEPS[0] - 1, [nn.Parameter(torch.ones(SHAPE).bfloat16())])
    assert optimizer._lost is not None
    shrink(params[0].grad if which == "gradient" else params[0])
    monkeypatch.setattr("rulec.torch.step.checks._sample", _unread)
    with pytest.raises(TensorError, match=r"parameter 0 has .* memory of 8 bytes, where it needs 12"):
        optimizer.step()


@pytest.mark.parametrize("what", ["gradient", "sparse gradient", "parameter", "d", "old_dirs"])
def test_lbfgs_refuses_what_lacks_memory(what: str) -> None:
    params = _parameters()
    optimizer = rulec.torch.LBFGS(params, max_iter=3)
    shrinking = False

    def closure() -> Any:
        optimizer.zero_grad()
        loss = sum(((p - 3) ** 4).sum() for p in params)
        loss.backward()  # type: ignore[union-attr]
        if shrinking and what == "gradient":
            shrink(params[1].grad)  # type: ignore[arg-type]
        if shrinking and what == "sparse gradient":
            params[1].grad = params[1].grad.to_sparse()  # type: ignore[union-attr]
            shrink(params[1].grad._values())
        return loss

    optimizer.step(closure)
    saved = optimizer.state[params[0]]
    shrinking = True
    if what == "parameter":
        shrink(params[1])
    elif what in ("d", "old_dirs"):
        shrink(saved[what][0] if what == "old_dirs" else saved[what])
    before = [p.detach().clone() for p in params]
    with pytest.raises(RulecError, match=r"memory of 8 bytes, where it needs \d+"):
        optimizer.step(closure)
    assert all(map(torch.equal, before, params))


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("kind", ["elements", "number", "other dtype"])
def test_an_input_that_lacks_memory_is_refused(kind: str, steps: int) -> None:
    rule = rulec.parse("name: Scaled\ninputs: {h: like p, c: scalar}\nstep: |\n  p = p - c*h*g\n")
    params = [nn.Parameter(torch.ones(SHAPE))]
    optimizer = rulec.torch.optimizer(rule)(params)
    for number in range(steps):
        give_gradients(params, number)
        optimizer.step(inputs={"h": [torch.ones(SHAPE)], "c": torch.tensor(0.1)})
    give_gradients(params, steps)
    like = torch.ones(SHAPE, dtype=torch.float64 if kind == "other dtype" else torch.float32)
    inputs = {"h": [like], "c": torch.tensor(0.1)}
    shrink(inputs["c"] if kind == "number" else like, 2)  # type: ignore[arg-type]
    with _unchanged(optimizer, params), pytest.raises(TensorError, match="memory of 2 bytes, where it needs"):
        optimizer.step(inputs=inputs)


# Steps in parts


@pytest.mark.parametrize("steps", [0, 1, 5])
@pytest.mark.parametrize("which", ["gradient", "parameter", "state"])
def test_no_rule_of_a_partition_steps_where_a_later_one_lacks_memory(which: str, steps: int) -> None:
    partition = rulec.partition({"0": "momentum", "...": "adamw"})
    params = _parameters()
    optimizer = rulec.torch.Partitioned(partition, [(str(i), p) for i, p in enumerate(params)], lr=0.1)
    for number in range(steps):
        give_gradients(params, number)
        optimizer.step()
    give_gradients(params, steps)
    last = [*optimizer.optimizers[-1].param_groups[0]["params"]][-1]
    lacking = {"gradient": last.grad, "parameter": last, "state": optimizer.state[last].get("exp_avg", last.grad)}
    shrink(lacking[which])
    with _unchanged(optimizer, params), pytest.raises(RulecError, match="memory of 8 bytes, where it needs") as caught:
        optimizer.step()
    assert type(caught.value) in (TensorError, StateMismatch)


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


def _shrinks_gradient(net: nn.Sequential, _: Any) -> None:
    net[0].weight.register_post_accumulate_grad_hook(lambda param: shrink(param.grad))  # type: ignore[arg-type]


def _shrinks_parameter(net: nn.Sequential, _: Any) -> None:
    """After the layers below the last have used it in their backward pass."""
    net[0].weight.register_post_accumulate_grad_hook(lambda param: shrink(param))


def _shrinks_state(net: nn.Sequential, opt: Any) -> None:
    shrink(opt.inner.state[net[0].weight]["exp_avg"])


#: What shrinks memory before or in a backward pass, and the words of the sentence.
EAGER: dict[str, tuple[Callable[[nn.Sequential, Any], None], str]] = {
    "gradient": (_shrinks_gradient, "the gradient of "), "parameter": (_shrinks_parameter, "^"),
    "state": (_shrinks_state, "^exp_avg of "),
}  # fmt: skip


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("keywords", [{}, {"journal": True}], ids=["plain", "journal"])
@pytest.mark.parametrize("what", EAGER)
def test_an_update_inside_the_backward_pass_looks_at_memory(what: str, keywords: Any, steps: int) -> None:
    """Before the copies of a journal, too."""
    net = _net()
    opt = rulec.torch.EagerUpdate(net, "adamw", contributions=1, **keywords)
    for _ in range(steps or what == "state"):
        with opt.backward():
            net(torch.ones(2, 4)).sum().backward()
        opt.step()
    change, sentence = EAGER[what]
    change(net, opt)
    before = net[0].weight.detach().clone()
    with (
        pytest.raises(RulecError, match=rf"{sentence}(parameter 0|0\.weight) has .* memory of 8 bytes"),
        opt.backward(),
    ):
        net(torch.ones(2, 4)).sum().backward()
    assert torch.equal(before, net[0].weight)


@pytest.mark.parametrize("measured", [True, False])
def test_gradients_are_not_scaled_where_they_lack_memory(measured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    net = _net()
    opt = rulec.torch.EagerUpdate(net, "adamw", contributions=1, max_grad_norm=0.1)
    x = torch.ones(2, 4)
    if measured:
        with opt.measure():
            net(x).sum().backward()
        monkeypatch.setattr(Factor, "apply", lambda _, grads: bool([*map(_looked_at, grads)]))
    _shrinks_gradient(net, opt)
    scope = opt.backward() if measured else opt.measure()
    monkeypatch.setattr(Factor, "take", lambda _, place, grad: _looked_at(grad))
    with pytest.raises(TensorError, match=r"the gradient of 0.weight has .* memory of 8 bytes"), scope:
        net[0](x).sum().backward()


def test_a_rollback_writes_nothing_where_memory_is_gone() -> None:
    net = _net()
    opt = rulec.torch.EagerUpdate(net, "adamw", contributions=1, journal=True)

    def fail(_: Any) -> None:
        raise ZeroDivisionError

    net[0].weight.register_hook(fail)
    with pytest.raises(ZeroDivisionError), opt.backward():
        net(torch.ones(2, 4)).sum().backward()
    written = net[2].weight
    shrink(written)
    before = [p.detach().clone() for p in net.parameters()]
    with pytest.raises(TensorError, match=r"2.weight has .* memory of 8 bytes, where it needs 24"):
        opt.rollback()
    assert all(map(torch.equal, before, net.parameters()))
    say_bytes(written, 24)
    opt.rollback()
    assert not torch.equal(before[2], net[2].weight)


def test_no_rule_of_a_partition_ends_a_step_where_a_later_one_lacks_memory() -> None:
    """At the end of an eager step, of gradients that did not come by a backward pass."""
    net = _net()
    partition = rulec.partition({"0/*": "momentum", "...": "adamw"})
    opt = rulec.torch.EagerUpdate(net, partition, lr=0.1)
    for param in net.parameters():
        param.grad = torch.ones_like(param)
    shrink(net[2].weight.grad)  # type: ignore[arg-type]
    before = [p.detach().clone() for p in net.parameters()]
    with pytest.raises(TensorError, match=r"the gradient of 2.weight has .* memory of 8 bytes"):
        opt.step()
    assert all(map(torch.equal, before, net.parameters()))


class Wrapped(Tensor):
    @classmethod
    def __torch_dispatch__(cls, function: Any, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(function)


@pytest.mark.usefixtures("surveys")
@pytest.mark.parametrize("steps", [0, 1, 5])
def test_a_wrapper_without_memory_is_refused_at_whatever_offset(steps: int) -> None:
    params, optimizer = _stepped(rulec.torch.AdamW, steps)
    make = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
    params[1].grad = make(Wrapped, SHAPE, strides=(3, 1), storage_offset=5)
    with pytest.raises(TensorError, match="the gradient of parameter 1 is a Wrapped without memory"):
        optimizer.step()


@pytest.mark.parametrize("factor", ["outputs", "inputs"])
def test_factors_of_a_gradient_that_lack_memory_are_refused(factor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Sequential(nn.Linear(8, 8))
    opt = rulec.torch.EagerUpdate(net, "adamw", contributions=1, epilogue=True)
    for _ in range(2):
        with opt.backward():
            net(torch.ones(8, 8)).sum().backward()
        opt.step()
    keep = epilogue.Kept.keep

    def shrinking(kept: Any, weight: Tensor, product: Any) -> bool:
        product = type(product)(product.outputs.clone(), product.inputs.clone())
        shrink(getattr(product, factor))
        return keep(kept, weight, product)

    monkeypatch.setattr(epilogue.Kept, "keep", shrinking)
    before = net[0].weight.detach().clone()
    sentence = "a factor of the gradient of 0.weight has .* memory of 8 bytes, where it needs 256"
    with pytest.raises(TensorError, match=sentence), opt.backward():
        net(torch.ones(8, 8)).sum().backward()
    assert torch.equal(before, net[0].weight)


@pytest.mark.parametrize("collects", [True, False])
@pytest.mark.parametrize("sparse", [True, False])
def test_a_store_takes_no_gradient_that_lacks_memory(collects: bool, sparse: bool) -> None:
    param, store = nn.Parameter(torch.ones(SHAPE)), rulec.torch.GradStore()
    grad = torch.ones(SHAPE).to_sparse() if sparse else torch.ones(SHAPE)
    shrink(grad._values() if sparse else grad)
    param.grad = grad if collects else None
    with pytest.raises(TensorError, match=r"a gradient has shape .* and memory of 8 bytes, where it needs 24"):
        store.collect([param]) if collects else store.extend({param: grad})
    assert not [*store.items()]


# What a look costs


def test_a_look_at_memory_calls_no_further_function_of_torch() -> None:
    """Of a gradient whose words are as before, three functions are asked: where it is, its address, and a reference."""
    params, optimizer = _stepped(rulec.torch.AdamW, 5)
    optimizer.step()
    survey = optimizer._machine.plans.survey
    _give_words_of_survey(params, survey)
    kind, calls = ctypes.PYFUNCTYPE(ctypes.c_size_t, ctypes.c_size_t, ctypes.c_size_t), []

    def counting(name: str, address: int) -> Any:
        function = kind(address)
        return kind(lambda one, other: calls.append(name) or function(one, other))

    right = survey.functions.copy()
    names = ("grad", "is_neg", "dtype", "dim", "sizes", "strides", "device", "index", "data_ptr", "assign")
    counted = [counting(name, int(right[torch_abi.NAMES.index(name)])) for name in names]
    for name, function in zip(names, counted, strict=True):
        survey.functions[torch_abi.NAMES.index(name)] = ctypes.cast(function, ctypes.c_void_p).value
    try:
        assert survey.look(survey.lists)
        assert calls == ["grad", "data_ptr", "assign"] * len(params)
    finally:
        survey.functions[:] = right
        survey.release()


def _give_words_of_survey(params: list[Tensor], survey: Any) -> None:
    """Gives gradients the words that a survey knows: a new tensor may have any bytes between its numbers."""
    where = torch_abi.layout()
    assert where is not None
    for param, record in zip(params, survey.records, strict=True):
        assert param.grad is not None
        kind, words = int(record[RECORD.index("kind")]), param.grad._cdata + 8 * where.impl_first
        ctypes.memmove(words, kind + 8 * len(KIND), 8 * where.impl_words)


@pytest.mark.parametrize("size", [None, 8])
def test_words_tell_the_bytes_of_a_storage(size: int | None) -> None:
    where, tensor = torch_abi.layout(), torch.zeros(12)
    assert where is not None
    if size:
        tensor.untyped_storage().resize_(size)
    assert torch_abi.words_of(where, tensor)[-1] == (size or 48)
    assert (look_of([tensor]) or _unread)()


# Real memory


_REALLY = """
import json
import torch
import rulec.torch
from rulec.errors import TensorError


def shrink(grad):
    grad.untyped_storage().resize_(8)
    return grad


def free_base(grad):
    base = torch.zeros(20000)
    part = base[100 : 100 + grad.numel()]
    base.untyped_storage().resize_(0)
    return part


sentences = []
for change in (shrink, free_base):
    for steps in (0, 1, 5):
        params = [torch.nn.Parameter(torch.ones(12000)) for _ in range(3)]
        optimizer = rulec.torch.AdamW(params)
        for step in range(steps + 1):
            for param in params:
                param.grad = torch.ones(12000)
            if step < steps:
                optimizer.step()
        params[1].grad = change(params[1].grad)
        before = [p.detach().clone() for p in params]
        try:
            optimizer.step()
            sentences.append("")
        except TensorError as error:
            sentences.append(str(error) if all(map(torch.equal, before, params)) else "changed")
print(json.dumps(sentences))
"""


@pytest.mark.slow
def test_memory_that_is_really_gone_is_not_read() -> None:
    """In a process of its own, which a step that reads there may end."""
    sentences = in_a_process(_REALLY)
    shrank, freed = "memory of 8 bytes, where it needs 48000", "memory of 0 bytes, where it needs 48400"
    assert [shrank in x for x in sentences[:3]] + [freed in x for x in sentences[3:]] == [True] * 6
