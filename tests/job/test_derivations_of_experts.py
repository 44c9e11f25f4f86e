"""The width of an expert, as Megatron makes it from the arguments of a job."""

import pytest

from mindspeed.job.derivations import expert_size


@pytest.mark.parametrize(
    ("values", "size"),
    [
        pytest.param({"num_experts": 4, "ffn_hidden_size": 96}, 96, id="that of the MLP"),
        pytest.param({"num_experts": 4, "hidden_size": 32}, 128, id="that of Megatron's MLP"),
        pytest.param({"num_experts": 4, "ffn_hidden_size": 96, "moe_ffn_hidden_size": 48}, 48, id="the given one"),
        pytest.param({"ffn_hidden_size": 96}, None, id="a dense model has no experts"),
    ],
)
def test_an_expert_is_as_wide_as_the_mlp_where_no_width_is_given(values, size) -> None:
    assert expert_size(values, ()) == size
