from types import SimpleNamespace
from typing import Any

import pytest

from mindspeed.features.gloo_free_checkpoint.feature import unsuited_shards
from mindspeed.plugins import MindSpeedError


@pytest.mark.parametrize(
    ("instances", "fsdp", "found"),
    [
        (1, False, []),
        (2, False, ["2 instances of the distributed optimizer hold copies of one shard"]),
        (1, True, ["Megatron FSDP keeps no optimizer shards in buffers"]),
    ],
)
def test_shards_of_an_optimizer_that_exists_are_judged(instances: int, fsdp: bool, found: list[str]) -> None:
    ddp = SimpleNamespace(num_distributed_optimizer_instances=instances, use_megatron_fsdp=fsdp)
    optimizer = SimpleNamespace(chained_optimizers=[SimpleNamespace(ddp_config=ddp)])
    feature: Any = None
    assert list(unsuited_shards(feature, optimizer)) == found


def test_a_checkpoint_of_another_size_is_refused() -> None:
    from mindspeed.features.gloo_free_checkpoint.state import scatter_state

    group, buffer = SimpleNamespace(rank=lambda: 0), SimpleNamespace(numel_unpadded=96, buckets=[])
    optimizer = SimpleNamespace(
        data_parallel_group=group,
        split_state_dict_if_needed=lambda state: None,
        gbuf_ranges=[{"bf16": []}],
        buffers=[buffer],
    )
    scatter_state(optimizer, {0: {"bf16": {"numel_unpadded": 96}}})
    with pytest.raises(MindSpeedError) as error:
        scatter_state(optimizer, {0: {"bf16": {"numel_unpadded": 64}}})
    assert str(error.value) == (
        "MS602 the checkpoint has 64 elements in buffer 0, but the run has 96\n"
        "  fix: resume with the model and the layout that the checkpoint was saved with"
    )


def test_the_format_of_before_2024_is_refused() -> None:
    from mindspeed.features.gloo_free_checkpoint.state import scatter_state

    with pytest.raises(MindSpeedError) as error:
        scatter_state(None, None, update_legacy_format=True)
    assert str(error.value) == (
        "MS602 the checkpoint has a format from before 2024\n  fix: load and save it once without gloo-free-checkpoint"
    )
