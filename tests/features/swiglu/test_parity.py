"""The SwiGLU operator against Megatron's activation."""

from __future__ import annotations

import pytest

from tests.conftest import Prove

pytestmark = pytest.mark.long


def test_the_operator_trains_as_the_activation_of_megatron(prove: Prove) -> None:
    assert prove("swiglu").problems == []


def test_the_operator_trains_as_the_activation_of_megatron_in_bf16(prove: Prove) -> None:
    assert prove("swiglu", world={"dtype": "bf16"}).problems == []


@pytest.mark.guards(48, processes=True)
def test_both_operators_compose_with_a_layout(prove: Prove) -> None:
    assert prove("swiglu", "rms-norm", "tensor-parallel", "pipeline-parallel").problems == []


def test_the_operator_is_the_activation_of_experts(prove: Prove) -> None:
    assert prove("swiglu", "expert-parallel").problems == []
