"""The triton backend: its contract in Triton's interpreter, what it prints, and what it says where it cannot run."""

from __future__ import annotations

import pytest

import rulec
from rulec import extras
from rulec.compiler.layout import kernel_for, layout_for
from rulec.compiler.pipeline import compile
from rulec.errors import BackendUnsupported, TensorError
from rulec.testing.cases import buckets_of, loaded
from rulec_backends import triton as triton_backend
from rulec_backends.triton import TritonBackend
from rulec_backends.triton.ops import constant
from rulec_backends.triton.words import WORDS, words_used
from tests.backends import kinds, triton_process
from tests.backends.triton_process import check_in_interpreter, interpreter_fault
from tests.library import by_share

# In the interpreter: the contract


KINDS = "from tests.backends.kinds import *\n"

#: A scalar, nothing, and ends of a line and of a block.
FEW = "((), (7,), (0,), (33, 65))"


EVERYDAY = (
    "adamw", "rprop", "madgrad", "nadam", "lamb", "muon", "transforms/skip_not_finite", "Tensors", "Rows1", "Last2",
    "Seldom", "Names",
)  # fmt: skip


@pytest.mark.parametrize("name", EVERYDAY)
def test_rules_of_every_kind_in_the_interpreter(name: str) -> None:
    check_in_interpreter(f"{KINDS}check_rule(subject, rule_of({name!r}), 'float32', {FEW})")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_operation_in_the_interpreter(dtype: str) -> None:
    check_in_interpreter(f"{KINDS}check_every_operation(subject, {dtype!r})")


def test_extremes_of_numbers_of_one_sign_in_the_interpreter() -> None:
    check_in_interpreter(f"{KINDS}check_extremes(subject)")


@pytest.mark.parametrize(
    ("name", "dtype"), [("adamw", "float16"), ("adafactor", "bfloat16"), ("lamb", "float64")]
)  # fmt: skip
def test_other_dtypes_in_the_interpreter(name: str, dtype: str) -> None:
    check_in_interpreter(f"check_rule(subject, loaded({name!r}), {dtype!r}, ((7,), (33, 65)))")


def test_ascent_and_dtypes_that_mix_in_the_interpreter() -> None:
    check_in_interpreter(
        "(bucket,) = buckets_of(loaded('adamw'), [(7,), (33, 65)])\n"
        "stored = {'m': 'float16', 'v': 'float32'}\n"
        "layout = layout_of(bucket, 'bfloat16', grad='float32', states=stored, maximize=True)\n"
        "trial = trial_of(subject, bucket, layout)\n"
        "trial.step(gradients(bucket.shapes, 0))\n"
        "trial.step(gradients(bucket.shapes, 1, True))"
    )


@pytest.mark.parametrize("piece", kinds.pieces("float32", everyday=EVERYDAY))
def test_the_contract_in_the_interpreter(piece: str) -> None:
    check_in_interpreter(f"{KINDS}check_piece(subject, {piece!r}, 'float32')")


@pytest.mark.parametrize("names", by_share(rulec.rules(), "Triton's interpreter"))
def test_every_rule_in_the_interpreter(names: list[str]) -> None:
    check_in_interpreter(f"for name in {names!r}:\n    check_rule(subject, loaded(name), 'float32')")


@pytest.mark.another
@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
@pytest.mark.parametrize("name", [*kinds.KINDS, *kinds.AWKWARD])
def test_rules_of_every_kind_in_other_dtypes_in_the_interpreter(name: str, dtype: str) -> None:
    check_in_interpreter(f"{KINDS}check_rule(subject, rule_of({name!r}), {dtype!r}, MATRIX_SHAPES[3:])")


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param("float16", marks=pytest.mark.slow),
        *(pytest.param(d, marks=pytest.mark.another) for d in ("float64", "bfloat16")),
    ],
)
def test_states_of_other_dtypes_and_ascent_in_the_interpreter(dtype: str) -> None:
    check_in_interpreter(
        f"check_mixed_dtypes(subject, loaded('came'), [{dtype!r}, 'bfloat16', 'float32'])\n"
        f"check_maximize(subject, loaded('lamb'), {dtype!r})"
    )


