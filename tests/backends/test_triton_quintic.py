"""The products of `newton_schulz` in Triton: in its interpreter, in assembly, and as counts of tiles."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from rulec.errors import BackendUnsupported
from rulec_backends.triton import TritonBackend, quintic_call
from rulec_backends.triton.product import Tile, tiles_for
from rulec_backends.triton.quintic_call import QuinticProducts, count_half
from tests import ledger
from tests.backends import triton_compiled, triton_quintic
from tests.backends.quintics import FAULTS, SHAPES
from tests.backends.triton_process import check_in_interpreter as in_the_interpreter
from tests.backends.triton_quintic import Facts, cases, compiled

# In the interpreter


@pytest.mark.parametrize(
    ("dtype", "shapes"),
    [("bfloat16", SHAPES[:2]), ("float16", SHAPES[3:4]), pytest.param("bfloat16", SHAPES, marks=pytest.mark.slow),
     pytest.param("float16", SHAPES, marks=pytest.mark.slow)],
)  # fmt: skip
def test_products_of_whole_numbers_are_exact_but_for_one_rounding(dtype: str, shapes: Any) -> None:
    program = f"from tests.backends.quintics import wrong\nfailed = [wrong({dtype!r}, s) for s in {shapes!r}]"
    assert in_the_interpreter(program, "failed") == [[]] * len(shapes)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_kernel_is_found(fault: str) -> None:
    call = f"wrong('bfloat16', (2, 70, 66), fault={fault!r}, names=['gram'])"
    program = f"from tests.backends.quintics import wrong\nfailed = {call}"
    assert in_the_interpreter(program, "failed") == ["gram"]


def test_a_matrix_has_the_same_bits_in_every_stack_beside_nan_and_infinity() -> None:
    program = """
from tests.backends.quintics import depends_on_neighbours
failed = [depends_on_neighbours('bfloat16', shape) for shape in ((35, 48),)]
"""
    assert in_the_interpreter(program, "failed") == [[]]


def test_matrices_over_their_norms_have_torchs_bits() -> None:
    program = """
from tests.backends.quintics import divides_otherwise
shapes = (3, 40, 70), (1, 64, 96), (2, 33, 41)
found = [divides_otherwise(dtype, shape) for dtype in ('bfloat16', 'float16') for shape in shapes]
planted = divides_otherwise('bfloat16', (3, 40, 70), fault='a norm of its neighbour')
"""
    assert in_the_interpreter(program, "[any(found), planted]") == [False, True]


TRIANGLES = """
import torch, triton, triton.language as tl
from tests.backends.quintics import products
in_triangle = products('bfloat16')._kernel.fn.__globals__['in_triangle']

@triton.jit
def places(rows, columns, deep, TALL: tl.constexpr):
    number = tl.arange(0, 1024)
    row, column = in_triangle(number, deep, TALL)
    tl.store(rows + number, row)
    tl.store(columns + number, column)

failed = []
for tall in (1, 3, 8):
    for deep in range(1, 40, 1 + tall // 3):
        rows, columns = torch.zeros(2, 1024, dtype=torch.int32)
        places[(1,)](rows, columns, deep, TALL=tall)
        count = deep * (deep + 1) // 2
        found = [*zip(rows[:count].tolist(), columns[:count].tolist())]
        if sorted(found) != [(i, j) for i in range(deep) for j in range(i + 1)]:
            failed.append([tall, deep])
"""


def test_every_tile_on_and_below_the_diagonal_has_one_number() -> None:
    assert in_the_interpreter(TRIANGLES, "failed") == []


STEPS = """
import torch
import rulec.torch
from rulec_backends.triton import quintic_call

launches = []
launch = quintic_call.QuinticProducts._launch

def counted(self, left, right, added, out, *others):
    launches.append([*out.shape])
    return launch(self, left, right, added, out, *others)

def trained(optimizer, shapes, **keywords):
    drawn = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=drawn)) for shape in shapes]
    opt = optimizer(params, lr=0.02, ns_steps=2, **keywords)
    for p in params:
        p.grad = torch.randn(p.shape, generator=drawn)
    opt.step()
    return params

quintic_call.QuinticProducts._launch = counted
quintic_call._WORTH_HALVING = 32
shapes = [(40, 48), (70, 33), (8, 8), (40, 48)]
ours = trained(rulec.torch.Muon, shapes, backend='triton')
theirs = trained(torch.optim.Muon, shapes)
far = max(float((a - b).abs().max()) for a, b in zip(ours, theirs))
"""


@pytest.mark.peer
@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_steps_of_muon_are_torchs_within_its_rounding_and_take_three_launches_an_iteration_for_each_shape() -> None:
    """A step is lr of a matrix whose elements are below 1, and are rounded by a few 2**-9 of the largest."""
    launches, far = in_the_interpreter(STEPS, "[launches, far]")
    wide = [[2, 40, 40], [2, 40, 40], [2, 40, 48]]
    tall = [[1, 33, 33], [1, 33, 33], [1, 70, 33]]
    assert launches in ([*wide * 2, *tall * 2], [*tall * 2, *wide * 2])
    assert 0 < far < 0.02 * 2**-6


def test_the_iteration_is_as_near_to_that_in_float64_as_torchs() -> None:
    program = """
