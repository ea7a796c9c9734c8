"""States in codes in kernels of the triton backend, by Triton's interpreter: they equal the definition bit for bit."""

from __future__ import annotations

from typing import Any

import pytest

import rulec
from rulec.backend import registry
from rulec.backend.capabilities import capabilities_of
from rulec.compiler.layout import layout_for, scheduled
from rulec.errors import BackendUnsupported
from rulec.formats import NAMES, parse
from rulec.formats.tables import table
from rulec.runtime.storage.quantized import kernel_of
from rulec_backends.triton.blocks import Block
from rulec_backends.triton.coded import halved, lengthened, words
from tests.backends.coded_training import signed, training, unsigned
from tests.backends.triton_process import check_in_interpreter, in_a_process

HEAD = """
import torch
from rulec.backend import registry
from rulec.formats import NAMES, parse
from tests.backends.coded_training import *
backend, memory = registry.get("triton"), Memory(torch.from_numpy, lambda tensor: tensor.numpy())
"""


def check_in_codes(program: str) -> None:
    check_in_interpreter(HEAD + program)


def test_both_states_of_adamw_in_each_format() -> None:
    check_in_codes(
        "for name in NAMES:\n"
        "    check(training('adamw', {'m': signed(name), 'v': unsigned(name)}, (5003,), memory), backend)"
    )


def test_every_code_and_values_beside_every_change_of_one() -> None:
    check_in_codes("from tests.backends.test_coded_bits import check_every_code\ncheck_every_code(backend, memory)")


def test_a_signed_state_with_a_floor() -> None:
    check_in_codes(
        "for name in NAMES:\n"
        "    form = parse(name).for_state(signed=True, floor=True)\n"
        "    check(training('adamw', {'m': form}, (2003,), memory), backend)"
    )


def test_several_chunks_and_blocks_longer_than_a_programs() -> None:
    check_in_codes(
        "formats = {'m': signed('int8/4096'), 'v': unsigned('dynamic8/2048')}\n"
        "check(training('adamw', formats, (20_001,), memory), backend)"
    )


def test_blocks_of_gpus_and_one_state_in_codes() -> None:
    check_in_codes(
        "from rulec_backends.triton import blocks\n"
        "blocks.INTERPRETED = blocks.DEFAULT\n"
        "for name in ('dynamic4', 'softsign8'):\n"
        "    check(training('adamw', {'v': unsigned(name)}, (4099,), memory), backend)"
    )


RUNS = """
import copy
import rulec.torch as rt
from rulec.formats import decode, encode, of_key

def rounded(optimizer, param, keys):
    for name, key in keys.items():
        values = optimizer.state[param][name]
        form = of_key(key)
        values.copy_(torch.from_numpy(decode(form, *encode(form, values.numpy()), tuple(values.shape))))

def run(name, state_dtype, dtype=torch.float32, **keywords):
    draws = torch.Generator().manual_seed(1)
    first = torch.randn(72, 80, generator=draws).to(dtype)
    params = [torch.nn.Parameter(first.clone()) for _ in range(2)]
    small = torch.nn.Parameter(torch.ones(5))
    make = getattr(rt, name)
    if state_dtype == "dynamic8":
        keywords["lr"] = 1e-2
    coded = make([params[0], small], backend="triton", state_dtype=state_dtype, **keywords)
    floats = make([params[1]], backend="triton", state_dtype="float32", **keywords)
    for step in range(2):
        grad = torch.randn(72, 80, generator=draws).to(dtype)
        small.grad = torch.ones(5)
        for param in params:
            param.grad = grad.clone()
        coded.step()
        floats.step()
        keys = coded.param_groups[0]["formats"]
        rounded(floats, params[1], keys)
        assert torch.equal(*params), (name, step)
        if step == 0:
            state = copy.deepcopy(coded.state_dict())
            coded = make([params[0], small], backend="triton", state_dtype=state_dtype, **keywords)
            coded.load_state_dict(state)
    for state, key in keys.items():
        held = coded.state[params[0]]
        values = decode(of_key(key), held[f"{state}::codes"].numpy(), held[f"{state}::scale"].numpy(), (72, 80))
        assert (values == floats.state[params[1]][state].numpy()).all(), (name, state)
    assert {x.dtype for k, x in coded.state[small].items() if x.dim() and k != "step"} == {torch.float32}
    return len(keys)
"""


def runs_in_codes(calls: str) -> list[int]:
    """How many states in codes a run of a torch optimizer has, each equal to floats rounded after each step."""
    counts: list[int] = check_in_interpreter(f"{HEAD}{RUNS}", f"[{calls}]")
    return counts


def test_a_run_of_torchs_is_a_run_in_floats_rounded_after_each_step() -> None:
    assert runs_in_codes("run('AdamW', 'dynamic8'), run('Lion', 'int8')") == [2, 1]


def test_parameters_of_other_dtypes_scalars_on_the_device_and_reductions() -> None:
    narrow = "run('AdamW', 'softsign8', torch.bfloat16, capturable=True, maximize=True)"
    assert runs_in_codes(f"{narrow}, run('LAMB', 'dynamic4', torch.float64)") == [2, 2]


STAYS = """
for name in ("LAMB", "AdamP"):
    draws = torch.Generator().manual_seed(0)
    param = torch.nn.Parameter(torch.randn(72, 80, generator=draws))
    optimizer = getattr(rt, name)([param], backend="triton", state_dtype="int8", capturable=True, lr=1e-2)
    optimizer.grad_scale = torch.tensor(4.0)
    before = []
    for infinite in (0.0, 1.0):
        optimizer.found_inf = torch.tensor(infinite)
        param.grad = 4*torch.randn(72, 80, generator=draws)
        optimizer.step()
        after = [param.detach().clone(), *(x.clone() for x in optimizer.state[param].values())]
        assert not infinite or all(map(torch.equal, before, after)), name
        before = after
    assert all(x.any() for x in after)
"""