def test_a_check_runs_all_stages_in_the_interpreter() -> None:
    program = (
        "from rulec.tools.compare.oracle import exactness\nfrom rulec.tools.compare.difference import Trial\n"
        "found = exactness(loaded('lamb'), {}, Trial('float32', 2, ((4, 6),)), 'triton')\n"
    )
    assert max(check_in_interpreter(program, "[*found.ulps.values()]")) < 16


#: Ends of blocks and of tiles, in the interpreter's sizes and in those of GPUs.
FLAT = "((), (0,), (1,), (4095,), (4096,), (4097,), (12293,), (1023,), (1025,), (2048,))"
SHAPED = (
    "((1, 5000), (1, 130), (300, 5), (5, 300), (129, 128), (7, 8, 8), (40, 3, 3), (2, 200, 7), (3, 1, 9), (64, 129))"
)


def check_ends(blocks: str, names: str, flat: str, rules: str, shaped: str) -> None:
    """Also where a program takes several blocks, one after the other, and every second tensor is not aligned."""
    check_in_interpreter(
        "from rulec_backends.triton import blocks as triton_blocks, work as triton_work\n"
        f"triton_blocks.INTERPRETED = triton_blocks.{blocks}\n"
        f"if {blocks!r} == 'DEFAULT':\n"
        "    triton_work.tile_for = lambda vector, device: triton_blocks.tile_for(vector, 'some GPU')\n"
        "triton_work.MOST_CHUNKS = triton_work.MOST_REDUCED = triton_work.MOST_PIECES = 2\n"
        f"for name in {names}:\n    check_rule(subject, loaded(name), 'float32', {flat})\n"
        f"for rule in {rules}:\n"
        f"    bucket = max(buckets_of(rule, {shaped}), key=lambda b: len(b.shapes))\n"
        "    trial = trial_of(subject, bucket, layout_of(bucket, 'bfloat16', grad='float32'))\n"
        "    trial.step(gradients(bucket.shapes, 0))\n"
        "    trial.step({i: g for i, g in gradients(bucket.shapes, 1, True).items() if i % 3})\n"
    )


def test_several_tiles_of_one_program() -> None:
    check_in_interpreter(
        "from rulec_backends.triton import blocks as triton_blocks, work as triton_work\n"
        "triton_work.tile_for = lambda vector, device: triton_blocks.tile_for(vector, 'some GPU')\n"
        "triton_work.MOST_REDUCED = 2\n"
        "check_rule(subject, loaded('adafactor'), 'float32', ((27, 256),))"
    )


@pytest.mark.slow
def test_ends_of_blocks_and_tiles() -> None:
    check_ends("DEFAULT", "('lamb',)", "((1025,), (2048,))", "(loaded('sm3'),)", "((5, 300), (129, 128), (40, 3, 3))")


@pytest.mark.slow
@pytest.mark.parametrize("blocks", ["DEFAULT", pytest.param("INTERPRETED", marks=pytest.mark.whole)])
def test_all_ends_of_blocks_and_tiles(blocks: str) -> None:
    rules = "([r for r in staged_rules() if r.name == 'Rows0'][0], loaded('sm3'), loaded('apollo'))"
    check_ends(blocks, "('adamw', 'lamb', 'dadapt_adam')", FLAT, rules, SHAPED)


def test_many_tensors_partly_fired() -> None:
    check_in_interpreter(
        "shapes = [(i % 7,) for i in range(40)]\n"
        "bucket = max(buckets_of(loaded('lamb'), shapes), key=lambda b: len(b.shapes))\n"
        "trial = trial_of(subject, bucket, layout_of(bucket, 'float32'))\n"
        "trial.step({i: g for i, g in gradients(shapes, 1).items() if i % 5 == 3})\n"
        "trial.step({i: g for i, g in gradients(shapes, 2).items() if i == 39})\n"
    )


