from tests.features.resolving import not_checked


def test_a_sequence_of_unknown_length_is_not_checked():
    rows = not_checked("sequence-parallel", tp=2)
    assert "'sequence length ? is not divisible by tp x cp = 2 x 1' depends on seq_length; give --seq-length" in rows
