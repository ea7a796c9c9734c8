"""The cupy backend without a GPU: its kernels' own text on the CPU, launched by the backend's own calls.

A stand-in for CuPy compiles them with g++; see `cuda_stand_in`. That NVRTC makes good machine code of them is shown in
`test_cuda_code.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rulec
from rulec.backend.protocol import Rows, Scalars
from rulec.compiler.layout import kernel_for, layout_for
from rulec.compiler.pipeline import compile
from rulec.compiler.scalars import ScalarTable
from rulec.compiler.view import matrix_view
from rulec.errors import BackendUnavailable, TensorError
from rulec.kernel.multi_tensor.uploads import Ring
from rulec.language.statistics import Watch, watched
from rulec.testing import IEEE, CupyKind
from rulec.testing.cases import LARGE_SHAPES, MATRIX_SHAPES, gradients, loaded, parameters
from rulec.testing.conformance import check_maximize, check_mixed_dtypes, check_on_device, check_rule
from rulec.testing.trial import Subject
from rulec.testing.whole import SHAPES, check_whole
from rulec_backends.cupy import CupyBackend
from rulec_backends.cupy import call as cupy_call
from rulec_backends.cupy import memory as cupy_memory
from rulec_backends.cupy.plan import THREADS
from tests.backends import cuda_stand_in
from tests.backends.kinds import (
    AWKWARD,
    BETWEEN,
    CUTS,
    KINDS,
    WAVES,
    check_every_operation,
    check_extremes,
    check_piece,
    pieces,
    rule_of,
)

pytestmark = pytest.mark.skipif(bool(cuda_stand_in.MISSING), reason=cuda_stand_in.MISSING or "g++ is here")

Array = np.ndarray[Any, Any]


@pytest.fixture(autouse=True)
def cupy() -> Iterator[Any]:
    """CuPy's stand-in, with nothing waiting before or after."""
    with cuda_stand_in.installed() as module:
        yield module
        cuda_stand_in.flush()


def backend() -> CupyBackend:
    """Of few threads, so that small tensors fill several blocks."""
    return CupyBackend(threads=64)


SUBJECT = Subject(backend(), CupyKind(), IEEE)


# The contract


@pytest.mark.parametrize("name", [*KINDS, *AWKWARD])
def test_rules_of_every_kind(name: str) -> None:
    check_rule(SUBJECT, rule_of(name), "float32")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_operation(dtype: str) -> None:
    check_every_operation(SUBJECT, dtype)


def test_extremes_of_numbers_of_one_sign() -> None:
    check_extremes(SUBJECT)


@pytest.mark.parametrize("piece", pieces("float32"))
def test_the_contract(piece: str) -> None:
    check_piece(SUBJECT, piece, "float32")


@pytest.mark.another
@pytest.mark.parametrize("name", [name for name in rulec.rules() if name not in KINDS])
def test_every_rule_in_float32(name: str) -> None:
    check_rule(SUBJECT, loaded(name), "float32")


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype", ["bfloat16", *(pytest.param(d, marks=pytest.mark.whole) for d in ("float64", "float16"))]
)
def test_rules_of_every_kind_in_other_dtypes(dtype: str) -> None:
    for name in (*KINDS, *AWKWARD):
        check_rule(SUBJECT, rule_of(name), dtype, MATRIX_SHAPES[2:])
    for name in CUTS:
        check_on_device(SUBJECT, loaded(name), dtype, MATRIX_SHAPES[2:])


def test_dtypes_that_mix_and_ascent() -> None:
    check_mixed_dtypes(SUBJECT, loaded("came"), ["float32", "float64", "bfloat16", "float16"])
    check_maximize(SUBJECT, loaded("lamb"), "bfloat16")


@pytest.mark.parametrize("name", CUTS)
def test_blocks_of_as_many_threads_as_on_a_gpu(name: str) -> None:
    whole = Subject(CupyBackend(), CupyKind(), IEEE)
    assert CupyBackend().threads == THREADS
    check_rule(whole, loaded(name), "bfloat16", [(33, 65), *LARGE_SHAPES])


def test_lines_of_several_tiles() -> None:
    check_rule(SUBJECT, loaded("adamp"), "float32", [(3, 9001), (2, 8200), (5,)])
    check_rule(SUBJECT, loaded("adafactor"), "float32", [(1100, 3), (3, 1100)])


@pytest.mark.parametrize("name", ["adamw", "adamp", "lamb", "adafactor"])
def test_rows_stays_and_scale_on_the_device(name: str) -> None:
    check_on_device(SUBJECT, loaded(name), "float32", MATRIX_SHAPES)


