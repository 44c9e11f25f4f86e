"""Models that a list of operations cannot run with."""

from __future__ import annotations

from torch import nn

from mindspeed.pipeline.refusals import can_place_v, model_refusals


def a_class(name: str, module: str) -> type[nn.Linear]:
    return type(name, (nn.Linear,), {"__module__": module})


def test_layers_of_transformer_engine_are_refused_and_norms_and_plain_layers_are_not() -> None:
    package = "megatron.core.extensions.transformer_engine"
    linear, norm = a_class("TERowParallelLinear", package), a_class("TENorm", package)
    assert model_refusals([nn.Sequential(nn.Linear(2, 2), norm(2, 2))]) == set()
    assert model_refusals([nn.Sequential(linear(2, 2), linear(2, 2))]) == {
        "the model has TERowParallelLinear: linear layers of Transformer Engine compute both gradients at once"
    }


def test_fully_sharded_parameters_are_refused_and_data_parallel_ones_are_not() -> None:
    reason = "fully sharded parameters are gathered in the order of Megatron's schedule"
    for name, module in (
        ("FullyShardedDataParallel", "megatron.core.distributed.fsdp.mcore_fsdp_adapter"),
        ("TorchFullyShardedDataParallel", "megatron.core.distributed.torch_fully_sharded_data_parallel"),
    ):
        assert model_refusals([a_class(name, module)(2, 2)]) == {f"the model has {name}: {reason}"}
    assert (
        model_refusals([a_class("DistributedDataParallel", "megatron.core.distributed.distributed_data_parallel")(2, 2)])
        == set()
    )


def test_a_v_is_placed_where_megatron_asks_by_chunk() -> None:
    versions = ("0.12.1", "0.14.0", "0.16.1", "0.18.2", "0.19.0")
    assert [can_place_v(version) for version in versions] == [False, True, True, True, False]