import torch
from rulec.torch.products import TORCH
from tests.backends.quintics import orthogonalized, products
far = []
for shape in ((1, 33, 48),):
    y = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    exact = orthogonalized(TORCH, y.double(), 3)
    found = [orthogonalized(by, y.bfloat16(), 3) for by in (products('bfloat16'), TORCH)]
    far.append([float((x.double() - exact).norm() / exact.norm()) for x in found])
"""
    for ours, theirs in in_the_interpreter(program, "far"):
        assert ours < 1.1 * theirs < 0.05


# In counts


class Recorder:
    """A kernel that only notes the number of programs of each launch, and its constants."""

    def __init__(self) -> None:
        self.programs: list[int] = []
        self.options: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(*_: Any, **options: Any) -> None:
            self.programs.append(grid[0])
            self.options.append(options)

        return launch


#: Tiles of Hopper without descriptors, which a tensor without memory has none of.
HOPPER = [Tile(t.high, t.wide, t.deep, t.parts, t.warps, t.stages) for t in tiles_for("bfloat16", 9)]


def launched(shape: tuple[int, int, int]) -> Recorder:
    """The launches of one iteration, on a GPU of 132 processors."""
    kernel = Recorder()
    by, y = QuinticProducts(kernel), torch.empty(shape, dtype=torch.bfloat16)
    with mock.patch.object(quintic_call, "machine", return_value=(HOPPER, 132)):
        by.following(y, by.polynomial(by.gram(y), 1.0, 1.0), 1.0)
    return kernel


@pytest.mark.parametrize(
    ("shape", "half", "whole"),
    [((2, 1600, 1600), 91, 91), ((1, 1600, 6400), 91, 13 * 25), ((3, 6400, 1600), 91, 50 * 7)],
)
def test_a_symmetric_product_computes_half_of_its_tiles_and_the_diagonal(
    shape: tuple[int, int, int], half: int, whole: int
) -> None:
    """Of 13 by 13 tiles of 128, 91; the other product takes tiles of 128 by 256."""
    kernel = launched(shape)
    assert kernel.programs == [shape[0] * n for n in (half, half, whole)]
    assert [o["HALF"] for o in kernel.options] == [True, True, False]
    assert half == (13 * 13 + 13) // 2


def test_tiles_depend_on_the_shape_of_a_matrix_and_not_on_the_stack() -> None:
    sizes = [[(o["HIGH"], o["WIDE"]) for o in launched((n, 512, 512)).options] for n in (1, 2, 50)]
    assert sizes[0] == sizes[1] == sizes[2] == [(64, 64)] * 3
    assert [(o["HIGH"], o["WIDE"]) for o in launched((1, 1024, 1536)).options] == [(128, 128), (128, 128), (128, 256)]


def test_a_small_matrix_has_small_tiles_and_a_smaller_one_none() -> None:
    by = QuinticProducts(Recorder())
    assert [by.pays(*sides) for sides in ((256, 300), (255, 3000), (3000, 255))] == [True, False, False]
    assert count_half(HOPPER[-1], 300) == 15
    assert launched((0, 300, 300)).programs == []


# In assembly


def check(facts: Facts) -> None:
    """Products by tensor cores; 16 bytes at a time; past registers, and on NVIDIA's GPUs none of them spilled."""
    assert facts.products > 0, facts.kernel
    assert facts.loads == facts.wide_loads > 0, facts.kernel
    assert facts.local == 0, facts.kernel
    assert facts.approximate == [], facts.kernel
    if facts.instruction == "mfma":
        assert facts.stack == 0, facts.kernel
        return
    assert facts.stores == facts.wide_stores > 0, facts.kernel
    assert facts.copies > 0, facts.kernel
    # Blackwell's kernels may keep the address of their sums there, before and after the loop.
    assert facts.stack <= 8 * (facts.instruction == "tcgen05"), facts.kernel


def check_kernels(target: str, dtype: str, kinds: str = "") -> None:
    """Proves the kernels for a target unless the text, the compiler and the check are the same as when last proved."""
    known = ledger.checker(*map(Path, (__file__, triton_quintic.__file__, triton_compiled.__file__)))
    instruction = {"cuda:80": "mma", "cuda:90": "wgmma", "cuda:100": "tcgen05", "hip:gfx942": "mfma"}[target]

    def compile_and_check(_: list[str]) -> None:
        kernels = compiled(target, dtype, kinds)
        assert len(kernels) == len(cases(target, dtype, kinds)) > 0
        assert {facts.instruction for facts in kernels} == {instruction}
        for facts in kernels:
            check(facts)

    every = str(cases(target, dtype, kinds))
    claim = ledger.digest(known, target, dtype, every, TritonBackend().emit_quintic(dtype))
    ledger.prove({"newton_schulz": claim}, compile_and_check)


@pytest.mark.proof
def test_the_kernel_for_a_hopper_gpu_uses_its_tensor_cores_and_spills_nothing() -> None:
    check_kernels("cuda:90", "bfloat16", "gram")


@pytest.mark.slow
@pytest.mark.proof
@pytest.mark.parametrize("target", ["cuda:80", "cuda:90", "cuda:100", "hip:gfx942"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_kernels_for_all_products_and_gpus(target: str, dtype: str) -> None:
    check_kernels(target, dtype)


# As text


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_other_dtypes_are_the_librarys(dtype: str) -> None:
    with pytest.raises(BackendUnsupported, match=f"products of matrices in {dtype}"):
        TritonBackend().emit_quintic(dtype)