@pytest.mark.parametrize("name", ["lamb", "adafactor", "muon", "prodigy", "transforms/skip_not_finite"])
def test_whole_steps_are_the_reference_s(name: str) -> None:
    check_whole(SUBJECT, loaded(name))


@pytest.mark.slow
def test_whole_steps_of_every_kind_are_the_reference_s() -> None:
    for name in (*KINDS, *BETWEEN):
        check_whole(SUBJECT, loaded(name))


# What calls share


class Bound:
    """A rule's kernel over tensors of some shapes, `skip` elements off an aligned address."""

    def __init__(
        self, name: str, shapes: Sequence[tuple[int, ...]], dtype: str = "float32", skip: int = 0, watch: Watch = (),
    ) -> None:  # fmt: skip
        rule = loaded(name)
        program = compile(rule, matrix_view(shapes[0], rule.view).facts, watch=watched(rule, watch))
        self.program, self.layout = kernel_for(program, dtype)
        self.make = lambda values: CupyKind().make(values.astype(dtype), skip)
        self.shapes = list(shapes)
        self.params = [self.make(p) for p in parameters(shapes, 3)]
        names = [b.name for b in self.program.states if b.axes.elementwise]
        self.states = [{s: self.make(np.zeros(shape)) for s in names} for shape in shapes]
        self.views = [matrix_view(shape, rule.view) for shape in shapes]
        self.kernel = backend().build(self.program, self.layout, backend().emit(self.program, self.layout))
        self.call = self.kernel.bind(self.params, self.states, self.views)

    def rows(self, value: float = 0.5) -> Rows:
        return Rows(np.full((1, len(self.program.columns)), value), np.zeros(len(self.shapes), np.int64))

    def gradients(self, seed: int = 1) -> list[Any]:
        return [self.make(g) for g in gradients(self.shapes, seed).values()]

    def bits(self) -> list[bytes]:
        kind = CupyKind()
        return [kind.read(p).tobytes() for p in self.params]


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the copies to the device."""
    found: list[int] = []
    copy = Ring.copy

    def noted(ring: Ring, target: Any, table: Array, *options: Any) -> None:
        found.append(table.nbytes)
        copy(ring, target, table, *options)

    monkeypatch.setattr(Ring, "copy", noted)
    return found


def test_what_has_not_moved_is_not_copied(copies: list[int]) -> None:
    bound = Bound("adamw", [(70, 3), (5,)])
    grads = bound.gradients()
    copies.clear()
    bound.call(0, grads, bound.rows())
    # Row, alignment and one address for each of two tensors, and a table of nine columns.
    assert copies == [8 * (2 * 3 + 9)]
    bound.call(0, grads, bound.rows())
    assert len(copies) == 1
    bound.call(0, bound.gradients(), bound.rows())
    bound.call(0, bound.gradients(), bound.rows(0.25))
    assert len(copies) == 3


def test_some_of_the_tensors_are_told_once(copies: list[int]) -> None:
    bound = Bound("adamw", [(70, 3), (5,), (9,)])
    grads = bound.gradients()

    def fire(fired: list[int]) -> None:
        copies.clear()
        bound.call(0, [grads[i] for i in fired], bound.rows(), tensors=fired)

    fire([0, 2])
    assert len(copies) == 2  # the chunks of these tensors, and what comes with a call
    fire([1])
    fire([0, 2])
    assert copies == []
    fire([1])
    assert copies == []


def test_a_table_on_the_device_is_read_there(copies: list[int], cupy: Any) -> None:
    bound, other = Bound("adamw", [(70, 3)]), Bound("adamw", [(70, 3)])
    grads, rows = bound.gradients(), bound.rows()
    bound.call(0, grads, rows)
    copies.clear()
    other.call(0, grads, Rows(cupy.asarray(rows.table), rows.index))
    assert copies == [8 * 3]
    assert bound.bits() == other.bits()


def test_many_steps_wait_for_nothing_and_mix_nothing_up() -> None:
    eager, lazy = Bound("adamw", [(70, 3), (5,)]), Bound("adamw", [(70, 3), (5,)])
    for step in range(40):
        for bound in (eager, lazy):
            bound.call(0, bound.gradients(step), bound.rows(0.5 / (1 + step)))
            if bound is eager:
                cuda_stand_in.flush()
    assert eager.bits() == lazy.bits()


def test_what_a_graph_captures_is_copied_from_memory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    bound = Bound("adamw", [(70, 3)])
    captured, later = bound.gradients(0), bound.gradients(1)
    bound.call(0, captured, bound.rows())
    cuda_stand_in.flush()
    before = bound.bits()
    with cuda_stand_in.captured(monkeypatch) as graph:
        bound.call(0, captured, bound.rows(0.25))
    assert bound.bits() == before
    for seed in range(40):
        bound.call(0, bound.gradients(seed), bound.rows(0.125))
    graph.replay()
    # After a replay the device has the table of the graph: the next call must not take it for its own.
    bound.call(0, later, bound.rows(0.125))
    expected = Bound("adamw", [(70, 3)])
    expected.call(0, expected.gradients(0), expected.rows())
    for seed in range(40):
        expected.call(0, expected.gradients(seed), expected.rows(0.125))
    expected.call(0, expected.gradients(0), expected.rows(0.25))
    expected.call(0, expected.gradients(1), expected.rows(0.125))
    assert bound.bits() == expected.bits()


def test_a_graph_keeps_the_tables_of_the_tensors_that_fired(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many other sets of tensors fire between its replays."""
    monkeypatch.setattr(cupy_call, "_PARTS", 2)
    bound, expected = (Bound("adamw", [(70, 3), (5,), (7,)]) for _ in range(2))

    gradients = [bound.gradients(seed) for seed in range(3)]

    def fire(each: Bound, seed: int, *tensors: int) -> None:
        each.call(0, [gradients[seed][i] for i in tensors], each.rows(0.25), tensors=tensors)

    for each in (bound, expected):
        fire(each, 0, 1)
    with cuda_stand_in.captured(monkeypatch) as graph:
        fire(bound, 1, 1)
    for each in (bound, expected):
        for others in ((0,), (2,), (0, 2)):
            fire(each, 2, *others)
    assert not any(key[1] == (1,) for key in bound.call._parts)
    graph.replay()
    fire(expected, 1, 1)
    assert bound.bits() == expected.bits()
    assert len(bound.call._captured) == 1