def test_tensors_that_stay_keep_their_codes_and_scales() -> None:
    check_in_codes(f"{RUNS}{STAYS}")


def test_rows_and_columns_get_states_that_are_decoded_before_their_stages() -> None:
    assert runs_in_codes("run('AdamP', 'int8', capturable=True)") == [2]


BETWEEN = """
from tests.runtime.test_coded_between import READERS, SHAPE, rule_of

for reader in ("left", "rows"):
    make = rt.optimizer(rule_of(READERS[reader], "before"))
    draws = torch.Generator().manual_seed(1)
    params = [torch.nn.Parameter(torch.zeros(SHAPE)) for _ in range(2)]
    coded = make([params[0]], backend="triton", state_dtype={"m": "dynamic4"}, capturable=True)
    floats = make([params[1]], backend="triton", capturable=True)
    for step in range(3):
        grad = torch.randn(SHAPE, generator=draws)
        for param in params:
            param.grad = grad.clone()
        coded.step()
        floats.step()
        rounded(floats, params[1], coded.param_groups[0]["formats"])
        assert torch.equal(*params), (reader, step)
    assert params[0].any()
"""


@pytest.mark.slow
def test_a_product_before_the_update_reads_values_decoded_by_a_kernel() -> None:
    """By the kernel itself, and by one before a stage with rows."""
    check_in_codes(f"{RUNS}{BETWEEN}")


class Foreign:
    """A backend on a device without kernels for codes."""

    name, on_device = "foreign", True


def test_a_device_without_kernels_for_codes_refuses_them_with_a_remedy() -> None:
    program = rulec.compile(rulec.load("adam_mini"))
    kernel = scheduled(program, layout_for(program, "float32", formats={"m": signed("int8")}))
    assert not capabilities_of(registry.get("triton")).decodes(*kernel)
    backend: Any = Foreign()
    with pytest.raises(BackendUnsupported, match=r"'foreign' .* codes \(m\) .* state_dtype={'m': 'float32'}"):
        kernel_of(backend, *kernel, lambda _, like: like)


def test_blocks_of_a_program_are_multiples_of_those_of_formats_and_so_are_their_halves() -> None:
    assert lengthened(Block(1024, 128), [("m", parse("int8")), ("v", parse("dynamic8"))]) == Block(1024, 128)
    assert lengthened(Block(1024, 128), [("m", parse("int8/4096"))]) == Block(8192, 512)
    assert halved(Block(1024, 128)) == Block(512, 64)
    assert halved(Block(512, 64)) == Block(256, 64)


@pytest.mark.parametrize("name", NAMES)
def test_tables_are_there_for_the_formats_that_look_into_one(name: str) -> None:
    for form in (signed(name), unsigned(name)):
        case = training("adamw", {"m": form}, (4096,))
        text = registry.get("triton").emit(case.program, case.layout)
        assert ("tl.load(words + (code" in text) is bool(words(form).size)
        assert (" + cell)" in text) is (words(form).size > table(form).size)
        assert words(form)[: table(form).size].tobytes() in (table(form).tobytes(), b"")


COMPILED = """
import json, re
import triton
from rulec_backends.triton import TritonBackend
from rulec_backends.triton.blocks import block_for
from rulec_backends.triton.coded import REGISTERS, coded_in, halved, lengthened
from rulec_backends.triton.plan import moved
from tests.backends.coded_training import signed, training, unsigned
from tests.backends.triton_compiled import approximate, constants, made_for, memory

compiler = triton.compile

def bounded(target):
    # The compiler, with the bound of registers that a launch has.
    def compiled(source, target, options):
        return compiler(source, target=target, options=options | bound)
    bound = {"maxnreg": REGISTERS} if target.startswith("cuda") else {}
    return compiled

def facts(target, m, v):
    case = training("adamw", {"m": signed(m), "v": unsigned(v)}, (4096,))
    program, layout, stage = case.program, case.layout, case.program.stages[0]
    kernel = TritonBackend().build(program, layout, TritonBackend().emit(program, layout)).kernels["stage_0"]
    coded = coded_in(program, stage, layout)
    block = lengthened(halved(block_for(sum(moved(program, stage, layout)), target)), coded)
    triton.compile = bounded(target)
    made = made_for(target, kernel, constants(program, layout, 0, block), block.threads)
    text = made.asm.get("ptx") or made.asm["amdgcn"]
    found = re.findall("fma.rn.f32|v_fma_f32|v_fmac_f32", text)
    return [block.elements, block.threads, memory(made)[1], approximate(text), len(found)]
"""


@pytest.mark.parametrize("target", ["cuda:90", "hip:gfx942"])
@pytest.mark.parametrize(("m", "v"), [("dynamic4", "dynamic8"), ("dynamic8", "dynamic8"), ("softsign8", "int8")])
def test_kernels_compile_for_gpus_without_local_memory_or_approximations(target: str, m: str, v: str) -> None:
    facts = f"facts({target!r}, {m!r}, {v!r})"
    elements, threads, local, inexact, fused = in_a_process(f"{COMPILED}\nprint(json.dumps({facts}))\n")
    assert (elements, threads, local, inexact) == (512, 64, 0, [])
    # Two for each element of a thread in each of two quotients, in the loops over whole blocks and over others.
    # Divisions and roots of AMD's GPUs are exact by fused multiply-adds of their own.
    assert fused == 4 * (512 + 256) // threads or target.startswith("hip")
