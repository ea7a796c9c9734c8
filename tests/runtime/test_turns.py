"""A step that comes while another is under way in another thread waits for it, whatever steps: none is inside twice."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import rulec
import rulec.array
import rulec.array.es
import rulec.torch
from rulec.es import Perturbation
from rulec.locks import Lockable, synchronized
from rulec.runtime.stages import step as steps


class Meeting:
    """Brings a second thread while a first is inside, and sees whether the second comes in as well.

    The first waits inside until the second waits for the turn, is inside too, or has ended: no clock decides.
    """

    def __init__(self, shared: Any, second: Callable[[], Any]) -> None:
        self._asked, self._thread = threading.Event(), threading.Thread(target=self._come, args=(second,), daemon=True)
        self._inside, self.crowded, self.visits, self._problems = 0, False, 0, list[BaseException]()
        self._visitors = set[threading.Thread]()
        shared._lock = _Asking(self)

    def _come(self, second: Callable[[], Any]) -> None:
        try:
            second()
        except BaseException as problem:  # noqa: BLE001 - the first thread raises it
            self._problems.append(problem)
        self._asked.set()

    def come_in(self) -> None:
        self._inside += 1
        self.visits += 1
        self._visitors.add(threading.current_thread())
        self.crowded |= self._inside > 1
        if threading.current_thread() is self._thread:
            self._asked.set()
        elif self.visits == 1:
            self._thread.start()
            assert self._asked.wait(60)

    def go(self) -> None:
        self._inside -= 1

    def ask(self) -> None:
        if threading.current_thread() is self._thread:
            self._asked.set()

    def check_end(self) -> None:
        assert self.visits
        self._thread.join(60)
        assert not self._thread.is_alive()
        for problem in self._problems:
            raise problem
        assert len(self._visitors) == 2, "the second thread never came in"
        assert not self.crowded


class _Asking:
    """A turn that says who has to wait for it."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting, self._lock = meeting, threading.RLock()

    def acquire(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._meeting.ask()
            self._lock.acquire()

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: Any) -> None:
        self.release()


def check_meet(
    monkeypatch: pytest.MonkeyPatch, shared: Any, first: Callable[[], Any], second: Callable[[], Any]
) -> None:
    """Two calls of which the second comes while the first runs a kernel."""
    meeting, written = Meeting(shared, second), steps._written

    def watched(launch: Any) -> Iterator[Any]:
        meeting.come_in()
        yield from written(launch)
        meeting.go()

    monkeypatch.setattr(steps, "_written", watched)
    first()
    meeting.check_end()


def parameters() -> list[torch.nn.Parameter]:
    made = [torch.nn.Parameter(torch.linspace(-1, 1, n)) for n in (3, 4)]
    for param in made:
        param.grad = torch.linspace(1, 2, param.numel())
    return made


def momentum(params: Any) -> Any:
    return rulec.torch.SGD(params, lr=0.1, momentum=0.9, backend="c")