@pytest.mark.parametrize("name", ["adamw", "cautious_adamw"])
def test_steps_on_the_device_stay_or_are_scaled(name: str) -> None:
    check_in_interpreter(f"check_on_device(subject, loaded({name!r}), 'float16', {FEW})")


@pytest.mark.another
@pytest.mark.parametrize("name", [*kinds.KINDS, "came", "galore"])
def test_steps_of_every_kind_on_the_device_stay_or_are_scaled(name: str) -> None:
    check_in_interpreter(f"check_on_device(subject, loaded({name!r}), 'float16', MATRIX_SHAPES[3:])")


SCALARS = """
import numpy as np, torch
from rulec.backend.protocol import Scalars
from rulec.compiler.scalars import ScalarTable
from rulec.language.expr.node import Op, walk

def compare(name, bucket):
    program = bucket.program
    random = np.random.default_rng(1)
    call = trial_of(subject, bucket, layout_of(bucket, 'float32'), shapes=[(6, 4)] * 5).call
    table = ScalarTable(program.scalars)
    groups, counts = np.array([0, 1, 1, 0, 2]), np.array([0., 3., 3., 9., 100.])
    hyper = {k: random.uniform(0.1, 0.95, 3) for k in program.hyper}
    facts = {f: random.integers(2, 9, 5).astype(float) for f in table.facts}
    letters = {s: program.buffer(s).axes.letters for s in table.loads}
    states = {s: random.uniform(0.2, 2, 5 if 'n' in l else 3 if 'k' in l else 1) for s, l in letters.items()}
    levels = {'group': np.array([9., 3., 100.]), 'model': np.array([100.])}
    spread = {s: v if 'n' in letters[s] else v[groups] if 'k' in letters[s] else v[0] for s, v in states.items()}
    want, stored = table.evaluate(
        (5,), {k: v[groups] for k, v in hyper.items()}, counts + 1, facts, spread,
        {'group': levels['group'][groups], 'model': levels['model'][0]},
    )
    t = torch.from_numpy
    known = Scalars(
        t(counts.astype(np.float32)), t(groups), t(np.array(list(hyper.values())).reshape(len(hyper), 3)),
        {k: t(v) for k, v in facts.items()}, {k: t(v) for k, v in states.items()}, {k: t(v) for k, v in levels.items()},
    )
    found, new = call.scalars(known)
    made = found.numpy()
    assert made.shape == (5, len(program.columns)) and made.dtype == np.float64, name
    ulps = np.abs(made[:, : want.shape[1]] - want) / np.spacing(np.maximum(np.abs(want), 1e-300))
    assert (ulps <= 64).all(), (name, ulps.max())
    assert (made[:, want.shape[1] :] == 0).all(), name
    assert sorted(new) == sorted(stored), name
    for key, value in stored.items():
        assert np.allclose(new[key].numpy(), np.broadcast_to(value, (5,)), rtol=1e-14, atol=0), (name, key)

seen = 0
for name in NAMES:
    rule = loaded(name)
    for bucket in buckets_of(rule, [(6, 4)])[:1]:
        compare(name, bucket)
        seen += bool(bucket.program.scalars.columns)
"""


def scalar_programs(names: str) -> int:
    """Compares those of rules with NumPy's float64; how many there are. Of the 64 ulps some are lost where columns are
    differences of powers."""
    count: int = check_in_interpreter(f"NAMES = {names}\n{SCALARS}", "seen")
    return count


def test_scalar_programs_as_a_kernel() -> None:
    """Powers, choices, states of groups and of the model, exponentials, random numbers."""
    names = ["adamw", "nadam", "adan", "prodigy", "schedule_free_adamw", "ademamix", "adamp", "apollo_mini"]
    names += [kinds.WAVES]
    assert scalar_programs(repr(names)) == len(names)


