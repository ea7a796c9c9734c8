"""Products with an update as their epilogue, in Triton: in its interpreter, in assembly, and as text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

import rulec
from rulec.compiler.layout import layout_for
from rulec.errors import BackendUnsupported
from rulec_backends.triton import TritonBackend
from rulec_backends.triton.epilogue import EpilogueStage
from rulec_backends.triton.product import Tile, tile_for, tiles_for
from tests import ledger
from tests.backends import triton_products
from tests.backends.kinds import ELEMENTWISE
from tests.backends.triton_compiled import CHECKERS
from tests.backends.triton_process import check_in_interpreter as in_the_interpreter
from tests.backends.triton_products import Product, compiled_products, product_source
from tests.library import by_share

# In the interpreter

BITS = """
from tests.backends.epilogues import SHAPES, TOKENS, same_bits
failed = []
"""


@pytest.mark.parametrize(
    ("dtype", "factors"),
    [("bfloat16", "bfloat16"), pytest.param("float32", "float32", marks=pytest.mark.slow),
     pytest.param("float32", "bfloat16", marks=pytest.mark.slow),
     pytest.param("float16", "float16", marks=pytest.mark.slow),
     pytest.param("bfloat16", "float32", marks=pytest.mark.slow)],
)  # fmt: skip
def test_an_update_by_factors_has_the_bits_of_one_by_their_product(dtype: str, factors: str) -> None:
    """Whole tiles and ends of them, any number of tokens; factors whose product is exact, but for its own rounding."""
    program = f"""{BITS}
for i, shape in enumerate(SHAPES):
    for tokens in (TOKENS[i % 4], TOKENS[(i + 1) % 4])[: 1 + (i < 2 and {dtype!r} != 'bfloat16')]:
        if not same_bits('adamw', {dtype!r}, {factors!r}, shape, tokens):
            failed.append([shape, tokens])
"""
    assert in_the_interpreter(program, "failed") == []


@pytest.mark.slow
def test_wide_states_ascent_steps_that_stay_and_scaled_gradients() -> None:
    program = f"""{BITS}
found = [
    same_bits('adamw', 'bfloat16', 'bfloat16', (40, 70), 20, states='float32', maximize=True),
    same_bits('adamw', 'bfloat16', 'bfloat16', (40, 70), 20, stays=True, turned=True),
    same_bits('sgd', 'bfloat16', 'bfloat16', (40, 70), 20, turned=True),
    same_bits('sgd', 'bfloat16', 'bfloat16', (64, 128), 20, plain_tile=True),
    same_bits('sgd', 'bfloat16', 'bfloat16', (64, 70), 16, plain_tile=True),
    same_bits('lion', 'bfloat16', 'bfloat16', (40, 70), 20, stays=False, scale=3.0),
]
"""
    assert in_the_interpreter(program, "found") == [True] * 6


RULES = """
from tests.backends.epilogues import AsProducts
from rulec.backend import registry
from rulec_backends.triton.epilogue import fits
backend = registry.get('triton')
seen = 0
for name in NAMES:
    for bucket in buckets_of(loaded(name), [(33, 40)])[:1]:
        layout = layout_of(bucket, DTYPE, grad=GRAD)
        if not fits(bucket.program, layout):
            continue
        source = backend.emit_epilogue(bucket.program, layout, GRAD)
        kernel = AsProducts(backend.build_epilogue(bucket.program, layout, GRAD, source))
        trial = trial_of(subject, bucket, layout, shapes=[(33, 40), (7, 65)], kernel=kernel)
        for step in range(2):
            trial.step(gradients([(33, 40), (7, 65)], step))
        seen += 1
