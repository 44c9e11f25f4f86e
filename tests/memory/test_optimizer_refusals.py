from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mindspeed.memory.optimizer_refusals import config_refusals, optimizer_refusals

CONFIG = {"optimizer": "adam", "use_precision_aware_optimizer": False, "optimizer_cpu_offload": False, "bf16": True}


def optimizer(*, sharded: bool = False, **config: Any) -> Any:
    member = SimpleNamespace(ddp_config=SimpleNamespace(use_megatron_fsdp=sharded))
    return SimpleNamespace(config=SimpleNamespace(**CONFIG | config), chained_optimizers=[member])


class LayerWiseDistributedOptimizer(SimpleNamespace):
    pass


@pytest.mark.parametrize("config", [{}, {"optimizer": "sgd"}, {"bf16": False}])
def test_elementwise_optimizers_are_accepted(config: dict[str, Any]) -> None:
    assert optimizer_refusals(optimizer(**config)) == []


@pytest.mark.parametrize(
    ("config", "refusal"),
    [
        ({"optimizer": "muon"}, "the optimizer muon does not update each element by itself"),
        ({"use_precision_aware_optimizer": True}, "the precision-aware optimizer keeps main weights by itself"),
        ({"optimizer_cpu_offload": True}, "optimizer_cpu_offload keeps main weights and states on the host by itself"),
        (
            {"reuse_grad_buf_for_mxfp8_param_ag": True},
            "the mxfp8 weights of reuse_grad_buf_for_mxfp8_param_ag are made from all main weights",
        ),
        ({"sharded": True}, "Megatron FSDP keeps main weights by itself"),
    ],
)
def test_optimizers_that_windows_do_not_fit_are_refused(config: dict[str, Any], refusal: str) -> None:
    assert optimizer_refusals(optimizer(**config)) == [refusal]


def test_layer_wise_optimizers_are_refused() -> None:
    made = LayerWiseDistributedOptimizer(config=SimpleNamespace(**CONFIG), chained_optimizers=[])
    assert optimizer_refusals(made) == ["the optimizer adam does not update each element by itself"]


@pytest.mark.parametrize("config", [{}, {"qk_clip": False}, {"fp8": "e4m3", "fp8_param": False}])
def test_configurations_are_accepted(config: dict[str, Any]) -> None:
    assert config_refusals(SimpleNamespace(**config)) == []


@pytest.mark.parametrize(
    ("config", "refusal"),
    [
        ({"qk_clip": True}, "QK clipping writes main weights between steps"),
        ({"fp8": "e4m3", "fp8_param": True}, "fp8 weights have no bf16 form"),
        ({"fp4": "e2m1", "fp4_param": True}, "fp4 weights have no bf16 form"),
    ],
)
def test_configurations_with_other_weights_are_refused(config: dict[str, Any], refusal: str) -> None:
    assert config_refusals(SimpleNamespace(**config)) == [refusal]
