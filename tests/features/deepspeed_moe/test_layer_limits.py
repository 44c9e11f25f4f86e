"""What the layer refuses when it is called, which no plan and no configuration shows."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mindspeed.features.deepspeed_moe.layers import CapacityMoELayer
from mindspeed.moe.capacity import CapacityOptions
from mindspeed.plugins import MindSpeedError


@pytest.mark.parametrize(
    ("inputs", "what"),
    [
        ({"padding_mask": torch.ones(1)}, "a padding mask"),
        ({"intermediate_tensors": ()}, "parts of a layer captured as CUDA graphs"),
    ],
)
def test_inputs_that_the_gate_does_not_have_are_refused(inputs: dict[str, Any], what: str) -> None:
    layer: Any = SimpleNamespace(moe_layer_recompute=False, run=lambda x: x)
    assert CapacityMoELayer.forward(layer, torch.zeros(1)) == (torch.zeros(1), None)
    with pytest.raises(MindSpeedError) as error:
        CapacityMoELayer.forward(layer, torch.zeros(1), **inputs)
    assert str(error.value) == (
        f"MS304 deepspeed-moe: a MoE layer received {what}, which the gate does not support\n  fix: remove deepspeed-moe"
    )


@pytest.mark.parametrize(
    ("groups", "ranks", "tokens", "chunks", "mine"),
    [(None, 2, 12, 1, 1), (4, 2, 12, 1, 2), (4, 2, 6, 2, 1), (3, 2, 12, 1, None), (4, 1, 10, 1, None), (2, 1, 12, 4, None)],
)
def test_groups_of_a_rank_are_equal_shares_of_its_tokens(
    groups: int | None, ranks: int, tokens: int, chunks: int, mine: int | None
) -> None:
    group = SimpleNamespace(size=lambda: ranks)
    layer: Any = SimpleNamespace(router=SimpleNamespace(tp_cp_group=group), options=CapacityOptions(groups=groups))
    if mine is not None:
        assert CapacityMoELayer.groups(layer, tokens, chunks) == mine
        return
    with pytest.raises(MindSpeedError) as error:
        CapacityMoELayer.groups(layer, tokens, chunks)
    assert str(error.value) == (
        f"MS304 deepspeed-moe: groups={groups} cannot split the {tokens * ranks * chunks} tokens of a micro-batch. The number "
        f"of groups must divide the tokens, and must be a multiple of {ranks} x {chunks} (tensor- and context-parallel ranks x "
        "token chunks per rank)\n"
        f"  fix: --set deepspeed-moe.groups={ranks * chunks}"
    )
