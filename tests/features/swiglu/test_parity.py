"""The SwiGLU operator against Megatron's activation."""

import pytest

from tests.conftest import Prove
from tests.features.parity import given, trains

test_the_operator_trains_as_the_activation_of_megatron = trains(
    "swiglu", {"fp32": given(), "bf16": given(dtype="bf16"), "experts": given("expert-parallel")}
)


@pytest.mark.long
@pytest.mark.guards(48, processes=True)
def test_both_operators_compose_with_a_layout(prove: Prove) -> None:
    assert prove("swiglu", "rms-norm", "tensor-parallel", "pipeline-parallel").problems == []
