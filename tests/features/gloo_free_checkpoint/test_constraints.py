from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mindspeed.plugins import MindSpeedError, World
from tests.features.resolving import CATALOG, active, overrides, refusals

NAME = "gloo-free-checkpoint"


def built(optimizer: str = "adam", instances: int = 1, fsdp: bool = False) -> None:
    ddp = SimpleNamespace(num_distributed_optimizer_instances=instances, use_megatron_fsdp=fsdp)
    made: Any = CATALOG.feature(NAME)
    member = SimpleNamespace(ddp_config=ddp)
    made(made.Args(), World({})).optimizer_built(
        SimpleNamespace(config=SimpleNamespace(optimizer=optimizer), chained_optimizers=[member])
    )


def test_no_gloo_group_is_made_and_none_is_asked_for() -> None:
    assert overrides(NAME) == {"create_gloo_process_groups": False, "use_gloo_process_groups": False}


def test_features_that_take_main_weights_away_are_around_it() -> None:
    names = active("swap-optimizer", "reuse-fp32-param", NAME, dtype="bf16")
    assert names[-3:] == [NAME, "reuse-fp32-param", "swap-optimizer"]


def test_an_empty_slice_is_refused() -> None:
    assert refusals(NAME, settings={NAME: {"slice": 0}}) == [
        f"MS301 {NAME}.slice is 0: input should be greater than or equal to 1 | "
        f"--set {NAME}.slice=10485760  # elements of a shard that travel at a time"
    ]
    assert refusals(NAME, settings={NAME: {"slice": 1}}) == []


def test_adam_in_one_instance_is_accepted() -> None:
    built()


@pytest.mark.parametrize(
    ("optimizer", "refusal"),
    [
        ({"optimizer": "sgd"}, "the optimizer sgd has other states than exp_avg and exp_avg_sq"),
        ({"instances": 2}, "2 instances of the distributed optimizer have copies of one shard"),
        ({"fsdp": True}, "Megatron FSDP has no shards in buffers"),
    ],
)
def test_an_optimizer_with_other_shards_is_refused(optimizer: dict[str, Any], refusal: str) -> None:
    with pytest.raises(MindSpeedError) as error:
        built(**optimizer)
    assert str(error.value) == f"MS304 {NAME}: {refusal}\n  fix: remove {NAME}"


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
