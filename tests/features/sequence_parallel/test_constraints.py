from tests.features.resolving import active, not_checked, overrides, refusals


def test_it_brings_tensor_parallel_along():
    assert active("sequence-parallel", world_size=2, tp=2) == ["tensor-parallel", "sequence-parallel"]


def test_one_tensor_parallel_rank_has_nothing_to_share():
    assert refusals("sequence-parallel", tp=1) == [
        "MS304 sequence-parallel: sequence-parallel shares the sequence among tensor-parallel ranks, but tp is 1 "
        "| --tp 2 or more, or remove sequence-parallel"
    ]


def test_the_sequence_is_a_multiple_of_its_shares():
    assert refusals("sequence-parallel", tp=4, seq_length=60) == []
    assert refusals("sequence-parallel", tp=4, seq_length=62) == [
        "MS304 sequence-parallel: sequence length 62 is not divisible by tp x cp = 4 x 1 | --seq-length N (a multiple of 4 x 1)"
    ]


def test_a_sequence_of_unknown_length_is_not_checked():
    rows = not_checked("sequence-parallel", tp=2)
    assert "'sequence length ? is not divisible by tp x cp = 2 x 1' depends on seq_length; give --seq-length" in rows


def test_it_switches_megatrons_flag_on():
    assert overrides("sequence-parallel") == {"sequence_parallel": True}