def test_threads_may_run_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    bits = []
    for backwards in (False, True):
        monkeypatch.setattr(cuda_stand_in, "backwards", backwards)
        bound = Bound("adafactor", [(301, 250), (7, 3)])
        found = bound.call(0, bound.gradients(), bound.rows()).reduced
        bits.append([CupyKind().read(x).tobytes() for own in found.values() for x in own])
    assert bits[0] == bits[1]


@pytest.mark.parametrize(
    ("name", "watch"), [("lamb", ()), ("adafactor", ()), ("adamw", "norms"), ("lamb", "norms"), ("adafactor", "norms")]
)
def test_reductions_have_the_same_bits_wherever_tensors_begin(name: str, watch: Watch) -> None:
    bits = []
    for skip in (0, 1):
        bound = Bound(name, [(37, 64), (5, 12), (7, 3)], skip=skip, watch=watch)
        found = bound.call(0, bound.gradients(), bound.rows()).reduced
        bits.append([CupyKind().read(x).tobytes() for own in found.values() for x in own])
    assert bits[0] == bits[1]


def test_parts_of_sums_in_float32_are_all_added_up() -> None:
    """A thread has many packs here; half an ulp for each addition in a pack, and its product is not rounded."""
    bound = Bound("adamw", [(301, 251)], watch={"size": "norm(grad)", "few": "sum(where(grad > 0, 1, 0))"})
    grads = bound.gradients()
    found = bound.call(0, grads, bound.rows()).reduced
    exact = CupyKind().read(grads[0]).astype(np.float64)
    size, few = (float(CupyKind().read(own[0])) for own in found.values())
    assert few == (exact > 0).sum()
    assert abs(size - (exact**2).sum()) <= 4 * 2.0**-24 * (exact**2).sum()


def test_a_kernel_runs_in_the_stream_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    bound, stream = Bound("sgd", [(5,)]), cuda_stand_in.Stream(7)
    seen = []
    monkeypatch.setattr(cuda_stand_in.Stream, "__enter__", lambda self: seen.append(self.ptr))
    monkeypatch.setattr(cuda_stand_in.Stream, "__exit__", lambda *_: None)
    bound.call(0, bound.gradients(), bound.rows(), stream=stream)
    assert seen == [7]


# The scalar program


