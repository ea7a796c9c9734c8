"""Random numbers of rules on a GPU."""

from __future__ import annotations

import pytest

from tests.backends.draws import unlike_known_steps, unlike_noise, unlike_the_stream

pytestmark = pytest.mark.gpu


def test_a_kernel_has_the_numbers_of_the_stream() -> None:
    assert unlike_the_stream() == []


def test_normal_numbers_have_the_bits_of_noise() -> None:
    assert unlike_noise("cuda") == []


def test_steps_on_the_device_are_rounded_towards_zero() -> None:
    assert unlike_known_steps("cuda") == []
