"""The RMSNorm operator against Megatron's norm."""

from __future__ import annotations

import pytest

from tests.conftest import Prove

pytestmark = pytest.mark.long


def test_the_operator_trains_as_the_norm_of_megatron(prove: Prove) -> None:
    assert prove("rms-norm").problems == []


def test_the_operator_trains_as_the_norm_of_megatron_in_bf16(prove: Prove) -> None:
    assert prove("rms-norm", world={"dtype": "bf16"}).problems == []


def test_the_operator_sums_its_gradient_under_sequence_parallel(prove: Prove) -> None:
    assert prove("rms-norm", "sequence-parallel").problems == []
