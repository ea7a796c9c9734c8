"""Every rule, wrapper and file that the manual shows runs on every backend."""

from __future__ import annotations

import pytest

import rulec
from rulec.testing import IEEE, CupyKind
from rulec.testing.conformance import _subject, check_rule
from rulec.testing.trial import Subject
from rulec.testing.whole import check_whole
from rulec_backends.cupy import CupyBackend
from tests.backends import cuda_stand_in
from tests.backends.triton_process import check_in_interpreter
from tests.docs.shown import shown_rules
from tests.library import in_share


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, rulec.Rule]:
    return shown_rules(tmp_path_factory.mktemp("manual"))


def chosen(shown: dict[str, rulec.Rule], share: str, backend: str) -> list[rulec.Rule]:
    """All of them, or a backend's share."""
    return [shown[name] for name in (shown if share == "all" else in_share(shown, f"shown {backend}"))]


#: Of the rules that a test runs; for `make whole` all.
by_share = pytest.mark.parametrize(
    "share",
    [pytest.param("some", marks=pytest.mark.slow), pytest.param("all", marks=[pytest.mark.slow, pytest.mark.whole])],
)


def check(subject: Subject, rule: rulec.Rule) -> None:
    check_rule(subject, rule, "float32", [(), (7,), (0,), (33, 65)])
    check_whole(subject, rule)


def test_rules_of_every_kind_are_found(shown: dict[str, rulec.Rule]) -> None:
    files, functions = {"TwoSpeeds", "StateForms", "DroppedAdam", "ClippedLion"}, {"TemperedAdam", "CarefulAdam"}
    assert files | functions | {"L2ThenSignForMatrices", "Weighted", "Polyak"} <= shown.keys()


def test_a_mistake_is_no_rule(shown: dict[str, rulec.Rule]) -> None:
    assert "Mistake" not in shown


@pytest.mark.slow
def test_numpy_runs_all_of_them(shown: dict[str, rulec.Rule]) -> None:
    for rule in shown.values():
        check_whole(_subject("numpy", None, None), rule)


@pytest.mark.parametrize("backend", ["cpu", "c"])
def test_kernels_run_one_with_an_arm_that_does_nothing(backend: str, shown: dict[str, rulec.Rule]) -> None:
    check_whole(_subject(backend, None, None), shown["DroppedAdam"])


@by_share
@pytest.mark.parametrize("backend", ["cpu", "c", "jax"])
def test_kernels_run_all_of_them(backend: str, shown: dict[str, rulec.Rule], share: str) -> None:
    for rule in chosen(shown, share, backend):
        check(_subject(backend, None, None), rule)


@by_share
@pytest.mark.skipif(bool(cuda_stand_in.MISSING), reason=cuda_stand_in.MISSING or "g++ is here")
def test_cuda_c_of_all_of_them_runs_on_the_processor(shown: dict[str, rulec.Rule], share: str) -> None:
    with cuda_stand_in.installed():
        for rule in chosen(shown, share, "cupy"):
            check(Subject(CupyBackend(threads=64), CupyKind(), IEEE), rule)
        cuda_stand_in.flush()


@by_share
def test_triton_runs_all_of_them_in_its_interpreter(shown: dict[str, rulec.Rule], share: str) -> None:
    texts = [rule.to_yaml() for rule in chosen(shown, share, "triton")]
    program = f"for text in {texts!r}:\n    check_rule(subject, rulec.parse(text), 'float32', [(), (7,), (33, 65)])"
    check_in_interpreter(program)
