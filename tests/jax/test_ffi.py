"""The fused cpu kernel as XLA calls it: the numbers of the numpy backend, in place, on XLA's threads, and only where
it can be."""

from __future__ import annotations

import ctypes
import os
import re
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rulec
import rulec.array
import rulec.jax
from rulec.compiler.layout import layout_for
from rulec.errors import BackendUnavailable, HyperError, StateMismatch
from rulec.jax import cpu
from rulec.jax.packing import Packed
from rulec_backends.cpu import ffi, ffi_kernel

#: Elements that leaves must have on average for the kernel to be chosen.
LARGE = cpu.LEAST_ELEMENTS


def normal(seed: int, *shape: int, dtype: Any = jnp.float32) -> Any:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def numbers(tree: Any) -> list[np.ndarray[Any, Any]]:
    return [np.asarray(x.astype(jnp.float32)) for x in jax.tree.leaves(tree)]


def hlo(rule: str, params: Any, grads: Any, backend: str | None, **hyper: float) -> str:
    """The compiled program of a step."""

    def step(params: Any, grads: Any, state: Any) -> Any:
        return rulec.jax.step(rule, params, grads, state, backend=backend, **hyper)

    jitted = jax.jit(step, donate_argnums=(0, 2))
    return str(jitted.lower(params, grads, rulec.jax.init(rule, params)).compile().as_text())


# Numbers


@pytest.mark.parametrize("rule", ["lion", pytest.param("nadam", marks=pytest.mark.slow)])
def test_a_step_gives_what_the_numpy_backend_gives(rule: str) -> None:
    shapes = {"a": (3, 5), "b": (), "c": (70_000,), "d": (0,)}
    params = {k: normal(i, *shape) for i, (k, shape) in enumerate(shapes.items())}
    arrays = [np.array(p) for p in params.values()]
    theirs = rulec.array.Optimizer(rule, arrays, backend="numpy")
    state = rulec.jax.init(rule, params)
    for t in range(3):
        grads = {k: normal(10 + t, *shape) for k, shape in shapes.items()}
        params, state = rulec.jax.step(rule, params, grads, state, backend="cpu")
        theirs.step([np.array(g) for g in grads.values()])
    for ours, expected in zip(numbers(params), arrays, strict=True):
        if rule == "lion":
            np.testing.assert_array_equal(ours, expected)
        # Scalars of the others come from XLA's pow, which may differ from NumPy's in the last bit.
        np.testing.assert_allclose(ours, expected, rtol=2e-6, atol=1e-7)


@pytest.mark.slow
def test_half_width_leaves_are_stored_and_rounded_as_by_xla() -> None:
    dtype = jnp.bfloat16
    params, grads = {"w": normal(0, 1000, dtype=dtype)}, {"w": normal(1, 1000, dtype=dtype)}
    state = rulec.jax.init("lion", params, state_dtype="float32")
    jax_params, jax_state = rulec.jax.step("lion", params, grads, state, donate=False, backend="jax", lr=0.1)
    cpu_params, cpu_state = rulec.jax.step("lion", params, grads, state, backend="cpu", lr=0.1)
    assert cpu_params["w"].dtype == dtype
    assert cpu_state.m["w"].dtype == jnp.float32
    np.testing.assert_array_equal(numbers(cpu_params), numbers(jax_params))
    np.testing.assert_allclose(cpu_state.m["w"], jax_state.m["w"], rtol=1e-6)