def scalars_on_device(cupy: Any, name: str, narrow: bool) -> tuple[Any, Any, Any, Any]:
    """The table and new states from the device and from the definition, of three tensors in two groups."""
    shapes = [(3, 4), (2, 6), (3, 3)]
    bound = Bound(name, shapes, "float64")
    program, random = bound.program, np.random.default_rng(5)
    groups = np.array([1, 0, 1])
    hyper = {h: np.abs(random.standard_normal(2)) % 0.9 + 0.05 for h in program.hyper}
    counts = np.array([0.0, 4.0, 9.0])
    definition = ScalarTable(program.scalars)
    facts = {
        f: np.array([{**v.facts, "machine_eps": 2.0**-52}[f] for v in bound.views], np.float64)
        for f in definition.facts
    }
    extent = {"kn": 3, "k": 2, "": 1}
    letters = {b.name: b.axes.letters for b in program.states}
    states = {s: np.abs(random.standard_normal(extent[letters[s]])) for s in sorted(definition.loads)}
    levels = {"group": np.array([2.0, 6.0]), "model": np.array([7.0])}
    on_device = {k: cupy.asarray(v) for k, v in states.items()}
    found = bound.call.scalars(
        Scalars(
            cupy.asarray(counts.astype(np.float32 if narrow else np.float64)), cupy.asarray(groups),
            cupy.asarray(np.array([*hyper.values()]).reshape(-1, 2)), {k: cupy.asarray(v) for k, v in facts.items()},
            on_device, {k: cupy.asarray(v) for k, v in levels.items()},
        )
    )  # fmt: skip
    spread = {"kn": lambda v: v, "k": lambda v: v[groups], "": lambda v: v[0]}
    wanted = definition.evaluate(
        (3,), {k: v[groups] for k, v in hyper.items()}, counts + 1, facts,
        {k: spread[letters[k]](v) for k, v in states.items()}, {"group": levels["group"][groups], "model": 7.0},
    )  # fmt: skip
    assert all((on_device[k].get() == v).all() for k, v in states.items())
    return found[0].get(), {k: v.get() for k, v in found[1].items()}, *wanted


def check_scalars(cupy: Any, name: str, narrow: bool = False) -> None:
    table, new, wanted, stored = scalars_on_device(cupy, name, narrow)
    known = wanted.shape[1]
    np.testing.assert_allclose(table[:, :known], wanted, rtol=1e-14, atol=0)
    assert not table[:, known:].any()
    assert new.keys() == stored.keys()
    for state, values in stored.items():
        np.testing.assert_allclose(new[state], np.broadcast_to(values, 3), rtol=1e-14, atol=0)


@pytest.mark.parametrize("name", ["adamw", "nadam", "adafactor", "prodigy", "asgd", "schedule_free_adamw", WAVES])
@pytest.mark.parametrize("narrow", [False, True], ids=["float64", "float32"])
def test_the_scalar_program_on_the_device_is_its_definition(cupy: Any, name: str, narrow: bool) -> None:
    check_scalars(cupy, name, narrow)


@pytest.mark.another
@pytest.mark.parametrize("name", rulec.rules())
def test_every_scalar_program_on_the_device_is_its_definition(cupy: Any, name: str) -> None:
    check_scalars(cupy, name)


# PyTorch's tensors


def test_torch_tensors_are_used_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    class Cuda(torch.Tensor):
        """A tensor that is said to be on a GPU."""

        is_cuda = True
        device = torch.device("cuda:0")  # type: ignore[assignment]

    def there(values: Array) -> Any:
        return torch.from_numpy(values).as_subclass(Cuda)

    memory = cupy_memory.TorchMemory
    monkeypatch.setattr(memory, "empty", lambda self, count: torch.empty(count, dtype=torch.float64))
    monkeypatch.setattr(memory, "stream", lambda self, chosen: cuda_stand_in.Stream(3))
    bound = Bound("lamb", SHAPES[1:3], "float64")
    params = [there(p.get()) for p in bound.params]
    states = [{k: there(v.get()) for k, v in own.items()} for own in bound.states]
    call = bound.kernel.bind(params, states, bound.views)
    grads = [there(g.get()) for g in bound.gradients()]
    ours = call(0, grads, bound.rows())
    theirs = bound.call(0, bound.gradients(), bound.rows())
    cuda_stand_in.flush()
    for name, values in theirs.reduced.items():
        assert isinstance(ours.reduced[name], torch.Tensor)
        assert ours.reduced[name].numpy().tobytes() == values.get().tobytes()
    assert [p.numpy().tobytes() for p in params] == bound.bits()


def test_a_stream_of_torch_is_named_to_cupy() -> None:
    class Foreign:
        cuda_stream = 1234

    found = cupy_memory.Memory(0).stream(Foreign())
    assert isinstance(found, cuda_stand_in.Stream)
    assert found.ptr == 1234


# Errors


def test_without_cupy_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert CupyBackend().unavailable_reason() == (
        "cupy is not installed: pip install cupy-cuda13x, or the wheel for your CUDA, such as cupy-cuda12x"
    )