def test_two_steps_of_one_optimizer_are_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    params, others = parameters(), parameters()
    opt, alone = momentum(params), momentum(others)
    alone.step()
    alone.step()
    check_meet(monkeypatch, opt, opt.step, opt.step)
    assert all(torch.equal(p, q) for p, q in zip(params, others, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(_states(opt), _states(alone), strict=True))


def _states(opt: Any) -> list[torch.Tensor]:
    return [opt.state[p]["momentum_buffer"] for p in opt.param_groups[0]["params"]]


@pytest.mark.parametrize(
    "name",
    ["add_param_group", *(pytest.param(n, marks=pytest.mark.slow) for n in ("load_state_dict", "state_dict"))],
)
def test_what_looks_at_states_waits_for_a_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opt = momentum(parameters())
    opt.step()
    given: list[Any] = {"load_state_dict": [opt.state_dict()], "add_param_group": [{"params": parameters()}]}.get(
        name, []
    )
    come: list[Meeting] = []

    def second() -> None:
        getattr(opt, name)(*given)
        come[0].come_in()
        come[0].go()

    meeting, written = Meeting(opt, second), steps._written
    come.append(meeting)

    def watched(launch: Any) -> Iterator[Any]:
        meeting.come_in()
        yield from written(launch)
        meeting.go()

    monkeypatch.setattr(steps, "_written", watched)
    opt.step()
    meeting.check_end()


def test_a_partition_steps_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(3, 2)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    partition = rulec.partition({"weight": "momentum", "bias": "sgd"})
    opt = rulec.torch.Partitioned(partition, model.named_parameters(), lr=0.1, backend="c")
    check_meet(monkeypatch, opt, opt.step, opt.step)


def test_eager_updates_and_stores_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(3, 2)
    eager = rulec.torch.EagerUpdate(model, "momentum", lr=0.1, backend="c")

    def step() -> None:
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        eager.step()

    def later() -> None:
        with eager._lock:  # the first step clears the gradients that it has used
            step()

    check_meet(monkeypatch, eager, step, later)
    monkeypatch.undo()
    params = parameters()
    opt = momentum(params)

    def step_of_a_store() -> None:
        rulec.torch.GradStore({p: torch.ones_like(p) for p in params}).step(opt)

    for param in params:
        param.grad = None
    check_meet(monkeypatch, opt, step_of_a_store, step_of_a_store)


class Visited(dict[Any, Any]):
    """Gradients that somebody looks at."""

    def __init__(self, values: Any, meeting: Meeting) -> None:
        super().__init__(values)
        self._meeting = meeting

    def items(self) -> Any:
        self._meeting.come_in()
        found = [*super().items()]
        self._meeting.go()
        return found


@pytest.mark.parametrize("kind", [rulec.torch.GradStore, rulec.array.GradStore])
def test_a_store_takes_gradients_in_turns(kind: Any) -> None:
    key: Any = torch.zeros(2) if kind is rulec.torch.GradStore else "w"
    grad: Any = torch.ones(2) if kind is rulec.torch.GradStore else np.ones(2)
    store = kind()
    given: list[Visited] = []
    meeting = Meeting(store, lambda: store.extend(given[0]))
    given.append(Visited({key: grad}, meeting))
    store.extend(given[0])
    meeting.check_end()
    assert store[key].tolist() == [2.0, 2.0]


def arrays() -> tuple[dict[str, Any], rulec.array.Optimizer]:
    params = {"a": np.ones(3), "b": np.ones((4, 3))}
    return params, rulec.array.Optimizer("momentum", params, "numpy", lr=0.1)


def test_arrays_are_stepped_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    (params, opt), (others, alone) = arrays(), arrays()
    grads = {name: np.ones_like(array) for name, array in params.items()}
    alone.step(grads)
    alone.step(grads)
    store = rulec.array.GradStore(grads)
    check_meet(monkeypatch, opt, lambda: opt.step(grads), lambda: store.step(opt))
    assert all((params[name] == others[name]).all() for name in params)
    monkeypatch.undo()
    with opt.partial():
        check_meet(monkeypatch, opt, lambda: opt.update("a", np.ones(3)), lambda: opt.update("b", np.ones((4, 3))))
    monkeypatch.undo()
    alone.step(grads)
    assert all((params[name] == others[name]).all() for name in params)


PERTURBATION = Perturbation("independent", directions=2, sigma=0.1)


def torch_strategy() -> tuple[Any, ...]:
    model = torch.nn.Linear(3, 4)
    es = rulec.torch.perturb(model, PERTURBATION)
    opt = rulec.torch.SGD(es.parameters.values(), lr=0.1, backend="c")

    def plain() -> None:
        rulec.torch.GradStore({p: torch.ones_like(p) for p in es.parameters.values()}).step(opt)

    return es, opt, lambda: es.evaluate(lambda: model(torch.ones(1, 3)).sum()), plain


def array_strategy() -> tuple[Any, ...]:
    params, opt = arrays()
    es = rulec.array.es.Strategy(params, PERTURBATION)
    grads = {name: np.ones_like(array) for name, array in params.items()}
    return es, opt, lambda: es.evaluate(lambda tree: 1.0), lambda: opt.step(grads)


class Fitness:
    """No member's is finite; somebody looks at it."""

    def __init__(self, meeting: list[Meeting]) -> None:
        self._meeting = meeting

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        self._meeting[0].come_in()
        self._meeting[0].go()
        return np.full(4, np.nan)


@pytest.mark.parametrize("make", [torch_strategy, array_strategy])
@pytest.mark.filterwarnings("ignore:step . was skipped:RuntimeWarning", "ignore:.*finite fitness:RuntimeWarning")
def test_strategies_are_updated_in_turns(make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    es = make()[0]
    es._rows.add(4)  # as after a forward, in every step
    monkeypatch.setattr(es, "_begin", lambda step: setattr(es, "_step", step))
    come: list[Meeting] = []
    come.append(Meeting(es, lambda: es.update(Fitness(come))))
    es.update(Fitness(come))
    come[0].check_end()
    assert es.step_count == 2


@pytest.mark.slow
@pytest.mark.parametrize("make", [torch_strategy, array_strategy])
def test_strategies_go_to_a_new_step_one_at_a_time(make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    es, opt, evaluate, plain = make()
    evaluate()
    shaped: list[Any] = []

    def shaping(fitness: Any) -> Any:
        shaped[0].come_in()
        shaped[0].go()
        return fitness

    def second() -> None:
        evaluate()
        es.update(np.arange(4.0), shaping=shaping)

    meeting = Meeting(es, second)
    shaped.append(meeting)
    es.update(np.arange(4.0), shaping=shaping)
    meeting.check_end()
    assert es.step_count == 2
    evaluate()
    with monkeypatch.context() as patch:
        check_meet(patch, es, lambda: es.step(np.arange(4.0), opt), lambda: (evaluate(), es.step(np.arange(4.0), opt)))
    assert es.step_count == 4
    evaluate()
    check_meet(monkeypatch, opt, lambda: es.step(np.arange(4.0), opt), plain)


class Counter(Lockable):
    def __init__(self) -> None:
        self.count = 0

    @synchronized
    def twice(self) -> None:
        self.once()
        self.once()

    @synchronized
    def once(self) -> None:
        self.count += 1


def test_a_thread_does_not_wait_for_itself_and_a_copy_has_a_turn_of_its_own() -> None:
    counter = Counter()
    counter.twice()
    with counter._lock:
        for other in (copy.deepcopy(counter), copy.copy(counter)):
            waiting = threading.Thread(target=other.twice)
            waiting.start()
            waiting.join(60)
            assert other.count == 4
    assert counter.count == 2


@pytest.mark.parametrize("make", [lambda: momentum(parameters()), lambda: arrays()[1]])
def test_a_turn_that_failed_is_given_back(make: Callable[[], Any]) -> None:
    opt = make()
    with pytest.raises(rulec.RulecError):
        opt.step(inputs={"none": 1.0}) if isinstance(opt, torch.optim.Optimizer) else opt.step({"none": 1.0})
    free: list[bool] = []
    other = threading.Thread(target=lambda: free.append(opt._lock.acquire(blocking=False)))
    other.start()
    other.join(60)
    assert free == [True]