@pytest.mark.slow
def test_adamw_agrees_with_optax_for_ten_steps() -> None:
    params = {"w": normal(0, 40, 50), "b": normal(1, 50)}
    theirs, made = params, optax.adamw(1e-2, weight_decay=0.1)
    their_state, state = made.init(theirs), rulec.jax.init("adamw", params)
    for t in range(10):
        grads = jax.tree.map(lambda p: normal(t, *p.shape), theirs)  # noqa: B023 - called at once
        updates, their_state = made.update(grads, their_state, theirs)
        theirs = optax.apply_updates(theirs, updates)
        params, state = rulec.jax.step(
            "adamw", params, grads, state, donate=False, backend="cpu", lr=1e-2, weight_decay=0.1
        )
    for a, b in zip(numbers(params), numbers(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    "choice", ["packed", *(pytest.param(choice, marks=pytest.mark.slow) for choice in ("by size", "cpu"))]
)
def test_a_rule_without_scalars(choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = rulec.parse("name: HeavyBall\nstate: {m: 0}\nstep: |\n  m = 0.5*m + g\n  p = p - 0.25*m\n")
    used = kernels(monkeypatch)
    params = {"a": normal(0, LARGE if choice == "by size" else 7), "b": normal(1, LARGE)}
    grads = jax.tree.map(lambda p: p + 1, params)
    state = rulec.jax.init(rule, params, packed=choice == "packed")
    p, g = (np.concatenate([np.asarray(x, np.float64) for x in tree.values()]) for tree in (params, grads))
    for _ in range(2):
        params, state = rulec.jax.step(rule, params, grads, state, backend="cpu" if choice == "cpu" else None)
    assert used == ["HeavyBall"]
    np.testing.assert_allclose(np.concatenate([*params.values()]), p - 0.25 * (g + 1.5 * g), rtol=1e-6, atol=1e-6)


def test_leaves_of_several_rules_and_groups_have_their_own_scalars() -> None:
    rules = rulec.partition({"a*": ("lion", {"lr": 0.5}), "b*": ("lion", {"lr": 0.25}), "...": "sgd"})
    params = {k: jnp.zeros(8) for k in ("a1", "b1", "a2", "c")}
    grads = jax.tree.map(jnp.ones_like, params)
    new, _ = rulec.jax.step(rules, params, grads, rulec.jax.init(rules, params), backend="cpu")
    assert [float(new[k][0]) for k in ("a1", "a2", "b1")] == [-0.5, -0.5, -0.25]
    assert float(new["c"][3]) == pytest.approx(-1e-3)


@pytest.mark.slow
def test_many_leaves_are_updated_in_several_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "MOST_LEAVES", 3)
    params = {f"l{i}": normal(i, i + 1) for i in range(8)}
    grads = jax.tree.map(lambda p: p + 1, params)
    text = hlo("adam", params, grads, "cpu", lr=0.125)
    assert text.count('custom_call_target="rulec_') == 3
    state = rulec.jax.init("adam", params)
    expected, _ = rulec.jax.step("adam", params, grads, state, donate=False, backend="jax", lr=0.125)
    found, _ = rulec.jax.step("adam", params, grads, state, backend="cpu", lr=0.125)
    for a, b in zip(numbers(found), numbers(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


# Where it is used


@pytest.mark.slow
def test_it_is_called_in_place() -> None:
    params, grads = {"w": jnp.ones(LARGE)}, {"w": jnp.ones(LARGE)}
    text = hlo("adamw", params, grads, "cpu", lr=0.1)
    assert text.count('custom_call_target="rulec_') == 1
    assert not re.search(r"(f32|pred).* copy\(", text)
    state = rulec.jax.init("adamw", params)
    before = [x.unsafe_buffer_pointer() for x in (params["w"], state.m["w"], state.v["w"])]
    new, state = rulec.jax.step("adamw", params, grads, state, backend="cpu", lr=0.1)
    assert [x.unsafe_buffer_pointer() for x in (new["w"], state.m["w"], state.v["w"])] == before


def kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the kernel is built for from now on, by name."""
    found: list[str] = []
    own = cpu.stage

    def stage(kernel: Any, run: Any, index: int) -> Any:
        found.append(run.bucket.program.name)
        return own(kernel, run, index)

    monkeypatch.setattr(cpu, "stage", stage)
    return found


def step_of(params: Any, rule: str = "adam", **keywords: Any) -> Any:
    grads = jax.tree.map(jnp.ones_like, params)
    return rulec.jax.step(rule, params, grads, rulec.jax.init(rule, params), donate=False, **keywords)


@pytest.mark.slow
def test_large_leaves_on_one_device_are_for_the_kernel_and_small_ones_for_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    used = kernels(monkeypatch)
    step_of({"w": jnp.ones(LARGE + 1)})
    assert used == ["Adam"]
    step_of({"w": jnp.ones(LARGE - 1)})
    step_of({"w": jnp.ones(LARGE + 1)}, backend="jax")
    assert used == ["Adam"]
    step_of({"w": jnp.ones(LARGE - 1)}, backend="cpu")
    assert used == ["Adam"] * 2
    step_of({"w": jnp.ones(LARGE + 1)}, "sgd")
    assert used == ["Adam"] * 2


def test_under_transformations_xla_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    used = kernels(monkeypatch)
    params = {"w": jnp.ones((2, LARGE))}
    batched, _ = jax.vmap(step_of)(params)
    jitted, _ = jax.jit(step_of)(params)
    assert used == []
    np.testing.assert_array_equal(batched["w"], jitted["w"])


def test_it_is_chosen_for_arrays_on_one_cpu_alone() -> None:
    array = jnp.ones(3)
    meshed = jax.device_put(array, jax.NamedSharding(jax.make_mesh((1,), ("x",)), jax.P("x")))
    assert cpu.chosen(None, {"a": array}, [array]) == "either"
    assert cpu.chosen(None, {"a": array, "b": meshed}) == "jax"
    assert cpu.chosen(None, {"a": np.ones(3)}) == "jax"
    assert cpu.chosen(None, {"a": array}, {"a": np.ones(3), "b": array}) == "jax"
    assert cpu.chosen("cpu", {"a": meshed}) == "cpu"


def test_a_rule_that_may_skip_steps_is_left_to_xla(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cpu, "LEVEL", 1)
    used = kernels(monkeypatch)
    step_of({"w": jnp.ones((4, 4))}, "transforms/skip_not_finite >> sgd", backend="cpu")
    assert used == []
    assert capsys.readouterr().err.endswith(" by jax alone, not by the cpu backend: it may leave leaves as they are\n")


@pytest.mark.slow
def test_an_xla_that_refuses_the_kernel_does_the_step_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuses(*_: Any, **__: Any) -> None:
        raise ValueError("unsupported API version")

    monkeypatch.setattr(cpu, "LEVEL", 1)
    monkeypatch.setattr(jax.ffi, "register_ffi_target", refuses)
    cpu._kernel.cache_clear()
    try:
        new, _ = step_of({"w": jnp.ones(5)}, "yogi", backend="cpu")
    finally:
        cpu._kernel.cache_clear()
    assert jnp.isfinite(new["w"]).all()
    assert "XLA does not take it: unsupported API version" in capsys.readouterr().err


def test_a_backend_that_there_is_not_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HyperError, match=r"^backend='gpu' is neither 'jax' nor 'cpu': leave it out"):
        step_of({"w": jnp.ones(3)}, backend="gpu")
    monkeypatch.setattr("rulec_backends.cpu.importlib.util.find_spec", lambda name: None)
    with pytest.raises(BackendUnavailable, match="numba is not installed"):
        step_of({"w": jnp.ones(3)}, backend="cpu")


# Threads


def test_calls_from_several_threads_at_once_do_not_meet() -> None:
    def work(seed: int, out: dict[int, Any]) -> None:
        params = {"w": jnp.full(400_000, float(seed))}
        state = rulec.jax.init("lion", params)
        for _ in range(10):
            params, state = rulec.jax.step("lion", params, {"w": jnp.ones(400_000)}, state, lr=0.5, backend="cpu")
        out[seed] = np.asarray(params["w"])

    found: dict[int, Any] = {}
    threads = [threading.Thread(target=work, args=(seed, found), daemon=True) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert {seed: (x.min(), x.max()) for seed, x in found.items()} == {s: (s - 5.0, s - 5.0) for s in range(4)}


class FakeXla:
    """What XLA hands a kernel: a frame over NumPy arrays, and a pool of threads that does as it is told.

    `way` is what becomes of a task: "late" for one that is run when all is over, as by threads that are busy or that a
    fork has left behind, "inline" for one that is run at once by the caller, "refused" for none.
    """

    def __init__(self, way: str, operands: list[Any], results: list[Any]) -> None:
        self.way, self.tasks, self.destroyed = way, list[tuple[int, int]](), 0
        kind = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(ctypes.c_int64))
        self._calls = [kind(self._schedule), kind(self._size), kind(self._destroy)]
        api = np.zeros(24, np.int64)
        for place, call in zip((ffi._SCHEDULE, ffi._POOL_SIZE, ffi._DESTROY), self._calls, strict=True):
            api[place] = ctypes.cast(call, ctypes.c_void_p).value
        self._kept = [api, operands, results]
        self.frame = np.zeros(22, np.int64)
        self.frame[[2, 3, 4]] = api.ctypes.data, 77, 3
        self.frame[9], self.frame[14] = self._buffers(operands), self._buffers(results)

    def _buffers(self, arrays: list[Any]) -> int:
        found = np.zeros((len(arrays), 6), np.int64)
        found[:, 3] = [x.ctypes.data for x in arrays]
        pointers = found.ctypes.data + 48 * np.arange(len(arrays), dtype=np.int64)
        self._kept += [found, pointers]
        return int(pointers.ctypes.data)

    def _schedule(self, given: Any) -> int | None:
        assert (given[0], given[2]) == (40, 77)
        if self.way == "refused":
            return 4242
        self.tasks.append((given[3], given[4]))
        if self.way == "inline":
            self.run_tasks()
        return None

    def _size(self, given: Any) -> int | None:
        assert (given[0], given[2]) == (32, 77)
        ctypes.c_int64.from_address(given[3]).value = 3
        return None

    def _destroy(self, given: Any) -> None:
        assert (given[0], given[2]) == (24, 4242)
        self.destroyed += 1

    def run_tasks(self) -> None:
        for task, job in self.tasks:
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(task)(job)
        self.tasks.clear()


@pytest.mark.parametrize("way", ["late", "inline", "refused"])
def test_no_kernel_waits_for_a_thread_that_has_not_begun(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rulec_backends.common.threads.asked_for", lambda: 0)
    program = rulec.compile(rulec.load("sgd"))
    kernel = ffi_kernel(program, layout_for(program, "float32"))
    p, g = np.zeros(1_000_000, np.float32), np.ones(1_000_000, np.float32)
    stage = kernel.stage(0, [p.size])
    plan = stage.plan({"p": [(2, 0)], "g": [(3, 0)]}, [0])
    xla = FakeXla(way, [plan, np.array([[0.5]]), p, g], [np.zeros(stage.scratch, np.int64), np.zeros(0)])
    handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(kernel.address)
    assert handler(xla.frame.ctypes.data) is None
    np.testing.assert_array_equal(p, np.full_like(p, -0.5))
    assert len(xla.tasks) == (2 if way == "late" else 0)
    # A job lives until all have left it.
    assert [ctypes.c_int64.from_address(job + 8 * ffi._LEFT).value for _, job in xla.tasks] == [2] * len(xla.tasks)
    assert xla.destroyed == (2 if way == "refused" else 0)
    # A thread that comes when all is over touches nothing of the call any more.
    xla.frame[:], plan[:] = 0, 0
    xla.run_tasks()
    np.testing.assert_array_equal(p, np.full_like(p, -0.5))


def test_xla_is_told_which_interface_the_kernel_was_made_for() -> None:
    program = rulec.compile(rulec.load("sgd"))
    metadata, extension, frame = np.zeros(6, np.int64), np.zeros(4, np.int64), np.zeros(22, np.int64)
    extension[[1, 3]] = 1, metadata.ctypes.data
    frame[1] = extension.ctypes.data
    address = ffi_kernel(program, layout_for(program, "float32")).address
    assert ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(address)(frame.ctypes.data) is None
    assert metadata.view(np.int32)[6:8].tolist() == [ffi.MAJOR, ffi.MINOR]


# Packed states


def tree() -> dict[str, Any]:
    return {"a": {"w": normal(0, 3, 4), "b": normal(1, 4)}, "half": normal(2, 5, dtype=jnp.bfloat16), "one": normal(3)}


@pytest.mark.slow
def test_packed_states_step_as_others_do() -> None:
    params = tree()
    whole = rulec.jax.init("adam", params)
    packed = rulec.jax.init("adam", params, packed=True)
    assert isinstance(packed.m, Packed)
    assert [(str(x.dtype), x.shape) for x in jax.tree.leaves(packed.m)] == [("float32", (17,)), ("bfloat16", (5,))]
    for t in range(3):
        grads = jax.tree.map(lambda p: (p + t).astype(p.dtype), params)  # noqa: B023 - called at once
        expected, whole = rulec.jax.step("adam", params, grads, whole, donate=False, backend="cpu", lr=0.125)
        params, packed = rulec.jax.step("adam", params, grads, packed, donate=False, lr=0.125)
        jax.tree.map(np.testing.assert_array_equal, params, expected)
    jax.tree.map(np.testing.assert_array_equal, rulec.jax.unpacked(packed), whole)
    jax.tree.map(np.testing.assert_array_equal, rulec.jax.packed(whole), packed)
    np.testing.assert_array_equal(packed.v.tree["a"]["w"], whole.v["a"]["w"])


def test_a_packed_state_is_updated_where_it_lies() -> None:
    params = {f"l{i}": normal(i, 10) for i in range(5)}
    state = rulec.jax.init("adam", params, packed=True)
    before = state.v.flats[0].unsafe_buffer_pointer()
    grads = jax.tree.map(jnp.ones_like, params)
    _, new = rulec.jax.step("adam", params, grads, state)
    assert new.v.flats[0].unsafe_buffer_pointer() == before


@pytest.mark.parametrize("rule", ["adam", "adafactor"])
def test_packed_states_without_the_kernel(rule: str) -> None:
    params = {k: normal(i, 3, 4) for i, k in enumerate("bcd")} | {"a": None}
    grads = jax.tree.map(jnp.ones_like, params)
    state = rulec.jax.init(rule, params)
    expected, whole = rulec.jax.step(rule, params, grads, state, donate=False, backend="jax")
    found, packed = rulec.jax.step(rule, params, grads, rulec.jax.packed(state), backend="jax", donate=False)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), rulec.jax.unpacked(packed), whole)


def test_a_packed_state_of_other_parameters_is_refused() -> None:
    state = rulec.jax.init("adam", {"a": jnp.ones(3), "b": jnp.ones(3)}, packed=True)
    params = {"a": jnp.ones(3), "c": jnp.ones(3)}
    with pytest.raises(StateMismatch, match="does not have the structure of the parameters"):
        rulec.jax.step("adam", params, params, state)


# The interface


def test_the_structures_are_where_the_header_has_them() -> None:
    """The header that jaxlib has is the definition; what is read and written here follows from it."""
    header = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text(encoding="utf-8")
    functions = [line.split("(")[1].rstrip(");\n") for line in header.splitlines() if "_STRUCT_FIELD(XLA" in line]
    # struct_size, extension_start, the version in three words and the internal table come before.
    found = {name: 6 + i for i, name in enumerate(functions)}
    assert found["XLA_FFI_Error_Destroy"] == ffi._DESTROY
    assert found["XLA_FFI_ThreadPool_Schedule"] == ffi._SCHEDULE
    assert found["XLA_FFI_ThreadPool_NumThreads"] == ffi._POOL_SIZE
    assert f"#define XLA_FFI_API_MAJOR {ffi.MAJOR}\n" in header


def test_a_plan_says_what_a_call_needs() -> None:
    rule = rulec.parse("name: Scaled\nhyper: {lr: 1}\nstep: |\n  direction = g/(1 + max(g))")
    program = rulec.compile(rule)
    first = ffi_kernel(program, layout_for(program, "float32")).stage(0, [2, 40_000])
    assert (first.arrays, first.stored, first.slots, len(first.totals)) == (["g"], [], {}, 1)
    # Three lines of addresses, and a slot for each chunk.
    assert first.scratch == 3 * 2 + 3
    words = first.plan({"g": [(2, 0), (4, 8)]}, [0, 1]).tolist()
    threads, stage, spans, chunks, columns, tensors, lines, totals = words[:8]
    assert (threads, stage) == (int(os.environ.get("RULEC_NUM_THREADS", "0")), 0)
    assert (chunks, columns, tensors, lines, totals) == (3, 3, 2, 3, 1)
    rest = words[8 + 2 * spans :]
    assert rest[:9] == [0, 0, 2, 1, 0, 32768, 1, 32768, 40000]
    assert rest[9:] == [0, 0, 0, 0, 2, 0, 4, 8, -1, 48, -1, 48, 0, 1, 2, np.float64(-np.inf).view(np.int64)]