def test_without_a_driver_it_says_so_in_one_line(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> int:
        raise RuntimeError("cudaErrorInsufficientDriver: CUDA driver version is insufficient for CUDA runtime version")

    assert CupyBackend().unavailable_reason() is None
    with monkeypatch.context() as patch:
        patch.setattr(cupy.cuda.runtime, "is_hip", True)
        assert CupyBackend().unavailable_reason() == (
            "CuPy is here for AMD's GPUs, and these kernels are for NVIDIA's: use backend 'triton'"
        )
    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceCount", fail)
    assert CupyBackend().unavailable_reason() == (
        "CuPy finds no GPU (cudaErrorInsufficientDriver: CUDA driver version is insufficient for CUDA runtime "
        "version): install NVIDIA's driver, or use another backend"
    )
    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceCount", lambda: 0)
    assert CupyBackend().unavailable_reason() == ("CuPy finds no GPU: install NVIDIA's driver, or use another backend")


def refusal(params: Sequence[Any]) -> str:
    """What binding AdamW to these parameters says."""
    program = compile(loaded("adamw"))
    layout = layout_for(program, "float32")
    kernel = backend().build(program, layout, backend().emit(program, layout))
    with pytest.raises((TensorError, BackendUnavailable)) as caught:
        kernel.bind(params, [{"m": p, "v": p} for p in params])
    return str(caught.value)


def test_arrays_that_are_elsewhere_are_refused(cupy: Any) -> None:
    import torch

    where = "the cupy backend works on a GPU, and one of the parameters of AdamW is"
    assert refusal([np.zeros(3, np.float32)]) == (
        f"{where} a numpy array in main memory: pass cupy.asarray(array), or use backend 'cpu'"
    )
    assert refusal([torch.zeros(3)]) == (f"{where} a PyTorch tensor on cpu: pass tensor.cuda(), or use backend 'cpu'")
    assert refusal([[1.0]]) == f"{where} a list: pass cupy.asarray(array), or use backend 'cpu'"
    assert refusal([cupy.zeros((4, 6), np.float32)[:, ::2]]) == (
        "one of the parameters of AdamW is not contiguous: pass cupy.ascontiguousarray of it"
    )


def test_arrays_of_two_gpus_are_refused(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = [cupy.zeros(3, np.float32), cupy.zeros(3, np.float32)]
    monkeypatch.setitem(cuda_stand_in.DEVICES, id(arrays[1]), 1)
    assert refusal(arrays) == (
        "the parameters of AdamW lie on GPU 0 and GPU 1: give those of each GPU to an optimizer of their own"
    )


def test_a_gpu_that_is_too_old_is_refused(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_stand_in.Device, "compute_capability", "75")
    monkeypatch.setattr("rulec_backends.cupy.modules_of", lambda source: _fresh(source))
    assert refusal([cupy.zeros(3, np.float32)]) == (
        "GPU 0 has compute capability 7.5, and the cupy backend needs 8.0 or later: use another backend"
    )


def _fresh(source: str) -> Any:
    from rulec_backends.cupy.memory import Modules

    return Modules(source)


def test_a_damaged_kernel_in_the_cache_is_compiled_again(
    cupy: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RULEC_CACHE_DIR", str(tmp_path))
    program = compile(loaded("sgd"))
    layout = layout_for(program, "float32")
    source = backend().emit(program, layout)
    _fresh(source).functions("SGD", 0)
    (kept,) = tmp_path.rglob("*.cubin")
    whole = kept.read_bytes()
    kept.write_bytes(whole[: len(whole) // 2])
    _fresh(source).functions("SGD", 0)
    assert kept.read_bytes() == whole


def test_the_first_error_of_nvrtc_is_told(cupy: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RULEC_CACHE_DIR", str(tmp_path))

    def fail(source: str, options: tuple[str, ...]) -> tuple[bytes, None]:
        raise cuda_stand_in.Failure(
            '\nkernel.cu(1): warning: a\nkernel.cu(7): error: identifier "x" is undefined\n more'
        )

    monkeypatch.setattr(cuda_stand_in.COMPILER, "compile_using_nvrtc", fail)
    monkeypatch.setattr("rulec_backends.cupy.modules_of", lambda source: _fresh(source))
    assert refusal([cupy.zeros(3, np.float32)]) == (
        'NVRTC cannot compile the kernels of AdamW (kernel.cu(7): error: identifier "x" is undefined): check that CuPy '
        "and CUDA fit together with `python -c 'import cupy; cupy.show_config()'`, or use another backend"
    )