"""


SHARES = by_share(rulec.rules(), "epilogues")


@pytest.mark.parametrize(
    ("names", "dtype", "grad", "least"),
    [
        (["adamw", "lion"], "float32", "float32", 2),
        pytest.param([*ELEMENTWISE], "float32", "bfloat16", 5, marks=pytest.mark.slow),
        *(pytest.param(*p.values, "bfloat16", "bfloat16", 10, marks=p.marks, id=p.id) for p in SHARES),
    ],
)
def test_rules_are_within_the_bounds_of_their_definition(names: list[str], dtype: str, grad: str, least: int) -> None:
    """Every stage of one element beside the float64 reference; factors that make exactly the gradient given there."""
    program = f"NAMES, DTYPE, GRAD = {names!r}, {dtype!r}, {grad!r}\n{RULES}"
    assert in_the_interpreter(program, "seen") >= least


# In assembly


def check(found: Product) -> None:
    """Products by the tensor cores, 16 bytes of everything at a time, and nothing in local memory."""
    assert found.products > 0, found.kernel
    assert found.local == 0, found.kernel
    assert found.stack == 0, found.kernel
    assert found.wide_stores == found.stores > 0, found.kernel
    assert found.approximate == [], found.kernel


def check_products(target: str, rules: Sequence[str], states: str = "", most: int = 9) -> None:
    """Proves the kernels of the rules whose text, compiler or check changed since they were proved."""
    known = ledger.checker(Path(__file__), Path(triton_products.__file__), *CHECKERS)
    tiles = len(tiles_for("bfloat16", None if target.startswith("hip") else int(target[5:-1]))[:most])
    instruction = {"cuda:90": {"wgmma"}, "hip:gfx942": {"mfma"}}.get(target)

    def compile_and_check(changed: list[str]) -> None:
        kernels = compiled_products(target, "bfloat16", changed, states=states, most=most)
        assert len(kernels) == len(changed) * tiles
        for one in kernels:
            check(one)
        assert instruction is None or {one.instruction for one in kernels} == instruction

    claims = {rule: ledger.digest(known, target, str(most), product_source(rule, "bfloat16", states)) for rule in rules}
    ledger.prove(claims, compile_and_check)


@pytest.mark.proof
@pytest.mark.parametrize("target", ["cuda:90", "hip:gfx942"])
def test_the_kernel_of_adamw_uses_tensor_cores_and_spills_nothing(target: str) -> None:
    check_products(target, ["adamw"], most=1)


@pytest.mark.slow
@pytest.mark.proof
@pytest.mark.parametrize("target", ["cuda:80", "cuda:90", "cuda:100", "hip:gfx942"])
@pytest.mark.parametrize("states", ["", "float32"])
def test_the_kernels_of_other_rules(target: str, states: str) -> None:
    check_products(target, ["adamw", "sgd", "lion"], states=states)


# Tiles


def test_tiles_are_as_large_as_leaves_one_for_each_processor() -> None:
    tiles = tiles_for("bfloat16", 9)
    assert tile_for(tiles, 14336, 4096, 132) == tiles[0]
    assert tile_for(tiles, 1024, 1024, 132) == tiles[-1]
    assert tile_for(tiles, 10, 10, 132) == tiles[-1]
    assert [tile.count(1000, 1000) for tile in tiles] == sorted(tile.count(1000, 1000) for tile in tiles)


def test_tiles_divide_into_their_parts() -> None:
    for factors in ("float32", "bfloat16"):
        for capability in (None, 8, 9, 10, 12):
            for tile in tiles_for(factors, capability):
                assert tile.wide % tile.parts == 0
                assert all(n & (n - 1) == 0 for n in (tile.high, tile.wide, tile.deep, tile.parts))
    assert Tile(32, 64, 16, 4, 4, 1).count(33, 64) == 2


# As text


def test_the_code_reads_like_the_rule() -> None:
    program = rulec.compile(rulec.load("lion"))
    source = TritonBackend().emit_epilogue(program, layout_for(program, "bfloat16", maximize=True), "bfloat16")
    lines = [line.strip() for line in source.splitlines()]
    for line in (
        "g = -gradient",
        "m_new = beta2 * m + one_minus_beta2 * g",
        "direction = sign(c) + weight_decay * p",
        "total = tl.dot(tl.trans(output), input, total, input_precision=PRECISION)",
        "tl.store(p_at + start + i, to_bfloat16(p_new, EMULATED), mask=writable)",
    ):
        assert line in lines, line
    assert not [line for line in lines if "g_at" in line], "there is no gradient in memory"


def test_names_of_a_rule_give_way_to_those_of_the_kernel() -> None:
    rule = rulec.parse(
        "name: R\nstate: {tokens: 0}\nhyper: {total: 1.0}\nstep: |\n  tokens = total*g\n  direction = tokens\n"
    )
    program = rulec.compile(rule)
    stage = EpilogueStage(program, layout_for(program, "float32"), "float32")
    assert stage.names["tokens"] == "tokens_"
    assert [*stage.scalars] == ["total_"] or "total_" in stage.scalars


@pytest.mark.parametrize("rule", ["lamb", "muon", "adafactor"])
def test_what_is_no_epilogue_is_refused_in_one_sentence(rule: str) -> None:
    program = rulec.compile(rulec.load(rule))
    with pytest.raises(
        BackendUnsupported, match="cannot express reductions, matrix functions, other inputs or float64"
    ):
        TritonBackend().emit_epilogue(program, layout_for(program, "float32"), "float32")
    adamw = rulec.compile(rulec.load("adamw"))
    with pytest.raises(BackendUnsupported, match="in the epilogue of a product of rule 'AdamW'"):
        TritonBackend().emit_epilogue(adamw, layout_for(adamw, "float64"), "float32")
