from __future__ import annotations

import pytest

from mindspeed.legacy.expert_flags import in_new_meaning
from mindspeed.legacy.flags import read_old_flags
from mindspeed.registry import catalog

SIZES = ["--tensor-model-parallel-size", "2", "--expert-model-parallel-size=4"]


def test_the_sequential_dispatcher_is_the_one_that_there_is():
    tokens, (note,) = in_new_meaning(["--moe-token-dispatcher-type", "alltoall_seq", "--lr", "1"], extends=False)
    assert tokens == ["--moe-token-dispatcher-type", "alltoall", "--lr", "1"]
    assert note == "--moe-token-dispatcher-type alltoall_seq means alltoall, the only all-to-all dispatcher since Megatron 0.14"


@pytest.mark.parametrize(("extends", "ranks"), [(True, 8), (False, 4)])
def test_the_expert_parallel_size_is_multiplied_where_it_counts_per_tensor_rank(extends, ranks):
    tokens, notes = in_new_meaning(SIZES, extends)
    assert tokens == [*SIZES[:2], f"--expert-model-parallel-size={ranks}"]
    assert notes == (
        ["--expert-model-parallel-size 4 with --moe-tp-extend-ep means 8 ranks with experts, 4 x tp 2"] if extends else []
    )


def test_old_flags_of_experts_are_read_with_them():
    old = read_old_flags([*SIZES, "--moe-tp-extend-ep", "--moe-token-dispatcher-type=alltoall_seq"], (), catalog())
    assert old.rest == (*SIZES[:2], "--expert-model-parallel-size=8", "--moe-token-dispatcher-type=alltoall")
    assert old.layer.features == ("moe-tp-extend-ep",)
    switch = read_old_flags(["--moe-permutation-async-comm", "--moe-token-dispatcher-type", "alltoall_seq"], (), catalog())
    assert switch.layer.features == ("moe-alltoall-dispatcher",)
