from types import SimpleNamespace
from typing import Any

import pytest

from mindspeed.features.gloo_free_checkpoint.model_conditions import unsuited_shards
from mindspeed.plugins import MindSpeedError
from tests.features.resolving import active, overrides, refusals

NAME = "gloo-free-checkpoint"


def test_no_gloo_group_is_made_and_none_is_asked_for() -> None:
    assert overrides(NAME) == {"create_gloo_process_groups": False, "use_gloo_process_groups": False}


def test_features_that_take_main_weights_away_are_around_it() -> None:
    names = active("swap-optimizer", "reuse-fp32-param", NAME, dtype="bf16")
    assert names[-3:] == [NAME, "reuse-fp32-param", "swap-optimizer"]


def test_an_empty_slice_is_refused() -> None:
    assert refusals(NAME, settings={NAME: {"slice": 0}}) == [
        f"MS301 {NAME}.slice is 0: input should be greater than or equal to 1 | "
        f"--set {NAME}.slice=10485760 (elements of a shard that travel at a time)"
    ]
    assert refusals(NAME, settings={NAME: {"slice": 1}}) == []


def test_an_optimizer_with_other_states_is_refused() -> None:
    assert refusals(NAME, optimizer="adam") == refusals(NAME) == []
    assert refusals(NAME, optimizer="sgd") == [
        f"MS304 {NAME}: the optimizer sgd has other states than exp_avg and exp_avg_sq, which {NAME} saves "
        f"| --optimizer adam, or remove {NAME}"
    ]


@pytest.mark.parametrize(
    ("instances", "fsdp", "found"),
    [
        (1, False, []),
        (2, False, ["2 instances of the distributed optimizer have copies of one shard"]),
        (1, True, ["Megatron FSDP has no shards in buffers"]),
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
        "MS602 the checkpoint has 64 elements in buffer 0, and the run has 96\n"
        "  fix: resume with the model and the layout that it was saved with"
    )


def test_the_format_of_before_2024_is_refused() -> None:
    from mindspeed.features.gloo_free_checkpoint.state import scatter_state

    with pytest.raises(MindSpeedError) as error:
        scatter_state(None, None, update_legacy_format=True)
    assert str(error.value) == (
        "MS602 the checkpoint has the format of before 2024\n  fix: load and save it once without gloo-free-checkpoint"
    )
