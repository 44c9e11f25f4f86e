import pytest

from tests.features.resolving import active, not_checked, overrides, refusals


def test_every_split_dimension_that_divides_is_accepted():
    assert refusals(tp=2) == refusals(tp=4) == refusals(tp=8) == []


@pytest.mark.parametrize(
    ("world", "refusal"),
    [
        ({"num_attention_heads": 6}, "6 attention heads are not divisible by tp=4 | --tp N (a divisor of 6)"),
        (
            {"num_query_groups": 3},
            "3 query groups are neither a multiple nor a divisor of tp=4 | --tp N (a divisor of 3)",
        ),
        ({"ffn_hidden_size": 250}, "ffn_hidden_size 250 is not divisible by tp=4 | --tp N (a divisor of 250)"),
        ({"vocab_size": 510}, "vocabulary size 510 is not divisible by tp=4 | pad the vocabulary to a multiple of 4"),
    ],
)
def test_a_dimension_that_does_not_divide_is_refused(world, refusal):
    assert refusals(tp=4, **world) == [f"MS304 tensor-parallel: {refusal}"]
    assert refusals(tp=1, **world) == []


def test_fewer_query_groups_than_ranks_are_accepted_when_they_divide_the_ranks():
    assert refusals(tp=4, num_query_groups=2) == []


def test_a_moe_model_needs_sequence_parallelism_beside_tensor_parallelism():
    refused = [
        "MS205 tensor-parallel needs one of sequence-parallel, because Megatron trains MoE layers under tensor "
        "parallelism only with sequence parallelism | add one of sequence-parallel to the features"
    ]
    assert refusals(tp=2, num_experts=4) == refused
    assert refusals("sequence-parallel", tp=2, num_experts=4) == []
    assert refusals(tp=1, num_experts=4) == []


def test_a_model_of_unknown_shape_is_not_checked():
    assert not_checked(tp=2) == [
        "'RequiresAny sequence-parallel' depends on num_experts; give --num-experts",
        "'? attention heads are not divisible by tp=2' depends on num_attention_heads; give --num-attention-heads",
        "'? query groups are neither a multiple nor a divisor of tp=2' depends on num_query_groups; give --num-query-groups",
        "'ffn_hidden_size ? is not divisible by tp=2' depends on ffn_hidden_size; give --ffn-hidden-size",
        "'vocabulary size ? is not divisible by tp=2' depends on vocab_size; give --vocab-size",
    ]


def test_the_size_reaches_megatron_under_its_name():
    assert active(tp=8) == ["tensor-parallel"]
    assert overrides("tensor-parallel", size=8) == {"tensor_model_parallel_size": 8}