@pytest.mark.parametrize("names", by_share(rulec.rules(), "scalar programs"))
def test_every_scalar_program_as_a_kernel(names: list[str]) -> None:
    assert scalar_programs(repr(names)) > len(names) / 2


# What is printed


def printed(name: str, dtype: str = "float32", **options: object) -> list[str]:
    bucket = buckets_of(loaded(name), [(64, 48)])[0]
    program, layout = kernel_for(bucket.program, dtype, **options)  # type: ignore[arg-type]
    return [line.strip() for line in TritonBackend().emit(program, layout).splitlines()]


def test_the_code_reads_like_the_rule() -> None:
    body = printed("lion", "bfloat16", states={"m": "float32"}, maximize=True)
    for line in (
        "g = -tl.load(g_at + start + i, mask=inside).to(tl.float32)",
        "m_new = beta2 * m + one_minus_beta2 * g",
        "direction = sign(c) + weight_decay * p",
        "tl.store(m_at + start + i, m_new, mask=inside)",
        "tl.store(p_at + start + i, to_bfloat16(p_new, EMULATED), mask=inside)",
        "p_at = tl.multiple_of(p_at.to(tl.pointer_type(tl.bfloat16)), 16 if ALL else 1)",
        "lr = tl.load(values + 5).to(tl.float32)",
        "aligned = (p_at | g_at | m_at) % 16 == 0",
    ):
        assert line in body, line
    assert [line.partition("(")[0] for line in body if line.startswith("def ")] == [
        "def to_bfloat16", "def sign", "def stage_0_blocks", "def stage_0", "def scalars",
    ]  # fmt: skip


def test_reductions_read_like_the_rule_too() -> None:
    body = printed("lamb")
    assert "for block in range(first, last):" in body
    assert [line for line in body if line.startswith("return tl.sum(")]
    assert [line for line in body if line.startswith("tl.store(slots + ")]
    assert "def finish(jobs, slots, results, LANES: tl.constexpr):" in body


def test_only_the_functions_that_are_called_are_printed() -> None:
    assert words_used("x = tl.exp(a) + my_exp(b) + m.log(c)") == []
    assert words_used("x = power(a, b)") == [WORDS[n] for n in ("power_of_any", "power")]
    assert words_used("x = sigmoid(a)") == [WORDS[n] for n in ("power_of_two", "exp", "sigmoid")]
    assert words_used("x = power_64(a, b)") == [
        WORDS[n] for n in ("power_of_any", "exact_product", "log_in_two", "power_64")
    ]


@pytest.mark.parametrize(
    ("value", "compute", "text"),
    [
        (0.5, "float64", "0.5"),
        (0.1, "float32", "0.1"),
        (0.1, "float64", "tl.full((), 0.1, tl.float64)"),
        (-0.0, "float64", "-0.0"),
        (1e-46, "float32", "tl.full((), 1e-46, tl.float32)"),
        (1e300, "float64", "tl.full((), 1e+300, tl.float64)"),
        (float("-inf"), "float32", '-float("inf")'),
        (float("nan"), "float32", 'float("nan")'),
    ],
)
def test_numbers_keep_the_compute_dtype(value: float, compute: str, text: str) -> None:
    assert constant(value, compute) == text


def test_an_operation_without_a_word_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    from rulec_backends.triton import ops as triton_ops

    monkeypatch.delitem(triton_ops._WORDS, triton_ops.Op.CBRT)  # type: ignore[arg-type]
    program = compile(rulec.load("madgrad"))
    with pytest.raises(BackendUnsupported) as caught:
        TritonBackend().emit(program, layout_for(program, "float32"))
    assert str(caught.value) == (
        "backend 'triton' cannot express 'cbrt' of rule 'MADGRAD': choose another backend (`rulec doctor` lists them)"
    )


