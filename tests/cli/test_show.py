"""`rulec show`."""

from __future__ import annotations

import pytest

import rulec
from rulec.backend import registry
from rulec.compiler.layout import kernel_for, layout_for
from rulec.language.statistics import NORMS, watched
from tests.cli.running import error, run, run_json


@pytest.mark.parametrize("backend", ["numpy", "cpu", "jax", "c"])
def test_the_source_is_what_the_backend_emits(backend: str) -> None:
    program = rulec.compile(rulec.load("adamw"))
    expected = registry.get(backend).emit(program, layout_for(program, "float32"))
    assert run("show", "adamw", "--backend", backend) == expected.rstrip("\n") + "\n"


def test_dtypes_of_parameters_and_states_are_chosen() -> None:
    shown = run("show", "momentum", "--dtype", "bfloat16", "--state-dtype", "float32")
    assert "load_bfloat16(p_at" in shown
    assert "load_float32(m_at" in shown


def test_a_state_that_is_rounded_at_random_is_cut_as_it_is_stored() -> None:
    shown = run("show", "adamw", "--backend", "c", "--state-dtype", "v=bfloat16_sr")
    assert shown.count("coarse(v_new, chance(") == 1
    assert "coarse(m_new" not in shown
    passes = run("show", "adagrad", "--passes", "--state-dtype", "bfloat16_sr")
    assert "store s = coarse(s_new, chance(s, seed_low, seed_high, number, " in passes
    assert "x0 of Prodigy cannot be bfloat16_sr" in error("show", "prodigy", "--state-dtype", "x0=bfloat16_sr")


def test_passes_shows_the_program_after_each() -> None:
    shown = run("show", "nadam", "--passes")
    titles = [line for line in shown.splitlines() if line.startswith("# after ")]
    assert titles[0] == "# after lower"
    assert titles[-2:] == ["# after split_stages", "# after choose_rereads"]
    assert "store mu_product" in shown


def test_yaml_is_a_rule_file_of_the_same_rule() -> None:
    written = rulec.parse(run("show", "adam + decay", "--yaml"))
    assert written.step == (rulec.load("adam") + rulec.load("decay")).step


def test_an_update_in_the_epilogue_of_a_product() -> None:
    shown = run("show", "lion", "--backend", "triton", "--epilogue", "--dtype", "bfloat16")
    assert "tl.dot(" in shown
    assert "c = beta1 * m + one_minus_beta1 * g" in shown
    refused = error("show", "lion", "--epilogue")
    assert refused == "error: --epilogue shows a kernel that triton has and cpu has not: give --backend triton\n"


def test_an_update_by_noise() -> None:
    shown = run("show", "lion", "--backend", "cupy", "--estimate", "popcount")
    assert "Lion with a sum of popcount noise as its gradient, by the cupy backend" in shown
    assert run_json("show", "lion", "--backend", "c", "--estimate", "normal")["kind"] == "estimate"
    refused = error("show", "lion", "--backend", "jax", "--estimate", "popcount")
    assert refused == "error: --estimate shows a kernel that cpu, c, cupy and triton have and jax has not\n"
    mistaken = error("show", "lion", "--estimate", "norml")
    assert "there is no noise 'norml'; did you mean 'normal'?: give normal, rademacher, popcount" in mistaken


def test_latex_is_an_aligned_block() -> None:
    shown = run("show", "adam", "--latex")
    assert shown.startswith("\\begin{aligned}")
    assert r"\hat{m}" in shown


def test_analysis_is_what_is_proved() -> None:
    shown = run("show", "clip_by_value >> momentum", "--analysis")
    assert shown.rstrip("\n") == str((rulec.load("clip_by_value") >> rulec.load("momentum")).analysis)
    assert "accumulates" in shown
    assert run_json("show", "sgd", "--analysis")["kind"] == "analysis"


def test_json_says_what_it_is() -> None:
    shown = run_json("show", "sgd", "--backend", "cpu")
    assert (shown["rule"], shown["kind"], shown["backend"]) == ("SGD", "source", "cpu")
    assert shown["text"].rstrip("\n") == run("show", "sgd").rstrip("\n")


def test_mistakes() -> None:
    assert "there is no backend 'cpuu'; did you mean 'cpu'?" in error("show", "adam", "--backend", "cpuu")
    for device in ("cuda", "GPU"):
        assert "; did you mean 'cupy' or 'triton'?: installed are c, cpu" in error("show", "adam", "--backend", device)
    assert "there is no dtype 'float31'" in error("show", "adam", "--dtype", "float31")
    assert "there is no state dtype 'half'; did you mean 'float16'" in error("show", "adam", "--state-dtype", "half")
    for word in ("8bit", "8-bit", "int8 state", "fp8", "uint8"):
        message = error("show", "adam", "--state-dtype", word)
        assert f"there is no state dtype {word!r}; did you mean 'dynamic8'?: use float32, " in message
    assert "no state 'w'" in error("show", "adam", "--state-dtype", "w=int8")


def test_the_kernel_that_measures_statistics_says_what_they_cost() -> None:
    shown = run("show", "adamw", "--backend", "c", "--watch", "norms", "--watch", "top=max(v)")
    first, kernel = shown.split("\n", 1)
    assert first.endswith("28 bytes moved, 28 without; 1 stage, 1 without; 7 reductions, 0 without")
    assert first.startswith("// grad_norm, ")
    rule = rulec.load("adamw").standalone()
    program = rulec.compile(rule, watch=watched(rule, {**NORMS, "top": "max(v)"}))
    assert kernel == registry.get("c").emit(*kernel_for(program, "float32")).rstrip("\n") + "\n"


@pytest.mark.parametrize("backend", ["numpy", "cpu", "c", "cupy", "triton", "jax"])
def test_every_backend_shows_statistics(backend: str) -> None:
    plain, shown = (
        run("show", "lamb", "--backend", backend),
        run("show", "lamb", "--backend", backend, "--watch", "trust"),
    )
    assert shown.split("\n", 1)[0].endswith("40 bytes moved, 40 without; 2 stages, 2 without; 2 reductions, 2 without")
    assert run("show", "lamb", "--backend", backend, "--watch", "x=max(v)").split("\n", 1)[1] != plain


def test_passes_show_statistics_as_stores() -> None:
    assert "store statistics.trust = " in run("show", "lamb", "--passes", "--watch", "trust")


def test_a_statistic_that_a_rule_has_not_is_an_error() -> None:
    assert "LAMB has no statistic 'trusts': name one of trust_ratio.trust, norms" in error(
        "show", "lamb", "--watch", "trusts"
    )
    assert "unknown name 'mm' in the statistic x" in error("show", "adamw", "--watch", "x=norm(mm)")
