"""The fixes that older Megatron versions need, one by one, beside whichever Megatron is installed."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

numpy_2 = pytest.mark.skipif(hasattr(np, "product"), reason="numpy 1 still has product, and the originals stay")


pytestmark = pytest.mark.usefixtures("on_cpu")


def shard(start: int | None, stop: int | None = None, shape: tuple[int, ...] = (2, 3), replica: int = 0) -> Any:
    part = None if start is None else slice(start, stop)
    return SimpleNamespace(key="weight", local_shape=shape, flattened_range=part, replica_id=replica, dtype=torch.bfloat16)


def unused(*args: Any) -> Any:
    raise AssertionError("the original calls numpy.product")


@numpy_2
def test_flattened_ranges_fill_their_shard_end_to_end():
    from mindspeed.megatron.fixes.numpy2 import check_coverage

    check = check_coverage(unused)
    check([shard(2, 6), shard(0, 2)])
    check([shard(0, 6), shard(0, 6, replica=1)])


@numpy_2
@pytest.mark.parametrize(
    "shards",
    [
        pytest.param([shard(0, 2), shard(3, 6)], id="a hole"),
        pytest.param([shard(0, 4), shard(2, 6)], id="an overlap"),
        pytest.param([shard(0, 2), shard(2, 5)], id="no end"),
        pytest.param([shard(1, 6)], id="no beginning"),
        pytest.param([shard(0, 2), shard(2, 6, shape=(3, 2))], id="another shape"),
    ],
)
def test_flattened_ranges_that_do_not_fill_their_shard_are_refused(shards):
    from megatron.core.dist_checkpointing.core import CheckpointingException

    from mindspeed.megatron.fixes.numpy2 import check_coverage

    with pytest.raises(CheckpointingException, match="do not fill the 6 elements of a shard of weight"):
        check_coverage(unused)(shards)


@numpy_2
def test_the_size_and_the_coordinates_of_a_shard():
    from megatron.core.dist_checkpointing.core import CheckpointingException

    from mindspeed.megatron.fixes.numpy2 import local_coordinates, shard_size

    assert shard_size(unused)(shard(None)) == 2 * 3 * 2
    assert shard_size(unused)(shard(1, 5)) == 4 * 2
    rows, columns = local_coordinates(unused)(shard(2, 5))
    assert (rows.tolist(), columns.tolist()) == ([0, 1, 1], [2, 0, 1])
    with pytest.raises(CheckpointingException, match="weight has no flattened range"):
        local_coordinates(unused)(shard(None))


def test_a_router_without_bias_is_a_linear_layer_in_its_own_dtype():
    from mindspeed.megatron.fixes.moe import gate_without_engine

    torch.manual_seed(0)
    tokens, weight = torch.randn(3, 8, dtype=torch.bfloat16), torch.randn(4, 8, dtype=torch.bfloat16)
    gated = gate_without_engine(unused)(tokens, weight, torch.float32)
    assert torch.equal(gated, tokens.float() @ weight.float().t())


def test_the_step_is_no_state_that_is_saved_in_slices():
    from mindspeed.megatron.fixes.optimizer import leave_step

    def states(self: Any, model_param: Any) -> dict[str, Any]:
        return {"param": model_param, "exp_avg": 1, "step": 2}

    assert leave_step(states)(None, "weight") == {"param": "weight", "exp_avg": 1}