@pytest.mark.parametrize(
    ("triton", "numpy", "fails"),
    [("3.6.0", "2.4.0", True), ("3.6.0+git1", "3.0", True), ("3.6.0", "2.3.5", False), ("3.7.1", "2.5.2", False)],
)
def test_an_interpreter_that_fails_beside_its_numpy_is_named(triton: str, numpy: str, fails: bool) -> None:
    fault = f"the interpreter of Triton {triton} fails with NumPy {numpy}: it needs Triton 3.7, or NumPy below 2.4"
    assert interpreter_fault(triton, numpy) == (fault if fails else "")


def test_tests_in_such_an_interpreter_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_process, "version", {"triton": "3.6.0", "numpy": "2.5.2"}.__getitem__)
    with pytest.raises(pytest.skip.Exception, match="fails with NumPy"):
        check_in_interpreter("pass")


# Where it cannot run


def test_without_a_gpu_it_says_so_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    reason = TritonBackend().unavailable_reason()
    assert reason == "torch finds no GPU: use another backend, or set TRITON_INTERPRET=1 to run Triton's interpreter"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert TritonBackend().unavailable_reason() is None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert TritonBackend().unavailable_reason() == f"triton is not installed: {extras.command('triton', 'torch')}"


def test_a_driver_that_triton_does_not_find_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    triton_backend._driver_trouble.cache_clear()
    reason = TritonBackend().unavailable_reason()
    triton_backend._driver_trouble.cache_clear()
    assert reason is not None
    assert reason.startswith("Triton does not find the driver of the GPU that torch finds (")
    assert "\n" not in reason


def test_tensors_in_main_memory_or_on_two_devices_are_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    program = compile(rulec.load("sgd"))
    layout = layout_for(program, "float32")
    monkeypatch.setattr(triton_backend, "_kernels", lambda name, source: {})
    kernel = TritonBackend().build(program, layout, "")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(TensorError) as caught:
        kernel.bind([torch.zeros(3, device="meta"), torch.zeros(3)], [{}, {}])
    assert str(caught.value) == (
        "SGD: parameter 1 is in main memory, which the triton backend does not reach: move it to a GPU, or choose the "
        "backend cpu"
    )
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(TensorError) as caught:
        kernel.bind([torch.zeros(3, device="meta"), torch.zeros(3)], [{}, {}])
    assert str(caught.value) == (
        "SGD: the triton backend updates tensors of one device at a time, and was given some on cpu and meta: move "
        "them to one, or bind those of each device on their own"
    )
    with pytest.raises(BackendUnsupported, match="an update of arrays other than PyTorch's"):
        kernel.bind([object()], [{}])


def test_what_triton_cannot_compile_is_one_sentence_and_nothing_is_written() -> None:
    program = """
import torch
from triton.runtime.errors import PTXASError
from rulec.errors import BackendUnavailable
program = rulec.compile(rulec.load('sgd'))
kernel = subject.kernel(program, layout_for(program, 'float32'))
param = torch.ones(3)
call = kernel.bind([param], [{}])

class Broken:
    def __getitem__(self, grid):
        def launch(*arguments, **options):
            raise PTXASError('no kernel for sm_10\\nand more')
        return launch

call._works[0].launcher.kernel = Broken()
try:
    from rulec.backend.protocol import Rows
    import numpy as np
    call(0, [torch.ones(3)], Rows(np.ones((1, len(program.columns))), np.zeros(1, np.int64)))
except BackendUnavailable as error:
    message = str(error)
"""
    message, param = check_in_interpreter(program, "[message, param.tolist()]")
    assert message.startswith("Triton cannot compile SGD for Triton's interpreter: ")
    assert message.endswith(": choose another backend (`rulec doctor` lists them)")
    assert "no kernel for sm_10" in message
    assert "\n" not in message
    assert param == [1.0, 1.0, 1.0]
